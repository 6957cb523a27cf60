"""One small panel an expert: the cosine of its gradients over time, and when it was idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from toolkit.plots._experts import by_expert_and_step, first_layer, per_expert, row_means, smallest_lag
from toolkit.plots._plot import Plot
from toolkit.plots._select import tidy
from toolkit.plots._theme import ROLE_COLOURS, SOFT, WIDTHS, Width, say_empty, themed
from traces.errors import GradreelError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME = "expert_small_multiples"
_COLUMNS = {"column": 2, "page": 4}
#: Of more experts, as many are drawn, from the busiest to the least busy.
MAX_EXPERTS = 8
IDLE = "#d9c7cf"


def expert_panel(ax: Axes, steps: list[int], cosines: np.ndarray, idle: list[int], title: str) -> Axes:
    """Draw one expert's cosines [S] at `steps`, with the steps without a token shaded; return `ax`."""
    for step in idle:
        ax.axvspan(step - 0.5, step + 0.5, color=IDLE, linewidth=0, zorder=0)
    ax.axhline(0.0, color=SOFT, linewidth=0.6, linestyle=(0, (2, 2)), zorder=1)
    ax.plot(steps, cosines, color=ROLE_COLOURS["routed_expert"], linewidth=0.9, marker=".", markersize=2.5)
    ax.set_ylim(-1.05, 1.05)
    ax.set_yticks([-1, 0, 1])
    ax.set_title(title, fontsize=7.5)
    if not np.isfinite(cosines).any():
        say_empty(ax, "no cosine is defined")
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page", layer: int | None = None) -> Figure:
    """At most eight experts of one layer (the first unless `layer` is given), the busiest first. Unit: cosine, 1."""
    from matplotlib.figure import Figure as PlainFigure
    from matplotlib.ticker import MaxNLocator

    if width not in WIDTHS:
        raise GradreelError(f"figure width is {width!r}; allowed: {', '.join(WIDTHS)}")
    frame = tidy(frame)
    chosen = first_layer(smallest_lag(per_expert(frame, "grad_cos", _NAME).drop_nulls("step")), layer)
    if chosen.is_empty():
        raise GradreelError(f"layer {layer} has no cosine per expert and step in this frame; choose another layer")
    cosines, ids, steps = by_expert_and_step(chosen)
    loads, loaded, at = by_expert_and_step(first_layer(per_expert(frame, "expert_load", _NAME), chosen["layer"][0]))
    share = dict(zip(loaded, row_means(loads), strict=True))
    order = sorted(ids, key=lambda expert: -np.nan_to_num(share.get(expert, np.nan), nan=-1.0))
    shown = order
    if len(order) > MAX_EXPERTS:
        shown = [order[i] for i in np.linspace(0, len(order) - 1, MAX_EXPERTS).round().astype(int)]
    columns = min(_COLUMNS[width], len(shown))
    rows = -(-len(shown) // columns)
    figure = PlainFigure(figsize=(WIDTHS[width], 0.35 + 1.15 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    axes = list(grid.flat)
    for unused in axes[len(shown) :]:
        unused.remove()
    for ax, expert in zip(axes, shown, strict=False):
        idle = [] if expert not in share else [at[i] for i in np.flatnonzero(loads[loaded.index(expert)] == 0)]
        part = share.get(expert, np.nan)
        title = f"expert {expert}" + (f", {100 * part:.1f}%" if np.isfinite(part) else "")
        expert_panel(ax, steps, cosines[ids.index(expert)], idle, title)
    for ax in axes[max(0, len(shown) - columns) : len(shown)]:
        ax.xaxis.set_tick_params(labelbottom=True)
    axes[0].xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    figure.supxlabel("optimizer step [steps]", fontsize=8)
    figure.supylabel("cosine to the step before [1]", fontsize=8)
    return figure


PLOT = Plot(
    name=_NAME,
    title="Each expert over time",
    requires=("grad_cos", "expert_load"),
    draw=themed(draw),
    caption=(
        "Cosine between an expert's gradient and that of the step before, the mean over its matrices, in one layer; "
        "a panel per expert, from the busiest to the least busy, with its mean share of the tokens. Shaded: the expert "
        "was idle. A line that crosses the dashed 0 at random says that one step does not foretell the next."
    ),
    per_expert=True,
    about="experts",
)
