"""How much of each expert's gradient power survives averaging over time."""

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
    """1 if all gradients are equal, about 1/n for white noise, 0 if they cancel; null for an expert never active."""
    value = np.where((state.count == 0) & (state.broken > 0), np.inf, np.nan)
    good = state.count > 0
    squares = state.squares()[good]
    value[good] = squares / (squares + state.scatter[good] / state.count[good])
    yield Measure(value, support=state.count.copy())


METRIC = Metric(
    name="coherence",
    group="gradient",
    needs=("gradient", "presence"),
    scope="parameter",
    unit="1",
    formula="||mean over t of g_t||^2 / mean over t of ||g_t||^2, t over the n active steps",
    citation="Chatterjee and Zielinski 2020, arXiv 2008.01217 (there over examples, here over steps)",
    init=Moments.start,
    update=update,
    result=result,
    doc=(
        "In [0, 1]; n times the value is the paper's m-coherence. Support: active steps n. Memory: one float64 copy of "
        "the parameter."
    ),
)
