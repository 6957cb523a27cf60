"""The sign of every element."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages._shapes import on_numerator, sign_of
from toolkit.stages._stage import Context, Ratio, Slots, Stage


def sign(x: Tensor | Ratio, slots: Slots, ctx: Context) -> Tensor | Ratio:
    """sign(x), with NaN kept; acts on the numerator of a ratio (signSGD, arXiv 1802.04434)."""
    return on_numerator(x, sign_of)


STAGE = Stage("sign", sign, normalising=True, doc=sign.__doc__ or "")
