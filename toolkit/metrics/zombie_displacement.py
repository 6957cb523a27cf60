"""How far a recipe moved each expert in steps in which the expert had no gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from toolkit.metrics._experts import activity, norm
from toolkit.metrics._metric import Measure, Metric, Subject
from traces.views import StepView


@dataclass
class Moved:
    """Summed ||delta|| over idle steps, the number of those steps, and of those that were not finite, all [E]."""

    total: np.ndarray
    steps: np.ndarray
    broken: np.ndarray


def init(subject: Subject) -> Moved:
    """Nothing moved."""
    return Moved(*(np.zeros(subject.experts) for _ in range(3)))


def update(state: Moved, view: StepView) -> Iterable[Measure]:
    """The step's own move of each idle expert; null for experts that had a gradient."""
    _, idle = activity(view)
    value = np.where(idle, norm(view, "delta"), np.nan)
    good = np.isfinite(value)
    state.total[good] += value[good]
    state.steps += good
    state.broken += np.isinf(value)
    yield Measure(value, view.step, support=good.astype(np.float64))


def result(state: Moved) -> Iterable[Measure]:
    """The summed moves; 0 for a recipe that leaves idle experts alone, null for an expert that was never idle."""
    value = np.where(state.steps > 0, state.total, np.nan)
    yield Measure(np.where(state.broken > 0, np.inf, value), support=state.steps.copy())


METRIC = Metric(
    name="zombie_displacement",
    group="update",
    needs=("delta", "gradient", "presence"),
    scope="parameter",
    unit="weight",
    formula="sum over idle t of ||W_{t+1} - W_t||, idle: the gradient was None or exactly zero",
    citation="definition of this project",
    init=init,
    update=update,
    result=result,
    doc=(
        "Counts all movement, weight decay included. A parameter that was not stepped at all (`.grad` None) makes no "
        "delta and no row value. Step rows hold the step's move, the last row the sum. Support: idle steps."
    ),
)
