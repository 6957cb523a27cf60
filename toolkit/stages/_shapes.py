"""What stages share: which axes form a matrix, per-expert factors, and updates kept as ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from toolkit.stages._stage import Context, Ratio

#: Matrices above so many elements are reduced in pieces of rows, lest squares take the room of another parameter.
SMALL = 1 << 14
PIECES = 16


def row_pieces(x: Tensor) -> Iterator[Tensor]:
    """Views of some rows of every matrix, at most `PIECES`; how many rows depends on the matrix's size alone."""
    if x.dim() < 2 or x.shape[-2] * x.shape[-1] <= SMALL:
        yield x
    else:
        yield from x.split(-(-x.shape[-2] // PIECES), -2)


def mean_squares(x: Tensor, added: float = 0.0) -> tuple[Tensor, Tensor]:
    """Means of x^2 + `added` over columns, [.., m], and over rows, [.., n]."""
    rows, columns = list[Tensor](), None
    for piece in row_pieces(x):
        squares = piece.square()
        if added:
            squares.add_(added)
        rows.append(squares.mean(-1))
        if piece.shape[-2] == x.shape[-2]:
            return rows[0], squares.mean(-2)
        columns = squares.sum(-2) if columns is None else columns.add_(squares.sum(-2))
    assert columns is not None
    return torch.cat(rows, -1), columns.div_(x.shape[-2])


def mean_magnitude(x: Tensor) -> Tensor:
    """Mean of abs(x) over the rows of each matrix, [.., n]."""
    total = None
    for piece in row_pieces(x):
        if piece.shape[-2] == x.shape[-2]:
            return piece.abs().mean(-2)
        total = piece.abs().sum(-2) if total is None else total.add_(piece.abs().sum(-2))
    assert total is not None
    return total.div_(x.shape[-2])


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


def owned_direction(x: Tensor | Ratio) -> Tensor:
    """`direction`, for a stage that may change the result if x is a ratio; the ratio is used up."""
    return x.multiply_out() if isinstance(x, Ratio) else x


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
    largest = torch.maximum(x.amax(dims, keepdim=True), x.amin(dims, keepdim=True).neg_())
    safe = torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)
    pieces = list(row_pieces(x)) if -2 in dims else [x]
    if len(pieces) == 1:
        return (x / safe).square_().mean(dims, keepdim=True).sqrt_().mul_(safe)
    total = sum(piece.div(safe).square_().sum(dims, keepdim=True) for piece in pieces)
    assert isinstance(total, Tensor)
    return total.div_(math.prod(x.shape[dim] for dim in dims)).sqrt_().mul_(safe)


def sign_of(x: Tensor) -> Tensor:
    """sign(x) with NaN kept: torch's own makes it 0, and a broken expert would look idle."""
    return to_signs(x.clone())


def to_signs(x: Tensor) -> Tensor:
    """`sign_of`, in place."""
    for piece in row_pieces(x):
        broken = piece.isnan()
        piece.sign_().masked_fill_(broken, torch.nan)
    return x


def divide_or_zero(x: Tensor, by: Tensor) -> Tensor:
    """x / by, and exactly 0 where `by` is 0."""
    return torch.where(by == 0, torch.zeros((), dtype=x.dtype, device=x.device), x / by)
