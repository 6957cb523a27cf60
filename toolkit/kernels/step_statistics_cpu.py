"""step_statistics in one pass on the CPU: float64 sums over blocks that stay in the first-level cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from toolkit.kernels._numba import as_array, bits, jit, magnitude_limit, over_experts, widen

if TYPE_CHECKING:
    from torch import Tensor


@jit
def _alone(g, first, last, sums, counts):  # type: ignore[no-untyped-def]
    limit, mask = magnitude_limit(g)
    for e in range(first, last):
        total = squares = absolute = 0.0
        largest = 0
        zeros = bad = 0
        for j in range(g.shape[1]):
            pattern = bits(g[e, j]) & mask
            finite = pattern < limit
            a = np.float64(widen(g[e, j])) if finite else 0.0
            total += a
            squares += a * a
            absolute += abs(a)
            largest = max(largest, pattern if finite else 0)
            zeros += pattern == 0
            bad += not finite
        sums[0, e], sums[1, e], sums[2, e] = total, squares, absolute
        counts[0, e], counts[1, e], counts[2, e] = zeros, bad, largest


@jit
def _paired(g, p, first, last, sums, counts):  # type: ignore[no-untyped-def]
    limit, mask = magnitude_limit(g)
    for e in range(first, last):
        dot = squares = previous = 0.0
        flips = support = 0
        for j in range(g.shape[1]):
            bg, bp = bits(g[e, j]), bits(p[e, j])
            mg, mp = bg & mask, bp & mask
            finite = (mg < limit) & (mp < limit)
            a = np.float64(widen(g[e, j])) if finite else 0.0
            b = np.float64(widen(p[e, j])) if finite else 0.0
            dot += a * b
            squares += a * a
            previous += b * b
            signed = finite & (mg != 0) & (mp != 0)
            support += signed
            flips += signed & (((bg ^ bp) & (mask + 1)) != 0)
        sums[3, e], sums[4, e], sums[5, e] = dot, squares, previous
        counts[3, e], counts[4, e] = flips, support


def run(g: Tensor, p: Tensor | None) -> dict[str, Tensor]:
    """`g` and `p` are [E, S] of one dtype; the values by name, as `step_statistics` names them."""
    import torch

    first, second = as_array(g.contiguous()), None if p is None else as_array(p.contiguous())
    experts = first.shape[0]
    sums, counts = np.zeros((6, experts)), np.zeros((5, experts), np.int64)

    def work(start: int, stop: int) -> None:
        # The pair is read right after the gradient alone, expert by expert, while it is still in cache.
        for e in range(start, stop):
            _alone(first, e, e + 1, sums, counts)
            if second is not None:
                _paired(first, second, e, e + 1, sums, counts)

    over_experts(work, experts, first.shape[1])
    largest = counts[2].astype(np.uint32)
    wide = largest.view(np.float32) if first.dtype != np.uint16 else (largest << 16).view(np.float32)
    values = {
        "sum": sums[0],
        "sum_squares": sums[1],
        "sum_abs": sums[2],
        "max_abs": wide.astype(np.float64),
        "zeros": counts[0],
        "nonfinite": counts[1],
    }
    if second is not None:
        values |= {"dot": sums[3], "dot_squares": sums[4], "previous_squares": sums[5]}
        values |= {"sign_flips": counts[3], "sign_support": counts[4]}
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
