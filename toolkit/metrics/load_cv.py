"""Coefficient of variation of the load over experts."""

from __future__ import annotations

import numpy as np

from toolkit.metrics._load import of_counts
from toolkit.metrics._metric import Metric


def load_cv(counts: np.ndarray) -> float:
    """Counts [E], not all zero -> population standard deviation over mean."""
    return float(counts.std() / counts.mean())


_init, _update, _result = of_counts(load_cv)

METRIC = Metric(
    name="load_cv",
    group="load",
    needs=("routing",),
    scope="layer",
    unit="1",
    formula="sqrt(mean over e of (c_e - c)^2) / c with c = mean over e of c_e",
    citation="Shazeer et al. 2017, arXiv 1701.06538, section 4 (CV; its square enters the loss there)",
    init=_init,
    update=_update,
    result=_result,
    doc="Population form (divided by E). 0 for equal loads, sqrt(E - 1) if one expert gets everything. Support: slots.",
)
