"""How much a recipe amplifies each expert's gradient, beside the tokens that made it."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.metrics._experts import norm, quotient, tokens_of
from toolkit.metrics._metric import Measure, Metric, Subject, nothing
from traces.views import StepView


def update(state: Subject, view: StepView) -> Iterable[Measure]:
    """Null where the expert had no gradient, or a gradient of zero (the ratio is unbounded)."""
    yield Measure(quotient(norm(view, "update"), norm(view, "gradient")), view.step, support=tokens_of(view))


METRIC = Metric(
    name="amplification",
    group="update",
    needs=("update", "gradient"),
    scope="parameter",
    unit="1",
    formula="||u_t|| / ||g_t||",
    citation="definition of this project",
    init=lambda subject: subject,
    update=update,
    result=nothing,
    doc="Support: tokens routed to the expert in the step, if routing was recorded; to be drawn against it.",
)
