"""Processes on this machine: each worker is started once, uses one thread, and makes one run after the other.

Workers are spoken to in lines of JSON over their standard streams, so nothing of the caller's program is imported or
pickled. A worker that dies takes the run it was making with it and is replaced.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ablations.executors import Executor, Job, OnSteps, Outcome
from traces.errors import GradreelError

_HOUSE = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0


def run(jobs: Sequence[Job], *, workers: int, on_steps: OnSteps) -> Generator[Outcome, None, None]:
    """See `ablations.executors.Run`."""
    if workers < 1:
        raise GradreelError(f"workers is {workers}; allowed: at least 1")
    waiting, said = deque(jobs), queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]]()
    crew = {_Worker(said) for _ in range(min(workers, len(jobs)))}
    try:
        for worker in crew:
            worker.give(waiting.popleft())
        while crew:
            try:
                worker, message = said.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if worker not in crew or worker.job is None:
                continue
            if message is not None and "steps" in message:
                on_steps(worker.job.id, int(message["steps"]))
                continue
            done = worker.job
            if message is None:
                yield Outcome(done.id, worker.last_words())
                crew.discard(worker)
                worker.stop()
                if waiting:
                    worker = _Worker(said)
                    crew.add(worker)
            else:
                yield Outcome(done.id, message.get("error"))
            if worker in crew and waiting:
                worker.give(waiting.popleft())
            elif worker in crew:
                crew.discard(worker)
                worker.stop()
    finally:
        for worker in crew:
            worker.stop()


class _Worker:
    """One process, and the thread that listens to it."""

    def __init__(self, said: queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]]) -> None:
        self.job: Job | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS"), "1")
        path = os.pathsep.join(p for p in (str(_HOUSE), os.environ.get("PYTHONPATH", "")) if p)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from ablations.runner.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **threads, "PYTHONPATH": path},
        )
        threading.Thread(target=self._listen, args=(said,), daemon=True).start()

    def _listen(self, said: queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                try:
                    said.put((self, json.loads(line)))
                except ValueError:
                    continue  # a library that prints
        self.process.wait()
        said.put((self, None))

    def give(self, job: Job) -> None:
        """Hand over the next job; one that cannot be handed over shows as a worker that died."""
        self.job = job
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self.process.stdin.flush()

    def last_words(self) -> str:
        """Why the process is gone, in one line."""
        code = self.process.returncode
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        why = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"its worker died ({why}){': ' + lines[-1] if lines else ''}"

    def stop(self) -> None:
        """End the process, if need be by force."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        self._errors.close()


EXECUTOR = Executor("local", "processes on this machine, one thread each", run)
