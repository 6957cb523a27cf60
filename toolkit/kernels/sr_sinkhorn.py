"""Square-root Sinkhorn: alternate row and column normalisation of every matrix to RMS 1.

Legend: x [.., m, n], m rows, n columns; leading axes enumerate experts. u [.., m] and v [.., n] are factors.

One sweep is X <- sqrt(n) X / row norm, then X <- sqrt(m) X / column norm (SinkGD, arXiv 2502.06742, algorithm 1).
L sweeps are Sinkhorn-Knopp on the squares, so the result is diag(u) x diag(v) and only the factors are iterated. There
is no eps: a zero row or column gets the factor 0, and each row is first scaled by an exact power of two, so that
squares neither overflow nor vanish. An expert with a NaN or an infinity comes out as NaN, alone.

This file holds the public door, the float64 truth and the torch form for any device. Beside it are the fused ones:
`sr_sinkhorn_cpu.py`; `sr_sinkhorn_triton.py`; `sr_sinkhorn_cuda.py` for matrices that fit into shared memory. The two
for GPUs run by name only, as long as no GPU has checked them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.kernels._descend import as_matrices, check_pair, descend, put_back, wide_dtype
from toolkit.kernels._dispatch import choose
from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    from torch import Tensor

OP = "sr_sinkhorn"
COMPAT = ("paper", "unit_columns")
BUILT = ("reference", "eager", "cpu", "triton", "cuda")
_CHUNK_ELEMENTS = 1 << 20


@dataclass(slots=True)
class SinkhornResult:
    """What `sr_sinkhorn_run` returns.

    `backend` is the implementation that ran. `directions[L]` is like x (None under `keep="nothing"`); `row_factor[L]`
    [.., m] and `column_factor[L]` [.., n] are float64, zero for dead rows and columns. `nonfinite` is bool [..].
    `cosine[L]` float64 [..] is the cosine between x and its direction, NaN where either is zero or non-finite.
    """

    backend: str
    nonfinite: Tensor
    directions: dict[int, Tensor] = field(default_factory=dict)
    row_factor: dict[int, Tensor] = field(default_factory=dict)
    column_factor: dict[int, Tensor] = field(default_factory=dict)
    cosine: dict[int, Tensor] = field(default_factory=dict)


def sr_sinkhorn(x: Tensor, sweeps: int = 5, backend: str | None = None, compat: str = "paper") -> Tensor:
    """The direction after `sweeps` sweeps: a tensor like x [.., m, n] (float64, float32, bfloat16 or float16).

    `compat="paper"` gives RMS 1 (norm sqrt(mn)); "unit_columns" gives columns of norm 1, as some ports do. A matrix
    of rank 1 gives signs, a single non-zero element gives sqrt(m). `backend`: reference, eager, cpu, or None for the
    fastest that can run. Source: arXiv 2502.06742, algorithm 1. Errors: `GradreelError` for fewer than two axes,
    sweeps below 1, an unknown or unable backend.
    """
    return sr_sinkhorn_run(x, (sweeps,), backend=backend, compat=compat).directions[sweeps]


def sr_sinkhorn_run(
    x: Tensor,
    sweeps: Sequence[int] = (5,),
    *,
    backend: str | None = None,
    compat: str = "paper",
    keep: str = "directions",
) -> SinkhornResult:
    """Directions at several numbers of sweeps from one run of the largest (`keep="directions"`), or `keep="metrics"`:
    factors, cosine to x and non-finite flags only, without writing any tensor as large as x."""
    chosen = _check(x, sweeps, backend, compat)
    if keep not in ("directions", "metrics"):
        raise GradreelError(f"{OP}: keep is {keep!r}; allowed: directions, metrics")
    wanted = sorted(set(sweeps))
    x = x.detach()
    if chosen == "cpu":
        from toolkit.kernels import sr_sinkhorn_cpu

        return sr_sinkhorn_cpu.run(x, wanted, compat, keep == "directions")
    if chosen == "triton":
        from toolkit.kernels import sr_sinkhorn_triton

        return sr_sinkhorn_triton.run(x, wanted, compat, keep == "directions")
    if chosen == "cuda":
        from toolkit.kernels import sr_sinkhorn_cuda

        return sr_sinkhorn_cuda.run(x, wanted, compat, keep == "directions")
    return _run_torch(x, wanted, compat, keep == "directions", chosen)


def sr_sinkhorn_apply(
    weight: Tensor,
    x: Tensor,
    lr: float,
    sweeps: int = 5,
    *,
    decay: float = 0.0,
    backend: str | None = None,
    compat: str = "paper",
    rounding: str = "nearest",
    rng: Any = None,
) -> str:
    """W <- round((1 - decay) W - lr * direction(x)), in place, without a tensor for the direction; returns the backend.

    `weight` has the shape of `x` and any floating dtype; the sum is formed in float32 (float64 for float64 weights).
    bfloat16 weights are rounded as `rounding` says (`ROUNDINGS` of `_rounding.py`), element i with number i of `rng`.
    An expert with a NaN or an infinity in x becomes NaN, as it would without the kernel.
    """
    return sr_sinkhorn_apply_each(
        {sweeps: weight}, x, lr, decay=decay, backend=backend, compat=compat, rounding=rounding, rng=rng
    )


def sr_sinkhorn_apply_each(
    weights: Mapping[int, Tensor],
    x: Tensor,
    lr: float,
    *,
    decay: float = 0.0,
    backend: str | None = None,
    compat: str = "paper",
    rounding: str = "nearest",
    rng: Any = None,
) -> str:
    """`sr_sinkhorn_apply` for several numbers of sweeps: `weights[L]` takes the direction after L sweeps.

    All come from one run of the largest L, which reads x as often as that one alone. All weights are of one dtype.
    """
    sweeps = sorted(weights)
    chosen = _check(x, sweeps, backend, compat)
    first = weights[sweeps[0]]
    for weight in weights.values():
        chosen = check_pair(OP, weight, x, backend, chosen, rounding)
        if weight.dtype != first.dtype:
            raise GradreelError(f"{OP}: weights are {first.dtype} and {weight.dtype}; give weights of one dtype")
    if chosen in ("triton", "cuda") and (str(first.dtype)[6:] not in ("float32", "bfloat16") or rounding != "nearest"):
        if backend in ("triton", "cuda"):
            raise GradreelError(
                f"{OP}: backend {backend!r} applies to float32 and bfloat16 weights with rounding 'nearest', not to "
                f"{first.dtype} with {rounding!r}"
            )
        chosen = "eager"
    import torch

    x = x.detach()
    with torch.no_grad():
        if chosen == "cpu":
            from toolkit.kernels import sr_sinkhorn_cpu

            detached = {sweep: weight.detach() for sweep, weight in weights.items()}
            sr_sinkhorn_cpu.apply(detached, x, float(lr), float(decay), compat, rounding=rounding, rng=rng)
        elif chosen in ("triton", "cuda"):
            step = _gpu_apply(chosen)
            for sweep, weight in weights.items():
                flat_w = as_matrices(weight.detach()).contiguous()
                step(flat_w, x, float(lr), float(decay), sweep, compat)
                put_back(weight, flat_w)
        else:
            directions = _run_torch(x, sweeps, compat, True, chosen).directions
            wide, (m, n) = wide_dtype(first, chosen), x.shape[-2:]
            for sweep, weight in weights.items():
                flat_w, flat_d = as_matrices(weight.detach()), as_matrices(directions[sweep])
                for e in range(len(flat_w)):
                    descend(flat_w[e], flat_d[e].to(wide), lr, 1.0 - decay, rounding, rng, e * m * n)
                put_back(weight, flat_w)
    return chosen


def _gpu_apply(backend: str) -> Callable[..., None]:
    if backend == "triton":
        from toolkit.kernels import sr_sinkhorn_triton

        return sr_sinkhorn_triton.apply
    from toolkit.kernels import sr_sinkhorn_cuda

    return sr_sinkhorn_cuda.apply


def _check(x: Tensor, sweeps: Sequence[int], backend: str | None, compat: str) -> str:
    if x.dim() < 2:
        raise GradreelError(f"{OP}: x has shape {tuple(x.shape)}; give matrices in the last two axes")
    if not sweeps or min(sweeps) < 1:
        raise GradreelError(f"{OP}: sweeps is {tuple(sweeps)}; give whole numbers of at least 1")
    if compat not in COMPAT:
        raise unknown("compat", compat, COMPAT)
    return choose(OP, x, backend, BUILT)


def output_scale(compat: str, m: int) -> float:
    """What the paper's result is multiplied by under `compat`."""
    return 1.0 if compat == "paper" or m == 0 else 1.0 / math.sqrt(m)


def _run_torch(x: Tensor, sweeps: list[int], compat: str, directions: bool, backend: str) -> SinkhornResult:
    import torch

    batch, (m, n) = x.shape[:-2], x.shape[-2:]
    flat = x.reshape(-1, m, n) if x.numel() else x.new_empty((math.prod(batch), m, n))
    device, f64 = x.device, torch.float64
    result = SinkhornResult(backend, torch.zeros(len(flat), dtype=torch.bool, device=device))
    for sweep in sweeps:
        if directions:
            result.directions[sweep] = torch.empty_like(flat)
        result.row_factor[sweep] = torch.empty((len(flat), m), dtype=f64, device=device)
        result.column_factor[sweep] = torch.empty((len(flat), n), dtype=f64, device=device)
        result.cosine[sweep] = torch.full((len(flat),), math.nan, dtype=f64, device=device)
    # float64 for every dtype: four float32 roundings of the factors and products already add up to 3e-7.
    chunk = 1 if backend == "reference" else max(1, _CHUNK_ELEMENTS // max(1, m * n))
    sweep_over = _literal if backend == "reference" else _factored
    for at in range(0, len(flat), chunk):
        part = slice(at, at + chunk)
        work = flat[part].to(f64)
        bad = ~torch.isfinite(work).flatten(1).all(-1)
        result.nonfinite[part] = bad
        for sweep, u, v, direction in sweep_over(work, sweeps):
            scale = output_scale(compat, m)
            direction.mul_(scale)[bad] = math.nan
            if directions:
                result.directions[sweep][part] = direction.to(x.dtype)
            result.row_factor[sweep][part] = u.masked_fill(bad.unsqueeze(-1), math.nan)
            result.column_factor[sweep][part] = (v * scale).masked_fill_(bad.unsqueeze(-1), math.nan)
            if direction.numel():
                result.cosine[sweep][part] = _cosine(work, direction)
    return reshape_result(result, batch, x)


def reshape_result(result: SinkhornResult, batch: tuple[int, ...], x: Tensor) -> SinkhornResult:
    """Give every member of a result over [N, ..] the leading axes `batch` back."""
    result.nonfinite = result.nonfinite.reshape(batch)
    for sweep in result.row_factor:
        if sweep in result.directions:
            result.directions[sweep] = result.directions[sweep].reshape(x.shape)
        result.row_factor[sweep] = result.row_factor[sweep].reshape(*batch, x.shape[-2])
        result.column_factor[sweep] = result.column_factor[sweep].reshape(*batch, x.shape[-1])
        result.cosine[sweep] = result.cosine[sweep].reshape(batch)
    return result


Snapshot = tuple[int, "Tensor", "Tensor", "Tensor"]


def _literal(x: Tensor, sweeps: list[int]) -> Iterator[Snapshot]:
    """The two lines of the algorithm on the matrix itself, float64 [1, m, n]: the truth."""
    m, n = x.shape[-2:]
    power = _row_power(x)
    work, u, v = _shift(x, power.unsqueeze(-1)), _shift(x.new_ones(1, m), power), x.new_ones(1, n)
    for sweep in range(1, sweeps[-1] + 1):
        factor = _factor(work.square().sum(-1), n)
        work, u = work * factor.unsqueeze(-1), u * factor
        factor = _factor(work.square().sum(-2), m)
        work, v = work * factor.unsqueeze(-2), v * factor
        if sweep in sweeps:
            yield sweep, u, v, work.clone()


def _factored(x: Tensor, sweeps: list[int]) -> Iterator[Snapshot]:
    """Only the factors are iterated; float64 [N, m, n]."""
    m, n = x.shape[-2:]
    power = _row_power(x)
    work, v = _shift(x, power.unsqueeze(-1)), x.new_ones(len(x), n)
    for sweep in range(1, sweeps[-1] + 1):
        u = _factor((work * v.unsqueeze(-2)).square_().sum(-1), n)
        v = _factor((work * u.unsqueeze(-1)).square_().sum(-2), m)
        if sweep in sweeps:
            yield sweep, _shift(u, power), v, (work * u.unsqueeze(-1)).mul_(v.unsqueeze(-2))


def _row_power(x: Tensor) -> Tensor:
    import torch

    if not x.numel():
        return torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    return -torch.frexp(x.nan_to_num(0, 0, 0).abs_().amax(-1)).exponent.to(torch.int64)


def _shift(values: Tensor, power: Tensor) -> Tensor:
    # values * 2^power in halves, since 2^1074 alone overflows.
    half = power // 2
    return values * _power_of_two(half) * _power_of_two(power - half)


def _power_of_two(power: Tensor) -> Tensor:
    # Built from its bits: pow and ldexp promise no exact result, and ldexp warns on empty tensors.
    import torch

    return ((power.to(torch.int64) + 1023) << 52).view(torch.float64)


def _factor(squares: Tensor, size: int) -> Tensor:
    import torch

    return torch.where(squares > 0, (size / squares).sqrt(), 0.0)


def _cosine(x: Tensor, direction: Tensor) -> Tensor:
    x = x / x.abs().amax((-2, -1), keepdim=True)
    norms = x.square().sum((-2, -1)).sqrt() * direction.square().sum((-2, -1)).sqrt()
    return (x * direction).sum((-2, -1)) / norms
