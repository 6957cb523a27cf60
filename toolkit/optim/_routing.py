"""Tokens per expert of the step under way, read off the model's forward passes for recipes with a token gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit.optim._hidden import several_processes
from traces.hooks import ForwardWatch, MicroStep
from traces.layouts import MoELayer, find_moe_layers


class RoutingCounts:
    """Counts of executed tokens per MoE layer, over the micro-steps of one step and over all processes.

    Padding does not count, nor do evaluation, recomputation, and forwards whose gradient was thrown away.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = find_moe_layers(model)
        self._watch = ForwardWatch(model, self.layers, (), lambda: None)
        self._watch.install()
        self._asked = 0

    def forget(self) -> None:
        """The gradients so far were thrown away. A forward that backward has not reached yet stays."""
        self._watch.micro_steps = [micro for micro in self._watch.micro_steps if not micro.reached]
        self._asked = 0

    def step_may_come(self) -> None:
        """A GradScaler is about to step, or to skip the step without a word; forget what it skipped before.

        Asked again without a forward in between (Lightning asks when it clips), it is still the same step.
        """
        if self._asked == len(self._watch.micro_steps):
            return
        self._watch.micro_steps = self._watch.micro_steps[self._asked :]
        self._asked = len(self._watch.micro_steps)

    def take(self) -> dict[int, Tensor]:
        """int64 [E] on the CPU by layer, for the step that is taken now; empty where no forward was seen."""
        if self._asked < len(self._watch.micro_steps):
            self.step_may_come()  # forwards since a GradScaler asked: what was before them was skipped
        micro_steps, self._asked = self._watch.take(), 0
        parts = [_count(layer, micro_steps) for layer in self.layers]
        seen = torch.tensor([len(micro_steps)], device=parts[0].device)
        flat = torch.cat([*parts, seen])
        if several_processes():
            torch.distributed.all_reduce(flat)
        *counts, total = flat.cpu().split([*(layer.num_experts for layer in self.layers), 1])
        if not int(total):
            return {}
        return {layer.layer: count for layer, count in zip(self.layers, counts, strict=True)}


def _count(layer: MoELayer, micro_steps: list[MicroStep]) -> Tensor:
    device = next(layer.experts.parameters()).device
    counts = torch.zeros(layer.num_experts, dtype=torch.int64, device=device)
    for micro in micro_steps:
        capture = micro.capture(layer)
        if capture is None or capture.topk_expert_ids is None:
            continue
        ids = capture.topk_expert_ids.long()
        executed = (ids >= 0) & (ids < layer.num_experts)
        mask = micro.mask_of(layer)
        if mask is not None and mask.numel() == len(ids):
            executed &= mask.reshape(-1, 1)
        counts += torch.bincount(ids[executed], minlength=layer.num_experts)
    return counts
