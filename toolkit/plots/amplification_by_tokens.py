"""Does a recipe step harder where an expert saw few tokens: amplification against tokens per expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from toolkit.plots._axes import bars_line, places
from toolkit.plots._plot import Plot
from toolkit.plots._select import SUMMARIES, bands, need_per_expert, rows_of, tidy
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

_NAME = "amplification_by_tokens"
#: At most this many classes of token counts, equally wide on the logarithmic axis.
_CLASSES = 7


def amplification_rows(frame: pl.DataFrame, role: str | None = "routed_expert") -> pl.DataFrame:
    """Rows of amplification per expert with the column `tokens`: the row's support, else `tokens_per_expert`.

    Experts without tokens have no gradient and so no amplification; they are left out.
    """
    frame = tidy(frame)
    rows = rows_of(frame, "amplification", role).filter(
        ~pl.col("flag").is_in(SUMMARIES) & pl.col("expert").is_not_null()
    )
    keys = ["step", "layer", "expert"]
    counts = frame.filter((pl.col("metric") == "tokens_per_expert") & pl.col("expert").is_not_null())
    counts = counts.group_by(keys).agg(counted=pl.col("value").mean())
    rows = rows.join(counts, on=keys, how="left", nulls_equal=True)
    return rows.with_columns(tokens=pl.coalesce("support", "counted")).filter(
        (pl.col("tokens") > 0) & pl.col("tokens").is_finite() & (pl.col("value") > 0)
    )


def amplification_curves(ax: Axes, frame: pl.DataFrame, role: str | None = "routed_expert") -> Axes:
    """Draw the median amplification in classes of token counts, one line per recipe; return `ax`."""
    rows = amplification_rows(frame, role)
    ax.set_xlabel("tokens per expert and step [tokens]")
    ax.set_ylabel("‖update‖ / ‖gradient‖ [1]")
    if rows.is_empty():
        say_empty(ax, "amplification is undefined for every expert with tokens")
        return ax
    tokens = rows["tokens"].to_numpy()
    low, high = np.log2(tokens.min()), np.log2(tokens.max())
    classes = max(1, min(_CLASSES, int(np.ceil((high - low) * 1.5)) or 1))
    edges = np.linspace(low, high, classes + 1)
    place_of = np.clip(np.searchsorted(edges, np.log2(tokens), side="right") - 1, 0, classes - 1)
    rows = rows.with_columns(klass=pl.Series(place_of))
    # A class stands where its own counts lie, not at the middle of its interval.
    centre = rows.group_by("klass").agg(at=pl.col("tokens").log().mean().exp())
    table = bands(rows, ["recipe", "klass"]).join(centre, on="klass").sort("recipe", "at")
    order = recipe_order(table["recipe"].unique().to_list())
    styles = recipe_styles(order)
    wide = bool(high - low > 1.0)
    width = (high - low) / classes if wide else 0.0
    for name, place in zip(order, places(len(order), 0.55 * width / max(len(order), 1)), strict=True):
        bars_line(
            ax, table.filter(pl.col("recipe") == name), "at", name=name, style=styles[name], place=place, log_x=wide
        )
    if wide:
        _plain_log_axis(ax, float(tokens.min()), float(tokens.max()))
    log_if_wide(ax, [*table["low"].to_list(), *table["high"].to_list()], decades=1.0)
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page", role: str = "routed_expert") -> Figure:
    """One panel for one role. Units: tokens, and 1 (norm of the update before lr over norm of the gradient)."""
    frame = tidy(frame)
    all_rows = rows_of(frame, "amplification", role)
    rows = amplification_rows(frame, role)
    if rows.is_empty() and all_rows["flag"].is_in(SUMMARIES).any():
        raise need_per_expert(_NAME, "amplification")
    names = [text(name) for name in recipe_order(rows["recipe"].unique().to_list())]
    figure, (ax,) = new_figure(width, 1, panel_height=2.9, legend_rows=legend_rows(names, width))
    amplification_curves(ax, frame, role)
    legend_below(figure, [ax], width, labels=names)
    return figure


def _plain_log_axis(ax: Axes, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    ax.set_xscale("log", base=2)
    ax.set_xlim(low / 1.4, high * 1.4)
    powers = np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
    powers = powers[:: max(1, -(-powers.size // 8))]
    ticks = (2.0**powers).tolist() or [low]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks])


PLOT = Plot(
    name=_NAME,
    title="Amplification on few tokens",
    requires=("amplification",),
    draw=themed(draw),
    caption=(
        "Norm of the update (before the lr) over norm of the gradient, against the tokens that the expert saw in the "
        "step, per recipe; routed experts. Point: median of a class of token counts; bar: 10th to 90th percentile over "
        "experts, parameters and steps. A line that rises to the left steps harder, per unit of gradient, where "
        "there was less to learn from. Only the slope compares between recipes: the height depends on the lr each "
        "is meant for."
    ),
    per_expert=True,
)
