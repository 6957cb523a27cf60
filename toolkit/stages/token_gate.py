"""Hold back experts that saw too few tokens this step."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import on_numerator
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of
from traces.errors import GradreelError


def token_gate(x: Tensor | Ratio, slots: Slots, ctx: Context, *, min_tokens: int = 1) -> Tensor | Ratio:
    """0 for experts with fewer than `min_tokens` tokens, x for the others; parameters without experts pass.

    State before the gate moves on. Errors: GradreelError without token counts, since a gate that guesses is none.
    """
    if ctx.tokens_per_expert is None:
        if ctx.expert_stacked:
            raise GradreelError("a token gate needs tokens_per_expert; record the routing, or leave the gate out")
        return x
    closed = ctx.tokens_per_expert < min_tokens

    def gate(values: Tensor) -> Tensor:
        return values.masked_fill(closed.to(values.device).reshape(-1, *([1] * (values.dim() - 1))), 0.0)

    return on_numerator(x, gate)


STAGE = Stage("token_gate", token_gate, (), defaults_of(token_gate), doc=token_gate.__doc__ or "")
