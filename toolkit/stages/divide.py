"""Multiply a ratio out."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import owned_direction
from toolkit.stages._stage import Context, Ratio, Slots, Stage


def divide(x: Tensor | Ratio, slots: Slots, ctx: Context) -> Tensor:
    """numerator / denominator / divisor, for a stage behind it that must see the whole update."""
    return owned_direction(x)


STAGE = Stage("divide", divide, doc=divide.__doc__ or "")
