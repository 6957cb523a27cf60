"""Entropy of the load over experts."""

from __future__ import annotations

import numpy as np

from toolkit.metrics._load import loads, of_counts
from toolkit.metrics._metric import Metric


def entropy(shares: np.ndarray) -> float:
    """Shares [E] that sum to 1 -> nats; 0 log 0 = 0."""
    used = shares[shares > 0]
    return float(-(used * np.log(used)).sum()) + 0.0


_init, _update, _result = of_counts(lambda counts: entropy(loads(counts)))

METRIC = Metric(
    name="expert_entropy",
    group="load",
    needs=("routing",),
    scope="layer",
    unit="nat",
    formula="-sum over e of p_e ln p_e",
    citation="C. E. Shannon, A Mathematical Theory of Communication, 1948",
    init=_init,
    update=_update,
    result=_result,
    doc="p_e = expert_load. ln E for equal loads, 0 if one expert gets everything. Support: slots.",
)
