"""Running a simulation: worlds one after the other, each kept under the hash of what defines it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ablations.simulate._engine import Lane, Outcome, evaluation_steps, run_lanes
from ablations.simulate._preset import Simulation
from ablations.simulate._result import Effect, WorldResult, effects, final_risk, rows, tuned_at, world_result
from traces.errors import GradreelError

if TYPE_CHECKING:
    import polars as pl

#: Raised when the same definition would give other numbers, so that kept outcomes of before are not taken.
ARITHMETIC = 1


@dataclass(frozen=True)
class SimulationResult:
    """`frame` holds every number (see `_result.rows`), `effects` the comparisons, `notes` what to be wary of."""

    simulation: Simulation
    frame: pl.DataFrame
    effects: list[Effect]
    worlds: list[WorldResult]
    notes: list[str]
    provenance: dict[str, Any]
    path: Path | None

    def effect(self, world: str, arm: str, way: str = "tuned") -> Effect:
        """One comparison."""
        for each in self.effects:
            if (each.world, each.arm, each.way) == (world, arm, way):
                return each
        raise GradreelError(f"no comparison of {arm!r} in world {world!r}, {way}; see .effects for what there is")


def simulate(
    simulation: str | Simulation,
    *,
    out: str | Path | None = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> SimulationResult:
    """Run a simulation by name or by its object; a closed loop on token-level linear experts.

    `out` is a folder: the Frame (`frame.parquet`), `provenance.json`, and one file a world under `worlds/`, by which a
    run that was broken off goes on. The numbers depend on the simulation alone, not on `threads`, nor on what was kept.
    """
    from ablations.simulate.presets import SIMULATIONS
    from toolkit.frame import FrameWriter, conform, write_frame
    from traces.console import progress_bar

    chosen = SIMULATIONS.get(simulation) if isinstance(simulation, str) else simulation
    if not isinstance(chosen, Simulation):
        raise GradreelError(f"a simulation is a name or a Simulation, not {type(simulation).__name__}")
    folder = None if out is None else _folder(Path(out))
    each = (len(chosen.seeds) * 2 + len(chosen.tuning_seeds)) * next(iter(chosen.worlds.values())).experts
    found = []
    with progress_bar(
        f"simulate {chosen.name}", sum(each for _ in chosen.worlds), "expert runs", wanted=progress
    ) as bar:
        for label in chosen.worlds:
            found.append(_one_world(chosen, label, folder, threads, bar))
    with FrameWriter() as writer:
        writer.write(rows(chosen, found))
        frame = conform(writer.close().collect(), "the frame")
    notes = _notes(chosen, found)
    provenance = {**chosen.to_dict(), "versions": _versions(), "notes": notes, "arithmetic": ARITHMETIC}
    if folder is not None:
        write_frame(folder / "frame.parquet", frame, provenance)
        _write_aside(folder / "provenance.json", (json.dumps(provenance, indent=1, default=str) + "\n").encode())
    return SimulationResult(chosen, frame, effects(chosen, found), found, notes, provenance, folder)


def _one_world(
    chosen: Simulation, label: str, folder: Path | None, threads: int | None, bar: Callable[[int], None]
) -> WorldResult:
    world = chosen.worlds[label]
    lanes = [Lane(recipe, lr) for arm, recipe in chosen.arms.items() for lr in chosen.rates_of(arm)]
    main = _kept(folder, chosen, label, lanes, (*chosen.tuning_seeds, *chosen.seeds), threads, bar)
    risks, tuned, start = final_risk(world, main), {}, 0
    for arm in chosen.arms:
        count = len(chosen.rates_of(arm))
        tuned[arm] = tuned_at(risks[start : start + count, : len(chosen.tuning_seeds)])
        start += count
    shared = chosen.rates_of(chosen.baseline)[tuned[chosen.baseline]]
    both = [Lane(recipe, shared, matched) for recipe in chosen.arms.values() for matched in (True, False)]
    matched = _kept(folder, chosen, label, both, chosen.seeds, threads, bar)
    return world_result(chosen, label, main, matched, tuned)


def _kept(
    folder: Path | None, chosen: Simulation, label: str, lanes: list[Lane], seeds: tuple[int, ...],
    threads: int | None, bar: Callable[[int], None],
) -> Outcome:  # fmt: skip
    """The outcome from an earlier run where one is kept whole, else from a run now."""
    world = chosen.worlds[label]
    named = [[lane.recipe, lane.lr, lane.matched] for lane in lanes]
    text = json.dumps([ARITHMETIC, world.to_dict(), named, seeds], sort_keys=True)
    steps = evaluation_steps(world)
    file = None if folder is None else folder / "worlds" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.npy"
    shape = (len(lanes), len(seeds), world.experts, steps.size, 3)
    if file is not None and file.is_file():
        try:
            values = np.load(file, allow_pickle=False)
        except (OSError, ValueError):
            values = np.empty(0)
        if values.shape == shape and values.dtype == np.float64:
            bar(len(seeds) * world.experts)
            return Outcome(steps, values, None)
    outcome = run_lanes(world, lanes, seeds, threads=threads, on_done=bar)
    if file is not None:
        from io import BytesIO

        memory = BytesIO()
        np.save(memory, outcome.values, allow_pickle=False)
        _write_aside(file, memory.getvalue())
    return outcome


def _folder(path: Path) -> Path:
    try:
        (path / "worlds").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradreelError(f"cannot write to {str(path)!r}: {error.strerror or error}; name a folder") from None
    return path


def _write_aside(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise GradreelError(
            f"cannot write {str(path)!r}: {error.strerror or error}; free space and run again"
        ) from None


def _notes(chosen: Simulation, found: list[WorldResult]) -> list[str]:
    notes = []
    for arm in chosen.arms:
        edges = [result.label for result in found if result.edge[arm]]
        if edges:
            shown = "; ".join(edges[:3]) + ("; .." if len(edges) > 3 else "")
            notes.append(
                f"the tuned lr of {arm} lies on the edge of its grid in {len(edges)} of {len(found)} worlds ({shown})"
            )
    return notes


def _versions() -> dict[str, str]:
    from toolkit.replay._provenance import versions

    return versions()
