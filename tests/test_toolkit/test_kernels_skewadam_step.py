"""skewadam_step in every backend against a float64 loop, and against the stage chain of the recipe."""

import itertools
import math

import numpy as np
import pytest
import torch

from toolkit.kernels import SkewAdamRule, SkewAdamState, skewadam_step
from toolkit.stages._rng import CounterRng, StoredUniforms
from traces.errors import GradreelError

BACKENDS = ("reference", "eager", "cpu")


class SlowSkewAdam:
    """One matrix, element by element, float64."""

    def __init__(self, weight, factored, momentum, rule):
        self.w = weight.double().numpy().copy()
        m, n = self.w.shape
        self.factored, self.rule = factored, rule
        self.r, self.c, self.v = np.zeros(m), np.zeros(n), np.zeros((m, n))
        self.mom = np.zeros((m, n)) if momentum else None
        self.t = 0

    def direction(self, g):
        rule, (b1, b2) = self.rule, self.rule.betas
        self.t += 1
        m, n = g.shape
        c2 = 1 - b2**self.t
        extra = rule.eps if rule.eps_mode == "adafactor" else 0.0
        root_of_c2 = math.sqrt(c2)
        x = g
        if self.mom is not None:
            self.mom = b1 * self.mom + (1 - b1) * g
            x = self.mom / (1 - b1**self.t)
        for i in range(m):
            self.r[i] = b2 * self.r[i] + (1 - b2) * sum(g[i, j] ** 2 + extra for j in range(n)) / n
        for j in range(n):
            self.c[j] = b2 * self.c[j] + (1 - b2) * sum(g[i, j] ** 2 + extra for i in range(m)) / m
        self.v = b2 * self.v + (1 - b2) * (g * g + extra)
        mean = self.r.mean()
        u = np.zeros((m, n))
        for i, j in itertools.product(range(m), range(n)):
            v = self.c[j] if self.factored else self.v[i, j]
            ratio = (
                self.r[i] / (max(mean, 1e-15) if rule.eps_mode == "v_floor" else mean or 1.0) if self.factored else 1.0
            )
            v = v / c2 if rule.correct == "before" else v
            if rule.eps_mode == "v_floor":
                v, ratio = max(v, rule.eps), max(ratio, rule.eps_row) if self.factored else 1.0
            d = math.sqrt(ratio) * math.sqrt(v) + (rule.eps if rule.eps_mode == "add_to_sqrt" else 0.0)
            u[i, j] = x[i, j] / d * (root_of_c2 if rule.correct == "after" else 1.0)
        return u

    def move(self, u, lr, mean_square):
        clip = max(1.0, math.sqrt(mean_square) / self.rule.threshold)
        self.w = self.w * (1 - lr * self.rule.weight_decay) - lr * u / clip


def gradients(shape, steps, scale=1.0):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) * scale * (1 + t) for t in range(steps)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize(
    ("eps_mode", "correct"), [("v_floor", "after"), ("add_to_sqrt", "before"), ("adafactor", "before")]
)
@pytest.mark.parametrize("clip_scope", ["matrix", "tensor"])
def test_agrees_with_the_float64_loop(backend, factored, momentum, eps_mode, correct, clip_scope):
    rule = SkewAdamRule(
        eps_mode=eps_mode, correct=correct, clip_scope=clip_scope, weight_decay=0.1, eps=1e-4, threshold=0.5
    )
    shape = (3, 7, 11)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    slow = [SlowSkewAdam(w, factored, momentum, rule) for w in weight]
    state = SkewAdamState.zeros(weight, factored=factored, momentum=momentum)
    for t, g in enumerate(gradients(shape, 4, 0.01), start=1):
        g[1] *= 30
        assert skewadam_step(weight, g, state, step=t, lr=0.05, rule=rule, backend=backend) == backend
        us = [s.direction(x.double().numpy()) for s, x in zip(slow, g, strict=True)]
        squares = [(u * u).mean() for u in us]
        for s, u, square in zip(slow, us, squares, strict=True):
            s.move(u, 0.05, square if clip_scope == "matrix" else np.mean(squares))
    for w, s in zip(weight, slow, strict=True):
        np.testing.assert_allclose(w.double().numpy(), s.w, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither"])
@pytest.mark.parametrize("decay", ["fused", "own_dtype"])
def test_bfloat16_differs_from_the_truth_in_rare_roundings_only(backend, factored, rounding, decay):
    rule = SkewAdamRule(rounding=rounding, decay=decay, weight_decay=0.3)
    shape = (2, 30, 37)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for name in ("reference", backend):
        weight = start.clone()
        state = SkewAdamState.zeros(weight, factored=factored, momentum=False)
        for t, g in enumerate(gradients(shape, 1), start=1):
            rng = CounterRng(0, t, "w")
            skewadam_step(weight, g.bfloat16(), state, step=t, lr=0.01, rule=rule, rng=rng, backend=name)
        results.append(weight.view(torch.int16).int())
    difference = (results[0] - results[1]).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) < 0.01


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_stored_uniforms_and_the_counter_give_the_same_weights(rounding):
    rule = SkewAdamRule(rounding=rounding)
    weight = torch.randn((3, 5, 9), generator=torch.Generator().manual_seed(1)).bfloat16()
    g = gradients((3, 5, 9), 1)[0]
    counter = CounterRng(4, 1, "w")
    out = []
    for rng in (counter, StoredUniforms(counter.uniform((3, 5, 9)))):
        w, state = weight.clone(), SkewAdamState.zeros(weight, factored=True, momentum=False)
        skewadam_step(w, g, state, step=1, lr=0.01, rule=rule, rng=rng, backend="cpu")
        out.append(w)
    assert torch.equal(out[0], out[1])
    assert not torch.equal(out[0], weight)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layout_of_memory_does_not_matter(backend):
    g = gradients((3, 8, 13), 1)[0]
    results = []
    for weight in (torch.ones(3, 8, 13), torch.ones(3, 13, 8).mT, torch.ones(3, 16, 26)[:, ::2, ::2]):
        state = SkewAdamState.zeros(weight, factored=True, momentum=True)
        skewadam_step(weight, g.mT.contiguous().mT, state, step=1, lr=0.1, backend=backend)
        results.append(weight.clone())
    assert torch.allclose(results[0], results[1], rtol=1e-6)
    assert torch.allclose(results[0], results[2], rtol=1e-6)
    assert float((results[0] - 1).abs().max()) > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_gradient_moves_nothing_and_a_nan_stays_in_its_expert(backend):
    g = gradients((3, 6, 5), 1)[0]
    g[0] = 0
    clean = torch.ones(3, 6, 5)
    skewadam_step(clean, g, SkewAdamState.zeros(clean, factored=True, momentum=False), step=1, lr=0.1, backend=backend)
    assert torch.equal(clean[0], torch.ones(6, 5))
    g[2, 1, 1] = math.nan
    weight = torch.ones(3, 6, 5)
    state = SkewAdamState.zeros(weight, factored=True, momentum=False)
    skewadam_step(weight, g, state, step=1, lr=0.1, backend=backend)
    assert torch.equal(weight[:2], clean[:2])
    assert weight[2].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (1, 1, 5), (2, 4, 1), (6, 5)])
def test_edge_shapes(backend, shape):
    weight = torch.zeros(shape)
    state = SkewAdamState.zeros(weight, factored=True, momentum=True)
    skewadam_step(weight, torch.ones(shape), state, step=1, lr=0.1, backend=backend)
    assert torch.allclose(weight, torch.full(shape, -0.1), rtol=1e-5)


def test_fused_kernel_equals_the_stage_chain_of_the_recipe():
    """The chain is written elsewhere and tested against golden runs; the kernel must do what it does."""
    from toolkit.recipes import Stepper
    from toolkit.variants import recipe
    from traces.views import ParamInfo

    for exact in (False, True):
        made = recipe("skewadam", paper_exact=exact)
        info = ParamInfo("e", "routed_expert", (4, 6, 10), expert_axis=0, num_experts=4, matrix_axes=(1, 2))
        stepper = Stepper(made, info)
        rule = SkewAdamRule.paper(weight_decay=0.05) if exact else SkewAdamRule(weight_decay=0.05)
        first = torch.randn((4, 6, 10), generator=torch.Generator().manual_seed(3))
        second = first.clone()
        state = SkewAdamState.zeros(second, factored=True, momentum=False)
        for t, g in enumerate(gradients((4, 6, 10), 3, 0.1), start=1):
            stepper.step(first, g, lr=0.01)
            skewadam_step(second, g, state, step=t, lr=0.01, rule=rule)
        assert torch.allclose(first, second, rtol=1e-5, atol=1e-6)


def test_bad_arguments_are_one_clear_line():
    weight = torch.zeros(3, 4)
    state = SkewAdamState.zeros(weight, factored=True, momentum=False)
    with pytest.raises(GradreelError, match="step is 0"):
        skewadam_step(weight, weight, state, step=0, lr=0.1)
    with pytest.raises(GradreelError, match="one shape"):
        skewadam_step(weight, torch.zeros(4, 3), state, step=1, lr=0.1)
    with pytest.raises(GradreelError, match="pass rng"):
        skewadam_step(weight.bfloat16(), weight, state, step=1, lr=0.1)
    with pytest.raises(GradreelError, match="unknown eps_mode"):
        SkewAdamRule(eps_mode="floor")
    with pytest.raises(GradreelError, match="betas"):
        SkewAdamRule(betas=(0.9, 1.0))
