"""How large the update is, step by step, under each recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._axes import INTERVAL, spread_line, step_axis
from toolkit.plots._curves import role_panels
from toolkit.plots._plot import Plot
from toolkit.plots._select import bands, rows_of, thin_steps, tidy
from toolkit.plots._theme import Width, log_if_wide, recipe_order, recipe_styles, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def rms_curves(ax: Axes, frame: pl.DataFrame, role: str | None = "routed_expert") -> Axes:
    """Draw update RMS against the step, one line per recipe, for one role; return `ax`.

    Updates of exactly zero (an expert that the recipe skipped) are left out: they have no place on a logarithmic axis,
    and say who was idle rather than how large a step is. Inside a summary over experts they cannot be told apart.
    """
    rows = thin_steps(rows_of(tidy(frame), "update_rms", role).drop_nulls("step").filter(pl.col("value") > 0))
    table = bands(rows, ["recipe", "step"])
    styles = recipe_styles(table["recipe"].unique().to_list())
    for place, name in enumerate(recipe_order(styles)):
        band = table.filter(pl.col("recipe") == name)
        every = max(1, band.height // 5)
        # Normalising recipes coincide; markers at different steps still show each of them.
        first = place * every // max(1, len(styles))
        spread_line(ax, band, "step", name=name, style=styles[name], every=every, first=first, alpha=0.1)
    step_axis(ax)
    ax.set_ylabel("update RMS per element [1]")
    logarithmic = log_if_wide(ax, table["mid"])
    if not logarithmic and not table.is_empty():
        top = float(table["high"].max())  # type: ignore[arg-type]
        ax.set_ylim(0, top * 1.08 if top > 0 else 1.0)
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page", roles: Sequence[str] | None = None) -> Figure:
    """One panel per role (routed experts and router unless `roles` says otherwise). Unit: 1, before the lr."""
    return role_panels(tidy(frame), "update_rms", rms_curves, width=width, roles=roles)


PLOT = Plot(
    name="update_rms_curves",
    title="Size of the updates",
    requires=("update_rms",),
    draw=themed(draw),
    caption=(
        "Root mean square of the update per element, before the lr, against the step, per recipe and role. "
        f"{INTERVAL} over experts and parameters. Experts that were not updated at all are left out, but where the "
        "frame holds summaries over experts they are inside these as zeros and pull the line down "
        "(--per-expert update_rms tells them apart). A flat line is what a normalising recipe gives by construction: "
        "its step does not shrink when the gradient does."
    ),
)
