"""The verbs of experiments, `run` and `check`, and their report; the work is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traces.console import example

PresetArgument = Annotated[
    str, typer.Argument(metavar="PRESET", help="See `gradreel list presets`.", show_default=False)
]
SizeOption = Annotated[str, typer.Option(metavar="SIZE", help="cpu (minutes), gpu (hours) or paper.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Where runs are kept; default: runs/PRESET-SIZE.")
]
ExecutorOption = Annotated[str, typer.Option(metavar="NAME", help="Where runs are made: local, ...")]
WorkersOption = Annotated[int, typer.Option(min=1, help="Runs that are made at once.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to a command-line application."""
    app.command(epilog=example("gradreel run mesh_what_failed --size cpu"))(run)
    app.command(epilog=example("gradreel check mesh_what_failed --sample 2"))(check)


def run(
    preset: PresetArgument,
    size: SizeOption = "cpu",
    out: OutOption = None,
    executor: ExecutorOption = "local",
    workers: WorkersOption = 2,
    arm: Annotated[
        list[str] | None, typer.Option("--arm", metavar="NAME", help="Only this arm and the baseline; repeatable.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Only the first so many seeds.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change the size: steps=100, model.top_k=2; repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and their cost, and make none.")] = False,
) -> None:
    """Train an experiment's arms, those runs that are missing, and say which arms are better than the baseline."""
    from ablations.runner import run as run_experiment
    from ablations.runner._cli import as_text, parse_changes, print_plan, print_results
    from ablations.runner._run import chosen

    changes = parse_changes(change)
    root = out or Path("runs") / f"{preset}-{size}{as_text(changes)}"
    if dry_run:
        print_plan(*chosen(preset, size, arms=arm, seeds=seeds, changes=changes), root, workers)
        return
    results = run_experiment(
        preset, size, out=root, executor=executor, workers=workers, arms=arm, seeds=seeds, changes=changes
    )
    print_results(results)


def check(
    preset: PresetArgument,
    size: SizeOption = "cpu",
    out: OutOption = None,
    executor: ExecutorOption = "local",
    workers: WorkersOption = 2,
    sample: Annotated[int | None, typer.Option(min=1, help="Only so many runs, the same ones every time.")] = None,
    adopt: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Make no run: keep the results of this folder as reference.")
    ] = None,
) -> None:
    """Make an experiment's runs again and say whether they equal the reference results; exit 1 where one differs."""
    from ablations.runner import _cli

    if adopt is not None:
        _cli.adopt_results(preset, size, adopt)
        return
    _cli.run_check(preset, size, out or Path("runs") / f"check-{preset}-{size}", executor, workers, sample)


def is_results(folder: Path) -> bool:
    """Whether `folder` is one that `run` filled."""
    from ablations.report import is_results as known

    return known(folder)


def report(folder: Path) -> None:
    """Write the report of the experiment in `folder`, and print its verdict."""
    from ablations.report import write_reports
    from traces.console import out

    written = write_reports(folder)
    console = out()
    console.print(written.headline, markup=False, soft_wrap=True)
    for file in (written.html, written.markdown):
        console.print(f"Report: {file}", markup=False, soft_wrap=True)
