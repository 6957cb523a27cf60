"""How a float32 result is stored in a narrower weight.

`nearest`: to nearest, ties to even. `stochastic`: up or down with the probability that makes the mean right; values
that bfloat16 can hold do not move. `dither`: what the published SkewAdam does, x + (u - 0.5) |x| 2^-7 and then to
nearest (arXiv 2607.19058), kept for reproduction: it also moves values that need no rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROUNDINGS = ("nearest", "stochastic", "dither")


def rounded(x: Tensor, dtype: torch.dtype, mode: str, rng: Any = None, *, offset: int = 0) -> Tensor:
    """`x` (float32 or float64) as `dtype` under `mode`; `x` itself where `dtype` is its own.

    Element i of x takes random number `offset + i` of `rng`, a `CounterRng` or whatever has its `bits16` and `uniform`.
    Errors: unknown mode; stochastic or dither without `rng`, or to another dtype than bfloat16.
    """
    import torch

    if mode not in ROUNDINGS:
        raise unknown("rounding", mode, ROUNDINGS)
    if dtype == x.dtype:
        return x
    if mode == "nearest" or dtype in (torch.float32, torch.float64):
        return x.to(dtype)
    if dtype != torch.bfloat16:
        raise GradreelError(f"rounding {mode!r} stores bfloat16, not {dtype}; use rounding='nearest'")
    if rng is None:
        raise GradreelError(f"rounding {mode!r} needs random numbers; pass rng")
    shape = tuple(x.shape)
    if mode == "stochastic":
        return stochastic_bf16(x, rng.bits16(shape, x.device, offset=offset))
    return dithered_bf16(x, rng.uniform(shape, x.device, offset=offset))


def stochastic_bf16(x: Tensor, bits16: Tensor) -> Tensor:
    """bfloat16 of float32 `x`: add `bits16` (int32 in [0, 65536)) to the bit pattern and cut the lower half.

    Exactly unbiased over uniform bits. Inf and NaN pass through; magnitudes above the largest bfloat16 may become Inf.
    """
    import torch

    x = x.to(torch.float32)
    pattern = (x.contiguous().view(torch.int32) + bits16) & -65536
    return torch.where(torch.isfinite(x), pattern.view(torch.float32), x).to(torch.bfloat16)


def dithered_bf16(x: Tensor, uniform: Tensor) -> Tensor:
    """The published dither: `uniform` float32 in [0, 1), noise of one bfloat16 step at most, then to nearest."""
    import torch

    x = x.to(torch.float32)
    return (x + (uniform - 0.5) * x.abs() * 2.0**-7).to(torch.bfloat16)
