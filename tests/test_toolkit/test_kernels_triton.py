"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for GPUs that are not there.

The two need separate processes, since the interpreter replaces the compiler when triton is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.kernels._compile_gate import MAX_REGISTERS, TARGETS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed; it comes with CUDA builds of torch"
)
ROOT = Path(__file__).parents[2]

SCRIPT = """
import math
import torch
from toolkit.kernels import sr_sinkhorn, sr_sinkhorn_apply, sr_sinkhorn_run

generator = torch.Generator().manual_seed(0)
x = torch.randn((2, 9, 140), generator=generator)
dead = x.clone()
dead[0], dead[1, 3], dead[1, :, 5] = 0, 0, 0
rows = torch.logspace(-30, 30, 9, dtype=torch.float64).unsqueeze(-1)
columns = torch.logspace(-12, 12, 140, dtype=torch.float64)
cases = {
    "plain": x, "tall": x.mT, "dead": dead, "small": x * 1e-45, "large": x * 1e37, "one row": x[:, :1],
    "rows": (x.double() * rows).float(), "columns": (x.double() * columns).float(), "empty": x[:0],
}
for name, case in cases.items():
    for sweeps in (1, 3):
        truth = sr_sinkhorn(case, sweeps, "reference").double()
        mine = sr_sinkhorn(case, sweeps, "triton").double()
        assert bool(((mine - truth).abs() <= 3e-7 * truth.abs() + 2e-44).all()), (name, sweeps)
half = x.bfloat16()
assert torch.equal(sr_sinkhorn(half, 3, "triton"), sr_sinkhorn(half, 3, "reference"))
for dtype in (torch.float32, torch.bfloat16):
    mine = torch.randn((2, 9, 140), generator=generator).to(dtype)
    truth = mine.clone()
    assert sr_sinkhorn_apply(mine, x, 0.1, 3, decay=0.01, backend="triton") == "triton"
    sr_sinkhorn_apply(truth, x, 0.1, 3, decay=0.01, backend="reference")
    apart = (mine.double() - truth.double()).abs()
    assert bool((apart <= (2e-7 if dtype == torch.float32 else 2.0**-7) * truth.double().abs() + 1e-7).all()), dtype
x[1, 2, 3] = math.nan
result = sr_sinkhorn_run(x, (2,), backend="triton", keep="metrics")
assert result.nonfinite.tolist() == [False, True]
assert math.isfinite(result.cosine[2][0])
print("agrees")
"""

STEPS = """
import torch
from toolkit.kernels import adamw_step, sign_step
from toolkit.kernels._bench_steps import Noise

generator = torch.Generator().manual_seed(0)
rng = Noise()
rng.step = 2**32 + 3
for dtype in (torch.float32, torch.bfloat16):
    for shape in ((3, 20, 31), (1,), (2, 1030), (0, 4)):
        start, x = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)
        x.view(-1)[::7] = 0
        for rounding in ("nearest", "stochastic"):
            results = []
            for backend in ("eager", "triton"):
                w, signed = start.clone(), start.clone()
                m, v = torch.zeros(shape), torch.zeros(shape)
                for step in (1, 2):
                    options = {"weight_decay": 0.1, "rounding": rounding, "rng": rng, "backend": backend}
                    assert adamw_step(w, x, m, v, step=step, lr=0.05, **options) == backend
                    sign_step(signed, x, lr=0.05, **options)
                results.append((w, signed, m, v))
            for one, other in zip(*results):
                if one.dtype == torch.float32:
                    assert torch.allclose(one, other, rtol=2e-6, atol=1e-7), (dtype, shape, rounding)
                else:
                    apart = (one.view(torch.int16).int() - other.view(torch.int16).int()).abs()
                    assert not apart.numel() or int(apart.max()) <= 1, (shape, rounding)
                    assert not apart.numel() or int((apart > 0).sum()) <= apart.numel() // 100, (shape, rounding)
bad = torch.tensor([float("nan"), 1.0])
w = torch.zeros(2)
sign_step(w, bad, lr=1.0, backend="triton")
assert w.isnan().tolist() == [True, False]
print("agrees")
"""


def run(arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_interpreter_agrees_with_the_reference():
    done = run(["-c", SCRIPT], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "agrees"


def test_elementwise_steps_agree_with_torch():
    done = run(["-c", STEPS], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "agrees"


def test_every_kernel_compiles_without_spills_and_within_its_registers():
    done = run(["-m", "toolkit.kernels._compile_gate"], TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["target"] for row in rows} == {f"sm_{target}" for target in TARGETS}
    for row in rows:
        assert row["spill_bytes"] == 0, row
        assert row["registers"] <= MAX_REGISTERS, row
