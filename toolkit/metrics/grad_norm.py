"""L2 norm of the gradient, per expert and step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._experts import elements, norm
from toolkit.metrics._metric import Measure, Metric, Subject, nothing
from traces.views import StepView


def update(state: Subject, view: StepView) -> Iterable[Measure]:
    """One value per expert: 0 for a recorded slice of zeros, null where `.grad` was None or nothing was recorded."""
    value = norm(view, "gradient")
    yield Measure(value, view.step, support=np.where(np.isnan(value), 0.0, elements(view)))


METRIC = Metric(
    name="grad_norm",
    group="gradient",
    needs=("gradient",),
    scope="parameter",
    unit="gradient",
    formula="||g_t||_2",
    citation="definition of this project",
    init=lambda subject: subject,
    update=update,
    result=nothing,
    doc="Accumulated in float64. Support: elements per expert.",
)
