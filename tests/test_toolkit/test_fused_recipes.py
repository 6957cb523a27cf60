"""Recipes through their fused kernels against the chains those stand for."""

import pytest
import torch

from toolkit.optim import RecipeOptimizer
from toolkit.recipes import Stepper
from toolkit.stages import Stage
from toolkit.variants import recipe
from traces.views import ParamInfo

SERVED = {
    "sinkgd": "sr_sinkhorn",
    "sinkgd+sign_only": "sign_step",
    "mesh": "mesh_step",
    "skewadam": "skewadam_step",
    "skewadam+paper": "skewadam_step",
    "skewadam+momentum": "skewadam_step",
}


def build(name):
    if name == "skewadam+paper":
        return recipe("skewadam", paper_exact=True)
    return recipe("skewadam", tiers="uniform") if name == "skewadam+momentum" else recipe(name)


def info(shape=(3, 24, 40), role="routed_expert", dtype="float32", stacked=True):
    return ParamInfo(
        name="w",
        role=role,
        shape=shape,
        strides=None,
        dtype=dtype,
        layer=0,
        expert_axis=0 if stacked else None,
        num_experts=shape[0] if stacked else None,
        matrix_axes=(len(shape) - 2, len(shape) - 1) if len(shape) > 1 else None,
    )


def tensors(seed, dtype, shape=(3, 24, 40)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def no_stages(monkeypatch):
    monkeypatch.setattr(Stage, "__call__", lambda *a, **k: pytest.fail("the chain ran"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SERVED)
def test_a_kernel_does_what_its_chain_does(monkeypatch, name, dtype):
    chosen, about = build(name), info(dtype=str(dtype)[6:])
    chain, fused = Stepper(chosen, about), Stepper(chosen, about, fused=True)
    assert (chain.fused, fused.fused) == (None, SERVED[name])
    slow = tensors(0, dtype)
    fast = slow.clone()
    gradients = [tensors(step, dtype) for step in range(1, 5)]
    for gradient in gradients:
        chain.step(slow, gradient, lr=0.02)
    no_stages(monkeypatch)
    for gradient in gradients:
        fused.step(fast, gradient, lr=0.02)
    if dtype == torch.float32:
        assert torch.allclose(fast, slow, rtol=1e-5, atol=1e-6)
    else:
        apart = (fast.view(torch.int16).int() - slow.view(torch.int16).int()).abs()
        assert int(apart.max()) <= 1
        assert float((apart > 0).float().mean()) < 0.01
    for key in chain.state:
        assert torch.allclose(fused.state[key], chain.state[key], rtol=2e-5, atol=1e-7), key


def test_an_idle_expert_is_skipped_by_the_kernel_too(monkeypatch):
    fused, weight, gradient = (
        Stepper(recipe("sinkgd"), info(), fused=True),
        tensors(0, torch.float32),
        tensors(1, torch.float32),
    )
    gradient[1] = 0
    before = weight.clone()
    no_stages(monkeypatch)
    fused.step(weight, gradient, lr=0.02, presence=[3, 2, 3])
    assert torch.equal(weight[1], before[1])
    assert not torch.equal(weight[0], before[0])


def test_the_direction_comes_from_the_chain():
    chain, fused = Stepper(recipe("sinkgd"), info()), Stepper(recipe("sinkgd"), info(), fused=True)
    slow, gradient = tensors(0, torch.float32), tensors(1, torch.float32)
    fast = slow.clone()
    expected = chain.step(slow, gradient, lr=0.02, want_update=True)
    assert torch.equal(fused.step(fast, gradient, lr=0.02, want_update=True), expected)
    assert torch.equal(fast, slow)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "mesh_b"])
def test_other_chains_have_no_kernel(name):
    assert Stepper(recipe(name), info(), fused=True).fused is None


def test_vectors_and_float64_take_the_chain():
    for about, dtype in ((info((40,), "norm", stacked=False), torch.float32), (info(dtype="float64"), torch.float64)):
        chosen = recipe("skewadam", paper_exact=True)
        chain, fused = Stepper(chosen, about), Stepper(chosen, about, fused=True)
        slow = tensors(0, dtype, about.shape)
        fast, gradient = slow.clone(), tensors(1, dtype, about.shape)
        chain.step(slow, gradient, lr=0.02)
        fused.step(fast, gradient, lr=0.02)
        assert torch.equal(fast, slow)


def test_the_optimizer_uses_the_kernels_when_asked():
    results = []
    for fused in (False, True):
        parameter = torch.nn.Parameter(tensors(0, torch.float32))
        groups = [{"params": [parameter], "role": "routed_expert"}]
        optimizer = RecipeOptimizer(groups, "sinkgd", fused=fused)
        assert optimizer.defaults.get("fused", False) is fused
        parameter.grad = tensors(1, torch.float32)
        optimizer.step()
        results.append(parameter.detach())
    assert torch.allclose(*results, rtol=1e-5, atol=1e-6)
    assert not torch.equal(*results)
