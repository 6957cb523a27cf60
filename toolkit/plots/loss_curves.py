"""The validation loss of every arm of an experiment, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._theme import Width, themed
from toolkit.plots._training import way_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One panel per way of comparing, one line per arm. Unit: nats."""
    return way_curves(frame, "valid_loss", "validation loss [nats]", width=width)


PLOT = Plot(
    name="loss_curves",
    title="Validation loss",
    requires=("valid_loss",),
    draw=themed(draw),
    caption=(
        "Validation loss in nats per token against the step, the mean over seeds, one panel per way of comparing the "
        "arms. A run that diverged is in no line beyond the step where it did."
    ),
    about="training",
)
