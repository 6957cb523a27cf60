"""mesh_step against a float64 loop, and against the stage chains of MESH and MESH-B."""

import math

import numpy as np
import pytest
import torch

from toolkit.kernels import mesh_step, sr_sinkhorn_apply
from toolkit.stages._rng import CounterRng, StoredUniforms
from traces.errors import GradreelError

BACKENDS = ("reference", "eager", "cpu")


def draws(shape, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def slow_direction(b, sweeps):
    x = b.copy()
    m, n = x.shape
    for _ in range(sweeps):
        for i in range(m):
            norm = math.sqrt((x[i] ** 2).sum())
            x[i] = x[i] * math.sqrt(n) / norm if norm else 0
        for j in range(n):
            norm = math.sqrt((x[:, j] ** 2).sum())
            x[:, j] = x[:, j] * math.sqrt(m) / norm if norm else 0
    return x


def slow_multiplier(b, moment, block, beta):
    q = np.ones(len(b))
    for k in range(len(moment)):
        moment[k] = beta * moment[k] + (1 - beta) * (b[k * block : (k + 1) * block] ** 2).mean()
    live = [v for v in moment if v > 0]
    scale = math.sqrt(sum(1 / v for v in live) / max(1, len(live)))
    for i in range(len(b)):
        v = moment[i // block]
        q[i] = 1 / math.sqrt(v) / scale if v > 0 else 1.0
    return q


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [None, 1, 3])
@pytest.mark.parametrize("in_buffer", [False, True])
def test_agrees_with_the_float64_loop(backend, block, in_buffer):
    shape, lr, beta = (3, 7, 11), 0.05, 0.8
    weight, *gradients = draws(shape, 5)
    for g in gradients:
        g[2] = 0
    buffer, w, b = torch.zeros(shape), weight.double().numpy(), np.zeros(shape)
    blocks = None if block is None else -(-7 // block)
    moment = None if blocks is None else torch.zeros(3, blocks)
    slow_moment = None if blocks is None else np.zeros((3, blocks))
    for g in gradients:
        if in_buffer:
            buffer += g
        options = {"block_moment": moment, "block": block or 1, "moment_beta": 0.9, "weight_decay": 0.1}
        given = None if in_buffer else g
        assert mesh_step(weight, buffer, given, lr=lr, beta=beta, sweeps=4, backend=backend, **options) == backend
        b = b + g.double().numpy()
        for e in range(3):
            u = slow_direction(b[e], 4)
            if slow_moment is not None:
                u *= slow_multiplier(b[e], slow_moment[e], block, 0.9)[:, None]
            w[e] = w[e] * (1 - lr * 0.1) - lr * u
        b = b * beta
    np.testing.assert_allclose(weight.double().numpy(), w, rtol=3e-6, atol=1e-6)
    np.testing.assert_allclose(buffer.double().numpy(), b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["mesh", "mesh_b(block=2)"])
def test_fused_kernel_equals_the_stage_chain_of_the_recipe(name):
    from toolkit.recipes import Stepper
    from toolkit.variants import recipe
    from traces.views import ParamInfo

    made = recipe("mesh") if name == "mesh" else recipe("mesh_b", block=2)
    info = ParamInfo("e", "routed_expert", (4, 6, 10), expert_axis=0, num_experts=4, matrix_axes=(1, 2))
    stepper = Stepper(made, info)
    weight, *gradients = draws((4, 6, 10), 4)
    other, buffer = weight.clone(), torch.zeros(4, 6, 10)
    moment = None if name == "mesh" else torch.zeros(4, 3)
    for g in gradients:
        stepper.step(weight, g, lr=0.01)
        mesh_step(other, buffer, g, lr=0.01, block_moment=moment, block=2)
    assert torch.allclose(weight, other, rtol=1e-5, atol=1e-6)
    assert torch.allclose(stepper.state["buffer"], buffer, rtol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_bfloat16_weights_round_with_the_same_numbers(backend, rounding):
    shape = (2, 90, 110)
    start, g = draws(shape, 2)
    counter = CounterRng(0, 1, "w")
    results = []
    for name, rng in (("reference", counter), (backend, counter), (backend, StoredUniforms(counter.uniform(shape)))):
        weight = start.bfloat16()
        mesh_step(weight, torch.zeros(shape), g, lr=0.01, rounding=rounding, rng=rng, backend=name)
        results.append(weight)
    assert torch.equal(results[1], results[2])
    difference = (results[0].view(torch.int16).int() - results[1].view(torch.int16).int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) < 0.005
    applied = start.bfloat16()
    sr_sinkhorn_apply(applied, g, 0.01, rounding=rounding, rng=counter, backend=backend)
    assert torch.equal(applied, results[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_in_its_expert(backend):
    weight, g = draws((3, 5, 6), 2)
    clean = weight.clone()
    mesh_step(clean, torch.zeros(3, 5, 6), g, lr=0.1, backend=backend)
    g[1, 0, 0] = math.nan
    mesh_step(weight, torch.zeros(3, 5, 6), g, lr=0.1, backend=backend)
    assert torch.equal(weight[[0, 2]], clean[[0, 2]])
    assert weight[1].isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.0}, "beta 1.0"),
        ({"sweeps": 0}, "sweeps 0"),
        ({"block_moment": torch.zeros(2)}, "block_moment"),
        ({"gradient": torch.zeros(4, 3)}, "one shape"),
        ({"compat": "port"}, "unit_columns"),
        ({"rounding": "up"}, "unknown rounding"),
    ],
)
def test_bad_arguments_are_one_clear_line(options, message):
    with pytest.raises(GradreelError, match=message):
        mesh_step(torch.zeros(3, 4), torch.zeros(3, 4), lr=0.1, **options)
