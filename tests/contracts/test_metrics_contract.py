"""What every metric must hold, over the whole registry, so that a new file is tested by being there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.frame import FLAGS
from toolkit.metrics import METRICS, RECIPE_NEEDS, TRACE_NEEDS, Measure, Metric, Subject
from traces.views import NONZERO, ZERO, ParamInfo, RoutingStep, StepView

E, K, T = 4, 2, 24
INFO = ParamInfo("w", "routed_expert", (E, 6, 5), layer=1, expert_axis=0, num_experts=E, matrix_axes=(1, 2))
COST = {"state_bytes": 10, "pinned_gradient_bytes": 20, "step_ms": 1.0}
EVERY = METRICS.all()


def routing(step: int, rng: np.random.Generator, padding: int = 0) -> RoutingStep:
    """T real tokens, and `padding` tokens that must not count, at fixed places among them."""
    real = np.array([rng.choice(E, K, replace=False) for _ in range(T)])
    logits = rng.normal(size=(T, E))
    is_pad = np.random.default_rng(1).permutation(T + padding) >= T
    ids, all_logits = np.zeros((T + padding, K), dtype=np.int64), np.full((T + padding, E), 1e9)
    ids[~is_pad], all_logits[~is_pad] = real, logits
    counts = np.bincount(ids[~is_pad].reshape(-1), minlength=E)
    return RoutingStep(step, 1, E, ids, is_pad, counts, logits=all_logits)


def views(metric: Metric, steps: int, padding: int = 0, dtype: torch.dtype = torch.float32) -> list[StepView]:
    """A stream with everything any metric may need."""
    rng = np.random.default_rng(0)
    out = []
    for step in range(1, steps + 1):
        view = StepView(step, layer=1, scalars={"loss": 1.0, "tokens": T})
        if metric.scope == "layer":
            view.routing = routing(step, rng, padding)
            view.probe = view.routing
        else:
            view.param = INFO
            for field in ("gradient", "weight", "update", "delta", "reference_update", "reference_weight"):
                setattr(view, field, torch.tensor(rng.normal(size=INFO.shape), dtype=dtype))
            view.initial_weight = out[0].weight if out else view.weight
            view.presence, view.tokens_per_expert = np.full(E, NONZERO, np.uint8), rng.integers(1, 9, E)
            if step % 5 == 0:
                view.presence[3], view.gradient[3] = ZERO, 0
            view.micro_norms, view.micro_tokens = rng.random((3, E)), rng.integers(1, 4, (3, E))
        out.append(view)
    return out


def start(metric: Metric) -> Any:
    """A fresh state for the stream above."""
    lags = metric.lags and (1, 3)
    layer = metric.scope == "layer"
    return metric.init(Subject(None if layer else INFO, 1, E, lags, dict(COST)))


def run(metric: Metric, stream: list[StepView]) -> tuple[Any, list[Measure]]:
    state = start(metric)
    measures = [m for view in stream for m in metric.update(state, view) or ()]
    return state, measures + list(metric.result(state))


def held(item: Any) -> int:
    """Numbers held by a state, however it is built."""
    if isinstance(item, torch.Tensor):
        return item.numel()
    if isinstance(item, np.ndarray):
        return item.size
    if isinstance(item, Mapping):
        return sum(held(value) for value in item.values())
    if isinstance(item, str | bytes) or item is None:
        return 0
    if dataclasses.is_dataclass(item):
        return sum(held(getattr(item, f.name)) for f in dataclasses.fields(item))
    if hasattr(item, "__iter__"):
        return sum(held(value) for value in item)
    return sum(held(value) for value in vars(item).values()) if hasattr(item, "__dict__") else 1


@pytest.fixture(params=EVERY, ids=lambda m: m.name)
def metric(request: pytest.FixtureRequest) -> Metric:
    return request.param


#: The dictionary that frames, plots and other people's notebooks rely on: a name may be added, none may go or move.
NAMES = {
    "load": "tokens_per_expert expert_load max_vio load_cv load_gini expert_entropy dead_expert_fraction "
    "idle_run_length co_activation",
    "routing": "router_saturation routing_churn last_fluctuation_step load_js_divergence topk_margin",
    "gradient": "grad_norm grad_cos sign_flip_rate gradient_snr gradient_noise_scale burstiness coherence",
    "update": "update_rms update_cos update_sign_flip_rate cos_to_gradient cos_to_reference amplification "
    "zombie_displacement stable_rank relative_update",
    "trajectory": "path_length displacement straightness drift_from_reference angular_update",
    "cost": "state_bytes pinned_gradient_bytes step_ms",
}


@pytest.mark.parametrize("group", NAMES)
def test_the_standard_names_stay(group: str) -> None:
    assert set(NAMES[group].split()) <= {m.name for m in EVERY if m.group == group}


def test_describes_itself(metric: Metric) -> None:
    assert METRICS.get(metric.name) is metric
    assert metric.group in ("load", "routing", "gradient", "update", "trajectory", "cost")
    assert metric.unit.strip()
    assert metric.formula.strip()
    assert metric.doc.strip().endswith(".")
    assert metric.citation.startswith("definition of this project") or any(c.isdigit() for c in metric.citation)
    assert metric.needs
    assert set(metric.needs) <= {*TRACE_NEEDS, *RECIPE_NEEDS}
    assert metric.lags == tuple(sorted(set(metric.lags)))


def test_an_empty_stream_gives_nothing_but_undefined_values(metric: Metric) -> None:
    for measure in metric.result(start(metric)):
        if metric.group == "cost":
            continue
        assert np.isnan(measure.value).all()
        assert not np.any(measure.support)


def test_measures_are_well_formed(metric: Metric) -> None:
    _, measures = run(metric, views(metric, 12))
    assert measures
    assert any(np.isfinite(np.asarray(m.value)).any() for m in measures), "a stream that holds everything gives a value"
    for measure in measures:
        value = np.asarray(measure.value)
        assert value.dtype == np.float64 or value.ndim == 0
        assert value.shape in ((), (E,))
        assert np.shape(measure.support) in ((), value.shape)
        assert measure.flag in FLAGS
        assert (measure.lag in (1, 3)) if metric.lags else measure.lag is None
        assert measure.step is None or 1 <= measure.step <= 12


def test_state_is_bounded(metric: Metric) -> None:
    """Enough steps to fill every ring and every thinned list, then four times as many."""
    few, _ = run(metric, views(metric, 50))
    many, _ = run(metric, views(metric, 200))
    limit = held(few) if metric.name != "router_saturation" else 66 * (T * K + 1) + 10
    assert held(many) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_kept_tensors_are_copies(metric: Metric, dtype: torch.dtype) -> None:
    """Views are lent: whoever overwrites a tensor after the feed changes nothing."""
    _, wanted = run(metric, views(metric, 12, dtype=dtype))
    state, found = start(metric), []
    for view in views(metric, 12, dtype=dtype):
        found += list(metric.update(state, view) or ())
        for field in ("gradient", "update", "delta", "weight", "reference_update", "reference_weight"):
            tensor = getattr(view, field)
            if tensor is not None and tensor is not view.initial_weight:
                tensor.fill_(float("nan"))
    found += list(metric.result(state))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.value, b.value)


def test_the_input_is_left_alone(metric: Metric) -> None:
    stream, untouched = views(metric, 3), views(metric, 3)
    run(metric, stream)
    for view, other in zip(stream, untouched, strict=True):
        for f in dataclasses.fields(StepView):
            left, right = getattr(view, f.name), getattr(other, f.name)
            if isinstance(left, torch.Tensor):
                assert torch.equal(left, right)
            elif isinstance(left, np.ndarray):
                np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", [m.name for m in EVERY if m.scope == "layer"])
def test_padding_never_counts(name: str) -> None:
    metric = METRICS.get(name)
    _, plain = run(metric, views(metric, 8))
    _, padded = run(metric, views(metric, 8, padding=T))
    assert len(plain) == len(padded)
    for a, b in zip(plain, padded, strict=True):
        assert (a.step, a.lag, a.flag) == (b.step, b.lag, b.flag)
        np.testing.assert_array_equal(b.value, a.value)
        np.testing.assert_array_equal(b.support, a.support)


@pytest.mark.parametrize("name", [m.name for m in EVERY if m.scope == "parameter" and m.group != "cost"])
def test_a_broken_expert_touches_no_other(name: str) -> None:
    metric = METRICS.get(name)
    _, plain = run(metric, views(metric, 12))
    stream = views(metric, 12)
    for view in stream[4:]:
        for field in ("gradient", "update", "delta", "weight"):
            tensor = getattr(view, field)
            tensor[1, 2, 3] = float("nan")
    _, broken = run(metric, stream)
    others = [0, 2, 3]
    assert len(plain) == len(broken)
    for a, b in zip(plain, broken, strict=True):
        np.testing.assert_allclose(np.asarray(b.value)[others], np.asarray(a.value)[others], rtol=1e-12)
        assert not np.isnan(np.asarray(b.value)[1]) or np.isnan(np.asarray(a.value)[1]), "broken is not undefined"
