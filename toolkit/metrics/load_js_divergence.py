"""How far the load of a layer moved between two steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._lagged import LAGS, PairSums
from toolkit.metrics._load import counts_of, loads
from toolkit.metrics._metric import Measure, Metric
from traces.views import StepView


def js_divergence(left: np.ndarray, right: np.ndarray) -> float:
    """Two distributions [E] -> nats in [0, ln 2]; NaN if one of them is unknown."""
    if np.isnan(left).any() or np.isnan(right).any():
        return float("nan")
    middle = (left + right) / 2
    total = 0.0
    for part in (left, right):
        used = part > 0
        total += float((part[used] * np.log(part[used] / middle[used])).sum()) / 2
    return max(total, 0.0)


def update(state: PairSums, view: StepView) -> Iterable[Measure]:
    """Step rows for the smallest lag; a step without tokens has no load and makes no pair."""
    state.ring.follow(view.step)
    now = loads(counts_of(view))
    for lag in state.subject.lags:
        before = state.ring.back(lag)
        value = float("nan") if before is None else js_divergence(now, before)
        state.add(lag, np.full(1, value), np.ones(1))
        if lag == state.subject.lags[0]:
            yield Measure(value, view.step, lag, float(np.isfinite(value)))
    state.ring.keep(now)


def result(state: PairSums) -> Iterable[Measure]:
    """Mean over the pairs, for every lag."""
    yield from state.single_means()


METRIC = Metric(
    name="load_js_divergence",
    group="routing",
    needs=("routing",),
    scope="layer",
    unit="nat",
    formula="mean over t of (KL(p_t || m) + KL(p_{t-lag} || m)) / 2 with m = (p_t + p_{t-lag}) / 2",
    citation="J. Lin, Divergence Measures Based on the Shannon Entropy, IEEE Trans. Inf. Theory 37, 1991",
    init=PairSums.start_single,
    update=update,
    result=result,
    lags=LAGS,
    doc=(
        "p_t = expert_load of step t. Pairs across gaps between recorded steps do not exist. Support: number of pairs. "
        "Memory: max(lags) times E numbers."
    ),
)
