"""Where a rule beats the baseline in simulated worlds: the ratio of risks over two axes of the world."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import tidy
from toolkit.plots._theme import INK, SOFT, Width, new_figure, say_empty, text, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME = "smoothing_phase"
_RATIO = "risk_ratio_tuned"
_WORLD = "world."
#: Ratios are drawn from an eighth to eight, on a logarithmic colour scale.
_SPAN = 3.0
MAX_ARMS = 6
LABELS = {
    "tokens_over_min_side": "tokens per active expert / min(m, n) [1]",
    "activity": "active share of steps [1]",
    "persistence": "lag-1 correlation of activity [1]",
    "noise": "label noise [std of outputs]",
    "drift": "drift of the target [std per step]",
    "spectrum": "power of the input spectrum [1]",
    "rank": "outer products in a gradient [1]",
    "tokens": "tokens per active expert [tokens]",
    "zipf": "power of the Zipf loads [1]",
}


def phase_table(frame: pl.DataFrame, x: str, y: str) -> pl.DataFrame:
    """One row per world and arm: `arm`, `x`, `y`, `ratio`, `low`, `high`; worlds that lack an axis are left out."""
    frame = tidy(frame)
    keys = ["run", "arm"]
    found = None
    for name, end in (("ratio", ""), ("low", "_low"), ("high", "_high")):
        part = frame.filter((pl.col("metric") == _RATIO + end) & pl.col("arm").is_not_null())
        part = part.group_by(keys).agg(pl.col("value").mean().alias(name))
        found = part if found is None else found.join(part, on=keys, how="left")
    assert found is not None
    for name, axis in (("x", x), ("y", y)):
        part = frame.filter(pl.col("metric") == _WORLD + axis).group_by("run").agg(pl.col("value").mean().alias(name))
        found = found.join(part, on="run", how="inner")
    return found.filter(pl.col("x").is_finite() & pl.col("y").is_finite()).sort("arm", "y", "x")


def phase_panel(ax: Axes, table: pl.DataFrame, x: str, y: str) -> Axes:
    """Draw one arm's rows of `phase_table` into `ax`; hatched where the interval crosses 1."""
    import matplotlib as mpl

    ax.set_xlabel(LABELS.get(x, f"{x} [1]"))
    ax.set_ylabel(LABELS.get(y, f"{y} [1]"))
    ratios = table.filter(pl.col("ratio").is_finite() & (pl.col("ratio") > 0))
    if ratios.is_empty():
        say_empty(ax, "the ratio is undefined in every world")
        return ax
    across, up = table["x"].unique().sort().to_list(), table["y"].unique().sort().to_list()
    shade = np.full((len(up), len(across)), np.nan)
    colours = mpl.colormaps["PuOr"].with_extremes(bad="#ffffff")
    marks = []
    # Worlds that share both axes are averaged; the first one's interval would say more than it knows.
    cells = ratios.group_by("x", "y").agg(pl.col("ratio").log().mean().exp(), pl.col("low").min(), pl.col("high").max())
    for row in cells.iter_rows(named=True):
        at = (up.index(row["y"]), across.index(row["x"]))
        shade[at] = np.clip(np.log2(row["ratio"]), -_SPAN, _SPAN)
        decided = row["low"] is not None and row["high"] is not None and not row["low"] <= 1 <= row["high"]
        marks.append((*at, row["ratio"], decided))
    ax.pcolormesh(
        np.arange(len(across) + 1),
        np.arange(len(up) + 1),
        shade,
        cmap=colours,
        vmin=-_SPAN,
        vmax=_SPAN,
        rasterized=True,
    )
    ax.grid(False)
    few = len(across) <= 10 and len(up) <= 10
    for row_at, column, ratio, decided in marks:
        if not decided:
            corner = (column, row_at)
            ax.add_patch(mpl.patches.Rectangle(corner, 1, 1, fill=False, hatch="////", edgecolor=SOFT, linewidth=0))
        if few:
            dark = abs(shade[row_at, column]) > 0.75 * _SPAN
            box = None if decided else {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            colour = "white" if dark else INK
            words = _short(ratio)
            ax.text(column + 0.5, row_at + 0.5, words, ha="center", va="center", fontsize=6.2, color=colour, bbox=box)
    ax.set_xticks(np.arange(len(across)) + 0.5, [_short(v) for v in across], rotation=0)
    ax.set_yticks(np.arange(len(up)) + 0.5, [_short(v) for v in up], rotation=0)
    if not few:
        ax.locator_params(nbins=8)
    return ax


def draw(
    frame: pl.DataFrame,
    *,
    width: Width = "page",
    x: str = "tokens_over_min_side",
    y: str = "activity",
    arms: tuple[str, ...] | None = None,
) -> Figure:
    """One panel per arm, at most six. `x` and `y` are values of the simulated world. Unit: ratio of excess risks."""
    table = phase_table(frame, x, y)
    present = table["arm"].unique().sort().to_list()
    shown = [arm for arm in (arms or present) if arm in present][:MAX_ARMS]
    figure, axes = new_figure(width, max(1, len(shown)), panel_height=1.9, max_columns=2)
    if not shown:
        say_empty(axes[0], "no world has both axes and a ratio")
        axes[0].set_xlabel(LABELS.get(x, f"{x} [1]"))
        axes[0].set_ylabel(LABELS.get(y, f"{y} [1]"))
        return figure
    for ax, arm in zip(axes, shown, strict=True):
        phase_panel(ax, table.filter(pl.col("arm") == arm), x, y)
        ax.set_title(text(arm))
    _bar(figure, axes)
    return figure


def _bar(figure: Figure, axes: list[Axes]) -> None:
    import matplotlib as mpl

    scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(-_SPAN, _SPAN), "PuOr")
    bar = figure.colorbar(scale, ax=axes, location="bottom", aspect=40, shrink=0.8, pad=0.03, extend="both")
    bar.set_ticks([-3, -2, -1, 0, 1, 2, 3], labels=["⅛", "¼", "½", "1", "2", "4", "8"])
    bar.set_label("baseline risk / arm's risk, tuned lr [×]")
    bar.outline.set_visible(False)


def _short(value: float) -> str:
    return f"{value:.2g}" if 0.01 <= abs(value) < 100 else f"{value:.0e}" if value else "0"


PLOT = Plot(
    name=_NAME,
    title="Where a rule beats the baseline",
    requires=(_RATIO, f"{_RATIO}_low", f"{_RATIO}_high"),
    draw=themed(draw),
    caption=(
        "Excess risk of the baseline over that of the arm in simulated worlds, each at its own tuned lr, one panel per "
        "arm. Purple, above 1: the arm is better; orange, below 1: the baseline is. Hatched: not decided, the 95% "
        "interval over paired seeds crosses 1. The scale ends at an eighth and at eight."
    ),
    about="simulation",
)
