"""The compiled loop against a slow one built from the project's recipes, and against what can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ablations.simulate import Lane, World, run_lanes
from ablations.simulate._arms import parameter, program, resolve
from ablations.simulate._engine import RISK, STABLE_RANK, UPDATE_RMS
from ablations.simulate._kernel import normals, stable_rank
from ablations.simulate._world import eigenvalues, schedule, task, tokens_per_expert
from toolkit.kernels._philox import philox_words
from toolkit.recipes import Stepper
from traces.errors import GradreelError
from traces.views import NONZERO, ZERO

ARMS = [
    "sinkgd",
    "sinkgd(sweeps=2,compat=unit_columns)",
    "sinkgd+sign_only",
    "mesh",
    "mesh+idle(as_zero)",
    "mesh+idle(decay)",
    "mesh+sign_only",
    "mesh+normalise_first",
    "normalise_then_momentum(beta=0.8)",
    "sink_v",
    "adamw",
    "adamw+idle(skip)",
    "sgd",
    "sgd(momentum=0.9)",
    "sgd(momentum=0.9,nesterov=True)",
    "lion",
    "muon",
    "mesh+smaller_steps(0.3)",
    "rms",
    "momentum_then_rms",
]


def drawn(seed: int, step: int, expert: int, stream: int, shape: tuple[int, int]) -> np.ndarray:
    """Normal numbers of one step by the documented layout: 2^40 words an expert, 2^36 a stream."""
    count = math.prod(shape)
    start = (expert << 40) + (stream << 36)
    words = philox_words((seed & 0xFFFFFFFF, seed >> 32), step, start, count + count % 2).numpy().astype(float)
    first, second = (words[0::2] + 0.5) / 2**32, (words[1::2] + 0.5) / 2**32
    radius = np.sqrt(-2 * np.log(first))
    both = np.stack([radius * np.cos(2 * np.pi * second), radius * np.sin(2 * np.pi * second)], axis=1)
    return both.reshape(-1)[:count].reshape(shape)


def slow_run(world: World, name: str, lr: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights [E, m, n] and risk [E] at the end: outer products one by one, the project's own Stepper for the rule."""
    m, n, experts = world.rows, world.columns, world.experts
    tasks = [task(world, seed, e) for e in range(experts)]
    target = np.stack([t.target for t in tasks])
    counts, rates = tokens_per_expert(world, seed), schedule(world)
    stepper = Stepper(resolve(name), parameter(experts, m, n))
    weight = torch.zeros((experts, m, n), dtype=torch.float64)
    for t in range(world.steps):
        gradient = np.zeros((experts, m, n))
        for e in range(experts):
            if world.drift:
                target[e] += world.drift * drawn(seed, t, e, 2, (m, n))
            k, delta = counts[e, t], weight[e].numpy() - target[e]
            if k == 0:
                continue
            if world.gradient == "quadratic":
                noise = world.noise / math.sqrt(k) * drawn(seed, t, e, 0, (m, n)) @ tasks[e].root.T
                gradient[e] = delta @ tasks[e].sigma - noise
                continue
            number = world.rank or k
            inputs = drawn(seed, t, e, 0, (number, n)) @ tasks[e].root.T
            noise = world.noise * drawn(seed, t, e, 1, (number, m))
            others = inputs if world.rank is None else drawn(seed, t, e, 3, (number, n)) @ tasks[e].root.T
            for x, y, label_noise in zip(inputs, others, noise, strict=True):
                gradient[e] += np.outer(delta @ y - label_noise, x) / number
            if world.rank is not None:
                gradient[e] = delta @ tasks[e].sigma + math.sqrt(number / k) * gradient[e]
        presence = np.where(counts[:, t] > 0, NONZERO, ZERO).astype(np.uint8)
        stepper.step(weight, torch.from_numpy(gradient), lr=lr * rates[t], presence=presence)
    delta = weight.numpy() - target
    risk = np.array([np.trace(d @ each.sigma @ d.T) for d, each in zip(delta, tasks, strict=True)])
    return weight.numpy(), risk


SMALL = World(experts=3, rows=5, columns=7, tokens=3, steps=24, noise=0.2)


@pytest.mark.parametrize("name", ARMS)
def test_a_rule_is_the_recipe(name: str) -> None:
    world = replace(SMALL, activity=0.5, persistence=0.3)
    weights, risk = slow_run(world, name, 0.02, 3)
    outcome = run_lanes(world, [Lane("sgd", 0.1), Lane(name, 0.02)], [8, 3], threads=1, keep_weights=True)
    assert outcome.weights is not None
    np.testing.assert_allclose(outcome.weights[1, 1], weights, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(outcome.values[1, 1, :, -1, RISK], risk, rtol=1e-8)


WORLDS = {
    "many tokens": {"tokens": 40},
    "one token": {"tokens": 1},
    "drift": {"drift": 0.05, "schedule": "constant"},
    "axes": {"basis": "axes", "spectrum": 2.0},
    "white": {"spectrum": 0.0},
    "zipf": {"zipf": 1.2, "tokens": 2},
    "quadratic": {"gradient": "quadratic"},
    "matched below": {"gradient": "matched", "rank": 1},
    "matched above": {"gradient": "matched", "rank": 20, "activity": 0.6},
    "tall": {"rows": 9, "columns": 4},
    "1x1": {"rows": 1, "columns": 1},
}


@pytest.mark.parametrize("title", WORLDS)
def test_a_world_is_what_it_says(title: str) -> None:
    world = replace(SMALL, **WORLDS[title])
    weights, risk = slow_run(world, "mesh", 0.02, 5)
    outcome = run_lanes(world, [Lane("mesh", 0.02)], [5], threads=1, keep_weights=True)
    assert outcome.weights is not None
    np.testing.assert_allclose(outcome.weights[0, 0], weights, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(outcome.values[0, 0, :, -1, RISK], risk, rtol=1e-7)


def test_a_matched_step_has_rms_one() -> None:
    world = replace(SMALL, steps=1, schedule="constant")
    outcome = run_lanes(world, [Lane("adamw", 0.1, matched=True)], [0], threads=1, keep_weights=True)
    assert outcome.weights is not None
    np.testing.assert_allclose(np.sqrt((outcome.weights**2).mean((-1, -2))), 0.1, rtol=1e-12)


def test_one_token_makes_sinkhorn_a_product_of_signs() -> None:
    world = replace(SMALL, tokens=1, steps=1, schedule="constant")
    outcome = run_lanes(world, [Lane("sinkgd(alpha=1.0)", 0.25)], [0], threads=1, keep_weights=True)
    assert outcome.weights is not None
    inputs = drawn(0, 0, 1, 0, (1, 7)) @ task(world, 0, 1).root.T
    answer = -task(world, 0, 1).target @ inputs[0] - 0.2 * drawn(0, 0, 1, 1, (1, 5))[0]
    expected = -0.25 * np.outer(np.sign(answer), np.sign(inputs[0]))
    np.testing.assert_allclose(outcome.weights[0, 0, 1], expected, rtol=1e-12)
    assert outcome.values[0, 0, :, 0, STABLE_RANK] == pytest.approx(1.0)
    assert outcome.values[0, 0, :, 0, UPDATE_RMS] == pytest.approx(1.0)


@pytest.mark.parametrize("gradient", [{}, {"gradient": "matched", "rank": 16}, {"gradient": "quadratic"}])
def test_the_gradient_is_unbiased(gradient: dict[str, object]) -> None:
    """At a vanishing lr the weights add up the gradients at W = 0, whose mean is that of the risk, (W - T) Sigma."""
    world = replace(SMALL, tokens=8, steps=20_000, schedule="constant", noise=0.1, **gradient)
    outcome = run_lanes(world, [Lane("sgd", 1e-9)], [2], threads=1, keep_weights=True)
    assert outcome.weights is not None
    for e in range(world.experts):
        mine = task(world, 2, e)
        found = -outcome.weights[0, 0, e] / (1e-9 * world.steps)
        expected = -mine.target @ mine.sigma
        assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


STATIONARY = World(experts=8, rows=8, columns=8, tokens=4, noise=0.5, spectrum=0.0, schedule="constant", steps=4000)


def stationary_risk(world: World, recipe: str, lr: float) -> float:
    outcome = run_lanes(world, [Lane(recipe, lr)], list(range(10)), threads=1)
    return float(outcome.values[0, :, :, 4:, RISK].mean())


@pytest.mark.parametrize("change", [{}, {"gradient": "matched", "rank": 1}, {"gradient": "matched", "rank": 12}])
def test_sgd_settles_at_the_variance_of_theory(change: dict[str, object]) -> None:
    """Of white inputs, E (x x^T averaged over k)^2 = (1 + (n + 1) / k) I, so |W - T|^2 settles at
    lr noise^2 m n / k / (2 - lr (1 + (n + 1) / k)); for matched noise of any rank it is n in place of n + 1."""
    world, lr = replace(STATIONARY, **change), 0.1
    m, n, k = world.rows, world.columns, world.tokens
    dependent = 1 if world.rank is None else 0
    expected = lr * world.noise**2 * m * n / k / (2 - lr * (1 + (n + dependent) / k))
    assert stationary_risk(world, "sgd", lr) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("spectrum", [0.0, 1.0])
def test_sgd_on_the_noisy_quadratic_settles_at_the_variance_of_theory(spectrum: float) -> None:
    world, lr = replace(STATIONARY, gradient="quadratic", spectrum=spectrum, noise=1.0), 0.2
    values = eigenvalues(world)
    expected = world.rows * (values * lr * world.noise**2 / world.tokens / (2 - lr * values)).sum()
    assert stationary_risk(world, "sgd", lr) == pytest.approx(expected, rel=0.02)


def test_momentum_settles_at_the_variance_of_theory() -> None:
    """Heavy ball on curvature h and noise variance s: lr s (1 + b) / (h (1 - b) (2 (1 + b) - lr h))."""
    world, lr, beta = replace(STATIONARY, gradient="quadratic", noise=1.0), 0.03, 0.9
    m, n, s = world.rows, world.columns, world.noise**2 / world.tokens
    expected = m * n * lr * s * (1 + beta) / ((1 - beta) * (2 * (1 + beta) - lr))
    assert stationary_risk(world, f"sgd(momentum={beta})", lr) == pytest.approx(expected, rel=0.02)


def test_momentum_moves_like_an_lr_of_one_over_one_minus_beta() -> None:
    """Its bias without noise: the slower root of r^2 - (1 + b - lr h) r + b, to which exp(-lr h / (1 - b)) is near."""
    world = replace(STATIONARY, gradient="quadratic", noise=0.0, steps=400)
    lr, beta = 1e-4, 0.9
    risks = run_lanes(world, [Lane(f"sgd(momentum={beta})", lr)], [0], threads=1).values[0, 0, :, :, RISK]
    slow = (1 + beta - lr + math.sqrt((1 + beta - lr) ** 2 - 4 * beta)) / 2
    factor = np.sqrt(risks[:, -1] / risks[:, 9]) ** (1 / 200)
    np.testing.assert_allclose(factor, slow, rtol=1e-6)
    assert math.log(slow) == pytest.approx(-lr / (1 - beta), rel=0.02)


def test_a_lane_knows_nothing_of_the_others_nor_of_threads() -> None:
    world = replace(SMALL, activity=0.6, drift=0.01)
    lanes = [Lane(r, lr) for r in ("mesh", "adamw", "sinkgd(alpha=1.0)") for lr in (0.003, 0.01, 100.0)]
    whole = run_lanes(world, lanes, [4, 9, 2], threads=2).values
    for at in (0, 5, 7):
        alone = run_lanes(world, [lanes[at]], [9], threads=1).values
        assert alone[0, 0].tobytes() == whole[at, 1].tobytes()


def test_seeds_and_experts_differ() -> None:
    risks = run_lanes(SMALL, [Lane("sgd", 0.1)], [0, 1, 1 << 40], threads=1).values[0, :, :, -1, RISK]
    assert np.unique(risks).size == risks.size


def test_a_run_that_diverges_stays_in_the_table() -> None:
    values = run_lanes(replace(SMALL, steps=2000), [Lane("sgd", 50.0), Lane("sgd", 0.01)], [0], threads=1).values
    assert not np.isfinite(values[0, 0, :, -1, RISK]).any()
    assert np.isfinite(values[1, 0, :, -1, RISK]).all()


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (1, 6), (6, 1)])
def test_stable_rank_is_that_of_the_singular_values(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal(shape)
    x[0] *= 5
    values = np.linalg.svd(x, compute_uv=False)
    found = stable_rank(x, np.empty(shape[0]), np.empty(shape[1]))
    assert found == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-6)
    assert math.isnan(stable_rank(np.zeros(shape), np.empty(shape[0]), np.empty(shape[1])))


def test_normal_numbers_are_normal() -> None:
    out, words = np.empty(200_000), np.empty(200_000, np.uint32)
    normals(1, 2, 3, 4, words, out)
    assert abs(out.mean()) < 0.01
    assert out.var() == pytest.approx(1, rel=0.01)
    assert (out**4).mean() == pytest.approx(3, rel=0.03)
    assert abs(np.corrcoef(out[0::2], out[1::2])[0, 1]) < 0.01


def test_a_rule_that_cannot_be_simulated_says_so() -> None:
    with pytest.raises(GradreelError, match="stage factored_second_moment cannot be simulated; allowed: hidden_ema"):
        program("skewadam", 4, 4)
    with pytest.raises(GradreelError, match="m <= n"):
        program("muon", 5, 4)
