"""Models that nobody listed: any router, lists of experts, capacity, experts without weights, fused weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from traces.errors import GradreelError
from traces.layouts import Layout, find_moe_layers
from traces.reader import Trace, open_trace
from traces.recorder import Recorder
from traces.roles import classify_roles, describe_params
from traces.views import NONE

H, E, T = 8, 4, 12


class LoopMoe(nn.Module):
    """A list of experts in a loop over what `choose(logits)` gives: ids [T, K] and weights [T, K]; -1 is dropped."""

    def __init__(self, choose: Callable[[Tensor], tuple[Tensor, Tensor]], router: nn.Module | None = None) -> None:
        super().__init__()
        self.choose = choose
        self.assign = router or nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(E))
        self.last_ids: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, H)
        ids, weights = self.choose(self.assign(tokens))
        self.last_ids = ids
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = (ids == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return out.view_as(hidden)


def best(count: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = logits.softmax(-1).topk(count, dim=-1)
        return ids, weights

    return choose


class Capacity:
    """Top 1; an expert takes `room` tokens and drops the rest. From forward `first` on."""

    def __init__(self, room: int, first: int = 1) -> None:
        self.room, self.first, self.forwards = room, first, 0

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        weights, ids = logits.softmax(-1).max(-1, keepdim=True)
        place = F.one_hot(ids[:, 0], E).cumsum(0).gather(1, ids)
        kept = place <= (self.room if self.forwards >= self.first else len(ids))
        return torch.where(kept, ids, -1), weights


class Net(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(H, H), moe])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture
def record(tmp_path: Any, notes: list[str]) -> Callable[..., tuple[Trace, list[np.ndarray]]]:
    """Train a few steps under a Recorder; returns the trace and, where the block keeps them, the ids of each step."""

    def go(moe: nn.Module, steps: int = 2, layout: Any = None) -> tuple[Trace, list[np.ndarray]]:
        torch.manual_seed(0)
        model = Net(moe)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        executed = []
        with Recorder(tmp_path / "a", model, optimizer, layout=layout, notify=notes.append):
            for _ in range(steps):
                model(torch.randn(T, H)).square().mean().backward()
                if isinstance(getattr(moe, "last_ids", None), Tensor):
                    executed.append(moe.last_ids.numpy().copy())
                optimizer.step()
                optimizer.zero_grad()
        return open_trace(tmp_path / "a"), executed

    return go


def check_ids(trace: Trace, executed: list[np.ndarray]) -> None:
    for routing, ids in zip(trace.routing_steps(1), executed, strict=True):
        assert np.array_equal(routing.topk_expert_ids, ids)
        assert routing.tokens_per_expert.tolist() == np.bincount(ids[ids >= 0], minlength=E).tolist()


@pytest.mark.parametrize("router", ["linear", "two layers", "probabilities"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_loop_over_any_router_whose_k_nobody_states(record: Any, router: str, top_k: int) -> None:
    modules = {
        "linear": nn.Linear(H, E),
        "two layers": nn.Sequential(nn.Linear(H, 5), nn.Tanh(), nn.Linear(5, E)),
        "probabilities": nn.Sequential(nn.Linear(H, E), nn.Softmax(-1)),
    }
    trace, executed = record(LoopMoe(best(top_k), modules[router]))
    assert trace.layers[0].top_k == top_k
    check_ids(trace, executed)


def test_noise_behind_the_router_is_refused(record: Any) -> None:
    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        return best(2)(logits + 20 * torch.randn_like(logits))

    with pytest.raises(GradreelError, match=r"'layers\.1\.experts'.*router chose.*experts were given.*read="):
        record(LoopMoe(choose))


def test_a_router_that_is_no_module_is_named(record: Any) -> None:
    class Bare(LoopMoe):
        def __init__(self) -> None:
            super().__init__(best(2))
            del self.assign
            self.w_gate = nn.Parameter(torch.randn(H, E))

        def assign(self, tokens: Tensor) -> Tensor:
            return tokens @ self.w_gate

    with pytest.raises(GradreelError, match=r"'layers\.1\.experts': no router module was found.*read="):
        record(Bare())
    layout = Layout(experts="*.experts", router="layers.1", read=lambda module, *_: (module.last_ids, None, None))
    trace, executed = record(Bare(), layout=layout)
    check_ids(trace, executed)


def test_dropped_tokens_are_read_off_the_block(record: Any) -> None:
    """Capacity: -1 is a slot that was not executed. The declared block is read, and is no router itself."""
    layout = Layout(
        experts="*.experts", router="layers.1", read=lambda module, args, kwargs, out: (module.last_ids, None, None)
    )
    trace, executed = record(LoopMoe(Capacity(2)), steps=3, layout=layout)
    check_ids(trace, executed)
    assert all((ids == -1).any() for ids in executed)
    roles = {name: trace.param(name).role for name in trace.params["name"]}
    assert roles["layers.1.assign.weight"] == "router"
    assert roles["layers.1.experts.0.weight"] == "routed_expert"


def test_what_is_dropped_in_a_later_step_is_left_out_and_told(record: Any, notes: list[str]) -> None:
    trace, executed = record(LoopMoe(Capacity(1, first=3)), steps=4)
    check_ids(trace, executed[:2])
    assert [step for step in trace.steps if trace.routing_step(step, 1) is not None] == [1, 2]
    assert any("in 2 steps, first in step 3" in note and "read=" in note for note in notes)


@pytest.mark.parametrize("top_k", [None, 1])
def test_capacity_in_the_first_step_is_refused(record: Any, top_k: int | None) -> None:
    moe = LoopMoe(Capacity(1))
    moe.top_k = top_k
    with pytest.raises(GradreelError, match=r"'layers\.1\.experts': the .*experts were given.*read="):
        record(moe)


def test_every_expert_on_every_token(record: Any) -> None:
    """Ids of a router are believed where each expert is run on all tokens and weighted afterwards."""

    class Chooser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, H))

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = F.linear(tokens, self.weight).softmax(-1).topk(2, dim=-1)
            return ids, weights

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Chooser()
            self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

        def forward(self, tokens: Tensor) -> Tensor:
            ids, weights = self.gate(tokens)
            self.last_ids = ids
            every = torch.stack([expert(tokens) for expert in self.experts], dim=1)
            return (every.gather(1, ids[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)

    check_ids(*record(Dense()))


def test_a_dispatch_mask_is_read_as_ids(record: Any) -> None:
    """[T, K, E], one-hot, with slots of zeros where an expert was full."""

    class Dispatched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(E, 6, H))
            self.down = nn.Parameter(torch.randn(E, H, 6))

        def forward(self, tokens: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
            hidden = torch.einsum("efh,th->tef", self.up, tokens).relu()
            out = torch.einsum("ehf,tef->teh", self.down, hidden)
            return torch.einsum("teh,tke,tk->th", out, mask.to(out.dtype), weights)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(H, E)
            self.experts = Dispatched()
            self.room = Capacity(2)

        def forward(self, tokens: Tensor) -> Tensor:
            self.last_ids, weights = self.room(self.router(tokens))
            mask = F.one_hot(self.last_ids.clamp(min=0), E) * (self.last_ids >= 0)[..., None]
            return self.experts(tokens, weights, mask.bool())

    trace, executed = record(Masked())
    check_ids(trace, executed)
    assert (executed[0] == -1).any()


def test_experts_without_weights_in_a_list(record: Any) -> None:
    """An id of no parameters counts as executed; its neighbours keep their places."""
    moe = LoopMoe(best(2))
    moe.experts[E - 1] = nn.Identity()
    trace, executed = record(moe)
    check_ids(trace, executed)
    assert {trace.param(name).expert for name in trace.params["name"] if ".experts." in name} == {0, 1, 2}


class Fused(nn.Module):
    """E experts one after another in the rows of 2-D weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(E * 6, H))
        self.w2 = nn.Parameter(torch.randn(E * 6, H))

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        w1, w2 = self.w1.view(E, 6, H)[ids], self.w2.view(E, 6, H)[ids]
        return torch.einsum("tkfh,tkf,tk->th", w2, torch.einsum("tkfh,th->tkf", w1, tokens).relu(), weights)


class FusedMoe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"num_experts": E}
        self.router = nn.Linear(H, E)
        self.experts = Fused()

    def forward(self, tokens: Tensor) -> Tensor:
        self.last_ids, weights = best(2)(self.router(tokens))
        return self.experts(tokens, self.last_ids, weights)


def test_fused_experts_are_declared(record: Any) -> None:
    with pytest.raises(GradreelError, match=r"'layers\.1\.experts'.*\[24, 8\].*num_experts=4, fused=True"):
        record(FusedMoe())
    layout = {"experts": "layers.1.experts", "num_experts": E, "fused": True, "transposed": ["w2"]}
    trace, executed = record(FusedMoe(), layout=layout)
    check_ids(trace, executed)
    infos = {name: trace.param(name) for name in trace.params["name"]}
    assert infos["layers.1.experts.w1"].shape == (E, 6, H)
    assert infos["layers.1.experts.w1"].matrix_axes == (1, 2)
    assert infos["layers.1.experts.w2"].matrix_axes == (2, 1)
    assert trace.gradient("layers.1.experts.w1", 1).shape == (E, 6, H)
    counts = trace.routing_step(1, 1).tokens_per_expert
    assert np.array_equal(trace.presence("layers.1.experts.w1", 1) > 2, counts > 0)


def test_one_module_a_projection(record: Any) -> None:
    """Experts spread over two lists: rows count once, each list holds its half."""

    class Two(LoopMoe):
        def __init__(self) -> None:
            super().__init__(best(1))
            del self.experts
            self.up_experts = nn.ModuleList(nn.Linear(H, 6) for _ in range(E))
            self.down_experts = nn.ModuleList(nn.Linear(6, H) for _ in range(E))

        @property
        def experts(self) -> list[Callable[[Tensor], Tensor]]:
            pairs = zip(self.up_experts, self.down_experts, strict=True)
            return [lambda x, up=up, down=down: down(up(x).relu()) for up, down in pairs]

    moe = Two()
    trace, executed = record(moe)
    check_ids(trace, executed)
    idle = int(np.argmin(trace.routing_step(1, 1).tokens_per_expert))
    if trace.routing_step(1, 1).tokens_per_expert[idle] == 0:
        assert int(trace.presence(f"layers.1.down_experts.{idle}.weight", 1)) == NONE


def test_a_layout_of_experts_without_weights_is_checked() -> None:
    with pytest.raises(GradreelError, match=r"zero_experts is 4; allowed: 0 to 3"):
        find_moe_layers(Net(FusedMoe()), Layout(experts="*.experts", num_experts=4, zero_experts=4))


def test_roles_of_a_block_that_is_read(record: Any) -> None:
    model = Net(LoopMoe(best(1)))
    infos = describe_params(model, layout=Layout(experts="*.experts", router="layers.1", num_experts=E))
    assert {info.name: info.role for info in infos} == classify_roles(model)
