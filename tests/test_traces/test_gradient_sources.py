"""Gradients that lie in a framework's own buffers, on fakes that have the framework's documented names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from traces import GradreelError, RecordAt, Recorder, open_trace
from traces.gradient_sources import DeepSpeedGradients, MegatronGradients
from traces.layouts import Layout

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
runs = __import__("rank_runs")
sys.path.remove(HERE)


class FakeState:
    """`megatron.core.parallel_state` of one rank."""

    def __init__(self, data: int, expert_data: int, tensor: int = 0, tensor_size: int = 1) -> None:
        self.get_data_parallel_rank = lambda: data
        self.get_expert_data_parallel_rank = lambda: expert_data
        self.get_tensor_model_parallel_rank = lambda: tensor
        self.get_tensor_model_parallel_world_size = lambda: tensor_size


class FakeOptimizer:
    """A MegatronOptimizer: the groups hold fp32 copies, and there is a loss scale."""

    param_groups = ({"lr": 1e-3, "params": []},)

    def get_loss_scale(self) -> torch.Tensor:
        return torch.tensor([4.0])


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for module in ("traces.checks", "traces.sharing"):
        monkeypatch.setattr(f"{module}.process_place", lambda: (rank, 2))


def megatron_model(held: list[int] | None = None) -> nn.Module:
    model: nn.Module = runs.RankModel(lambda: runs.RankMoe(3, held), layers=1)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.main_grad = torch.randn(parameter.shape, generator=generator) * 4  # type: ignore[attr-defined]
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
    return model


def test_megatron_expert_and_tensor_parallel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two ranks: experts are dealt out, the first matrix is cut by rows, all else is replicated."""
    seen: dict[int, dict[str, torch.Tensor]] = {}
    for rank in (0, 1):
        as_rank(monkeypatch, rank)
        held = [[0, 1], [2]][rank]
        model = megatron_model(held)
        inside: Any = model.get_submodule("inside").weight
        inside.tensor_model_parallel, inside.partition_dim, inside.partition_stride = True, 0, 1
        source = MegatronGradients(
            [model], FakeOptimizer(), parallel_state=FakeState(data=0, expert_data=0, tensor=rank, tensor_size=2)
        )
        layout = Layout("layers.*.mlp.experts", num_experts=3, global_expert_ids=held)
        with Recorder(tmp_path / "m.trace", model, gradients=source, at=runs.ALL, layout=layout) as reel:
            for step in (1, 2):
                model(runs.batch(step, 0)).square().mean().backward()
                reel.before_step()
        seen[rank] = {n: p.main_grad / 4 for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    trace = open_trace(tmp_path / "m.trace")
    assert trace.steps == [1, 2]
    assert [f for f in trace.verify() if f.severity == "damage"] == []
    wide = trace.gradient("inside.weight", 2)
    assert runs.same_bits(wide, torch.cat([seen[0]["inside.weight"], seen[1]["inside.weight"]]))
    name = "layers.0.mlp.experts.up_proj"
    assert runs.same_bits(trace.gradient(name, 2), torch.cat([seen[0][name], seen[1][name]]))
    assert runs.same_bits(trace.gradient("layers.0.mlp.gate.weight", 1), seen[0]["layers.0.mlp.gate.weight"])
    assert trace.lr(1, name) == 1e-3


def test_megatron_replicas_are_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for rank in (0, 1):
        as_rank(monkeypatch, rank)
        model = megatron_model()
        source = MegatronGradients(model, FakeOptimizer(), parallel_state=FakeState(data=rank, expert_data=rank))
        with Recorder(tmp_path / "m.trace", model, gradients=source) as reel:
            model(runs.batch(1, rank)).square().mean().backward()
            reel.before_step()
    assert not list((tmp_path / "m.trace" / "rank-00001").glob("chunk-*"))
    trace = open_trace(tmp_path / "m.trace")
    assert trace.gradient("layers.0.mlp.experts.up_proj", 1) is not None
    assert int(trace.routing_step(1, 0).tokens_per_expert.sum()) == 12  # type: ignore[union-attr]
    assert trace.scalars()["grad_norm"][0] > 0


def test_deepspeed_gathers_on_every_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`safe_get_full_grad` communicates: it is asked on each rank for every parameter, written or not."""
    asked: list[list[int]] = [[], []]
    for rank in (0, 1):
        as_rank(monkeypatch, rank)
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        model = runs.RankModel(layers=1)
        order = {id(p): number for number, p in enumerate(model.parameters())}

        def full(parameter: nn.Parameter, rank: int = rank, order: Any = order) -> torch.Tensor:
            asked[rank].append(order[id(parameter)])
            return torch.full(parameter.shape, 0.5)

        engine = SimpleNamespace(zero_optimization_stage=lambda: 2, get_lr=lambda: [1e-4])
        source = DeepSpeedGradients(engine, utils=SimpleNamespace(safe_get_full_grad=full))
        at = RecordAt(roles=("all",), budget=None)
        with pytest.raises(GradreelError, match=r"must record the same steps; give RecordAt\(budget=None\)"):
            Recorder(tmp_path / "d.trace", model, gradients=source)
        with Recorder(tmp_path / "d.trace", model, gradients=source, at=at) as reel:
            for step in (1, 2):
                model(runs.batch(step, rank)).square().mean().backward()
                reel.before_step()
    assert asked[0] == asked[1]
    assert len(asked[0]) == 2 * len(list(model.parameters()))
    trace = open_trace(tmp_path / "d.trace")
    gradient = trace.gradient("inside.weight", 2)
    assert gradient is not None
    assert gradient.unique().tolist() == [0.5]
    assert trace.lr(2, "inside.weight") == 1e-4


def test_what_a_source_cannot_do_is_told(tmp_path: Path) -> None:
    model = runs.RankModel(layers=1)
    engine = SimpleNamespace(zero_optimization_stage=lambda: 3)
    with pytest.raises(GradreelError, match="ZeRO stage 3"):
        DeepSpeedGradients(engine)
    model.ddp_config = SimpleNamespace(use_distributed_optimizer=True)
    with pytest.raises(GradreelError, match="without --use-distributed-optimizer"):
        MegatronGradients(model, FakeOptimizer())
    del model.ddp_config
    with pytest.raises(GradreelError, match="megatron-core is not installed here"):
        MegatronGradients(model, FakeOptimizer())
    with pytest.raises(GradreelError, match="gradients is a int, not a GradientSource"):
        Recorder(tmp_path / "x", model, gradients=3)  # type: ignore[arg-type]
    source = MegatronGradients(model, FakeOptimizer(), parallel_state=FakeState(0, 0))
    with pytest.raises(GradreelError, match="or an optimizer, not both"):
        Recorder(tmp_path / "x", model, torch.optim.SGD(model.parameters()), gradients=source)
    with pytest.raises(GradreelError, match=r"before_step\(\) belongs to"):
        Recorder(tmp_path / "x", model).before_step()
