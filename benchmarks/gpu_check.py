"""Everything about gradreel that only a GPU can show, in one command and one JSON file: `make gpu-check`.

Correctness of every kernel against float64 on adversarial and on fresh random inputs, compute-sanitizer where it is
installed, timings, and what recording costs a CUDA model. Needs torch, numpy and safetensors, and triton for the
Triton forms; polars, numba and everything else may be missing, and nothing is downloaded. It stops adding parts when
its time is over, and says which parts it left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from toolkit.kernels import _bench, sr_sinkhorn, sr_sinkhorn_run  # noqa: E402
from toolkit.kernels._dispatch import refusal  # noqa: E402
from toolkit.kernels.sr_sinkhorn import BUILT  # noqa: E402
from toolkit.kernels.sr_sinkhorn_cuda import plan  # noqa: E402

TOLERANCE = 3e-7


def correctness(device: str) -> dict[str, Any]:
    """The benchmark's own checks: every backend that runs here, adversarial inputs included."""
    found = {op: _bench.check(op, device) for op in _bench.OPS}
    return {"ok": not any(found.values()), "differences": found}


def fresh_inputs(device: str, rounds: int = 6) -> dict[str, Any]:
    """sr_sinkhorn on inputs no one has seen: seed, shape, tails and spread are drawn anew each time."""
    seed = int.from_bytes(os.urandom(4), "little")
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    failures = []
    for turn in range(rounds):
        shape = (draw(1, 4), draw(1, 1100), draw(1, 1100))
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x *= torch.exp(draw(0, 8) * torch.randn((*shape[:2], 1), generator=generator, dtype=torch.float64))
        x = x.float()
        truth = sr_sinkhorn(x.double(), 5, "reference")
        for backend in BUILT:
            if refusal("sr_sinkhorn", backend, x.to(device), BUILT) is not None:
                continue
            if backend == "cuda" and plan(*shape[1:], 4, torch.cuda.get_device_capability()) is None:
                continue  # too large for a cluster's shared memory
            out = sr_sinkhorn(x.to(device), 5, backend).double().cpu()
            again = sr_sinkhorn(x.to(device), 5, backend).double().cpu()
            worst = float(((out - truth).abs() / truth.abs().clamp_min(1e-30)).max())
            if not worst <= TOLERANCE or not torch.equal(out, again):
                same = torch.equal(out, again)
                failures.append({"turn": turn, "shape": shape, "backend": backend, "worst": worst, "repeatable": same})
    return {"ok": not failures, "seed": seed, "failures": failures}


def sanitizer(device: str) -> dict[str, Any]:
    """compute-sanitizer's memcheck and racecheck over one small run of every GPU kernel."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or device != "cuda":
        return {"ok": None, "skipped": "compute-sanitizer is not installed, or there is no CUDA device"}
    found: dict[str, Any] = {}
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, __file__, "--small-kernels"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        found[check] = {"exit": done.returncode, "tail": (done.stdout + done.stderr)[-600:]}
    return {"ok": all(part["exit"] == 0 for part in found.values()), **found}


def small_kernels(device: str) -> None:
    """What the sanitizer watches."""
    x = torch.randn(2, 40, 70, device=device)
    for backend in BUILT:
        if refusal("sr_sinkhorn", backend, x, BUILT) is None:
            sr_sinkhorn_run(x, (1, 2), backend=backend)


def timings(device: str, until: float, small: bool) -> dict[str, Any]:
    """Paired times of every op; no time for an op whose check fails."""
    rows, left_out = [], []
    for op in _bench.OPS:
        if time.monotonic() > until:
            left_out.append(op)
        elif not _bench.check(op, device):
            rows += list(_bench.bench_op(op, device=device, rounds=_bench.MIN_ROUNDS, small=small))
    return {"ok": True, "rows": rows, "left_out": left_out}


def recorder_overhead(device: str, small: bool) -> dict[str, Any]:
    """Seconds of a training step with and without a recorder, in turns; to disk where polars is installed."""
    from ablations.models.moe import MoEConfig, MoELanguageModel
    from traces import RecordAt, Recorder

    size = 64 if small else 512
    config = MoEConfig(
        vocab_size=512, hidden_size=size, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=size // 4,
        max_positions=256, dense_hidden=size, expert_hidden=2 * size, num_experts=8, top_k=2, moe_layers=(0, 1),
    )  # fmt: skip
    to_disk = importlib.util.find_spec("polars") is not None
    times: dict[str, list[float]] = {"plain": [], "recorded": []}
    for turn in range(4):
        for name in ("plain", "recorded") if turn % 2 else ("recorded", "plain"):
            torch.manual_seed(0)
            model = MoELanguageModel(config).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            with tempfile.TemporaryDirectory() as folder:
                reel = None
                if name == "recorded":
                    options: dict[str, Any] = {"at": RecordAt(every=1), "notify": lambda message: None}
                    if to_disk:
                        reel = Recorder(Path(folder) / "a", model, optimizer, **options)
                    else:
                        reel = Recorder(None, model, optimizer, on_step=lambda views: None, **options)
                    reel.__enter__()
                for step in range(8):
                    start = _now(device)
                    ids = torch.randint(0, 512, (8, 129), device=device)
                    model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step > 2:
                        times[name].append(_now(device) - start)
                if reel is not None:
                    reel.__exit__(None, None, None)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"ok": True, "to_disk": to_disk, "every_step": True, "median_s": medians,
            "ratio": medians["recorded"] / medians["plain"]}  # fmt: skip


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> int:
    """Run the parts; exit 1 where one failed, 2 where there is no CUDA device."""
    parser = argparse.ArgumentParser(description="Check gradreel's kernels and recorder on a GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries out this script only")
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results/DEVICE-TIME.json")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no further part after this")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try out this script")
    parser.add_argument("--small-kernels", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device; nothing was checked", file=sys.stderr)
        return 2
    if given.small_kernels:
        small_kernels(given.device)
        return 0
    until = time.monotonic() + 60 * given.minutes
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "correctness": lambda: correctness(given.device),
        "fresh_inputs": lambda: fresh_inputs(given.device, 2 if given.small else 6),
        "recorder": lambda: recorder_overhead(given.device, given.small),
        "sanitizer": lambda: sanitizer(given.device),
        "timings": lambda: timings(given.device, until, given.small),
    }
    report: dict[str, Any] = {"machine": _bench.machine(given.device), "tried_out_on_cpu": given.device == "cpu"}
    for name, part in parts.items():
        start = time.monotonic()
        if start > until:
            report[name] = {"ok": None, "skipped": f"no time left of {given.minutes} minutes"}
            continue
        try:
            report[name] = part()
        except Exception as error:
            # One broken part must not hide what the others found.
            trace = traceback.format_exc()[-1500:]
            report[name] = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": trace}
        report[name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{name}: ok is {report[name]['ok']}, {report[name]['seconds']} s", flush=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    file = given.out or ROOT / "benchmarks" / "results" / f"{given.device}-{stamp}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written: {file}")
    return 1 if any(report[name]["ok"] is False for name in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
