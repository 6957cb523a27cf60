"""Bytes of gradient buffers that must survive from step to step."""

from __future__ import annotations

from toolkit.metrics._cost import last_cost
from toolkit.metrics._metric import Metric

_init, _update, _result = last_cost("pinned_gradient_bytes")

METRIC = Metric(
    name="pinned_gradient_bytes",
    group="cost",
    needs=("cost",),
    scope="parameter",
    unit="B",
    formula="sum over the slots at home in `grad_buffer` of elements * bytes per element",
    citation="definition of this project",
    init=_init,
    update=_update,
    result=_result,
    doc="Not free memory: the buffer lives through forward and backward. One value per parameter, not per expert.",
)
