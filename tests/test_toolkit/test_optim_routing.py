"""A token gate in training: the model's own routing opens and closes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ablations.models import MoEConfig, MoELanguageModel
from toolkit.optim import RecipeOptimizer, make_optimizer
from toolkit.recipes import Stepper
from toolkit.variants import recipe
from traces.errors import GradreelError
from traces.recorder import Recorder
from traces.views import NONZERO, ParamInfo

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "max_positions": 16,
    "dense_hidden": 16,
    "expert_hidden": 8,
    "num_experts": 4,
    "top_k": 1,
    "moe_layers": (1,),
}
GATE = 5


def net() -> MoELanguageModel:
    torch.manual_seed(0)
    return MoELanguageModel(MoEConfig(**SIZES))


def batch(seed: int, length: int = 8) -> dict[str, Any]:
    tokens = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.roll(-1, 1)}


def expert_weights(model: MoELanguageModel) -> torch.Tensor:
    return next(p for p in model.parameters() if p.dim() == 3)


def counted(model: MoELanguageModel, *batches: dict[str, Any]) -> torch.Tensor:
    """The tokens of each expert, as a Recorder counts them, which shares the test's batches and nothing else."""
    seen = []
    throwaway = torch.optim.SGD(model.parameters(), lr=0.0)
    with Recorder(None, model, throwaway, on_step=lambda views: seen.append(views[0].routing.tokens_per_expert)):
        for one in batches:
            model(**one).loss.backward()
        throwaway.step()
    model.zero_grad()
    return torch.as_tensor(seen[0])


def moved(model: MoELanguageModel, before: torch.Tensor) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(expert_weights(model), before, strict=True)]


def test_the_gate_follows_the_routing() -> None:
    model = net()
    tokens = counted(model, batch(0))
    assert 0 < int((tokens >= GATE).sum()) < 4, "the test needs experts on both sides of the gate"
    optimizer = make_optimizer(model, f"mesh+token_gate({GATE})")
    before = expert_weights(model).detach().clone()
    model(**batch(0)).loss.backward()
    optimizer.step()
    assert moved(model, before) == (tokens >= GATE).tolist()
    # The momentum of gated experts has moved on.
    busy = optimizer.state[expert_weights(model)]["buffer"].flatten(1).any(1)
    assert busy.tolist() == (tokens > 0).tolist()


@pytest.mark.parametrize("mode", ["attached", "apart"])
def test_the_gate_in_either_mode_of_hidden_momentum(mode: str) -> None:
    weights = []
    for hidden in (mode, "auto"):
        model = net()
        optimizer = make_optimizer(model, f"mesh+token_gate({GATE})", hidden_momentum=hidden)
        for step in range(3):
            model(**batch(step)).loss.backward()
            optimizer.step()
            model.zero_grad()
        weights.append(expert_weights(model))
    assert torch.equal(*weights)


def _accumulate(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    used = [batch(1), batch(2)]
    for one in used:
        model(**one).loss.backward()
    return used


def _evaluate(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    model.eval()
    model(**batch(7))
    model.train()
    with torch.no_grad():
        model(**batch(8))
    model(**batch(1)).loss.backward()
    return [batch(1)]


def _throw_away(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    model(**batch(7)).loss.backward()
    optimizer.zero_grad()
    model(**batch(1)).loss.backward()
    return [batch(1)]


def _clear_between(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    # Lightning's closure: forward, zero_grad, backward.
    loss = model(**batch(1)).loss
    optimizer.zero_grad()
    loss.backward()
    return [batch(1)]


def _skip(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(**batch(7)).loss * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update(4.0)
    model.zero_grad()
    model(**batch(1)).loss.backward()
    return [batch(1)]


def _ask_twice(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    model(**batch(1)).loss.backward()
    # As Lightning does when it clips under mixed precision, before GradScaler.step asks once more.
    assert [optimizer._step_supports_amp_scaling for _ in range(2)] == [False, False]
    return [batch(1)]


def _pad(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    short, padded = batch(1, 6), batch(1, 6)
    for key, fill in (("input_ids", 0), ("labels", -100)):
        padded[key] = torch.cat([padded[key], torch.full((2, 4), fill)], 1)
    padded["attention_mask"] = torch.cat([torch.ones(2, 6), torch.zeros(2, 4)], 1).long()
    model(**padded).loss.backward()
    return [short]


@pytest.mark.parametrize("what", [_accumulate, _evaluate, _throw_away, _clear_between, _skip, _ask_twice, _pad])
def test_counts_are_those_of_the_step(what: Any) -> None:
    model = net()
    optimizer = make_optimizer(model, "sinkgd+token_gate(1)")
    used = what(model, optimizer)
    got = optimizer._routing.take()  # type: ignore[union-attr]
    assert torch.equal(got[1], counted(net(), *used))


def test_a_gate_without_counts_is_refused() -> None:
    model = net()
    groups = [{"params": [expert_weights(model)], "role": "routed_expert"}]
    optimizer = RecipeOptimizer(groups, "sinkgd+token_gate(1)")
    model(**batch(0)).loss.backward()
    with pytest.raises(ValueError, match="param_0: a token gate needs tokens_per_expert"):
        optimizer.step()
    optimizer = make_optimizer(model, "sinkgd+token_gate(1)")
    with pytest.raises(GradreelError, match="a token gate needs tokens_per_expert"):
        optimizer.step()  # gradients of a forward that the hooks did not see


@pytest.mark.parametrize(("tokens", "moves"), [([9, 9, 1, 9], False), ([0, 0, 5, 0], True)])
def test_experts_in_a_list_are_gated_one_by_one(tokens: list[int], moves: bool) -> None:
    info = ParamInfo("experts.2.up", "routed_expert", (6, 4), expert=2, matrix_axes=(0, 1))
    stepper, weight = Stepper(recipe(f"sinkgd+token_gate({GATE})"), info), torch.zeros(6, 4)
    stepper.step(weight, torch.ones(6, 4), lr=1.0, presence=[NONZERO], tokens_per_expert=tokens)
    assert bool(weight.any()) is moves


def test_no_hooks_without_a_gate() -> None:
    model = net()
    make_optimizer(model, "mesh")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
