"""What each arm of an experiment makes of its lr grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import rows_of, tidy
from toolkit.plots._theme import Width, legend_below, legend_rows, new_figure, say_empty, text, themed
from toolkit.plots._training import arm_styles, arms_of, draw_line, in_way

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RUN = ["run", "arm", "seed"]


def grid_table(frame: pl.DataFrame) -> pl.DataFrame:
    """One row per arm and lr of the grid: `arm`, `lr`, `loss`, the mean over tuning seeds of the final loss."""
    losses = in_way(frame, "valid_loss", "grid").drop_nulls("step")
    final = losses.sort("step").group_by(_RUN, maintain_order=True).agg(loss=pl.col("value").last())
    rates = rows_of(frame, "peak_lr").group_by(_RUN).agg(lr=pl.col("value").first())
    both = final.join(rates, on=_RUN, how="inner", nulls_equal=True).filter(pl.col("lr") > 0)
    return both.group_by("arm", "lr").agg(pl.col("loss").mean()).sort("arm", "lr")


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """Final validation loss against the peak lr, one line per arm. Unit: nats."""
    frame = tidy(frame)
    table, styles = grid_table(frame), arm_styles(frame)
    arms = [arm for arm in arms_of(frame) if arm in set(table["arm"].to_list())]
    labels = [text(arm) for arm in arms]
    figure, (ax,) = new_figure(width, 1, panel_height=3.0, legend_rows=legend_rows(labels, width))
    for arm in arms:
        line = table.filter(pl.col("arm") == arm)
        draw_line(ax, line["lr"].to_list(), line["loss"].to_list(), arm, styles[arm])
    ax.set_xlabel("peak lr [1]")
    ax.set_ylabel("final validation loss [nats]")
    if arms:
        ax.set_xscale("log")
        legend_below(figure, [ax], width, labels=labels)
    else:
        say_empty(ax, "no run of the lr grid has a defined loss")
    return figure


PLOT = Plot(
    name="lr_sensitivity",
    title="The lr grid",
    requires=("valid_loss", "peak_lr", "in_grid"),
    draw=themed(draw),
    caption=(
        "Final validation loss against the peak lr of the grid, on the tuning seeds. The lowest point of a line is the "
        "rate of that arm's tuned runs; one at the end of its line may be lower still beyond it."
    ),
    about="training",
)
