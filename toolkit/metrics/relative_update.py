"""Change of the weight in one step, relative to the weight."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._experts import norm, quotient
from toolkit.metrics._metric import Measure, Metric, Subject, nothing
from traces.views import StepView


def update(state: Subject, view: StepView) -> Iterable[Measure]:
    """Null for a weight of zero, and for a parameter that was not stepped."""
    value = quotient(norm(view, "delta"), norm(view, "weight"))
    yield Measure(value, view.step, support=np.isfinite(value).astype(np.float64))


METRIC = Metric(
    name="relative_update",
    group="update",
    needs=("delta", "weight"),
    scope="parameter",
    unit="1",
    formula="||W_{t+1} - W_t|| / ||W_t||",
    citation="You, Gitman and Ginsburg 2017, arXiv 1708.03888 (the ratio that LARS fixes)",
    init=lambda subject: subject,
    update=update,
    result=nothing,
    doc="lr and weight decay are included. Support: 1 or 0.",
)
