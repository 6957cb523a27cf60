"""Distance between a recipe's weight and the reference recipe's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from toolkit.metrics._experts import norm_of_sum
from toolkit.metrics._metric import Measure, Metric, Subject
from traces.views import StepView


@dataclass
class Drift:
    """The last known distance and the steps fed, [E]."""

    last: np.ndarray
    steps: np.ndarray


def init(subject: Subject) -> Drift:
    """No step seen."""
    return Drift(np.full(subject.experts, np.nan), np.zeros(subject.experts))


def update(state: Drift, view: StepView) -> Iterable[Measure]:
    """The distance before this step, so 0 at the first."""
    value = norm_of_sum(view, (1.0, "weight"), (-1.0, "reference_weight"))
    known = ~np.isnan(value)
    state.steps += known
    state.last = np.where(known, value, state.last)
    yield Measure(value, view.step, support=known.astype(np.float64))


def result(state: Drift) -> Iterable[Measure]:
    """The distance before the last step."""
    yield Measure(state.last, support=state.steps.copy())


METRIC = Metric(
    name="drift_from_reference",
    group="trajectory",
    needs=("weight", "reference"),
    scope="parameter",
    unit="weight",
    formula="||W_t - R_t||, R_t = weight of the reference recipe before the same step",
    citation="definition of this project",
    init=init,
    update=update,
    result=result,
    doc="0 for the reference itself. Step rows: support 1 or 0; last row: steps.",
)
