"""Maximal violation of load balance."""

from __future__ import annotations

import numpy as np

from toolkit.metrics._load import of_counts
from toolkit.metrics._metric import Metric


def max_vio(counts: np.ndarray) -> float:
    """Counts [E], not all zero -> max/mean - 1: 0 for equal loads, E - 1 if one expert gets everything."""
    return float(counts.max() / counts.mean() - 1)


_init, _update, _result = of_counts(max_vio)

METRIC = Metric(
    name="max_vio",
    group="load",
    needs=("routing",),
    scope="layer",
    unit="1",
    formula="max over e of c_e / mean over e of c_e, minus 1",
    citation="Wang et al. 2024, arXiv 2408.15664 (MaxVio)",
    init=_init,
    update=_update,
    result=_result,
    doc="Step rows are the paper's batch violation, the row over the whole recording its global one. Support: slots.",
)
