"""An existing Ray cluster, or one that Ray starts on this machine: one task a run, one core each.

Ray queues, places and retries nothing here: a task that dies is a failed run, and the next call makes it again. Its
workers must see the folder of the runs and this project under the same paths, as on a shared file system.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ablations.executors import Executor, Job, OnSteps, Outcome
from traces.console import one_line
from traces.errors import GradreelError

_HOUSE = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 1.0


def run(jobs: Sequence[Job], *, workers: int, on_steps: OnSteps) -> Generator[Outcome, None, None]:
    """See `ablations.executors.Run`. Steps are told when a run ends, since a task speaks only once.

    `workers` is the most runs at once. Ray's own variables (RAY_ADDRESS) choose the cluster.
    """
    if workers < 1:
        raise GradreelError(f"workers is {workers}; allowed: at least 1")
    try:
        import ray
    except ImportError:
        raise GradreelError("executor ray needs Ray; install it with: pip install 'gradreel[ray]'") from None
    started = not ray.is_initialized()
    if started:
        _connect(ray, workers)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS"), "1")
    environment = {"env_vars": {**threads, "PYTHONPATH": str(_HOUSE)}}
    task = ray.remote(num_cpus=1, max_retries=0, runtime_env=environment)(_make)
    waiting = list(reversed(jobs))
    running: dict[Any, Job] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop()
                running[task.remote(asdict(job))] = job
            done, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
            for reference in done:
                job = running.pop(reference)
                yield Outcome(job.id, _error_of(ray, reference))
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def _connect(ray: Any, workers: int) -> None:
    import os

    here = None if os.environ.get("RAY_ADDRESS") else workers
    try:
        ray.init(num_cpus=here, include_dashboard=False, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise GradreelError(f"executor ray cannot reach or start a cluster: {one_line(error)}") from None


def _error_of(ray: Any, reference: Any) -> str | None:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        return f"its worker died ({one_line(error)})"


def _make(job: dict[str, Any]) -> str | None:
    """What a task does; imports only there, so that the driver's modules are not sent along."""
    import os

    import torch

    from ablations.runner.worker import make

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        return make(job, nowhere, set())


EXECUTOR = Executor("ray", "an existing Ray cluster, or one on this machine", run)
