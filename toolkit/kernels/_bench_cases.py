"""What `_bench.py` checks and times: the shapes, the rivals and the least bytes of every op.

The rivals are written here as people write them, so that no other package is needed; those that are installed are
timed as well.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.kernels._bench import Case
from toolkit.kernels._bench_steps import STEP_CASES, STEP_CHECKS
from toolkit.kernels._bench_tensors import (
    SHAPES,
    SMALL_SHAPES,
    Peers,
    bytes_of,
    sinkhorn_batched,
    sinkhorn_loop,
    tensor,
)
from toolkit.kernels._dispatch import refusal

if TYPE_CHECKING:
    from torch import Tensor

# sr_sinkhorn


def _installed_sinkgd(weight: Tensor, gradient: Tensor) -> Callable[[], Any] | None:
    if importlib.util.find_spec("sinkgd_optimizer") is None:
        return None
    import torch
    from sinkgd_optimizer import SinkGD  # type: ignore[import-not-found]

    parameters = [torch.nn.Parameter(w) for w in weight.unbind(0)]
    for parameter, g in zip(parameters, gradient.unbind(0), strict=True):
        parameter.grad = g
    return SinkGD(parameters, lr=1e-3).step


def _sinkhorn_cases(device: str, small: bool, peers: Peers) -> Iterator[Case]:
    from toolkit.kernels.sr_sinkhorn import sr_sinkhorn_apply, sr_sinkhorn_apply_each

    for shape in SMALL_SHAPES if small else SHAPES:
        for dtype in ("float32", "bfloat16"):
            weight, gradient = tensor(shape, device, 0, dtype), tensor(shape, device, 1, dtype)
            backend = sr_sinkhorn_apply(weight.clone(), gradient, 1e-3)
            rivals: dict[str, Callable[[], Any]] = {}
            if dtype == "float32":
                rivals["loop over matrices"] = partial(sinkhorn_loop, weight.clone(), gradient, 1e-3)
                rivals["batched formula"] = partial(sinkhorn_batched, weight.clone(), gradient, 1e-3)
                rivals |= _fused_and_given("sinkgd-pytorch", _installed_sinkgd(weight.clone(), gradient))
                if "sr_sinkhorn" in peers:
                    rivals["peer"] = partial(peers["sr_sinkhorn"], weight.clone(), gradient, 1e-3)
            moved = 3 * gradient.numel() * bytes_of(dtype)
            ours = partial(sr_sinkhorn_apply, weight, gradient, 1e-3)
            yield Case("sr_sinkhorn", "apply", shape, dtype, backend, ours, moved, rivals)
    for shape in SMALL_SHAPES if small else SHAPES[:2]:
        gradient = tensor(shape, device, 1)
        weights = {sweeps: tensor(shape, device, 0) for sweeps in (1, 2, 3, 5)}
        alone = partial(sr_sinkhorn_apply, tensor(shape, device, 0), gradient, 1e-3)
        four: dict[str, Callable[[], Any]] = {
            "L=1,2,3,5 in one run": partial(sr_sinkhorn_apply_each, weights, gradient, 1e-3)
        }
        moved = 3 * gradient.numel() * 4
        yield Case("sr_sinkhorn", "apply, L=5 alone", shape, "float32", alone(), alone, moved, four)


def _fused_and_given(name: str, runner: Callable[[], Any] | None) -> dict[str, Callable[[], Any]]:
    return {} if runner is None else {name: runner}


def _hostile(device: str) -> dict[str, Tensor]:
    import torch

    x = tensor((4, 150, 90), device, 2)
    cases = {f"scale {s:g}": x * s for s in (1e-45, 1e-40, 1e-20, 1.0, 1e20, 1e37)}
    spread = torch.logspace(-30, 30, 150, dtype=torch.float64, device=device).unsqueeze(-1)
    cases["rows over 60 decades"] = (x.double() * spread).float()
    spread = torch.logspace(-12, 12, 90, dtype=torch.float64, device=device)
    cases["columns over 24 decades"] = (x.double() * spread).float()
    dead = x.clone()
    dead[0], dead[1, 3], dead[2, :, 5] = 0, 0, 0
    cases["zero expert, row and column"] = dead
    cases["transposed"] = x.mT
    cases["one row"], cases["one column"], cases["empty"] = x[:, :1], x[:, :, :1], x[:0]
    return cases


def _check_sinkhorn(device: str) -> Iterator[str]:
    import torch

    from toolkit.kernels.sr_sinkhorn import BUILT, sr_sinkhorn, sr_sinkhorn_run

    for name, x in _hostile(device).items():
        truth = sr_sinkhorn(x.double().cpu(), 5, "reference")
        for backend in BUILT:
            if refusal("sr_sinkhorn", backend, x, BUILT) is not None:
                continue
            out = sr_sinkhorn(x, 5, backend).double().cpu()
            over = ((out - truth).abs() - 3e-7 * truth.abs()).amax() if out.numel() else torch.zeros(())
            if not over <= 2e-44:
                yield f"{backend} on {name}: {float(over):.3g} beyond a relative difference of 3e-7"
    poisoned = tensor((3, 64, 48), device, 3)
    poisoned[1, 2, 3] = math.nan
    for backend in BUILT:
        if refusal("sr_sinkhorn", backend, poisoned, BUILT) is None:
            flags = sr_sinkhorn_run(poisoned, (2,), backend=backend).nonfinite.tolist()
            if flags != [False, True, False]:
                yield f"{backend} flags experts {flags} where only the second holds a NaN"


# step_statistics


def _plain_statistics(gradient: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
    g, p = gradient.flatten(1).float(), previous.flatten(1).float()
    flips = ((g.sign() * p.sign()) < 0).sum(1)
    support = ((g != 0) & (p != 0)).sum(1)
    return g.norm(dim=1), p.norm(dim=1), (g * p).sum(1), g.abs().amax(1), flips, support, (~g.isfinite()).sum(1)


def _statistics_cases(device: str, small: bool, peers: Peers) -> Iterator[Case]:
    from toolkit.kernels.step_statistics import step_statistics

    for shape in SMALL_SHAPES if small else SHAPES:
        for dtype in ("float32", "bfloat16"):
            g, p = tensor(shape, device, 1, dtype), tensor(shape, device, 2, dtype)
            ours = partial(step_statistics, g, p, expert_axis=0)
            rivals: dict[str, Callable[[], Any]] = {"torch, one call each": partial(_plain_statistics, g, p)}
            if "step_statistics" in peers:
                rivals["peer"] = partial(peers["step_statistics"], g, p)
            moved = 2 * g.numel() * bytes_of(dtype)
            yield Case("step_statistics", "pair", shape, dtype, ours().backend, ours, moved, rivals)


def _check_statistics(device: str) -> Iterator[str]:
    import torch

    from toolkit.kernels.step_statistics import BUILT, step_statistics

    g, p = tensor((3, 37, 21), device, 1), tensor((3, 37, 21), device, 2)
    g[0, 0, :5], p[1, 1, 1], g[2, 2, 2] = 0, math.inf, math.nan
    truth = step_statistics(g.cpu(), p.cpu(), expert_axis=0, backend="reference").as_dict()
    for backend in BUILT:
        if refusal("step_statistics", backend, g, BUILT) is None:
            for name, value in step_statistics(g, p, expert_axis=0, backend=backend).as_dict().items():
                if not torch.allclose(value.cpu().double(), truth[name].double(), rtol=1e-10, atol=1e-10):
                    yield f"{backend}: {name} is {value.tolist()}, the truth is {truth[name].tolist()}"


CASES: dict[str, Callable[[str, bool, Peers], Iterator[Case]]] = {
    "sr_sinkhorn": _sinkhorn_cases,
    "step_statistics": _statistics_cases,
    **STEP_CASES,
}
CHECKS: dict[str, Callable[[str], Iterator[str]]] = {
    "sr_sinkhorn": _check_sinkhorn,
    "step_statistics": _check_statistics,
    **STEP_CHECKS,
}
