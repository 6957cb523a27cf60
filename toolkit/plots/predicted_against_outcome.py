"""Whether what was predicted from gradients is what training showed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import rows_of, tidy
from toolkit.plots._theme import FAMILY_COLOURS, SOFT, Width, new_figure, say_empty, text, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_X, _Y = "condition_harm", "condition_gap"
_RHO = "condition_rho"
MAX_SOURCES = 6


def outcome_panel(ax: Axes, frame: pl.DataFrame, source: str) -> Axes:
    """Draw the conditions of one source (the Frame's `arm`), a point each with its interval; return `ax`."""
    mine = frame.filter(pl.col("arm") == source)
    x = rows_of(mine, _X).select("run", pl.col("value").alias("x")).unique("run")
    table = x.join(rows_of(mine, _Y).select("run", "unit", pl.col("value").alias("y")).unique("run"), on="run")
    for end in ("low", "high"):
        side = rows_of(mine, f"{_Y}_{end}").select("run", pl.col("value").alias(end)).unique("run")
        table = table.join(side, on="run", how="left")
    unit = table["unit"][0] if table.height else "1"
    rho = rows_of(mine, _RHO).filter(pl.col("param") == _X)["value"].to_list()
    ax.set_title(text(source, 20) + (f", rank correlation {rho[0]:+.2f}" if rho and abs(rho[0]) <= 1 else ""))
    if table.is_empty():
        say_empty(ax, "no condition has both")
    else:
        bars = table.drop_nulls(["low", "high"])
        ax.vlines(bars["x"], bars["low"], bars["high"], color=SOFT, linewidth=0.9, alpha=0.7)
        ax.plot(table["x"], table["y"], linestyle="", marker="o", color=FAMILY_COLOURS["mesh"], alpha=0.85)
        ax.axhline(0.0, color=SOFT, linewidth=0.8, linestyle=(0, (2, 2)))
    ax.set_xlabel("predicted harm, mean rank [1]")
    ax.set_ylabel(f"stateless minus smoothed [{text(unit, 12)}]")
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One panel per source of conditions, at most six."""
    frame = tidy(frame)
    sources = rows_of(frame, _X)["arm"].unique(maintain_order=True).drop_nulls().to_list()[:MAX_SOURCES]
    figure, axes = new_figure(width, max(1, len(sources)))
    if not sources:
        say_empty(axes[0], "no condition has a predicted harm")
        axes[0].set_xlabel("predicted harm, mean rank [1]")
    for ax, source in zip(axes, sources, strict=False):
        outcome_panel(ax, frame, source)
    return figure


PLOT = Plot(
    name="predicted_against_outcome",
    title="Predicted harm against what training showed",
    requires=(_X, _Y, f"{_Y}_low", f"{_Y}_high", _RHO),
    draw=themed(draw),
    caption=(
        "One point per condition: how harmful a stateless update should be, going by tokens, ranks, noise, "
        "amplification and idle runs, against how much worse it did than smoothing, each at its own best rate. Bar: "
        "95% interval over paired seeds; above the dashed line smoothing did better."
    ),
    about="prediction",
)
