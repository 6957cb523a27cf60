"""Gini coefficient of the load over experts."""

from __future__ import annotations

import numpy as np

from toolkit.metrics._load import of_counts
from toolkit.metrics._metric import Metric


def load_gini(counts: np.ndarray) -> float:
    """Counts [E], not all zero -> 0 for equal loads, (E - 1) / E if one expert gets everything."""
    ordered = np.sort(counts)
    ranks = np.arange(1, len(ordered) + 1)
    return float(((2 * ranks - len(ordered) - 1) * ordered).sum() / (len(ordered) * ordered.sum()))


_init, _update, _result = of_counts(load_gini)

METRIC = Metric(
    name="load_gini",
    group="load",
    needs=("routing",),
    scope="layer",
    unit="1",
    formula="sum over e, f of |c_e - c_f| / (2 E sum over e of c_e)",
    citation="C. Gini, Variabilita e mutabilita, 1912 (mean difference over twice the mean)",
    init=_init,
    update=_update,
    result=_result,
    doc="Computed from the sorted counts. Null in a step without tokens. Support: slots.",
)
