"""Bytes a recipe keeps in the optimizer's state for a parameter."""

from __future__ import annotations

from toolkit.metrics._cost import last_cost
from toolkit.metrics._metric import Metric

_init, _update, _result = last_cost("state_bytes")

METRIC = Metric(
    name="state_bytes",
    group="cost",
    needs=("cost",),
    scope="parameter",
    unit="B",
    formula="sum over the slots at home in `state` of elements * bytes per element",
    citation="definition of this project",
    init=_init,
    update=_update,
    result=_result,
    doc="Step counters are left out. To be read beside pinned_gradient_bytes. One value per parameter, not per expert.",
)
