"""The sinkgd recipe against a slow loop in float64 that shares no code with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from toolkit.recipes import Stepper
from toolkit.variants import recipe
from traces.views import ParamInfo

LR, ALPHA = 2e-2, 0.05


def slow_direction(x: np.ndarray, sweeps: int = 5) -> np.ndarray:
    """One matrix [m, n]: rows to RMS 1, then columns to RMS 1; dead rows and columns stay zero."""
    x = x.astype(np.float64)
    scale = np.abs(x).max(axis=1, keepdims=True)
    x = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    m, n = x.shape
    for _ in range(sweeps):
        for row in x:
            norm = math.sqrt(math.fsum(v * v for v in row))
            row *= math.sqrt(n) / norm if norm else 0.0
        for column in x.T:
            norm = math.sqrt(math.fsum(v * v for v in column))
            column *= math.sqrt(m) / norm if norm else 0.0
    return x


def _matrices() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((7, 5))
    rows, columns = rng.uniform(-30, 30, (7, 1)), rng.uniform(-12, 12, (1, 5))
    cases = {f"scale 1e{e}": plain * 10.0**e for e in (-45, -38, -20, 0, 20, 36)}
    cases |= {
        "wide": rng.standard_normal((3, 40)),
        "tall": rng.standard_normal((40, 3)),
        "rows over 60 decades": np.clip(plain * 10.0**rows, -1e37, 1e37),
        "columns over 24 decades": plain * 10.0**columns,
        "rank 1": np.outer(rng.standard_normal(7), rng.standard_normal(5)),
        "one element": np.where(np.arange(35).reshape(7, 5) == 12, 3.0, 0.0),
        "zero": np.zeros((7, 5)),
        "1 x n": rng.standard_normal((1, 9)),
        "m x 1": rng.standard_normal((9, 1)),
    }
    dead = plain.copy()
    dead[2], dead[:, 3] = 0, 0
    return {**cases, "dead row and column": dead}


@pytest.mark.parametrize("case", _matrices())
def test_direction(case: str) -> None:
    gradient = torch.from_numpy(_matrices()[case]).to(torch.float32)
    m, n = gradient.shape
    info = ParamInfo("p", "routed_expert", (1, m, n), expert_axis=0, num_experts=1, matrix_axes=(1, 2))
    weight = torch.zeros(1, m, n)
    update = Stepper(recipe("sinkgd"), info).step(weight, gradient[None], lr=LR, want_update=True)
    assert update is not None
    want = slow_direction(gradient.numpy())
    assert np.abs(update[0].numpy() - want).max() <= 1e-6 * max(1.0, np.abs(want).max())
    assert np.abs(weight[0].numpy() + LR * ALPHA * want).max() <= 1e-6 * LR * ALPHA * max(1.0, np.abs(want).max())


def test_known_shapes_of_the_result() -> None:
    matrices = _matrices()
    signs = slow_direction(matrices["rank 1"])
    assert np.allclose(np.abs(signs), 1)
    assert slow_direction(matrices["one element"]).max() == pytest.approx(math.sqrt(7))


@pytest.mark.parametrize("sweeps", [1, 2, 3, 10])
def test_sweeps_and_compat(sweeps: int) -> None:
    gradient = np.random.default_rng(1).standard_normal((2, 6, 4))
    info = ParamInfo("p", "routed_expert", (2, 6, 4), expert_axis=0, num_experts=2, matrix_axes=(1, 2))
    for compat, scale in (("paper", 1.0), ("unit_columns", 1 / math.sqrt(6))):
        stepper = Stepper(recipe("sinkgd", sweeps=sweeps, compat=compat), info)
        update = stepper.step(torch.zeros(2, 6, 4), torch.from_numpy(gradient).float(), lr=LR, want_update=True)
        want = np.stack([slow_direction(g, sweeps) for g in gradient]) * scale
        assert update is not None
        assert np.abs(update.numpy() - want).max() < 2e-6
