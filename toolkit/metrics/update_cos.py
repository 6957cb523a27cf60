"""Cosine between the updates of two steps, per expert and lag."""

from __future__ import annotations

from toolkit.metrics._lagged import LAGS, lagged_cos
from toolkit.metrics._metric import Metric

_init, _update, _result = lagged_cos("update")

METRIC = Metric(
    name="update_cos",
    group="update",
    needs=("update",),
    scope="parameter",
    unit="1",
    formula="mean over t of <u_t, u_{t-lag}> / (||u_t|| ||u_{t-lag}||)",
    citation="definition of this project",
    init=_init,
    update=_update,
    result=_result,
    lags=LAGS,
    doc=(
        "Over the pairs of steps lag apart, without a gap between, at both of which the update was not zero. "
        "Step rows for the smallest lag; recording-wide means for every lag. Support: number of pairs."
    ),
)
