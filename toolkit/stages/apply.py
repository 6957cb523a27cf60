"""The end of every chain, and the only place where a weight is written."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.stages._shapes import direction
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of

DECAYS = ("fused", "own_dtype")
ROUNDINGS = ("nearest", "stochastic", "paper")


def apply(
    x: Tensor | Ratio,
    slots: Slots,
    ctx: Context,
    *,
    weight_decay: float = 0.0,
    decay: str = "fused",
    rounding: str = "stochastic",
) -> Tensor:
    """W <- round((1 - lr wd) W - lr x), in place; returns W.

    A weight of the compute dtype is never rounded. For bfloat16, `rounding` is "nearest", "stochastic" (unbiased,
    representable values are fixed points; float16 rounds to nearest) or "paper" (SkewAdam's dither, arXiv 2607.19058).
    `decay="own_dtype"` decays before, in the weight's own dtype, where 1 - lr wd is exactly 1 for lr wd <= 1.9e-3.
    """
    weight, keep = ctx.weight, 1 - ctx.lr * weight_decay
    wide = x.numerator.dtype if isinstance(x, Ratio) else x.dtype
    if weight.dtype == wide:
        if weight_decay:
            weight.mul_(keep)
        return _descend(weight, x, ctx.lr)
    if weight_decay and decay == "own_dtype":
        weight.mul_(keep)
    full = weight.to(wide)
    if weight_decay and decay == "fused":
        full.mul_(keep)
    return weight.copy_(round_to(_descend(full, x, ctx.lr), weight.dtype, rounding, ctx))


def _descend(weight: Tensor, x: Tensor | Ratio, lr: float) -> Tensor:
    if isinstance(x, Ratio) and not isinstance(x.divisor, Tensor):
        return weight.addcdiv_(x.numerator, x.denominator, value=-(lr / x.divisor))
    return weight.add_(direction(x), alpha=-lr)


def round_to(full: Tensor, dtype: torch.dtype, rounding: str, ctx: Context) -> Tensor:
    """float32 `full` as `dtype`, see `apply`."""
    if dtype != torch.bfloat16 or rounding == "nearest":
        return full.to(dtype)
    if rounding == "paper":
        uniform = ctx.rng.uniform(tuple(full.shape), full.device)
        return (full + (uniform - 0.5) * full.abs() * 2.0**-7).to(dtype)
    bits = full.contiguous().view(torch.int32)
    rounded = (bits + ctx.rng.bits16(tuple(full.shape), full.device)).bitwise_and_(-65536).view(torch.float32)
    return torch.where(torch.isfinite(full), rounded, full).to(dtype)


STAGE = Stage("apply", apply, (), defaults_of(apply), doc=apply.__doc__ or "")
