"""Adafactor's built-in schedule."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.stages._shapes import direction, per_expert
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of


def relative_step(x: Tensor | Ratio, slots: Slots, ctx: Context, *, largest: float = 1e-2) -> Tensor:
    """x min(largest, 1 / sqrt(t)); with lr 1 the schedule of Adafactor, arXiv 1804.04235, section 9."""
    update = direction(x)
    if isinstance(ctx.step, Tensor):
        rate: float | Tensor = ctx.step.to(torch.float64).rsqrt().clamp_max(largest)
    else:
        rate = min(largest, ctx.step**-0.5)
    return update * per_expert(rate, update)


STAGE = Stage(
    "relative_step",
    relative_step,
    (),
    defaults_of(relative_step),
    counts_steps=True,
    doc=relative_step.__doc__ or "",
)
