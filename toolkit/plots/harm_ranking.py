"""Which experts a stateless update is predicted to harm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import rows_of, tidy
from toolkit.plots._theme import ROLE_COLOURS, SOFT, Width, new_figure, say_empty, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME = "predicted_harm"
#: Up to so many experts are named on the axis; of more, only their places are told.
NAMED = 24


def ranking_panel(ax: Axes, frame: pl.DataFrame) -> Axes:
    """Draw every expert's predicted harm, highest first, with its interval; return `ax`."""
    ax.set_xlabel("experts, highest first [rank]")
    ax.set_ylabel("predicted harm, mean rank [1]")
    keys = ["layer", "expert"]
    rows = rows_of(frame, _NAME).filter(pl.col("expert").is_not_null()).sort("value", descending=True)
    if rows.is_empty():
        say_empty(ax, "no expert has a predicted harm")
        ax.set_xlabel("experts, highest first [rank]")
        return ax
    for end in ("low", "high"):
        side = rows_of(frame, f"{_NAME}_{end}").select(*keys, pl.col("value").alias(end)).unique(keys)
        rows = rows.join(side, on=keys, how="left", nulls_equal=True, maintain_order="left")
    places = list(range(1, rows.height + 1))
    bars = rows.with_columns(place=pl.Series(places)).drop_nulls(["low", "high"])
    ax.vlines(bars["place"].to_list(), bars["low"].to_list(), bars["high"].to_list(), color=SOFT, linewidth=1.2)
    ax.plot(places, rows["value"].to_list(), linestyle="", marker="o", color=ROLE_COLOURS["routed_expert"])
    if rows.height <= NAMED:
        names = [f"{'' if layer is None else layer}.{expert}" for layer, expert in rows.select(keys).iter_rows()]
        ax.set_xticks(places, names, rotation=90 if rows.height > 8 else 0)
        ax.set_xlabel("layer.expert, highest first [rank]")
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One point per expert. Unit: mean of ranks, 0 to 1."""
    figure, axes = new_figure(width, 1, max_columns=1)
    ranking_panel(axes[0], tidy(frame))
    return figure


PLOT = Plot(
    name="harm_ranking",
    title="Predicted harm of a stateless update",
    requires=(_NAME, f"{_NAME}_low", f"{_NAME}_high"),
    draw=themed(draw),
    caption=(
        "Each expert's mean rank by stable rank, tokens, signal to noise, amplification and idle runs: 1 where all "
        "five say most harmful, 0 where all say least. Bar: 95% interval over resampled blocks of steps. Experts "
        "whose bars overlap are not told apart."
    ),
    about="study",
)
