"""How far weights drift from the reference's, and how straight their way is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._axes import spread_line, step_axis
from toolkit.plots._plot import Plot
from toolkit.plots._select import bands, rows_of, thin_steps, tidy, whole_recording
from toolkit.plots._theme import (
    Width,
    legend_below,
    legend_rows,
    log_if_wide,
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

_DRIFT, _STRAIGHT = "drift_from_reference", "straightness"
ROLE = "routed_expert"


def drift_panel(ax: Axes, frame: pl.DataFrame, role: str = ROLE) -> Axes:
    """Draw the distance to the reference's weights against the step, a line per recipe; return `ax`.

    The reference itself, whose distance is 0 throughout, is left out.
    """
    rows = thin_steps(rows_of(tidy(frame), _DRIFT, role).drop_nulls("step"))
    table = bands(rows, ["recipe", "step"])
    styles = recipe_styles(table["recipe"].unique().to_list())
    for name in recipe_order(styles):
        line = table.filter(pl.col("recipe") == name)
        if line["high"].max() != 0:
            spread_line(ax, line, "step", name=name, style=styles[name], every=max(1, line.height // 6))
    step_axis(ax)
    ax.set_ylabel("distance to reference [weight]")
    log_if_wide(ax, table.filter(pl.col("step") > pl.col("step").min())["mid"].to_list(), decades=2.0)
    return ax


def straightness_panel(ax: Axes, frame: pl.DataFrame, role: str = ROLE) -> Axes:
    """Draw each recipe's straightness, median and 10th to 90th percentile over experts; return `ax`."""
    table = bands(whole_recording(rows_of(tidy(frame), _STRAIGHT, role)), ["recipe"])
    names = recipe_order(table["recipe"].unique().to_list())
    styles = recipe_styles(names)
    for place, name in enumerate(names):
        row = table.filter(pl.col("recipe") == name).row(0, named=True)
        colour = styles[name].colour
        ax.plot([row["low"], row["high"]], [place, place], color=colour, linewidth=2.0, solid_capstyle="butt")
        ax.plot([row["mid"]], [place], color=colour, marker=styles[name].marker, markersize=5)
    ax.set_yticks(range(len(names)), [text(name, 20) for name in names])
    ax.set_ylim(max(len(names), 1) - 0.4, -0.6)
    ax.set_xlabel("displacement / path length [1]")
    ax.set_ylabel("recipe [name]")
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """Routed experts: drift against the step, and straightness by recipe. Units: that of the weight, and 1."""
    frame = tidy(frame)
    rows = rows_of(frame, _DRIFT, ROLE)
    names = [text(name) for name in recipe_order(rows["recipe"].unique().to_list())]
    figure, (drift, straight) = new_figure(width, 2, legend_rows=legend_rows(names, width))
    drift_panel(drift, frame)
    drift.set_title("drift")
    if not drift.lines:
        say_empty(drift, "no distance of an expert's weight is defined, or all are 0")
        drift.set_xlabel("optimizer step [steps]")
    straightness_panel(straight, frame)
    straight.set_title("straightness")
    if not straight.lines:
        say_empty(straight, "no expert's weight has moved")
    legend_below(figure, [drift], width, labels=names)
    return figure


PLOT = Plot(
    name="trajectory_shape",
    title="Drift and straightness of experts' weights",
    requires=(_DRIFT, _STRAIGHT),
    draw=themed(draw),
    caption=(
        "Left: distance between an expert's weight under a recipe and under the reference, the first recipe replayed. "
        "Right: displacement over path length, 1 for a straight line, about 1/sqrt(n) for a random walk of n steps. "
        "Routed experts; median, and 10th to 90th percentile over experts and parameters."
    ),
    about="trajectory",
)
