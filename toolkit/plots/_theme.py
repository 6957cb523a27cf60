"""One look for every figure: sizes, fonts, and one fixed colour per recipe family and per role.

Colours: the recipe families start from those of Okabe and Ito (2008), roles use Tol's "muted" scheme; both stay
apart under the common colour-vision deficiencies (a test measures it for the families). A variant keeps its family's
colour and differs by line style and marker, so that a figure also survives a grey-scale printer.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from traces.errors import GradreelError

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Width = Literal["column", "page"]

#: Inches. A paper's column and a paper's text block; panels stack in the first and stand side by side in the second.
WIDTHS: dict[str, float] = {"column": 3.4, "page": 7.0}

#: Inks. The report maps these three to style-sheet variables, so that figures follow a dark page.
INK, SOFT, GRID = "#1f2430", "#5b6472", "#d9dde3"

#: One colour per recipe family, in every figure, for ever. New families are appended, none is reassigned.
FAMILY_COLOURS: dict[str, str] = {
    "adamw": INK,
    "sgd": "#a3a3a3",
    "skewadam": "#e69f00",
    "sinkgd": "#d55e00",
    "mesh": "#0072b2",
    "mesh_b": "#56b4e9",
    "muon": "#009e73",
    "lion": "#7b3294",
}
_SPARE_COLOURS = ("#7a5195", "#6b8e23", "#a0522d", "#20808d", "#b0306a", "#4b5d9b")

ROLE_COLOURS: dict[str, str] = {
    "routed_expert": "#882255",
    "router": "#117733",
    "router_bias": "#44aa99",
    "shared_expert": "#cc6677",
    "attention": "#332288",
    "dense_ffn": "#999933",
    "embedding": "#aa4499",
    "head": "#6699cc",
    "norm": "#888888",
    "hyper_connection": "#661100",
    "other": "#b8a000",
}
#: The order in which roles are drawn and listed: what the project is about comes first.
ROLE_ORDER = tuple(ROLE_COLOURS)

#: Recipe name used for rows that no recipe produced (a live run under the optimizer that trains it).
RECORDED = "recorded run"

_LINES: tuple[Any, ...] = ("-", (0, (3, 1.3)), (0, (1, 1)), (0, (4, 1.2, 1, 1.2)), (0, (6, 1.2, 2, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v")


@dataclass(frozen=True, slots=True)
class Style:
    """How one recipe is drawn; `line` is a matplotlib line style, `hatch` marks bars of variants."""

    colour: str
    line: Any
    marker: str
    hatch: str


def family_of(recipe: str) -> str:
    """The family of `recipe`: the part before the first `+` or `(`."""
    return recipe.split("+", 1)[0].split("(", 1)[0].strip()


def family_colour(recipe: str) -> str:
    """The fixed colour of the recipe's family; an outside family gets one by its name."""
    family = family_of(recipe)
    if family in FAMILY_COLOURS:
        return FAMILY_COLOURS[family]
    return _SPARE_COLOURS[zlib.crc32(family.encode()) % len(_SPARE_COLOURS)]


def recipe_order(recipes: Iterable[str | None]) -> list[str]:
    """The distinct recipes, families in the order of `FAMILY_COLOURS`, a plain recipe before its variants."""
    known = list(FAMILY_COLOURS)
    names = {name if name else RECORDED for name in recipes}

    def key(name: str) -> tuple[int, str, int, str]:
        family = family_of(name)
        return (known.index(family) if family in known else len(known), family, len(name) - len(family), name)

    return sorted(names, key=key)


def recipe_styles(recipes: Iterable[str | None]) -> dict[str, Style]:
    """A style for each of `recipes`: colour by family, line style and marker by position within the family."""
    seen: dict[str, int] = {}
    styles = {}
    for name in recipe_order(recipes):
        family = family_of(name)
        place = 0 if name == family else max(1, seen.get(family, 0))
        seen[family] = place + 1
        styles[name] = Style(
            family_colour(name),
            _LINES[place % len(_LINES)],
            _MARKERS[place % len(_MARKERS)],
            ("", "//", "..", "xx", "\\\\")[place % 5],
        )
    return styles


def text(value: object, limit: int = 40) -> str:
    """`value` as a label: control characters, math mode and a hiding `_` defused, cut in the middle beyond `limit`."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    if len(clean) > limit:
        head = (limit - 1) * 2 // 3
        clean = f"{clean[:head]}\N{HORIZONTAL ELLIPSIS}{clean[-(limit - 1 - head) :]}"
    if clean.startswith("_"):  # a legend drops such a label without a word
        clean = "\N{ZERO WIDTH SPACE}" + clean
    return clean.replace("$", r"\$")


@functools.cache
def _settings() -> Any:
    import seaborn as sns

    settings = dict(sns.axes_style("ticks"))
    settings.update(
        {
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans"],
            "font.size": 8,
            "axes.titlesize": 8.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 6,
            "axes.labelsize": 8,
            "xtick.labelsize": 7.5,
            "ytick.labelsize": 7.5,
            "legend.fontsize": 7.5,
            "legend.frameon": False,
            "legend.handlelength": 3.3,
            "axes.edgecolor": SOFT,
            "axes.linewidth": 0.7,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "text.color": INK,
            "xtick.color": SOFT,
            "ytick.color": SOFT,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "xtick.major.width": 0.7,
            "ytick.major.width": 0.7,
            "xtick.major.size": 3,
            "ytick.major.size": 3,
            "xtick.minor.size": 0,
            "ytick.minor.size": 0,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "grid.color": GRID,
            "grid.linewidth": 0.6,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.facecolor": "white",
            "axes.facecolor": "none",
            "lines.linewidth": 1.4,
            "lines.markersize": 3.6,
            "patch.linewidth": 0.6,
            "hatch.linewidth": 0.6,
            "savefig.dpi": 200,
            "figure.dpi": 150,
            "svg.fonttype": "none",
            "svg.hashsalt": "gradreel",
            "axes.formatter.use_mathtext": False,
        }
    )
    return settings


@contextmanager
def theme() -> Iterator[None]:
    """Apply the one theme for the time of a `with` block; nothing global changes."""
    import matplotlib as mpl

    with mpl.rc_context(_settings()):
        yield


def themed(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Run a plot's `draw` under the theme and lay the figure out before it ends, so that all its texts follow it."""

    @functools.wraps(draw)
    def inner(frame: pl.DataFrame, **options: Any) -> Figure:
        with theme():
            figure = draw(frame, **options)
            figure.draw_without_rendering()
            # Laid out once; saving at another resolution must not move anything.
            figure.set_layout_engine("none")
        return figure

    return inner


def new_figure(
    width: Width, panels: int, *, panel_height: float = 2.3, max_columns: int = 2, legend_rows: int = 0
) -> tuple[Figure, list[Axes]]:
    """A figure of `panels` axes that belongs to no global state, and its axes.

    `column` stacks the panels, `page` sets up to `max_columns` side by side. `panel_height` is in inches.
    """
    from matplotlib.figure import Figure as PlainFigure

    if width not in WIDTHS:
        raise GradreelError(f"figure width is {width!r}; allowed: {', '.join(WIDTHS)}")
    columns = 1 if width == "column" else max(1, min(max_columns, panels))
    rows = -(-panels // columns)
    height = rows * panel_height + 0.19 * legend_rows + 0.15
    figure = PlainFigure(figsize=(WIDTHS[width], height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.07, h_pad=0.05)  # type: ignore[union-attr, call-arg]
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for unused in axes[panels:]:
        unused.remove()
    return figure, axes[:panels]


def legend_below(figure: Figure, axes: Sequence[Axes], width: Width, *, labels: Sequence[str] = ()) -> None:
    """One legend for all panels, under them, each entry once, in the order of `labels`."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    order = [name for name in labels if name in entries] + [name for name in entries if name not in labels]
    if order:
        columns = legend_columns(order, width)
        figure.legend([entries[n] for n in order], order, loc="outside lower center", ncols=columns)


def legend_columns(labels: Sequence[str], width: Width) -> int:
    """How many legend columns fit, by the longest label (about 0.062 inch a letter)."""
    longest = max((len(label) for label in labels), default=1)
    return max(1, min(len(labels), int(WIDTHS[width] / (0.062 * longest + 0.72)), 5))


def legend_rows(labels: Sequence[str], width: Width) -> int:
    """Rows that `legend_below` will take for `labels`."""
    return -(-len(labels) // legend_columns(labels, width)) if labels else 0


def say_empty(ax: Axes, message: str) -> None:
    """Write why a panel holds no data, instead of leaving it empty."""
    ax.text(
        0.5,
        0.5,
        message,
        transform=ax.transAxes,
        ha="center",
        va="center",
        color=SOFT,
        fontsize=7.5,
        wrap=True,
        zorder=9,
    )
    ax.grid(False)
    ax.set_xticks([])
    ax.set_yticks([])


def log_if_wide(ax: Axes, values: Iterable[float], axis: Literal["x", "y"] = "y", decades: float = 1.5) -> bool:
    """Give the axis a log scale if the positive `values` span at least `decades`; return whether it did."""
    import numpy as np

    finite = np.asarray([v for v in values if v is not None], dtype=float)
    finite = finite[np.isfinite(finite)]
    positive = finite[finite > 0]
    if positive.size < 2 or (finite < 0).any() or np.log10(positive.max()) - np.log10(positive.min()) < decades:
        return False
    (ax.set_yscale if axis == "y" else ax.set_xscale)("log")
    return True
