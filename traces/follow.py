"""Watch a trace while it is being written: `gradreel info --follow`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traces._store import as_place, there_is
from traces.errors import GradreelError
from traces.reader import Trace, open_trace
from traces.record_at import format_bytes

#: How long a trace that has begun may refuse to open: its ranks do not begin in the same moment.
_BEGIN_SECONDS = 60.0
_FAILURES = 5


def follow(
    path: str | Path,
    show: Callable[[str], None],
    *,
    every: float = 2.0,
    note: Callable[[str], None] = lambda line: None,
    sleep: Callable[[float], Any] = time.sleep,
) -> Trace | None:
    """Show one line whenever steps have been sealed, until the trace ends, and return it.

    Looks each `every` seconds; a trace that is not there yet is waited for, a look that fails is tried again. None
    where the writer, a process of this machine, is gone without an end. `show` gets what was sealed, `note` what is
    waited for. Errors: `GradreelError` for a place that is no trace, or is damaged.
    """
    if not (math.isfinite(every) and every > 0):
        raise GradreelError(f"--every {every} is no number of seconds; give one above 0")
    trace = _wait_for(as_place(path), note, every, sleep)
    seen = _Seen()
    had_writer = failures = 0
    while True:
        had_writer = had_writer or trace.being_written
        try:
            gone = bool(had_writer) and not trace.being_written
            trace.refresh()  # after the look at the lock, which is given back after the end is written
            seen.show_new(trace, show)
            failures = 0
        except GradreelError:
            failures += 1
            if failures == _FAILURES:
                raise
            gone = False
        if trace.finished:
            show(f"finished: {seen.summary(trace)}")
            return trace
        if gone:
            show(f"the writer is gone, and has not ended the trace: {seen.summary(trace)}; gradreel recover {path}")
            return None
        sleep(every)


def _wait_for(place: Path, note: Callable[[str], None], every: float, sleep: Callable[[float], Any]) -> Trace:
    told, begun = False, None
    while True:
        if there_is(place / "header.json"):
            begun = begun or time.monotonic()
            try:
                return open_trace(place, check_hash=False)
            except GradreelError:
                if time.monotonic() - begun > _BEGIN_SECONDS:
                    raise
        elif place.is_file():
            raise GradreelError(f"{str(place)!r} is a file, not a trace; give the path of a trace folder (NAME.trace)")
        elif not told:
            note(f"waiting for {place} to begin")
            told = True
        sleep(every)


class _Seen:
    """What was shown already."""

    def __init__(self) -> None:
        self.steps = self.bytes = self._shown = 0
        self._seals: dict[int, int] = {}

    def show_new(self, trace: Trace, show: Callable[[str], None]) -> None:
        new = trace.all_steps[self._shown :]
        size = 0
        for rank in trace._ranks:
            for seal in rank.seals[self._seals.get(rank.rank, 0) :]:
                size += sum(entry.bytes for entry in seal.files)
            self._seals[rank.rank] = len(rank.seals)
        self.bytes += size
        self._shown += len(new)
        if new and _is_closing(trace, new[-1]):
            new = new[:-1]
        if not new and not size:
            return
        self.steps += len(new)
        span = "closing weights" if not new else f"step {new[0]}" if len(new) == 1 else f"steps {new[0]} to {new[-1]}"
        show(
            f"{time.strftime('%H:%M:%S')}  {span:<24}  {_loss(trace, new):<14}  +{format_bytes(size)}, "
            f"{format_bytes(self.bytes)} in all"
        )

    def summary(self, trace: Trace) -> str:
        lost = f", {trace.lost_steps} lost" if trace.lost_steps else ""
        return f"{self.steps} steps, {format_bytes(self.bytes)}{lost}"


def _loss(trace: Trace, steps: list[int]) -> str:
    """The last loss among these steps, as far as one was logged."""
    for step in reversed(steps):
        loss = trace._record(step).scalars.get("loss")
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            return f"loss {loss:.5g}"
    return "" if not steps else "no loss"


def _is_closing(trace: Trace, step: int) -> bool:
    """Whether a step is the closing snapshot of the weights, which is no optimizer step."""
    record = trace._record(step)
    return not record.recorded and not record.skipped and not record.scalars
