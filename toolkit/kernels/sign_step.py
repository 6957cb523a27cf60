"""W <- round((1 - lr wd) W - lr sign(x)), in one pass and without a tensor of signs.

x is a gradient (signSGD, arXiv 1802.04434, algorithm 1) or a momentum (Signum). The sign of zero is 0, of NaN NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.kernels._descend import as_matrices, check_pair, descend, put_back, wide_dtype
from toolkit.kernels._dispatch import choose
from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor

OP = "sign_step"
BUILT = ("reference", "eager", "cpu", "triton")


def sign_step(
    weight: Tensor,
    x: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    rounding: str = "stochastic",
    rng: Any = None,
    backend: str | None = None,
) -> str:
    """Step `weight`, of any shape and floating dtype, in place by the signs of `x`; returns the backend that ran.

    Errors: shapes that differ, a negative decay, no `rng` where one is needed, an unable backend.
    """
    import torch

    chosen = check_pair(OP, weight, x, backend, choose(OP, x, backend, BUILT), rounding)
    if weight_decay < 0:
        raise GradreelError(f"{OP}: weight_decay is {weight_decay}; it must not be negative")
    w, g = as_matrices(weight.detach()), as_matrices(x.detach())
    keep = 1 - lr * weight_decay
    with torch.no_grad():
        if chosen == "cpu":
            from toolkit.kernels import sign_step_cpu

            sign_step_cpu.run(w, g, lr, keep, rounding, rng)
        elif chosen == "triton":
            from toolkit.kernels import sign_step_triton

            w = w.contiguous()
            sign_step_triton.run(w, g, lr, keep, rounding, rng)
        else:
            wide, size = wide_dtype(weight, chosen), w.shape[1] * w.shape[2]
            for e in range(len(w)):
                value = g[e].to(wide)
                signs = torch.where(value.isnan(), value, value.sign())  # torch gives 0 for NaN
                descend(w[e], signs, lr, keep, rounding, rng, e * size)
        put_back(weight, w)
    return chosen
