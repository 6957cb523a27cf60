"""Where runs are executed, one way per file. An executor takes jobs and gives their outcomes as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from traces.registry import Registry


@dataclass(frozen=True)
class Job:
    """One run to make: `spec` as plain values, `root` the folder that takes the run's own folder, all as JSON.

    `plugins` are files of the user's that have to be loaded first, since a recipe in them may be meant.
    """

    id: str
    spec: Mapping[str, Any]
    root: str
    plugins: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps the run takes."""
        return int(self.spec["steps"])


@dataclass(frozen=True)
class Outcome:
    """A job that ended: well, with the run's folder written (`error` None), or with one line about why not."""

    id: str
    error: str | None = None


#: `on_steps(id, count)`: `count` more steps of a run are done.
OnSteps = Callable[[str, int], None]


class Run(Protocol):
    """What an executor does: yield one outcome per job, in any order, as soon as it is known.

    A job that fails, or takes its worker with it, is an outcome with an error, and the others go on. When the caller
    stops early (an interrupt, a closed generator), no worker may be left behind. Nothing is ever written by the
    executor itself: a run's folder is complete or absent.
    """

    def __call__(self, jobs: Sequence[Job], *, workers: int, on_steps: OnSteps) -> Generator[Outcome, None, None]: ...


@dataclass(frozen=True)
class Executor:
    """What an executor file exports as `EXECUTOR`."""

    name: str
    summary: str
    run: Run


EXECUTORS: Registry[Executor] = Registry("ablations.executors", "EXECUTOR", "executor")

__all__ = ["EXECUTORS", "Executor", "Job", "OnSteps", "Outcome", "Run"]
