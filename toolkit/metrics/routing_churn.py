"""Share of the expert slots of a probe batch that changed between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from toolkit.metrics._lagged import LAGS, PairSums
from toolkit.metrics._metric import Measure, Metric, Subject
from toolkit.metrics._probe import common_experts, probe_ids, same_batch
from traces.views import StepView


@dataclass
class Churn:
    """Sums over pairs, and the probes of the last max(lags) steps."""

    sums: PairSums
    recent: dict[int, np.ndarray] = field(default_factory=dict)


def init(subject: Subject) -> Churn:
    """No probe seen."""
    return Churn(PairSums.start_single(subject))


def update(state: Churn, view: StepView) -> Iterable[Measure]:
    """Step rows for the smallest lag that has a partner here. Probes may be sparse: only their distance counts."""
    ids = probe_ids(view)
    if ids is None:
        return
    lags = state.sums.subject.lags
    reported = False
    for lag in lags:
        before = state.recent.get(view.step - lag)
        if before is None:
            continue
        same_batch(before, ids, view.step)
        value, support = churn(before, ids)
        state.sums.add(lag, np.full(1, value), np.ones(1))
        if not reported:
            yield Measure(value, view.step, lag, support)
            reported = True
    state.recent[view.step] = ids
    for step in [s for s in state.recent if s <= view.step - max(lags)]:
        del state.recent[step]


def churn(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """(mean share of changed slots, tokens compared); NaN where no token was routed."""
    both, left, right = common_experts(before, after)
    slots = np.maximum(left, right)
    good = slots > 0
    return (float((1 - both[good] / slots[good]).mean()) if good.any() else float("nan")), float(good.sum())


def result(state: Churn) -> Iterable[Measure]:
    """Mean over the pairs, for every lag."""
    yield from state.sums.single_means()


METRIC = Metric(
    name="routing_churn",
    group="routing",
    needs=("probe",),
    scope="layer",
    unit="1",
    formula="mean over t and probe tokens of 1 - |A_t and A_{t-lag}| / max(|A_t|, |A_{t-lag}|), A_t = experts executed",
    citation="definition of this project",
    init=init,
    update=update,
    result=result,
    lags=LAGS,
    doc=(
        "The lag counts optimizer steps, so probes of every 100th step make pairs for lags 100, 200, ... alone. "
        "Support: probe tokens in step rows, pairs in the rows over the recording. Memory: max(lags) probes."
    ),
)
