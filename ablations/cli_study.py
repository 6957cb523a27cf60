"""The verb `study`; its work is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traces.console import example


def register(app: typer.Typer) -> None:
    """Add the verb to a command-line application."""
    app.command(epilog=example("gradreel study run.trace --out run.study"))(study)


def study(
    source: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[TRACE|FOLDER]...", help="A trace, or results of `run`.", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where the study goes; default: NAME.study.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Set predictions against outcomes of these results; none: the references.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, help="Of results: steps in each of the three recorded bursts.")] = 32,
) -> None:
    """Measure how unstable a trace's gradients are over time, and rank experts by predicted harm of no state.

    Of a folder that `run` filled, the baseline is recorded anew and replayed through all arms, for its report.
    """
    from ablations.study import compare_predictions, replay_results, study_trace
    from traces.console import out
    from traces.errors import GradreelError

    console = out()
    sources = source or []
    if compare:
        found = compare_predictions(sources, folder or Path("prediction.study"))
        console.print(found.headline, markup=False, soft_wrap=True)
        console.print(f"Report: {found.path}/report.html", markup=False, soft_wrap=True)
        return
    if len(sources) != 1:
        raise GradreelError(f"study takes one trace or one folder of results, not {len(sources)}; or add --compare")
    if (sources[0] / "provenance.json").is_file():
        for one in replay_results(sources[0], steps=steps, out=folder):
            where = f"{one.way}, {one.setting}" if one.setting else one.way
            console.print(f"{where}: {one.measure} {one.found.words}", markup=False, soft_wrap=True)
        console.print(f"Next: gradreel report {folder or sources[0]}", markup=False, soft_wrap=True)
        return
    result = study_trace(sources[0], folder)
    console.print(result.headline, markup=False, soft_wrap=True)
    console.print(f"Report: {result.path}/report.html", markup=False, soft_wrap=True)
