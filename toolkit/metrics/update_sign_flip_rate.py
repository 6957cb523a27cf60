"""Share of update elements whose sign differs between two steps, per expert and lag."""

from __future__ import annotations

from toolkit.metrics._lagged import LAGS, lagged_flips
from toolkit.metrics._metric import Metric

_init, _update, _result = lagged_flips("update")

METRIC = Metric(
    name="update_sign_flip_rate",
    group="update",
    needs=("update",),
    scope="parameter",
    unit="1",
    formula="sum over t, i of [u_{t,i} u_{t-lag,i} < 0] / sum over t, i of [u_{t,i} u_{t-lag,i} != 0]",
    citation="definition of this project",
    init=_init,
    update=_update,
    result=_result,
    lags=LAGS,
    doc=(
        "Elements that are zero at either step do not count. Step rows for the smallest lag; pooled over the recording "
        "for every lag. Support: elements compared."
    ),
)
