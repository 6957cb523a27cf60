"""How much of the final routing of a probe batch was already there at earlier steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from toolkit.metrics._metric import Measure, Metric, Subject
from toolkit.metrics._probe import common_experts, probe_ids, same_batch
from traces.views import StepView

#: At most this many earlier probes are kept; when they are more, every second one goes, evenly over the recording.
KEPT = 64


@dataclass
class Probes:
    """Kept probes (step, ids [N, K]), one of `stride` probes seen; the last probe; the number seen."""

    kept: list[tuple[int, np.ndarray]] = field(default_factory=list)
    last: tuple[int, np.ndarray] | None = None
    stride: int = 1
    seen: int = 0


def init(subject: Subject) -> Probes:
    """No probe seen."""
    return Probes()


def update(state: Probes, view: StepView) -> Iterable[Measure]:
    """Keep the probe if its turn has come; what it is worth is known at the end."""
    ids = probe_ids(view)
    if ids is None:
        return ()
    if state.last is not None:
        same_batch(state.last[1], ids, view.step)
    if state.seen % state.stride == 0:
        state.kept.append((view.step, ids))
        if len(state.kept) > KEPT:
            state.kept = state.kept[::2]
            state.stride *= 2
    state.seen += 1
    state.last = (view.step, ids)
    return ()


def result(state: Probes) -> Iterable[Measure]:
    """One row per kept probe, the last one (1 by definition) included."""
    if state.last is None:
        return
    step, final = state.last
    kept = state.kept if state.kept and state.kept[-1][0] == step else [*state.kept, state.last]
    for at, ids in kept:
        both, _, wanted = common_experts(ids, final)
        good = wanted > 0
        value = float((both[good] / wanted[good]).mean()) if good.any() else float("nan")
        yield Measure(value, at, support=float(good.sum()))


METRIC = Metric(
    name="router_saturation",
    group="routing",
    needs=("probe",),
    scope="layer",
    unit="1",
    formula="mean over probe tokens of |A_t and A_T| / |A_T|, A_t = experts executed at step t, T = the last probe",
    citation="Muennighoff et al. 2024, arXiv 2409.02060 (OLMoE, router saturation)",
    init=init,
    update=update,
    result=result,
    doc="Rows come at the end, for at most 65 probes over the recording, all kept until then. Support: probe tokens.",
)
