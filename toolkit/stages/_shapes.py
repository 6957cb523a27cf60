"""What stages share: which axes form a matrix, per-expert factors, and updates kept as ratios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from toolkit.stages._stage import Context, Ratio


def matrix_dims(x: Tensor, ctx: Context) -> tuple[int, ...]:
    """The axes of one matrix (or of one vector) of `x`: the last two, fewer where an expert holds fewer."""
    return tuple(range(-min(2, x.dim() - ctx.expert_stacked), 0))


def is_matrix(x: Tensor, ctx: Context) -> bool:
    """Whether `x` holds matrices, not vectors or scalars."""
    return x.dim() - ctx.expert_stacked >= 2


def per_expert(value: float | Tensor, x: Tensor) -> float | Tensor:
    """A factor per expert, [E], shaped to multiply `x` [E, ..]; a plain number stays one."""
    if not isinstance(value, Tensor):
        return value
    return value.to(x.device, x.dtype).reshape(-1, *([1] * (x.dim() - 1)))


def bias_correction(beta: float, step: int | Tensor) -> float | Tensor:
    """1 - beta^step: a Python float, or float64 [E] where experts have taken different numbers of steps."""
    if isinstance(step, Tensor):
        return 1 - torch.pow(torch.tensor(beta, dtype=torch.float64, device=step.device), step)
    return float(1 - beta**step)


def moment_beta(beta: float, power: float | None, step: int | Tensor) -> float | Tensor:
    """The decay of a second moment at this step: `beta`, or 1 - step^-power (Adafactor, arXiv 1804.04235)."""
    if power is None:
        return beta
    if isinstance(step, Tensor):
        return 1 - step.to(torch.float64) ** -power
    return 1 - step**-power


def blend(average: Tensor, value: Tensor, beta: float | Tensor) -> Tensor:
    """average <- beta average + (1 - beta) value, in place; `beta` a number or one per expert."""
    if isinstance(beta, Tensor):
        weight = per_expert(beta, average)
        return average.mul_(weight).add_(value * (1 - weight))
    return average.mul_(beta).add_(value, alpha=1 - beta)


def direction(x: Tensor | Ratio) -> Tensor:
    """The update as one tensor."""
    return x.direction() if isinstance(x, Ratio) else x


def on_numerator(x: Tensor | Ratio, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to a tensor, or to the numerator of a ratio, whose denominator then waits for the end."""
    if isinstance(x, Ratio):
        return Ratio(change(x.numerator), x.denominator, x.divisor)
    return change(x)


def gradient_of(x: Tensor | Ratio) -> Tensor:
    """What momentum stages and second moments see: the numerator."""
    return x.numerator if isinstance(x, Ratio) else x


def rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Root mean square over `dims`, kept as axes of size 1; scaled by the largest element lest squares overflow."""
    if not dims or not x.numel():
        return x.abs()
    largest = x.abs().amax(dims, keepdim=True)
    safe = torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)
    return (x / safe).square_().mean(dims, keepdim=True).sqrt_().mul_(safe)


def sign_of(x: Tensor) -> Tensor:
    """sign(x) with NaN kept: torch's own makes it 0, and a broken expert would look idle."""
    return x.sign().masked_fill_(x.isnan(), torch.nan)


def divide_or_zero(x: Tensor, by: Tensor) -> Tensor:
    """x / by, and exactly 0 where `by` is 0."""
    return torch.where(by == 0, torch.zeros((), dtype=x.dtype, device=x.device), x / by)
