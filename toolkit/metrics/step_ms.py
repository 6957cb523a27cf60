"""Time of one step of a recipe on a parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.metrics._metric import Measure, Metric, Subject
from traces.views import StepView


@dataclass
class Times:
    """Summed milliseconds and steps."""

    subject: Subject
    total_ms: float = 0.0
    steps: int = 0


def update(state: Times, view: StepView) -> Iterable[Measure]:
    """Add the time last told in `Subject.cost["step_ms"]`."""
    told = (state.subject.cost or {}).get("step_ms")
    if told is not None:
        state.total_ms += float(told)
        state.steps += 1
    return ()


def result(state: Times) -> Iterable[Measure]:
    """The mean; null if no time was told."""
    yield Measure(state.total_ms / state.steps if state.steps else float("nan"), support=float(state.steps))


METRIC = Metric(
    name="step_ms",
    group="cost",
    needs=("cost",),
    scope="parameter",
    unit="ms",
    formula="mean over t of the wall-clock time of the recipe's step on this parameter",
    citation="definition of this project",
    init=Times,
    update=update,
    result=result,
    doc=(
        "As measured where the replay or the run took place, first steps included: compare recipes within one Frame, "
        "never across machines. Support: steps."
    ),
)
