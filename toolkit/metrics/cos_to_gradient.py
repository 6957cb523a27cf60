"""Cosine between a recipe's update and the gradient it was made from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._experts import cosine, dot, norm
from toolkit.metrics._metric import Measure, Metric, Subject, nothing
from traces.views import StepView


def update(state: Subject, view: StepView) -> Iterable[Measure]:
    """Null where the expert had no gradient or was not moved."""
    value = cosine(dot(view, "update", "gradient"), norm(view, "update"), norm(view, "gradient"))
    yield Measure(value, view.step, support=np.isfinite(value).astype(np.float64))


METRIC = Metric(
    name="cos_to_gradient",
    group="update",
    needs=("update", "gradient"),
    scope="parameter",
    unit="1",
    formula="<u_t, g_t> / (||u_t|| ||g_t||)",
    citation="definition of this project",
    init=lambda subject: subject,
    update=update,
    result=nothing,
    doc="The update is subtracted from the weight, so positive means descent on this step's batch. Support: 1 or 0.",
)
