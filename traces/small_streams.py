"""The small streams of a step on the writer thread: statistics, micro-norms and the probe, as a trace holds them.

Legend: E experts (1 without an expert axis), M micro-steps, T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from traces.layouts import MoELayer
from traces.routing import id_dtype
from traces.schema import RawTensor, RoutingRecord, StepRecord
from traces.statistics_fields import ALONE, STATISTICS
from traces.views import NONZERO, ZERO, ParamInfo

if TYPE_CHECKING:
    from traces.records import Job

_ZEROS = STATISTICS.index("zeros")


class SmallStreams:
    """Adds the small streams of jobs, in step order, to their records."""

    def __init__(self, infos: Mapping[str, ParamInfo], layers: Sequence[MoELayer]) -> None:
        self._infos, self._layers = infos, {layer.layer: layer for layer in layers}
        self._last_step: int | None = None  # with statistics, and not skipped

    def add(self, job: Job, record: StepRecord, routing: Sequence[RoutingRecord], micro_tokens: Sequence[int]) -> None:
        """Add what the job holds; presence of every expert comes with its statistics."""
        seen = False
        for stream, name, tensor in job.small:
            values = tensor.numpy()
            if stream == "statistics":
                seen = True
                self._add_statistics(record, name, values)
            elif stream == "micro_norms":
                values = with_tokens(values, self._infos[name], routing, micro_tokens)
                record.tensors[stream, name] = RawTensor("float64", values.shape, values)
            elif stream == "presence":
                self._add_presence(record, name, values)
        job.small = []
        if seen:
            self._last_step = job.step

    def add_probe(self, record: StepRecord, routing: Sequence[RoutingRecord]) -> None:
        """Add the executed ids of a probe, [T, K] of the narrowest type; its padding is left out."""
        for one in routing:
            ids = one.topk_expert_ids[~one.is_pad]
            ids = np.ascontiguousarray(ids, id_dtype(self._layers[one.layer].num_experts))
            record.tensors["probe", str(one.layer)] = RawTensor(ids.dtype.name, ids.shape, ids)

    def _add_statistics(self, record: StepRecord, name: str, values: np.ndarray) -> None:
        if self._last_step != record.step - 1:
            # The step before was skipped over an inf, which a GPU tells here at the earliest.
            values = values.copy()
            values[len(ALONE) :] = np.nan
        record.tensors["statistics", name] = RawTensor("float64", values.shape, values)
        info = self._infos[name]
        elements = info.numel // max(values.shape[1], 1)
        self._add_presence(record, name, values[_ZEROS] < elements)

    def _add_presence(self, record: StepRecord, name: str, busy: np.ndarray) -> None:
        codes = np.where(busy, NONZERO, ZERO).astype(np.uint8)
        record.presence[name] = codes if self._infos[name].expert_axis is not None else codes.reshape(())


def with_tokens(
    norms: np.ndarray, info: ParamInfo, routing: Sequence[RoutingRecord], tokens: Sequence[int]
) -> np.ndarray:
    """Squared norms [M, E] and the tokens behind them, float64 [2, M, E].

    Of experts their routed tokens, of any other parameter all real tokens of the micro-step (`tokens` [M]). A NaN where
    no token was routed becomes 0: an idle expert of a list has no gradient to add.
    """
    counts = np.full(norms.shape, np.nan)
    if info.role != "routed_expert":
        counts[:] = np.asarray(tokens, np.float64)[:, None]
    for one in routing:
        if info.role == "routed_expert" and one.layer == info.layer:
            ids = one.topk_expert_ids[~one.is_pad].reshape(-1)
            most = max(int(ids.max(initial=-1)) + 1, norms.shape[1], (info.expert or 0) + 1)
            found = np.bincount(ids[ids >= 0], minlength=most)
            start = 0 if info.expert_axis is not None else info.expert or 0
            counts[one.micro_step] = found[start : start + norms.shape[1]]
    return np.stack([np.where(np.isnan(norms) & (counts == 0), 0.0, norms), counts])
