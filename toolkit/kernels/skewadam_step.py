"""One SkewAdam step of a stack of matrices: second moment, optional momentum, RMS clip, decay and rounding.

Legend: E experts (leading axes, flattened), m rows, n columns; g the gradient, R [E, m] and C [E, n] the factored
second moment, V [E, m, n] the full one, M [E, m, n] momentum, t the step from 1.

R <- b2 R + (1 - b2) mean over columns of g^2, C likewise over rows; D_ij = sqrt(R_i / mean R) sqrt(C_j), or sqrt(V_ij).
With momentum M <- b1 M + (1 - b1) g takes the place of g. u = g / D, divided by max(1, RMS(u) / threshold); at last
W <- round((1 - lr wd) W - lr u). Source: arXiv 2607.19058 and its code, whose quirks are switches here.

This file is the door and the truth in torch; `skewadam_step_cpu.py` never forms D or u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.kernels._dispatch import choose
from toolkit.kernels._rounding import ROUNDINGS, rounded
from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    from torch import Tensor

OP = "skewadam_step"
BUILT = ("reference", "eager", "cpu")
EPS_MODES = ("v_floor", "add_to_sqrt", "adafactor")
CORRECT = ("before", "after")
CLIP_SCOPES = ("matrix", "tensor")
DECAYS = ("fused", "own_dtype")
TINY = 1e-15


@dataclass(frozen=True, slots=True)
class SkewAdamRule:
    """The switches, with the corrected rule as default. `paper()` gives the original's.

    `eps_mode`: "v_floor" floors C (or V) by `eps` and R / mean R by `eps_row`; "add_to_sqrt" adds `eps` to D;
    "adafactor" adds it to g^2. `correct`: bias correction of the second moment "before" eps acts, or "after".
    `clip_scope`: RMS over each "matrix" or the whole "tensor". `decay="own_dtype"` decays before, in W's own dtype.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    eps_row: float = 1e-8
    eps_mode: str = "add_to_sqrt"
    correct: str = "before"
    threshold: float = 1.0
    clip_scope: str = "matrix"
    weight_decay: float = 0.0
    decay: str = "fused"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        for word, value, choices in (
            ("eps_mode", self.eps_mode, EPS_MODES),
            ("correct", self.correct, CORRECT),
            ("clip_scope", self.clip_scope, CLIP_SCOPES),
            ("decay", self.decay, DECAYS),
            ("rounding", self.rounding, ROUNDINGS),
        ):
            if value not in choices:
                raise unknown(word, value, choices)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise GradreelError(f"{OP}: betas are {self.betas}; allowed: at least 0 and below 1")
        if not (self.eps > 0 and self.eps_row > 0 and self.threshold > 0 and self.weight_decay >= 0):
            raise GradreelError(f"{OP}: eps, eps_row and threshold must be positive, weight_decay not negative: {self}")

    @classmethod
    def paper(cls, **changes: Any) -> SkewAdamRule:
        """The original code's switches, with `changes`."""
        exact: dict[str, Any] = {
            "eps_mode": "v_floor",
            "correct": "after",
            "clip_scope": "tensor",
            "decay": "own_dtype",
            "rounding": "dither",
        }
        return cls(**{**exact, **changes})


@dataclass(slots=True)
class SkewAdamState:
    """float32 state, changed in place: `row_moment` [.., m] with `column_moment` [.., n], or `second_moment`; and
    `momentum` or None."""

    row_moment: Tensor | None = None
    column_moment: Tensor | None = None
    second_moment: Tensor | None = None
    momentum: Tensor | None = None

    @classmethod
    def zeros(cls, weight: Tensor, *, factored: bool, momentum: bool) -> SkewAdamState:
        """State for a weight [.., m, n]."""
        import torch

        def zeros(shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=weight.device)

        shape = tuple(weight.shape)
        return cls(
            row_moment=zeros(shape[:-1]) if factored else None,
            column_moment=zeros((*shape[:-2], shape[-1])) if factored else None,
            second_moment=None if factored else zeros(shape),
            momentum=zeros(shape) if momentum else None,
        )


def skewadam_step(
    weight: Tensor,
    gradient: Tensor,
    state: SkewAdamState,
    *,
    step: int,
    lr: float,
    rule: SkewAdamRule | None = None,
    rng: Any = None,
    backend: str | None = None,
) -> str:
    """Take step `step` (from 1) of `weight` [.., m, n] in place, and return the backend that ran.

    `weight` is float32, bfloat16 or float16; bfloat16 is rounded as `rule.rounding` says with random number i of `rng`
    for element i. Errors: shapes that differ, a step below 1, no `rng` where one is needed, an unable backend.
    """
    import torch

    rule = rule or SkewAdamRule()
    chosen = choose(OP, gradient, backend, BUILT)
    if chosen == "cpu" and weight.dtype not in (torch.float32, torch.bfloat16):
        if backend == "cpu":
            raise GradreelError(f"{OP}: backend 'cpu' steps float32 and bfloat16 weights, not {weight.dtype}")
        chosen = "eager"
    if weight.dim() < 2 or weight.shape != gradient.shape:
        raise GradreelError(
            f"{OP}: weight {tuple(weight.shape)}, gradient {tuple(gradient.shape)}; give two of one shape, of at least "
            "two axes"
        )
    if step < 1:
        raise GradreelError(f"{OP}: step is {step}; steps count from 1")
    if not weight.numel():
        return chosen
    m, n = weight.shape[-2:]
    w, g = weight.detach().reshape(-1, m, n), gradient.detach().reshape(-1, m, n)
    flat = SkewAdamState(
        row_moment=None if state.row_moment is None else state.row_moment.view(-1, m),
        column_moment=None if state.column_moment is None else state.column_moment.view(-1, n),
        second_moment=None if state.second_moment is None else state.second_moment.view(-1, m, n),
        momentum=None if state.momentum is None else state.momentum.view(-1, m, n),
    )
    with torch.no_grad():
        if chosen == "cpu":
            from toolkit.kernels import skewadam_step_cpu

            skewadam_step_cpu.run(w, g, flat, step, lr, rule, rng)
        else:
            _run_torch(w, g, flat, step, lr, rule, rng, torch.float64 if chosen == "reference" else torch.float32)
        if w.data_ptr() != weight.data_ptr():
            weight.copy_(w.view(weight.shape))
    return chosen


def corrections(rule: SkewAdamRule, step: int, momentum: bool) -> tuple[float, float]:
    """(what the second moment is divided by before eps acts, what the update is divided by)."""
    second = 1 - rule.betas[1] ** step
    before = second if rule.correct == "before" else 1.0
    divisor = 1 / math.sqrt(second) if rule.correct == "after" else 1.0
    return before, divisor * (1 - rule.betas[0] ** step if momentum else 1.0)


def _run_torch(
    w: Tensor, g: Tensor, state: SkewAdamState, step: int, lr: float, rule: SkewAdamRule, rng: Any, wide: Any
) -> None:
    import torch

    before, divisor = corrections(rule, step, state.momentum is not None)
    size = g[0].numel()
    directions = []
    squares = torch.zeros(len(g), dtype=torch.float64, device=g.device)
    for e in range(len(g)):  # one matrix at a time, so that temporaries stay small
        x = g[e].to(wide)
        denominator = _denominator(x, state, e, rule, before)
        if state.momentum is not None:
            own = state.momentum[e].to(wide).lerp_(x, 1 - rule.betas[0])
            state.momentum[e] = own
            x = own
        u = x / denominator / divisor
        largest = u.abs().amax()
        scale = largest if 0 < float(largest) < math.inf else torch.ones_like(largest)
        squares[e] = (u / scale).square().mean(dtype=torch.float64) * scale.double() ** 2
        directions.append(u)
    if rule.clip_scope == "tensor":
        squares[:] = squares.mean()
    clip = (squares.sqrt() / rule.threshold).clamp_min(1.0)
    keep = 1 - lr * rule.weight_decay
    for e, u in enumerate(directions):
        full = w[e].to(wide)
        if rule.decay == "own_dtype":
            full = (full * keep).to(w.dtype).to(wide)
        else:
            full = full * keep
        full = full - (lr / clip[e]).to(wide) * u
        full = full if w.dtype == torch.float32 else full.to(torch.float32)
        mode = "nearest" if w.dtype != torch.bfloat16 else rule.rounding
        w[e] = rounded(full, w.dtype, mode, rng, offset=e * size)


def _denominator(x: Tensor, state: SkewAdamState, e: int, rule: SkewAdamRule, before: float) -> Tensor:
    import torch

    beta, eps = rule.betas[1], rule.eps
    added = eps if rule.eps_mode == "add_to_sqrt" else 0.0
    squares = x.square() + (eps if rule.eps_mode == "adafactor" else 0.0)
    if state.second_moment is not None:
        v = state.second_moment[e].to(x.dtype) * beta + (1 - beta) * squares
        state.second_moment[e] = v
        v = v / before
        return v.clamp_min(eps).sqrt() if rule.eps_mode == "v_floor" else v.sqrt() + added
    if state.row_moment is None or state.column_moment is None:
        raise GradreelError(f"{OP}: the state has neither a second moment nor its rows and columns")
    row = state.row_moment[e].to(x.dtype) * beta + (1 - beta) * squares.mean(-1)
    column = state.column_moment[e].to(x.dtype) * beta + (1 - beta) * squares.mean(-2)
    state.row_moment[e], state.column_moment[e] = row, column
    mean = row.mean()
    ratio = row / (mean.clamp_min(TINY) if rule.eps_mode == "v_floor" else torch.where(mean == 0, 1.0, mean))
    level = column / before
    if rule.eps_mode == "v_floor":
        ratio, level = ratio.clamp_min(rule.eps_row), level.clamp_min(eps)
    return ratio.sqrt().unsqueeze(-1) * level.sqrt() + added
