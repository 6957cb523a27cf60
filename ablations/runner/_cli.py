"""What `gradreel run` prints."""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ablations.presets import Ablation, Size
from ablations.runner._plan import GRID, Plan
from ablations.runner._results import Results
from traces.console import out, say
from traces.errors import GradreelError

_MEASURED_STEPS = 3


def parse_changes(pairs: Sequence[str] | None) -> dict[str, Any]:
    """`["steps=100", "grid=(1e-3, 3e-3)"]` -> values; a value is a Python literal or a bare word."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        name, mark, text = pair.partition("=")
        if not mark or not name or not text:
            raise GradreelError(f"--set {pair!r} is not NAME=VALUE; write --set steps=100 or --set model.top_k=2")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
        if isinstance(found[name], list):
            found[name] = tuple(found[name])
    return found


def print_plan(preset: Ablation, size: Size, root: Path, workers: int) -> None:
    """The runs, their steps and what they would cost, from a few steps measured now."""
    from rich.table import Table

    from ablations.runner._store import finished

    plan = Plan(preset, size)
    first = plan.first()
    there = sum(finished(root, spec.id) is not None for spec in first)
    table = Table("setting", "arm", "recipe", "lr grid", box=None, pad_edge=False)
    for setting, arm, own in plan.arms():
        rates = ", ".join(f"{lr:g}" for lr in own.rates(arm))
        table.add_row(setting or "-", arm, preset.expression(arm, own), rates)
    console = out()
    console.print(preset.question, markup=False)
    console.print(table)
    most = plan.most_runs()
    seconds = sum(_seconds_per_run(preset, size.under(setting)) for setting in size.settings) / len(size.settings)
    grid = sum(len(specs) for cell, specs in plan.cells.items() if cell.way == GRID)
    console.print(
        f"runs: at most {most} of {size.steps} steps ({grid} of them the lr grid); ways: {', '.join(preset.ways)}; "
        f"seeds: {', '.join(map(str, size.seeds))}; shared lr {size.shared_lr:g}",
        markup=False,
    )
    console.print(f"of the first {len(first)}, {there} are finished in {root}", markup=False)
    console.print(
        f"about {seconds:.0f} s a run, {most * seconds / workers / 60:.0f} minutes with {workers} workers, measured "
        f"over {_MEASURED_STEPS} steps here and now",
        markup=False,
    )


def _seconds_per_run(preset: Ablation, size: Size) -> float:
    """An estimate from a few steps of the baseline, one evaluation left out."""
    import torch

    from ablations.data import open_data
    from ablations.models import build_model
    from ablations.train import train, window_losses
    from toolkit.optim import make_optimizer
    from toolkit.variants import recipe

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        text = open_data(size.data.source, size.data.options)
        torch.manual_seed(0)
        model, call = build_model(size.model)
        model.to(size.device)
        built = recipe(preset.expression(preset.baseline, size), lr=size.shared_lr)
        optimizer = make_optimizer(model, built, hidden_momentum="apart")

        def batches(step: int, micro_step: int) -> dict[str, torch.Tensor]:
            batch = text.batch(0, step, size.batch, size.length, micro_step)
            return {name: value.to(size.device) for name, value in batch.items()}

        options: dict[str, Any] = {"clip": size.clip, "accumulation": size.accumulation, "call": call}
        train(model, optimizer, batches, 1, **options)
        began = time.perf_counter()
        train(model, optimizer, batches, _MEASURED_STEPS, **options)
        per_step = (time.perf_counter() - began) / _MEASURED_STEPS
        part = [
            {n: v.to(size.device) for n, v in b.items()} for b in text.valid_batches(1, size.eval_batch, size.length)
        ]
        began = time.perf_counter()
        window_losses(model, part, call=call)
        per_batch = time.perf_counter() - began
    finally:
        torch.set_num_threads(threads)
    passes = size.eval_batches * (1 + (size.evaluations - 1) / 4)
    return per_step * size.steps + per_batch * passes


def print_results(results: Results) -> None:
    """Verdicts by way, then notes, then where the files are."""
    console = out()
    way = None
    for verdict in results.verdicts:
        if verdict.way != way:
            way = verdict.way
            console.print(f"\n{way}:", markup=False)
        console.print(f"  {verdict.sentence}", markup=False, soft_wrap=True)
    console.print("")
    failed = results.failed or {}
    for note in results.notes[: len(results.notes) - len(failed)]:  # failures were told when they happened
        say(note)
    console.print(f"Frame: {results.path / 'frame.parquet'}", markup=False, soft_wrap=True)
    console.print(f"Next: gradreel report {results.path}", markup=False, soft_wrap=True)


def as_text(changes: Mapping[str, Any]) -> str:
    """`changes` for a folder's name."""
    return "".join(f"+{name}={value}" for name, value in sorted(changes.items()))


def run_check(preset: str, size: str, root: Path, executor: str, workers: int, sample: int | None) -> None:
    """Make the reference's runs again, print how they compare; raises `CheckFailed` where one differs."""
    from ablations.presets import load_preset
    from ablations.runner._check import DIFFERS, check, reference_provenance
    from traces.console import CheckFailed, progress_bar

    table = reference_provenance(preset, size)["table"]
    experiment = load_preset(preset)
    count = len(table) if sample is None else min(sample, len(table))
    with progress_bar(f"check {preset}", count * experiment.size(size).steps) as advance:
        found = check(experiment, size, root, sample=sample, executor=executor, workers=workers, progress=advance)
    console = out()
    for one in found:
        console.print(one.line, markup=False, soft_wrap=True)
    counts = {word: sum(one.outcome == word for one in found) for word in ("equal", "within noise", DIFFERS)}
    summary = ", ".join(f"{number} {word}" for word, number in counts.items())
    console.print(f"{len(found)} of {len(table)} reference runs made again: {summary}", markup=False)
    if counts[DIFFERS]:
        raise CheckFailed(f"check {preset}: {counts[DIFFERS]} of {len(found)} runs differ from the reference")


def adopt_results(preset: str, size: str, folder: Path) -> None:
    """Keep the results in `folder` as the preset's reference, with their report."""
    import json

    from ablations.report import as_markdown
    from ablations.runner._check import adopt
    from ablations.runner._results import FRAME_FILE, PROVENANCE_FILE
    from ablations.study._agreement import REPLAY_FILE
    from toolkit.frame import read_frame

    try:
        provenance = json.loads((folder / PROVENANCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise GradreelError(
            f"{str(folder)!r} holds no results of an experiment; give the folder that `run` filled"
        ) from None
    replayed = read_frame(folder / REPLAY_FILE) if (folder / REPLAY_FILE).is_file() else None
    report = as_markdown(read_frame(folder / FRAME_FILE), provenance, replayed)
    console = out()
    console.print(f"Reference: {adopt(preset, size, folder, report=report)}", markup=False, soft_wrap=True)
