"""Adafactor's steps relative to the size of the weight."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import direction, matrix_dims, rms
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of


def parameter_scale(x: Tensor | Ratio, slots: Slots, ctx: Context, *, smallest: float = 1e-3) -> Tensor:
    """x max(smallest, RMS(W)), per matrix or vector (Adafactor, arXiv 1804.04235, section 8)."""
    update = direction(x)
    return update * rms(ctx.weight.to(update.dtype), matrix_dims(update, ctx)).clamp_min(smallest)


STAGE = Stage("parameter_scale", parameter_scale, (), defaults_of(parameter_scale), doc=parameter_scale.__doc__ or "")
