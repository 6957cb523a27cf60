"""How far the recipes end from each other: distances between weights, every pair of recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import rows_of, tidy
from toolkit.plots._theme import Width, new_figure, recipe_order, say_empty, text, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DISTANCE, _COSINE = "pairwise_weight_distance", "pairwise_update_cos"
_BETWEEN = " vs "


def pair_matrix(rows: pl.DataFrame) -> tuple[np.ndarray, list[str]]:
    """Symmetric [R, R] of the mean value of each pair, NaN on the diagonal and where undefined; the recipes."""
    pairs = [(*str(name).split(_BETWEEN, 1), value) for name, value in rows.select("recipe", "value").iter_rows()]
    names = recipe_order({side for *both, _ in pairs for side in both})
    sums, count = np.zeros((len(names), len(names))), np.zeros((len(names), len(names)))
    for *both, value in pairs:
        if len(both) == 2:
            i, j = (names.index(side) for side in both)
            sums[[i, j], [j, i]] += value
            count[[i, j], [j, i]] += 1
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan), names


def matrix_panel(ax: Axes, matrix: np.ndarray, names: list[str], label: str) -> Axes:
    """Draw [R, R] with its numbers in the cells; return `ax`."""
    import matplotlib as mpl

    ax.grid(False)
    ax.set_xlabel("recipe [number of the row]")
    ax.set_ylabel("recipe [number, name]")
    known = matrix[np.isfinite(matrix)]
    if not known.size:
        say_empty(ax, "no pair of recipes has a value")
        return ax
    low, high = min(0.0, float(known.min())), max(float(known.max()), 1e-30)
    colours = mpl.colormaps["cividis"].with_extremes(bad="white")
    mesh = ax.imshow(np.ma.masked_invalid(matrix), cmap=colours, vmin=low, vmax=high, aspect="auto")
    for i, j in np.argwhere(np.isfinite(matrix)):
        dark = (matrix[i, j] - low) / (high - low) < 0.55
        ax.text(j, i, f"{matrix[i, j]:.2g}", ha="center", va="center", fontsize=6.5, color="white" if dark else "black")
    places = range(len(names))
    ax.set_xticks(places, [str(i + 1) for i in places])
    ax.set_yticks(places, [f"{i + 1} {text(name, 18)}" for i, name in enumerate(names)])
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=18)
    bar.set_label(label)
    bar.outline.set_visible(False)
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page", role: str = "routed_expert") -> Figure:
    """Distance after the last step, and mean cosine over the steps. Units: that of the weight, and 1."""
    frame = tidy(frame)
    distances = rows_of(frame, _DISTANCE, role)
    last = distances.filter(pl.col("step") == pl.col("step").max())
    figure, (left, right) = new_figure(width, 2, panel_height=2.4)
    matrix_panel(left, *pair_matrix(last), "distance at the end [weight]")
    left.set_title("weights")
    matrix_panel(right, *pair_matrix(rows_of(frame, _COSINE, role)), "mean cosine [1]")
    right.set_title("updates")
    return figure


PLOT = Plot(
    name="recipe_distances",
    title="Recipes against each other",
    requires=(_DISTANCE, _COSINE),
    draw=themed(draw),
    caption=(
        "Every pair of recipes on routed experts, all parameters as one vector: how far apart their weights are after "
        "the last step (left), and the cosine between their updates of the same step, the mean over steps (right)."
    ),
    about="trajectory",
)
