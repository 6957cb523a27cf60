"""adamw_step, sign_step and newton_schulz against slow truths and against torch's own."""

import math

import numpy as np
import pytest
import torch

from toolkit.kernels import adamw_step, newton_schulz, sign_step
from toolkit.stages._rng import CounterRng
from traces.errors import GradreelError

BACKENDS = ("reference", "eager", "cpu")


def draws(shape, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3, 9, 14), (40,), (), (5, 1, 1)])
def test_adamw_agrees_with_torch(backend, shape):
    weight, *gradients = draws(shape, 6)
    parameter = torch.nn.Parameter(weight.double().clone())
    other = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    m, v = torch.zeros(shape), torch.zeros(shape)
    for t, g in enumerate(gradients, start=1):
        parameter.grad = g.double()
        other.step()
        options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
        assert adamw_step(weight, g, m, v, step=t, backend=backend, **options) == backend
    assert torch.allclose(weight.double(), parameter.detach(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither"])
def test_bfloat16_steps_round_with_the_same_numbers(backend, rounding):
    shape = (3, 20, 33)
    weight, g = draws(shape, 2)
    results = {}
    for name in ("reference", backend):
        w = weight.bfloat16()
        s = w.clone()
        rng = CounterRng(0, 1, "w")
        adamw_step(
            w, g, torch.zeros(shape), torch.zeros(shape), step=1, lr=0.01, rounding=rounding, rng=rng, backend=name
        )
        sign_step(s, g.bfloat16(), lr=0.003, weight_decay=0.1, rounding=rounding, rng=rng, backend=name)
        results[name] = (w, s)
    for mine, truth in zip(results[backend], results["reference"], strict=True):
        difference = (mine.view(torch.int16).int() - truth.view(torch.int16).int()).abs()
        assert int(difference.max()) <= 1
        assert float((difference > 0).float().mean()) < 0.005


@pytest.mark.parametrize("backend", BACKENDS)
def test_sign_of_every_kind_of_number(backend):
    x = torch.tensor([1e-45, -1e-45, 0.0, -0.0, math.inf, -math.inf, 3e38, math.nan])
    weight = torch.zeros(8)
    assert sign_step(weight, x, lr=0.5, backend=backend) == backend
    assert weight[:7].tolist() == [-0.5, 0.5, 0, 0, -0.5, 0.5, -0.5]
    assert weight[7].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_on_strided_weights_and_empty_ones(backend):
    weight, g = draws((3, 6, 8), 2)
    plain = weight.clone()
    strided = torch.zeros(3, 8, 6).mT
    strided.copy_(weight)
    for w in (plain, strided):
        sign_step(w, g, lr=0.1, backend=backend)
        adamw_step(w, g, torch.zeros(3, 6, 8), torch.zeros(3, 6, 8), step=1, lr=0.1, backend=backend)
    assert torch.equal(plain, strided)
    empty = torch.zeros(3, 0, 4)
    sign_step(empty, empty, lr=0.1, backend=backend)
    adamw_step(empty, empty, empty.clone(), empty.clone(), step=1, lr=0.1, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("shape", [(3, 8, 14), (2, 2, 14, 8), (5, 5)])
def test_newton_schulz_is_its_polynomial_on_singular_values(backend, shape):
    x = draws(shape, 1)[0] * 1e-20
    out = newton_schulz(x, 5, backend=backend)
    u, s, vt = np.linalg.svd(x.double().numpy(), full_matrices=False)
    s = s / np.sqrt((s**2).sum(-1, keepdims=True))
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    np.testing.assert_allclose(out.double().numpy(), (u * s[..., None, :]) @ vt, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_newton_schulz_zero_stays_zero_and_a_nan_stays_alone(backend):
    x = draws((3, 6, 9), 1)[0]
    x[0] = 0
    clean = newton_schulz(x, backend=backend)
    x[1, 2, 2] = math.inf
    out = newton_schulz(x, backend=backend)
    assert not out[0].any()
    assert out[1].isnan().all()
    assert torch.equal(out[2], clean[2])
    assert newton_schulz(torch.zeros(2, 0, 3)).shape == (2, 0, 3)


def test_newton_schulz_in_bfloat16_is_near():
    x = draws((2, 12, 20), 1)[0]
    out = newton_schulz(x, 5, dtype=torch.bfloat16)
    assert out.dtype == torch.float32
    assert float((out - newton_schulz(x, 5)).abs().max()) < 0.05


def test_bad_arguments_are_one_clear_line():
    w = torch.zeros(3)
    with pytest.raises(GradreelError, match="one shape"):
        sign_step(w, torch.zeros(4), lr=0.1)
    with pytest.raises(GradreelError, match="step 0"):
        adamw_step(w, w, w.clone(), w.clone(), step=0, lr=0.1)
    with pytest.raises(GradreelError, match="exp_avg_sq"):
        adamw_step(w, w, w.clone(), torch.zeros(4), step=1, lr=0.1)
    with pytest.raises(GradreelError, match="no cpu implementation"):
        newton_schulz(torch.zeros(3, 4), backend="cpu")
    with pytest.raises(GradreelError, match="steps is 0"):
        newton_schulz(torch.zeros(3, 4), steps=0)
