"""The stream `statistics`: a few numbers of every expert at every step, computed where the gradients are.

Legend: E experts (1 without an expert axis), S elements of one expert.

Only these numbers leave the device. A gradient is compared with the one of the step before, of which one copy is kept
per parameter, whole or thinned to `pair_elements` of each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from traces.errors import GradreelError
from traces.statistics_fields import ALONE, PAIRED, STATISTICS
from traces.views import ParamInfo

Compute = Callable[..., Any]
#: Elements at a time: on a CPU so few that intermediate results stay in its cache.
_PIECE = {"cpu": 1 << 14}
_LARGE_PIECE = 1 << 20


@dataclass(slots=True)
class _Before:
    """The gradient of an earlier step, and the loss scale that is still in it."""

    tensor: Tensor
    step: int
    scale: Tensor | None


class GradientStatistics:
    """Statistics of each gradient, and of its pair with the same parameter's one step before.

    `compute(gradient, previous, expert_axis=...)` returns tensors [E] by the names of `STATISTICS`, as a mapping or as
    an object with `as_dict()`; None takes `plain_statistics`.
    """

    def __init__(self, compute: Compute | None = None, pair_elements: int | None = None) -> None:
        self._compute = compute or plain_statistics
        self._pair_elements = pair_elements
        self._before: dict[str, _Before] = {}

    @property
    def kept_bytes(self) -> int:
        """Memory of the gradients of the step before, on the training device."""
        return sum(b.tensor.numel() * b.tensor.element_size() for b in self._before.values())

    def take(self, info: ParamInfo, gradient: Tensor, scale: Tensor | None, step: int) -> Tensor:
        """Statistics of a dense gradient, float64 [len(STATISTICS), E]; never waits for the device.

        `scale` is the loss scale that the optimizer will divide by; the statistics are those of the divided gradient.
        """
        before = self._before.get(info.name)
        if before is not None and before.step != step - 1:
            previous = None
        else:
            previous = before
        stride = self._stride(info)
        if stride == 1:
            kept = gradient
            values = self._values(gradient, previous.tensor if previous else None, info.expert_axis)
        else:
            kept = by_expert(gradient, info.expert_axis)[:, ::stride]
            values = dict(self._values(gradient, None, info.expert_axis))
            if previous is not None:
                pair = self._values(kept, previous.tensor, 0)
                values.update({name: pair[name] for name in PAIRED})
        out = _stacked(values)
        if scale is not None or (previous is not None and previous.scale is not None):
            _divide(out, scale, previous.scale if previous else None)
        self._keep(info.name, before, kept, scale, step)
        return out

    def forget(self, name: str) -> None:
        """The parameter had no gradient in this step: the next one has no pair."""
        self._before.pop(name, None)

    def _values(self, gradient: Tensor, previous: Tensor | None, axis: int | None) -> Mapping[str, Tensor]:
        found = self._compute(gradient, previous, expert_axis=axis)
        values: Mapping[str, Tensor] = found.as_dict() if hasattr(found, "as_dict") else found
        wanted = STATISTICS if previous is not None else ALONE
        if missing := [name for name in wanted if name not in values]:
            raise GradreelError(
                f"statistics= gave no {missing[0]!r}; it must return tensors [E] of {', '.join(wanted)}"
            )
        return values

    def _stride(self, info: ParamInfo) -> int:
        if self._pair_elements is None:
            return 1
        experts = info.shape[info.expert_axis] if info.expert_axis is not None else 1
        return pair_stride(info.numel // max(experts, 1), self._pair_elements)

    def _keep(self, name: str, before: _Before | None, kept: Tensor, scale: Tensor | None, step: int) -> None:
        if scale is not None:
            scale = scale.detach().clone()  # the scaler changes its own in place
        if before is None or before.tensor.shape != kept.shape or before.tensor.dtype != kept.dtype:
            # The strides stay, so that equal elements lie at equal places.
            self._before[name] = _Before(torch.empty_like(kept).copy_(kept), step, scale)
        else:
            before.tensor.copy_(kept)
            before.step, before.scale = step, scale


def pair_stride(elements: int, most: int) -> int:
    """Distance of the compared elements of one expert: the smallest odd one that leaves at most `most` of them.

    Odd, because even distances fall on the same columns of a matrix again and again.
    """
    stride = -(-elements // most)
    return stride if stride <= 1 else stride | 1


def by_expert(gradient: Tensor, axis: int | None) -> Tensor:
    """The gradient as [E, S]."""
    if axis is None:
        return gradient.reshape(1, -1)
    moved = gradient.movedim(axis, 0)
    return moved.reshape(len(moved), -1) if moved.numel() else moved.new_empty((len(moved), 0))


def plain_statistics(
    gradient: Tensor, previous: Tensor | None = None, *, expert_axis: int | None = None
) -> dict[str, Tensor]:
    """Statistics in plain torch, on any device, by the names of `STATISTICS`: [E], sums float64, counts int64.

    Sums run over finite elements, of a pair over those finite in both. A sign flip is a pair of finite non-zero
    elements of opposite sign; its support is the number of such pairs of either sign. Never waits for the device; takes
    about 40 MiB of it for intermediate results.
    """
    g = by_expert(gradient.detach(), expert_axis)
    p = None if previous is None else by_expert(previous.detach(), expert_axis)
    counts = ("nonfinite", "zeros", "sign_flips", "sign_support")
    out = {
        name: torch.zeros(len(g), dtype=torch.int64 if name in counts else torch.float64, device=g.device)
        for name in (STATISTICS if p is not None else ALONE)
    }
    most = _PIECE.get(g.device.type, _LARGE_PIECE)
    width = max(1, min(g.shape[1], most))
    height = max(1, most // width)
    for i in range(0, len(g), height):
        for j in range(0, g.shape[1], width):
            here = (slice(i, i + height), slice(j, j + width))
            rows = {name: value[here[0]] for name, value in out.items()}
            _add_piece(rows, g[here].double(), None if p is None else p[here].double())
    return out


def _add_piece(out: dict[str, Tensor], x: Tensor, y: Tensor | None) -> None:
    finite = x.isfinite()
    out["nonfinite"] += (~finite).sum(1)
    out["zeros"] += (x == 0).sum(1)
    x = torch.where(finite, x, 0.0)
    out["sum_squares"] += torch.linalg.vecdot(x, x)
    if y is None:
        return
    both = finite & y.isfinite()
    x, y = torch.where(both, x, 0.0), torch.where(both, y, 0.0)
    out["dot"] += torch.linalg.vecdot(x, y)
    out["dot_squares"] += torch.linalg.vecdot(x, x)
    out["previous_squares"] += torch.linalg.vecdot(y, y)
    signs = x.sign() * y.sign()
    out["sign_flips"] += (signs < 0).sum(1)
    out["sign_support"] += (signs != 0).sum(1)


def _stacked(values: Mapping[str, Tensor]) -> Tensor:
    first = values[ALONE[0]]
    out = torch.full((len(STATISTICS), len(first)), float("nan"), dtype=torch.float64, device=first.device)
    for row, name in enumerate(STATISTICS):
        if name in values:
            out[row] = values[name]
    return out


def _divide(out: Tensor, scale: Tensor | None, before: Tensor | None) -> None:
    rows = {name: row for row, name in enumerate(STATISTICS)}
    if scale is not None:
        for name in ("sum_squares", "dot_squares"):
            out[rows[name]] /= scale.double() ** 2
        out[rows["dot"]] /= scale.double()
    if before is not None:
        out[rows["previous_squares"]] /= before.double() ** 2
        out[rows["dot"]] /= before.double()
