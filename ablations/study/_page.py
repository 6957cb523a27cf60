"""A study as one HTML page that needs nothing else, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import polars as pl

from traces.errors import GradreelError

Table = tuple[str, str, Sequence[str], Sequence[Sequence[str]]]


def write_pages(
    folder: Path,
    *,
    title: str,
    question: str,
    headline: str,
    tables: Sequence[Table],
    frame: pl.DataFrame,
    about: str,
    notes: Sequence[str],
    facts: Sequence[tuple[str, str]],
) -> tuple[Path, Path]:
    """Write report.html (with the figures that are about `about`) and report.md into `folder`."""
    import jinja2

    import toolkit.report
    from ablations.runner._store import write_aside
    from toolkit.frame import OPEN_LOOP_NOTE
    from toolkit.plots._select import tidy
    from toolkit.report._write import draw_all

    drawn, missing = draw_all(tidy(frame), about=about)
    places = [Path(__file__).parents[1], Path(toolkit.report.__file__).parent]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(places),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("study.html").render(
        title=title,
        question=question,
        headline=headline,
        open_loop=f"{OPEN_LOOP_NOTE}.",
        tables=tables,
        figures=drawn,
        missing=missing,
        notes=list(notes),
        facts=list(facts),
    )
    lines = [f"# {title}", "", question, "", f"**{headline}**", "", f"{OPEN_LOOP_NOTE}.", ""]
    for table in tables:
        lines += [*as_markdown(table), ""]
    lines += ["## Notes", "", *(f"- {note}" for note in notes), ""]
    lines += ["## Provenance", "", *(f"- {name}: {value}" for name, value in facts), ""]
    files = (folder / "report.html", folder / "report.md")
    try:
        write_aside(files[0], page)
        write_aside(files[1], "\n".join(lines))
    except OSError as error:
        raise GradreelError(f"cannot write the report into {str(folder)!r}: {error.strerror or error}") from None
    return files


def as_markdown(table: Table) -> Iterable[str]:
    """A table as lines of Markdown."""
    title, says, header, rows = table
    yield from (f"## {title}", "", says, "", "| " + " | ".join(header) + " |", "|" + " --- |" * len(header))
    for row in rows:
        yield "| " + " | ".join(row) + " |"
