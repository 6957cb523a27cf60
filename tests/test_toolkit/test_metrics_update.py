"""Update, trajectory and cost metrics against float64 loops, on friendly and hostile streams."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from toolkit.metrics import METRICS, Subject
from toolkit.metrics._experts import experts_of, shared
from toolkit.metrics.stable_rank import EVERY, spectral_squares
from traces.views import NONE, NONZERO, ZERO, ParamInfo, StepView

STACKED = ParamInfo("w", "routed_expert", (4, 6, 5), layer=0, expert_axis=0, num_experts=4, matrix_axes=(1, 2))
MIDDLE = replace(STACKED, shape=(6, 4, 5), expert_axis=1, matrix_axes=(0, 2))
DENSE = ParamInfo("d", "attention", (6, 5), layer=0, matrix_axes=(0, 1))
VECTOR = ParamInfo("v", "norm", (7,), layer=0)
KINDS = ["random", "idle", "none", "nan", "single", "bursts", "tiny", "subset", "middle", "dense", "vector"]


def updates(kind: str) -> tuple[ParamInfo, list[StepView]]:
    """A made-up optimizer: the update is a noisy momentum, the weight follows it; the reference is another one."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    info = {"dense": DENSE, "vector": VECTOR, "middle": MIDDLE}.get(kind, STACKED)
    steps = {"single": [3], "bursts": [1, 2, 3, 8, 9, 10]}.get(kind, list(range(1, 11)))
    scale = 1e-25 if kind == "tiny" else 1.0
    weight = rng.normal(size=info.shape)
    other, start, momentum = weight.copy(), weight.copy(), np.zeros(info.shape)
    views = []
    for step in steps:
        gradient = rng.normal(size=info.shape) * scale
        idle = np.zeros(4, dtype=bool)
        if kind == "idle":
            idle = rng.random(4) < 0.5
            idle[0], idle[3] = True, False
            gradient[idle] = 0
        momentum = 0.5 * momentum + gradient
        if kind == "idle":
            momentum[1] *= not idle[1]
        delta, reference = -0.1 * momentum, gradient + 0.1 * scale
        if kind == "nan" and step >= 5:
            momentum[2, 0, 0] = delta[2, 0, 0] = np.nan
        view = StepView(step, info, layer=0, lr=0.1, tokens_per_expert=rng.integers(0, 9, 4))
        view.presence = np.where(idle, ZERO, NONZERO).astype(np.uint8) if info.expert_axis is not None else None
        tensors = {"gradient": gradient, "weight": weight, "update": momentum, "delta": delta}
        tensors |= {"reference_update": reference, "initial_weight": start, "reference_weight": other}
        for name, values in tensors.items():
            setattr(view, name, torch.tensor(values, dtype=torch.float64 if kind == "tiny" else torch.float32))
        if kind == "subset":
            view.experts = np.array([3, 1])
            for name in tensors:
                setattr(view, name, getattr(view, name)[torch.tensor([3, 1])])
        if kind == "none" and step % 4 == 0:
            view.gradient = view.update = view.delta = view.reference_update = None
            view.presence = np.full(4, NONE, np.uint8)
            delta, reference = 0.0, 0.0
        views.append(view)
        weight, other = weight + delta, other - 0.1 * reference
    return info, views


def of(view: StepView, field: str, expert: int) -> np.ndarray | None:
    """One expert's slice as float64 with its own axes kept; None if there is none."""
    tensor = getattr(view, field)
    if tensor is None or view.param is None:
        return None
    values = tensor.double().numpy()
    if view.param.expert_axis is None:
        return values
    ids = list(range(experts_of(view.param))) if view.experts is None else list(view.experts)
    return np.take(values, ids.index(expert), view.param.expert_axis) if expert in ids else None


def run(name: str, info: ParamInfo, views: list[StepView], lags: tuple[int, ...] = (1, 3), cost=None):
    metric = METRICS.get(name)
    state = metric.init(Subject(info, info.layer, experts_of(info), lags if metric.lags else (), cost))
    out = [m for view in views for m in metric.update(state, shared(view)) or ()]
    return out, list(metric.result(state))


def size(a: np.ndarray) -> float:
    return float(np.sqrt((a.astype(np.float64) ** 2).sum()))


def cos(a: np.ndarray, b: np.ndarray) -> float | None:
    return None if size(a) == 0 or size(b) == 0 else float((a * b).sum() / size(a) / size(b))


def angle(weight: np.ndarray, delta: np.ndarray) -> float:
    a, b = weight / size(weight), (weight + delta) / size(weight + delta)
    return 2 * float(np.arctan2(size(a - b), size(a + b)))


def stable_rank(update: np.ndarray) -> float | None:
    if update.ndim != 2 or size(update) == 0:
        return None
    return size(update) ** 2 / np.linalg.svd(update, compute_uv=False)[0] ** 2


def moved_while_idle(view: StepView, expert: int) -> float | None:
    gradient, delta = of(view, "gradient", expert), of(view, "delta", expert)
    return size(delta) if delta is not None and gradient is not None and not gradient.any() else None


BY_STEP = {
    "update_rms": (("update",), lambda u: float(np.sqrt((u**2).mean()))),
    "cos_to_gradient": (("update", "gradient"), cos),
    "cos_to_reference": (("update", "reference_update"), cos),
    "amplification": (("update", "gradient"), lambda u, g: size(u) / size(g) if size(g) else None),
    "relative_update": (("delta", "weight"), lambda d, w: size(d) / size(w)),
    "angular_update": (("weight", "delta"), angle),
    "drift_from_reference": (("weight", "reference_weight"), lambda w, r: size(w - r)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BY_STEP)
def test_step_by_step(name: str, kind: str) -> None:
    info, views = updates(kind)
    steps, _ = run(name, info, views)
    fields, formula = BY_STEP[name]
    # The loop's own angle cannot resolve less than a rounding of 1; everything else is exact at any scale.
    atol = 0.0 if kind == "tiny" and name != "angular_update" else 1e-9 if kind != "tiny" else 1e-15
    assert [m.step for m in steps] == [v.step for v in views]
    for view, measure in zip(views, steps, strict=True):
        for expert in range(experts_of(info)):
            given = [of(view, field, expert) for field in fields]
            wanted = None
            if all(g is not None for g in given):
                wanted = np.inf if any(np.isnan(g).any() for g in given) else formula(*given)
            np.testing.assert_allclose(
                measure.value[expert], np.nan if wanted is None else wanted, rtol=1e-7, atol=atol
            )


@pytest.mark.parametrize("kind", KINDS)
def test_stable_rank(kind: str) -> None:
    info, views = updates(kind)
    steps, _ = run("stable_rank", info, [replace(v, step=i) for i, v in enumerate([*views, *views, *views])])
    chosen = [*views, *views, *views][::EVERY]
    assert len(steps) == len(chosen)
    for view, measure in zip(chosen, steps, strict=True):
        for expert in range(experts_of(info)):
            u = of(view, "update", expert)
            wanted = None if u is None else (np.inf if np.isnan(u).any() else stable_rank(u))
            np.testing.assert_allclose(measure.value[expert], np.nan if wanted is None else wanted, rtol=1e-9)


@pytest.mark.parametrize("kind", ["random", "nan", "subset", "dense", "none"])
@pytest.mark.parametrize("name", [m.name for m in METRICS.all() if m.scope == "parameter" and m.group != "cost"])
def test_large_tensors_are_taken_in_pieces(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces of 8 elements every tensor here is a large one; the numbers stay the same."""
    info, views = updates(kind)
    views = [replace(view, initial_weight=None) for view in views]
    whole = run(name, info, views)
    monkeypatch.setattr("toolkit.metrics._experts.PIECE", 8)
    monkeypatch.setattr("toolkit.metrics.stable_rank.PIECE", 8)
    monkeypatch.setattr("toolkit.metrics._sums_cpu.usable", lambda *tensors: False)
    for part, one in zip(whole, run(name, info, views), strict=True):
        for a, b in zip(part, one, strict=True):
            np.testing.assert_allclose(b.value, a.value, rtol=1e-9, atol=1e-12)
            np.testing.assert_array_equal(b.support, a.support)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [True, False])
def test_trajectory(kind: str, given: bool) -> None:
    info, views = updates(kind)
    if not given:
        views = [replace(view, initial_weight=None) for view in views]
    _, (length,) = run("path_length", info, views)
    steps, (reached,) = run("displacement", info, views)
    _, (straight,) = run("straightness", info, views)
    for expert in range(experts_of(info)):
        start = of(views[0], "weight", expert)
        if start is None:
            assert np.isnan([length.value[expert], reached.value[expert], straight.value[expert]]).all()
            continue
        total, place = 0.0, start
        for view, measure in zip(views, steps, strict=True):
            delta = of(view, "delta", expert)
            place = of(view, "weight", expert) + (0 if delta is None else delta)
            total += 0.0 if delta is None else size(delta)
            want = size(place - start)
            atol = 1e-7 if kind == "tiny" else 1e-9
            np.testing.assert_allclose(
                measure.value[expert], want if np.isfinite(want) else np.inf, rtol=1e-6, atol=atol
            )
        finite = np.isfinite(total)
        np.testing.assert_allclose(length.value[expert], total if finite else np.inf, rtol=1e-9)
        assert reached.value[expert] == steps[-1].value[expert]
        if total == 0:
            assert np.isnan(straight.value[expert])
        elif finite and kind != "tiny":
            np.testing.assert_allclose(straight.value[expert], min(size(place - start) / total, 1), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_zombie_displacement(kind: str) -> None:
    info, views = updates(kind)
    steps, (final,) = run("zombie_displacement", info, views)
    for expert in range(experts_of(info)):
        moves = [moved_while_idle(view, expert) for view in views]
        for move, measure in zip(moves, steps, strict=True):
            np.testing.assert_allclose(measure.value[expert], np.nan if move is None else move, rtol=1e-9)
        known = [move for move in moves if move is not None]
        np.testing.assert_allclose(final.value[expert], sum(known) if known else np.nan, rtol=1e-9)
        assert final.support[expert] == len(known)


def test_a_skipped_idle_expert_is_no_zombie() -> None:
    """Momentum keeps moving an idle expert; `skip` does not. Expert 1 of the stream is stopped while idle."""
    info, views = updates("idle")
    _, (final,) = run("zombie_displacement", info, views)
    assert final.value[0] == 0, "never active, so without momentum"
    assert final.value[1] == 0, "stopped while idle: moved by exactly nothing, over a known number of steps"
    assert final.support[1] > 0
    assert final.value[2] > 0, "carried on by its momentum"
    assert np.isnan(final.value[3]), "never idle"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lag", [1, 3])
def test_lagged_updates(kind: str, lag: int) -> None:
    info, views = updates(kind)
    recorded = {view.step: view for view in views}
    _, cosines = run("update_cos", info, views, (1, 3))
    _, rates = run("update_sign_flip_rate", info, views, (1, 3))
    place = (1, 3).index(lag)
    for expert in range(experts_of(info)):
        values, flipped, compared = [], 0, 0
        for step in recorded:
            if not all(step - back in recorded for back in range(lag + 1)):
                continue
            a, b = of(recorded[step], "update", expert), of(recorded[step - lag], "update", expert)
            if a is None or b is None or np.isnan(a).any() or np.isnan(b).any():
                continue
            values += [] if cos(a, b) is None else [cos(a, b)]
            compared += int(((a != 0) & (b != 0)).sum())
            flipped += int((np.sign(a) == -np.sign(b))[(a != 0) & (b != 0)].sum())
        assert cosines[place].lag == rates[place].lag == lag
        assert cosines[place].support[expert] == len(values)
        assert rates[place].support[expert] == compared
        if values:
            np.testing.assert_allclose(cosines[place].value[expert], np.mean(values), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(rates[place].value[expert], flipped / compared, rtol=1e-12)
        else:
            assert not np.isfinite(cosines[place].value[expert])
            assert not np.isfinite(rates[place].value[expert])


def test_amplification_carries_the_tokens() -> None:
    info, views = updates("random")
    steps, _ = run("amplification", info, views)
    for view, measure in zip(views, steps, strict=True):
        assert (measure.support == view.tokens_per_expert).all()
    single = replace(DENSE, role="routed_expert", expert=2)
    view = StepView(1, single, update=torch.ones(6, 5), gradient=torch.ones(6, 5), tokens_per_expert=np.arange(4) * 10)
    assert run("amplification", single, [view])[0][0].support == [20]


def line(info: ParamInfo, moves: list[np.ndarray]) -> list[StepView]:
    weight, views = np.ones(info.shape), []
    for step, move in enumerate(moves, 1):
        views.append(StepView(step, info, weight=torch.tensor(weight), delta=torch.tensor(move)))
        weight = weight + move
    return views


def test_closed_forms() -> None:
    rng = np.random.default_rng(0)
    direction = rng.normal(size=(4, 6, 5))
    views = line(STACKED, [direction * k for k in (0.1, 0.5, 0.2)])
    np.testing.assert_allclose(run("straightness", STACKED, views)[1][0].value, 1.0, rtol=1e-12)
    there_and_back = line(STACKED, [direction, -direction])
    np.testing.assert_allclose(run("straightness", STACKED, there_and_back)[1][0].value, 0.0, atol=1e-12)
    standing = line(STACKED, [direction * 0, direction * 0])
    assert np.isnan(run("straightness", STACKED, standing)[1][0].value).all()
    assert (run("path_length", STACKED, standing)[1][0].value == 0).all()
    radial = line(STACKED, [np.full((4, 6, 5), 0.5)])
    np.testing.assert_allclose(run("angular_update", STACKED, radial)[0][0].value, 0.0, atol=1e-7)
    np.testing.assert_allclose(run("relative_update", STACKED, radial)[0][0].value, 0.5)
    turned = line(STACKED, [np.full((4, 6, 5), -2.0)])
    np.testing.assert_allclose(run("angular_update", STACKED, turned)[0][0].value, np.pi)


def test_small_angles_survive() -> None:
    weight = torch.zeros(4, 6, 5, dtype=torch.float64)
    weight[:, 0, 0] = 3.0
    delta = torch.zeros_like(weight)
    delta[:, 1, 1] = 3e-12
    view = StepView(1, STACKED, weight=weight, delta=delta)
    np.testing.assert_allclose(run("angular_update", STACKED, [view])[0][0].value, 1e-12, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_stable_rank_of_rank_one_and_of_orthogonal(scale: float) -> None:
    rng = np.random.default_rng(1)
    u = np.empty((4, 6, 5))
    u[0] = np.outer(rng.normal(size=6), rng.normal(size=5))
    u[1:3] = np.linalg.qr(rng.normal(size=(6, 5)))[0]
    u[3] = 0
    view = StepView(1, STACKED, update=torch.tensor(u * scale, dtype=torch.float32))
    np.testing.assert_allclose(run("stable_rank", STACKED, [view])[0][0].value, [1, 5, 5, np.nan], rtol=1e-5)


@pytest.mark.parametrize("flat", [True, False])
def test_spectral_norm_of_large_matrices_is_close(flat: bool) -> None:
    rng = np.random.default_rng(2)
    left, right = np.linalg.qr(rng.normal(size=(600, 520)))[0], np.linalg.qr(rng.normal(size=(520, 520)))[0]
    values = np.linspace(1.0, 0.5, 520) if flat else 1.0 / np.arange(1, 521)
    found = spectral_squares(torch.tensor((left * values) @ right.T)[None])
    np.testing.assert_allclose(found.sqrt().numpy(), 1.0, rtol=0.01)


def test_costs_are_what_the_optimizer_told() -> None:
    cost = {"state_bytes": 4096, "pinned_gradient_bytes": 0, "step_ms": 2.0}
    view = StepView(1, STACKED, update=torch.ones(4, 6, 5))
    assert run("state_bytes", STACKED, [view], cost=cost)[1][0].value == 4096
    assert run("pinned_gradient_bytes", STACKED, [view], cost=cost)[1][0].value == 0
    (time,) = run("step_ms", STACKED, [view, view], cost=cost)[1]
    assert (time.value, time.support) == (2.0, 2.0)
    assert np.isnan(run("state_bytes", STACKED, [view], cost={})[1][0].value)
    assert np.isnan(run("step_ms", STACKED, [view])[1][0].value)
