"""How many bytes a record policy takes on disk, before anything was recorded.

Tensors are counted exactly, routing as if it did not compress, and each tensor's entry in its file's header by the
length of its name.

Legend: E experts, K top-k, M micro-steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from traces.routing import id_dtype
from traces.schema import DTYPES, LayerInfo
from traces.statistics_fields import STATISTICS
from traces.views import ParamInfo

if TYPE_CHECKING:
    from traces.record_at import RecordAt

#: What a step takes in its seal, beside one digit of presence per expert: its number, the rates, a few scalars.
SCALAR_BYTES = 200
_ENTRY_BYTES = 96  # of a tensor in the header of its file, beside its name
_TENSOR_STREAMS = ("gradient", "grad_buffer")


def kept_params(at: RecordAt, params: Iterable[ParamInfo]) -> list[ParamInfo]:
    """The parameters whose tensors the policy records."""
    return [p for p in params if p.tied_to is None and at.records_role(p.role)]


def recorded_step(
    at: RecordAt, params: Iterable[ParamInfo], layers: Iterable[LayerInfo], tokens: int, micro_steps: int = 1
) -> int:
    """Bytes of one recorded step of so many tokens; what every step takes besides is `every_step`."""
    total = entries = 0
    for param in kept_params(at, params):
        width = DTYPES[at.dtype or param.dtype][1].itemsize
        count = recorded_elements(at, param)
        for stream in _TENSOR_STREAMS:
            total += count * width if stream in at.streams else 0
            entries += _entry(param.name) if stream in at.streams else 0
        if "weight" in at.streams:
            total += count * DTYPES[param.dtype][1].itemsize
            entries += _entry(param.name)
        if "micro_norms" in at.streams:
            total += 2 * micro_steps * _experts(param) * 8
            entries += _entry(param.name)
        entries += _experts(param) + (8 * _experts(param) if count < param.numel else 0)
    for layer in layers:
        id_bytes = id_dtype(layer.num_experts).itemsize
        total += tokens * layer.top_k * id_bytes if "routing" in at.streams else 0
        total += tokens * layer.top_k * 4 if "scores" in at.streams else 0
        total += tokens * layer.num_experts * 4 if "logits" in at.streams else 0
    return total + max(1024, SCALAR_BYTES + entries)  # the latter: its record in the seal, and keys


def every_step(at: RecordAt, params: Iterable[ParamInfo]) -> int:
    """Bytes of one step of the streams that are recorded at every step, bursts or not; scalars left out."""
    if "statistics" not in at.streams:
        return 0
    return sum(
        8 * len(STATISTICS) * _experts(p) + _entry(p.name) + _experts(p) for p in kept_params(at, params)
    )  # the last term: presence


def probe(layers: Iterable[LayerInfo], tokens: int) -> int:
    """Bytes of one probe of so many tokens."""
    return sum(tokens * x.top_k * id_dtype(x.num_experts).itemsize + _entry("") for x in layers)


def snapshot(at: RecordAt, params: Iterable[ParamInfo]) -> int:
    """Bytes of one snapshot of the recorded experts' weights."""
    if at.weights == "none":
        return 0
    kept = kept_params(at, params)
    return sum(recorded_elements(at, p) * DTYPES[p.dtype][1].itemsize + _entry(p.name) for p in kept)


def snapshots(at: RecordAt, steps: int) -> int:
    """How many snapshots the first `steps` steps and the end of the recording make."""
    if at.weights == "none":
        return 0
    if at.weights == "ends" or at.bursts is None or at.bursts[0] == at.bursts[1]:
        return 2
    length, period = at.bursts
    return -(-steps // period) + max(0, -(-(steps - length) // period)) + 1


def recorded_elements(at: RecordAt, param: ParamInfo) -> int:
    """Elements of the experts of a parameter that are recorded."""
    total = _experts(param) if param.expert_axis is not None else 0
    if not total or at.experts == "all" or param.role != "routed_expert":
        return param.numel
    kept = len(at.experts) if isinstance(at.experts, tuple) else int(at.experts)
    return param.numel // total * min(kept, total)


def _experts(param: ParamInfo) -> int:
    return param.shape[param.expert_axis] if param.expert_axis is not None else 1


def _entry(name: str) -> int:
    return _ENTRY_BYTES + len(name)
