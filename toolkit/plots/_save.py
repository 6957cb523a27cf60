"""Writing a figure: one SVG for the paper, one PNG for everything else."""

from __future__ import annotations

import re
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.plots._theme import GRID, INK, SOFT, theme
from traces.errors import GradreelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Nothing of the machine or the moment goes into a figure: the same frame gives the same bytes.
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def save_figure(figure: Figure, stem: str | Path) -> tuple[Path, Path]:
    """Write `stem`.svg and `stem`.png (200 dots per inch) and return both paths; folders are made as needed."""
    base = Path(stem)
    paths = (base.with_name(base.name + ".svg"), base.with_name(base.name + ".png"))
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(svg_text(figure), encoding="utf-8")
        paths[1].write_bytes(png_bytes(figure))
    except OSError as error:
        raise GradreelError(f"cannot write the figure {str(base)!r}: {error.strerror or error}") from error
    return paths


def png_bytes(figure: Figure, dpi: int = 200) -> bytes:
    """The figure as PNG."""
    out = BytesIO()
    with theme():
        figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


def svg_text(figure: Figure) -> str:
    """The figure as a whole SVG document."""
    out = StringIO()
    with theme():
        figure.savefig(out, format="svg", metadata=_NO_METADATA)
    return out.getvalue()


def inline_svg(figure: Figure, key: str, label: str) -> str:
    """The figure as an `<svg>` element for an HTML page: no prologue, no address, ids of its own, inks as variables.

    `key` (letters, digits, `-`) makes the ids unique within the page; `label` is read out by screen readers. The three
    inks of the theme become the CSS variables `--ink`, `--soft` and `--line`, and the background is transparent.
    """
    from html import escape

    svg = svg_text(figure)
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    # Matplotlib names everything, equal images even alike; only what is referred to keeps its name.
    wanted = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    svg = re.sub(r'\sid="([^"]*)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in wanted else "", svg)
    svg = svg.replace('href="#', f'href="#{key}-').replace("url(#", f"url(#{key}-")
    for colour, name in ((INK, "ink"), (SOFT, "soft"), (GRID, "line")):
        svg = svg.replace(colour, f"var(--{name})")
    # The page's own background shows through the figure's.
    svg = re.sub(r"fill: #ffffff(?=[;\"])", "fill: none", svg, count=1)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*pt"', "", head)
    return f'{head} role="img" aria-label="{escape(label, quote=True)}">{rest}'
