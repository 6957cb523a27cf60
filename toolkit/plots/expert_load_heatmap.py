"""Which experts get the tokens, over time: one heatmap per layer, experts sorted by their mean load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import SUMMARIES, need_per_expert, thin_steps, tidy
from toolkit.plots._theme import Width, new_figure, say_empty, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME = "expert_load_heatmap"
#: Loads are drawn from a quarter to four times the uniform load, on a logarithmic colour scale.
_SPAN = 2.0
MAX_LAYERS = 12
IDLE = "#000000"


def load_matrix(frame: pl.DataFrame, layer: int | None) -> tuple[np.ndarray, list[int], list[int]]:
    """Load relative to uniform [experts, steps] of one layer, NaN where undefined, with expert ids and steps.

    Rows are sorted by mean load, the busiest first.
    """
    rows = _per_expert(tidy(frame)).filter(pl.col("layer").eq_missing(layer))
    experts = rows["expert"].unique().sort().to_list()
    steps = rows["step"].unique().sort().to_list()
    matrix = np.full((len(experts), len(steps)), np.nan)
    cells = rows.group_by("expert", "step").agg(pl.col("value").mean()).drop_nulls("value")
    at = (np.searchsorted(experts, cells["expert"].to_numpy()), np.searchsorted(steps, cells["step"].to_numpy()))
    matrix[at] = cells["value"].to_numpy() * len(experts)
    matrix[~np.isfinite(matrix)] = np.nan
    known = np.isfinite(matrix)
    mean = np.where(known, matrix, 0.0).sum(1) / np.maximum(known.sum(1), 1)
    order = np.argsort(-mean, kind="stable")
    return matrix[order], [experts[i] for i in order], steps


def load_heatmap(ax: Axes, frame: pl.DataFrame, layer: int | None, *, colour_bar: bool = True) -> Axes:
    """Draw one layer's heatmap into `ax` and return it."""
    import matplotlib as mpl
    import seaborn as sns

    matrix, experts, steps = load_matrix(frame, layer)
    ax.set_title("all layers" if layer is None else f"layer {layer}")
    if not np.isfinite(matrix).any():
        say_empty(ax, "expert_load is undefined at every step of this layer")
        return ax
    with np.errstate(divide="ignore"):
        scaled = np.log2(matrix)
    # The ends of the map are nearly black; cut off, they leave black to the idle experts alone.
    ends = mpl.colormaps["PuOr_r"](np.linspace(0.12, 0.9, 256))
    colours = mpl.colors.ListedColormap(ends).with_extremes(under=IDLE)
    # An idle expert has no logarithm: it goes below the scale, where the map has a colour of its own.
    scaled[np.isneginf(scaled)] = -99.0
    shown = np.where(scaled > -98, np.clip(scaled, -_SPAN, _SPAN), scaled)
    sns.heatmap(
        shown,
        ax=ax,
        cmap=colours,
        vmin=-_SPAN,
        vmax=_SPAN,
        mask=~np.isfinite(matrix),
        rasterized=True,
        linewidths=0,
        xticklabels=False,
        yticklabels=False,
        cbar=False,
    )
    _ticks(ax, experts, steps)
    if colour_bar:
        bar = ax.figure.colorbar(ax.collections[0], ax=ax, extend="min", pad=0.02, aspect=18)
        bar.set_label("load / uniform load [×]")
        bar.set_ticks([-2, -1, 0, 1, 2], labels=["¼", "½", "1", "2", "4"])
        bar.outline.set_visible(False)
        bar.ax.text(0.5, -0.08, "idle", transform=bar.ax.transAxes, ha="center", va="top", fontsize=7)
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One panel per layer, at most twelve layers spread evenly over the depth. Unit: multiples of the uniform load."""
    frame = thin_steps(tidy(frame).filter(pl.col("metric") == "expert_load"), 600)
    if _per_expert(frame).is_empty():
        raise need_per_expert(_NAME, "expert_load")
    layers = _per_expert(frame)["layer"].unique().sort().to_list()
    shown = layers
    if len(layers) > MAX_LAYERS:
        shown = [layers[i] for i in np.linspace(0, len(layers) - 1, MAX_LAYERS).round().astype(int)]
    figure, axes = new_figure(width, len(shown), panel_height=2.1, max_columns=2)
    for ax, layer in zip(axes, shown, strict=True):
        load_heatmap(ax, frame, layer)
    if len(shown) < len(layers):
        figure.supxlabel(f"{len(shown)} of {len(layers)} layers, evenly spaced", fontsize=7)
    return figure


def _per_expert(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.filter(
        (pl.col("metric") == "expert_load")
        & pl.col("expert").is_not_null()
        & pl.col("step").is_not_null()
        & ~pl.col("flag").is_in(SUMMARIES)
    )


def _ticks(ax: Axes, experts: list[int], steps: list[int]) -> None:
    ax.set_xlabel("optimizer step [steps]")
    ax.set_ylabel("expert [id, busiest on top]")
    ax.grid(False)
    columns = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).round().astype(int))
    ax.set_xticks(columns + 0.5, [str(steps[i]) for i in columns], rotation=0)
    rows = np.unique(np.linspace(0, len(experts) - 1, min(9, len(experts))).round().astype(int))
    ax.set_yticks(rows + 0.5, [str(experts[i]) for i in rows], rotation=0)
    gaps = np.diff(steps)
    if gaps.size and gaps.max() > gaps.min():  # the recording has holes: mark them, the axis counts recorded steps
        for place in np.flatnonzero(gaps > gaps.min()):
            ax.axvline(float(place) + 1, color="white", linewidth=1.0)


PLOT = Plot(
    name=_NAME,
    title="Expert load over time",
    requires=("expert_load",),
    draw=themed(draw),
    caption=(
        "Share of the executed top-k slots that each expert got in each step, as a multiple of the uniform share, one "
        "panel per layer. Experts are sorted by mean load, the busiest on top; orange is more than its share, purple "
        "less, black idle; the scale ends at a quarter and four times. White lines mark steps that were not "
        "recorded."
    ),
    per_expert=True,
)
