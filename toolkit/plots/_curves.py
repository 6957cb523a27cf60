"""Panels of one update metric, one panel per role, one line per recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._axes import role_title
from toolkit.plots._select import roles_in, rows_of
from toolkit.plots._theme import Width, legend_below, legend_rows, new_figure, recipe_order, say_empty, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Roles drawn when the caller names none.
DEFAULT_ROLES = ("routed_expert", "router")


def role_panels(
    frame: pl.DataFrame,
    metric: str,
    panel: Callable[[Axes, pl.DataFrame, str | None], Axes],
    *,
    width: Width,
    roles: Sequence[str] | None,
    panel_height: float = 2.5,
) -> Figure:
    """A figure with `panel(ax, frame, role)` for each of `roles` that has defined values of `metric`."""
    rows = rows_of(frame, metric)
    shown: list[str | None] = [*roles_in(rows, roles or DEFAULT_ROLES)] or [*roles_in(rows)[:2]] or [None]
    if not rows.is_empty():
        rows = rows.filter(pl.col("role").is_in([r for r in shown if r is not None])) if shown != [None] else rows
    names = [text(name) for name in recipe_order(rows["recipe"].unique().to_list())]
    figure, axes = new_figure(width, len(shown), panel_height=panel_height, legend_rows=legend_rows(names, width))
    for ax, role in zip(axes, shown, strict=True):
        panel(ax, frame, role)
        ax.set_title(role_title(role))
        if not ax.lines:
            say_empty(ax, f"{metric} is zero or undefined everywhere in this frame")
    legend_below(figure, axes, width, labels=names)
    return figure
