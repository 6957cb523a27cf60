"""sign_step on the CPU: signs come from the bits, so that no scale is too small to have one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.kernels._numba import as_array, bits, jit, magnitude_limit, over_experts
from toolkit.kernels._store_cpu import RowNoise, philox_row, store_row

if TYPE_CHECKING:
    from torch import Tensor


@jit
def _step(w, x, lr, keep, noise, key0, key1, step, base, words, uniforms, none, u):  # type: ignore[no-untyped-def]
    limit, mask = magnitude_limit(x)
    one = np.float32(1)
    for i in range(w.shape[0]):
        line = x[i]
        for j in range(u.size):
            pattern = bits(line[j])
            magnitude = pattern & mask
            sign = -one if pattern & (mask + 1) else one
            u[j] = np.float32(np.nan) if magnitude > limit else (sign if magnitude else np.float32(0))
        first = base + i * u.size
        if noise != 0 and uniforms.size == 0:
            philox_row(key0, key1, step, first, words)
        store_row(w[i], u, lr, keep, False, noise, words, first % 4, uniforms[i] if uniforms.size > 0 else none)


def run(w: Tensor, x: Tensor, lr: float, keep: float, rounding: str, rng: Any) -> None:
    """`w`, `x` [N, rows, n]; see `sign_step.sign_step`."""
    import torch

    count, rows, n = w.shape
    noise = RowNoise(rounding, rng, w.dtype == torch.bfloat16, n)
    weights, values = as_array(w), as_array(x)

    def work(first: int, last: int) -> None:
        words, u, none = noise.words(), np.empty(n, np.float32), np.empty(0, np.float32)
        for e in range(first, last):
            base, target = e * rows * n, weights[e]
            goal = np.ascontiguousarray(target)
            _step(
                goal, np.ascontiguousarray(values[e]), lr, keep, noise.mode, noise.key[0], noise.key[1], noise.step,
                base, words, noise.uniforms((rows, n), base), none, u,
            )  # fmt: skip
            if goal.ctypes.data != target.ctypes.data:
                target[...] = goal

    over_experts(work, count, rows * n)
