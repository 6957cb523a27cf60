"""Root mean square of the update, per expert and step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._experts import elements, norm
from toolkit.metrics._metric import Measure, Metric, Subject, nothing
from traces.views import StepView


def update(state: Subject, view: StepView) -> Iterable[Measure]:
    """One value per expert; null where the recipe made no update (`.grad` was None and the parameter was skipped)."""
    count = elements(view)
    value = norm(view, "update") / np.sqrt(count) if count else np.full(state.experts, np.nan)
    yield Measure(value, view.step, support=np.where(np.isnan(value), 0.0, count))


METRIC = Metric(
    name="update_rms",
    group="update",
    needs=("update",),
    scope="parameter",
    unit="update",
    formula="sqrt(mean over i of u_{t,i}^2)",
    citation="Shazeer and Stern 2018, arXiv 1804.04235 (update clipping by RMS)",
    init=lambda subject: subject,
    update=update,
    result=nothing,
    doc="The update is the direction before lr. 0 for an expert that was skipped. Support: elements per expert.",
)
