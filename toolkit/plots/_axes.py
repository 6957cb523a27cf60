"""Drawing pieces that several figures share: a step or lag axis, a line with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from toolkit.plots._theme import SOFT, Style, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Said in every caption whose figure draws `bands`.
INTERVAL = "Line: median; interval: 10th to 90th percentile"


def role_title(role: str | None) -> str:
    """A role as a panel title."""
    return "all parameters" if role is None else role.replace("_", " ")


def lag_axis(ax: Axes, lags: Sequence[int]) -> None:
    """A logarithmic axis of lags in steps, ticked at the lags that were measured (thinned where they would touch)."""
    from matplotlib.ticker import FixedLocator, NullLocator

    ax.set_xlabel("lag [steps]")
    if not lags:
        return
    known = sorted({int(lag) for lag in lags})
    low, high = known[0], known[-1]
    if low > 0:
        ax.set_xscale("log", base=2)
        ax.set_xlim(low / 1.35, high * 1.35)
    else:
        ax.set_xlim(low - 0.5, high + 0.5)
    ticks: list[int] = []
    for lag in known:
        if not ticks or low <= 0 or lag >= ticks[-1] * (high / low) ** 0.07:
            ticks.append(lag)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, [str(tick) for tick in ticks])


def step_axis(ax: Axes) -> None:
    """An axis of optimizer steps with whole-numbered ticks."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("optimizer step [steps]")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))


def spread_line(
    ax: Axes,
    band: pl.DataFrame,
    x: str,
    *,
    name: str,
    style: Style,
    every: int = 1,
    first: int = 0,
    alpha: float = 0.14,
) -> None:
    """A median line with its interval as a band; `band` holds the columns of `bands` and `x`, sorted by `x`."""
    at = band[x].to_numpy()
    low, high = band["low"].to_numpy(), band["high"].to_numpy()
    if at.size == 1:
        bars_line(ax, band, x, name=name, style=style)
        return
    ax.fill_between(at, low, high, color=style.colour, alpha=alpha, linewidth=0)
    ax.plot(
        at,
        band["mid"].to_numpy(),
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
        markevery=(min(first, at.size - 1), max(1, every)),
        label=text(name),
    )


def bars_line(
    ax: Axes, band: pl.DataFrame, x: str, *, name: str, style: Style, place: float = 0.0, log_x: bool = False
) -> None:
    """A median line with its interval as bars, moved sideways by `place` so that recipes do not hide each other."""
    at = band[x].to_numpy().astype(float)
    at = at * 2.0**place if log_x else at + place
    mid = band["mid"].to_numpy()
    below = np.clip(mid - band["low"].to_numpy(), 0, None)
    above = np.clip(band["high"].to_numpy() - mid, 0, None)
    ax.errorbar(
        at,
        mid,
        yerr=np.stack([below, above]),
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
        markeredgewidth=0,
        elinewidth=0.8,
        capsize=0,
        label=text(name),
    )


def reference_line(ax: Axes, y: float, words: str) -> None:
    """A thin horizontal line with its meaning written to the right of the panel, where no data can be."""
    ax.axhline(y, color=SOFT, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    ax.annotate(
        words,
        xy=(1, y),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        ha="left",
        va="center",
        annotation_clip=False,
        fontsize=6.8,
        color=SOFT,
    )


def places(count: int, step: float) -> list[float]:
    """Sideways places of `count` neighbours, centred on 0."""
    return [(i - (count - 1) / 2) * step for i in range(count)]
