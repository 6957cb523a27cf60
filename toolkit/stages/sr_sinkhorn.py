"""Square-root Sinkhorn normalisation of every matrix."""

from __future__ import annotations

from torch import Tensor

from toolkit.kernels import sr_sinkhorn as kernel
from toolkit.stages._shapes import is_matrix, on_numerator
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of
from traces.errors import GradreelError


def sr_sinkhorn(
    x: Tensor | Ratio,
    slots: Slots,
    ctx: Context,
    *,
    sweeps: int = 5,
    compat: str = "paper",
    backend: str | None = None,
) -> Tensor | Ratio:
    """Alternate row and column normalisation to RMS 1, per matrix (SinkGD, arXiv 2502.06742, algorithm 1).

    A ratio keeps its denominator, which is applied after the normalisation. See `toolkit.kernels.sr_sinkhorn`.
    """

    def normalise(matrices: Tensor) -> Tensor:
        if not is_matrix(matrices, ctx):
            raise GradreelError(
                f"stage sr_sinkhorn got shape {tuple(matrices.shape)}; it needs matrices; "
                "give 1-D parameters another row"
            )
        return kernel(matrices, sweeps, backend, compat)

    return on_numerator(x, normalise)


STAGE = Stage("sr_sinkhorn", sr_sinkhorn, (), defaults_of(sr_sinkhorn), normalising=True, doc=sr_sinkhorn.__doc__ or "")
