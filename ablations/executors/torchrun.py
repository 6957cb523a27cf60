"""One run at a time, by several processes with a share of every batch each: for models that want several GPUs.

`torchrun` itself starts and watches the processes; one that dies ends the run, and the next run is begun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ablations.executors import Executor, Job, OnSteps, Outcome
from traces.errors import GradreelError

_HOUSE = Path(__file__).resolve().parents[2]
_GRACE_SECONDS = 10.0


def run(jobs: Sequence[Job], *, workers: int, on_steps: OnSteps) -> Generator[Outcome, None, None]:
    """See `ablations.executors.Run`. `workers` is the number of processes of each run; steps are told when it ends."""
    if workers < 1:
        raise GradreelError(f"workers is {workers}; allowed: at least 1")
    for job in jobs:
        with tempfile.TemporaryDirectory(prefix="gradreel-torchrun-") as folder:
            yield Outcome(job.id, _make(job, workers, Path(folder)))


def _make(job: Job, processes: int, folder: Path) -> str | None:
    file, log = folder / "job.json", folder / "log"
    file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    path = os.pathsep.join(p for p in (str(_HOUSE), os.environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with open(log, "wb") as said:
        started = subprocess.Popen(
            [*command, "-m", "ablations.runner.distributed", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
            start_new_session=True,  # so that an interrupt of ours ends all of it, and only through us
        )
        try:
            code = started.wait()
        finally:
            _stop(started)
    error = file.with_suffix(".error")
    if error.exists():
        return error.read_text(encoding="utf-8")
    return None if code == 0 else f"its processes died (exit code {code}): {_last_words(log)}"


def _stop(started: subprocess.Popen[bytes]) -> None:
    if started.poll() is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGTERM)
    try:
        started.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def _last_words(log: Path) -> str:
    with open(log, "rb") as said:
        said.seek(max(0, log.stat().st_size - 20_000))
        lines = said.read().decode(errors="replace").splitlines()
    telling = [line.strip() for line in lines if "Error" in line or "Signal" in line]
    return (telling or [line.strip() for line in lines if line.strip()] or ["no word"])[-1]


EXECUTOR = Executor("torchrun", "several processes for each run, one run at a time", run)
