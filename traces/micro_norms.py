"""The stream `micro_norms`: the squared norm of what each micro-step added to a gradient, per expert.

Legend: E experts (1 without an expert axis), S elements of one expert, M micro-steps.

A hook on the parameter sees what one backward pass is about to add to `.grad`, whatever lies there already, so nothing
is subtracted and no copy is kept. What happens to the sum afterwards (unscaling, clipping) is one common factor, found
by comparing a few elements of each expert; the norms are stored in the scale of the recorded gradient. Cost: one pass
over what each backward pass adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from traces.hooks import ForwardWatch, MicroStep
from traces.statistics import by_expert, pair_stride
from traces.views import ParamInfo

#: Elements of each expert that tell the factor.
COMPARED_ELEMENTS = 1024


class MicroNorms:
    """Hooks on the recorded parameters; `active` is set by the recorder before each step."""

    def __init__(
        self, infos: Mapping[str, ParamInfo], parameters: Mapping[str, nn.Parameter], watch: ForwardWatch
    ) -> None:
        self.active = True
        self._infos, self._parameters, self._watch = infos, dict(parameters), watch
        self._handles: list[Any] = []

    def install(self) -> None:
        """Add the hooks."""
        self._handles = [p.register_hook(self._hook(self._infos[name])) for name, p in self._parameters.items()]

    def remove(self) -> None:
        """Take them away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def take(
        self, info: ParamInfo, micro_steps: Sequence[MicroStep], gradient: Tensor, scale: Tensor | None
    ) -> Tensor | None:
        """Squared norms float64 [M, E], in the scale of `gradient / scale`; None where no backward pass was seen.

        NaN: no backward pass reached the parameter in that micro-step, or more than one did.
        """
        seen = [micro.added.get(info.name) for micro in micro_steps]
        there = [each for each in seen if each is not None]
        if not there:
            return None
        total = torch.stack([each[1] for each in there]).sum(0)
        final = _sample(by_expert(gradient, info.expert_axis))
        if scale is not None:
            final = final / scale.double()
        squares = (total * total).sum()
        factor = torch.where(squares > 0, (final * total).sum() / squares, 1.0)
        missing = torch.full_like(there[0][0], float("nan"))
        return torch.stack([missing if each is None else each[0] for each in seen]) * factor**2

    def _hook(self, info: ParamInfo) -> Callable[[Tensor], None]:
        fused = len(info.shape) == 3

        def hook(gradient: Tensor) -> None:
            if not self.active or not self._watch.micro_steps:
                return
            added = self._watch.micro_steps[-1].added
            gradient = gradient.detach()
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            rows = by_expert(dense.reshape(info.shape) if fused else dense, info.expert_axis)
            squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) ** 2
            before = added.get(info.name)
            if before is None:
                added[info.name] = (squares, _sample(rows))
            else:  # the norm of a sum is not known from the norms of its parts
                added[info.name] = (torch.full_like(squares, float("nan")), before[1] + _sample(rows))

        return hook


def _sample(rows: Tensor) -> Tensor:
    return rows[:, :: max(1, pair_stride(rows.shape[1], COMPARED_ELEMENTS))].to(torch.float64, copy=True)
