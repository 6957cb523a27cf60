"""For how many steps in a row each expert has got no token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from toolkit.metrics._load import counts_of
from toolkit.metrics._metric import Measure, Metric, Subject
from traces.views import StepView


@dataclass
class Runs:
    """Current and longest run of idle steps, float64 [E]; the last step and the number of steps seen."""

    current: np.ndarray
    longest: np.ndarray
    last: int | None = None
    steps: int = 0


def init(subject: Subject) -> Runs:
    """No step seen."""
    return Runs(np.zeros(subject.experts), np.zeros(subject.experts))


def update(state: Runs, view: StepView) -> Iterable[Measure]:
    """The run each expert is in; 0 for an expert with tokens. A gap in the recording ends every run."""
    if state.last is not None and view.step != state.last + 1:
        state.current[:] = 0
    state.last = view.step
    state.steps += 1
    state.current = np.where(counts_of(view) == 0, state.current + 1, 0.0)
    state.longest = np.maximum(state.longest, state.current)
    yield Measure(state.current.copy(), view.step, support=1.0)


def result(state: Runs) -> Iterable[Measure]:
    """The longest run of each expert."""
    if state.steps:
        yield Measure(state.longest.copy(), support=float(state.steps))


METRIC = Metric(
    name="idle_run_length",
    group="load",
    needs=("routing",),
    scope="layer",
    unit="steps",
    formula="number of consecutive steps up to t with c_e = 0; over the recording: the longest such run",
    citation="definition of this project",
    init=init,
    update=update,
    result=result,
    doc="Runs do not reach across gaps between recorded steps, so in bursts they are lower bounds. Support: steps.",
)
