"""Bound the RMS of an update."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import matrix_dims, owned_direction, rms
from toolkit.stages._stage import Context, Ratio, Slots, Stage, defaults_of

CLIP_SCOPES = ("matrix", "tensor")


def rms_clip(
    x: Tensor | Ratio, slots: Slots, ctx: Context, *, threshold: float = 1.0, clip_scope: str = "matrix"
) -> Tensor:
    """u / max(1, RMS(u) / threshold) (Adafactor, arXiv 1804.04235, section 6).

    `clip_scope`: "matrix" measures each expert's matrix; "tensor" the whole stack at once, so that one expert's
    spike shrinks all others' steps.
    """
    update = owned_direction(x)
    dims = matrix_dims(update, ctx) if clip_scope == "matrix" else tuple(range(-update.dim(), 0))
    shrink = (rms(update, dims) / threshold).clamp_min(1.0)
    return update.div_(shrink) if isinstance(x, Ratio) else update / shrink


STAGE = Stage("rms_clip", rms_clip, (), defaults_of(rms_clip), doc=rms_clip.__doc__ or "")
