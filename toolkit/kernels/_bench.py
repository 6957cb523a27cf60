"""Timing of every op against what people would use instead: paired, interleaved, and only after the op's checks pass.

Rows are plain dicts. Each round runs our form, every rival and a memory copy of the same size, in an order that turns
by one each round, so that a busy machine slows all of them alike; ratios are taken within a round.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from traces.errors import GradreelError, unknown

OPS = (
    "sr_sinkhorn",
    "step_statistics",
    "skewadam_step",
    "mesh_step",
    "adamw_step",
    "sign_step",
    "newton_schulz",
)
MIN_ROUNDS = 7


@dataclass(slots=True)
class Case:
    """One shape of one op: `ours` and the `rivals` do the same work on tensors of their own.

    `bytes_moved` is the least that the op must read and write; `backend` is what `ours` runs on.
    """

    op: str
    label: str
    shape: tuple[int, ...]
    dtype: str
    backend: str
    ours: Callable[[], Any]
    bytes_moved: int
    rivals: dict[str, Callable[[], Any]] = field(default_factory=dict)


def run(
    op: str = "all",
    device: str = "cpu",
    json_path: str | Path | None = None,
    peer: str | Path | None = None,
    *,
    rounds: int = MIN_ROUNDS,
    small: bool = False,
    echo: Callable[[str], None] = print,
) -> int:
    """Check and time `op` (a name of `OPS`, or "all"); print a table; write JSON. 0, or 1 where a check failed.

    `peer` is a Python file with functions named as ops, `sr_sinkhorn(weight, gradient, lr)` for instance, timed beside
    the others. Errors: `GradreelError` for an unknown op, a device that is not there, a peer file that does not load.
    """
    import torch

    names = OPS if op == "all" else (op,)
    for name in names:
        if name not in OPS:
            raise unknown("op", name, (*OPS, "all"))
    if device not in ("cpu", "cuda"):
        raise GradreelError(f"device is {device!r}; allowed: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise GradreelError("device is 'cuda', but torch sees no CUDA device; use --device cpu")
    peers = _load_peer(peer)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in names:
        found = check(name, device)
        for line in found:
            echo(f"{name}: {line}")
        if found:
            echo(f"{name}: not timed, since its check failed")
            failures += [f"{name}: {line}" for line in found]
            continue
        case: tuple[Any, ...] | None = None
        for row in bench_op(name, device=device, rounds=rounds, small=small, peers=peers):
            rows.append(row)
            same, case = case, (row["case"], row["shape"], row["dtype"])
            for line in _lines(row, case != same):
                echo(line)
    if json_path is not None:
        report = {"machine": machine(device), "rows": rows, "failures": failures}
        Path(json_path).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 1 if failures else 0


def bench_op(
    name: str,
    *,
    device: str = "cpu",
    rounds: int = MIN_ROUNDS,
    small: bool = False,
    peers: dict[str, Callable[..., Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Time one op on its shapes (`small`: on tiny ones, for tests); one row per rival, in the order they are ready."""
    from toolkit.kernels._bench_cases import CASES

    for case in CASES[name](device, small, peers or {}):
        yield from _measure(case, device, max(rounds, 1))


def check(name: str, device: str = "cpu") -> list[str]:
    """Compare every backend of the op that can run on `device` with the float64 truth; what differs, as lines."""
    from toolkit.kernels._bench_cases import CHECKS

    return list(CHECKS[name](device))


def machine(device: str = "cpu") -> dict[str, Any]:
    """What ran it: processor, threads, versions."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("gradreel", "numpy", "numba", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "versions": versions,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _measure(case: Case, device: str, rounds: int) -> Iterator[dict[str, Any]]:
    import torch

    elements = max(1, case.bytes_moved // 8)
    source, target = torch.ones(elements, device=device), torch.empty(elements, device=device)
    runners = {"ours": case.ours, "copy": lambda: target.copy_(source), **case.rivals}
    for runner in runners.values():
        runner()
    times: dict[str, list[float]] = {name: [] for name in runners}
    work: dict[str, list[float]] = {name: [] for name in runners}
    order = list(runners)
    for turn in range(rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            before = time.process_time()
            times[name].append(_time(runners[name], device))
            work[name].append(time.process_time() - before)
    ours = times["ours"]
    share = [c / t for c, t in zip(times["copy"], ours, strict=True)]
    base = {
        "op": case.op,
        "case": case.label,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "device": device,
        "backend": case.backend,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        **{f"ours_ms_{k}": v * 1e3 for k, v in _spread(ours).items()},
        "bytes_moved": case.bytes_moved,
        "bytes_per_element": case.bytes_moved / max(1, _numel(case.shape)),
        "share_of_copy_bandwidth": statistics.median(share),
    }
    for name in list(case.rivals) or [""]:
        row = dict(base, rival=name)
        if name:
            ratios = [r / t for r, t in zip(times[name], ours, strict=True)]
            row |= {f"rival_ms_{k}": v * 1e3 for k, v in _spread(times[name]).items()}
            row |= {f"ratio_{k}": v for k, v in _spread(ratios).items()}
            # Processor time leaves out what other programs took; one thread against one thread only.
            if device == "cpu" and torch.get_num_threads() == 1:
                spent = [r / t for r, t in zip(work[name], work["ours"], strict=True) if t > 0]
                row["processor_time_ratio_p50"] = statistics.median(spent) if spent else None
        yield row


def _time(runner: Callable[[], Any], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        runner()
        return time.perf_counter() - start
    import torch

    start_event, stop_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start_event.record()
    runner()
    stop_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(stop_event) * 1e-3


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))] for p in (20, 50, 80)}


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _lines(row: dict[str, Any], first: bool) -> list[str]:
    """What is printed of a row, at most 80 columns wide; `first`: of the first row of its case."""
    lines = []
    if first:
        shape = "x".join(str(size) for size in row["shape"])
        threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        spread = f"({row['ours_ms_p20']:.2f} to {row['ours_ms_p80']:.2f})"
        lines = [
            f"{row['op']}, {row['case']}, {shape} {row['dtype']} ({row['backend']}, {threads})",
            f"  {'ours':24}{row['ours_ms_p50']:10.2f} ms {spread}, {row['share_of_copy_bandwidth']:.0%} of copy speed",
        ]
    if row["rival"]:
        lines.append(
            f"  {row['rival']:24}{row['rival_ms_p50']:10.2f} ms, "
            f"{row['ratio_p50']:.2f} times as long ({row['ratio_p20']:.2f} to {row['ratio_p80']:.2f})"
        )
    return lines


def _load_peer(peer: str | Path | None) -> dict[str, Callable[..., Any]]:
    if peer is None:
        return {}
    path = Path(peer)
    if not path.is_file():
        raise GradreelError(f"peer file {str(path)!r} does not exist; give a Python file with functions named as ops")
    spec = importlib.util.spec_from_file_location("gradreel_bench_peer", path)
    if spec is None or spec.loader is None:
        raise GradreelError(f"peer file {str(path)!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise GradreelError(f"peer file {str(path)!r} failed: {type(error).__name__}: {error}") from error
    found = {name: getattr(module, name) for name in OPS if callable(getattr(module, name, None))}
    if not found:
        raise GradreelError(f"peer file {str(path)!r} defines none of {', '.join(OPS)}")
    return found


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
