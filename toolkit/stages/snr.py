"""Momentum of normalised gradients, divided by its own noise (SINK-V)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit.stages._shapes import direction, is_matrix, matrix_dims, mean_squares
from toolkit.stages._stage import Context, Ratio, Slot, Slots, Stage, defaults_of


def snr(x: Tensor | Ratio, slots: Slots, ctx: Context, *, beta: float = 0.9) -> Tensor:
    """M <- beta M + (1 - beta) x; (4 / pi) atan(M / sqrt(v_row v_col)).

    x is normalised to mean square 1, so 1 - mean(M^2) of the buffer before the step is the share of noise, per row
    (v_row), per column (v_col), or over all of a vector. Full signal gives 1, pure noise nearly 0.
    """
    normalised, momentum = direction(x), slots["momentum"]
    if is_matrix(momentum, ctx):
        row, column = mean_squares(momentum)
        noise = ((1 - row).clamp_min_(0).unsqueeze(-1) * (1 - column).clamp_min_(0).unsqueeze(-2)).sqrt_()
        momentum.lerp_(normalised, 1 - beta)
        return torch.atan2(momentum, noise, out=noise).mul_(4 / math.pi)
    dims = matrix_dims(momentum, ctx)
    squares = momentum.square()
    noise = (1 - (squares.mean(dims, keepdim=True) if dims else squares)).clamp_min_(0)
    momentum.lerp_(normalised, 1 - beta)
    return torch.atan2(momentum, noise.expand_as(momentum)).mul_(4 / math.pi)


STAGE = Stage("snr", snr, (Slot("momentum"),), defaults_of(snr), doc=snr.__doc__ or "")
