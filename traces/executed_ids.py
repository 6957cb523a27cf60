"""Executed expert ids out of what an experts module is called with, or of what a router returns.

Legend: E num_experts, K top_k, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass
class Capture:
    """What one hook saw of one layer in one micro-step; tensors are on the model's device.

    `topk_expert_ids` and `scores` [T, K], `logits` [T, E].
    """

    topk_expert_ids: Tensor | None = None
    scores: Tensor | None = None
    logits: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def read_experts_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], num_experts: int | None = None
) -> Capture | None:
    """Executed ids and their scores out of the arguments of an experts module; None where it gets no ids.

    With `num_experts` a dispatch mask [T, K, E], one-hot in its last axis, is read too; a slot of zeros gives -1.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return _ids_and_scores(tensors, num_experts, [t for t in tensors if t.is_floating_point()])


def read_router_output(output: Any, num_experts: int) -> Capture:
    """Logits, and ids and scores where the router returns them, out of whatever it returned."""
    tensors = [value for value in flatten(output) if isinstance(value, Tensor)]
    logits = next((t for t in tensors if t.is_floating_point() and t.ndim >= 2 and t.shape[-1] == num_experts), None)
    others = [t for t in tensors if t is not logits]
    capture = _ids_and_scores(others, num_experts, [] if logits is None else [logits]) or Capture()
    capture.logits = logits
    return capture


def _ids_and_scores(tensors: list[Tensor], num_experts: int | None, rows: list[Tensor]) -> Capture | None:
    floats = [t for t in tensors if t.is_floating_point()]
    for ids in tensors:
        one_hot = _of_one_hot(ids, floats, num_experts, rows)
        if one_hot is not None:
            return one_hot
        if ids.dtype not in _INTEGERS or ids.ndim < 1:
            continue
        scores = next((t for t in floats if t.shape == ids.shape), None)
        if ids.ndim >= 2 or scores is not None:
            return Capture(ids, scores)
    return None


def _of_one_hot(mask: Tensor, floats: list[Tensor], num_experts: int | None, rows: list[Tensor]) -> Capture | None:
    """Ids of a mask with scores beside it: [T, K] of [T, K, E] with [T, K], [.., 1] of [.., E] with [..] or [.., 1].

    `rows` are tensors with one row per token, which tell [T, K, E] from [B, S, E].
    """
    if mask.dtype not in (*_INTEGERS, torch.bool) or mask.ndim < 2 or mask.shape[-1] != num_experts:
        return None
    if any(t.shape == mask.shape for t in floats):
        return None  # ids of K = E slots
    lead = mask.shape[:-1]
    one_slot = mask.ndim == 2 or any(t.shape[:-1] == lead and t.ndim == mask.ndim and t.shape[-1] != 1 for t in rows)
    scores = next((t for t in floats if t.shape == lead or (one_slot and t.shape == (*lead, 1))), None)
    if scores is None:
        return None
    numbers = mask.detach().to(torch.uint8) if mask.dtype is torch.bool else mask.detach()
    best = numbers.max(dim=-1, keepdim=one_slot)
    # Detached: a hook on a new view of the scores would see no backward pass.
    return Capture(torch.where(best.values > 0, best.indices, -1), scores.detach().reshape(best.values.shape))


def flatten(output: Any) -> list[Any]:
    """What nested tuples, lists and mappings hold."""
    if isinstance(output, Mapping):
        return [item for value in output.values() for item in flatten(value)]
    if isinstance(output, (tuple, list)):
        return [item for value in output for item in flatten(value)]
    return [output]


def topk_lowest_first(logits: Tensor, top_k: int) -> Tensor:
    """Ids [T, K] of the largest logits; of equal logits the lowest index wins, which `torch.topk` leaves open."""
    order = torch.sort(logits.detach(), dim=-1, descending=True, stable=True).indices
    return order[..., :top_k]
