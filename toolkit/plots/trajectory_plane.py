"""Where the weights go under each recipe: their way in the plane of two displacements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from toolkit.plots._axes import role_title
from toolkit.plots._plot import Plot
from toolkit.plots._select import roles_in, rows_of, tidy
from toolkit.plots._theme import (
    INK,
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

_ALONG, _ACROSS, _OFF = "plane_along", "plane_across", "plane_off"


def ways_of(frame: pl.DataFrame, role: str | None) -> dict[str, np.ndarray]:
    """Per recipe the points [S, 3] (along, across, off the plane) in step order, the start left out."""
    parts = []
    for name in (_ALONG, _ACROSS, _OFF):
        rows = rows_of(frame, name).filter(pl.col("role").eq_missing(pl.lit(role, dtype=pl.String)))
        parts.append(rows.select("recipe", "step", pl.col("value").alias(name)))
    table = parts[0].join(parts[1], on=["recipe", "step"]).join(parts[2], on=["recipe", "step"]).sort("step")
    return {
        str(name): table.filter(pl.col("recipe") == name).select(_ALONG, _ACROSS, _OFF).to_numpy()
        for name in recipe_order(table["recipe"].unique().to_list())
    }


def plane_panel(ax: Axes, frame: pl.DataFrame, role: str | None) -> Axes:
    """Draw the way of each recipe in the plane of `role`, from the start (a cross) to its end; return `ax`."""
    frame = tidy(frame)
    styles = recipe_styles(frame.filter(pl.col("metric") == _ALONG)["recipe"].unique().to_list())
    for name, way in ways_of(frame, role).items():
        style = styles[name]
        points = np.vstack([np.zeros((1, 3)), way])
        ax.plot(points[:, 0], points[:, 1], color=style.colour, linestyle=style.line, linewidth=1.1)
        ax.plot(
            points[-1:, 0],
            points[-1:, 1],
            color=style.colour,
            linestyle=style.line,
            marker=style.marker,
            markersize=5,
            label=text(name),
        )
    if ax.lines:
        ax.plot([0], [0], linestyle="", marker="+", color=INK, markersize=7, zorder=5)
    ax.set_xlabel("along the first displacement [weight]")
    ax.set_ylabel("across it [weight]")
    ax.margins(0.08)
    ax.grid(True, axis="both")
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page", roles: Sequence[str] | None = None) -> Figure:
    """One panel per role (routed experts and router unless `roles` says otherwise). Unit: that of the weight."""
    frame = tidy(frame)
    rows = rows_of(frame, _ALONG)
    shown: list[str | None] = [*roles_in(rows, roles or ("routed_expert", "router"))] or [*roles_in(rows)[:2]] or [None]
    names = [text(name) for name in recipe_order(rows["recipe"].unique().to_list())]
    figure, axes = new_figure(width, len(shown), panel_height=2.6, legend_rows=legend_rows(names, width))
    for ax, role in zip(axes, shown, strict=True):
        plane_panel(ax, frame, role)
        ax.set_title(role_title(role))
        if not ax.lines:
            say_empty(ax, "no weight of this frame has a place in the plane")
    legend_below(figure, axes, width, labels=names)
    return figure


PLOT = Plot(
    name="trajectory_plane",
    title="The way of the weights",
    requires=(_ALONG, _ACROSS, _OFF),
    draw=themed(draw),
    caption=(
        "The weights of a role as one vector under each recipe, from their common start (cross) to their end (marker), "
        "projected onto the plane through the ends of the first two recipes. Those two end in the plane; how far "
        "another leaves it is the third coordinate of the frame, which is not drawn."
    ),
    about="trajectory",
)
