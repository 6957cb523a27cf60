"""Routing files: parquet, one row per token, ids in columns of their own.

Legend: T tokens, K top-k of the widest layer.

Columns: step, micro_step, layer, token, is_pad, expert_0 .. expert_{K-1}; rows are sorted by layer, step, micro_step,
token, so that neighbouring ids come from one layer. The id columns split their bytes into planes, which leaves an
entropy coder one byte per id; the keys are runs and cost next to nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from traces._copies import COPIES, is_copied, opened_sealed
from traces._files import Opened, new_file, read_into, short
from traces._json import clip
from traces._pages import BadPageError, decoded_bytes
from traces.chunks import check_entry, naming_steps
from traces.errors import TraceError
from traces.schema import LayerInfo, RoutingRecord
from traces.seals import FileEntry

if TYPE_CHECKING:
    import pyarrow.parquet as pq

ROW_GROUP_ROWS = 1 << 20
BYTES_PER_ROW = 32
_KEPT_GROUPS = 4
MAX_SLOTS = 4096
KEYS = ("step", "micro_step", "layer", "token")
_PHYSICAL = {"step": "INT64", "micro_step": "INT32", "layer": "INT32", "token": "INT32", "is_pad": "BOOLEAN"}


def id_dtype(num_experts: int) -> np.dtype[Any]:
    """Narrowest signed integer that holds -1 and every id below `num_experts`."""
    return np.dtype(np.int8 if num_experts <= 128 else np.int16 if num_experts <= 32768 else np.int32)


def check_routing(record: RoutingRecord, layer: LayerInfo, step: int) -> None:
    """Refuse routing that does not fit its layer; `TraceError` names step, layer and value."""
    where = f"routing of step {step}, layer {record.layer}"
    ids, pad = record.topk_expert_ids, record.is_pad
    if ids.ndim != 2 or ids.shape[1] > layer.top_k or ids.dtype.kind not in "iu":
        raise TraceError(f"{where}: ids must be integers [T, K <= {layer.top_k}], got {ids.dtype} {ids.shape}")
    if pad.shape != ids.shape[:1] or pad.dtype != np.bool_:
        raise TraceError(f"{where}: is_pad must be bool [{len(ids)}], got {pad.dtype} {pad.shape}")
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= layer.num_experts):
        raise TraceError(f"{where}: ids run from {ids.min()} to {ids.max()}, allowed are -1 to {layer.num_experts - 1}")


def write_routing(path: Path, rows: Sequence[tuple[int, RoutingRecord]], layers: Sequence[LayerInfo]) -> FileEntry:
    """Write (step, record) pairs, already in row order, and return what the seal says about the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lengths = np.array([len(record.is_pad) for _, record in rows], np.int64)
    total = int(lengths.sum())
    slots = max(x.top_k for x in layers)
    ids = np.full((slots, total), -1, id_dtype(max(x.num_experts for x in layers)))
    is_pad, token = np.empty(total, np.bool_), np.empty(total, np.int32)
    end = 0
    for (_, record), length in zip(rows, lengths.tolist(), strict=True):
        begin, end = end, end + length
        ids[: record.topk_expert_ids.shape[1], begin:end] = record.topk_expert_ids.T
        is_pad[begin:end] = record.is_pad
        token[begin:end] = np.arange(length)
    columns: dict[str, Any] = {
        "step": np.repeat(np.array([step for step, _ in rows], np.int64), lengths),
        "micro_step": np.repeat(np.array([r.micro_step for _, r in rows], np.int32), lengths),
        "layer": np.repeat(np.array([r.layer for _, r in rows], np.int32), lengths),
        "token": token,
        "is_pad": is_pad,
    }
    columns.update({f"expert_{k}": ids[k] for k in range(slots)})
    table = pa.table(columns)
    runs = ["step", "micro_step", "layer"]
    encodings = {"token": "DELTA_BINARY_PACKED", "is_pad": "RLE"}
    encodings.update({f"expert_{k}": "BYTE_STREAM_SPLIT" for k in range(slots)})
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
        compression_level=1,
        use_dictionary=runs,
        column_encoding=encodings,
        write_statistics=runs,
        store_schema=False,
        data_page_version="2.0",
    )
    file = new_file(path)
    try:
        file.write(memoryview(sink.getvalue()))
        file.commit()
    except BaseException:
        file.discard()
        raise
    return FileEntry(path.name, file.bytes, file.sha256, total)


class RoutingFile:
    """One sealed routing file, checked before anything in it is decoded."""

    def __init__(self, path: Path, entry: FileEntry, steps: tuple[int, int], layers: Sequence[LayerInfo]) -> None:
        self.path, self.entry, self.steps = path, entry, steps
        self._lock = threading.Lock()
        self._metadata: Any = None
        self._slots = max((x.top_k for x in layers), default=0)
        self._dtype = id_dtype(max((x.num_experts for x in layers), default=1))
        self._checked = False
        self._copy: Path | None = None
        self._decoded: OrderedDict[tuple[int, tuple[str, ...]], Any] = OrderedDict()

    @property
    def where(self) -> str:
        """Name of the file and its steps, for messages."""
        return f"{short(self.path)} (steps {self.steps[0]} to {self.steps[1]})"

    def check(self) -> None:
        """Check size, hash, schema, row counts and declared sizes; `TraceError` otherwise. Free after that."""
        if not self._checked:
            with naming_steps(self.path, self.steps):
                self.place()
            with naming_steps(self.path, self.steps), opened_sealed(self.path, self.entry, True) as found:
                descriptor, status = found
                check_entry(descriptor, status.st_size, self.entry, self.path, not is_copied(self.path, True))
                self._guard(lambda: self._check_metadata(descriptor, status.st_size))
            self._guard(self._check_pages_decode)
            self._checked = True

    def place(self, keep: bool = False) -> Path:
        """Where parquet readers find the file: itself, or its copy from a store, for as long as this object lives.

        `keep` keeps the copy until the process ends, for frames that outlive this object.
        """
        if not is_copied(self.path, True):
            return self.path
        if keep:
            COPIES.hold(self.path, self.entry)
        if self._copy is None:
            self._copy = COPIES.hold_for(self, self.path, self.entry)
        return self._copy

    def _check_pages_decode(self) -> None:
        """Decode every row group once, so that what `Trace.routing` hands out cannot fail later."""
        for group in range((file := self._open()).metadata.num_row_groups):
            self._read_group(file, group, None)

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> dict[str, np.ndarray]:
        """Rows [start, stop) of some columns; decodes one row group (2^20 rows at most) at a time."""
        self.check()
        return self._guard(lambda: self._rows(start, stop, columns))

    def _rows(self, start: int, stop: int, columns: Sequence[str]) -> dict[str, np.ndarray]:
        parts: dict[str, list[np.ndarray]] = {name: [] for name in columns}
        for first, table in self._groups(start, stop, columns):
            piece = table.slice(max(start - first, 0), min(stop - first, table.num_rows) - max(start - first, 0))
            for name in columns:
                parts[name].append(piece.column(name).to_numpy())
        empty: dict[str, np.ndarray] = {
            name: np.empty(0, np.bool_ if name == "is_pad" else np.int64) for name in columns
        }
        return {name: np.concatenate(parts[name]) if parts[name] else empty[name] for name in columns}

    def _groups(self, start: int, stop: int, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        file, first = self._open(), 0
        for group in range(file.metadata.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if first < stop and first + count > start:
                yield first, self._decoded_group(file, group, tuple(columns))
            first += count

    def _decoded_group(self, file: pq.ParquetFile, group: int, columns: tuple[str, ...]) -> Any:
        """A few row groups are kept, because steps are read one by one and a group holds many."""
        with self._lock:
            key = (group, columns)
            if key not in self._decoded:
                self._decoded[key] = self._read_group(file, group, list(columns))
            self._decoded.move_to_end(key)
            while len(self._decoded) > _KEPT_GROUPS:
                self._decoded.popitem(last=False)
            return self._decoded[key]

    def forget(self) -> None:
        """Drop decoded row groups."""
        with self._lock:
            self._decoded.clear()

    def _read_group(self, file: pq.ParquetFile, group: int, columns: list[str] | None) -> Any:
        table = file.read_row_group(group, columns=columns, use_threads=False)
        count = file.metadata.row_group(group).num_rows
        if table.num_rows != count or any(column.null_count for column in table.columns):
            raise TraceError(f"{self.where}: row group {group} does not hold its {count} rows")
        return table

    def _open(self) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        file = pq.ParquetFile(str(self.place()), memory_map=False, pre_buffer=False, metadata=self._metadata)
        self._metadata = file.metadata
        return file

    def _check_metadata(self, descriptor: Opened, size: int) -> None:
        metadata = self._open().metadata
        if metadata.num_rows != self.entry.rows:
            raise TraceError(f"{self.where}: holds {metadata.num_rows} rows, its seal says {self.entry.rows}")
        names = [*_PHYSICAL, *(f"expert_{k}" for k in range(self._slots))]
        schema = [metadata.schema.column(i) for i in range(len(metadata.schema))]
        found = [(c.name, c.physical_type, c.max_repetition_level) for c in schema]
        if found != [(name, _PHYSICAL.get(name, "INT32"), 0) for name in names]:
            raise TraceError(f"{self.where}: columns are not {', '.join(names[:6])}, ... of the declared types")
        for group in range(metadata.num_row_groups):
            info = metadata.row_group(group)
            if not 0 <= info.num_rows <= ROW_GROUP_ROWS:
                raise TraceError(
                    f"{self.where}: row group {group} has {info.num_rows} rows, allowed are {ROW_GROUP_ROWS}"
                )
            for i in range(info.num_columns):
                self._check_column(descriptor, size, info.column(i), info.num_rows)

    def _check_column(self, descriptor: Opened, size: int, column: Any, rows: int) -> None:
        """What a column and its pages promise to hold must be possible for so many rows."""
        limit = BYTES_PER_ROW * rows + 65536
        start = column.data_page_offset
        if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
            start = column.dictionary_page_offset
        length = column.total_compressed_size
        inside = 4 <= start <= start + length <= size

        def read(offset: int, count: int) -> bytes:
            block = bytearray(count)
            read_into(descriptor, offset, memoryview(block), self.path)
            return bytes(block)

        promised = column.total_uncompressed_size
        if not inside or column.num_values != rows or not 0 <= promised <= limit:
            raise TraceError(f"{self.where}: column {clip(column.path_in_schema)} declares a size that cannot be true")
        try:
            decoded = decoded_bytes(read, start, length)
        except BadPageError as error:
            raise TraceError(f"{self.where}: column {clip(column.path_in_schema)}: {error}") from None
        if decoded > limit:
            raise TraceError(f"{self.where}: column {clip(column.path_in_schema)} would decode to {decoded} bytes")

    def _guard(self, action: Any) -> Any:
        """Run a parquet call; whatever it raises (even what is no `Exception`) becomes one line."""
        try:
            return action()
        except (TraceError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            plain = "".join(c if c.isprintable() else "?" for c in reason[:120])  # it may quote bytes of the file
            raise TraceError(f"{self.where} is not readable parquet: {plain}") from None
