"""How far the weights of each arm of an experiment really move in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._theme import Width, themed
from toolkit.plots._training import way_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One panel per way of comparing, one line per arm. Unit: that of a weight."""
    return way_curves(frame, "delta_rms", "RMS of the weight change [weight]", width=width)


PLOT = Plot(
    name="delta_rms_curves",
    title="Size of the weight change",
    requires=("delta_rms",),
    draw=themed(draw),
    caption=(
        "Root mean square over a parameter of the weight change of one step, lr and decay included, the mean over "
        "parameters and seeds. Where lines coincide, arms differ in direction alone; a line above another is the "
        "larger effective rate."
    ),
    about="training",
)
