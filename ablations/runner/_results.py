"""All runs of an experiment as one Frame, and what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from ablations.presets import WAYS
from ablations.runner._execute import DELTA_RMS, VALID_LOSS
from ablations.runner._plan import GRID, Cell, Plan, arm_label
from ablations.runner._run import Made
from ablations.runner._spec import Finished, RunSpec
from ablations.runner._store import read_run_frame, write_aside
from ablations.stats import Paired, compare
from traces.errors import GradreelError

FRAME_FILE, PROVENANCE_FILE = "frame.parquet", "provenance.json"
#: Metrics of the one Frame that say what a run is: its experts' peak lr, and the comparisons it belongs to.
PEAK_LR = "peak_lr"
DIFFERENCE = "paired_difference"
LOSS_EVERY = 10


@dataclass(frozen=True)
class Verdict:
    """What one way of comparing says about one arm under one setting; `way` is one of `WAYS`."""

    way: str
    setting: str
    paired: Paired
    lr: float | None
    baseline_lr: float | None

    @property
    def sentence(self) -> str:
        """The verdict in a sentence with its numbers."""
        found = self.paired
        where = f" under {self.setting}" if self.setting else ""
        head = (
            f"{found.arm}{where} is {found.verdict}"
            if found.verdict != "not decided"
            else (f"{found.arm}{where}: not decided")
        )
        if found.mean is None:
            return f"{head}: {found.reason}"
        interval = "" if found.low is None else f" [{found.low:+.4f}, {found.high:+.4f}]"
        return f"{head}: {found.mean:+.4f}{interval} nats against {found.baseline}, {_HOW[self.way]}; {found.reason}"


_HOW = {
    "shared": "all at the shared lr",
    "tuned": "each at its own best lr",
    "matched": "with the baseline's sizes of weight change",
}


@dataclass(frozen=True)
class Results:
    """What `run` gives: the Frame, the verdicts, where all of it came from, and the folder it lies in."""

    frame: pl.DataFrame
    verdicts: tuple[Verdict, ...]
    provenance: Mapping[str, Any]
    path: Path
    notes: tuple[str, ...] = ()
    failed: Mapping[str, str] | None = None


def gather(made: Made, root: Path, size: str = "cpu") -> Results:
    """Put the runs together; the same runs give the same Frame, whatever order they were made in."""
    plan = made.plan
    verdicts = tuple(verdicts_of(plan, made.runs))
    parts = [_frame_of(cells, spec, made, root) for cells, spec in _runs_by_arm(plan)]
    frame = pl.concat([*parts, _differences(plan, verdicts)])
    notes = (*plan.notes, *(f"run {run_id} failed: {why}" for run_id, why in made.failed.items()))
    return Results(
        frame, verdicts, _provenance(made, notes, verdicts) | {"size_name": size}, root, notes, dict(made.failed)
    )


def write_results(results: Results) -> None:
    """Write frame.parquet and provenance.json into the results' folder."""
    from toolkit.frame import write_frame

    try:
        write_frame(results.path / FRAME_FILE, results.frame, results.provenance)
        write_aside(results.path / PROVENANCE_FILE, json.dumps(results.provenance, indent=1) + "\n")
    except OSError as error:
        raise GradreelError(
            f"cannot write the results into {str(results.path)!r}: {error.strerror or error}; finished runs are kept, "
            "so make room and run again"
        ) from None


def _runs_by_arm(plan: Plan) -> list[tuple[list[Cell], RunSpec]]:
    """Every run once per arm it serves, with its cells, in a fixed order."""
    found: dict[tuple[str, str], tuple[list[Cell], RunSpec]] = {}
    for cell, specs in plan.cells.items():
        for spec in specs:
            found.setdefault((cell.label, spec.id), ([], spec))[0].append(cell)
    order = {arm_label(setting, arm): n for n, (setting, arm, _) in enumerate(plan.arms())}
    ways = (GRID, *WAYS)
    return sorted(
        found.values(),
        key=lambda item: (
            order[item[0][0].label],
            item[1].matched is not None,
            item[1].lr,
            item[1].seed,
            ways.index(item[0][0].way),
        ),
    )


def _frame_of(cells: list[Cell], spec: RunSpec, made: Made, root: Path) -> pl.DataFrame:
    """The rows of a run under its arm's name, with those that say what it is."""
    from toolkit.frame import FrameWriter

    label = cells[0].label
    constants = {"run": spec.id, "arm": label, "seed": spec.seed, "recipe": spec.recipe}
    about: list[dict[str, Any]] = [{"metric": PEAK_LR, "value": spec.lr, "unit": "1"}]
    about += [{"metric": f"in_{way}", "value": 1.0, "unit": "count"} for way in sorted({c.way for c in cells})]
    if spec.id in made.failed or spec.id not in made.runs:
        about.append({"metric": VALID_LOSS, "value": None, "flag": "failed", "unit": "nats"})
    with FrameWriter(constants=constants) as writer:
        writer.write(about)
        head = writer.close().collect()
    if spec.id not in made.runs:
        return head
    rows = read_run_frame(root, spec.id)
    # Losses of single steps are thinned: a curve needs no more, and the one Frame stays small.
    thin = (
        pl.col("metric").is_in(["loss", DELTA_RMS]) & ((pl.col("step") - 1) % LOSS_EVERY != 0) & (pl.col("flag") == "")
    )
    rows = rows.filter(~thin).with_columns(arm=pl.lit(label))
    return pl.concat([head.with_columns(recipe=pl.lit(rows["recipe"][0])), rows])


def _differences(plan: Plan, verdicts: Iterable[Verdict]) -> pl.DataFrame:
    """The paired differences as rows: `run` is the way of comparing; without a seed, the ends of the interval."""
    from toolkit.frame import FrameWriter

    with FrameWriter(constants={"unit": "nats"}) as writer:
        for verdict in verdicts:
            found = verdict.paired
            recipe = plan.preset.expression(found.arm, plan.size)
            about = {"run": verdict.way, "arm": arm_label(verdict.setting, found.arm), "recipe": recipe}
            rows: list[dict[str, Any]] = [
                {"metric": DIFFERENCE, "seed": seed, "value": value}
                for seed, value in zip(found.seeds, found.differences, strict=True)
            ]
            ends = (("low", found.low), ("high", found.high))
            rows += [{"metric": f"{DIFFERENCE}_{end}", "value": value} for end, value in ends if value is not None]
            writer.write({**about, **row} for row in rows)
        return writer.close().collect()


def verdicts_of(plan: Plan, runs: Mapping[str, Finished]) -> Iterator[Verdict]:
    """One verdict per way, setting and arm."""
    baseline = plan.preset.baseline
    for way in plan.preset.ways:
        for setting in plan.size.settings:
            cells = {c: s[0] for c, s in plan.cells.items() if c.way == way and c.setting == setting}
            ended = {c: runs[s.id] for c, s in cells.items() if s.id in runs}
            losses: dict[str, dict[int, float | None]] = {}
            windows: dict[str, dict[int, tuple[float, ...]]] = {}
            for cell, run in ended.items():
                losses.setdefault(cell.arm, {})[cell.seed] = run.final_loss
                windows.setdefault(cell.arm, {})[cell.seed] = run.window_losses
            rates = {c.arm: s.lr for c, s in cells.items()}
            if baseline not in losses:
                continue
            for paired in compare(losses, baseline, plan.preset.threshold, windows):
                matched = way == "matched"
                yield Verdict(way, setting, paired, None if matched else rates[paired.arm], rates.get(baseline))


def _provenance(made: Made, notes: tuple[str, ...], verdicts: tuple[Verdict, ...]) -> dict[str, Any]:
    plan = made.plan
    used = [made.runs[spec.id] for spec in plan.specs() if spec.id in made.runs]
    machines = _distinct(run.provenance for run in used)
    return {
        "kind": "ablation",
        **plan.preset.to_dict(),
        "size": plan.size.to_dict(),
        "runs": len(used),
        "table": {spec.id: _entry(plan, spec, made.runs[spec.id]) for spec in plan.specs() if spec.id in made.runs},
        "failed": dict(made.failed),
        "run_seconds": round(sum(run.seconds for run in used), 1),
        "data": _distinct(run.data for run in used),
        "made_by": machines,
        "verdicts": [verdict_dict(verdict) for verdict in verdicts],
        "tuning": {
            arm_label(*key): {
                "best": t.best,
                "edge": t.edge,
                "losses": {f"{lr:g}": v if math.isfinite(v) else None for lr, v in t.losses.items()},
            }
            for key, t in plan.tuning.items()
        },
        "notes": list(notes),
    }


def _entry(plan: Plan, spec: RunSpec, run: Finished) -> dict[str, Any]:
    """What a check needs to know of a run."""
    return {
        "arm": next(cell.label for cell, specs in plan.cells.items() if spec in specs),
        "seed": spec.seed,
        "lr": spec.lr,
        "matched": spec.matched,
        "final_loss": run.final_loss,
        "diverged_at": run.diverged_at,
        "weights_sha256": run.weights_sha256,
        "batches_sha256": run.batches_sha256,
        "seconds": run.seconds,
    }


def _distinct(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value and value not in found:
            found.append(dict(value))
    return found


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain values for JSON."""
    return {
        "way": verdict.way,
        "setting": verdict.setting,
        "lr": verdict.lr,
        "baseline_lr": verdict.baseline_lr,
        "sentence": verdict.sentence,
        **asdict(verdict.paired),
    }
