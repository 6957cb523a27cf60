"""MESH-B's multiplier: a coarse inverse RMS per neuron or per block of neurons."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.stages._shapes import gradient_of, mean_squares
from toolkit.stages._stage import Context, Ratio, Shape, Slot, Slots, Stage, defaults_of


def inverse_rms(x: Tensor | Ratio, slots: Slots, ctx: Context, *, beta: float = 0.99, block: int = 1) -> Ratio:
    """v <- beta v + (1 - beta) mean g^2 per block of `block` rows; x becomes a ratio with denominator ~ sqrt(v).

    The multiplier 1 / sqrt(v) is scaled to RMS 1 over the live blocks of a matrix, so that lr keeps its meaning; it is
    at most sqrt(number of blocks), needs no eps, and the bias of v cancels. Blocks without any gradient yet are left
    alone. A normalising stage behind it acts on the numerator: the multiplier then comes after the normalisation.
    Put `divide` between them to apply it before, where it cancels. Source: MESH-B, arXiv 2608.04407 (switches ours).
    """
    gradient, v = gradient_of(x), slots["block_moment"]
    size = gradient.shape[-2]
    per_row, _ = mean_squares(gradient)
    padding = v.shape[-1] * block - size
    blocks = torch.nn.functional.pad(per_row, (0, padding)).unflatten(-1, (-1, block)).sum(-1)
    counts = torch.full((v.shape[-1],), float(block), device=v.device, dtype=v.dtype)
    counts[-1:] -= padding
    v.lerp_(blocks / counts, 1 - beta)
    live = v > 0
    inverse_squares = torch.where(live, 1 / v, 0.0)
    scale = (inverse_squares.sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp_min(1)).sqrt_()
    root = torch.where(live, v.sqrt() * scale, 1.0)
    denominator = root.repeat_interleave(block, -1)[..., :size].unsqueeze(-1)
    if isinstance(x, Ratio):
        return Ratio(x.numerator, x.denominator * denominator, x.divisor)
    return Ratio(x, denominator)


def with_blocks(*, beta: float = 0.99, block: int = 1) -> Stage:
    """The stage with blocks of `block` rows; its slot holds one number per block."""

    def blocks(shape: Shape) -> Shape:
        return (*shape[:-2], -(-shape[-2] // block))

    options = {**defaults_of(inverse_rms), "beta": beta, "block": block}
    return Stage("inverse_rms", inverse_rms, (Slot("block_moment", blocks),), options, doc=inverse_rms.__doc__ or "")


STAGE = with_blocks()
