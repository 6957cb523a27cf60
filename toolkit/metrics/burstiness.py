"""Whether an expert's gradients come evenly, at random, or in bursts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from toolkit.metrics._experts import activity
from toolkit.metrics._metric import Measure, Metric, Subject
from traces.views import StepView


@dataclass
class Intervals:
    """Last active step (NaN: none since the last gap) and count, sum, sum of squares of the intervals, all [E]."""

    last: np.ndarray
    count: np.ndarray
    total: np.ndarray
    squares: np.ndarray
    step: int | None = None


def init(subject: Subject) -> Intervals:
    """No step seen."""
    count, total, squares = np.zeros((3, subject.experts))
    return Intervals(np.full(subject.experts, np.nan), count, total, squares)


def update(state: Intervals, view: StepView) -> Iterable[Measure]:
    """Close an interval for each active expert; none reaches across a gap, or a step without a record of it."""
    if state.step is not None and view.step != state.step + 1:
        state.last[:] = np.nan
    state.step = view.step
    active, idle = activity(view)
    state.last[~active & ~idle] = np.nan
    closed = active & ~np.isnan(state.last)
    interval = view.step - state.last[closed]
    state.count[closed] += 1
    state.total[closed] += interval
    state.squares[closed] += interval**2
    state.last[active] = view.step
    return ()


def result(state: Intervals) -> Iterable[Measure]:
    """-1 for regular gradients (every step, or every fourth), 0 for a Poisson process, towards 1 for bursts."""
    value = np.full(state.count.shape, np.nan)
    good = state.count >= 2
    mean = state.total[good] / state.count[good]
    deviation = np.sqrt(np.maximum(state.squares[good] / state.count[good] - mean**2, 0.0))
    value[good] = (deviation - mean) / (deviation + mean)
    yield Measure(value, support=state.count.copy())


METRIC = Metric(
    name="burstiness",
    group="gradient",
    needs=("gradient", "presence"),
    scope="parameter",
    unit="1",
    formula="(s - m) / (s + m), m and s = mean and standard deviation of the steps between two active steps",
    citation="Goh and Barabasi 2008, Europhysics Letters 81, 48002",
    init=init,
    update=update,
    result=result,
    doc=(
        "Population standard deviation; null for fewer than two intervals. Intervals across gaps of the recording do "
        "not exist. Support: number of intervals."
    ),
)
