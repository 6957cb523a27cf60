"""One step between the training thread and the files: what was copied, and how it becomes a `StepRecord`.

Everything here but `Job` itself runs on the writer thread, on numpy, so that no second pool of compute threads starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from traces.expert_sample import Place
from traces.hooks import MicroStep, given_rows
from traces.layouts import MoELayer
from traces.record_at import RecordAt
from traces.schema import RawTensor, RoutingRecord, StepRecord
from traces.sharing import Sharing
from traces.small_streams import SmallStreams
from traces.spool import BufferPool, presence_codes, raw_tensor
from traces.views import NONE, ParamInfo, RoutingStep


@dataclass
class Job:
    """One step on its way to the writer. `tensors` are (stream, parameter, host buffer); `absent` had no gradient.

    `found_inf` above 0 marks the step skipped; `closing` is the last snapshot; each of `ready` waits for a transfer.
    `scalars` may hold tensors. `small` are (stream, parameter, host tensor) computed on the device; `chosen` the ids of
    the recorded experts by (layer, E), where stacks were cut to them already; `probe` the forward of the probe batch.
    """

    step: int
    recorded: bool
    scalars: dict[str, Any]
    tensors: list[tuple[str, str, Tensor]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    small: list[tuple[str, str, Tensor]] = field(default_factory=list)
    chosen: dict[Place, Tensor] = field(default_factory=dict)
    probe: MicroStep | None = None
    micro_steps: list[MicroStep] = field(default_factory=list)
    found_inf: Tensor | None = None
    skipped: bool = False
    reserved: bool = False
    closing: bool = False
    norm: Tensor | None = None
    ready: list[Callable[[], None]] = field(default_factory=list)
    estimated_bytes: int = 200


class Assembler:
    """Turns jobs into records."""

    def __init__(
        self,
        infos: Mapping[str, ParamInfo],
        layers: Sequence[MoELayer],
        pool: BufferPool,
        at: RecordAt,
        sharing: Sharing | None = None,
    ) -> None:
        self._infos, self._layers, self._pool, self._at = infos, list(layers), pool, at
        self._sharing = sharing
        self._sizes = {layer.layer: layer.num_experts - layer.zero_experts for layer in layers}
        self._small = SmallStreams(infos, layers)
        self.misfits: list[int] = []  # steps whose attention mask has another number of tokens than was routed
        self.misrouted: list[int] = []  # steps in which listed experts were given other tokens than the ids say

    def record(self, job: Job) -> StepRecord:
        """The step as the writer takes it. Buffers go back to the pool when the writer lets go of them."""
        for wait in job.ready:
            wait()
        skipped = job.skipped or (job.found_inf is not None and float(job.found_inf) > 0)
        record = StepRecord(job.step, recorded=job.recorded and not skipped, skipped=skipped)
        shapes = [described_shape(buffer, self._infos[name]) for _, name, buffer in job.tensors]
        raws = [
            (stream, name, self._pool.lend(buffer, shape))
            for (stream, name, buffer), shape in zip(job.tensors, shapes, strict=True)
        ]
        job.tensors = []
        record.scalars = {key: plain_scalar(value) for key, value in job.scalars.items()}
        record.scalars["tokens"] = count_tokens(job.micro_steps, self._layers)
        if skipped:
            return record
        known = {name for stream, name, _ in job.small if stream in ("statistics", "presence")}
        for stream, name, raw in raws:
            record.tensors[stream, name] = raw
            if stream == "gradient" and name not in known:
                record.presence[name] = self._presence(name, raw)
        for name in job.absent:
            width = self._infos[name].num_experts if self._infos[name].expert_axis is not None else None
            record.presence[name] = np.full(() if width is None else (width,), NONE, np.uint8)
        record.routing = routing_records(job.micro_steps, self._layers)
        if any(not fits(micro, self._layers) for micro in job.micro_steps):
            self.misfits.append(job.step)
        wrong = {
            layer.layer
            for micro in job.micro_steps
            for layer in self._layers
            for chosen, given in [given_rows(layer, micro)]
            if chosen != given
        }
        if wrong:  # rather no ids than ids that were not executed
            record.routing = [routing for routing in record.routing if routing.layer not in wrong]
            self.misrouted.append(job.step)
        self._small.add(job, record, record.routing, tokens_of_each(job.micro_steps, self._layers))
        if job.probe is not None:
            self._small.add_probe(record, routing_records([job.probe], self._layers))
        self._thin(record, job)
        return record if self._sharing is None else self._sharing.to_global(record)

    def _presence(self, name: str, raw: RawTensor) -> np.ndarray:
        info = self._infos[name]
        data = raw.data
        if info.expert_axis is not None:
            data = np.moveaxis(data, info.expert_axis, 0)
        return presence_codes(data, raw.dtype, info.num_experts if info.expert_axis is not None else None)

    def _thin(self, record: StepRecord, job: Job) -> None:
        """Say which experts a stack was cut to, and drop the left-out experts of a list."""
        if not job.chosen:
            return
        chosen = {place: ids.numpy() for place, ids in job.chosen.items()}
        for stream, name in list(record.tensors):
            info = self._infos.get(name)
            if info is None or info.role != "routed_expert" or stream not in ("gradient", "grad_buffer", "weight"):
                continue
            if info.expert_axis is not None:
                ids = chosen.get((info.layer, info.shape[info.expert_axis]))
                if ids is not None:
                    record.experts[name] = ids
                continue
            ids = chosen.get((info.layer, self._sizes.get(-1 if info.layer is None else info.layer, 0)))
            if ids is not None and info.expert not in ids:  # recorded whole, or not at all
                del record.tensors[stream, name]
                if ("statistics", name) not in record.tensors:
                    record.presence.pop(name, None)


def described_shape(tensor: Tensor, info: ParamInfo) -> tuple[int, ...]:
    """Fused experts [E * F, H] are kept as [E, F, H]; any other tensor as it is."""
    fused = tensor.ndim == 2 and len(info.shape) == 3 and tensor.numel() == info.numel
    flat = tensor.ndim > 1 and info.shape == (tensor.numel(),)  # a part that is cut from the flattened tensor
    return info.shape if fused or flat else tuple(tensor.shape)


def fits(micro: MicroStep, layers: Iterable[MoELayer]) -> bool:
    """Whether the attention mask, where there is one, has an entry per routed token."""
    for layer in layers:
        mask, capture = micro.mask_of(layer), micro.capture(layer)
        if mask is None or capture is None or capture.topk_expert_ids is None:
            continue
        if len(capture.topk_expert_ids) != mask.numel():
            return False
    return True


def routing_records(micro_steps: Iterable[MicroStep], layers: Sequence[MoELayer]) -> list[RoutingRecord]:
    """Executed ids of every layer and micro-step; ids of no local expert become -1."""
    records = []
    for index, micro in enumerate(micro_steps):
        for layer in layers:
            capture = micro.capture(layer)
            if capture is None or capture.topk_expert_ids is None:
                continue
            is_pad = _is_pad(micro.mask_of(layer))
            ids = capture.topk_expert_ids.cpu().numpy()
            ids = np.where((ids < 0) | (ids >= layer.num_experts), ids.dtype.type(-1), ids)
            pad = is_pad if is_pad is not None and len(is_pad) == len(ids) else np.zeros(len(ids), np.bool_)
            records.append(
                RoutingRecord(
                    layer.layer, index, ids, pad, scores=_raw(capture.scores), logits=_logits(capture.logits, layer)
                )
            )
    return records


def tokens_per_expert(routing: Iterable[RoutingRecord], layer: MoELayer) -> np.ndarray:
    """Executed slots of tokens that are not padding, int64 [E], all micro-steps of a step together."""
    counts = np.zeros(layer.num_experts, np.int64)
    for record in routing:
        if record.layer == layer.layer:
            ids = record.topk_expert_ids[~record.is_pad].reshape(-1)
            counts += np.bincount(ids[ids >= 0], minlength=layer.num_experts)
    return counts


def routing_step(step: int, routing: Sequence[RoutingRecord], layer: MoELayer) -> RoutingStep | None:
    """One layer's routing of a step, micro-steps joined; None where nothing was captured."""
    mine = [record for record in routing if record.layer == layer.layer]
    if not mine:
        return None
    return RoutingStep(
        step=step,
        layer=layer.layer,
        num_experts=layer.num_experts,
        topk_expert_ids=np.concatenate([record.topk_expert_ids for record in mine]).astype(np.int64),
        is_pad=np.concatenate([record.is_pad for record in mine]),
        tokens_per_expert=tokens_per_expert(mine, layer),
        scores=_joined([record.scores for record in mine]),
        logits=_joined([record.logits for record in mine]),
    )


def tokens_of_each(micro_steps: Iterable[MicroStep], layers: Sequence[MoELayer]) -> list[int]:
    """Tokens of each micro-step that are not padding, at the first MoE layer."""
    masks = [(micro, micro.mask_of(layers[0])) for micro in micro_steps]
    return [micro.tokens if mask is None else int(mask.sum()) for micro, mask in masks]


def count_tokens(micro_steps: Iterable[MicroStep], layers: Sequence[MoELayer]) -> int | None:
    """Tokens of a step that are not padding, at the first MoE layer; None where no forward was seen."""
    counts = tokens_of_each(micro_steps, layers)
    return sum(counts) if counts else None


def plain_scalar(value: Any) -> Any:
    """A scalar as JSON knows it; tensors and numpy scalars are read out, which may wait for the device."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (np.generic, np.ndarray)):
        return value.item() if value.size == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain_scalar(item) for item in value]
    return value


def _is_pad(mask: Tensor | None) -> np.ndarray | None:
    return None if mask is None else ~mask.cpu().reshape(-1).numpy()


def _raw(tensor: Tensor | None) -> RawTensor | None:
    return None if tensor is None else raw_tensor(tensor.cpu().contiguous())


def _logits(tensor: Tensor | None, layer: MoELayer) -> RawTensor | None:
    """Logits float32 [T, E]; of a router that returns probabilities their logarithm, whose softmax they are."""
    raw = _raw(tensor)
    if raw is None or not layer.gives_probabilities:
        return raw
    return RawTensor("float32", raw.shape, np.log(np.maximum(raw.data, np.finfo(np.float32).tiny)))


def _joined(parts: Sequence[Any]) -> np.ndarray | None:
    if not parts or any(part is None for part in parts):
        return None
    return np.concatenate([part.numbers() for part in parts])


def total_norm(gradients: Sequence[Tensor], divisor: Tensor | None) -> Tensor | None:
    """Norm over all gradients as a 0-d float32 tensor, without waiting for the device; None without gradients."""
    dense = [g for g in gradients if g.layout is torch.strided and g.is_floating_point()]
    if not dense:
        return None
    # In its own type a float16 norm overflows at 65504, and a bfloat16 one has three digits.
    wide = torch.float64 if any(g.dtype is torch.float64 for g in dense) else torch.float32
    norms = torch._foreach_norm(dense, 2, dtype=wide)
    first = norms[0].device
    norm = torch.linalg.vector_norm(torch.stack([n.to(first, torch.float32) for n in norms]))
    return norm if divisor is None else norm / divisor
