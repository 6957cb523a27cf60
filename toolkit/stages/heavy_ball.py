"""Momentum as a plain decayed sum."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import on_numerator
from toolkit.stages._stage import Context, Ratio, Slot, Slots, Stage, defaults_of


def heavy_ball(
    x: Tensor | Ratio, slots: Slots, ctx: Context, *, beta: float = 0.9, nesterov: bool = False
) -> Tensor | Ratio:
    """B <- beta B + x, returned in place of x (x + beta B under `nesterov`); acts on the numerator of a ratio.

    The form of `torch.optim.SGD` with dampening 0, and of Muon.
    """

    def smooth(gradient: Tensor) -> Tensor:
        buffer = slots["momentum"].mul_(beta).add_(gradient)
        return gradient.add(buffer, alpha=beta) if nesterov else buffer

    return on_numerator(x, smooth)


STAGE = Stage("heavy_ball", heavy_ball, (Slot("momentum"),), defaults_of(heavy_ball), doc=heavy_ball.__doc__ or "")
