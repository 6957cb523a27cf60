"""Distance of each expert's weight from where it started."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._metric import Measure, Metric
from toolkit.metrics._path import Path
from traces.views import StepView


def update(state: Path, view: StepView) -> Iterable[Measure]:
    """The distance after this step."""
    state.steps += 1
    value = state.reach(view)
    yield Measure(value, view.step, support=np.where(np.isnan(value), 0.0, state.steps))


def result(state: Path) -> Iterable[Measure]:
    """The distance after the last step."""
    yield Measure(state.reached, support=state.steps.copy())


METRIC = Metric(
    name="displacement",
    group="trajectory",
    needs=("weight", "delta"),
    scope="parameter",
    unit="weight",
    formula="||W_{t+1} - W_0||",
    citation="definition of this project",
    init=Path.start_of,
    update=update,
    result=result,
    doc="W_0 = the weight before the first step. Support: steps since. Memory: a copy of W_0 unless it is given.",
)
