"""How unstable are the gradients over time: cosine and sign flips against lag, per role."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._axes import INTERVAL, lag_axis, reference_line, role_title, spread_line
from toolkit.plots._plot import Plot
from toolkit.plots._select import bands, roles_in, rows_of, tidy, whole_recording
from toolkit.plots._theme import (
    ROLE_COLOURS,
    ROLE_ORDER,
    Style,
    Width,
    legend_below,
    legend_rows,
    new_figure,
    say_empty,
    themed,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def role_style(role: str) -> Style:
    """The fixed colour and marker of a role."""
    return Style(ROLE_COLOURS[role], "-", _MARKERS[ROLE_ORDER.index(role) % len(_MARKERS)], "")


def against_lag(ax: Axes, frame: pl.DataFrame, metric: str) -> Axes:
    """Draw `metric` (a metric with lags) against lag, one line per role; return `ax`.

    A row without a lag counts as lag 1: two consecutive steps.
    """
    rows = whole_recording(rows_of(tidy(frame), metric).with_columns(pl.col("lag").fill_null(1)))
    table = bands(rows.filter(pl.col("role").is_not_null()), ["role", "lag"])
    for role in roles_in(rows):
        spread_line(ax, table.filter(pl.col("role") == role), "lag", name=role_title(role), style=role_style(role))
    lag_axis(ax, rows["lag"].unique().to_list())
    if table.is_empty():
        say_empty(ax, f"{metric} is undefined at every lag of this recording")
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """Both measures, side by side (`page`) or one above the other (`column`). Units: cosine and fraction, 1."""
    frame = tidy(frame)
    roles = [role_title(r) for r in roles_in(frame.filter(pl.col("metric").is_in(("grad_cos", "sign_flip_rate"))))]
    figure, (cosine, flips) = new_figure(width, 2, legend_rows=legend_rows(roles, width))
    against_lag(cosine, frame, "grad_cos")
    cosine.set_title("gradient cosine")
    cosine.set_ylabel("cosine between steps [1]")
    against_lag(flips, frame, "sign_flip_rate")
    flips.set_title("gradient sign flips")
    flips.set_ylabel("flipped elements [fraction]")
    if cosine.lines:
        cosine.set_ylim(min(-0.1, cosine.get_ylim()[0]), max(0.3, cosine.get_ylim()[1]))
        reference_line(cosine, 0.0, "unrelated")
    if flips.lines:
        flips.set_ylim(0, max(0.62, flips.get_ylim()[1]))
        reference_line(flips, 0.5, "unrelated")
    legend_below(figure, [cosine, flips], width, labels=roles)
    return figure


PLOT = Plot(
    name="instability_overview",
    title="Temporal instability of the gradients",
    requires=("grad_cos", "sign_flip_rate"),
    draw=themed(draw),
    caption=(
        "Cosine between a parameter's gradients some steps apart (left; 1: the same direction, 0: unrelated), and the "
        "fraction of elements whose sign flipped (right; 0.5: unrelated), against the lag in steps, per role. "
        f"{INTERVAL} over experts and parameters of the mean over the recording. The lower the "
        "cosine, the less a single step says about the next."
    ),
)
