"""Recipes as torch optimizers: groups, schedules, closures, resuming, and what is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toolkit.memory import account
from toolkit.optim import Mesh, RecipeOptimizer, SinkGD, SkewAdam, make_optimizer, role_groups
from toolkit.recipes import RECIPES
from traces.errors import GradreelError
from traces.roles import describe_params


class Router(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) * 0.3)


class Experts(nn.Module):
    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * hidden, width) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.3)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            mine = chosen == e
            gate, up = (x[mine] @ self.gate_up_proj[e].T).chunk(2, -1)
            out[mine] = (torch.nn.functional.silu(gate) * up) @ self.down_proj[e].T
        return out


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.gate = Router(width, num_experts)
        self.experts = Experts(width, hidden, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.gate.weight.T).softmax(-1)
        top, chosen = scores.max(-1)
        return x + self.experts(x, chosen) * top[:, None]


class Model(nn.Module):
    """Embedding, norm, attention-like mixing, experts, tied head: one parameter of each role that matters."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.attn = nn.Linear(8, 8)
        self.mlp = Block(8, 5, 4)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.attn(self.norm(self.embed_tokens(tokens)))
        return self.mlp(x) @ self.embed_tokens.weight.T


def batch(step: int) -> Tensor:
    return torch.randint(0, 12, (10,), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = batch(step)
    return nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))


def train(model: nn.Module, optimizer: Any, steps: range, schedule: Any = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_adamw_equals_torch() -> None:
    ours, theirs = Model(), Model()
    optimizer = make_optimizer(ours, "adamw", lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for model, one in ((ours, optimizer), (theirs, reference)):
        train(
            model, one, range(20), torch.optim.lr_scheduler.OneCycleLR(one, 1e-2, total_steps=20, cycle_momentum=False)
        )
    assert same(ours, theirs)


def test_every_parameter_is_in_exactly_one_group() -> None:
    model = Model()
    groups = role_groups(model)
    roles = {group["role"]: [name for name, _ in group["params"]] for group in groups}
    assert roles["routed_expert"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert roles["router"] == ["mlp.gate.weight"]
    assert roles["embedding"] == ["embed_tokens.weight"]
    found = [id(p) for group in groups for _, p in group["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters())
    model.attn.weight.requires_grad_(False)
    assert "attn.weight" not in [name for group in role_groups(model) for name, _ in group["params"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*RECIPES.names(), "mesh+adam_rest", "mesh+normalise_first", "sgd(momentum=0.9)"])
def test_resume_equals_the_unbroken_run(name: str, dtype: torch.dtype) -> None:
    unbroken = Model(dtype)
    optimizer = make_optimizer(unbroken, name)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    train(unbroken, optimizer, range(5), schedule)
    file = io.BytesIO()
    torch.save([unbroken.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
    train(unbroken, optimizer, range(5, 10), schedule)

    file.seek(0)
    weights, state, rates = torch.load(file, weights_only=True)
    resumed = Model(dtype)
    resumed.load_state_dict(weights)
    again = make_optimizer(resumed, name, seed=99)  # the seed comes from the state
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(again, 12)
    again.load_state_dict(state)
    plan.load_state_dict(rates)
    train(resumed, again, range(5, 10), plan)
    assert same(unbroken, resumed)
    left, right = optimizer.state_dict()["state"], again.state_dict()["state"]
    assert left.keys() == right.keys()
    for mine, other in ((left[i], right[i]) for i in left):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) and mine[key].dtype == other[key].dtype for key in mine)


def test_loading_leaves_the_saved_tensors_alone() -> None:
    model = Model()
    optimizer = make_optimizer(model, "adamw")
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    kept = state["state"][0]["momentum"].clone()
    other = make_optimizer(Model(), "adamw")
    other.load_state_dict(state)
    train(Model(), other, range(2))
    assert torch.equal(state["state"][0]["momentum"], kept)


def test_states_that_do_not_fit() -> None:
    model = Model()
    optimizer = make_optimizer(model, "adamw")
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    with pytest.raises(GradreelError, match="state_dict is of recipe 'adamw', the optimizer of 'skewadam'"):
        make_optimizer(Model(), "skewadam").load_state_dict(state)
    with pytest.raises(GradreelError, match="no 'gradreel' entry"):
        optimizer.load_state_dict({k: v for k, v in state.items() if k != "gradreel"})
    with pytest.raises(GradreelError, match="schema is 7; allowed: 1"):
        optimizer.load_state_dict({**state, "gradreel": {**state["gradreel"], "schema": 7}})
    with pytest.raises(GradreelError, match=r"groups of \[1\] parameters"):
        optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "params": [0]}]})
    halves = {i: {**slots, "momentum": slots["momentum"].half()} for i, slots in state["state"].items()}
    cast = {**state, "state": halves}
    with pytest.raises(GradreelError, match=r"momentum in the state_dict is .*float16; allowed: .*float32"):
        optimizer.load_state_dict(cast)


def test_state_bytes_are_those_planned() -> None:
    model = Model()
    for name in ("adamw", "skewadam", "mesh", "sinkgd"):
        optimizer = make_optimizer(model, name)
        train(model, optimizer, range(1))
        rows = account(optimizer.recipe, describe_params(model))
        assert optimizer.state_bytes == sum(row["state_bytes"] for row in rows)
        assert optimizer.pinned_gradient_bytes == sum(row["pinned_gradient_bytes"] for row in rows)


def test_closure() -> None:
    plain, closed = Model(), Model()
    train(plain, make_optimizer(plain, "skewadam"), range(3))
    optimizer = make_optimizer(closed, "skewadam")
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(closed, step)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
    assert same(plain, closed)
    assert optimizer.step() is None


def test_maximize_climbs() -> None:
    up, down = Model(), Model()
    for name in ("adamw", "mesh"):
        one = make_optimizer(up, name, maximize=True)
        loss_of(up, 0).backward()
        one.step()
        two = make_optimizer(down, name)
        (-loss_of(down, 0)).backward()
        two.step()
        for a, b in zip(up.parameters(), down.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        up.zero_grad()
        down.zero_grad()


def test_groups_by_hand() -> None:
    model = Model()
    experts = [model.mlp.experts.gate_up_proj, model.mlp.experts.down_proj]
    rest = [p for p in model.parameters() if all(p is not e for e in experts)]
    for kind, name in ((SkewAdam, "skewadam"), (SinkGD, "sinkgd"), (Mesh, "mesh")):
        by_hand = kind(
            [{"params": experts, "role": "routed_expert"}, {"params": rest, "role": "attention", "lr": 1e-4}], lr=1e-3
        )
        assert by_hand.recipe.name == f"{name}(lr=0.001)"
        assert [g["lr"] for g in by_hand.param_groups] == [1e-3, 1e-4]
        train(model, by_hand, range(2))
    assert "hidden_ema" in by_hand.describe_groups().splitlines()[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 1e40}, r"lr is 1e\+40; allowed: \[0.0, 1e\+30\]"),
        ({"lr": torch.tensor(0.1)}, r"lr is tensor\(0.1000\); allowed"),
        ({"weight_decay": 1e40}, r"weight_decay is 1e\+40; allowed: \[0.0, 1e\+30\]"),
        ({"seed": "7"}, r"seed is '7'; allowed: whole numbers of at least 0"),
        ({"lr": -0.1}, r"lr is -0.1; allowed: \[0.0, inf\)"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0; allowed"),
        ({"eps": 0.0}, r"eps is 0.0; allowed: \(0.0, inf\)"),
        ({"nonsense": 1}, r"recipe adamw has no option 'nonsense'"),
        ({"capturable": True}, r"capturable is True; allowed: False"),
        ({"foreach": True}, r"foreach is True; allowed: False"),
        ({"hidden_momentum": "behind"}, r"hidden_momentum is 'behind'; allowed: auto, attached, apart"),
    ],
)
def test_refused_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_optimizer(Model(), "adamw", **change)


@pytest.mark.parametrize("lr", [-1e-3, float("nan"), float("inf"), 1e40, None])
def test_a_rate_that_went_wrong_later_steps_nothing(lr: Any) -> None:
    model = Model()
    optimizer = make_optimizer(model, "adamw")
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.param_groups[-1]["lr"] = lr
    with pytest.raises(GradreelError, match=r"lr of group \w+ is .*; allowed"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_refused_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        RecipeOptimizer([], "adamw")
    with pytest.raises(GradreelError, match="role of param_0 is 'boss'; allowed: router"):
        RecipeOptimizer([{"params": [nn.Parameter(torch.zeros(2))], "role": "boss"}], "adamw")
    with pytest.raises(GradreelError, match="param_0 is complex64; allowed"):
        RecipeOptimizer([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], "adamw")
    with pytest.raises(GradreelError, match=r"lr of group other is -1.0; allowed"):
        RecipeOptimizer([{"params": [nn.Parameter(torch.zeros(2))], "lr": -1.0}], "adamw")
    with pytest.raises(GradreelError, match=r"lr of group other is 'fast'; allowed"):
        RecipeOptimizer([{"params": [nn.Parameter(torch.zeros(2))], "lr": "fast"}], "adamw")
    with pytest.raises(GradreelError, match=r"make_optimizer got int; allowed: a torch.nn.Module"):
        make_optimizer(5, "mesh")  # type: ignore[arg-type]
    with pytest.raises(GradreelError, match="no parameter that requires a gradient"):
        make_optimizer(nn.ReLU(), "adamw")
    words = nn.Embedding(5, 3, sparse=True)
    optimizer = RecipeOptimizer([{"params": [words.weight], "role": "embedding"}], "adamw")
    words(torch.tensor([1])).sum().backward()
    with pytest.raises(GradreelError, match=r"param_0: its gradient is torch\.sparse_coo; allowed: dense"):
        optimizer.step()


@pytest.mark.parametrize("name", RECIPES.names())
def test_no_gradient_moves_nothing(name: str) -> None:
    model, before = Model(), Model()
    optimizer = make_optimizer(model, name)
    optimizer.step()
    assert same(model, before)
    assert not any(len(s) and int(torch.as_tensor(s.get("step", 0)).sum()) for s in optimizer.state.values())


def test_hooks_around_the_step_fire() -> None:
    model, seen = Model(), list[str]()
    optimizer = make_optimizer(model, "mesh")
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, range(1))
    assert seen == ["before", "after"]


def test_grad_scaler_divides_and_skips() -> None:
    # A power of two changes no bit of a float32 gradient.
    plain, scaled = Model(), Model()
    train(plain, make_optimizer(plain, "mesh"), range(4))
    optimizer = make_optimizer(scaled, "mesh", hidden_momentum="apart")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(4):
        if step == 2:  # one step overflows and must leave no trace
            optimizer.zero_grad()
            loss_of(scaled, step).backward()
            scaler.scale(torch.ones(()))
            scaled.mlp.experts.down_proj.grad[0, 0, 0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update(1024.0)
        optimizer.zero_grad()
        scaler.scale(loss_of(scaled, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same(plain, scaled)


def test_a_copy_is_refused() -> None:
    """torch's own copy would lack the recipe and share no hooks."""
    with pytest.raises(GradreelError, match=r"RecipeOptimizer cannot be copied or pickled.*state_dict"):
        copy.deepcopy(make_optimizer(Model(), "mesh"))
