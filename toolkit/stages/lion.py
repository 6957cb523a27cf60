"""Lion: the sign of an interpolation between momentum and gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.stages._shapes import direction, to_signs
from toolkit.stages._stage import Context, Ratio, Slot, Slots, Stage, defaults_of


def lion(x: Tensor | Ratio, slots: Slots, ctx: Context, *, beta1: float = 0.9, beta2: float = 0.99) -> Tensor:
    """sign(beta1 M + (1 - beta1) G), then M <- beta2 M + (1 - beta2) G (Lion, arXiv 2302.06675)."""
    gradient, momentum = direction(x), slots["momentum"]
    update = to_signs(torch.lerp(momentum, gradient, 1 - beta1))
    momentum.lerp_(gradient, 1 - beta2)
    return update


STAGE = Stage("lion", lion, (Slot("momentum"),), defaults_of(lion), normalising=True, doc=lion.__doc__ or "")
