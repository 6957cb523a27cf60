"""Does an expert's gradient point where its last one pointed: a heatmap of cosines, experts sorted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from toolkit.plots._experts import by_expert_and_step, per_expert, row_means, smallest_lag
from toolkit.plots._plot import Plot
from toolkit.plots._select import thin_steps, tidy
from toolkit.plots._theme import Width, new_figure, say_empty, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME, _METRIC = "cosine_heatmap", "grad_cos"
MAX_LAYERS = 6
#: Where there is no cosine: an idle expert, or one idle the step before.
UNDEFINED = "#b9bec6"
_SPAN = 0.6


def sorted_cosines(frame: pl.DataFrame, layer: int | None) -> tuple[np.ndarray, list[int], list[int]]:
    """Cosines [experts, steps] at the smallest lag, the steadiest expert on top, with expert ids and steps."""
    rows = smallest_lag(per_expert(tidy(frame), _METRIC, _NAME).drop_nulls("step"))
    matrix, experts, steps = by_expert_and_step(rows.filter(pl.col("layer").eq_missing(pl.lit(layer, dtype=pl.Int32))))
    order = np.argsort(-np.nan_to_num(row_means(matrix), nan=-2.0), kind="stable")
    return matrix[order], [experts[i] for i in order], steps


def cosine_panel(ax: Axes, frame: pl.DataFrame, layer: int | None, *, colour_bar: bool = True) -> Axes:
    """Draw one layer's cosines into `ax` and return it."""
    import matplotlib as mpl

    matrix, experts, steps = sorted_cosines(frame, layer)
    ax.set_title("all layers" if layer is None else f"layer {layer}")
    ax.set_xlabel("optimizer step [steps]")
    ax.set_ylabel("expert [id, steadiest on top]")
    if not np.isfinite(matrix).any():
        say_empty(ax, "no cosine is defined in this layer")
        return ax
    colours = mpl.colormaps["RdBu"].with_extremes(bad=UNDEFINED)
    norm = mpl.colors.Normalize(-_SPAN, _SPAN)
    edges = (np.arange(len(steps) + 1), np.arange(len(experts) + 1))
    mesh = ax.pcolormesh(*edges, np.ma.masked_invalid(matrix), cmap=colours, norm=norm, rasterized=True)
    ax.set_facecolor(UNDEFINED)
    ax.invert_yaxis()
    ax.grid(False)
    columns = np.unique(np.linspace(0, len(steps) - 1, min(5, len(steps))).round().astype(int))
    ax.set_xticks(columns + 0.5, [str(steps[i]) for i in columns])
    rows = np.unique(np.linspace(0, len(experts) - 1, min(8, len(experts))).round().astype(int))
    ax.set_yticks(rows + 0.5, [str(experts[i]) for i in rows])
    if colour_bar:
        bar = ax.figure.colorbar(mesh, ax=ax, extend="both", pad=0.02, aspect=18)
        bar.set_label("cosine to the step before [1]")
        bar.set_ticks([-0.5, 0, 0.5])
        bar.outline.set_visible(False)
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One panel per layer, at most six. Unit: cosine, 1."""
    frame = tidy(frame)
    rows = per_expert(frame, _METRIC, _NAME)
    frame = thin_steps(frame.filter(pl.col("metric") == _METRIC), 300)
    layers = rows["layer"].unique().sort().to_list()
    if len(layers) > MAX_LAYERS:
        layers = [layers[i] for i in np.linspace(0, len(layers) - 1, MAX_LAYERS).round().astype(int)]
    figure, axes = new_figure(width, len(layers), panel_height=2.3)
    for ax, layer in zip(axes, layers, strict=True):
        cosine_panel(ax, frame, layer)
    return figure


PLOT = Plot(
    name=_NAME,
    title="Cosine between neighbouring gradients, expert by expert",
    requires=(_METRIC,),
    draw=themed(draw),
    caption=(
        "Cosine between an expert's gradient and that of the step before (the smallest lag), the mean over its "
        "matrices, one panel per layer. Blue: it goes on as before; red: it turns back; white: unrelated; grey: an "
        "idle expert has no cosine. Experts are sorted by their mean, the steadiest on top."
    ),
    per_expert=True,
    about="experts",
)
