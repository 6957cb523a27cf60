"""The gradient over its own RMS: a step size without state."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import direction, divide_or_zero, matrix_dims, rms
from toolkit.stages._stage import Context, Ratio, Slots, Stage


def rms_normalise(x: Tensor | Ratio, slots: Slots, ctx: Context) -> Tensor:
    """x / RMS(x) per matrix or vector; all-zero stays zero. Serves 1-D parameters in MESH (arXiv 2608.04407)."""
    update = direction(x)
    return divide_or_zero(update, rms(update, matrix_dims(update, ctx)))


STAGE = Stage("rms_normalise", rms_normalise, normalising=True, doc=rms_normalise.__doc__ or "")
