"""Models and training loops of several processes, each recorded and compared with what the ranks themselves saw.

Legend: E experts, K top-k, T tokens of one rank.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from traces import GradreelError, NotRecorded, RecordAt, Recorder, TraceError, open_trace
from traces.layouts import Layout

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
        up, down = (w.to_local() if hasattr(w, "to_local") else w for w in (self.up_proj, self.down_proj))
        for place, expert in enumerate(self.held):
            share = (weights * (indices == expert)).sum(1, keepdim=True)
            out = out + F.linear(F.linear(tokens, up[place]).tanh(), down[place]) * share
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
        last = open_trace(folder / "ddp.trace").weight("inside.weight", 4)
        assert same_bits(last, model.inside.weight.detach()), "the closing snapshot is a step of all ranks"
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


def accumulation(rank: int, folder: Path) -> None:
    """Fault 13 under DDP: eight tokens at once or in four micro-batches give one gradient and equal counts."""
    found = []
    for name, parts in (("once", 1), ("four", 4)):
        model = RankModel()
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with Recorder(folder / f"{name}.trace", wrapped, optimizer, at=ALL):
            pieces = batch(1, rank, 8).chunk(parts)
            for piece in pieces[:-1]:
                with wrapped.no_sync():
                    (wrapped(piece).square().mean() / parts).backward()
            (wrapped(pieces[-1]).square().mean() / parts).backward()
            optimizer.step()
        dist.barrier()
        found.append(open_trace(folder / f"{name}.trace"))
    for layer in (0, 1):
        one, four = (trace.routing_step(1, layer) for trace in found)
        assert one is not None
        assert four is not None
        assert one.tokens_per_expert.tolist() == four.tokens_per_expert.tolist()
        assert int(one.tokens_per_expert.sum()) == 16
    for param in found[0].infos:
        one, four = (trace.gradient(param, 1) for trace in found)
        torch.testing.assert_close(one, four, rtol=1e-5, atol=1e-7)


def gathered(gradient: Tensor, held: list[int]) -> Tensor:
    """The experts of all ranks in one stack."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (held, gradient.detach().clone()))
    out = torch.empty(EXPERTS, *gradient.shape[1:])
    for ids, part in found:
        out[ids] = part
    return out


def mean_of_others(model: nn.Module) -> None:
    """What is no expert is trained on the mean, without DDP."""
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def experts_declared(rank: int, folder: Path) -> None:
    """Expert parallelism that only the user knows of, ids in an order of their own."""
    held = [[2, 0], [1]][rank]
    for kind, moe in (("stack", RankMoe), ("list", ListMoe)):
        model = RankModel(lambda moe=moe, held=held: moe(EXPERTS, held))
        layout = Layout("layers.*.mlp.experts", num_experts=EXPERTS, global_expert_ids=held)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        seen: dict[int, dict[str, Tensor | None]] = {}
        counts: dict[int, list[list[int]]] = {}
        with Recorder(folder / f"ep_{kind}.trace", model, optimizer, at=ALL, layout=layout):
            for step in (1, 2):
                model(batch(step, rank)).square().mean().backward()
                mean_of_others(model)
                counts[step] = [count(router).tolist() for router in model.routers()]
                seen[step] = {}
                for name, parameter in model.named_parameters():
                    if kind == "stack" and ".experts." in name:
                        seen[step][name] = gathered(parameter.grad, held)
                    elif ".experts." in name:
                        place = int(name.split(".")[4])
                        name = name.replace(f"experts.{place}.", f"experts.{held[place]}.")
                        seen[step][name] = None if parameter.grad is None else parameter.grad.clone()
                    else:
                        seen[step][name] = parameter.grad.clone()
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()
        trace = open_trace(folder / f"ep_{kind}.trace")
        assert trace.layer(0).num_experts == EXPERTS
        for step in (1, 2):
            for name, gradient in seen[step].items():
                assert same_bits(trace.gradient(name, step), gradient), (kind, name)
                assert trace.presence(name, step).shape == ((EXPERTS,) if trace.param(name).expert_axis == 0 else ())
            for layer in (0, 1):
                routing = trace.routing_step(step, layer)
                assert routing is not None
                assert routing.tokens_per_expert.tolist() == counts[step][layer]
        assert [f for f in trace.verify() if f.severity == "damage"] == []
        experts = {info.expert for info in trace.infos.values() if info.role == "routed_expert"}
        assert experts == ({None} if kind == "stack" else {0, 1, 2})


def experts_dtensor(rank: int, folder: Path) -> None:
    """Expert parallelism by DTensor, router and the rest under DDP's rules by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, held = init_device_mesh("cpu", (2,)), [[0, 1], [2]][rank]
    model = RankModel()
    for layer in model.layers:
        experts = layer["mlp"].experts
        experts.held = held
        for name in ("up_proj", "down_proj"):
            setattr(experts, name, nn.Parameter(distribute_tensor(getattr(experts, name).detach(), mesh, [Shard(0)])))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    at = RecordAt(roles=("router", "routed_expert"), experts=(0, 2))
    with Recorder(folder / "ep.trace", model, optimizer, at=at):
        model(batch(1, rank)).square().mean().backward()
        mean_of_others(model)
        seen = {n: whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
    dist.barrier()
    trace = open_trace(folder / "ep.trace")
    for name in trace.infos:
        if trace.param(name).expert_axis == 0:
            ids = trace.experts(name, 1)
            assert ids is not None
            assert ids.tolist() == [0, 2]
            assert same_bits(trace.gradient(name, 1), seen[name][[0, 2]])
            assert same_bits(trace.gradient(name, 1, experts=[2]), seen[name][[2]])
            with pytest.raises(NotRecorded, match="expert 1"):
                trace.gradient(name, 1, experts=[1])
        elif trace.param(name).role == "router":
            assert same_bits(trace.gradient(name, 1), seen[name])


class Odd(nn.Module):
    """A MoE model beside parameters that are split in every way a mesh allows."""

    def __init__(self, mesh: Any, splits: dict[str, tuple[tuple[int, ...], list[Any]]]) -> None:
        super().__init__()
        self.model = RankModel(layers=1)
        self.odd = nn.ParameterDict()
        from torch.distributed.tensor import distribute_tensor

        for name, (shape, placements) in splits.items():
            self.odd[name] = nn.Parameter(distribute_tensor(torch.randn(shape), mesh, placements, src_data_rank=None))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def placements(rank: int, folder: Path) -> None:
    """Parts of tensors along any axis, none at all, replicas, and two-dimensional meshes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    world = dist.get_world_size()
    shapes = [(world,), (1, world), (world, 1)] + ([(2, 2)] if world == 4 else [])
    for number, shape in enumerate(shapes):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        one = {
            "uneven": ((5, 3), [Shard(0)]),
            "columns": ((3, 5), [Shard(1)]),
            "last": ((2, 3, 7), [Shard(2)]),
            "single": ((1, 4), [Shard(0)]),
            "empty": ((0, 4), [Shard(0)]),
            "scalar": ((), [Replicate()]),
            "same": ((3, 2), [Replicate()]),
        }
        two = {
            "hybrid": ((5, 3), [Replicate(), Shard(0)]),
            "twice": ((7, 3), [Shard(0), Shard(0)]),
            "both": ((5, 6), [Shard(0), Shard(1)]),
            "strided": ((11, 2), [_StridedShard(0, split_factor=shape[-1]), Shard(0)]),
            "outer": ((5, 3), [Shard(0), Replicate()]),
        }
        torch.manual_seed(1)
        model = Odd(mesh, one if len(shape) == 1 else two)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with Recorder(folder / f"odd{number}.trace", model, optimizer, at=ALL):
            for step in (1, 2):
                optimizer.zero_grad()
                model(batch(step, rank)).square().mean().backward()
                mean_of_others(model.model)
                seen = {}
                for name, parameter in model.odd.items():
                    full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
                    parameter.grad = distribute_tensor(full, mesh, parameter.placements, src_data_rank=None)
                    seen[f"odd.{name}"] = full
                optimizer.step()
        dist.barrier()
        trace = open_trace(folder / f"odd{number}.trace")
        for name, full in seen.items():
            assert same_bits(trace.gradient(name, 2), full), (shape, name)
            assert int(trace.presence(name, 2)) == (2 if not full.numel() else 3), name
        assert [f for f in trace.verify() if f.severity == "damage" and "odd" in f.message] == []


class Stage(nn.Module):
    """One stage of a pipeline; `number` is the block's in the whole model, `local` the one its name shows."""

    def __init__(self, number: int, local: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleDict({str(local): nn.ModuleDict({"mlp": RankMoe(EXPERTS)})})

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers.values():
            hidden = layer["mlp"](hidden)
        return hidden


def pipeline(rank: int, folder: Path) -> None:
    """Two stages, two micro-batches; the second case counts its blocks from 0 on each rank."""
    for kind in ("named", "renamed"):
        stage = Stage(rank, rank if kind == "named" else 0)
        names = {"layers.0": f"layers.{rank}"} if kind == "renamed" else None
        optimizer = torch.optim.AdamW(stage.parameters(), lr=10.0 ** -(2 + rank))
        seen: dict[int, dict[str, Tensor]] = {}
        with Recorder(folder / f"{kind}.trace", stage, optimizer, at=ALL, global_names=names) as reel:
            for step in (1, 2):
                for micro in (0, 1):
                    if rank == 0:
                        out = stage(batch(step, micro))
                        dist.send(out.detach(), 1)
                        back = torch.empty_like(out)
                        dist.recv(back, 1)
                        out.backward(back)
                    else:
                        hidden = torch.empty(6, WIDTH)
                        dist.recv(hidden, 0)
                        hidden.requires_grad_()
                        loss = stage(hidden).square().mean()
                        loss.backward()
                        reel.log(loss=loss)
                        dist.send(hidden.grad, 0)
                seen[step] = {
                    n.replace("layers.0", f"layers.{rank}"): p.grad.clone() for n, p in stage.named_parameters()
                }
                optimizer.step()
                optimizer.zero_grad()
        every: list[Any] = [None, None]
        dist.all_gather_object(every, seen)
        dist.barrier()
        trace = open_trace(folder / f"{kind}.trace")
        assert [layer.layer for layer in trace.layers] == [0, 1]
        assert sorted(trace.infos) == sorted({**every[0][1], **every[1][1]})
        for part in every:
            for step, gradients in part.items():
                for name, gradient in gradients.items():
                    assert same_bits(trace.gradient(name, step), gradient), name
        assert trace.lr(1, "layers.0.mlp.gate.weight") == 1e-2
        assert trace.lr(1, "layers.1.mlp.gate.weight") == 1e-3
        assert trace.scalars()["tokens"].to_list()[:2] == [12, 12]
        assert trace.scalars()["loss"].null_count() <= 1
        assert int(trace.routing_step(1, 1).tokens_per_expert.sum()) == 12  # type: ignore[union-attr]
        assert [f for f in trace.verify() if f.severity == "damage"] == []


def one_recorder(rank: int, folder: Path) -> None:
    """Only rank 0 records: rank 1 waits for nothing, and the trace says what it lacks."""
    model = nn.parallel.DistributedDataParallel(RankModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def train() -> None:
        for step in range(1, 3):
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if rank == 0:
        with Recorder(folder / "one.trace", model, optimizer):
            train()
        with pytest.raises(TraceError, match=r"rank-00001 is missing.*partial=True"):
            open_trace(folder / "one.trace")
        trace = open_trace(folder / "one.trace", partial=True)
        assert trace.steps == [1, 2]
        assert trace.missing_ranks == "rank 1"
        assert trace.gradient("layers.0.mlp.experts.up_proj", 1) is not None
        assert trace.routing_step(1, 0) is None, "half of the tokens are no count"
        assert trace.routing().collect().height == 2 * 2 * 6
    else:
        train()


def sharded_late(rank: int, folder: Path) -> None:
    """Hooks that were added before fully_shard never fire: an error says so."""
    from torch.distributed.fsdp import fully_shard

    model: Any = RankModel()
    reel = Recorder(folder / "late.trace", model)
    reel.__enter__()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(batch(1, rank)).square().mean().backward()
    optimizer.step()
    with pytest.raises(GradreelError, match="build it after fully_shard"):
        reel.__exit__(None, None, None)


def killed(rank: int, folder: str) -> None:
    """Two ranks that never wait for each other; rank 1 is killed after its third step. Run without a process group."""
    import traces.checks
    import traces.sharing
    import traces.sink

    for module in (traces.checks, traces.sharing):
        module.process_place = lambda: (rank, 2)  # type: ignore[attr-defined]
    traces.sink.SEAL_SECONDS = 0.0
    torch.set_num_threads(1)
    held = [[0, 1], [2]][rank]
    model = RankModel(lambda: RankMoe(EXPERTS, held))
    layout = Layout("layers.*.mlp.experts", num_experts=EXPERTS, global_expert_ids=held)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # so that the ranks' copies of the router stay alike
    with Recorder(Path(folder) / "killed.trace", model, optimizer, at=ALL, layout=layout) as reel:
        for step in range(1, 7):
            model(batch(step, 0)).square().mean().backward()
            for name, parameter in model.named_parameters():
                if ".experts." not in name:
                    parameter.grad = torch.full_like(parameter, float(step))
            optimizer.step()
            optimizer.zero_grad()
            reel.flush()
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)


EVERY = [
    "ddp",
    "ddp_list",
    "fsdp",
    "accumulation",
    "experts_declared",
    "experts_dtensor",
    "placements",
    "pipeline",
    "one_recorder",
    "sharded_late",
]
