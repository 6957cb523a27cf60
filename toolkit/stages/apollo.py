"""APOLLO: Adam's step size per channel, estimated in a random projection."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from toolkit.stages._rng import CounterRng
from toolkit.stages._shapes import bias_correction, direction, divide_or_zero, per_expert
from toolkit.stages._stage import Context, Ratio, Shape, Slot, Slots, Stage, defaults_of

#: Elements of a projection that are drawn in float64 at once.
DRAWN_AT_ONCE = 1 << 12


def apollo(
    x: Tensor | Ratio,
    slots: Slots,
    ctx: Context,
    *,
    rank: int = 128,
    refresh: int = 200,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    scale: float = 1.0,
    growth: float = 1.01,
) -> Tensor:
    """G s with s = norm(Adam(R)) / norm(R) per channel, R = P G a random projection (APOLLO, arXiv 2412.05270).

    Channels run along the longer axis; P [r, shorter axis] is Gaussian with variance 1 / r, the same for all experts,
    drawn anew every `refresh` steps and never stored. The update's norm grows by at most `growth` a step (0: no limit).
    """
    gradient = direction(x)
    turned = gradient.shape[-2] > gradient.shape[-1]
    work = gradient.mT if turned else gradient
    projected = _projection(ctx, work.shape[-2], rank, refresh, work) @ work
    first, second = slots["momentum"], slots["second_moment"]
    first.lerp_(projected, 1 - beta1)
    second.mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
    root = second.div(per_expert(bias_correction(beta2, ctx.step), second)).sqrt_().add_(eps)
    adam = first / per_expert(bias_correction(beta1, ctx.step), first) / root
    factor = divide_or_zero(adam.norm(dim=-2, keepdim=True), projected.norm(dim=-2, keepdim=True))
    del projected, root, adam
    update = (work * factor).mul_(scale)
    update = update.mT if turned else update
    return _limited(update, slots["last_norm"], growth)


def _limited(update: Tensor, last: Tensor, growth: float) -> Tensor:
    norm = update.norm(dim=(-2, -1))
    if growth:
        allowed = torch.where(last > 0, last * growth, norm)
        shrink = torch.where(norm > allowed, divide_or_zero(allowed, norm), 1.0)
        update, norm = update.mul_(shrink[..., None, None]), norm * shrink
    # An expert without a gradient keeps its limit, or its next step could not grow from zero.
    last.copy_(torch.where(norm > 0, norm, last))
    return update


def _projection(ctx: Context, size: int, rank: int, refresh: int, like: Tensor) -> Tensor:
    def draw(period: int) -> Tensor:
        rng = CounterRng(getattr(ctx.rng, "seed", 0), period, f"{getattr(ctx.rng, 'key', 0)}/apollo")
        count = min(rank, size) * size
        drawn = torch.empty(count, dtype=like.dtype, device=like.device)
        for start in range(0, count, DRAWN_AT_ONCE):
            part = (min(DRAWN_AT_ONCE, count - start),)
            one = rng.uniform(part, like.device, offset=start).to(torch.float64)
            two = rng.uniform(part, like.device, offset=count + start).to(torch.float64)
            normal = (-2 * torch.log1p(-one)).sqrt() * torch.cos(2 * math.pi * two)
            drawn[start : start + part[0]] = normal / min(rank, size) ** 0.5
        return drawn.reshape(min(rank, size), size)

    if isinstance(ctx.step, Tensor):
        periods = ((ctx.step - 1) // refresh).tolist()
        drawn = {period: draw(period) for period in set(periods)}
        return torch.stack([drawn[period] for period in periods]).reshape(
            len(periods), *([1] * (like.dim() - 3)), min(rank, size), size
        )
    return draw((ctx.step - 1) // refresh)


def with_rank(*, rank: int = 128, **options: Any) -> Stage:
    """The stage with moments of `rank` rows."""

    def moment(shape: Shape) -> Shape:
        return (*shape[:-2], min(rank, *shape[-2:]), max(shape[-2:]))

    return Stage(
        "apollo",
        apollo,
        (Slot("momentum", moment), Slot("second_moment", moment), Slot("last_norm", lambda shape: shape[:-2])),
        {**defaults_of(apollo), "rank": rank, **options},
        counts_steps=True,
        doc=apollo.__doc__ or "",
    )


STAGE = with_rank()
