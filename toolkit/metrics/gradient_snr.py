"""Signal-to-noise ratio of each expert's gradient over time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._metric import Measure, Metric
from toolkit.metrics._moments import Moments
from traces.views import StepView


def update(state: Moments, view: StepView) -> Iterable[Measure]:
    """Take in one step; nothing is reported before the end."""
    state.add(view)
    return ()


def result(state: Moments) -> Iterable[Measure]:
    """Null for fewer than two active steps, and for a gradient that never changed (the ratio is unbounded)."""
    value = np.where((state.count < 2) & (state.broken > 0), np.inf, np.nan)
    good = (state.count >= 2) & (state.scatter > 0)
    value[good] = state.squares()[good] * (state.count[good] - 1) / state.scatter[good]
    yield Measure(value, support=state.count.copy())


METRIC = Metric(
    name="gradient_snr",
    group="gradient",
    needs=("gradient", "presence"),
    scope="parameter",
    unit="1",
    formula="||m||^2 (n - 1) / sum over t of ||g_t - m||^2, m = mean over t of g_t, t over the n active steps",
    citation="definition of this project",
    init=Moments.start,
    update=update,
    result=result,
    doc=(
        "Power of the mean gradient over the variance of one step's gradient, both summed over elements. White noise "
        "gives about 1/n, not 0. Drift of the true gradient counts as noise. Support: active steps n. Memory: one "
        "float64 copy of the parameter."
    ),
)
