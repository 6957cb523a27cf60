"""Momentum as an exponential moving average, kept in optimizer state."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import on_numerator
from toolkit.stages._stage import Context, Ratio, Slot, Slots, Stage, defaults_of


def ema(x: Tensor | Ratio, slots: Slots, ctx: Context, *, beta: float = 0.9) -> Tensor | Ratio:
    """M <- beta M + (1 - beta) x, returned in place of x; acts on the numerator of a ratio.

    `lerp` keeps torch's own rounding (Adam, arXiv 1412.6980, algorithm 1).
    """
    return on_numerator(x, lambda gradient: slots["momentum"].lerp_(gradient, 1 - beta))


STAGE = Stage("ema", ema, (Slot("momentum"),), defaults_of(ema), doc=ema.__doc__ or "")
