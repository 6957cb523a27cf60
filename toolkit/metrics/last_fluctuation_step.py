"""When the tokens of a probe batch were last routed elsewhere than at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from toolkit.metrics._metric import Measure, Metric, Subject
from toolkit.metrics._probe import probe_ids, same_batch
from traces.views import StepView

_QUANTILES = ((10, "p10"), (50, "p50"), (90, "p90"))


@dataclass
class Settled:
    """The last probe's ids [N, K] and step; per token [N] the last step with other experts, NaN for never."""

    ids: np.ndarray | None = None
    step: int = 0
    changed: np.ndarray | None = None


def init(subject: Subject) -> Settled:
    """No probe seen."""
    return Settled()


def update(state: Settled, view: StepView) -> Iterable[Measure]:
    """A token that changed now was routed elsewhere at the probe before; that is its last fluctuation so far."""
    ids = probe_ids(view)
    if ids is None:
        return ()
    if state.ids is None or state.changed is None:
        state.changed = np.full(len(ids), np.nan)
    else:
        same_batch(state.ids, ids, view.step)
        state.changed[(state.ids != ids).any(axis=1)] = state.step
    state.ids, state.step = ids, view.step
    return ()


def result(state: Settled) -> Iterable[Measure]:
    """mean, p10, p50 and p90 over the tokens that ever changed; null if none did."""
    steps = np.empty(0) if state.changed is None else state.changed[~np.isnan(state.changed)]
    if not len(steps):
        yield Measure(float("nan"), support=0.0)
        return
    yield Measure(float(steps.mean()), support=float(len(steps)), flag="mean")
    for percent, flag in _QUANTILES:
        yield Measure(float(np.percentile(steps, percent)), support=float(len(steps)), flag=flag)


METRIC = Metric(
    name="last_fluctuation_step",
    group="routing",
    needs=("probe",),
    scope="layer",
    unit="step",
    formula="over probe tokens: max of the steps t with A_t != A_T, A_t = experts executed, T = the last probe",
    citation="Dai et al. 2022, arXiv 2204.08396 (StableMoE, last fluctuation step)",
    init=init,
    update=update,
    result=result,
    doc="Of the tokens that changed at all; support is their number. Memory: one probe and N numbers.",
)
