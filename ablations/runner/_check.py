"""A preset's runs made again and held against the reference results that are kept with the code."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ablations.presets import Ablation
from ablations.runner._execute import DELTA_RMS, VALID_LOSS
from ablations.runner._plan import Plan
from ablations.runner._results import FRAME_FILE, PROVENANCE_FILE
from ablations.runner._run import execute_specs
from ablations.runner._spec import Finished, RunSpec
from ablations.runner._store import locked, remove_remains, write_aside
from traces.errors import GradreelError

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
REPORT_FILE = "report.md"
#: Equal bits; no further apart than runs of other seeds are; further apart, or another outcome.
EQUAL, NOISE, DIFFERS = "equal", "within noise", "differs"
_NOISE_FACTOR = 2.0
_MOVES_EVERY = 50


@dataclass(frozen=True)
class Checked:
    """One run against its reference: the two final losses (None: diverged or failed) and what that means."""

    id: str
    arm: str
    seed: int
    lr: float
    reference: float | None
    now: float | None
    outcome: str
    reason: str = ""

    @property
    def line(self) -> str:
        """The run in a line."""
        shown = [("-" if v is None else f"{v:.6f}") for v in (self.reference, self.now)]
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.arm}, lr {self.lr:g}, seed {self.seed}: {shown[0]} -> {shown[1]}: {self.outcome}{why}"


def reference_folder(preset: str, size: str = "cpu") -> Path:
    """Where the reference results of a preset and size are kept."""
    return REFERENCE / (preset if size == "cpu" else f"{preset}-{size}")


def reference_provenance(preset: str, size: str) -> dict[str, Any]:
    """What is known of the reference runs. Errors: GradreelError where there are none."""
    file = reference_folder(preset, size) / PROVENANCE_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = sorted(folder.name for folder in REFERENCE.glob("*") if (folder / PROVENANCE_FILE).is_file())
        raise GradreelError(
            f"preset {preset} has no reference results at size {size}; there are: {', '.join(there) or 'none'}. Run it "
            f"and keep its results with: gradreel check {preset} --size {size} --adopt FOLDER"
        ) from None
    except (OSError, ValueError) as error:
        raise GradreelError(f"reference {str(file)!r} cannot be read: {error}") from None
    return dict(found)


def check(
    preset: Ablation,
    size: str,
    root: Path,
    *,
    sample: int | None = None,
    executor: str = "local",
    workers: int = 2,
    progress: Callable[[int], None] | None = None,
) -> list[Checked]:
    """Make the reference's runs again in `root` and compare their final losses, run by run.

    `sample` makes only that many, those with the smallest ids, so that the same ones are chosen every time; a matched
    run brings the run whose sizes it takes over. Errors: GradreelError where the preset now asks for other runs.
    """
    known = reference_provenance(preset.name, size)
    table: dict[str, dict[str, Any]] = known["table"]
    specs = _specs_of(preset, size, table)
    chosen = _sample(specs, sample)
    made: dict[str, Finished] = {}
    failed: dict[str, str] = {}
    with locked(root):
        remove_remains(root)
        for matched in (False, True):
            part = [spec for spec in chosen if (spec.matched is not None) == matched]
            done, lost = execute_specs(
                part, root, executor=executor, workers=workers, advance=progress or (lambda n: None)
            )
            made.update(done)
            failed.update(lost)
    noise = _seed_noise(table)
    return [_compare(spec, table[spec.id], made.get(spec.id), failed.get(spec.id), noise) for spec in chosen]


def adopt(preset: str, size: str, results: Path, *, report: str) -> Path:
    """Keep the results in the folder `results` as the reference: few rows of its frame, its provenance, its report.

    What `gradreel study` found for them is kept as well.
    """
    from ablations.study._agreement import REPLAY_FILE
    from toolkit.frame import read_frame, write_frame

    frame = read_frame(results / FRAME_FILE)
    provenance = json.loads((results / PROVENANCE_FILE).read_text(encoding="utf-8"))
    if provenance.get("preset") != preset:
        raise GradreelError(f"{str(results)!r} holds results of preset {provenance.get('preset')}, not of {preset}")
    kept = frame.filter(
        (pl.col("metric") == VALID_LOSS)
        | pl.col("step").is_null()
        | ((pl.col("metric") == DELTA_RMS) & ((pl.col("step") - 1) % _MOVES_EVERY == 0))
    )
    folder = reference_folder(preset, size)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_frame(folder / FRAME_FILE, kept)
    write_aside(folder / PROVENANCE_FILE, json.dumps(provenance, indent=1) + "\n")
    write_aside(folder / REPORT_FILE, report)
    if (results / REPLAY_FILE).is_file():
        shutil.copyfile(results / REPLAY_FILE, folder / REPLAY_FILE)
    return folder


def _specs_of(preset: Ablation, size: str, table: Mapping[str, Mapping[str, Any]]) -> list[RunSpec]:
    """The runs that the preset asks for, given what the reference's runs gave."""
    plan = Plan(preset, preset.size(size))
    # Only what later stages look at: whether and how well a run ended.
    known = {
        run_id: Finished(run_id, {}, entry["final_loss"], entry["diverged_at"], "", "")
        for run_id, entry in table.items()
    }
    plan.first()
    plan.second(known)
    plan.third(known)
    specs = plan.specs()
    lacking = [spec.id for spec in specs if spec.id not in table]
    if lacking:
        raise GradreelError(
            f"preset {preset.name} at size {size} now asks for {len(lacking)} runs that its reference lacks, "
            f"{lacking[0]} for instance: it changed since; run it again and keep the results with --adopt"
        )
    return specs


def _sample(specs: list[RunSpec], sample: int | None) -> list[RunSpec]:
    if sample is None:
        return specs
    if sample < 1:
        raise GradreelError(f"sample is {sample}; allowed: at least 1")
    picked = {spec.id for spec in sorted(specs, key=lambda spec: spec.id)[:sample]}
    picked |= {spec.matched for spec in specs if spec.id in picked and spec.matched is not None}
    return [spec for spec in specs if spec.id in picked]


def _seed_noise(table: Mapping[str, Mapping[str, Any]]) -> float:
    """The standard deviation over seeds of runs that differ in nothing else, pooled over all that have several."""
    groups: dict[tuple[str, float, str], list[float]] = {}
    for entry in table.values():
        if entry["final_loss"] is not None:
            key = (entry["arm"], entry["lr"], "matched" if entry["matched"] else "")
            groups.setdefault(key, []).append(entry["final_loss"])
    several = [np.var(values, ddof=1) for values in groups.values() if len(values) > 1]
    return math.sqrt(float(np.mean(several))) if several else 0.0


def _compare(
    spec: RunSpec, entry: Mapping[str, Any], run: Finished | None, failed: str | None, noise: float
) -> Checked:
    before, now = entry["final_loss"], None if run is None else run.final_loss

    def outcome(word: str, reason: str = "") -> Checked:
        return Checked(spec.id, entry["arm"], spec.seed, spec.lr, before, now, word, reason)

    if run is None:
        return outcome(DIFFERS, f"it failed: {failed}")
    if run.batches_sha256 != entry["batches_sha256"]:
        return outcome(DIFFERS, "it saw other data, such as another Python's library")
    if run.weights_sha256 != entry["weights_sha256"]:
        return outcome(DIFFERS, "it began with other weights")
    if now == before and run.diverged_at == entry["diverged_at"]:
        return outcome(EQUAL)
    if now is None or before is None:
        return outcome(DIFFERS, "one of them diverged")
    gap = abs(now - before)
    within = gap <= _NOISE_FACTOR * noise
    return outcome(NOISE if within else DIFFERS, f"{gap:.1e} apart; seeds differ by {noise:.1e}")
