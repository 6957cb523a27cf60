"""Synthetic traces have the statistics they were asked for, measured here by plain numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traces import GradreelError, RecordAt, open_trace
from traces.synthetic import route, write_synthetic
from traces.views import NONE, NONZERO, ZERO

UP = "layers.0.mlp.experts.gate_up_proj"


def gradients(path: Path, name: str = UP) -> np.ndarray:
    trace = open_trace(path)
    found = [trace.raw("gradient", name, step) for step in trace.steps]
    return np.stack([raw.data for raw in found if raw is not None]).astype(np.float64)


def test_lag_correlation_and_scale_per_expert(tmp_path: Path) -> None:
    rho = [0.9, 0.5, 0.0, -0.6]
    rms = [1e-2, 2e-2, 1e-3, 5e-2]
    # Popularity is flat and tokens are many, so that every expert is active in every step.
    expected = write_synthetic(
        tmp_path / "x", steps=200, num_experts=4, rho=rho, gradient_rms=rms, zipf=0.0, repeat_probability=0.0
    )
    assert expected.active.all()
    series = gradients(tmp_path / "x").reshape(200, 4, -1)
    for lag in (1, 2, 3):
        a, b = series[:-lag], series[lag:]
        cosine = (a * b).sum(2) / np.sqrt((a**2).sum(2) * (b**2).sum(2))
        assert cosine.mean(0) == pytest.approx(np.array(rho) ** lag, abs=0.02)
    assert np.sqrt((series**2).mean((0, 2))) == pytest.approx(rms, rel=0.03)


def test_idle_runs_activity_and_presence(tmp_path: Path) -> None:
    activity = [1.0, 1.0, 1.0, 1.0, 0.5, 0.1]
    expected = write_synthetic(
        tmp_path / "x",
        steps=120,
        num_experts=6,
        zipf=0.0,
        repeat_probability=0.0,
        activity=activity,
        idle_runs={1: (10, 30)},
        width=4,
        hidden=4,
    )
    trace = open_trace(tmp_path / "x")
    series = gradients(tmp_path / "x")
    busy = (series != 0).any((2, 3))
    assert (busy == expected.active[:, 0]).all()
    assert not expected.active[9:39, 0, 1].any()
    assert expected.active[[8, 39], 0, 1].all()
    assert expected.active[:, 0].mean(0)[4:] == pytest.approx([0.5, 0.1], abs=0.12)
    for i, step in enumerate(trace.steps):
        routing = trace.routing_step(step, 0)
        assert routing is not None
        assert (routing.tokens_per_expert == expected.tokens_per_expert[i, 0]).all()
        assert (trace.presence(UP, step) == np.where(expected.active[i, 0], NONZERO, ZERO)).all()


def test_zipf_loads_and_markov_repeats() -> None:
    rng = np.random.default_rng(0)
    popularity = np.array([0.5, 0.3, 0.2, 0.0])
    fresh = route(rng, popularity, 50_000, 1, repeat=0.0)
    assert np.bincount(fresh[:, 0], minlength=4) / 50_000 == pytest.approx(popularity, abs=0.01)
    sticky = route(rng, popularity, 50_000, 2, repeat=0.75)
    assert (sticky[:, 0] != sticky[:, 1]).all()
    assert 3 not in sticky
    same = (sticky[1:] == sticky[:-1]).all(1).mean()
    pairs, counts = np.unique(fresh_pairs := route(rng, popularity, 50_000, 2, 0.0), axis=0, return_counts=True)
    by_chance = ((counts / len(fresh_pairs)) ** 2).sum()
    assert len(pairs) == 6
    assert same == pytest.approx(0.75 + 0.25 * by_chance, abs=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_follow_sgd(tmp_path: Path, dtype: str) -> None:
    expected = write_synthetic(tmp_path / "x", steps=12, lr=0.5, dtype=dtype, seed=3)
    trace = open_trace(tmp_path / "x")
    weight = trace.weight(UP, 1).clone()
    for step in trace.steps:
        gradient = trace.gradient(UP, step)
        assert gradient is not None
        weight -= np.float32(0.5) * gradient.float()
    assert (weight.numpy() == trace.weight(UP, 13).numpy()).all()
    assert (trace.weight(UP, 13).numpy() == expected.weights[UP]).all()


def test_padding_policy_and_none(tmp_path: Path) -> None:
    at = RecordAt(every=3, budget=None)
    expected = write_synthetic(tmp_path / "x", steps=9, padding=1.0, idle_as_none=True, at=at)
    trace = open_trace(tmp_path / "x")
    assert trace.steps == [1, 4, 7] == list(expected.steps)
    assert expected.tokens_per_expert.sum() == 0
    assert trace.gradient(UP, 4) is None
    assert (trace.presence(UP, 4) == NONE).all()
    assert trace.verify() == []


def test_mistakes(tmp_path: Path) -> None:
    for options, says in [
        ({"top_k": 9}, "top_k 9 of 8 experts"),
        ({"rho": 1.0}, "rho must lie within"),
        ({"rho": [0.1, 0.2]}, "for each of 8 experts"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"num_experts": 2, "idle_runs": {0: (1, 2)}}, "fewer than top_k=2"),
    ]:
        with pytest.raises(GradreelError) as error:
            write_synthetic(tmp_path / says, **options)  # type: ignore[arg-type]
        assert says in str(error.value)
