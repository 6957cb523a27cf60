"""Cosine between the gradients of two steps, per expert and lag."""

from __future__ import annotations

from toolkit.metrics._lagged import LAGS, lagged_cos
from toolkit.metrics._metric import Metric

_init, _update, _result = lagged_cos("gradient")

METRIC = Metric(
    name="grad_cos",
    group="gradient",
    needs=("gradient",),
    scope="parameter",
    unit="1",
    formula="mean over t of <g_t, g_{t-lag}> / (||g_t|| ||g_{t-lag}||)",
    citation="definition of this project; the sample autocorrelation of a unit vector",
    init=_init,
    update=_update,
    result=_result,
    lags=LAGS,
    doc=(
        "Over the pairs of steps lag apart, without a gap between, at both of which the expert had a gradient. "
        "Step rows for the smallest lag; recording-wide means for every lag. Support: number of pairs."
    ),
)
