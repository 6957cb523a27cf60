"""Gradient metrics against loops over experts and pairs in float64, on friendly and hostile streams."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from toolkit.metrics import METRICS, Subject
from toolkit.metrics._experts import experts_of, shared
from traces.views import NONE, NONZERO, ZERO, ParamInfo, StepView

LAGS = (1, 2, 5)
STACKED = ParamInfo("w", "routed_expert", (4, 6, 5), layer=0, expert_axis=0, num_experts=4, matrix_axes=(1, 2))
MIDDLE = replace(STACKED, shape=(6, 4, 5), expert_axis=1, matrix_axes=(0, 2))
DENSE = ParamInfo("d", "attention", (6, 5), layer=0, matrix_axes=(0, 1))
VECTOR = ParamInfo("v", "norm", (7,), layer=0)
SCALAR = ParamInfo("s", "other", ())


def gradients(kind: str) -> tuple[ParamInfo, list[StepView]]:
    rng = np.random.default_rng(sum(map(ord, kind)))
    info = {"dense": DENSE, "vector": VECTOR, "scalar": SCALAR, "middle": MIDDLE}.get(kind, STACKED)
    steps = {"single": [7], "bursts": [1, 2, 3, 4, 9, 10, 11, 12]}.get(kind, list(range(1, 13)))
    scale = {"tiny": 1e-30, "denormal": 1e-44, "huge": 1e37}.get(kind, 1.0)
    drift = rng.normal(size=info.shape)
    views = []
    for step in steps:
        values = (rng.normal(size=info.shape) + 0.5 * drift) * scale
        presence = None
        if kind == "idle":
            values[rng.random(4) < 0.5] = 0
            values[2] = 0
            presence = np.where(np.abs(values).reshape(4, -1).sum(1) > 0, NONZERO, ZERO).astype(np.uint8)
        if kind == "nan" and step in (3, 4):
            values[1, 0, 0] = np.nan
        if kind == "broken":
            values[1, 0, 0] = np.inf
        gradient = torch.tensor(values, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        view = StepView(step, info, layer=0, gradient=gradient, presence=presence)
        if kind == "subset":
            view.experts = np.array([3, 0] if step in (5, 6) else [3, 1])
            view.gradient = gradient[torch.as_tensor(view.experts)]
        if kind == "none" and step % 3 == 0:
            view.gradient, view.presence = None, np.full(4, NONE, np.uint8)
        views.append(view)
    return info, views


PLAIN = ("random", "idle", "none", "nan", "broken", "single", "bursts", "subset")
KINDS = (*PLAIN, "tiny", "denormal", "huge", "bf16", "middle", "dense", "vector", "scalar")


def by_expert(info: ParamInfo, view: StepView, expert: int) -> np.ndarray | None:
    """One expert's gradient as a flat float64 array; None if there is none."""
    if view.gradient is None:
        return None
    values = view.gradient.double().numpy()
    if info.expert_axis is None:
        return values.reshape(-1)
    ids = list(range(experts_of(info))) if view.experts is None else list(view.experts)
    return np.take(values, ids.index(expert), info.expert_axis).reshape(-1) if expert in ids else None


def run(name: str, info: ParamInfo, views: list[StepView], lags: tuple[int, ...] = LAGS, share: bool = True):
    metric = METRICS.get(name)
    state = metric.init(Subject(info, info.layer, experts_of(info), lags if metric.lags else ()))
    out = [m for view in views for m in metric.update(state, shared(view) if share else view) or ()]
    return out, list(metric.result(state))


def agree(measured, expected: list[float | None], **kwargs: float) -> None:
    """Expected None: undefined; inf: not finite; else a number."""
    wanted = np.array([np.nan if value is None else value for value in expected])
    np.testing.assert_allclose(measured, wanted, **{"rtol": 1e-9, "atol": 1e-12, **kwargs})


def pairs(info: ParamInfo, views: list[StepView], expert: int, lag: int):
    """Every pair of gradients `lag` steps apart with all steps between them recorded."""
    steps = {view.step: view for view in views}
    for view in views:
        if all(view.step - back in steps for back in range(lag + 1)):
            yield by_expert(info, view, expert), by_expert(info, steps[view.step - lag], expert)


def cos(a: np.ndarray, b: np.ndarray) -> float | None:
    if a is None or b is None:
        return None
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return np.inf
    na, nb = np.sqrt((a / abs(a).max()) @ (a / abs(a).max())) if a.any() else 0, np.linalg.norm(b)
    if na == 0 or nb == 0:
        return None
    unit_a, unit_b = a / abs(a).max(), b / abs(b).max()
    return float(unit_a @ unit_b / np.sqrt(unit_a @ unit_a) / np.sqrt(unit_b @ unit_b))


def flips(a: np.ndarray, b: np.ndarray) -> tuple[int, int] | None:
    if a is None or b is None or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    count = [(x > 0) != (y > 0) for x, y in zip(a, b, strict=True) if x != 0 and y != 0]
    return sum(count), len(count)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_grad_norm(kind: str, share: bool) -> None:
    info, views = gradients(kind)
    steps, final = run("grad_norm", info, views, share=share)
    assert not final
    for view, measure in zip(views, steps, strict=True):
        expected = []
        for expert in range(experts_of(info)):
            g = by_expert(info, view, expert)
            if g is None:
                expected.append(None)
            elif not np.isfinite(g).all():
                expected.append(np.inf)
            else:
                top = np.abs(g).max()
                expected.append(np.sqrt(((g / top) ** 2).sum()) * top if top else 0.0)
        agree(measure.value, expected, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_grad_cos(kind: str) -> None:
    info, views = gradients(kind)
    steps, final = run("grad_cos", info, views)
    assert [m.step for m in steps] == [v.step for v in views]
    assert {m.lag for m in steps} == {1}
    for measure, lag in zip(final, LAGS, strict=True):
        expected, support = [], []
        for expert in range(experts_of(info)):
            values = [v for a, b in pairs(info, views, expert, lag) if (v := cos(a, b)) is not None]
            good = [v for v in values if np.isfinite(v)]
            expected.append(np.mean(good) if good else (np.inf if values else None))
            support.append(len(good))
        agree(measure.value, expected)
        assert list(measure.support) == support
    for view, measure in zip(views, steps, strict=True):
        near = [v for v in views if v.step in (view.step, view.step - 1)]
        expected = []
        for expert in range(experts_of(info)):
            found = list(pairs(info, near, expert, 1))
            expected.append(cos(*found[0]) if found else None)
        agree(measure.value, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_sign_flip_rate(kind: str) -> None:
    info, views = gradients(kind)
    steps, final = run("sign_flip_rate", info, views)
    for measure, lag in zip(final, LAGS, strict=True):
        for expert in range(experts_of(info)):
            counts = [f for a, b in pairs(info, views, expert, lag) if (f := flips(a, b)) is not None]
            flipped, compared = (sum(c) for c in zip(*counts, strict=True)) if counts else (0, 0)
            assert measure.support[expert] == compared
            if compared:
                assert measure.value[expert] == pytest.approx(flipped / compared, abs=1e-12)
            else:
                assert not np.isfinite(measure.value[expert])
    for measure in steps:
        assert (measure.support[~np.isfinite(measure.value)] == 0).all()
    assert [m.step for m in steps] == [v.step for v in views]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gradient_snr", "coherence"])
def test_moments(kind: str, name: str) -> None:
    info, views = gradients(kind)
    steps, (measure,) = run(name, info, views)
    assert not steps
    for expert in range(experts_of(info)):
        every = [g for v in views if (g := by_expert(info, v, expert)) is not None and (g != 0).any()]
        good = [g for g in every if np.isfinite(g).all()]
        assert measure.support[expert] == len(good)
        needed = 2 if name == "gradient_snr" else 1
        if len(good) < needed:
            wanted = np.inf if len(every) > len(good) else np.nan
            np.testing.assert_equal(measure.value[expert], wanted)
            continue
        table = np.stack(good) / np.abs(np.stack(good)).max()
        mean = table.mean(axis=0)
        if name == "coherence":
            wanted = (mean**2).sum() / (table**2).sum(axis=1).mean()
        else:
            wanted = (mean**2).sum() / table.var(axis=0, ddof=1).sum()
        assert measure.value[expert] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_burstiness(kind: str) -> None:
    info, views = gradients(kind)
    _, (measure,) = run("burstiness", info, views)
    for expert in range(experts_of(info)):
        intervals, last, before = [], None, None
        for view in views:
            g = by_expert(info, view, expert)
            gap = before is not None and view.step != before + 1
            not_recorded = view.experts is not None and expert not in view.experts
            last, before = (None if gap or not_recorded else last), view.step
            if g is not None and (g != 0).any():
                intervals += [] if last is None else [view.step - last]
                last = view.step
        assert measure.support[expert] == len(intervals)
        wanted = None
        if len(intervals) >= 2:
            wanted = (np.std(intervals) - np.mean(intervals)) / (np.std(intervals) + np.mean(intervals))
        agree(measure.value[expert], [wanted])


def test_presence_decides_what_is_idle() -> None:
    """A slice of zeros has norm 0 and no direction; a None gradient has neither."""
    zero = StepView(1, STACKED, gradient=torch.zeros(4, 6, 5), presence=np.full(4, ZERO, np.uint8))
    none = StepView(2, STACKED, gradient=None, presence=np.full(4, NONE, np.uint8))
    (first, second), _ = run("grad_norm", STACKED, [zero, none])
    assert (first.value == 0).all()
    assert np.isnan(second.value).all()
    _, (lag, *_) = run("grad_cos", STACKED, [zero, replace(zero, step=2), none, replace(none, step=4)])
    assert np.isnan(lag.value).all()
    assert (lag.support == 0).all()


def test_ar1_has_cosine_rho_to_the_lag() -> None:
    info = ParamInfo("w", "routed_expert", (3, 4000), expert_axis=0, num_experts=3)
    rng, rho, views = np.random.default_rng(0), 0.8, []
    g = rng.normal(size=info.shape)
    for step in range(1, 61):
        views.append(StepView(step, info, gradient=torch.tensor(g, dtype=torch.float32)))
        g = rho * g + np.sqrt(1 - rho**2) * rng.normal(size=info.shape)
    _, final = run("grad_cos", info, views, lags=(1, 2, 4, 8))
    for measure in final:
        np.testing.assert_allclose(measure.value, rho**measure.lag, atol=0.02)
    _, final = run("sign_flip_rate", info, views, lags=(1, 2, 4, 8))
    for measure in final:  # Sheppard: two normals of correlation r differ in sign with probability acos(r) / pi
        np.testing.assert_allclose(measure.value, np.arccos(rho**measure.lag) / np.pi, atol=0.01)


def test_constant_gradient_is_coherent_and_has_no_noise() -> None:
    g = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    views = [StepView(step, STACKED, gradient=g) for step in range(1, 30)]
    assert run("coherence", STACKED, views)[1][0].value == pytest.approx(np.ones(4), rel=1e-12)
    assert np.isnan(run("gradient_snr", STACKED, views)[1][0].value).all()
    assert (run("burstiness", STACKED, views)[1][0].value == -1).all()


def noise_views(micro_tokens: bool, steps: int = 400) -> tuple[list[StepView], np.ndarray]:
    """Sums over b tokens of (signal + noise per token): the noise scale is noise variance over signal power."""
    rng = np.random.default_rng(3)
    signal, sigma = rng.normal(size=(4, 30)), np.array([0.5, 1.0, 2.0, 3.0])
    views = []
    for step in range(1, steps + 1):
        tokens = rng.integers(1, 9, size=(4, 4)) if micro_tokens else np.full((4, 4), 5)
        parts = np.empty((4, 4, 30))
        for m in range(4):
            noise = rng.normal(size=(4, 30)) * sigma[:, None]
            parts[m] = tokens[m][:, None] * signal + np.sqrt(tokens[m])[:, None] * noise
        gradient = torch.tensor(parts.sum(0).reshape(4, 6, 5) / 64, dtype=torch.float64)
        view = StepView(step, STACKED, gradient=gradient, tokens_per_expert=tokens.sum(0))
        view.micro_norms = (parts**2).sum(-1) / 64**2
        view.micro_tokens = tokens if micro_tokens else None
        views.append(view)
    return views, 30 * sigma**2 / (signal**2).sum(1)


@pytest.mark.parametrize("micro_tokens", [True, False])
def test_gradient_noise_scale_counts_routed_tokens(micro_tokens: bool) -> None:
    views, wanted = noise_views(micro_tokens)
    _, (measure,) = run("gradient_noise_scale", STACKED, views)
    np.testing.assert_allclose(measure.value, wanted, rtol=0.1)
    assert (measure.support == 400).all()


def test_gradient_noise_scale_of_one_step_by_hand() -> None:
    (view,), _ = noise_views(True, steps=1)
    _, (measure,) = run("gradient_noise_scale", STACKED, [view])
    for expert in range(4):
        b = view.micro_tokens[:, expert].astype(float)
        small = np.mean(view.micro_norms[:, expert] / b**2)
        big = float((view.gradient[expert] ** 2).sum()) / b.sum() ** 2
        noise = (small - big) / (np.mean(1 / b) - 1 / b.sum())
        assert measure.value[expert] == pytest.approx(noise / (big - noise / b.sum()), rel=1e-9)


def test_gradient_noise_scale_is_null_without_micro_norms_and_for_idle_experts() -> None:
    views, _ = noise_views(True, steps=20)
    for view in views:
        view.micro_tokens[:, 1], view.micro_norms[:, 1], view.gradient[1] = 0, 0, 0
        view.micro_tokens[1:, 2], view.micro_norms[1:, 2] = 0, 0
    _, (measure,) = run("gradient_noise_scale", STACKED, views)
    assert np.isnan(measure.value[[1, 2]]).all(), "no token, and all tokens in one micro-step"
    assert np.isfinite(measure.value[[0, 3]]).all()
    for view in views:
        view.micro_norms = None
    _, (measure,) = run("gradient_noise_scale", STACKED, views)
    assert np.isnan(measure.value).all()
    assert (measure.support == 0).all()


def test_history_is_kept_in_the_recorded_dtype() -> None:
    """Per element and lag: two bytes of bfloat16 for cosines, two bits for signs."""
    info, views = gradients("bf16")
    for name in ("grad_cos", "sign_flip_rate"):
        metric = METRICS.get(name)
        state = metric.init(Subject(info, 0, 4, (1, 2)))
        for view in views:
            list(metric.update(state, view))
        newest = state.ring.items[-1]
        assert len(state.ring.items) == 2
        if name == "grad_cos":
            assert newest.tensor.dtype == torch.bfloat16
            assert newest.tensor.untyped_storage().nbytes() == 2 * 4 * 30
        else:
            assert newest.positive.nbytes == newest.negative.nbytes == 4 * 8
