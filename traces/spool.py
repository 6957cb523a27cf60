"""From the training thread to the writer thread: reused buffers, a transfer per device, a bounded queue.

The training thread pays for one copy of each tensor and nothing else. Whatever can wait (presence, masks, hashing,
files) happens on the one writer thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from traces.errors import GradreelError
from traces.schema import RawTensor

#: Device memory that a CUDA transfer may use to take gradients aside; above it the stream waits for the copy instead.
STAGE_BYTES = 512 << 20


class BufferPool:
    """Host buffers that are used again, because a fresh one costs a page fault for every 4 KiB of it."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.allocated_bytes = 0
        self._free: dict[tuple[tuple[int, ...], torch.dtype], deque[Tensor]] = defaultdict(deque)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous host tensor with arbitrary content."""
        try:
            return self._free[shape, dtype].pop()
        except IndexError:
            buffer = torch.empty(shape, dtype=dtype, pin_memory=self.pinned)
            self.allocated_bytes += buffer.numel() * buffer.element_size()
            return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back that nothing refers to any more."""
        self._free[tuple(buffer.shape), buffer.dtype].append(buffer)

    def lend(self, buffer: Tensor, shape: tuple[int, ...] | None = None) -> RawTensor:
        """The buffer as a `RawTensor`, seen in `shape`; it comes back by itself when the last array over it is gone."""
        raw = raw_tensor(buffer if shape is None else buffer.view(shape))
        # numpy views and memoryviews keep `raw.data` alive, so this fires no earlier than the file is written.
        weakref.finalize(raw.data, self.give, buffer).atexit = False
        return raw


def raw_tensor(tensor: Tensor) -> RawTensor:
    """A contiguous CPU tensor's bits without a copy; bfloat16 as uint16, 8-bit floats as uint8."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    bits = tensor.detach() if tensor.requires_grad else tensor
    if tensor.dtype is torch.bfloat16:
        bits = bits.view(torch.uint16)
    elif dtype.startswith("float8"):
        bits = bits.view(torch.uint8)
    return RawTensor(dtype, tuple(tensor.shape), bits.numpy())


class CpuTransfer:
    """Copies on the spot: exactly one copy of each tensor."""

    def __init__(self) -> None:
        self.pool = BufferPool()

    def begin(self, nbytes: int) -> None:
        """Nothing to prepare on the CPU."""

    def copy(
        self,
        source: Tensor,
        dtype: torch.dtype | None = None,
        divisor: Tensor | None = None,
        select: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """Copy `source` (any layout) into a contiguous buffer of `dtype`, divided by `divisor` where one is given.

        `select`: an axis, and the int64 positions along it that are copied.
        """
        if select is not None:
            target = self.pool.take(_selected(source, select), dtype or source.dtype)
            if divisor is None and target.dtype == source.dtype:
                return torch.index_select(source, *select, out=target)
            chosen = source.index_select(*select)
            return target.copy_(chosen if divisor is None else torch.div(chosen, divisor))
        target = self.pool.take(tuple(source.shape), dtype or source.dtype)
        if divisor is None:
            target.copy_(source)
        else:
            target.copy_(torch.div(source, divisor)) if target.dtype != source.dtype else torch.div(
                source, divisor, out=target
            )
        return target

    def small(self, tensor: Tensor) -> Tensor:
        """A small tensor that nobody will change, on the host."""
        return tensor

    def end(self) -> Callable[[], None]:
        """What the writer thread calls before it looks at the copies."""
        return _nothing

    def mark(self) -> Callable[[], None]:
        """What the writer thread calls before it reads a logged tensor."""
        return _nothing


class CudaTransfer:
    """Device to pinned host memory on a side stream; the training thread never waits for the device.

    `cuda` is `torch.cuda` or anything with its `Stream`, `Event`, `stream` and `current_stream`.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, pinned: bool = True) -> None:
        self.device, self.cuda = device, cuda
        self.pool = BufferPool(pinned=pinned)
        self.side = cuda.Stream(device=device)
        self._main: Any = None
        self._stage = True

    def begin(self, nbytes: int) -> None:
        """Start the copies of one step, `nbytes` in all."""
        self._main = self.cuda.current_stream(self.device)
        self._stage = nbytes <= STAGE_BYTES
        self.side.wait_stream(self._main)

    def copy(
        self,
        source: Tensor,
        dtype: torch.dtype | None = None,
        divisor: Tensor | None = None,
        select: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """Queue one copy and return the pinned buffer that will hold it; what is on the host already is copied now.

        `select`: an axis, and the int64 positions along it that are copied, on the source's device.
        """
        if source.device.type != self.device.type:  # Adam keeps its step counters on the host
            return self.pool.take(tuple(source.shape), dtype or source.dtype).copy_(source)
        if select is not None:
            source = source.index_select(*select)  # on the main stream, and nobody else's to write into
        if divisor is not None:
            source = torch.div(source, divisor)
        if divisor is not None or select is not None:
            source = source.to(dtype or source.dtype)
        elif self._stage or (dtype or source.dtype) != source.dtype or not source.is_contiguous():
            # Taken aside on the main stream: an optimizer may write into the gradient while the side stream reads.
            source = source.to(dtype or source.dtype, copy=True, memory_format=torch.contiguous_format)
        target = self.pool.take(tuple(source.shape), dtype or source.dtype)
        self.side.wait_stream(self._main)
        with self.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)
        source.record_stream(self.side)
        return target

    def small(self, tensor: Tensor) -> Tensor:
        """Queue the copy of a small tensor, into pinned memory that torch itself keeps for such copies.

        A tensor on the host (a user's mask, or a copy made for another optimizer of the step) is returned as it is.
        """
        if tensor.device.type != self.device.type:
            return tensor
        with self.cuda.stream(self.side):
            copied = tensor.to("cpu", non_blocking=True)
        tensor.record_stream(self.side)
        return copied

    def end(self) -> Callable[[], None]:
        """Mark the end of the step's copies; the result waits for it, on the writer thread."""
        done = self.cuda.Event()
        done.record(self.side)
        if not self._stage:
            self._main.wait_event(done)  # on the device: later kernels wait, the host does not
        wait: Callable[[], None] = done.synchronize
        return wait

    def mark(self) -> Callable[[], None]:
        """Mark what the training stream has queued so far; the result waits for it.

        The writer thread reads logged tensors on a stream of its own, which does not follow the training's.
        """
        done = self.cuda.Event()
        done.record(self.cuda.current_stream(self.device))
        wait: Callable[[], None] = done.synchronize
        return wait


def _selected(source: Tensor, select: tuple[int, Tensor]) -> tuple[int, ...]:
    axis, ids = select
    return (*source.shape[:axis], len(ids), *source.shape[axis + 1 :])


def transfer_for(device: torch.device) -> CpuTransfer | CudaTransfer:
    """The transfer of a device."""
    if device.type == "cuda":
        return CudaTransfer(device)
    if device.type == "cpu":
        return CpuTransfer()
    raise GradreelError(f"device {str(device)!r} cannot be recorded; allowed: cpu, cuda")


def _nothing() -> None:
    return None


def check_queue(when_full: str, limit: int) -> None:
    """Refuse a queue that cannot be."""
    if when_full not in ("block", "drop"):
        raise GradreelError(f"when_full {when_full!r} is not allowed; choose 'block' or 'drop'")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise GradreelError(f"queue_steps {limit!r} is not allowed; it must be a whole number, at least 1")


class Spool:
    """A bounded queue and its one writer thread.

    `work(job)` runs on the writer thread. At most `limit` jobs wait or are at work; then `reserve` blocks
    (`when_full="block"`) or answers False (`"drop"`). An exception of `work` loses that job, is counted and kept in
    `first_error`; the thread goes on.
    """

    def __init__(self, work: Callable[[Any], None], limit: int = 4, when_full: str = "block") -> None:
        check_queue(when_full, limit)
        self.when_full, self.lost, self.dropped = when_full, 0, 0
        self.first_error: BaseException | None = None
        self._work, self._jobs = work, deque[Any]()
        self._slots = threading.BoundedSemaphore(limit)
        self._wake = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="gradreel-writer", daemon=True)
        self._thread.start()

    def reserve(self) -> bool:
        """Get a place in the queue, before the copies for it are made. False: drop this step."""
        if self._slots.acquire(blocking=self.when_full == "block"):
            return True
        self.dropped += 1
        return False

    def release(self) -> None:
        """Give a place back unused."""
        self._slots.release()

    def put(self, job: Any, reserved: bool = True) -> None:
        """Hand over a job. Without `reserved` it takes no place: for jobs that hold scalars only."""
        self._jobs.append((job, reserved))
        self._wake.release()

    def drain(self) -> None:
        """Wait until every job so far is done."""
        done = threading.Event()
        self.put(done, reserved=False)
        done.wait()

    def close(self) -> None:
        """Wait until every job is done and end the thread."""
        self._jobs.append((None, False))
        self._wake.release()
        self._thread.join()

    def _run(self) -> None:
        _be_nice()
        while True:
            self._wake.acquire()
            job, reserved = self._jobs.popleft()
            if job is None:
                return
            if isinstance(job, threading.Event):
                job.set()
                continue
            try:
                self._work(job)
            except BaseException as error:  # the training run must not die of this thread
                self.lost += 1
                self.first_error = self.first_error or error
            finally:
                del job
                if reserved:
                    self._slots.release()


def _be_nice() -> None:
    """Let the threads that train go first, where the system knows niceness by thread (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


def presence_codes(data: np.ndarray, dtype: str, num_experts: int | None) -> np.ndarray:
    """ZERO or NONZERO of each expert's slice (axis 0), uint8 [E]; 0-d for `num_experts` None. -0.0 is zero, NaN not."""
    from traces.views import NONZERO, ZERO

    if num_experts == 0:  # a rank without experts of its own
        return np.zeros(0, np.uint8)
    rows = data.reshape(num_experts if num_experts is not None else 1, -1)
    if dtype == "bfloat16" or dtype.startswith("float8"):
        mask = data.dtype.type(0x7FFF if dtype == "bfloat16" else 0x7F)  # all but the sign
        busy = np.array([_any_bits(row, mask) for row in rows])
    else:
        # Nearly every expert with tokens shows it in its first elements; only the others are read to the end.
        busy = (rows[:, :256] != 0).any(axis=1)
        for index in np.flatnonzero(~busy):
            busy[index] = bool((rows[index] != 0).any())
    codes = np.where(busy, NONZERO, ZERO).astype(np.uint8)
    return codes if num_experts is not None else codes[0].reshape(())


def _any_bits(row: np.ndarray, mask: Any) -> bool:
    return bool((row[:256] & mask).any()) or bool((row & mask).any())
