"""Shapes, tensors and the plain rivals that benchmark cases share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Peers = dict[str, Callable[..., Any]]
SHAPES = ((8, 640, 320), (64, 1024, 512), (16, 2048, 1024), (1, 4096, 4096))
SMALL_SHAPES = ((3, 40, 24),)


def tensor(shape: tuple[int, ...], device: str, seed: int, dtype: str = "float32") -> Tensor:
    """Standard normal numbers, the same for the same seed on every device."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=getattr(torch, dtype))


def bytes_of(dtype: str) -> int:
    """Bytes of one element."""
    return {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}[dtype]


def sinkhorn_loop(weight: Tensor, gradient: Tensor, lr: float, sweeps: int = 5, eps: float = 1e-6) -> None:
    """A SinkGD step as its small ports write it: one matrix after the other, two norms and two divisions a sweep."""
    import torch

    for w, g in zip(weight.unbind(0), gradient.unbind(0), strict=True):
        x = g.clone()
        for _ in range(sweeps):
            x = x / (torch.linalg.norm(x, dim=1, keepdim=True) + eps)
            x = x / (torch.linalg.norm(x, dim=0, keepdim=True) + eps)
        w.add_(x, alpha=-lr)


def sinkhorn_batched(weight: Tensor, gradient: Tensor, lr: float, sweeps: int = 5, eps: float = 1e-8) -> None:
    """The formula on the whole stack at once."""
    x = gradient
    m, n = x.shape[-2:]
    for _ in range(sweeps):
        x = math.sqrt(n) * x / (x.norm(dim=-1, keepdim=True) + eps)
        x = math.sqrt(m) * x / (x.norm(dim=-2, keepdim=True) + eps)
    weight.add_(x, alpha=-lr)
