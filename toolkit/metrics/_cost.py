"""Costs: numbers the optimizer at work reports beside its views, in `Subject.cost`."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.metrics._lagged import Functions
from toolkit.metrics._metric import Measure, Subject
from traces.views import StepView


def last_cost(key: str) -> Functions:
    """init, update and result that report the last known `Subject.cost[key]` once, at the end; null if never told."""

    def update(state: Subject, view: StepView) -> Iterable[Measure]:
        return ()

    def result(state: Subject) -> Iterable[Measure]:
        value = (state.cost or {}).get(key)
        yield Measure(float("nan") if value is None else float(value), support=None if value is None else 1.0)

    return lambda subject: subject, update, result
