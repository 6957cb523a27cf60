"""The verb that shows a trace or a run in a browser, and the export of frames; the work is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traces._store import StorePath, as_place
from traces.console import example


def register(app: typer.Typer) -> None:
    """Add the verb to a command-line application."""
    app.command(epilog=example("gradreel view runs/demo"))(view)
    from traces import cli_files

    if (_is_frame, _export) not in cli_files.EXPORTS:
        cli_files.EXPORTS.append((_is_frame, _export))


def _is_frame(source: Path) -> bool:
    """Whether `source` is a parquet file, or a folder with a frame."""
    if isinstance(source, StorePath):
        return False
    return (source / "frame.parquet").is_file() or (source.suffix == ".parquet" and not source.is_dir())


def _export(source: Path, target: str, kind: str | None) -> None:
    """Write a frame as files of another tool, and say what was written."""
    from toolkit.frame import read_frame, read_provenance
    from toolkit.frame_export import KINDS, export_frame
    from traces.console import out
    from traces.errors import GradreelError

    chosen = kind or ("parquet" if target.lower().endswith(".parquet") else None)
    if chosen is None:
        raise GradreelError(f"say what to write: --to {', --to '.join(KINDS)}")
    file = source / "frame.parquet" if source.is_dir() else source
    done = export_frame(read_frame(file), target, chosen, provenance=read_provenance(file))
    left = f"; {done.left_out} rows per expert left out, csv and parquet keep them" if done.left_out else ""
    out().print(f"{done.place}: {done.rows} rows{left}", markup=False, soft_wrap=True)


def view(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE|RUN",
            help="A trace, a run's folder (demo, run), or a frame's parquet file.",
            show_default=False,
            parser=as_place,
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", "-r", metavar="NAME", help="Offer the updates of this recipe first; repeatable."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it in a browser.")] = True,
) -> None:
    """Show a page of expert loads over time, gradients and updates, expert by expert, on this machine only."""
    from traces.console import out, say
    from traces.errors import GradreelError

    try:
        import dash  # noqa: F401
    except ImportError:
        raise GradreelError("the page needs the package dash; pip install 'gradreel[view]'") from None
    from toolkit.view import view as open_view

    opened = open_view(source, recipes=recipe or (), port=port)
    for layer in opened.content.layers[:1]:
        opened.content.load(layer)  # damage is told here, and the first look need not wait
    server = opened.server
    out().print(f"View: {server.url}", markup=False, soft_wrap=True)
    say("Ctrl-C ends it")
    if browser:
        import threading
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
    server.serve()
