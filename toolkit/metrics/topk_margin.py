"""How close the router's choice is: the gap between the last expert chosen and the first one left out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._load import routing_of
from toolkit.metrics._metric import Measure, Metric, Subject, nothing
from traces.views import StepView

_QUANTILES = ((10, "p10"), (50, "p50"), (90, "p90"))


def update(state: Subject, view: StepView) -> Iterable[Measure]:
    """Mean and quantiles over the tokens that are not padding; null where every expert is chosen."""
    routing = routing_of(view)
    if routing.logits is None:
        return
    chosen = np.asarray(routing.topk_expert_ids).shape[1]
    logits = np.asarray(routing.logits, dtype=np.float64)[~np.asarray(routing.is_pad, dtype=bool)]
    if not len(logits) or not 0 < chosen < logits.shape[1]:
        yield Measure(float("nan"), view.step, support=0.0)
        return
    place = logits.shape[1] - chosen
    ordered = np.partition(logits, (place - 1, place), axis=1)
    margins = ordered[:, place] - ordered[:, place - 1]
    good = margins[np.isfinite(logits).all(axis=1)]
    if len(good) < len(margins):
        yield Measure(float("inf"), view.step, support=float(len(margins) - len(good)))
    if len(good):
        support = float(len(good))
        yield Measure(float(good.mean()), view.step, support=support, flag="mean")
        for percent, flag in _QUANTILES:
            yield Measure(float(np.percentile(good, percent)), view.step, support=support, flag=flag)


METRIC = Metric(
    name="topk_margin",
    group="routing",
    needs=("routing", "logits"),
    scope="layer",
    unit="logit",
    formula="over tokens: K-th largest router logit minus the (K+1)-th",
    citation="definition of this project",
    init=lambda subject: subject,
    update=update,
    result=nothing,
    doc=(
        "Of the logits as recorded, before any balancing bias. Ties give 0. mean, p10, p50 and p90 over tokens. Tokens "
        "with logits that are not finite are left out and counted in a nonfinite row. Support: tokens."
    ),
)
