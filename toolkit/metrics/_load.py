"""What the load metrics share: token counts of a layer, by step and over the whole recording.

Counts are executed slots of tokens that are not padding (`RoutingStep.tokens_per_expert`); E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.metrics._lagged import Functions
from toolkit.metrics._metric import Measure, Subject
from traces.views import RoutingStep, StepView

Statistic = Callable[[np.ndarray], float | np.ndarray]


def routing_of(view: StepView) -> RoutingStep:
    """The routing of a layer's view."""
    if view.routing is None:
        raise ValueError("a load metric was fed a view without routing")
    return view.routing


def counts_of(view: StepView) -> np.ndarray:
    """Tokens per expert, float64 [E]."""
    return np.asarray(routing_of(view).tokens_per_expert, dtype=np.float64)


def loads(counts: np.ndarray) -> np.ndarray:
    """Counts [E] -> shares [E] that sum to 1; NaN where no token was routed at all."""
    total = counts.sum()
    return counts / total if total > 0 else np.full(counts.shape, np.nan)


@dataclass
class _Total:
    counts: np.ndarray
    steps: int = 0


def of_counts(statistic: Statistic) -> Functions:
    """init, update and result of `statistic(counts [E])`: one row per step, one of the counts summed over all steps.

    Support: slots counted. Memory: E numbers.
    """

    def init(subject: Subject) -> _Total:
        return _Total(np.zeros(subject.experts))

    def update(state: _Total, view: StepView) -> Iterable[Measure]:
        counts = counts_of(view)
        state.counts += counts
        state.steps += 1
        yield _measure(statistic, counts, view.step)

    def result(state: _Total) -> Iterable[Measure]:
        if state.steps:
            yield _measure(statistic, state.counts, None)

    return init, update, result


def _measure(statistic: Statistic, counts: np.ndarray, step: int | None) -> Measure:
    total = float(counts.sum())
    value: Any = statistic(counts) if total > 0 else np.nan
    return Measure(value, step, support=total)
