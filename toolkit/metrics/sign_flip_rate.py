"""Share of gradient elements whose sign differs between two steps, per expert and lag."""

from __future__ import annotations

from toolkit.metrics._lagged import LAGS, lagged_flips
from toolkit.metrics._metric import Metric

_init, _update, _result = lagged_flips("gradient")

METRIC = Metric(
    name="sign_flip_rate",
    group="gradient",
    needs=("gradient",),
    scope="parameter",
    unit="1",
    formula="sum over t, i of [g_{t,i} g_{t-lag,i} < 0] / sum over t, i of [g_{t,i} g_{t-lag,i} != 0]",
    citation="definition of this project",
    init=_init,
    update=_update,
    result=_result,
    lags=LAGS,
    doc=(
        "Elements that are zero at either step do not count, so an idle step adds nothing. Signs are compared, never "
        "multiplied, so tiny gradients count. 1/2 for white noise. Step rows for the smallest lag; pooled over the "
        "recording for every lag. Support: elements compared."
    ),
)
