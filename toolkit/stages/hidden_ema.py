"""Momentum that lives in the gradient buffer, not in optimizer state (MESH)."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import on_numerator
from toolkit.stages._stage import Context, Ratio, Slot, Slots, Stage, defaults_of


def hidden_ema(x: Tensor | Ratio, slots: Slots, ctx: Context, *, beta: float = 0.9) -> Tensor | Ratio:
    """B <- B + x, returned in place of x. B is decayed by beta once after the step, whoever runs the chain.

    Between steps the slot therefore holds beta B, what the next backward adds onto. With `ctx.gradient_in_buffer`
    the backward has added already and x is the slot itself. Source: MESH, arXiv 2608.04407.
    """

    def smooth(gradient: Tensor) -> Tensor:
        buffer = slots["buffer"]
        return buffer if ctx.gradient_in_buffer else buffer.add_(gradient)

    return on_numerator(x, smooth)


STAGE = Stage(
    "hidden_ema",
    hidden_ema,
    (Slot("buffer", home="grad_buffer"),),
    defaults_of(hidden_ema),
    doc=hidden_ema.__doc__ or "",
)
