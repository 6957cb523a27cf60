"""Data files of a store as checked copies on this machine.

A chunk or routing file is fetched whole the first time it is needed, hashed on the way, and read from its copy from
then on. Copies lie in a folder of this process below the system's folder for temporary files (`TMPDIR`); the least
recently used go when they take more than `KEPT_BYTES`, all go when the process ends, and those of a killed process go
when the next one starts.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from traces._files import Opened, Status, is_locked, opened, short, take_lock
from traces._store import BLOCK_BYTES, StoreError, StorePath
from traces.errors import TraceError
from traces.seals import FileEntry

KEPT_BYTES = 4 << 30
_PREFIX = "gradreel-copies-"
_SPARE_BYTES = 64 << 20
_STALE_SECONDS = 60.0


def wrong_size(where: str, size: int, entry: FileEntry) -> TraceError:
    """The error for a data file whose size is not what its seal says."""
    change = "cut" if size < entry.bytes else "longer than sealed"
    return TraceError(f"{where} is {change}: {size} bytes, its seal says {entry.bytes}; restore the file from a copy")


def wrong_hash(where: str, digest: str, entry: FileEntry) -> TraceError:
    """The error for a data file whose content is not what its seal says."""
    return TraceError(
        f"{where} is damaged: its sha256 is {digest[:12]}..., its seal says {entry.sha256[:12]}...; "
        "restore it from a copy"
    )


@contextlib.contextmanager
def opened_sealed(path: Path, entry: FileEntry, whole: bool) -> Iterator[tuple[Opened, Status]]:
    """Open a data file: itself; in a store its checked copy, or without `whole` the ranges that are read."""
    if not is_copied(path, whole):
        with opened(path) as found:
            yield found
        return
    place = COPIES.hold(path, entry)
    try:
        with opened(place) as found:
            yield found
    finally:
        COPIES.release(path, entry)


def is_copied(path: Path, whole: bool) -> bool:
    """Whether `opened_sealed` reads a copy, which was hashed when it was made."""
    return whole and isinstance(path, StorePath)


class Copies:
    """The copies of one process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._folder: Path | None = None
        self._owner = 0
        self._guard: int | None = None
        self._kept: OrderedDict[tuple[str, str], tuple[Path, int]] = OrderedDict()
        self._held: dict[tuple[str, str], int] = {}

    def hold(self, path: Path, entry: FileEntry) -> Path:
        """The copy of a data file, which stays at least until `release`; `TraceError` where it cannot be had."""
        key = (str(path), entry.sha256)
        with self._lock:
            self._forget_if_forked()
            if key not in self._kept or not self._kept[key][0].exists():
                self._make_room(entry.bytes)
                self._kept[key] = (self._fetch(path, entry), entry.bytes)
            self._kept.move_to_end(key)
            self._held[key] = self._held.get(key, 0) + 1
            return self._kept[key][0]

    def hold_for(self, owner: object, path: Path, entry: FileEntry) -> Path:
        """The same, released when `owner` is gone."""
        place = self.hold(path, entry)
        weakref.finalize(owner, self.release, path, entry).atexit = False
        return place

    def release(self, path: Path, entry: FileEntry) -> None:
        """Give a held copy back; it may go when room is needed."""
        key = (str(path), entry.sha256)
        with self._lock:
            left = self._held.get(key, 1) - 1
            if left > 0:
                self._held[key] = left
            else:
                self._held.pop(key, None)

    def forget(self, path: Path, entry: FileEntry) -> None:
        """Fetch a file anew when it is asked for next, so that a check sees what the store holds now."""
        with self._lock:
            key = (str(path), entry.sha256)
            if key in self._kept and key not in self._held:
                self._remove(key)
            else:
                self._kept.pop(key, None)  # its file stays for those who hold it, until the process ends

    def bytes(self) -> int:
        """Bytes of all copies."""
        return sum(size for _, size in self._kept.values())

    def clear(self) -> None:
        """Remove every copy; for the end of the process, and for tests."""
        with self._lock:
            if self._folder is not None and self._owner == os.getpid():
                if self._guard is not None:
                    os.close(self._guard)
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder, self._guard = None, None
            self._kept.clear()
            self._held.clear()

    def _forget_if_forked(self) -> None:
        """A forked child has the parent's list, but neither its copies nor the right to remove them."""
        if self._folder is not None and self._owner != os.getpid():
            self._folder, self._guard = None, None
            self._kept.clear()
            self._held.clear()

    def _make_room(self, size: int) -> None:
        for key in [key for key in self._kept if key not in self._held]:
            if self.bytes() + size <= KEPT_BYTES:
                return
            self._remove(key)

    def _remove(self, key: tuple[str, str]) -> None:
        shutil.rmtree(self._kept.pop(key)[0].parent.parent.parent, ignore_errors=True)

    def _fetch(self, path: Path, entry: FileEntry) -> Path:
        assert isinstance(path, StorePath)
        where, root = short(path), self._root()
        free = shutil.disk_usage(root).free
        if entry.bytes + _SPARE_BYTES > free:
            raise TraceError(
                f"{where} has {entry.bytes} bytes, {str(root.parent)!r} has room for {max(0, free - _SPARE_BYTES)}; "
                "set TMPDIR to a folder with more room"
            )
        rank = path.parent.name if re.fullmatch(r"rank-\d{5}", path.parent.name) else "rank"
        trace = re.sub(r"[^A-Za-z0-9_-]", "_", path.parent.parent.name.removesuffix(".trace"))[:64]
        top = Path(tempfile.mkdtemp(dir=root))
        place = top / f"{trace}.trace" / rank / entry.name
        try:
            place.parent.mkdir(parents=True)
            digest = _download(path, entry, place)
            if digest != entry.sha256:
                raise wrong_hash(where, digest, entry)
        except BaseException as error:
            shutil.rmtree(top, ignore_errors=True)
            if isinstance(error, FileNotFoundError):
                raise TraceError(f"{where} is missing; the trace is incomplete, run `gradreel verify` on it") from None
            if isinstance(error, OSError):
                raise TraceError(f"{where} cannot be read: {error.strerror or error}") from None
            raise
        return place

    def _root(self) -> Path:
        if self._folder is None:
            base = Path(tempfile.gettempdir())
            self._folder, self._owner = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base)), os.getpid()
            (self._folder / "lock").touch()
            self._guard = take_lock(self._folder / "lock")
            if is_locked(self._folder / "lock"):  # where locks work, a folder without one is left over
                _sweep(base)
        return self._folder


def _download(path: StorePath, entry: FileEntry, place: Path) -> str:
    """Fetch a file block by block, never more than its seal declares; return its sha256."""
    size = path.status().st_size
    if size != entry.bytes:
        raise wrong_size(short(path), size, entry)
    digest, done = hashlib.sha256(), 0
    with open(place, "xb") as file:
        while done < size:
            block = path.read_at(done, min(BLOCK_BYTES, size - done))
            if not block:
                raise StoreError(f"it ends at byte {done}, {size - done} bytes are missing")
            digest.update(block)
            file.write(block)
            done += len(block)
    return digest.hexdigest()


def _sweep(base: Path) -> None:
    """Remove what a killed process left: folders of ours whose lock nobody holds."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            ours = not folder.is_symlink() and (not hasattr(os, "getuid") or status.st_uid == os.getuid())
            if ours and time.time() - status.st_mtime > _STALE_SECONDS and not is_locked(folder / "lock"):
                shutil.rmtree(folder, ignore_errors=True)


COPIES = Copies()
atexit.register(COPIES.clear)
