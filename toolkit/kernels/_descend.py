"""The last line of every fused step in torch: W <- round((1 - lr wd) W - lr u), matrix by matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.kernels._rounding import ROUNDINGS, rounded
from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def descend(weight: Tensor, u: Tensor, lr: float, keep: float, rounding: str, rng: Any, offset: int) -> None:
    """In place on one matrix, computed in u's precision; `offset` is its first element's index in the parameter."""
    import torch

    full = weight.to(u.dtype) * keep - lr * u
    if weight.dtype in (torch.float32, torch.float64):
        weight.copy_(full)
        return
    mode = rounding if weight.dtype == torch.bfloat16 else "nearest"
    weight.copy_(rounded(full.to(torch.float32), weight.dtype, mode, rng, offset=offset))


def check_pair(op: str, weight: Tensor, gradient: Tensor, backend: str | None, chosen: str, rounding: str) -> str:
    """Refuse what no backend of a step can take; return the backend that takes this weight."""
    import torch

    if weight.shape != gradient.shape or weight.device != gradient.device:
        raise GradreelError(
            f"{op}: weight {tuple(weight.shape)} on {weight.device}, gradient {tuple(gradient.shape)} on "
            f"{gradient.device}; give two of one shape and place"
        )
    if rounding not in ROUNDINGS:
        raise unknown("rounding", rounding, ROUNDINGS)
    if chosen in ("cpu", "triton") and weight.dtype not in (torch.float32, torch.bfloat16):
        if backend == chosen:
            raise GradreelError(f"{op}: backend {chosen!r} steps float32 and bfloat16 weights, not {weight.dtype}")
        return "eager"
    return chosen


def as_matrices(x: Tensor) -> Tensor:
    """[N, m, n] of any tensor: a vector is one row, a scalar one element. A view where there is one."""
    if x.dim() < 2:
        return x.reshape(1, 1, -1)
    m, n = x.shape[-2:]
    return x.reshape(-1, m, n) if x.numel() else x.new_empty((0, m, n))


def put_back(weight: Tensor, matrices: Tensor) -> None:
    """Copy `matrices` into `weight` where they are not its own memory."""
    if matrices.numel() and matrices.data_ptr() != weight.data_ptr():
        weight.copy_(matrices.view(weight.shape))


def wide_dtype(weight: Tensor, backend: str) -> torch.dtype:
    """What a step is computed in: float64 for the reference and for float64 weights."""
    import torch

    return torch.float64 if backend == "reference" or weight.dtype == torch.float64 else torch.float32
