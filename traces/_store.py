"""Where a trace lies: a folder of this machine, or a place in an object store behind a URL that fsspec understands.

A local path stays a `pathlib.Path`. A URL (`s3://bucket/run.trace`) becomes a `StorePath`, which has those methods of
`Path` that traces use, so that everything above asks no questions. Stores know no rename and no append: a file is
written whole and under its own name, and exists for readers once a seal names it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from traces.errors import GradreelError

T = TypeVar("T")

#: What is asked for at once from a store, and what is kept in memory of a file on its way there.
BLOCK_BYTES = 8 << 20
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(::[^/]*)?://")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
#: Stores that have folders, which must be made before a file can be put there.
_WITH_FOLDERS = {"arrow_hdfs", "dir", "ftp", "hdfs", "sftp", "smb", "ssh", "webhdfs"}
_INSTALL = "pip install 'gradreel[stores]'"


class StoreError(OSError):
    """A store that cannot be reached or refuses; a kind of `OSError`, so that it costs what a full disk costs."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EIO, reason)


def is_url(path: object) -> bool:
    """Whether a text names a place behind a URL."""
    return isinstance(path, str) and _URL.match(path) is not None


def as_place(path: str | Path) -> Path:
    """A `Path`, or for a URL a `StorePath` (which serves as one). `file://` is a local path like any other.

    A URL that cannot be served (no such protocol, a package is missing) raises `GradreelError`.
    """
    if isinstance(path, StorePath):
        return cast(Path, path)
    if not is_url(path):
        if isinstance(path, Path) and path.parts and _COLLAPSED.fullmatch(path.parts[0]):
            raise GradreelError(f"{str(path)!r} was a URL, of which Path has dropped a slash; give the URL as text")
        return Path(path)
    text = str(path)
    if text.startswith(("file://", "local://")):
        return Path(text.split("://", 1)[1])
    return cast(Path, _open_store(text))


def _open_store(url: str) -> StorePath:
    shown = _without_secrets(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise GradreelError(f"{shown!r} is a URL, for which fsspec is not installed; {_INSTALL}") from None
    try:
        fs, key = url_to_fs(url, use_listings_cache=False)  # a listing that is kept would hide what is new
    except ImportError as error:
        raise GradreelError(f"{shown!r} needs a package that is not installed ({_line(error)}); {_INSTALL}") from None
    except Exception as error:
        raise GradreelError(f"{shown!r} cannot be opened: {_line(error)}") from None
    if not key.strip("/"):
        raise GradreelError(f"{shown!r} names no folder in the store; write SCHEME://PLACE/NAME.trace")
    return StorePath(fs, key.rstrip("/"), shown.rstrip("/"))


def _without_secrets(url: str) -> str:
    """A URL as it may be shown and kept: no password, no signature."""
    return re.sub(r"\?.*", "?...", re.sub(r"://[^/@]*@", "://...@", url))


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:300]


class StorePath:
    """A place in a store. Methods do what those of `pathlib.Path` do; their errors are `StoreError`."""

    __slots__ = ("_shown", "fs", "key")

    def __init__(self, fs: Any, key: str, shown: str) -> None:
        self.fs, self.key, self._shown = fs, key, shown

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"StorePath({self._shown!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and (self.fs, self.key) == (other.fs, other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __fspath__(self) -> str:
        """There is none: what needs a path of this machine gets an `OSError` that says so."""
        raise StoreError(f"{self._shown} lies in a store, not on this machine")

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.fs, f"{self.key}/{name}", f"{self._shown}/{name}")

    @property
    def parts(self) -> tuple[str, ...]:
        """The pieces of the key."""
        return tuple(piece for piece in self.key.split("/") if piece)

    @property
    def name(self) -> str:
        """The last piece."""
        return self.parts[-1]

    @property
    def parent(self) -> StorePath:
        """The place above; a place at the top is its own."""
        if len(self.parts) < 2:
            return self
        return StorePath(self.fs, self.key.rsplit("/", 1)[0], self._shown.rsplit("/", 1)[0])

    @property
    def parents(self) -> tuple[StorePath, ...]:
        """The places above it, which a store does not know as folders: none."""
        return ()

    def absolute(self) -> StorePath:
        """Itself: a URL does not depend on the working folder."""
        return self

    resolve = absolute

    def info(self) -> dict[str, Any] | None:
        """What the store says about it; None where it says that there is nothing."""
        try:
            return self._call(lambda: self.fs.info(self.key))
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """Whether there is a file, or anything below."""
        return self.info() is not None

    def is_dir(self) -> bool:
        """Whether there is anything below."""
        found = self.info()
        return found is not None and found.get("type") == "directory"

    def is_file(self) -> bool:
        """Whether there is a file."""
        found = self.info()
        return found is not None and found.get("type") == "file"

    def is_symlink(self) -> bool:
        """No: stores have none."""
        return False

    def names(self) -> list[str]:
        """Names of what lies directly below, sorted; empty where there is nothing."""
        self.fs.invalidate_cache(self.key)
        try:
            found = self._call(lambda: self.fs.ls(self.key, detail=False))
        except FileNotFoundError:
            return []
        base = self.key.strip("/")
        keys = (str(key).strip("/") for key in found)
        return sorted(key.rsplit("/", 1)[-1] for key in keys if key != base)

    def iterdir(self) -> Iterator[StorePath]:
        """What lies directly below."""
        for name in self.names():
            yield self / name

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Make sure that files can be put here; nothing is left where the store has no folders."""
        protocols = self.fs.protocol if isinstance(self.fs.protocol, tuple | list) else (self.fs.protocol,)
        if _WITH_FOLDERS & set(protocols):
            self._call(lambda: self.fs.makedirs(self.key, exist_ok=True))
        probe = self / f".probe-{uuid.uuid4().hex}"
        probe.write_bytes(b"-")
        probe.unlink()

    def rmdir(self) -> None:
        """Nothing to do: an empty folder is nothing."""

    def unlink(self) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda: self.fs.rm_file(self.key))

    def write_bytes(self, data: bytes, *, new: bool = False) -> None:
        """Put a whole file. `new` raises `FileExistsError` where there is one, as far as the store can tell."""
        if new and self.exists():
            raise FileExistsError(errno.EEXIST, "is there already")
        mode: dict[str, Any] = {"mode": "create"} if new else {}
        try:
            self._call(lambda: self.fs.pipe_file(self.key, data, **mode))
        except FileExistsError:
            raise
        except StoreError as error:
            if not new or not isinstance(error.__cause__, TypeError | ValueError | NotImplementedError):
                raise
            self._call(lambda: self.fs.pipe_file(self.key, data))  # a store that cannot put a file only if it is new

    def read_at(self, start: int, size: int) -> bytes:
        """`size` bytes from `start`, fewer at the end of the file."""
        data = self._call(lambda: self.fs.cat_file(self.key, start=start, end=start + size)) if size else b""
        if len(data) > size:
            raise StoreError(f"the store sent {len(data)} bytes where {size} were asked for")
        return bytes(data)

    def open_writer(self) -> StoreWriter:
        """A file that is put block by block and is there once it is closed."""
        return StoreWriter(self, self._call(lambda: self.fs.open(self.key, "wb", block_size=BLOCK_BYTES)))

    def status(self) -> StoreStatus:
        """Size and identity of a file; `FileNotFoundError` where there is none."""
        found = self.info()
        if found is None or found.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self))
        return StoreStatus(found)

    def _call(self, action: Callable[[], T]) -> T:
        """Run one call of the store; what it raises becomes FileNotFoundError, FileExistsError or StoreError."""
        try:
            return action()
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, _line(error), str(self)) from None
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, "is there already") from None
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{type(error).__name__}: {_line(error)}") from error


class StoreWriter:
    """What `open_writer` gives: write, then close or discard."""

    def __init__(self, path: StorePath, file: Any) -> None:
        self._path, self._file = path, file

    def write(self, data: memoryview) -> None:
        """Hand over bytes; full blocks are sent."""
        self._path._call(lambda: self._file.write(data))

    def close(self) -> None:
        """Send the rest; the file is there afterwards, or a `StoreError` is raised."""
        self._path._call(self._file.close)

    def discard(self) -> None:
        """Leave nothing behind, as far as the store can still be reached; never raises."""
        with contextlib.suppress(Exception):
            self._file.discard()
        if hasattr(type(self._file), "upload_chunk") or hasattr(self._file, "blocksize"):
            with contextlib.suppress(Exception):
                self._file.closed = True  # else the end of this object would put the half-written file
        else:
            with contextlib.suppress(Exception):
                self._path.fs.rm_file(self._path.key)


class StoreStatus:
    """What `os.stat_result` is for local files: size, and numbers that change when the content does."""

    __slots__ = ("st_dev", "st_ino", "st_mtime_ns", "st_size")

    def __init__(self, info: dict[str, Any]) -> None:
        size = info.get("size")
        if not isinstance(size, int) or size < 0:
            raise StoreError("the store does not tell the size of the file")
        marks = [info.get(key) for key in ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created", "generation")]
        self.st_size = size
        self.st_dev, self.st_ino, self.st_mtime_ns = 0, hash(repr(marks)), 0


def names_in(folder: Path) -> list[str]:
    """Names in a folder, sorted."""
    return folder.names() if isinstance(folder, StorePath) else sorted(os.listdir(folder))


def there_is(path: Path) -> bool:
    """Whether something is at `path`, a dangling link included."""
    return path.exists() if isinstance(path, StorePath) else os.path.lexists(path)


def total_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, links left out."""
    if isinstance(folder, StorePath):
        store = folder
        try:
            return int(store._call(lambda: sum(store.fs.du(store.key, total=False).values())))
        except FileNotFoundError:
            return 0
    return sum(entry.lstat().st_size for entry in folder.rglob("*") if not entry.is_symlink() and entry.is_file())
