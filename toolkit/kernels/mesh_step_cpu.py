"""mesh_step on the CPU: the buffer's own passes, around the fused Sinkhorn apply, expert by expert."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.kernels import sr_sinkhorn_cpu
from toolkit.kernels._numba import as_array, jit, over_experts, typed

if TYPE_CHECKING:
    from torch import Tensor


@jit
def _add(buffer, gradient, means):  # type: ignore[no-untyped-def]
    """buffer += gradient where there is one, and the mean square of every row of the sum."""
    m, n = buffer.shape
    for i in range(m):
        row = buffer[i]
        if gradient.shape[0]:
            line = gradient[i]
            for j in range(n):
                row[j] += typed(line[j], row)
        total = 0.0
        for j in range(n):
            total += np.float64(row[j]) * np.float64(row[j])
        means[i] = total / n


@jit
def _scale(buffer, beta):  # type: ignore[no-untyped-def]
    beta = np.float32(beta)
    for j in range(buffer.size):
        buffer[j] *= beta


def _multiplier(means: np.ndarray, moment: np.ndarray, block: int, beta: float) -> np.ndarray:
    starts = np.arange(0, len(means), block)
    counts = np.diff(np.append(starts, len(means)))
    fresh = np.add.reduceat(means, starts) / counts
    moment[:] = beta * moment.astype(np.float64) + (1 - beta) * fresh
    v = moment.astype(np.float64)
    live = v > 0
    root = np.sqrt(np.where(live, v, 1.0))
    scale = math.sqrt(float(np.sum(np.where(live, 1 / root**2, 0.0))) / max(1, int(live.sum())))
    return np.repeat(np.where(live, 1 / (root * scale) if scale else 1.0, 1.0), counts)


def run(
    w: Tensor,
    b: Tensor,
    g: Tensor | None,
    lr: float,
    beta: float,
    sweeps: int,
    decay: float,
    moment: Tensor | None,
    block: int,
    moment_beta: float,
    rounding: str,
    rng: Any,
    compat: str,
) -> None:
    """`w`, `b`, `g` [E, m, n]; see `mesh_step.mesh_step`."""
    experts, m, n = b.shape
    buffers = as_array(b)
    gradients = None if g is None else as_array(g)
    moments = None if moment is None else as_array(moment)
    row_scale = None if moment is None else np.ones((experts, m))

    def add(first: int, last: int) -> None:
        means = np.empty(m)
        for e in range(first, last):
            line = np.empty((0, n), np.float32) if gradients is None else np.ascontiguousarray(gradients[e])
            _add(buffers[e], line, means)
            if row_scale is not None and moments is not None:
                row_scale[e] = _multiplier(means, moments[e], block, moment_beta)

    def fade(first: int, last: int) -> None:
        _scale(buffers[first:last].reshape(-1), beta)

    if gradients is not None or moments is not None:
        over_experts(add, experts, m * n)
    sr_sinkhorn_cpu.apply({sweeps: w}, b, lr, decay, compat, rounding=rounding, rng=rng, row_scale=row_scale)
    over_experts(fade, experts, m * n)
