"""Share of the experts that got no token."""

from __future__ import annotations

import numpy as np

from toolkit.metrics._load import of_counts
from toolkit.metrics._metric import Metric


def dead_fraction(counts: np.ndarray) -> float:
    """Counts [E], not all zero -> share of zeros."""
    return float((counts == 0).mean())


_init, _update, _result = of_counts(dead_fraction)

METRIC = Metric(
    name="dead_expert_fraction",
    group="load",
    needs=("routing",),
    scope="layer",
    unit="1",
    formula="number of experts with c_e = 0, over E",
    citation="definition of this project",
    init=_init,
    update=_update,
    result=_result,
    doc=(
        "Step rows: without a token in that step; the row over the whole recording: without a token in all of it. Null "
        "where no token was routed at all. Support: slots."
    ),
)
