"""The second moment kept as one number per row and one per column."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit.stages._shapes import bias_correction, blend, gradient_of, mean_squares, moment_beta, per_expert
from toolkit.stages._stage import Context, Ratio, Slot, Slots, Stage, columns, defaults_of, rows

TINY = 1e-15  # keeps the ratio of a row to the mean row defined before any gradient came


def factored_second_moment(
    x: Tensor | Ratio,
    slots: Slots,
    ctx: Context,
    *,
    beta: float = 0.999,
    eps: float = 1e-8,
    eps_row: float = 1e-8,
    eps_mode: str = "add_to_sqrt",
    correct: str = "before",
    power: float | None = None,
) -> Ratio:
    """R <- EMA of mean over columns of g^2, C <- EMA of mean over rows; g / sqrt(R C / mean(R)) as a ratio.

    Adafactor, arXiv 1804.04235, section 3. `eps_mode="v_floor"` floors C by `eps` (squared units) and R / mean(R) by
    `eps_row` (a pure number); "add_to_sqrt" adds `eps` beside the root; "adafactor" adds it to g^2.
    `correct="after"` leaves R and C biased and multiplies by sqrt(1 - beta^t) behind the floor, as SkewAdam's code
    does (arXiv 2607.19058); "before" corrects C first; "none" not at all. The correction cancels in R / mean(R).
    With `power` beta is 1 - t^-power, which needs no correction.
    """
    gradient, row, column = gradient_of(x), slots["row_moment"], slots["column_moment"]
    over_columns, over_rows = mean_squares(gradient, eps if eps_mode == "adafactor" else 0.0)
    decay = moment_beta(beta, power, ctx.step)
    blend(row, over_columns, decay)
    blend(column, over_rows, decay)
    mean_row = row.mean(-1, keepdim=True)
    ratio = row / (mean_row.clamp_min(TINY) if eps_mode == "v_floor" else torch.where(mean_row == 0, 1.0, mean_row))
    correction = bias_correction(beta, ctx.step)
    level = column / per_expert(correction, column) if correct == "before" else column
    divisor = 1 / per_expert(correction**0.5, gradient) if correct == "after" else 1.0
    if eps_mode == "v_floor":
        ratio, level = ratio.clamp_min(eps_row), level.clamp_min(eps)
    denominator = ratio.sqrt().unsqueeze(-1) * level.sqrt().unsqueeze(-2)
    return Ratio(gradient, denominator.add_(eps) if eps_mode == "add_to_sqrt" else denominator, divisor)


def floored_fraction(slots: Slots, *, eps: float, eps_row: float, correction: float = 1.0) -> dict[str, float]:
    """Share of `rows` and `columns` that sit on the floors of `eps_mode="v_floor"`. Where every column does, the rule
    is gradient descent scaled by rows. Under `correct="after"` leave `correction` at 1, otherwise give 1 - beta^t."""
    row, column = slots["row_moment"], slots["column_moment"]
    ratio = row / row.mean(-1, keepdim=True).clamp_min(TINY)

    def share(below: Tensor) -> float:
        return float(below.to(torch.float64).mean()) if below.numel() else math.nan

    return {"rows": share(ratio < eps_row), "columns": share(column / correction < eps)}


STAGE = Stage(
    "factored_second_moment",
    factored_second_moment,
    (Slot("row_moment", rows), Slot("column_moment", columns)),
    defaults_of(factored_second_moment),
    counts_steps=True,
    doc=factored_second_moment.__doc__ or "",
)
