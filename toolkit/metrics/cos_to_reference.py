"""Cosine between a recipe's update and that of the replay's reference recipe."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._experts import cosine, dot, norm
from toolkit.metrics._metric import Measure, Metric, Subject, nothing
from traces.views import StepView


def update(state: Subject, view: StepView) -> Iterable[Measure]:
    """Null where one of the two recipes did not move the expert."""
    value = cosine(dot(view, "update", "reference_update"), norm(view, "update"), norm(view, "reference_update"))
    yield Measure(value, view.step, support=np.isfinite(value).astype(np.float64))


METRIC = Metric(
    name="cos_to_reference",
    group="update",
    needs=("update", "reference"),
    scope="parameter",
    unit="1",
    formula="<u_t, r_t> / (||u_t|| ||r_t||), r_t = update of the reference recipe in the same step",
    citation="definition of this project",
    init=lambda subject: subject,
    update=update,
    result=nothing,
    doc="1 for the reference itself. Support: 1 or 0.",
)
