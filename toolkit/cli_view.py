"""The verb that shows a trace or a run in a browser; the work is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traces._store import as_place
from traces.console import example


def register(app: typer.Typer) -> None:
    """Add the verb to a command-line application."""
    app.command(epilog=example("gradreel view runs/demo"))(view)


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
