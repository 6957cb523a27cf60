"""adamw_step on the CPU: one pass over weight, gradient and both moments, row by row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.kernels._numba import as_array, jit, narrow, over_experts, typed, widen
from toolkit.kernels._store_cpu import RowNoise, philox_row, store_row

if TYPE_CHECKING:
    from torch import Tensor


@jit
def _step(w, g, m, v, rate, root2, betas, eps, keep, noise, key0, key1, step, base, words, uniforms, none, u):  # type: ignore[no-untyped-def]
    b2, fresh1, fresh2 = np.float32(betas[1]), np.float32(1 - betas[0]), np.float32(1 - betas[1])
    inverse, tiny = np.float32(1 / root2), np.float32(eps)
    kept, pace = np.float32(keep), np.float32(rate)
    for i in range(w.shape[0]):
        row, line, mean, square = w[i], g[i], m[i], v[i]
        if noise == 0:
            for j in range(u.size):
                a = typed(line[j], u)
                mean[j] += fresh1 * (a - mean[j])
                square[j] = b2 * square[j] + fresh2 * (a * a)
                move = mean[j] / (np.float32(math.sqrt(square[j])) * inverse + tiny)
                row[j] = narrow(widen(row[j]) * kept - pace * move, row)
            continue
        for j in range(u.size):
            a = typed(line[j], u)
            mean[j] += fresh1 * (a - mean[j])
            square[j] = b2 * square[j] + fresh2 * (a * a)
            u[j] = mean[j] / (np.float32(math.sqrt(square[j])) * inverse + tiny)
        first = base + i * u.size
        if uniforms.size == 0:
            philox_row(key0, key1, step, first, words)
        store_row(row, u, rate, keep, False, noise, words, first % 4, uniforms[i] if uniforms.size > 0 else none)


def run(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    rate: float,
    root2: float,
    betas: tuple[float, float],
    eps: float,
    keep: float,
    rounding: str,
    rng: Any,
) -> None:
    """`w`, `g`, `m`, `v` [N, rows, n]; see `adamw_step.adamw_step`. `rate` is lr / c1."""
    import torch

    count, rows, n = w.shape
    noise = RowNoise(rounding, rng, w.dtype == torch.bfloat16, n)
    weights, gradients, first_moment, second_moment = as_array(w), as_array(g), as_array(m), as_array(v)

    def work(first: int, last: int) -> None:
        words, u, none = noise.words(), np.empty(n, np.float32), np.empty(0, np.float32)
        for e in range(first, last):
            base, target = e * rows * n, weights[e]
            goal = np.ascontiguousarray(target)
            line = np.ascontiguousarray(gradients[e])
            _step(
                goal, line, first_moment[e], second_moment[e], rate, root2, betas, eps, keep, noise.mode, noise.key[0],
                noise.key[1], noise.step, base, words, noise.uniforms((rows, n), base), none, u,
            )  # fmt: skip
            if goal.ctypes.data != target.ctypes.data:
                target[...] = goal

    over_experts(work, count, rows * n)
