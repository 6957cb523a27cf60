"""Stable rank of the update's matrices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toolkit.metrics._experts import PIECE, info_of, nothing_known, spread, stacked
from toolkit.metrics._metric import Measure, Metric, nothing
from traces.views import StepView

#: A spectral norm costs more than a step of most recipes: it is taken in every tenth step fed, the first included.
EVERY = 10
#: Up to this many rows or columns the Gram matrix is diagonalised; above, a block power method is used.
EXACT_SIZE = 512
_BLOCK, _SWEEPS = 8, 24


@dataclass
class Counter:
    """Steps fed so far."""

    steps: int = 0


def update(state: Counter, view: StepView) -> Iterable[Measure]:
    """Null for a zero update and for parameters without matrices."""
    state.steps += 1
    if (state.steps - 1) % EVERY:
        return
    matrices = _matrices(view)
    value = nothing_known(view) if matrices is None else spread(stable_ranks(matrices), view)
    yield Measure(value, view.step, support=np.isfinite(value).astype(np.float64))


def _matrices(view: StepView) -> Tensor | None:
    """The update [e, m, n], lent; None without an update or without matrices of one slice each."""
    info, update = info_of(view), stacked(view, "update")
    if info.matrix_axes is None or update is None or update.ndim != 3 or not update.numel():
        return None
    return update


def stable_ranks(matrices: Tensor) -> np.ndarray:
    """[e, m, n] -> float64 [e]: NaN for a zero matrix, inf for one that is not finite.

    Widened to float64 a few experts at a time: a bank of 2^31 elements would take 16 GiB, and its copies as much again.
    """
    together = max(1, PIECE // matrices[0].numel())
    return np.concatenate([_stable_ranks(block.to(torch.float64)) for block in matrices.split(together)])


def _stable_ranks(matrices: Tensor) -> np.ndarray:
    """`stable_ranks` of one block, float64."""
    top = matrices.abs().amax(dim=(1, 2))
    finite = torch.isfinite(top)
    usable = finite & (top > 0)
    scale = torch.where(usable, top, torch.ones_like(top))[:, None, None]
    scaled = torch.where(usable[:, None, None], matrices / scale, torch.zeros_like(matrices))
    ratio = scaled.square().sum(dim=(1, 2)) / spectral_squares(scaled)
    out = np.where(usable.cpu().numpy(), ratio.cpu().numpy(), np.nan)
    return np.where(finite.cpu().numpy(), out, np.inf)


def spectral_squares(matrices: Tensor) -> Tensor:
    """Squared spectral norms [e] of float64 [e, m, n], finite; exact to rounding up to EXACT_SIZE, else about 1%."""
    if matrices.shape[1] < matrices.shape[2]:
        matrices = matrices.mT
    if matrices.shape[2] <= EXACT_SIZE:
        return torch.linalg.eigvalsh(matrices.mT @ matrices)[:, -1]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrices.shape[2], _BLOCK, generator=generator, dtype=torch.float64).to(matrices.device)
    basis = torch.linalg.qr(start.expand(matrices.shape[0], -1, -1)).Q
    for _ in range(_SWEEPS):
        basis = torch.linalg.qr(matrices.mT @ (matrices @ basis)).Q
    image = matrices @ basis
    return torch.linalg.eigvalsh(image.mT @ image)[:, -1]


METRIC = Metric(
    name="stable_rank",
    group="update",
    needs=("update",),
    scope="parameter",
    unit="1",
    formula="||u||_F^2 / ||u||_2^2 per matrix",
    citation="Rudelson and Vershynin 2007, arXiv math/0503442",
    init=lambda subject: Counter(),
    update=update,
    result=nothing,
    doc=(
        "1 for a rank-one update, min(m, n) for an orthogonal one. In float64, in every tenth step fed, the first "
        "included; matrices with both sides above 512 by a block power method (the value can be about 1% high). "
        "Parameters with more axes than expert, row and column are left undefined. Support: 1 or 0."
    ),
)
