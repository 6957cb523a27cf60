"""Adam's full second moment."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit.stages._shapes import bias_correction, blend, gradient_of, moment_beta, per_expert
from toolkit.stages._stage import Context, Ratio, Slot, Slots, Stage, defaults_of

#: Where eps goes. v_floor: max(v, eps) below the root, in squared units. add_to_sqrt: beside the root, as in Adam.
#: adafactor: added to the squared gradient before averaging.
EPS_MODES = ("v_floor", "add_to_sqrt", "adafactor")


def second_moment(
    x: Tensor | Ratio,
    slots: Slots,
    ctx: Context,
    *,
    beta: float = 0.999,
    eps: float = 1e-8,
    eps_mode: str = "add_to_sqrt",
    correct: str = "before",
    power: float | None = None,
) -> Ratio:
    """V <- beta V + (1 - beta) g^2, as the ratio g / sqrt(V).

    `correct="before"` divides V by 1 - beta^t before eps acts (Adam, arXiv 1412.6980); "after" does it behind the
    floor, which is a hidden warm-up of floored elements (SkewAdam's code, arXiv 2607.19058); "none" not at all.
    With `power` beta is 1 - t^-power (Adafactor, arXiv 1804.04235), which needs no correction.
    The operations and their order are those of `torch.optim.AdamW`.
    """
    gradient, v = gradient_of(x), slots["second_moment"]
    if power is not None or eps_mode == "adafactor":
        added = eps if eps_mode == "adafactor" else 0.0
        blend(v, gradient.square().add_(added), moment_beta(beta, power, ctx.step))
    else:
        v.mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
    if correct == "none":
        if eps_mode == "v_floor":
            return Ratio(gradient, v.clamp_min(eps).sqrt_())
        return Ratio(gradient, v.sqrt().add_(eps if eps_mode == "add_to_sqrt" else 0.0))
    correction = bias_correction(beta, ctx.step)
    root = per_expert(correction**0.5, v)
    if eps_mode == "v_floor":
        if correct == "after":
            return Ratio(gradient, v.clamp_min(eps).sqrt_(), 1 / root)
        return Ratio(gradient, (v / per_expert(correction, v)).clamp_min_(eps).sqrt_())
    denominator = v.sqrt()
    if correct == "after":
        return Ratio(gradient, denominator.add_(eps), 1 / root)
    return Ratio(gradient, denominator.div_(root).add_(eps if eps_mode == "add_to_sqrt" else 0.0))


def floored_fraction(slots: Slots, *, eps: float, correction: float = 1.0) -> float:
    """Share of elements whose v lies below the floor `eps`, NaN if there are none. Under `correct="after"` leave
    `correction` at 1, otherwise give 1 - beta^t."""
    v = slots["second_moment"]
    return float((v / correction < eps).to(torch.float64).mean()) if v.numel() else math.nan


STAGE = Stage(
    "second_moment",
    second_moment,
    (Slot("second_moment"),),
    defaults_of(second_moment),
    counts_steps=True,
    doc=second_moment.__doc__ or "",
)
