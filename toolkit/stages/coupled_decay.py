"""Weight decay as an L2 term in the gradient."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import on_numerator
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of


def coupled_decay(x: Tensor | Ratio, slots: Slots, ctx: Context, *, weight_decay: float = 0.0) -> Tensor | Ratio:
    """x + weight_decay W, as `torch.optim.SGD` does."""
    return on_numerator(x, lambda g: g.add(ctx.weight.to(g.dtype), alpha=weight_decay) if weight_decay else g)


STAGE = Stage("coupled_decay", coupled_decay, (), defaults_of(coupled_decay), doc=coupled_decay.__doc__ or "")
