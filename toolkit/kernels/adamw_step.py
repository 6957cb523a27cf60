"""One AdamW step, for any number of matrices at once, with stochastic rounding of bfloat16 weights.

M <- M + (1 - b1)(g - M), V <- b2 V + (1 - b2) g^2, W <- round((1 - lr wd) W - lr / c1 * M / (sqrt(V) / sqrt(c2) + eps))
with c = 1 - b^t. Source: arXiv 1711.05101, algorithm 2, in the order of operations of torch's own.

This file is the door and the truth in torch; `adamw_step_cpu.py` reads and writes every tensor once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.kernels._descend import as_matrices, check_pair, descend, put_back, wide_dtype
from toolkit.kernels._dispatch import choose
from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor

OP = "adamw_step"
BUILT = ("reference", "eager", "cpu", "triton")


def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    rounding: str = "stochastic",
    rng: Any = None,
    backend: str | None = None,
) -> str:
    """Take step `step` (from 1) in place, of a weight of any shape; returns the backend that ran.

    `exp_avg` and `exp_avg_sq` are contiguous float32 (float64 for float64 weights) in the weight's shape. Errors:
    shapes that differ, a step below 1, betas outside [0, 1), no `rng` where one is needed, an unable backend.
    """
    import torch

    chosen = check_pair(OP, weight, gradient, backend, choose(OP, gradient, backend, BUILT), rounding)
    if step < 1 or not all(0 <= b < 1 for b in betas) or eps < 0 or weight_decay < 0:
        raise GradreelError(
            f"{OP}: step {step}, betas {betas}, eps {eps}, weight_decay {weight_decay}; allowed: a step of at least 1, "
            "betas in [0, 1), the others not negative"
        )
    for name, state in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if state.shape != weight.shape or not state.is_contiguous():
            raise GradreelError(f"{OP}: {name} is {tuple(state.shape)}; give a contiguous {tuple(weight.shape)}")
    w, g = as_matrices(weight.detach()), as_matrices(gradient.detach())
    m, v = as_matrices(exp_avg), as_matrices(exp_avg_sq)
    c1, root2 = 1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5
    keep = 1 - lr * weight_decay
    with torch.no_grad():
        if chosen == "cpu":
            from toolkit.kernels import adamw_step_cpu

            adamw_step_cpu.run(w, g, m, v, lr / c1, root2, betas, eps, keep, rounding, rng)
        elif chosen == "triton":
            from toolkit.kernels import adamw_step_triton

            w = w.contiguous()
            adamw_step_triton.run(w, g, m, v, lr / c1, root2, betas, eps, keep, rounding, rng)
        else:
            wide, size = wide_dtype(weight, chosen), w.shape[1] * w.shape[2]
            for e in range(len(w)):
                x = g[e].to(wide)
                m[e] = m[e].to(wide).lerp_(x, 1 - betas[0])
                v[e] = v[e].to(wide).mul_(betas[1]).addcmul_(x, x, value=1 - betas[1])
                u = m[e].to(wide) / (v[e].to(wide).sqrt().div_(root2).add_(eps))
                descend(w[e], u, lr / c1, keep, rounding, rng, e * size)
        put_back(weight, w)
    return chosen
