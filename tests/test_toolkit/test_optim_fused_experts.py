"""Experts kept one after another in 2-D weights [E * F, H] are stepped as the stack [E, F, H] they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.optim import RecipeOptimizer
from traces.errors import GradreelError

E, F, H = 3, 4, 6
LAYOUT = {"layer": 0, "expert": None, "expert_axis": 0, "num_experts": E, "matrix_axes": (2, 1)}


def group(parameter: nn.Parameter) -> list[dict[str, object]]:
    return [{"params": [("w2", parameter)], "role": "routed_expert", "layouts": [LAYOUT]}]


@pytest.mark.parametrize("recipe", ["adamw", "sinkgd", "mesh", "skewadam", "muon"])
def test_a_fused_weight_takes_the_steps_of_the_stack(recipe: str) -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(E, F, H))
    fused = nn.Parameter(stack.detach().reshape(E * F, H).clone())
    options = {"hidden_momentum": "apart"} if recipe == "mesh" else {}
    optimizers = [RecipeOptimizer(group(p), recipe, lr=0.1, **options) for p in (stack, fused)]
    for step in range(3):
        gradient = torch.randn(E, F, H)
        gradient[step % E] = 0  # an idle expert
        stack.grad, fused.grad = gradient.clone(), gradient.reshape(E * F, H).clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stack.detach().reshape(E * F, H), fused.detach())


def test_momentum_of_fused_experts_is_kept_apart() -> None:
    fused = nn.Parameter(torch.randn(E * F, H))
    optimizer = RecipeOptimizer(group(fused), "mesh", lr=0.1)
    for _ in range(2):
        fused.square().sum().backward()
        optimizer.step()
        assert fused.grad is not None
    with pytest.raises(GradreelError, match=r"w2: hidden_momentum is 'attached'.*fused into 2-D weights"):
        RecipeOptimizer(group(fused), "mesh", lr=0.1, hidden_momentum="attached")
