"""SAGE: a light adaptive sign rule for embeddings and output heads."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.stages._shapes import bias_correction, direction, mean_magnitude, per_expert, rms, to_signs
from toolkit.stages._stage import Context, Ratio, Slot, Slots, Stage, columns, defaults_of


def sage(
    x: Tensor | Ratio, slots: Slots, ctx: Context, *, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-8
) -> Tensor:
    """sign(beta1 M + (1 - beta1) G) H, then M <- beta2 M + (1 - beta2) G (SAGE, arXiv 2604.07663).

    H [n] damps the columns whose mean magnitude s over the vocabulary rows is above the average:
    min(rms(S^) / (S^ + eps), rms(s) / (s + eps), 1), S^ being the corrected moving average of s.
    """
    gradient, momentum, average = direction(x), slots["momentum"], slots["column_magnitude"]
    size = mean_magnitude(gradient)
    average.mul_(beta2).add_(size, alpha=1 - beta2)
    smooth = average / per_expert(bias_correction(beta2, ctx.step), average)
    damping = torch.minimum(rms(smooth, (-1,)) / (smooth + eps), rms(size, (-1,)) / (size + eps)).clamp_max_(1.0)
    update = to_signs(torch.lerp(momentum, gradient, 1 - beta1)).mul_(damping.unsqueeze(-2))
    momentum.lerp_(gradient, 1 - beta2)
    return update


STAGE = Stage(
    "sage",
    sage,
    (Slot("momentum"), Slot("column_magnitude", columns)),
    defaults_of(sage),
    normalising=True,
    counts_steps=True,
    doc=sage.__doc__ or "",
)
