"""Which open-loop measures put the arms in the order that training put them in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import rows_of, tidy
from toolkit.plots._theme import INK, SOFT, Width, new_figure, say_empty, text, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME = "open_closed_rho"
MAX_PANELS = 6


def agreement_panel(ax: Axes, frame: pl.DataFrame, measures: list[str]) -> Axes:
    """Draw rho of each measure with its interval, a measure a row; `frame` holds one way of comparing. Return `ax`."""
    ax.axvline(0.0, color=SOFT, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    rows = rows_of(frame, _NAME)
    found = {str(r["param"]): r["value"] for r in rows.iter_rows(named=True)}
    sides = {
        end: {str(r["param"]): r["value"] for r in rows_of(frame, f"{_NAME}_{end}").iter_rows(named=True)}
        for end in ("low", "high")
    }
    for place, name in enumerate(reversed(measures)):
        if name in sides["low"] and name in sides["high"]:
            ax.plot([sides["low"][name], sides["high"][name]], [place, place], color=SOFT, linewidth=1.6)
        if name in found:
            ax.plot([found[name]], [place], marker="o", linestyle="", color=INK)
    ax.set_yticks(range(len(measures)), [text(name, 24) for name in reversed(measures)])
    ax.set_ylim(-0.6, max(len(measures), 1) - 0.4)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    ax.set_xlabel("rank correlation with the loss [1]")
    if not found:
        say_empty(ax, "no correlation is defined")
        ax.set_xlabel("rank correlation with the loss [1]")
    else:
        ax.set_xlim(-1.05, 1.05)
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One panel per way of comparing and setting, one row per measure. Unit: Spearman's rho, 1."""
    frame = tidy(frame)
    rows = frame.filter(pl.col("metric") == _NAME)
    measures = sorted({str(name) for name in rows["param"].drop_nulls().to_list()})
    panels = rows.select("run", "arm").unique(maintain_order=True).rows()[:MAX_PANELS]
    height = 0.75 + 0.2 * max(len(measures), 2)
    figure, axes = new_figure(width, max(1, len(panels)), panel_height=height)
    for ax, (run, arm) in zip(axes, panels or [("tuned", None)], strict=True):
        mine = frame.filter((pl.col("run") == run) & pl.col("arm").eq_missing(pl.lit(arm, dtype=pl.String)))
        agreement_panel(ax, mine, measures)
        ax.set_title(text(f"{run}, {arm}" if arm else run, 28))
    return figure


PLOT = Plot(
    name="open_against_closed",
    title="Replay against training",
    requires=(_NAME, f"{_NAME}_low", f"{_NAME}_high"),
    draw=themed(draw),
    caption=(
        "Rank correlation, over the arms, of each measure of a replay with the final loss in training. At +1 arms with "
        "more of the measure ended with a higher loss, at -1 with a lower one. Bar: 95% interval; arms are few, so a "
        "bar across the dashed line says that the measure did not foretell the order."
    ),
    about="agreement",
)
