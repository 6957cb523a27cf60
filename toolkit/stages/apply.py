"""The end of every chain, and the only place where a weight is written."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from toolkit.stages._rounding import rounded
from toolkit.stages._shapes import direction
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of

DECAYS = ("fused", "own_dtype")
#: Elements of a narrow weight that are widened at once.
CHUNK = 1 << 20


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
    representable values are fixed points) or "dither" (SkewAdam's, arXiv 2607.19058); float16 rounds to nearest.
    `decay="own_dtype"` decays before, in the weight's own dtype, where 1 - lr wd is exactly 1 for lr wd <= 1.9e-3.
    """
    weight, rate = ctx.weight, ctx.lr * weight_decay
    wide = x.numerator.dtype if isinstance(x, Ratio) else x.dtype
    if rate and decay == "own_dtype":
        weight.mul_(1 - rate)
        rate = 0.0
    if weight.dtype == wide:
        return _descend(_decayed(weight, rate, x), x, ctx.lr)
    mode = "nearest" if weight.dtype == torch.float16 else rounding
    for narrow, piece, offset in _chunks(weight, x, 0):
        full = _decayed(narrow.to(wide), rate, piece)
        narrow.copy_(rounded(_descend(full, piece, ctx.lr), weight.dtype, mode, ctx.rng, offset=offset))
    return weight


def _decayed(weight: Tensor, rate: float, x: Tensor | Ratio) -> Tensor:
    if not rate:
        return weight
    # torch's AdamW multiplies by 1 - lr wd, itself rounded to float32; a rate below 6e-8 is then nothing.
    return weight.mul_(1 - rate) if isinstance(x, Ratio) else weight.add_(weight, alpha=-rate)


def _descend(weight: Tensor, x: Tensor | Ratio, lr: float) -> Tensor:
    if isinstance(x, Ratio) and not isinstance(x.divisor, Tensor):
        return weight.addcdiv_(x.numerator, x.denominator, value=-(lr / x.divisor))
    return weight.add_(direction(x), alpha=-lr)


def _chunks(weight: Tensor, x: Tensor | Ratio, offset: int) -> Iterator[tuple[Tensor, Tensor | Ratio, int]]:
    # Slices along the first axis with more than one entry; `offset` is the index of the first element.
    axis = next((a for a, size in enumerate(weight.shape) if size > 1), None)
    if weight.numel() <= CHUNK or axis is None:
        yield weight, x, offset
        return
    inner = math.prod(weight.shape[axis + 1 :])
    rows = max(1, CHUNK // inner)
    for start in range(0, weight.shape[axis], rows):
        count = min(rows, weight.shape[axis] - start)
        yield from _chunks(weight.narrow(axis, start, count), _slice(x, axis, start, count), offset + start * inner)


def _slice(x: Tensor | Ratio, axis: int, start: int, count: int) -> Tensor | Ratio:
    if isinstance(x, Tensor):
        return x.narrow(axis, start, count)

    def part(t: Tensor) -> Tensor:
        return t.narrow(axis, start, count) if t.shape[axis] > 1 else t

    divisor = part(x.divisor) if isinstance(x.divisor, Tensor) else x.divisor
    return Ratio(part(x.numerator), part(x.denominator), divisor)


STAGE = Stage("apply", apply, (), defaults_of(apply), doc=apply.__doc__ or "")
