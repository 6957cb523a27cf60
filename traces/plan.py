"""How many bytes a recording takes: per step, per 1000 steps, and whether the next step still fits the budget."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from traces import policy_sizes
from traces.hooks import MicroStep
from traces.layouts import MoELayer
from traces.record_at import RecordAt, format_bytes
from traces.schema import DTYPES, LayerInfo
from traces.statistics import pair_stride
from traces.views import ParamInfo

#: Steps lie in buffers until so many bytes have come together for one chunk.
CHUNK_BYTES = 64 << 20


class Plan:
    """Sizes of one recording, exact but for the compression of the routing.

    `queue_steps` and `probe` are those of the Recorder.
    """

    def __init__(
        self,
        at: RecordAt,
        infos: Sequence[ParamInfo],
        layers: Sequence[MoELayer],
        queue_steps: int = 4,
        probe: Any = None,
    ) -> None:
        self.at, self._infos, self._layers, self._queue_steps = at, list(infos), list(layers), queue_steps
        self.tokens, self.micro_steps = 0, 1
        self.probe_tokens = _tokens_of(probe)
        self.snapshot_bytes = at.snapshot_bytes(self._infos)
        self._size()

    def layer_infos(self) -> tuple[LayerInfo, ...]:
        """The MoE layers as the header lists them; K is what was seen, or declared, or 1."""
        return tuple(
            LayerInfo(layer.layer, layer.block_name or layer.experts_name, layer.num_experts, layer.top_k or 1)
            for layer in self._layers
        )

    def check_room(self) -> None:
        """Refuse a budget in which not even one step fits."""
        self.at.check_budget(self._infos, self.layer_infos(), self.tokens)

    def learn(self, micro_steps: Sequence[MicroStep]) -> None:
        """Take the number of tokens, of micro-steps and of executed slots from the first step."""
        for layer in self._layers:
            for micro in micro_steps:
                capture = micro.capture(layer)
                if capture is not None and capture.topk_expert_ids is not None:
                    layer.top_k = max(int(capture.topk_expert_ids.shape[1]), layer.top_k or 0)
        self.tokens = sum(micro.tokens for micro in micro_steps)
        self.micro_steps = max(1, len(micro_steps))
        self._size()

    def _size(self) -> None:
        layers = self.layer_infos()
        self.step_bytes = self.at.step_bytes(self._infos, layers, self.tokens, self.micro_steps)
        self.every_step_bytes = policy_sizes.SCALAR_BYTES + policy_sizes.every_step(self.at, self._infos)
        self.probe_bytes = policy_sizes.probe(layers, self.probe_tokens)

    def bytes_of(self, *, recorded: bool, weighs: bool, probes: bool) -> int:
        """Bytes of one step with these parts."""
        size = self.step_bytes if recorded else self.every_step_bytes
        return size + (self.snapshot_bytes if weighs else 0) + (self.probe_bytes if probes else 0)

    def has_room(self, used_bytes: int, step_bytes: int) -> bool:
        """Whether a step of `step_bytes` and the closing snapshot still fit."""
        budget = self.at.budget_bytes
        return budget is None or used_bytes + step_bytes + self.snapshot_bytes <= budget

    def estimate(self, steps: int) -> int:
        """Bytes of the trace over the first `steps` steps."""
        return self.at.estimate(
            self._infos,
            self.layer_infos(),
            self.tokens,
            steps,
            micro_steps=self.micro_steps,
            probe_tokens=self.probe_tokens,
        )

    @property
    def ring_bytes(self) -> int:
        """Host memory for copies at most: the queue, a chunk that is being filled, and a step and a snapshot more."""
        return self._queue_steps * self.step_bytes + CHUNK_BYTES + self.step_bytes + 2 * self.snapshot_bytes

    @property
    def kept_bytes(self) -> int:
        """Memory, on the training device, for the gradients of the step before that statistics compare with."""
        if "statistics" not in self.at.streams:
            return 0
        total = 0
        for info in policy_sizes.kept_params(self.at, self._infos):
            experts = info.shape[info.expert_axis] if info.expert_axis is not None else 1
            each = info.numel // max(experts, 1)
            if self.at.pair_elements is not None:
                each = -(-each // pair_stride(each, self.at.pair_elements))
            total += experts * each * DTYPES[info.dtype][1].itemsize
        return total

    def sentence(self, path: Path | None) -> str:
        """The plan in one line, for people."""
        at, budget = self.at, self.at.budget_bytes
        when = "every step" if at.every == 1 else f"one step of {at.every}"
        if at.bursts:
            when = f"{at.bursts[0]} steps of each {at.bursts[1]}"
        limit = "no budget"
        if budget is not None:
            steps = max(0, budget - 2 * self.snapshot_bytes) // self.step_bytes
            limit = f"the budget of {format_bytes(budget)} holds about {steps} of them"
        thousand = self.estimate(1000)
        memory = f"up to {format_bytes(self.ring_bytes)} of host memory for copies"
        if self.kept_bytes:
            memory += f" and {format_bytes(self.kept_bytes)} on the device for the step before"
        return (
            f"recording {when}, {len(self._infos)} parameters and {len(self._layers)} MoE layers, to {path}: "
            f"{format_bytes(self.step_bytes)} a recorded step, {format_bytes(thousand)} per 1000 steps"
            f"{_share(path, thousand)}; {limit}; {memory}"
        )


def _share(path: Path | None, size: int) -> str:
    """What `size` bytes are of the free disk under `path`, where that can be known."""
    for folder in () if path is None else (path, *path.absolute().parents):
        try:
            free = shutil.disk_usage(folder).free
        except (OSError, ValueError):
            continue
        return f" ({100 * size / free:.2g}% of the free disk)" if free else " (the disk is full)"
    return ""


def _tokens_of(batch: Any) -> int:
    """Tokens of a probe batch by its first tensor: ids [B, S], or vectors [..., D]."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else (batch,)
    first = next((part for part in parts if isinstance(part, Tensor)), None)
    if first is None:
        return 0
    return first.shape[:-1].numel() if first.is_floating_point() else first.numel()
