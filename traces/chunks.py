"""Chunk files: safetensors, written in one pass and read without trusting their header.

Keys are `STEP/STREAM/NAME`. Elements are little-endian, tensors lie gapless in the order of the header, wide dtypes
first, so that every tensor starts at a multiple of its element size.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traces._copies import is_copied, opened_sealed, wrong_hash, wrong_size
from traces._files import Opened, Stamp, Status, new_file, read_into, sha256_of, short, stamp_of
from traces._json import Fields, clip, integer, parse_json
from traces.errors import TraceError
from traces.schema import DTYPES, MAX_DIMENSIONS, SAFETENSORS_DTYPES, RawTensor
from traces.seals import FileEntry

#: The safetensors library itself stops at 100 MB; a chunk of ours is closed long before.
MAX_CHUNK_HEADER_BYTES = 16 << 20
MAX_TENSORS_PER_CHUNK = 50_000

Key = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies: bytes [start, start + size) counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def check_tensor(tensor: RawTensor, where: str) -> RawTensor:
    """Refuse bits that do not fit what the tensor says about itself; return it with C-contiguous data."""
    if tensor.dtype not in DTYPES:
        raise TraceError(f"{where}: dtype {clip(tensor.dtype)} cannot be stored. Choices: {', '.join(DTYPES)}")
    stored = DTYPES[tensor.dtype][1]
    if tensor.data.dtype != stored:
        raise TraceError(f"{where}: {tensor.dtype} needs an array of {stored}, got {tensor.data.dtype}")
    if tensor.data.size != math.prod(tensor.shape):
        raise TraceError(f"{where}: shape {tensor.shape} does not fit {tensor.data.size} elements")
    if tensor.data.flags.c_contiguous:
        return tensor
    return RawTensor(tensor.dtype, tensor.shape, np.ascontiguousarray(tensor.data))


def raw_from_array(array: np.ndarray, where: str = "array") -> RawTensor:
    """Wrap a numpy array of an ordinary dtype (float32, int8, bool, ...)."""
    if array.dtype.name not in DTYPES:
        raise TraceError(f"{where}: dtype {array.dtype} cannot be stored. Choices: {', '.join(DTYPES)}")
    data = np.ascontiguousarray(array, dtype=DTYPES[array.dtype.name][1])
    return RawTensor(array.dtype.name, tuple(array.shape), data.reshape(array.shape))


def write_chunk(path: Path, tensors: Iterable[tuple[Key, RawTensor]]) -> FileEntry:
    """Write tensors aside, hash them in the same pass, fsync and rename. Errors of the disk come out as `OSError`."""
    ordered = sorted(tensors, key=lambda item: -DTYPES[item[1].dtype][1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "gradreel"}}
    offset = 0
    for (step, stream, name), tensor in ordered:
        end = offset + tensor.data.nbytes
        header[f"{step}/{stream}/{name}"] = {
            "dtype": DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_CHUNK_HEADER_BYTES:
        raise TraceError(f"{short(path)}: {len(ordered)} tensors in one step are too many; record fewer parameters")
    file = new_file(path)
    try:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if tensor.data.nbytes:
                file.write(tensor.data.reshape(-1).view(np.uint8))
        file.commit()
    except BaseException:
        file.discard()
        raise
    return FileEntry(path.name, file.bytes, file.sha256)


def read_index(descriptor: Opened, size: int, path: Path) -> dict[Key, Slot]:
    """Parse and check the header of an open safetensors file of `size` bytes. Allocates at most the header."""
    where = short(path)
    if size < 8:
        raise TraceError(f"{where} has {size} bytes, a safetensors file has at least 8; it was cut")
    head = bytearray(8)
    read_into(descriptor, 0, memoryview(head), path)
    length = int.from_bytes(head, "little")
    if length > min(size - 8, MAX_CHUNK_HEADER_BYTES):
        raise TraceError(
            f"{where} declares a header of {length} bytes; at most {min(size - 8, MAX_CHUNK_HEADER_BYTES)} fit"
        )
    raw = bytearray(length)
    read_into(descriptor, 8, memoryview(raw), path)
    table = parse_json(bytes(raw), where)
    if not isinstance(table, dict):
        raise TraceError(f"{where}: the header must be a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TraceError(f"{where}: __metadata__ must map text to text")
    slots = {_key(key, where): _slot(value, f"{where}: {clip(key)}", 8 + length, size) for key, value in table.items()}
    if len(slots) != len(table):
        raise TraceError(f"{where}: two keys name the same tensor")
    expected = 8 + length
    for slot in sorted(slots.values(), key=lambda s: (s.start, s.size)):
        if slot.start != expected:
            raise TraceError(f"{where}: tensors overlap or leave a gap at byte {min(slot.start, expected)}")
        expected += slot.size
    if expected != size:
        raise TraceError(f"{where}: tensors end at byte {expected}, the file at {size}")
    return slots


def _key(text: str, where: str) -> Key:
    parts = text.split("/", 2)
    if len(parts) != 3 or not parts[0].isascii() or not parts[0].isdigit() or len(parts[0]) > 16:
        raise TraceError(f"{where}: key {clip(text)} is not STEP/STREAM/NAME")
    return int(parts[0]), parts[1], parts[2]


def _slot(value: Any, where: str, base: int, size: int) -> Slot:
    fields = Fields(value, where)
    code = fields.take("dtype")
    if not isinstance(code, str) or code not in SAFETENSORS_DTYPES:
        raise TraceError(f"{where}: dtype {clip(code)} is not known. Choices: {', '.join(SAFETENSORS_DTYPES)}")
    shape = fields.items("shape", MAX_DIMENSIONS, lambda v, w: integer(v, w, 0, 1 << 48))
    offsets = fields.items("data_offsets", 2, integer)
    fields.done()
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= size - base:
        raise TraceError(f"{where}: offsets {list(offsets)} lie outside the {size - base} bytes of data")
    dtype = SAFETENSORS_DTYPES[code]
    if math.prod(shape) * DTYPES[dtype][1].itemsize != offsets[1] - offsets[0]:
        raise TraceError(f"{where}: shape {list(shape)} of {code} does not fill {offsets[1] - offsets[0]} bytes")
    return Slot(dtype, shape, base + offsets[0], offsets[1] - offsets[0])


class ChunkFile:
    """One sealed safetensors file, checked against its seal the first time it is touched.

    Reading opens the file anew, compares size and times with what was checked, and reads only the bytes asked for.
    From a store, a file that is to be hashed is read from a copy (`traces._copies`), another one range by range.
    `checked` remembers by file name what was hashed, beyond the life of this object.
    """

    def __init__(
        self,
        path: Path,
        entry: FileEntry,
        steps: tuple[int, int],
        check_hash: bool = True,
        checked: dict[str, Stamp] | None = None,
    ) -> None:
        self.path, self.entry, self.steps, self.check_hash = path, entry, steps, check_hash
        self._checked: dict[str, Stamp] = {} if checked is None else checked
        self._index: dict[Key, Slot] | None = None
        self._stamp: Stamp | None = None
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        """Name of the file and its steps, for messages."""
        return f"{short(self.path)} (steps {self.steps[0]} to {self.steps[1]})"

    def index(self) -> dict[Key, Slot]:
        """Where each tensor lies. The first call reads the whole file once to check its hash."""
        with self._lock:
            if self._index is None:
                with naming_steps(self.path, self.steps), self._opened() as (descriptor, status):
                    self._stamp = stamp_of(status)
                    known = self._copied or self._checked.get(self.entry.name) == self._stamp
                    check_entry(descriptor, status.st_size, self.entry, self.path, self.check_hash and not known)
                    self._index = read_index(descriptor, status.st_size, self.path)
                    self._checked[self.entry.name] = self._stamp
                for key in self._index:
                    if not self.steps[0] <= key[0] <= self.steps[1]:
                        raise TraceError(f"{self.where}: holds a tensor of step {key[0]}, which its seal does not name")
            return self._index

    @property
    def _copied(self) -> bool:
        return is_copied(self.path, self.check_hash)

    def _opened(self) -> contextlib.AbstractContextManager[tuple[Opened, Status]]:
        return opened_sealed(self.path, self.entry, self.check_hash)

    def forget(self) -> None:
        """Drop the parsed header."""
        with self._lock:
            self._index = None

    def read(self, slot: Slot, axis: int | None = None, positions: Sequence[int] | None = None) -> np.ndarray:
        """The stored bits of one tensor, or of some positions along one axis of it, as a fresh writable array.

        Along axis 0 only the bytes of those positions are read.
        """
        stored = DTYPES[slot.dtype][1]
        with naming_steps(self.path, self.steps), self._opened() as (descriptor, status):
            if not self._copied and stamp_of(status) != self._stamp:
                raise TraceError(f"{self.where} changed while the trace was open; a sealed file never changes")
            if positions is None or axis != 0:
                array = np.empty(slot.shape, stored)
                if array.nbytes:
                    read_into(descriptor, slot.start, _bytes_of(array), self.path)
                return array if positions is None else np.take(array, np.asarray(positions, np.int64), axis=axis)
            array = np.empty((len(positions), *slot.shape[1:]), stored)
            width = slot.size // max(slot.shape[0], 1)
            if width == 0:
                return array
            target = _bytes_of(array)
            for first, last in _runs(positions):
                start = slot.start + positions[first] * width
                read_into(descriptor, start, target[first * width : last * width], self.path)
            return array


@contextlib.contextmanager
def naming_steps(path: Path, steps: tuple[int, int]) -> Iterator[None]:
    """Add the steps of a data file to an error that names the file only."""
    name, where = short(path), f"{short(path)} (steps {steps[0]} to {steps[1]})"
    try:
        yield
    except TraceError as error:
        message = str(error)
        raise TraceError(message if where in message else message.replace(name, where, 1)) from None


def check_entry(descriptor: Opened, size: int, entry: FileEntry, path: Path, check_hash: bool) -> None:
    """Compare an open file with what its seal declares."""
    if size != entry.bytes:
        raise wrong_size(short(path), size, entry)
    if check_hash and (digest := sha256_of(descriptor, size, path)) != entry.sha256:
        raise wrong_hash(short(path), digest, entry)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _runs(positions: Sequence[int]) -> Iterable[tuple[int, int]]:
    first = 0
    for i in range(1, len(positions) + 1):
        if i == len(positions) or positions[i] != positions[i - 1] + 1:
            yield first, i
            first = i
