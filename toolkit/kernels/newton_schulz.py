"""Newton-Schulz orthogonalisation, batched over experts: the direction of Muon.

Legend: x [.., m, n]. X <- x / |x|, then `steps` times X <- a X + (b A + c A^2) X with A = X X^T, on the shorter side.
Source: Jordan et al., "Muon" (2024), with its coefficients. A matrix of zeros stays zero; one with a NaN or an infinity
becomes NaN, alone. The products run in float32 on the CPU (bfloat16 matmul is emulated there); on a GPU in `dtype`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from toolkit.kernels._dispatch import choose
from traces.errors import GradreelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OP = "newton_schulz"
BUILT = ("reference", "eager")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_CHUNK_ELEMENTS = 1 << 22


def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    backend: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The orthogonalised matrices, like `x`: singular values are driven towards 1 (to about 0.7 to 1.2 in 5 steps).

    `dtype` is what the products run in: float32 by default; bfloat16 reproduces Muon's own arithmetic. `backend`:
    reference (float64) or eager; the time is all in matrix products, so there is no other. Errors: fewer than two axes,
    steps below 1, an unknown or unable backend.
    """
    import torch

    if x.dim() < 2:
        raise GradreelError(f"{OP}: x has shape {tuple(x.shape)}; give matrices in the last two axes")
    if steps < 1:
        raise GradreelError(f"{OP}: steps is {steps}; give a whole number of at least 1")
    chosen = choose(OP, x, backend, BUILT)
    wide = torch.float64 if chosen == "reference" or x.dtype == torch.float64 else dtype or torch.float32
    m, n = x.shape[-2:]
    if not x.numel():
        return x.clone()
    flat = x.detach().reshape(-1, m, n)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    chunk = max(1, _CHUNK_ELEMENTS // (m * n))
    for at in range(0, len(flat), chunk):
        part = flat[at : at + chunk]
        out[at : at + chunk] = _orthogonalise(part.mT if m > n else part, steps, coefficients, wide, m > n)
    return out.reshape(x.shape)


def _orthogonalise(
    x: Tensor, steps: int, coefficients: tuple[float, float, float], wide: torch.dtype, turned: bool
) -> Tensor:
    import torch

    a, b, c = coefficients
    # Norms in float64 of values scaled by the largest: no overflow, no eps, and zero stays zero.
    full = x.double()
    largest = full.abs().amax((-2, -1), keepdim=True)
    bad = ~torch.isfinite(full).flatten(1).all(1)
    scaled = full / torch.where(largest > 0, largest, 1.0)
    norm = scaled.square().sum((-2, -1), keepdim=True).sqrt_()
    work = (scaled / torch.where(norm > 0, norm, 1.0)).to(wide).contiguous()
    work[bad] = 0
    for _ in range(steps):
        gram = work @ work.mT
        mix = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        work = torch.baddbmm(work, mix, work, beta=a)
    work[bad] = math.nan
    return work.mT if turned else work
