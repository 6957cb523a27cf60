"""One MESH step: add the gradient to the decayed buffer, normalise, step the weight, decay the buffer again.

Legend: E experts (leading axes), m rows, n columns; B [E, m, n] the gradient buffer, which between steps holds beta B.

B <- B + g, W <- round((1 - lr wd) W - lr q SR-Sinkhorn(B)), B <- beta B. In MESH-B q is a coarse inverse RMS per block
of rows: v <- b v + (1 - b) mean B^2 over the block, q = 1 / sqrt(v), scaled to RMS 1 over the live blocks of a matrix;
blocks without any gradient yet keep q = 1. Source: arXiv 2608.04407; beta, block and the place of q are our switches.

This file is the door and the truth in torch; on the CPU `mesh_step_cpu.py` does what Sinkhorn does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.kernels._descend import as_matrices, check_pair, descend, put_back, wide_dtype
from toolkit.kernels._dispatch import choose
from toolkit.kernels.sr_sinkhorn import COMPAT, sr_sinkhorn
from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    from torch import Tensor

OP = "mesh_step"
BUILT = ("reference", "eager", "cpu")


def mesh_step(
    weight: Tensor,
    buffer: Tensor,
    gradient: Tensor | None = None,
    *,
    lr: float,
    beta: float = 0.9,
    sweeps: int = 5,
    weight_decay: float = 0.0,
    block_moment: Tensor | None = None,
    block: int = 1,
    moment_beta: float = 0.99,
    rounding: str = "stochastic",
    rng: Any = None,
    compat: str = "paper",
    backend: str | None = None,
) -> str:
    """Step `weight` [.., m, n] in place, and `buffer` (contiguous float32, same shape); returns the backend that ran.

    `gradient` None: backward has added it to the buffer already. `block_moment` [.., blocks] float32, contiguous, turns
    MESH-B on, with `block` rows to a block. Errors: shapes that differ, beta outside [0, 1), an unable backend.
    """
    import torch

    chosen = check_pair(OP, weight, buffer, backend, choose(OP, buffer, backend, BUILT), rounding)
    if weight.dim() < 2 or buffer.dtype != torch.float32 or not buffer.is_contiguous():
        raise GradreelError(
            f"{OP}: buffer is {buffer.dtype} {tuple(buffer.shape)}; give contiguous float32 matrices, [.., m, n]"
        )
    if gradient is not None and gradient.shape != buffer.shape:
        raise GradreelError(f"{OP}: gradient {tuple(gradient.shape)}, buffer {tuple(buffer.shape)}; give one shape")
    if not (0 <= beta < 1 and 0 <= moment_beta < 1) or sweeps < 1 or block < 1 or weight_decay < 0:
        raise GradreelError(
            f"{OP}: beta {beta}, moment_beta {moment_beta}, sweeps {sweeps}, block {block}, decay {weight_decay}; "
            "allowed: betas in [0, 1), sweeps and block of at least 1, no negative decay"
        )
    if compat not in COMPAT:
        raise unknown("compat", compat, COMPAT)
    m, n = weight.shape[-2:]
    blocks = -(-m // block)
    if block_moment is not None and (
        tuple(block_moment.shape) != (*weight.shape[:-2], blocks) or not block_moment.is_contiguous()
    ):
        raise GradreelError(
            f"{OP}: block_moment is {tuple(block_moment.shape)}; give a contiguous {(*weight.shape[:-2], blocks)}"
        )
    w, b = as_matrices(weight.detach()), as_matrices(buffer.detach())
    g = None if gradient is None else as_matrices(gradient.detach())
    moment = None if block_moment is None else block_moment.view(-1, blocks)
    if not w.numel():
        return chosen
    with torch.no_grad():
        if chosen == "cpu":
            from toolkit.kernels import mesh_step_cpu

            mesh_step_cpu.run(
                w, b, g, lr, beta, sweeps, lr * weight_decay, moment, block, moment_beta, rounding, rng, compat
            )
        else:
            wide = wide_dtype(weight, chosen)
            for e in range(len(w)):
                full = b[e].to(wide, copy=True)
                if g is not None:
                    full += g[e].to(wide)
                u = sr_sinkhorn(full, sweeps, chosen, compat)
                if moment is not None:
                    u = u * _multiplier(full, moment[e], block, moment_beta).unsqueeze(-1)
                descend(w[e], u, lr, 1 - lr * weight_decay, rounding, rng, e * m * n)
                b[e] = full * beta
        put_back(weight, w)
    return chosen


def _multiplier(buffer: Tensor, moment: Tensor, block: int, beta: float) -> Tensor:
    """q [m], after moving `moment` [blocks] on."""
    import torch

    per_row = buffer.square().mean(-1)
    fresh = torch.stack([part.mean() for part in per_row.split(block)])
    v = moment.to(buffer.dtype) * beta + (1 - beta) * fresh
    moment.copy_(v)
    live = v > 0
    inverse = torch.where(live, 1 / v, 0.0)
    scale = (inverse.sum() / live.sum().clamp_min(1)).sqrt()
    q = torch.where(live, 1 / (v.sqrt() * scale), 1.0)
    return q.repeat_interleave(block)[: len(per_row)]
