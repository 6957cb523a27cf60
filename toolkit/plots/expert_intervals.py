"""How unstable each expert's gradient is, with intervals: cosine and sign flips, an expert a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._experts import per_expert, smallest_lag
from toolkit.plots._plot import Plot
from toolkit.plots._select import tidy
from toolkit.plots._theme import ROLE_COLOURS, SOFT, Width, new_figure, say_empty, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME = "expert_intervals"
#: (metric, title, label, what unrelated gradients give)
_PANELS = (
    ("grad_cos", "gradient cosine", "cosine to the step before [1]", 0.0),
    ("sign_flip_rate", "gradient sign flips", "flipped elements [fraction]", 0.5),
)
NAMED = 16


def interval_table(frame: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Per layer and expert: `value`, `low`, `high`, means over the expert's matrices, at the smallest lag."""
    table: pl.DataFrame | None = None
    for name, end in (("value", ""), ("low", "_low"), ("high", "_high")):
        rows = frame.filter(pl.col("metric") == metric + end)
        rows = smallest_lag(
            per_expert(frame, metric, _NAME) if not end else rows.filter(pl.col("expert").is_not_null())
        )
        rows = rows.filter((pl.col("role") == "routed_expert") & pl.col("value").is_finite().fill_null(False))
        part = rows.group_by("layer", "expert").agg(pl.col("value").mean().alias(name))
        table = part if table is None else table.join(part, on=["layer", "expert"], how="left", nulls_equal=True)
    assert table is not None
    return table


def interval_panel(ax: Axes, table: pl.DataFrame, order: pl.DataFrame) -> Axes:
    """Draw each expert's mean and interval, in `order` (its first on top); return `ax`."""
    rows = order.join(table, on=["layer", "expert"], how="inner", nulls_equal=True, maintain_order="left")
    for row in rows.iter_rows(named=True):
        if row["low"] is not None and row["high"] is not None:
            ax.plot([row["low"], row["high"]], [row["place"]] * 2, color=SOFT, linewidth=1.3, solid_capstyle="butt")
    colour = ROLE_COLOURS["routed_expert"]
    ax.plot(rows["value"].to_list(), rows["place"].to_list(), linestyle="", marker="o", markersize=2.8, color=colour)
    ax.set_ylim(order.height - 0.4, -0.6)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """Two panels, an expert a row, sorted by cosine. Units: cosine and fraction, 1."""
    frame = tidy(frame)
    tables = [interval_table(frame, metric) for metric, *_ in _PANELS]
    order = tables[0].sort("value", "layer", "expert", descending=[True, False, False]).select("layer", "expert")
    order = order.with_row_index("place").with_columns(pl.col("place").cast(pl.Int64))
    height = 0.8 + 0.11 * min(max(order.height, 6), 36)
    figure, axes = new_figure(width, 2, panel_height=height)
    for ax, table, (metric, title, label, unrelated) in zip(axes, tables, _PANELS, strict=True):
        interval_panel(ax, table, order)
        ax.axvline(unrelated, color=SOFT, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        every = max(1, -(-order.height // NAMED))
        named = order.filter(pl.col("place") % every == 0)
        names = [f"{'' if la is None else la}.{ex}" for la, ex in named.select("layer", "expert").iter_rows()]
        ax.set_yticks(named["place"].to_list(), names)
        ax.set_title(title)
        ax.set_xlabel(label)
        ax.set_ylabel("expert [layer.id, steadiest on top]")
        if table.is_empty():
            say_empty(ax, f"{metric} is undefined for every expert")
    return figure


PLOT = Plot(
    name=_NAME,
    title="Temporal instability, expert by expert",
    requires=("grad_cos", "sign_flip_rate"),
    draw=themed(draw),
    caption=(
        "Mean over the recording of the cosine between an expert's gradients of neighbouring steps, and the share of "
        "elements whose sign flipped; an expert a row, in one order in both panels. Bar: 95% interval over resampled "
        "blocks of steps, where the frame holds one (a study's does). Dashed: what unrelated gradients give."
    ),
    per_expert=True,
    about="experts",
)
