"""Files as a trace needs them: opened without following links, written aside, fsynced, renamed.

Every file of a trace is either complete under its final name or absent. What a killed writer leaves behind has a name
that begins with a dot and is never read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traces._store import BLOCK_BYTES as STORE_BYTES
from traces._store import StorePath, StoreStatus, StoreWriter
from traces.errors import TraceError

_BLOCK_BYTES = 256 << 10  # hashed, then written while still in cache; 1 MiB blocks took nearly twice the CPU time
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

Stamp = tuple[int, int, int, int]
Status = os.stat_result | StoreStatus
Opened = int | StorePath  # a descriptor, or a file of a store, which is asked for ranges


def short(path: Path | StorePath) -> str:
    """Name `path` in a message: the trace folder and what is inside it, on one line."""
    parts = path.parts[-3:] if path.parent.name.startswith("rank-") else path.parts[-2:]
    return "".join(c if c.isprintable() else "?" for c in "/".join(parts).encode(errors="replace").decode())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Opened, Status]]:
    """Open a regular file for reading and yield its descriptor and status.

    A missing file, a link and anything that is not a regular file raise `TraceError`.
    """
    if isinstance(path, StorePath):
        yield path, _store_status(path)
        return
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        raise TraceError(f"{short(path)} is missing; the trace is incomplete, run `gradreel verify` on it") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise TraceError(
                f"{short(path)} is a link; a trace holds regular files only, copy the file itself"
            ) from None
        raise TraceError(f"{short(path)} cannot be read: {error.strerror or error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TraceError(f"{short(path)} is not a regular file; a trace holds regular files only")
        yield descriptor, status
    finally:
        os.close(descriptor)


def _store_status(path: StorePath) -> StoreStatus:
    try:
        return path.status()
    except FileNotFoundError:
        raise TraceError(f"{short(path)} is missing; the trace is incomplete, run `gradreel verify` on it") from None
    except OSError as error:
        raise TraceError(f"{short(path)} cannot be read: {error.strerror or error}") from None


def stamp_of(status: Status) -> Stamp:
    """What identifies a file's content cheaply: device, inode, size, modification time."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_small(path: Path, limit: int) -> bytes:
    """Read a whole file of at most `limit` bytes; `TraceError` beyond that, before anything is allocated."""
    with opened(path) as (descriptor, status):
        if status.st_size > limit:
            raise TraceError(
                f"{short(path)} has {status.st_size} bytes, at most {limit} are allowed for this kind of file"
            )
        data = bytearray(status.st_size)
        read_into(descriptor, 0, memoryview(data), path)
        return bytes(data)


def read_into(descriptor: Opened, offset: int, target: memoryview, path: Path) -> None:
    """Fill `target` from `offset` of an open file; a short file raises `TraceError`."""
    done = 0
    while done < len(target):
        try:
            if isinstance(descriptor, StorePath):
                data = descriptor.read_at(offset + done, min(len(target) - done, STORE_BYTES))
                count = len(data)
                target[done : done + count] = data
            elif hasattr(os, "preadv"):
                count = os.preadv(descriptor, [target[done : done + (1 << 30)]], offset + done)
            else:  # no positioned read: the descriptor is ours alone, so seeking is safe
                os.lseek(descriptor, offset + done, os.SEEK_SET)
                piece = os.read(descriptor, min(len(target) - done, _BLOCK_BYTES))
                count = len(piece)
                target[done : done + count] = piece
        except OSError as error:
            raise TraceError(f"{short(path)} cannot be read: {error.strerror or error}") from None
        if count == 0:
            raise TraceError(f"{short(path)} ends at byte {offset + done}, {len(target) - done} bytes are missing")
        done += count


def sha256_of(descriptor: Opened, size: int, path: Path) -> str:
    """The sha256 of the first `size` bytes of an open file, read block by block."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(min(size, 1 << 20 if isinstance(descriptor, int) else STORE_BYTES) or 1))
    offset = 0
    while offset < size:
        part = block[: min(len(block), size - offset)]
        read_into(descriptor, offset, part, path)
        digest.update(part)
        offset += len(part)
    return digest.hexdigest()


class AsideFile:
    """A file that appears under its final name only when it is complete and on disk.

    `write` hashes and writes in one pass. `commit` fsyncs and renames; `discard` removes what was written. Errors of
    the file system come out as `OSError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.aside = path.with_name(f".{path.name}.tmp")
        self.bytes = 0
        self._digest = hashlib.sha256()
        self._descriptor = os.open(
            self.aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o644
        )

    @property
    def sha256(self) -> str:
        """Hex digest of what was written so far."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> None:
        """Append a bytes-like object without copying it."""
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        for start in range(0, len(view), _BLOCK_BYTES):
            block = view[start : start + _BLOCK_BYTES]
            self._digest.update(block)
            while len(block):
                block = block[os.write(self._descriptor, block) :]
        self.bytes += len(view)

    def commit(self) -> None:
        """Force the bytes to disk, then give the file its name. The folder is fsynced by the caller."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        os.replace(self.aside, self.path)

    def discard(self) -> None:
        """Close and remove the unfinished file; never raises for a file that is gone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(OSError):
            os.unlink(self.aside)


class StoreFile:
    """What `AsideFile` is on disk, for a file of a store: sent block by block, there once it is complete."""

    def __init__(self, path: StorePath) -> None:
        self.path, self.bytes = path, 0
        self._digest = hashlib.sha256()
        self._writer: StoreWriter = path.open_writer()

    @property
    def sha256(self) -> str:
        """Hex digest of what was written so far."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> None:
        """Append a bytes-like object."""
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        for start in range(0, len(view), STORE_BYTES):
            block = view[start : start + STORE_BYTES]
            self._digest.update(block)
            self._writer.write(block)
        self.bytes += len(view)

    def commit(self) -> None:
        """Complete the file."""
        self._writer.close()

    def discard(self) -> None:
        """Give the unfinished file up; never raises."""
        self._writer.discard()


def new_file(path: Path) -> AsideFile | StoreFile:
    """A new file at `path`, on disk or in a store: `write`, then `commit` or `discard`."""
    return StoreFile(path) if isinstance(path, StorePath) else AsideFile(path)


def write_file(path: Path, data: bytes, *, new: bool = False) -> None:
    """Write one small file aside, fsync it, rename it, fsync its folder. In a store: put it whole.

    `new` lets a store refuse to replace a file, with `FileExistsError`; on disk a folder is claimed by making it.
    """
    if isinstance(path, StorePath):
        path.write_bytes(data, new=new)
        return
    file = AsideFile(path)
    try:
        file.write(data)
        file.commit()
    except BaseException:
        file.discard()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable; a store has none."""
    if isinstance(folder, StorePath):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a platform that cannot open folders keeps its own promises about renames
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_lock(path: Path) -> int | None:
    """Hold an advisory lock on a file for as long as this process lives; None where the system or store has none."""
    if isinstance(path, StorePath):
        return None
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(path, _READ_FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # some network file systems have no locks; recording goes on without
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock of `take_lock`; False where that cannot be known."""
    if isinstance(path, StorePath):
        return False
    try:
        import fcntl

        descriptor = os.open(path, _READ_FLAGS)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
