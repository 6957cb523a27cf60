"""Every recipe against a second implementation: float64, numpy, one matrix at a time, written from the formulas.

At each step the reference starts from the recipe's own float32 state and weight, so differences do not add up; over
20 steps it also runs on its own. Gradients are None, zero and 1000 times too large in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.recipes import RECIPES, Stepper
from toolkit.stages._rng import CounterRng
from toolkit.variants import recipe
from traces.views import ParamInfo

Array = np.ndarray
State = dict[str, Array]
#: (weight, gradient, state, step, lr) -> new weight; state changes in place.
Rule = Callable[[Array, Array, State, int, float], Array]


def rms(x: Array) -> float:
    return math.sqrt(float(np.mean(x * x)))


def sinkhorn(x: Array, sweeps: int = 5) -> Array:
    for _ in range(sweeps):
        norms = np.sqrt((x * x).mean(1, keepdims=True))
        x = np.divide(x, norms, out=np.zeros_like(x), where=norms > 0)
        norms = np.sqrt((x * x).mean(0, keepdims=True))
        x = np.divide(x, norms, out=np.zeros_like(x), where=norms > 0)
    return x


def over_rms(x: Array) -> Array:
    return x / rms(x) if x.any() else x


def adam_update(g: Array, s: State, t: int, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Array:
    s["momentum"][...] = b1 * s["momentum"] + (1 - b1) * g
    s["second_moment"][...] = b2 * s["second_moment"] + (1 - b2) * g * g
    return s["momentum"] / (1 - b1**t) / (np.sqrt(s["second_moment"] / (1 - b2**t)) + eps)


def adam(decay: float = 0.0, scale: float = 1.0) -> Rule:
    # A float32 weight is multiplied by a float32 factor: that number, not 1 - lr wd, is what the rule decays by.
    return lambda w, g, s, t, lr: w * float(np.float32(1 - lr * scale * decay)) - lr * scale * adam_update(g, s, t)


def skewadam(momentum: bool, factored: bool, decay: float, b1: float = 0.9, b2: float = 0.999) -> Rule:
    def rule(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
        c1, c2 = 1 - b1**t, 1 - b2**t
        if factored:
            s["row_moment"][...] = b2 * s["row_moment"] + (1 - b2) * (g * g).mean(1)
            s["column_moment"][...] = b2 * s["column_moment"] + (1 - b2) * (g * g).mean(0)
            mean = s["row_moment"].mean()
            v = np.outer(s["row_moment"] / (mean if mean else 1.0), s["column_moment"] / c2)
        else:
            s["second_moment"][...] = b2 * s["second_moment"] + (1 - b2) * g * g
            v = s["second_moment"] / c2
        numerator = g
        if momentum:
            s["momentum"][...] = b1 * s["momentum"] + (1 - b1) * g
            numerator = s["momentum"] / c1
        u = numerator / (np.sqrt(v) + 1e-8)
        return w * (1 - lr * decay) - lr * u / max(1.0, rms(u))

    return rule


def plain(direction: Callable[[Array], Array], scale: float = 1.0, decay: float = 0.0) -> Rule:
    return lambda w, g, s, t, lr: w * (1 - lr * scale * decay) - lr * scale * direction(g)


def sage(scale: float = 2.0, decay: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-8) -> Rule:
    def rule(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
        size = np.abs(g).mean(0)
        s["column_magnitude"][...] = b2 * s["column_magnitude"] + (1 - b2) * size
        smooth = s["column_magnitude"] / (1 - b2**t)
        damping = np.minimum(np.minimum(rms(smooth) / (smooth + eps), rms(size) / (size + eps)), 1.0)
        sign = np.sign(b1 * s["momentum"] + (1 - b1) * g)
        s["momentum"][...] = b2 * s["momentum"] + (1 - b2) * g
        return (1 - lr * scale * decay) * w - lr * scale * sign * damping

    return rule


def mesh(w: Array, g: Array, s: State, t: int, lr: float, beta: float = 0.9) -> Array:
    total = s["buffer"] + g
    s["buffer"][...] = beta * total
    return w - lr * sinkhorn(total)


def mesh_b(w: Array, g: Array, s: State, t: int, lr: float, beta: float = 0.9, b2: float = 0.99) -> Array:
    total = s["buffer"] + g
    s["buffer"][...] = beta * total
    s["block_moment"][...] = b2 * s["block_moment"] + (1 - b2) * (total * total).mean(1)
    live = s["block_moment"] > 0
    inverse = np.where(live, 1 / np.sqrt(np.where(live, s["block_moment"], 1.0)), 1.0)
    if live.any():
        inverse[live] /= rms(inverse[live])
    return w - lr * sinkhorn(total) * inverse[:, None]


def full_state(w: Array, g: Array, s: State, t: int, lr: float, beta: float = 0.9) -> Array:
    s["momentum"][...] = beta * s["momentum"] + (1 - beta) * g
    return w - lr * sinkhorn(s["momentum"])


def sinkhorn_of_adam(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
    return w - lr * sinkhorn(adam_update(g, s, t))


def then_momentum(normalise: Callable[[Array], Array], beta: float = 0.9) -> Rule:
    def rule(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
        s["momentum"][...] = beta * s["momentum"] + (1 - beta) * normalise(g)
        return w - lr * s["momentum"]

    return rule


def sink_v(normalise: Callable[[Array], Array], beta: float = 0.9) -> Rule:
    def rule(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
        squares = s["momentum"] ** 2
        if g.ndim == 2:
            noise = np.sqrt(np.outer(1 - squares.mean(1), 1 - squares.mean(0)))
        else:
            noise = 1 - np.full(g.shape, squares.mean())
        s["momentum"][...] = beta * s["momentum"] + (1 - beta) * normalise(g)
        return w - lr * 4 / math.pi * np.arctan(s["momentum"] / noise)

    return rule


def muon(w: Array, g: Array, s: State, t: int, lr: float, mu: float = 0.95, decay: float = 0.01) -> Array:
    s["momentum"][...] = mu * s["momentum"] + g
    x = g + mu * s["momentum"]
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    x = x.T if turned else x
    return w * (1 - lr * decay) - lr * x * math.sqrt(max(1.0, x.shape[0] / x.shape[1]))


def lion(w: Array, g: Array, s: State, t: int, lr: float, b1: float = 0.9, b2: float = 0.99) -> Array:
    update = np.sign(b1 * s["momentum"] + (1 - b1) * g)
    s["momentum"][...] = b2 * s["momentum"] + (1 - b2) * g
    return w * (1 - lr * 0.01) - lr * update


def adafactor(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
    beta, squares = 1 - t**-0.8, g * g + 1e-30
    if g.ndim == 2:
        s["row_moment"][...] = beta * s["row_moment"] + (1 - beta) * squares.mean(1)
        s["column_moment"][...] = beta * s["column_moment"] + (1 - beta) * squares.mean(0)
        v = np.outer(s["row_moment"], s["column_moment"]) / s["row_moment"].mean()
    else:
        s["second_moment"][...] = beta * s["second_moment"] + (1 - beta) * squares
        v = s["second_moment"]
    u = g / np.sqrt(v)
    return w - lr * u / max(1.0, rms(u))


def sgd(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
    return w - lr * g


def galore(rank: int, refresh: int) -> Rule:
    def rule(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
        short = g if g.shape[0] <= g.shape[1] else g.T
        key = "row_basis" if short is g else "column_basis"
        if (t - 1) % refresh == 0:
            basis = np.linalg.svd(short, full_matrices=False)[0][:, :rank]
            # A singular vector's sign is free; follow the one in use.
            s[key][...] = basis * np.where((basis * s["next_basis"]).sum(0) < 0, -1.0, 1.0)
        projected = s[key].T @ short
        update = adam_update(projected, s, t) if short is g else adam_update(projected.T, s, t).T
        lifted = s[key] @ update
        return w - lr * 0.25 * (lifted if short is g else lifted.T)

    return rule


def apollo(rank: int, growth: float = 1.01) -> Rule:
    def rule(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
        short = g if g.shape[0] <= g.shape[1] else g.T
        size = short.shape[0]
        rank_here = min(rank, size)
        u, v = CounterRng(0, (t - 1) // 200, "p/apollo").uniform((2, rank_here * size)).double().numpy()
        normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
        projected = (normal / math.sqrt(rank_here)).reshape(rank_here, size) @ short
        step = adam_update(projected, s, t)
        norms = np.linalg.norm(projected, axis=0)
        factor = np.divide(np.linalg.norm(step, axis=0), norms, out=np.zeros_like(norms), where=norms > 0)
        update = short * factor
        norm, last = float(np.linalg.norm(update)), float(s["last_norm"])
        if last > 0 and norm > growth * last:
            update, norm = update * growth * last / norm, growth * last
        if norm:
            s["last_norm"][...] = norm
        return w - lr * (update if short is g else update.T)

    return rule


ADAM, SINKHORN, VECTOR, SAGE = adam(), plain(sinkhorn), plain(over_rms), sage()
#: recipe name -> rules for: expert, backbone matrix, vocabulary, router, vector.
RULES: dict[str, tuple[Rule, Rule, Rule, Rule, Rule]] = {
    "adamw": (adam(0.01),) * 5,
    "sgd": (sgd,) * 5,
    "lion": (lion,) * 5,
    "skewadam": (
        skewadam(False, True, 0.05),
        skewadam(True, True, 0.05),
        skewadam(True, True, 0.05),
        skewadam(False, False, 0.0),
        skewadam(True, False, 0.0),
    ),
    "sinkgd": (plain(sinkhorn, 0.05), plain(sinkhorn, 0.05), adam(scale=0.05), adam(scale=0.05), adam(scale=0.05)),
    "mesh": (mesh, SINKHORN, SAGE, SINKHORN, VECTOR),
    "mesh_b": (mesh_b, SINKHORN, SAGE, SINKHORN, VECTOR),
    "sage_sinkhorn": (SINKHORN, SINKHORN, SAGE, SINKHORN, VECTOR),
    "mesh_full_state": (full_state, SINKHORN, SAGE, SINKHORN, VECTOR),
    "mesh_full_state(experts=adam)": (ADAM, SINKHORN, SAGE, SINKHORN, VECTOR),
    "mesh_full_state(experts=sinkhorn_of_adam)": (sinkhorn_of_adam, SINKHORN, SAGE, SINKHORN, VECTOR),
    "normalise_then_momentum": (*(then_momentum(sinkhorn),) * 4, then_momentum(over_rms)),
    "sink_v": (*(sink_v(sinkhorn),) * 4, sink_v(over_rms)),
    "muon": (muon, muon, adam(0.01, 0.05), adam(0.01, 0.05), adam(0.01, 0.05)),
    "adafactor": (adafactor,) * 5,
    "galore(rank=2, refresh=3)": (*(galore(2, 3),) * 4, adam(scale=0.1)),
    "apollo(rank=2)": (*(apollo(2),) * 4, adam(scale=0.1)),
}
#: Of max |delta|: matrix products in float32 and singular vectors are less exact than sums.
TOLERANCE = {"muon": 1e-5, "galore(rank=2, refresh=3)": 1e-5}
INFOS = {
    "experts": ParamInfo("p", "routed_expert", (3, 6, 4), expert_axis=0, num_experts=3, matrix_axes=(1, 2)),
    "experts wide": ParamInfo("p", "routed_expert", (3, 4, 6), expert_axis=0, num_experts=3, matrix_axes=(1, 2)),
    "experts turned": ParamInfo("p", "routed_expert", (3, 4, 6), expert_axis=0, num_experts=3, matrix_axes=(2, 1)),
    "matrix": ParamInfo("p", "attention", (6, 5), matrix_axes=(0, 1)),
    "vocabulary": ParamInfo("p", "embedding", (12, 5), matrix_axes=(0, 1)),
    "router": ParamInfo("p", "router", (3, 5), matrix_axes=(0, 1)),
    "vector": ParamInfo("p", "norm", (7,)),
    "4-D": ParamInfo("p", "other", (2, 2, 5, 4), matrix_axes=(2, 3)),
}
ROW = {"experts": 0, "experts wide": 0, "experts turned": 0, "vocabulary": 2, "router": 3, "vector": 4}
STEPS = 20


def gradient_at(info: ParamInfo, step: int) -> torch.Tensor | None:
    gradient = torch.randn(info.shape, generator=torch.Generator().manual_seed(step))
    if step % 7 == 4:
        return None
    if step % 7 == 5:
        return torch.zeros_like(gradient)
    return gradient * (1000.0 if step == 9 else 1.0)


def matrices(tensor: torch.Tensor, info: ParamInfo) -> list[Array]:
    """The matrices (or the vector) of a parameter, float64, rows first."""
    if info.matrix_axes is None:
        return [tensor.double().numpy().copy()]
    wide = tensor.double().movedim(info.matrix_axes, (-2, -1))
    return [m.numpy().copy() for m in (wide.flatten(0, -3) if wide.dim() > 2 else wide[None])]


def states(stepper: Stepper, count: int) -> list[State]:
    """The slots of each matrix, float64."""
    result: list[State] = [{} for _ in range(count)]
    for key, slot in stepper.state.items():
        if key != "step":
            lead = stepper.layout.permuted[:-2] if stepper.info.matrix_axes else ()
            rows = slot.double().reshape(count, *slot.shape[len(lead) :])
            for state, row in zip(result, rows, strict=True):
                state[key] = row.numpy().copy()
    return result


def test_every_recipe_has_a_reference() -> None:
    assert {name.split("(")[0] for name in RULES} == set(RECIPES.names())


@pytest.mark.parametrize("shape", INFOS)
@pytest.mark.parametrize("name", RULES)
def test_against_float64(name: str, shape: str) -> None:
    info, built = INFOS[shape], recipe(name)
    rule = RULES[name][ROW.get(shape, 1)]
    stepper = Stepper(built, info)
    weight = torch.randn(info.shape, generator=torch.Generator().manual_seed(99))
    long_run = [m.copy() for m in matrices(weight, info)]
    count, long_state, taken = len(long_run), states(stepper, len(long_run)), 0
    bound = TOLERANCE.get(name, 1e-6)
    for step in range(STEPS):
        gradient, before = gradient_at(info, step), matrices(weight, info)
        given = states(stepper, count)
        stepper.step(weight, gradient, lr=built.lr)
        after = matrices(weight, info)
        if gradient is None:
            assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
            continue
        taken += 1
        reached = states(stepper, count)
        for i, g in enumerate(matrices(gradient, info)):
            for state in (given[i], long_state[i]):
                bases = [k for k in ("row_basis", "column_basis") if k in reached[i] and reached[i][k].size]
                if bases:
                    state["next_basis"] = reached[i][bases[0]]
            want = rule(before[i], g, given[i], taken, built.lr)
            delta = np.abs(want - before[i]).max()
            ulp = np.spacing(np.abs(before[i]).max().astype(np.float32))
            assert np.abs(after[i] - want).max() <= bound * delta + ulp, f"step {step + 1}, matrix {i}"
            long_run[i] = rule(long_run[i], g, long_state[i], taken, built.lr)
    for mine, other in zip(matrices(weight, info), long_run, strict=True):
        assert np.abs(mine - other).max() <= 3 * bound * np.abs(other).max()


def test_muon_against_torch() -> None:
    torch.manual_seed(0)
    for scale, name in (("original", "original"), ("match_rms_adamw", "match_rms_adamw")):
        parameter = torch.nn.Parameter(torch.randn(12, 8))
        start, weight = parameter.detach().clone(), parameter.detach().clone()
        theirs = torch.optim.Muon([parameter], lr=0.02, weight_decay=0.01, adjust_lr_fn=name)
        info = ParamInfo("p", "attention", (12, 8), matrix_axes=(0, 1))
        stepper = Stepper(recipe("muon", scale=scale, dtype="bfloat16", weight_decay=0.01), info)
        for _ in range(10):
            parameter.grad = torch.randn(12, 8)
            theirs.step()
            stepper.step(weight, parameter.grad, lr=0.02)
        # Products in bfloat16, taken in another order (theirs normalises in bfloat16 as well).
        path, apart = (parameter.detach() - start).norm(), (parameter.detach() - weight).norm()
        assert float(apart / path) <= 3e-2


def test_full_state_momentum_is_mesh() -> None:
    info = INFOS["experts"]
    results: list[Any] = []
    for name in ("mesh", "mesh_full_state"):
        stepper, weight = Stepper(recipe(name), info), torch.zeros(info.shape)
        for step in range(4):
            stepper.step(weight, gradient_at(info, step), lr=1e-3)
        results.append(weight)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
