"""Running experiments: what is to be made, who makes it, and what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablations.presets import Ablation
    from ablations.runner._results import Results


def run(
    preset: str | Ablation,
    size: str = "cpu",
    *,
    out: str | Path | None = None,
    executor: str = "local",
    workers: int = 2,
    arms: Sequence[str] | None = None,
    seeds: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Results:
    """Make the runs of an experiment that are missing, put all of them together, and say which arms are better.

    `out` is the folder of the runs (default `runs/PRESET-SIZE`); runs that are finished in it are kept, so an
    interrupted experiment goes on where it was. `arms` and `seeds` cut it down, `changes` change entries of the size
    (`{"steps": 100, "model.num_experts": 16}`). A run that diverges or fails is a row, and the others go on. Errors:
    GradreelError for unknown names and values out of range, for a folder that another process fills, and for arms of
    one seed that did not begin equal.
    """
    from ablations.runner._results import gather, write_results
    from ablations.runner._run import chosen, make_runs
    from traces.errors import GradreelError

    experiment, wanted = chosen(preset, size, arms=arms, seeds=seeds, changes=changes)
    root = Path(out) if out is not None else Path("runs") / f"{experiment.name}-{size}"
    made = make_runs(experiment, wanted, root, executor=executor, workers=workers)
    if not made.runs:
        why = next(iter(made.failed.values()))
        raise GradreelError(f"no run of {experiment.name} at size {size} could be made: {why}")
    results = gather(made, root, size)
    write_results(results)
    return results


__all__ = ["run"]
