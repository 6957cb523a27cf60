"""Orthogonalise every matrix by a fixed number of Newton-Schulz products (Muon)."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.stages._shapes import direction, is_matrix
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of
from traces.errors import GradreelError

#: Factor on the result for a matrix of m rows and n columns.
SCALES = ("original", "match_rms_adamw", "none")
DTYPES = ("float32", "bfloat16")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    x: Tensor | Ratio,
    slots: Slots,
    ctx: Context,
    *,
    sweeps: int = 5,
    scale: str = "original",
    dtype: str = "float32",
    eps: float = 1e-7,
) -> Tensor:
    """X <- a X + (b A + c A^2) X with A = X X^T, from X / (norm + eps), per matrix of a stack.

    `scale`: "original" sqrt(max(1, m / n)), "match_rms_adamw" 0.2 sqrt(max(m, n)), "none". `dtype` is what the
    products are taken in: "bfloat16" as published, float32 by default, which on a CPU is far faster as well.
    Source: Muon, Jordan et al. 2024, kellerjordan.github.io/posts/muon; scaling arXiv 2502.16982.
    """
    update = direction(x)
    if not is_matrix(update, ctx):
        raise GradreelError(f"stage newton_schulz got shape {tuple(update.shape)}; it needs matrices")
    rows, columns = update.shape[-2:]
    work = update.mT if rows > columns else update
    wide = work.dtype if work.dtype == torch.float64 else getattr(torch, dtype)
    work = work.to(wide)
    work = work / (work.norm(dim=(-2, -1), keepdim=True) + eps)
    shape, work = work.shape, work.flatten(0, -3) if work.dim() > 2 else work[None]
    a, b, c = COEFFICIENTS
    for _ in range(sweeps):
        gram = work @ work.mT
        if wide == torch.bfloat16:  # as published: where each sum is rounded shows in the third digit
            work = a * work + (b * gram + c * (gram @ gram)) @ work
            continue
        mix = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        del gram
        work = torch.baddbmm(work, mix, work, beta=a)
        del mix
    work = work.reshape(shape)
    result = (work.mT if rows > columns else work).to(update.dtype)
    if scale == "original":
        return result.mul_(max(1.0, rows / columns) ** 0.5)
    return result.mul_(0.2 * max(rows, columns) ** 0.5) if scale == "match_rms_adamw" else result


STAGE = Stage(
    "newton_schulz", newton_schulz, (), defaults_of(newton_schulz), normalising=True, doc=newton_schulz.__doc__ or ""
)
