"""State, pinned gradient and peak, per parameter, against the size of the model; a line per recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import tidy
from toolkit.plots._theme import (
    Width,
    legend_below,
    legend_rows,
    new_figure,
    recipe_order,
    recipe_styles,
    say_empty,
    text,
    themed,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = {
    "state_bytes": "Optimizer state",
    "pinned_gradient_bytes": "Pinned gradient",
    "peak_bytes": "Peak of a training step",
}
_SIZE = "parameters"
#: Letters of a name in the legend, so that two columns fit a paper's column.
_LABEL = 15


def size_table(frame: pl.DataFrame) -> pl.DataFrame:
    """One row per recipe and model: `recipe`, `run`, `parameters`, and the bytes of each panel (null where unknown)."""
    rows = tidy(frame).filter(
        pl.col("metric").is_in([*_PANELS, _SIZE])
        & (pl.col("flag") == "")
        & pl.col("value").is_finite().fill_null(False)
    )
    per_place = rows.group_by("recipe", "run", "metric", "param", "role", "layer", "expert").agg(pl.col("value").max())
    # Rows of the whole run count where there are none of its parameters or roles.
    whole = pl.col("param").is_null() & pl.col("role").is_null()
    keys = ["recipe", "run", "metric"]
    parts = per_place.filter(~whole)
    alone = per_place.filter(whole).join(parts.select(keys).unique(), on=keys, how="anti")
    sums = pl.concat([parts, alone]).group_by(keys).agg(pl.col("value").sum())
    table = sums.filter(pl.col("metric") == _SIZE).select("recipe", "run", parameters="value")
    for metric in _PANELS:
        part = sums.filter(pl.col("metric") == metric).select("recipe", "run", pl.col("value").alias(metric))
        table = table.join(part, on=["recipe", "run"], how="left")
    return table.filter(pl.col(_SIZE) > 0).sort("recipe", _SIZE, "run")


def size_lines(ax: Axes, frame: pl.DataFrame, metric: str = "peak_bytes") -> Axes:
    """Draw `metric` in bytes per parameter against the number of parameters, both logarithmic; return `ax`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    table = size_table(frame).filter(pl.col(metric) > 0)
    ax.set_xlabel("parameters [1]")
    ax.set_ylabel("per parameter [B]")
    if table.is_empty():
        say_empty(ax, "no recipe keeps any")
        return ax
    styles = recipe_styles(size_table(frame)["recipe"].unique().to_list())
    for place, name in enumerate(recipe_order(styles)):
        mine = table.filter(pl.col("recipe") == name)
        if mine.is_empty():
            continue
        ax.plot(
            mine[_SIZE].to_numpy(),
            (mine[metric] / mine[_SIZE]).to_numpy(),
            color=styles[name].colour,
            linestyle=_DASHES[place % len(_DASHES)],
            marker=_MARKERS[place % len(_MARKERS)],
            label=text(name, _LABEL),
            alpha=0.9,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high < 100 * low:  # too few powers of ten to read a value off
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    return ax


_DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-",
    (0, (4, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """Three panels with both axes logarithmic. Unit: bytes per parameter, against the number of parameters."""
    names = [text(name, _LABEL) for name in recipe_order(size_table(frame)["recipe"].unique().to_list())]
    figure, axes = new_figure(width, 3, panel_height=2.1, max_columns=3, legend_rows=legend_rows(names, width))
    for ax, (metric, title) in zip(axes, _PANELS.items(), strict=True):
        size_lines(ax, frame, metric)
        ax.set_title(title)
    legend_below(figure, axes, width, labels=names)
    return figure


PLOT = Plot(
    name="memory_by_size",
    title="Memory against model size",
    requires=(*_PANELS, _SIZE),
    draw=themed(draw),
    about="memory",
    caption=(
        "Optimizer state, pinned gradient and the peak of a whole training step, in bytes per parameter, against the "
        "number of parameters, planned from shapes for one unsharded device. Both axes are logarithmic, so a recipe "
        "that keeps nothing of a kind has no line there. A level line says that ratios hold at every size."
    ),
)
