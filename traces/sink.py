"""The disk end of a recording: jobs go in, a trace comes out, and a full disk costs steps but never the training."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from traces.errors import GradreelError
from traces.placements import Placement
from traces.records import Assembler, Job
from traces.schema import Header
from traces.spool import Spool, check_queue
from traces.writer import TraceWriter

#: What is buffered is sealed when so long has passed since the last seal, however little it is.
SEAL_SECONDS = 60.0


class TraceSink:
    """A `TraceWriter` behind the bounded queue.

    Jobs that come before `start(header)` wait for it. Errors of the disk are counted in `lost`.
    """

    def __init__(self, path: Path, assembler: Assembler, when_full: str, queue_steps: int) -> None:
        check_queue(when_full, queue_steps)
        self.path, self.lost = path, 0
        self.first_error: BaseException | None = None
        self.writer: TraceWriter | None = None
        self._assembler, self._when_full, self._queue_steps = assembler, when_full, queue_steps
        self._spool: Spool | None = None
        self._header: Header | None = None
        self._rank, self._placements = 0, None  # type: int, Mapping[str, Placement | None] | None
        self._early: list[Job] = []
        self._sizes: deque[int] = deque()  # of records that are not sealed yet
        self._given = 0
        self._pause_s = self._try_again_at = 0.0
        self._sealed_steps = 0
        self._sealed_at: float | None = None

    def open(self) -> None:
        """Make the folder and start the writer thread; `GradreelError` where no folder can be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GradreelError(f"folder {str(self.path)!r} cannot be made: {error.strerror}; choose another") from None
        self._spool = Spool(self._write, self._queue_steps, self._when_full)

    @property
    def dropped(self) -> int:
        """Steps a full queue lost."""
        return self._spool.dropped if self._spool else 0

    @property
    def bytes_used(self) -> int:
        """Bytes on disk and estimated bytes on their way there."""
        return (self.writer.bytes_written if self.writer else 0) + sum(list(self._sizes))

    def start(self, header: Header, rank: int = 0, placements: Mapping[str, Placement | None] | None = None) -> None:
        """The header is known now, and what this rank writes: write it with the first job, before any other."""
        self._header, self._rank, self._placements = header, rank, placements
        early, self._early = self._early, []
        for job in early:
            self.put(job)

    def reserve(self) -> bool:
        """Get a place for a job, before its copies are made; False where the step is to be dropped."""
        assert self._spool is not None
        return self._spool.reserve()

    def put(self, job: Job) -> None:
        """Hand over a job."""
        assert self._spool is not None
        if self._header is None:
            if job.reserved:  # a skipped step; it holds no tensors, and must not hold up those that come
                job.reserved = False
                self._spool.release()
            self._early.append(job)
            return
        self._given += 1  # before its size: the writer thread drops the oldest size where there are more than jobs
        self._sizes.append(job.estimated_bytes)
        self._spool.put(job, job.reserved)

    def drain(self) -> None:
        """Wait until every job so far has been taken by the writer."""
        if self._spool is not None:
            self._spool.drain()

    def close(self, notify: Callable[[str], None]) -> None:
        """Write what waits, end the trace, and tell what was lost."""
        if self._spool is None:
            return
        self._spool.close()
        if self.writer is not None:
            self._close_writer(self.writer)
        elif not self._given:
            self._forget_empty_folder()
        if self.lost:
            error = self.first_error
            notify(
                f"{self.lost} of {self._given} steps could not be written to {str(self.path)!r} "
                f"({type(error).__name__}: {error}); every sealed step is readable"
            )
        if self.dropped:
            notify(f"{self.dropped} steps were dropped, the queue was full; raise queue_steps or use when_full='block'")

    # on the writer thread

    def _write(self, job: Job) -> None:
        try:
            record = self._assembler.record(job)
            if time.monotonic() < self._try_again_at and not job.closing:
                self._lose(self.first_error)
                return
            if self.writer is None:
                assert self._header is not None
                self.writer = TraceWriter(self.path, self._header, rank=self._rank, placements=self._placements)
            self.writer.append(record)  # what raises here was not taken
        except Exception as error:
            if isinstance(error, OSError):
                # A full disk is not hammered: each try may write a whole chunk for nothing, while training waits.
                self._pause_s = min(2 * self._pause_s or 1.0, 60.0)
                self._try_again_at = time.monotonic() + self._pause_s
            self._lose(error)
            return
        self._pause_s = 0.0
        self._seal_in_time(self.writer)
        self._forget_sizes()

    def _seal_in_time(self, writer: TraceWriter) -> None:
        """A slow run seals by the clock, so that being killed costs minutes and not hours."""
        now = time.monotonic()
        if writer.sealed_steps != self._sealed_steps or self._sealed_at is None:
            self._sealed_steps, self._sealed_at = writer.sealed_steps, now
        elif now - self._sealed_at >= SEAL_SECONDS:
            self._sealed_at = now
            try:
                writer.flush()
            except Exception as error:  # the steps stay buffered, and the next one tries again
                self.first_error = self.first_error or error

    def _lose(self, error: BaseException | None) -> None:
        self.first_error = self.first_error or error
        self.lost += 1
        if self.writer is not None:
            self.writer.lost_steps += 1
        self._forget_sizes()

    def _forget_sizes(self) -> None:
        sealed = self.writer.sealed_steps if self.writer else 0
        while len(self._sizes) > self._given - sealed - self.lost:
            self._sizes.popleft()

    # on the training thread, after the writer thread has ended

    def _close_writer(self, writer: TraceWriter) -> None:
        try:
            writer.close()
            return
        except Exception as error:
            self.first_error = self.first_error or error
        self.lost = self._given - writer.sealed_steps
        try:
            writer.close(discard=True)
        except Exception as error:
            self.first_error = self.first_error or error

    def _forget_empty_folder(self) -> None:
        with contextlib.suppress(OSError):  # it holds something that is not ours
            self.path.rmdir()
