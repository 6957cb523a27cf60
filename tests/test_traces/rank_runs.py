"""Models and training loops of several processes, each recorded and compared with what the ranks themselves saw.

Legend: E experts, K top-k, T tokens of one rank.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from traces import RecordAt, Recorder, open_trace

EXPERTS, TOP_K, WIDTH = 3, 1, 4
ALL = RecordAt(roles=("all",))


class RankRouter(nn.Module):
    """Keeps what it chose, for an independent count."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, WIDTH))
        self.chosen: list[Tensor] = []
        self.forbidden: int | None = None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(tokens, self.weight)
        if self.forbidden is not None:
            logits = logits.index_fill(1, torch.tensor([self.forbidden]), float("-inf"))
        weights, ids = logits.softmax(-1).topk(TOP_K, dim=-1)
        self.chosen.append(ids.detach())
        return logits, weights, ids


class RankExperts(nn.Module):
    """A stack; `held` are the ids of the experts that lie here, the others contribute nothing."""

    def __init__(self, experts: int, held: list[int] | None = None) -> None:
        super().__init__()
        self.held = list(range(experts)) if held is None else held
        whole = torch.randn(experts, 5, WIDTH) * 0.3, torch.randn(experts, WIDTH, 5) * 0.3
        self.up_proj, self.down_proj = (nn.Parameter(w[self.held].clone()) for w in whole)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for place, expert in enumerate(self.held):
            share = (weights * (indices == expert)).sum(1, keepdim=True)
            out = out + F.linear(F.linear(tokens, self.up_proj[place]).tanh(), self.down_proj[place]) * share
        return out


class RankMoe(nn.Module):
    def __init__(self, experts: int, held: list[int] | None = None) -> None:
        super().__init__()
        self.gate = RankRouter(experts)
        self.experts = RankExperts(experts, held)

    def forward(self, hidden: Tensor) -> Tensor:
        _, weights, ids = self.gate(hidden)
        return hidden + self.experts(hidden, ids, weights)


class ListMoe(nn.Module):
    """A list of experts: one that gets no token gets no gradient of this rank."""

    def __init__(self, experts: int, held: list[int] | None = None) -> None:
        super().__init__()
        self.gate = RankRouter(experts)
        self.held = list(range(experts)) if held is None else held
        made = [nn.Linear(WIDTH, WIDTH) for _ in range(experts)]
        self.experts = nn.ModuleList(made[i] for i in self.held)

    def forward(self, hidden: Tensor) -> Tensor:
        _, weights, ids = self.gate(hidden)
        out = hidden
        for place, expert in enumerate(self.held):
            rows = (ids == expert).any(1).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, self.experts[place](hidden[rows]) * weights[rows])
        return out


class RankModel(nn.Module):
    def __init__(self, moe: Callable[[], nn.Module] = lambda: RankMoe(EXPERTS), layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": moe()}) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.inside(tokens)
        for layer in self.layers:
            hidden = layer["mlp"](hidden)
        return hidden

    def routers(self) -> list[RankRouter]:
        return [module for module in self.modules() if isinstance(module, RankRouter)]


def batch(step: int, rank: int, tokens: int = 6) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def count(router: RankRouter) -> Tensor:
    """How often each expert was chosen on all ranks since the last count."""
    ids = torch.cat([chosen.reshape(-1) for chosen in router.chosen]) if router.chosen else torch.zeros(0).long()
    router.chosen.clear()
    counts = torch.bincount(ids, minlength=EXPERTS)
    dist.all_reduce(counts)
    return counts


def whole(tensor: Any) -> Tensor:
    """A gradient as all ranks together have it."""
    return tensor.detach().full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


class Witness:
    """What the training loop itself saw, by step."""

    def __init__(self, model: nn.Module, routers: list[RankRouter]) -> None:
        self.model, self.routers = model, routers
        self.gradients: dict[int, dict[str, Tensor | None]] = {}
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.counts: dict[int, list[np.ndarray]] = {}

    def look(self, step: int) -> None:
        """Just before the optimizer's step, on every rank."""
        named = {n.removeprefix("module."): p for n, p in self.model.named_parameters()}
        self.gradients[step] = {n: None if p.grad is None else whole(p.grad) for n, p in named.items()}
        self.weights[step] = {n: whole(p) for n, p in named.items()}
        self.counts[step] = [count(router).numpy() for router in self.routers]

    def check(self, path: Path) -> None:
        """After every rank has closed its recorder, on rank 0."""
        trace = open_trace(path)
        assert trace.finished
        assert [f for f in trace.verify() if f.severity == "damage"] == []
        assert trace.steps == sorted(self.gradients)
        for step, gradients in self.gradients.items():
            for name, gradient in gradients.items():
                assert same_bits(trace.gradient(name, step), gradient), (path.name, name, step)
            for layer, counts in enumerate(self.counts[step]):
                routing = trace.routing_step(step, layer)
                assert routing is not None
                assert routing.tokens_per_expert.tolist() == counts.tolist()
        first = trace.steps[0]
        for name, weight in self.weights[first].items():
            assert same_bits(trace.weight(name, first), weight), name


@contextmanager
def process_group(rank: int, port: int, world: int = 2) -> Iterator[None]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        yield
        gc.collect()  # models must not outlive their groups, nor a rank leave while gloo still serves the other
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_all(rank: int, port: int, folder: str, names: list[str], world: int = 2) -> None:
    with process_group(rank, port, world):
        for name in names:
            globals()[name](rank, Path(folder))
            dist.barrier()


# ------------------------------------------------------------------------------------------------------ what is run


def ddp(rank: int, folder: Path) -> None:
    """Stacked experts under DDP, with accumulation; the wrapper is not handed over, the inner model is."""
    model = RankModel()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    witness = Witness(model, model.routers())
    said: list[str] = []
    with Recorder(folder / "ddp.trace", model, optimizer, at=ALL, notify=said.append) as reel:
        for step in range(1, 4):
            with wrapped.no_sync():
                wrapped(batch(10 * step, rank)).square().mean().backward()
            wrapped(batch(10 * step + 1, rank)).square().mean().backward()
            witness.look(step)
            reel.log(loss=float(rank + step))
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    size = sum(f.stat().st_size for f in (folder / "ddp.trace" / "rank-00001").iterdir() if "chunk" in f.name)
    assert size == 0, "rank 1 writes no copy of what rank 0 writes"
    if rank == 0:
        witness.check(folder / "ddp.trace")
        scalars = open_trace(folder / "ddp.trace").scalars()
        assert scalars["loss"].to_list()[:3] == [1.0, 2.0, 3.0]
        assert scalars["tokens"].to_list()[:3] == [24, 24, 24]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in witness.gradients[1].values()]))
        assert abs(scalars["grad_norm"][0] - float(norm)) < 1e-5 * float(norm)


def ddp_list(rank: int, folder: Path) -> None:
    """Fault 18: expert 1 gets no token of rank 1; its gradient is the mean all the same, and nobody waits for ever."""
    model = nn.parallel.DistributedDataParallel(RankModel(lambda: ListMoe(EXPERTS)), find_unused_parameters=True)
    for router in model.module.routers():
        router.forbidden = 1 if rank == 1 else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    witness = Witness(model, model.module.routers())
    with Recorder(folder / "list.trace", model, optimizer, at=ALL):
        for step in range(1, 4):
            model(batch(step, rank)).square().mean().backward()
            witness.look(step)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    if rank == 0:
        witness.check(folder / "list.trace")
        assert witness.gradients[1]["layers.0.mlp.experts.1.weight"] is not None


def fsdp(rank: int, folder: Path) -> None:
    """Three experts on two ranks, a gradient accumulated over micro-batches that are not synchronised."""
    from torch.distributed.fsdp import fully_shard

    model: Any = RankModel()
    for layer in model.layers:
        fully_shard(layer["mlp"])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    witness = Witness(model, model.routers())
    streams = ("gradient", "routing", "scalars", "statistics")
    at = RecordAt(roles=("all",), streams=streams)
    with Recorder(folder / "fsdp.trace", model, optimizer, at=at):
        for step in range(1, 4):
            model.set_requires_gradient_sync(False)
            model(batch(10 * step, rank)).square().mean().backward()
            assert all(p.grad is None for p in model.parameters())
            model.set_requires_gradient_sync(True)
            model(batch(10 * step + 1, rank)).square().mean().backward()
            witness.look(step)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    if rank == 0:
        witness.check(folder / "fsdp.trace")
        trace = open_trace(folder / "fsdp.trace")
        name = "layers.0.mlp.experts.up_proj"
        for chosen in ([2], [2, 0], [0, 1, 2], []):
            some = trace.gradient(name, 2, experts=chosen)
            assert same_bits(some, witness.gradients[2][name][chosen])  # type: ignore[index]
        for number in (0, 1):
            assert not (folder / "fsdp.trace" / f"rank-{number:05d}" / "missing").exists()
        rows = trace.statistics()
        for param in (name, "layers.0.mlp.gate.weight", "inside.bias"):
            mine = rows.filter((rows["param"] == param) & (rows["step"] == 2))
            gradient = witness.gradients[2][param]
            assert gradient is not None
            squares = gradient.double().square()
            wanted = squares.flatten(1).sum(1) if "experts" in param else squares.sum().reshape(1)
            np.testing.assert_allclose(mine["sum_squares"].to_numpy(), wanted.numpy(), rtol=1e-6)
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in witness.gradients[1].values()]))  # type: ignore[union-attr]
        assert abs(trace.scalars()["grad_norm"][0] - float(norm)) < 1e-5 * float(norm)
