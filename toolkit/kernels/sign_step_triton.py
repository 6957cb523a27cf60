"""sign_step on a GPU: every element read once and written once. See `sign_step.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from toolkit.kernels._store_triton import BLOCK, bits, narrow, noise, widen

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def sign_kernel(  # type: ignore[no-untyped-def]
    w, x, lr, keep, key0, key1, step, count,
    BITS: tl.constexpr, X_BITS: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """W <- round(keep W - lr sign(x)) on flat arrays."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = widen(tl.load(x + at, mask=inside, other=0), X_BITS)
    sign = tl.where(value == value, (value > 0).to(tl.float32) - (value < 0).to(tl.float32), value)
    value = widen(tl.load(w + at, mask=inside, other=0), BITS) * keep - sign * lr
    tl.store(w + at, narrow(value, at, key0, key1, step, BITS, NOISE), mask=inside)


def run(weight: Tensor, x: Tensor, lr: float, keep: float, rounding: str, rng: Any) -> None:
    """In place; contiguous weight, float32 or bfloat16."""
    if not weight.numel():
        return
    key0, key1, step, noisy = noise("sign_step", weight, rounding, rng)
    (w, own), (g, its) = bits(weight), bits(x.contiguous())
    sign_kernel[(triton.cdiv(w.numel(), BLOCK),)](
        w, g, lr, keep, key0, key1, step, w.numel(), BITS=own, X_BITS=its, NOISE=noisy, BLOCK=BLOCK
    )
