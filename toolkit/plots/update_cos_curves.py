"""How long an update keeps its direction under each recipe: cosine between updates against lag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._axes import INTERVAL, bars_line, lag_axis, places, reference_line
from toolkit.plots._curves import role_panels
from toolkit.plots._plot import Plot
from toolkit.plots._select import bands, rows_of, tidy, whole_recording
from toolkit.plots._theme import Width, recipe_order, recipe_styles, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def cosine_curves(ax: Axes, frame: pl.DataFrame, role: str | None = "routed_expert") -> Axes:
    """Draw the cosine between updates against their lag, one line per recipe, for one role; return `ax`."""
    rows = whole_recording(rows_of(tidy(frame), "update_cos", role).with_columns(pl.col("lag").fill_null(1)))
    table = bands(rows, ["recipe", "lag"])
    styles = recipe_styles(table["recipe"].unique().to_list())
    lags = table["lag"].unique().sort().to_list()
    log_x = bool(lags) and lags[0] > 0
    order = recipe_order(styles)
    # Neighbouring lags are at most a factor 2 apart on this axis; all recipes share the middle half of that.
    for name, place in zip(order, places(len(order), 0.45 / max(len(order), 1)), strict=True):
        bars_line(
            ax, table.filter(pl.col("recipe") == name), "lag", name=name, style=styles[name], place=place, log_x=log_x
        )
    lag_axis(ax, lags)
    ax.set_ylabel("cosine between updates [1]")
    if not table.is_empty():
        low, high = float(table["low"].min()), float(table["high"].max())  # type: ignore[arg-type]
        ax.set_ylim(min(-0.08, low - 0.05), max(0.3, high + 0.05))
        reference_line(ax, 0.0, "unrelated")
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page", roles: Sequence[str] | None = None) -> Figure:
    """One panel per role (routed experts and router unless `roles` says otherwise). Unit: 1."""
    return role_panels(tidy(frame), "update_cos", cosine_curves, width=width, roles=roles)


PLOT = Plot(
    name="update_cos_curves",
    title="How long updates keep their direction",
    requires=("update_cos",),
    draw=themed(draw),
    caption=(
        "Cosine between a recipe's updates some steps apart (1: the same direction, 0: unrelated) against the lag in "
        f"steps, per role. {INTERVAL} over experts and parameters of the mean over the recording; recipes are "
        "moved sideways a little so that none hides another. "
        "Smoothing over time raises the curve at short lags; a stateless recipe shows what the "
        "gradients alone give."
    ),
)
