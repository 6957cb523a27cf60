"""How tightly each expert is tied to its most frequent partner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from toolkit.metrics._load import routing_of
from toolkit.metrics._metric import Measure, Metric, Subject
from traces.views import RoutingStep, StepView


@dataclass
class Pairs:
    """Tokens routed to both of two experts, float64 [E, E]; on the diagonal the tokens of one expert."""

    together: np.ndarray


def init(subject: Subject) -> Pairs:
    """No token yet."""
    return Pairs(np.zeros((subject.experts, subject.experts)))


def update(state: Pairs, view: StepView) -> Iterable[Measure]:
    """Count the pairs of one step; nothing is reported before the end."""
    state.together += pairs_of(routing_of(view))
    return ()


def pairs_of(routing: RoutingStep) -> np.ndarray:
    """Tokens (padding left out) that executed both experts, float64 [E, E]; an expert twice in a token counts once."""
    ids = np.asarray(routing.topk_expert_ids)[~np.asarray(routing.is_pad, dtype=bool)].astype(np.int64)
    experts = routing.num_experts
    if not ids.size:
        return np.zeros((experts, experts))
    token = np.repeat(np.arange(len(ids)), ids.shape[1])[ids.reshape(-1) >= 0]
    keys = np.unique(token * experts + ids.reshape(-1)[ids.reshape(-1) >= 0])
    token, expert = keys // experts, keys % experts
    out = np.zeros(experts * experts)
    # Tokens hold few experts: meet each slot with the slots 0, 1, 2 .. places after it while the token is the same.
    for shift in range(ids.shape[1]):
        same = token[shift:] == token[: len(token) - shift]
        first, second = expert[: len(token) - shift][same], expert[shift:][same]
        found = np.bincount(first * experts + second, minlength=experts * experts)
        out += found
        if shift:
            out += found.reshape(experts, experts).T.reshape(-1)
    return out.reshape(experts, experts)


def result(state: Pairs) -> Iterable[Measure]:
    """The strongest tie of each expert; null for an expert without tokens, or if there is only one expert."""
    own = np.diag(state.together).copy()
    value = np.full(len(own), np.nan)
    if len(own) > 1:
        others = state.together.copy()
        np.fill_diagonal(others, 0)
        np.divide(others.max(axis=1), own, out=value, where=own > 0)
    if own.sum() > 0:
        yield Measure(value, support=own)


METRIC = Metric(
    name="co_activation",
    group="load",
    needs=("routing",),
    scope="layer",
    unit="1",
    formula="max over f != e of N_ef / N_e, N_ef = tokens that executed both e and f, N_e = tokens of e",
    citation="Muennighoff et al. 2024, arXiv 2409.02060 (OLMoE, expert co-activation N_ef / N_e)",
    init=init,
    update=update,
    result=result,
    doc="Over the whole recording; 0 if no token executes two. Support: tokens of the expert. Memory: E^2 numbers.",
)
