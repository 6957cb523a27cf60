"""Writing weights from a Triton kernel: the random numbers and roundings of `_store_cpu.py`.

bfloat16 travels as int16 bits, since the interpreter's own bfloat16 arithmetic is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024


@triton.jit
def widen(value, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 of what was loaded."""
    if BITS:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def random_word(element, key0, key1, step):  # type: ignore[no-untyped-def]
    """The 32-bit word of each element (int64); see `_philox.py`."""
    block = element >> 2
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2 = (element * 0 + step).to(tl.uint32)
    c3 = ((element * 0 + step) >> 32).to(tl.uint32)
    k0, k1 = (element * 0 + key0).to(tl.uint32), (element * 0 + key1).to(tl.uint32)
    c0, c1, c2, c3 = tl.philox_impl(c0, c1, c2, c3, k0, k1)
    which = element & 3
    return tl.where(which == 0, c0, tl.where(which == 1, c1, tl.where(which == 2, c2, c3)))


@triton.jit
def narrow(value, element, key0, key1, step, BITS: tl.constexpr, NOISE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is stored of a float32: itself, or the bits of a bfloat16, to nearest or with NOISE stochastically."""
    out = value
    if BITS:
        pattern = value.to(tl.int32, bitcast=True)
        nearest = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        stored = tl.where(value == value, nearest, 0x7FC0)
        if NOISE:
            word = (random_word(element, key0, key1, step) >> 16).to(tl.int32)
            stored = tl.where((pattern & 0x7F800000) != 0x7F800000, (pattern + word) >> 16, stored)
        out = stored.to(tl.int16)
    return out


def bits(x: Tensor) -> tuple[Tensor, bool]:
    """The tensor as kernels take it, and whether it is bfloat16 as its bits."""
    import torch

    return (x.view(torch.int16), True) if x.dtype == torch.bfloat16 else (x, False)


def noise(op: str, weight: Tensor, rounding: str, rng: Any) -> tuple[int, int, int, bool]:
    """(key0, key1, step, whether there is any) of a weight's rounding."""
    import torch

    if weight.dtype != torch.bfloat16 or rounding == "nearest":
        return 0, 0, 0, False
    if rounding != "stochastic" or not hasattr(rng, "philox_key"):
        raise GradreelError(
            f"{op}: backend 'triton' rounds to nearest, or stochastically with the numbers of a CounterRng; "
            f"rounding is {rounding!r}"
        )
    return *rng.philox_key, int(rng.step), True
