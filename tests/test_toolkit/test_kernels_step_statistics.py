"""step_statistics in every backend against numpy in float64."""

import math

import numpy as np
import pytest
import torch

from toolkit.kernels import step_statistics
from traces.errors import GradreelError

BACKENDS = ("reference", "eager", "cpu")


def pair(dtype=torch.float32, shape=(5, 7, 11), seed=0):
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=generator).to(dtype)
    p = torch.randn(shape, generator=generator).to(dtype)
    g.view(-1)[::13] = 0
    p.view(-1)[::17] = -0.0
    return g, p


def slow_statistics(g, p):
    rows = []
    for x, y in zip(g.double().numpy().reshape(len(g), -1), p.double().numpy().reshape(len(p), -1), strict=True):
        alone = x[np.isfinite(x)]
        both = np.isfinite(x) & np.isfinite(y)
        a, b = x[both], y[both]
        signed = (a != 0) & (b != 0)
        rows.append(
            {
                "sum": alone.sum(),
                "sum_squares": (alone**2).sum(),
                "sum_abs": np.abs(alone).sum(),
                "max_abs": np.abs(alone).max(initial=0),
                "zeros": (x == 0).sum(),
                "nonfinite": (~np.isfinite(x)).sum(),
                "dot": (a * b).sum(),
                "dot_squares": (a * a).sum(),
                "previous_squares": (b * b).sum(),
                "sign_flips": (np.sign(a[signed]) != np.sign(b[signed])).sum(),
                "sign_support": signed.sum(),
            }
        )
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}


def assert_equal(statistics, truth):
    values = statistics.as_dict()
    assert set(values) <= set(truth)
    for name, value in values.items():
        np.testing.assert_allclose(value.double().numpy(), truth[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_statistic(backend, dtype):
    g, p = pair(dtype)
    result = step_statistics(g, p, expert_axis=0, backend=backend)
    assert result.backend == backend
    assert result.elements == 77
    assert len(result.as_dict()) == 11
    assert_equal(result, slow_statistics(g, p))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_previous_gradient(backend):
    g, p = pair()
    result = step_statistics(g, expert_axis=0, backend=backend)
    assert result.dot is None
    assert result.sign_flips is None
    assert_equal(result, slow_statistics(g, p))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nonfinite_elements_are_counted_and_left_out_of_their_expert_only(backend):
    g, p = pair()
    clean = step_statistics(g, p, expert_axis=0, backend=backend).as_dict()
    g[1, 2, 3], g[1, 0, 0], p[1, 4, 4] = math.nan, -math.inf, math.inf
    result = step_statistics(g, p, expert_axis=0, backend=backend)
    assert result.nonfinite.tolist() == [0, 2, 0, 0, 0]
    assert_equal(result, slow_statistics(g, p))
    for name, value in result.as_dict().items():
        assert torch.equal(value[[0, 2, 3, 4]], clean[name][[0, 2, 3, 4]]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [None, 1, -1])
def test_expert_axis_and_layout(backend, axis):
    g, p = pair(shape=(4, 6, 3))
    g, p = g.transpose(0, 1), p.transpose(0, 1)
    result = step_statistics(g, p, expert_axis=axis, backend=backend)
    as_rows = [x.reshape(1, -1) if axis is None else x.movedim(axis, 0).reshape(x.shape[axis], -1) for x in (g, p)]
    assert_equal(result, slow_statistics(*as_rows))


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_scales_neither_overflow_nor_vanish(backend):
    g, p = pair()
    for scale in (1e-44, 1e37):
        small, previous = g * scale, p * scale
        assert_equal(step_statistics(small, previous, expert_axis=0, backend=backend), slow_statistics(small, previous))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1,), ()])
def test_empty_and_scalar(backend, shape):
    axis = 0 if len(shape) == 2 else None
    result = step_statistics(torch.ones(shape), torch.ones(shape), expert_axis=axis, backend=backend)
    experts = shape[0] if axis == 0 else 1
    assert result.sum.shape == (experts,)
    assert float(result.sum.sum()) == math.prod(shape)


def test_more_elements_than_one_chunk(monkeypatch):
    g, p = pair(shape=(6, 50))
    whole = step_statistics(g, p, expert_axis=0, backend="eager").as_dict()
    for chunk in (7, 120):
        monkeypatch.setattr("toolkit.kernels.step_statistics._CHUNK_ELEMENTS", chunk, raising=False)
        for name, value in step_statistics(g, p, expert_axis=0, backend="eager").as_dict().items():
            assert torch.allclose(value.double(), whole[name].double(), rtol=1e-13), name


def test_threads_do_not_change_the_numbers():
    g, p = pair(shape=(5, 40_000))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = step_statistics(g, p, expert_axis=0, backend="cpu").as_dict()
        torch.set_num_threads(3)
        three = step_statistics(g, p, expert_axis=0, backend="cpu").as_dict()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one[name], three[name]) for name in one)


def test_bad_arguments_are_one_clear_line():
    with pytest.raises(GradreelError, match="same shape"):
        step_statistics(torch.ones(3), torch.ones(4))
    with pytest.raises(GradreelError, match="expert_axis 2"):
        step_statistics(torch.ones(3), expert_axis=2)
