"""Length of the way each expert's weight went."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._metric import Measure, Metric
from toolkit.metrics._path import Path
from traces.views import StepView


def update(state: Path, view: StepView) -> Iterable[Measure]:
    """Add one step; nothing is reported before the end."""
    state.walk(view)
    return ()


def result(state: Path) -> Iterable[Measure]:
    """The whole way; null for an expert that was never stepped."""
    yield Measure(np.where(state.steps > 0, state.length, np.nan), support=state.steps.copy())


METRIC = Metric(
    name="path_length",
    group="trajectory",
    needs=("delta",),
    scope="parameter",
    unit="weight",
    formula="sum over t of ||W_{t+1} - W_t||",
    citation="definition of this project",
    init=Path.start_of,
    update=update,
    result=result,
    doc="lr and weight decay are included. Support: steps.",
)
