"""Float64 sums over float32 or float64 tensors on the CPU, converted in registers: one read of memory, no copy.

The torch form in `_experts.py` is the truth; it writes a float64 copy of every operand first, which costs five times
as much as the sum. float32 and float64 only, equal dtypes, rows contiguous; everything else takes the torch form.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float64)


def _inner(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    for e in range(a.shape[0]):
        total = 0.0
        for i in range(a.shape[1]):
            total += np.float64(a[e, i]) * np.float64(b[e, i])
        out[e] = total


def _squares(a: np.ndarray, b: np.ndarray, c: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    p, q, r = signs[0], signs[1], signs[2]
    for e in range(a.shape[0]):
        total = 0.0
        for i in range(a.shape[1]):
            term = p * np.float64(a[e, i]) + q * np.float64(b[e, i]) + r * np.float64(c[e, i])
            total += term * term
        out[e] = total


@cache
def _compiled() -> tuple[Any, Any]:
    """Both loops, compiled on first use, so that listing the metrics does not import numba."""
    from toolkit.kernels._numba import jit

    return jit(_inner), jit(_squares)


def usable(*tensors: Tensor) -> bool:
    """Whether the tensors [e, L] can be summed here."""
    dtype = tensors[0].dtype
    return dtype in _DTYPES and all(t.device.type == "cpu" and t.dtype == dtype and t.is_contiguous() for t in tensors)


def inner(left: Tensor, right: Tensor) -> np.ndarray:
    """Inner products, float64 [e]."""
    out = np.empty(left.shape[0])
    _compiled()[0](left.numpy(), right.numpy(), out)
    return out


def squares_of_sum(signs: tuple[float, ...], tensors: tuple[Tensor, ...]) -> np.ndarray:
    """Squared L2 norms, float64 [e], of a signed sum of two or three tensors."""
    out = np.empty(tensors[0].shape[0])
    arrays = [tensor.numpy() for tensor in tensors]
    weights = np.array([*signs, 0.0][:3])
    _compiled()[1](arrays[0], arrays[1], arrays[2] if len(arrays) == 3 else arrays[0], weights, out)
    return out
