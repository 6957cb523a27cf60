"""Adam's correction of a moving average that started at zero."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import bias_correction, gradient_of, per_expert
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of


def unbias(x: Tensor | Ratio, slots: Slots, ctx: Context, *, beta: float = 0.9) -> Tensor | Ratio:
    """x / (1 - beta^t). On a ratio it goes into the divisor, so that the apply stage folds it into the step size.

    t is the expert's own count of steps. Source: Adam, arXiv 1412.6980, algorithm 1.
    """
    correction = per_expert(bias_correction(beta, ctx.step), gradient_of(x))
    if isinstance(x, Ratio):
        return Ratio(x.numerator, x.denominator, x.divisor * correction)
    return x / correction


STAGE = Stage("unbias", unbias, (), defaults_of(unbias), counts_steps=True, doc=unbias.__doc__ or "")
