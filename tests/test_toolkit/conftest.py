"""A tiny recorded run, written straight through the trace writer: no model, no recorder, every number known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from traces._torch import from_torch
from traces.schema import Header, LayerInfo, RoutingRecord, StepRecord
from traces.views import NONE, NONZERO, ZERO, ParamInfo
from traces.writer import TraceWriter

E, K, T, D, F = 4, 2, 24, 6, 5


def _info(name: str, role: str, shape: tuple[int, ...], **more: Any) -> ParamInfo:
    return ParamInfo(name, role, shape, strides=torch.empty(shape).stride(), **more)


TABLE = (
    _info("attn.weight", "attention", (D, D), matrix_axes=(0, 1)),
    _info("norm.weight", "norm", (D,)),
    _info("router.weight", "router", (E, D), matrix_axes=(0, 1), layer=0),
    _info("experts.up", "routed_expert", (E, 2 * F, D), layer=0, expert_axis=0, num_experts=E, matrix_axes=(1, 2)),
    _info("experts.down", "routed_expert", (E, D, F), layer=0, expert_axis=0, num_experts=E, matrix_axes=(1, 2)),
)


@dataclass
class TinyRun:
    """The trace and, beside it, everything that was fed in: gradients and weights by step, rates by step."""

    path: Path
    lrs: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    tokens: dict[int, np.ndarray] = field(default_factory=dict)


def make_optimizer(params: dict[str, Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(params.values()), lr=1e-2, **options)


def train(
    path: Path,
    *,
    steps: int = 12,
    keep: Callable[[int], bool] = lambda step: True,
    with_weights: bool = True,
    every_weight: bool = False,
    make: Callable[[dict[str, Tensor]], torch.optim.Optimizer] = make_optimizer,
    hide: Callable[[int, str, Tensor], Tensor | None] = lambda step, name, gradient: gradient,
    skip: Callable[[int], bool] = lambda step: False,
    experts: Callable[[int], tuple[int, ...]] | None = None,
    streams: tuple[str, ...] = ("gradient", "routing", "scalars"),
    table: tuple[ParamInfo, ...] = TABLE,
    run: dict[str, Any] | None = None,
) -> TinyRun:
    generator = torch.Generator().manual_seed(7)
    by_name = {p.name: p for p in table}
    dtypes = {p.name: getattr(torch, p.dtype) for p in table}
    params = {n: torch.randn(p.shape, generator=generator).to(dtypes[n]).requires_grad_() for n, p in by_name.items()}
    drift = {p.name: torch.randn(p.shape, generator=generator) for p in table}
    optimizer = make(params)
    named = {id(p): name for name, p in params.items()}
    groups = [g | {"params": [named[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    about = {
        "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "groups": [{k: list(v) if isinstance(v, tuple) else v for k, v in g.items()} for g in groups],
        "device": "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **(run or {}),
    }
    written = TinyRun(path)
    header = Header(table, (LayerInfo(0, "experts", E, K),), streams, about)
    writer = TraceWriter(path, header, chunk_steps=5)
    for step in range(1, steps + 2):
        written.weights[step] = {name: p.detach().clone() for name, p in params.items()}
        last = step > steps
        record = StepRecord(step, recorded=not last and keep(step) and not skip(step), skipped=not last and skip(step))
        if with_weights and (step == 1 or last or (every_weight and record.recorded)):
            record.tensors |= {("weight", name): from_torch(w) for name, w in written.weights[step].items()}
        if not last:
            lr = 1e-2 * min(1.0, step / 3) * (1 - (step - 1) / (2 * steps))
            written.lrs[step] = record.scalars["lr"] = lr
            record.scalars["lr"] = [lr] * len(groups)
            record.scalars["loss"] = 4.0 / step
            _gradients(written, record, params, drift, generator, hide, table, experts, streams)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if not skip(step):
                optimizer.step()
        writer.append(record)
    writer.close()
    return written


def _gradients(written, record, params, drift, generator, hide, table, experts, streams) -> None:
    step = record.step
    ids = torch.randint(0, E - 1 if step % 3 == 0 else E, (T, K), generator=generator).numpy()
    written.tokens[step] = np.bincount(ids.reshape(-1), minlength=E)
    found: dict[str, Tensor | None] = {}
    for info in table:
        gradient = (drift[info.name] + 2 * torch.randn(info.shape, generator=generator)).to(params[info.name].dtype)
        if info.expert_axis is not None:
            idle = torch.from_numpy(written.tokens[step] == 0)
            gradient[idle] = 0.0
        found[info.name] = params[info.name].grad = hide(step, info.name, gradient)
        if not record.recorded:
            continue
        gradient = found[info.name]
        width = () if info.expert_axis is None else (E,)
        if gradient is None:
            record.presence[info.name] = np.full(width, NONE, np.uint8)
            continue
        busy = gradient.ne(0).any() if info.expert_axis is None else gradient.ne(0).flatten(1).any(1)
        record.presence[info.name] = np.where(busy.numpy(), NONZERO, ZERO).astype(np.uint8)
        if experts is not None and info.expert_axis is not None:
            gradient = gradient[list(experts(step))]
            record.experts[info.name] = np.array(experts(step))
        if "gradient" in streams:
            record.tensors["gradient", info.name] = from_torch(gradient.clone())
    written.gradients[step] = {name: None if g is None else g.clone() for name, g in found.items()}
    if record.recorded and "routing" in streams:
        record.routing.append(RoutingRecord(0, 0, ids, np.zeros(T, bool)))


@pytest.fixture
def tiny_table() -> tuple[ParamInfo, ...]:
    """The parameters of a tiny run."""
    return TABLE


@pytest.fixture
def tiny_run(tmp_path: Path) -> Callable[..., TinyRun]:
    """Train and record: `tiny_run(steps=12, keep=..., hide=..., ...)`; each call makes a trace of its own."""
    count = iter(range(100))
    return lambda **options: train(tmp_path / f"run{next(count)}.trace", **options)


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Twelve steps of torch's AdamW, unthinned, weights at the ends. Not to be changed."""
    return train(tmp_path_factory.mktemp("plain") / "plain.trace")
