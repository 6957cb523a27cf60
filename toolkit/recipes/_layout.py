"""From a parameter's own layout to the canonical one that stages work on, and its presence codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from traces.errors import GradreelError
from traces.views import NONZERO, ZERO, ParamInfo


class Layout:
    """Expert axis first, matrix axes (rows, columns) last, whatever is left between: only views, never copies.

    A parameter without matrix axes becomes a vector [n], or [E, n] with an expert axis.
    """

    def __init__(self, info: ParamInfo) -> None:
        self.shape = tuple(info.shape)
        ndim = len(self.shape)
        first = [] if info.expert_axis is None else [info.expert_axis % ndim]
        last = [] if info.matrix_axes is None else [axis % ndim for axis in info.matrix_axes]
        if len({*first, *last}) != len(first) + len(last):
            raise GradreelError(
                f"{info.name}: expert_axis {info.expert_axis} and matrix_axes {info.matrix_axes} overlap; "
                f"give different axes of shape {self.shape}"
            )
        self.order = (*first, *(a for a in range(ndim) if a not in first and a not in last), *last)
        self.inverse = tuple(self.order.index(axis) for axis in range(ndim))
        self.expert_stacked = bool(first)
        self.permuted = tuple(self.shape[axis] for axis in self.order)
        #: Number of leading axes kept where the rest is flattened into one; None: nothing is flattened.
        self._keep: int | None = len(first) if not last and ndim - len(first) > 1 else None

    def canonical(self, tensor: Tensor) -> Tensor:
        """A view of `tensor` in the canonical layout (a copy only where a strided vector must be flattened)."""
        view = tensor.permute(self.order)
        return view if self._keep is None else view.flatten(self._keep)

    def restore(self, tensor: Tensor) -> Tensor:
        """The inverse of `canonical`."""
        return tensor.reshape(self.permuted).permute(self.inverse)

    @property
    def flattened(self) -> bool:
        """Whether `canonical` may have to copy."""
        return self._keep is not None

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """The shape stages and slots see."""
        if self._keep is None:
            return self.permuted
        count = 1
        for size in self.permuted[self._keep :]:
            count *= size
        return (*self.permuted[: self._keep], count)

    @property
    def experts(self) -> int:
        """E, or 1 where no axis enumerates experts."""
        return self.permuted[0] if self.expert_stacked else 1


#: Some experts of a stack: all (None), a run of them, or those with the given ids.
Part = slice | Tensor | None


def take(tensor: Tensor, part: Part, per_expert: bool = True) -> Tensor:
    """The experts of `part`: a view for a run of them, a copy for ids; the tensor itself if it has no expert axis."""
    if part is None or not per_expert:
        return tensor
    return tensor[part] if isinstance(part, slice) else tensor.index_select(0, part.to(tensor.device))


def put(tensor: Tensor, part: Part, values: Any) -> None:
    """Write the experts of `part`."""
    if isinstance(part, Tensor):
        tensor.index_copy_(0, part.to(tensor.device), values)
    elif part is None:
        tensor.copy_(values)
    else:
        tensor[part] = values


def presence_masks(presence: Any, experts: int, name: str) -> tuple[Tensor | None, Tensor | None]:
    """(touched, busy) as bool [E] on the CPU, each None where all are.

    touched: the gradient exists (zero or non-zero); busy: it is not exactly zero. Experts whose gradient was None or
    not recorded are not touched at all.
    """
    if presence is None:
        return None, None
    codes = torch.as_tensor(presence).detach().to("cpu").reshape(-1)
    if codes.numel() != experts:
        raise GradreelError(f"{name}: presence has {codes.numel()} entries; allowed: {experts}, one per expert")
    touched, busy = codes >= ZERO, codes == NONZERO
    return (None if bool(touched.all()) else touched), (None if bool(busy.all()) else busy)
