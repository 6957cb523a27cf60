"""sr_sinkhorn in every backend against a float64 loop written from the paper's two lines."""

import math

import numpy as np
import pytest
import torch

from toolkit.kernels.sr_sinkhorn import sr_sinkhorn, sr_sinkhorn_apply, sr_sinkhorn_apply_each, sr_sinkhorn_run
from traces.errors import GradreelError

BACKENDS = ("reference", "eager", "cpu")  # triton has a file of its own, since it needs another process
TOLERANCE = {"reference": 6.1e-8, "eager": 6.1e-8, "cpu": 3e-7}  # of a float32 result


def slow_sinkhorn(x, sweeps):
    """One matrix, float64, normalised row by row and column by column, exactly as the paper writes it."""
    x = np.array(x, dtype=np.float64)
    m, n = x.shape
    for _ in range(sweeps):
        for i in range(m):
            norm = math.sqrt(math.fsum(x[i] * x[i]))
            x[i] = math.sqrt(n) * x[i] / norm if norm > 0 else 0.0
        for j in range(n):
            norm = math.sqrt(math.fsum(x[:, j] * x[:, j]))
            x[:, j] = math.sqrt(m) * x[:, j] / norm if norm > 0 else 0.0
    return x


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def hostile_matrices():
    x = noise(23, 37)
    cases = {f"scale_{s:g}": x * s for s in (1e-45, 1e-44, 1e-40, 1e-38, 1e-30, 1e-20, 1.0, 1e10, 1e20, 1e30, 1e37)}
    rows = np.linspace(-30, 30, 23)
    columns = np.linspace(-12, 12, 37)
    cases["rows_spread"] = x * 10.0 ** rows[:, None]
    cases["columns_spread"] = x * 10.0 ** columns[None, :]
    cases["both_spread"] = x * 10.0 ** (rows[:, None] * 0.8 + columns[None, ::-1])
    cases["both_low"] = x * 10.0 ** (rows[:, None] * 0.3 - 25 + columns[None, :])
    zeros = x.copy()
    zeros[[0, 5]] = 0
    zeros[:, [1, 36]] = 0
    cases["zero_rows_columns"] = zeros
    cases["all_zero"] = x * 0
    single = x * 0
    single[3, 4] = -2.5e-20
    cases["single"] = single
    cases["rank_1"] = np.outer(noise(23, seed=1), noise(37, seed=2))
    cases["rank_1_spread"] = np.outer(10.0**rows * noise(23, seed=1), 10.0 ** (columns / 2) * noise(37, seed=2))
    cases["sparse"] = x * (noise(23, 37, seed=3) > 0.8)
    cases["one_row"] = noise(1, 37)
    cases["one_column"] = noise(23, 1)
    cases["one_by_one"] = np.array([[-3e-39]])
    cases["tall"] = noise(200, 3)
    cases["diagonal"] = np.diag(10.0 ** np.linspace(-20, 20, 17))
    cases["negative_zero"] = np.where(noise(23, 37, seed=5) > 0, x, -0.0)
    return {name: matrix.astype(np.float32) for name, matrix in cases.items()}


HOSTILE = hostile_matrices()


def assert_close(result, truth, relative, absolute=2e-44):
    result, truth = np.asarray(result, dtype=np.float64), np.asarray(truth)
    assert np.isfinite(result).all()
    worst = np.max(np.abs(result - truth) - relative * np.abs(truth), initial=-1.0)
    assert worst <= absolute, f"off by {worst} beyond {relative}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("sweeps", [1, 5])
def test_agrees_with_the_float64_loop(backend, name, sweeps):
    x = torch.from_numpy(HOSTILE[name])
    truth = slow_sinkhorn(x.numpy(), sweeps)
    out = sr_sinkhorn(x, sweeps, backend)
    assert out.dtype == torch.float32
    tolerance = TOLERANCE[backend]
    assert_close(out, truth, tolerance)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sweeps", [1, 2, 5, 10])
def test_float32_arithmetic_of_the_cpu_form(monkeypatch, sweeps, dtype, threads):
    """Small matrices use float64 and one thread; here the paths of large ones are forced on every hostile case."""
    from toolkit.kernels import sr_sinkhorn_cpu

    monkeypatch.setattr(sr_sinkhorn_cpu, "_SMALL", 0)
    monkeypatch.setattr(sr_sinkhorn_cpu, "_SPLIT", 0)
    monkeypatch.setattr(sr_sinkhorn_cpu, "threads", lambda: threads)
    for name, matrix in HOSTILE.items():
        x = torch.from_numpy(matrix).to(dtype)
        out = sr_sinkhorn_run(x.float() if dtype == torch.float32 else x, (sweeps,), backend="cpu")
        direction = out.row_factor[sweeps].unsqueeze(-1) * x.double() * out.column_factor[sweeps]
        assert_close(direction, slow_sinkhorn(x.double().numpy(), sweeps), 3e-7), name


@pytest.mark.parametrize("shape", [(257, 130), (64, 1000), (1500, 6)])
@pytest.mark.parametrize("tail", [0.7, 3, 100])
def test_large_matrices_with_tails(shape, tail):
    x = torch.from_numpy(np.random.default_rng(4).standard_t(tail, shape)).float()
    x[:, 3] = 0
    x[5] = 0
    out, truth = sr_sinkhorn(x, 5, "cpu"), slow_sinkhorn(x.numpy(), 5)
    # Without a variance one element can rule its row and its column, and float32 roundings line up in it.
    assert_close(out, truth, 3e-7 if tail > 1 else 7e-7)
    assert np.linalg.norm(out.double().numpy() - truth) < 1e-7 * np.linalg.norm(truth)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_float64_input_is_computed_and_returned_in_float64(backend):
    x = torch.from_numpy(noise(9, 14)) * 1e-180
    out = sr_sinkhorn(x, 3, backend)
    assert out.dtype == torch.float64
    assert_close(out, slow_sinkhorn(x.numpy() * 1e180, 3), 1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_is_a_loop_over_matrices(backend):
    x = torch.from_numpy(noise(2, 3, 17, 29)).float()
    out = sr_sinkhorn(x, 4, backend)
    for a in range(2):
        for b in range(3):
            assert_close(out[a, b], slow_sinkhorn(x[a, b].numpy(), 4), TOLERANCE[backend])
            assert torch.equal(out[a, b], sr_sinkhorn(x[a, b], 4, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_layout_of_memory_does_not_matter(backend):
    x = torch.from_numpy(noise(5, 40, 26)).float()
    plain = sr_sinkhorn(x, 3, backend)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    padded = torch.full((5, 80, 50), math.nan)
    padded[:, ::2, :26] = x
    permuted = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for other in (transposed, padded[:, ::2, :26], permuted):
        assert not other.is_contiguous()
        assert_close(sr_sinkhorn(other, 3, backend), plain.double().numpy(), 5e-7)
    wide = sr_sinkhorn(x.mT, 3, backend)
    for e in range(5):
        assert_close(wide[e], slow_sinkhorn(x[e].numpy().T, 3), 3e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0)])
def test_empty(backend, shape):
    result = sr_sinkhorn_run(torch.zeros(shape), (2,), backend=backend)
    assert result.directions[2].shape == shape
    assert result.nonfinite.shape == shape[:-2]
    assert not result.nonfinite.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_expert_is_flagged_and_poisons_no_other(backend, value):
    x = torch.from_numpy(noise(4, 33, 18)).float()
    clean = sr_sinkhorn(x, 5, backend)
    x[2, 7, 3] = value
    result = sr_sinkhorn_run(x, (5,), backend=backend)
    assert result.nonfinite.tolist() == [False, False, True, False]
    out = result.directions[5]
    assert out[2].isnan().all()
    for e in (0, 1, 3):
        assert torch.equal(out[e], clean[e])


@pytest.mark.parametrize("backend", BACKENDS)
def test_snapshots_equal_separate_runs(backend):
    x = torch.from_numpy(noise(3, 21, 34)).float()
    result = sr_sinkhorn_run(x, (1, 5, 2, 3), backend=backend)
    assert sorted(result.directions) == [1, 2, 3, 5]
    for sweeps, direction in result.directions.items():
        assert_close(direction, sr_sinkhorn(x, sweeps, backend).double().numpy(), 3e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_factors_and_cosine(backend):
    x = torch.from_numpy(noise(3, 21, 34) * 1e-30).float()
    x[1] = 0
    full = sr_sinkhorn_run(x, (1, 4), backend=backend)
    bare = sr_sinkhorn_run(x, (1, 4), backend=backend, keep="metrics")
    assert not bare.directions
    for sweeps in (1, 4):
        u, v = bare.row_factor[sweeps], bare.column_factor[sweeps]
        direction = full.directions[sweeps].double()
        assert torch.allclose(u.unsqueeze(-1) * x.double() * v.unsqueeze(-2), direction, rtol=5e-7, atol=0)
        assert u.dtype == torch.float64
        for e in (0, 2):
            a, b = x[e].double().flatten(), direction[e].flatten()
            assert float(bare.cosine[sweeps][e]) == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-6)
        assert math.isnan(bare.cosine[sweeps][1])
        assert not direction[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_unit_columns_have_norm_one(backend):
    x = torch.from_numpy(noise(2, 30, 11)).float()
    out = sr_sinkhorn(x, 5, backend, compat="unit_columns")
    assert torch.allclose(out.norm(dim=-2), torch.ones(2, 11), atol=1e-6)
    assert torch.allclose(out * math.sqrt(30), sr_sinkhorn(x, 5, backend), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rule_on_a_single_element_and_on_rank_one(backend):
    x = torch.zeros(2, 12, 7)
    x[0, 4, 2] = -1e-44
    x[1] = torch.outer(torch.linspace(-3, 4, 12), torch.linspace(-2, 2.5, 7))
    out = sr_sinkhorn(x, 5, backend)
    assert float(out[0, 4, 2]) == pytest.approx(-math.sqrt(12), rel=3e-7)
    assert int((out[0] != 0).sum()) == 1
    assert_close(out[1], x[1].sign().double().numpy(), 3e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_output_rounding_only(backend, dtype):
    x = torch.from_numpy(noise(2, 31, 45)).to(dtype)
    out = sr_sinkhorn(x, 5, backend)
    assert out.dtype == dtype
    for e in range(2):
        truth = slow_sinkhorn(x[e].double().numpy(), 5)
        half_step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        assert_close(out[e].double(), truth, half_step * (1 + 1e-3), absolute=2.0**-25)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_apply_equals_direction_then_subtraction(backend, dtype):
    x = torch.from_numpy(noise(3, 31, 45)).float()
    weight = torch.from_numpy(noise(3, 31, 45, seed=9)).to(dtype)
    before = weight.clone()
    if backend == "cpu" and dtype == torch.float64:
        with pytest.raises(GradreelError, match="float64"):
            sr_sinkhorn_apply(weight, x, 0.03, backend="cpu")
        return
    address = weight.data_ptr()
    assert sr_sinkhorn_apply(weight, x, 0.03, 5, decay=0.01, backend=backend) == backend
    assert weight.data_ptr() == address
    truth = before.double() * 0.99 - 0.03 * torch.stack([torch.from_numpy(slow_sinkhorn(s.numpy(), 5)) for s in x])
    tolerance = {torch.float32: 2e-7, torch.bfloat16: 2.0**-8, torch.float64: 3e-7}[dtype]
    assert torch.allclose(weight.double(), truth, rtol=tolerance, atol=2e-8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_apply_on_transposed_weights_and_gradients(backend):
    x = torch.from_numpy(noise(3, 20, 15)).float()
    weight = torch.zeros(3, 15, 20).mT
    sr_sinkhorn_apply(weight, x, 1.0, 3, backend=backend)
    assert_close(-weight, sr_sinkhorn(x, 3, "reference").double().numpy(), 5e-7)
    weight = torch.zeros(3, 20, 15)
    sr_sinkhorn_apply(weight, x.mT.contiguous().mT, 1.0, 3, backend=backend)
    assert_close(-weight, sr_sinkhorn(x, 3, "reference").double().numpy(), 5e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_one_run_equal_separate_runs(backend):
    x, start = torch.from_numpy(noise(3, 131, 93)).float(), torch.from_numpy(noise(3, 131, 93, seed=9)).float()
    x[1, 3, 4] = math.nan
    weights = {sweeps: start.clone() for sweeps in (5, 1, 3)}
    assert sr_sinkhorn_apply_each(weights, x, 0.1, decay=0.01, backend=backend) == backend
    for sweeps, weight in weights.items():
        for e in (0, 2):
            truth = start[e].double() * 0.99 - 0.1 * torch.from_numpy(slow_sinkhorn(x[e].numpy(), sweeps))
            assert torch.allclose(weight[e].double(), truth, rtol=2e-7, atol=1e-7)
        assert weight[1].isnan().all()
    with pytest.raises(GradreelError, match="one dtype"):
        sr_sinkhorn_apply_each({1: start, 2: start.bfloat16()}, x, 0.1, backend=backend)


def test_flushed_denormals_are_the_callers_choice_only():
    x = torch.from_numpy(HOSTILE["scale_1e-44"])
    assert sr_sinkhorn_run(x, (1,)).directions[1].abs().max() > 1


def test_the_choice_is_reported_and_a_forced_backend_never_falls_back():
    x = torch.from_numpy(noise(4, 5)).float()
    assert sr_sinkhorn_run(x).backend == "cpu"
    assert sr_sinkhorn_run(x.double()).backend == "eager"
    with pytest.raises(GradreelError, match="'cpu' cannot run: the tensor is float64"):
        sr_sinkhorn(x.double(), backend="cpu")
    with pytest.raises(GradreelError, match="cuda"):
        sr_sinkhorn(x, backend="cuda")
    with pytest.raises(GradreelError, match=r"unknown backend 'gpu'.*eager"):
        sr_sinkhorn(x, backend="gpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(4)}, r"shape \(4,\)"),
        ({"x": torch.zeros(4, 4), "sweeps": 0}, "at least 1"),
        ({"x": torch.zeros(4, 4), "compat": "port"}, "unit_columns"),
        ({"x": torch.zeros(4, 4, dtype=torch.int32)}, "int32"),
        ({"x": torch.zeros(4, 4, dtype=torch.complex64)}, "complex64"),
        ({"x": torch.eye(4).to_sparse()}, "sparse"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message):
    with pytest.raises(GradreelError, match=message) as caught:
        sr_sinkhorn(**arguments)
    assert "\n" not in str(caught.value)


def test_the_cpu_form_needs_little_memory_beside_its_tensors():
    import tracemalloc

    x, weight = torch.randn(4, 500, 400), torch.zeros(4, 500, 400)
    sr_sinkhorn_apply(weight, x, 0.1, backend="cpu")
    tracemalloc.start()
    try:
        sr_sinkhorn_apply(weight, x, 0.1, backend="cpu")
        extra = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert extra < 0.05 * x.nbytes
