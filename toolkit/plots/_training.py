"""Frames of closed-loop experiments: which runs belong to which comparison, and one style per arm.

A run says in rows of its own what it is: `in_grid`, `in_shared`, `in_tuned`, `in_matched` for the comparisons it
belongs to, and `peak_lr`. Differences between arms are rows whose `run` is the comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from toolkit.plots._axes import step_axis
from toolkit.plots._select import rows_of, tidy
from toolkit.plots._theme import (
    Style,
    Width,
    family_of,
    legend_below,
    legend_rows,
    log_if_wide,
    new_figure,
    recipe_styles,
    say_empty,
    text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAYS = ("shared", "tuned", "matched")
TITLES = {
    "shared": "one lr for all",
    "tuned": "each at its best lr",
    "matched": "matched weight changes",
}
_RUN = ["run", "arm", "seed"]


def arms_of(frame: pl.DataFrame) -> list[str]:
    """The arms in the order in which the frame names them."""
    return [str(arm) for arm in frame["arm"].drop_nulls().unique(maintain_order=True)]


def arm_styles(frame: pl.DataFrame) -> dict[str, Style]:
    """A style per arm: the colour of its recipe's family, apart from others of the family by line and marker."""
    first = frame.drop_nulls("arm").group_by("arm", maintain_order=True).agg(pl.col("recipe").first())
    names = {}
    for arm, recipe in first.rows():
        family = family_of(str(recipe))
        names[str(arm)] = family if arm == family else f"{family}+{arm}"
    styles = recipe_styles(names.values())
    return {arm: styles[name] for arm, name in names.items()}


def in_way(frame: pl.DataFrame, metric: str, way: str) -> pl.DataFrame:
    """The finite rows of `metric` of the runs that belong to `way`."""
    runs = frame.filter(pl.col("metric") == f"in_{way}").select(_RUN).unique()
    return rows_of(frame, metric).join(runs, on=_RUN, how="semi", nulls_equal=True)


def ways_in(frame: pl.DataFrame) -> list[str]:
    """The comparisons that the frame holds, in order."""
    present = set(frame["metric"].unique().to_list())
    return [way for way in WAYS if f"in_{way}" in present]


def way_curves(frame: pl.DataFrame, metric: str, label: str, *, width: Width, ways: Any = None) -> Figure:
    """One panel per comparison with `metric` against the step, one line per arm: the mean over seeds and parameters."""
    frame = tidy(frame)
    shown = list(ways or ways_in(frame)) or ["shared"]
    arms, styles = arms_of(frame.filter(pl.col("metric") == metric)), arm_styles(frame)
    labels = [text(arm) for arm in arms]
    figure, axes = new_figure(width, len(shown), panel_height=2.6, legend_rows=legend_rows(labels, width))
    for ax, way in zip(axes, shown, strict=True):
        table = in_way(frame, metric, way).drop_nulls("step")
        table = table.group_by("arm", "step").agg(pl.col("value").mean()).sort("arm", "step")
        for arm in arms:
            line = table.filter(pl.col("arm") == arm)
            if not line.is_empty():
                draw_line(ax, line["step"].to_list(), line["value"].to_list(), arm, styles[arm])
        step_axis(ax)
        ax.set_ylabel(label)
        ax.set_title(TITLES.get(way, text(way, 26)))
        log_if_wide(ax, table["value"].to_list(), decades=1.0)
        if not ax.lines:
            say_empty(ax, f"{metric} is undefined everywhere in these runs")
    legend_below(figure, axes, width, labels=labels)
    return figure


def draw_line(ax: Axes, x: list[Any], y: list[Any], arm: str, style: Style) -> None:
    """One arm's line, with a marker at a few of its points."""
    every = max(1, len(x) // 6)
    ax.plot(
        x, y, color=style.colour, linestyle=style.line, marker=style.marker, markevery=every, label=text(arm), lw=1.1
    )
