"""Tokens routed to each expert, per step and in all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from toolkit.metrics._load import counts_of
from toolkit.metrics._metric import Measure, Metric, Subject
from traces.views import StepView


@dataclass
class Total:
    """Summed counts, float64 [E], and the number of steps behind them."""

    counts: np.ndarray
    steps: int = 0


def init(subject: Subject) -> Total:
    """No token yet."""
    return Total(np.zeros(subject.experts))


def update(state: Total, view: StepView) -> Iterable[Measure]:
    """The counts of one step; an expert without tokens has 0, which is a count and not a gap."""
    counts = counts_of(view)
    state.counts += counts
    state.steps += 1
    yield Measure(counts, view.step, support=float(counts.sum()))


def result(state: Total) -> Iterable[Measure]:
    """The counts of the whole recording."""
    if state.steps:
        yield Measure(state.counts.copy(), support=float(state.counts.sum()))


METRIC = Metric(
    name="tokens_per_expert",
    group="load",
    needs=("routing",),
    scope="layer",
    unit="tokens",
    formula="c_e = number of executed slots (token, k) with expert e, padding left out",
    citation="definition of this project",
    init=init,
    update=update,
    result=result,
    doc="Slots that were dropped (id -1) are not counted. Support: slots counted over all experts.",
)
