"""The check for machines with a GPU, tried out without one, and without what such machines may lack."""

import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LACKING = ("polars", "pyarrow", "numba", "llvmlite", "seaborn", "scipy", "typer", "rich", "jinja2", "transformers")
BARE = f"""
import importlib.util, runpy, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] in {LACKING!r} else real(name, *a)
sys.modules.update(dict.fromkeys({LACKING!r}))
sys.argv = ["gpu_check.py", *sys.argv[1:]]
runpy.run_path("benchmarks/gpu_check.py", run_name="__main__")
"""


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_it_runs_with_torch_numpy_and_safetensors_alone(tmp_path):
    file = tmp_path / "out.json"
    done = run("-c", BARE, "--device", "cpu", "--small", "--out", str(file))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report = json.loads(file.read_text())
    assert report["tried_out_on_cpu"] is True
    assert {part: report[part]["ok"] for part in ("correctness", "fresh_inputs", "recorder", "timings")} == {
        "correctness": True,
        "fresh_inputs": True,
        "recorder": True,
        "timings": True,
    }
    assert report["recorder"]["to_disk"] is False
    assert report["timings"]["rows"]


def test_without_a_gpu_it_claims_nothing():
    if torch.cuda.is_available():
        return
    done = run("benchmarks/gpu_check.py")
    assert done.returncode == 2
    assert "nothing was checked" in done.stderr
