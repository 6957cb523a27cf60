"""adamw_step on a GPU: every tensor read once and written once. See `adamw_step.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from toolkit.kernels._store_triton import BLOCK, bits, narrow, noise, widen

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def adamw_kernel(  # type: ignore[no-untyped-def]
    w, g, m, v, rate, root2, rest1, beta2, rest2, eps, keep, key0, key1, step, count,
    BITS: tl.constexpr, G_BITS: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step on flat arrays; rest = 1 - beta."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = widen(tl.load(g + at, mask=inside, other=0), G_BITS)
    first = tl.load(m + at, mask=inside, other=0.0)
    first += (x - first) * rest1
    second = tl.load(v + at, mask=inside, other=0.0) * beta2 + x * x * rest2
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)
    value = widen(tl.load(w + at, mask=inside, other=0), BITS) * keep
    value -= first / (tl.sqrt(second) / root2 + eps) * rate
    tl.store(w + at, narrow(value, at, key0, key1, step, BITS, NOISE), mask=inside)


def run(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, rate: float, root2: float, betas: tuple[float, float],
    eps: float, keep: float, rounding: str, rng: Any,
) -> None:  # fmt: skip
    """In place; contiguous weight, float32 or bfloat16, and contiguous float32 moments."""
    if not weight.numel():
        return
    key0, key1, step, noisy = noise("adamw_step", weight, rounding, rng)
    (w, own), (g, its) = bits(weight), bits(gradient.contiguous())
    adamw_kernel[(triton.cdiv(w.numel(), BLOCK),)](
        w, g, m, v, rate, root2, 1 - betas[0], betas[1], 1 - betas[1], eps, keep, key0, key1, step, w.numel(),
        BITS=own, G_BITS=its, NOISE=noisy, BLOCK=BLOCK,
    )  # fmt: skip
