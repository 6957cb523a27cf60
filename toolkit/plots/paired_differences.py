"""What each arm gains or loses against the baseline, seed by seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import rows_of, tidy
from toolkit.plots._theme import INK, SOFT, Width, new_figure, say_empty, text, themed
from toolkit.plots._training import TITLES, WAYS, arm_styles, arms_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME = "paired_difference"


def difference_panel(ax: Axes, frame: pl.DataFrame, way: str, arms: list[str]) -> Axes:
    """Draw the differences of one way of comparing into `ax`: an arm a row, dots for seeds, mean and interval."""
    styles = arm_styles(frame)
    rows = rows_of(frame, _NAME).filter(pl.col("run") == way)
    ends = {end: rows_of(frame, f"{_NAME}_{end}").filter(pl.col("run") == way) for end in ("low", "high")}
    ax.axvline(0.0, color=SOFT, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    drawn = False
    for place, arm in enumerate(reversed(arms)):
        mine = rows.filter(pl.col("arm") == arm)
        if mine.is_empty():
            continue
        drawn = True
        seeds = mine.filter(pl.col("seed").is_not_null())["value"].to_list()
        ax.plot(seeds, [place] * len(seeds), linestyle="", marker="o", color=SOFT, markersize=2.6, alpha=0.8)
        low, high = (table.filter(pl.col("arm") == arm)["value"].to_list() for table in ends.values())
        if low and high:
            ax.plot([low[0], high[0]], [place, place], color=styles[arm].colour, linewidth=2.0, solid_capstyle="butt")
        if seeds:
            ax.plot([sum(seeds) / len(seeds)], [place], marker="|", color=INK, markersize=9)
    ax.set_yticks(range(len(arms)), [text(arm, 22) for arm in reversed(arms)])
    ax.set_ylim(-0.6, max(len(arms), 1) - 0.4)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    ax.set_xlabel("loss minus baseline's [nats]")
    ax.set_title(TITLES.get(way, text(way, 26)))
    if not drawn:
        say_empty(ax, "no difference is defined")
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One panel per way of comparing, one row per arm. Unit: nats; left of 0 is better than the baseline."""
    frame = tidy(frame)
    rows = frame.filter(pl.col("metric") == _NAME)
    ways = [way for way in WAYS if way in set(rows["run"].to_list())] or [str(w) for w in rows["run"].unique()[:1]]
    arms = arms_of(rows)
    figure, axes = new_figure(width, max(1, len(ways)), panel_height=0.75 + 0.2 * max(len(arms), 2))
    for ax, way in zip(axes, ways or ["tuned"], strict=False):
        difference_panel(ax, frame, way, arms)
    return figure


PLOT = Plot(
    name="paired_differences",
    title="Loss against the baseline",
    requires=(_NAME, f"{_NAME}_low", f"{_NAME}_high"),
    draw=themed(draw),
    caption=(
        "Final validation loss minus the baseline's from the same initial weights and batches: a dot per seed, the "
        "mean as a stroke, Student's 95% interval of the mean as a bar. Left of the dashed line is better than the "
        "baseline; a bar across it decides nothing."
    ),
    about="training",
)
