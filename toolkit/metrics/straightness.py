"""How straight the way of each expert's weight is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._experts import quotient
from toolkit.metrics._metric import Measure, Metric
from toolkit.metrics._path import Path
from traces.views import StepView


def update(state: Path, view: StepView) -> Iterable[Measure]:
    """Add one step; nothing is reported before the end."""
    state.walk(view)
    state.reach(view)
    return ()


def result(state: Path) -> Iterable[Measure]:
    """Null for an expert that never moved."""
    value = quotient(state.reached, np.where(state.steps > 0, state.length, np.nan))
    yield Measure(np.where(np.isfinite(value), np.minimum(value, 1.0), value), support=state.steps.copy())


METRIC = Metric(
    name="straightness",
    group="trajectory",
    needs=("weight", "delta"),
    scope="parameter",
    unit="1",
    formula="displacement / path_length",
    citation="definition of this project; the straightness index of a track",
    init=Path.start_of,
    update=update,
    result=result,
    doc=(
        "1 for a straight line, about 1/sqrt(n) for n steps of a random walk. A recording with gaps, in which the "
        "weight moved elsewhere is cut at 1. Support: steps. Memory: one copy of W_0 unless it is given."
    ),
)
