"""Putting the page together: verdict, figures, tables, provenance, in one file that needs nothing else."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from toolkit.frame import OPEN_LOOP_NOTE, check_target
from toolkit.plots import PLOTS, Plot
from toolkit.plots._save import inline_svg, png_bytes
from toolkit.plots._select import tidy
from toolkit.plots._theme import WIDTHS
from toolkit.report._tables import by_pair, provenance_blocks, recipe_table, trace_id
from toolkit.report._verdict import verdict
from traces.errors import GradreelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What a report is about comes first; plots that others add follow in order of name.
_ORDER = (
    "update_cos_curves",
    "instability_overview",
    "amplification_by_tokens",
    "update_rms_curves",
    "expert_load_heatmap",
    "memory_bars",
)
#: A figure whose drawing takes more bytes than this goes in as an image.
_SVG_LIMIT = 400_000


@dataclass(frozen=True)
class Report:
    """A written report: where it lies, its one-sentence verdict, and the names of plots it could not draw."""

    path: Path
    verdict: str
    not_drawn: tuple[str, ...] = ()


def write_report(
    path: str | Path,
    frame: pl.DataFrame | pl.LazyFrame,
    *,
    title: str,
    provenance: Mapping[str, Any],
    notes: Iterable[str] = (),
) -> Report:
    """Write one self-contained HTML file to `path` and return it with its verdict.

    `frame` is a Frame (see `toolkit.frame.SCHEMA`); `provenance` may be nested and is printed as given; `notes` are
    sentences from the replay. The file asks for nothing from outside and stays under 5 MB. Plots whose metrics are
    missing are named in it with what to add. Raises GradreelError if `path` cannot be written or `frame` is no Frame.
    """
    table = tidy(frame)
    target = Path(path)
    said = list(notes)
    facts = {key: value for key, value in provenance.items() if key != "notes" or value != said}  # not twice
    with _replacing(target) as aside:
        found = verdict(table)
        drawn, missing = draw_all(table)
        page = _render(
            title=title,
            verdict=found,
            pairs=by_pair(found.comparisons),
            figures=drawn,
            missing=missing,
            recipes=recipe_table(table),
            provenance=provenance_blocks(facts),
            notes=said,
            open_loop=OPEN_LOOP_NOTE.rstrip(".") + ".",
            trace_id=trace_id(provenance, table),
        )
        aside.write_text(page, encoding="utf-8", errors="replace")
    return Report(target, found.headline, tuple(name for name, _ in missing))


def draw_all(frame: pl.DataFrame, about: str = "updates") -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Every plot about `about` drawn for wide and narrow pages, and (title, reason) of those that could not be."""
    drawn: list[dict[str, Any]] = []
    missing: list[tuple[str, str]] = []
    names = [plot.name for plot in PLOTS.all() if plot.about == about]
    for name in sorted(names, key=lambda n: (_ORDER.index(n) if n in _ORDER else len(_ORDER), n)):
        plot = PLOTS.get(name)
        try:
            images = {width: _image(plot, frame, width) for width in WIDTHS}
        except GradreelError as error:
            missing.append((plot.title, str(error)))
        except Exception as error:
            # A plot from outside may fail in any way; the rest of the report must not be lost with it.
            missing.append((plot.title, f"plot {name} failed: {type(error).__name__}: {error}"))
        else:
            drawn.append({"name": name, "title": plot.title, "caption": plot.caption, **images})
    return drawn, missing


def _image(plot: Plot, frame: pl.DataFrame, width: str) -> Any:
    from markupsafe import Markup

    figure: Figure = plot(frame, width=width)
    label = f"{plot.title}. {plot.caption}"
    svg = inline_svg(figure, f"{plot.name.replace('_', '-')}-{width}", label)
    if len(svg) <= _SVG_LIMIT:
        return Markup(svg)
    data = base64.b64encode(png_bytes(figure, dpi=170)).decode()
    return Markup('<img alt="{}" src="data:image/png;base64,{}">').format(label, data)


def _render(**values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(**values)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A file beside `target` that takes its place in the end, so that a reader never sees half a report.

    It is made at once: a path that cannot be written is said before the figures are drawn.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        check_target(target, "the report", (b"<!doctype html", b"<html"))
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.touch()
        yield aside
        aside.replace(target)
    except OSError as error:
        raise GradreelError(
            f"cannot write the report {str(target)!r}: {error.strerror or error}; name a file in a folder you may write"
        ) from error
    finally:
        with suppress(OSError):
            aside.unlink()
