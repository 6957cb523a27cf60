"""Write a trace: buffer steps, write them as files, then seal them.

A step exists when its seal does. Nothing is ever appended to: each flush makes a chunk, perhaps a routing file, and a
seal that names their hashes and the seal before it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from traces import _small
from traces._files import short, sync_folder, take_lock, write_file
from traces._json import MAX_NAME, clip, dump_signed, encode_value, text
from traces._store import StorePath, as_place, names_in
from traces.chunks import MAX_TENSORS_PER_CHUNK, Key, check_tensor, raw_from_array, write_chunk
from traces.errors import TraceError
from traces.placements import Placement, placement_from_json
from traces.rank_headers import local_tables, rank_to_json
from traces.routing import check_routing, write_routing
from traces.schema import Header, RawTensor, RoutingRecord, StepRecord, check_stream, header_to_json
from traces.seals import (
    MAX_STEPS_PER_SEAL,
    NO_HASH,
    RANK_FOLDER,
    End,
    FileEntry,
    SchemaTables,
    Seal,
    SealedStep,
    end_to_json,
    presence_width,
    seal_to_json,
)
from traces.views import ParamInfo

_SEAL_TEXT_BYTES = 8 << 20
_STEP_TEXT_BYTES = 4 << 20
_PARAM_STREAMS = ("gradient", "grad_buffer", "weight")


class TraceWriter:
    """Write one rank of a trace into the new folder `path`.

    `header` describes what this rank holds; that of rank 0 becomes the trace's `header.json`. `placements` says which
    part of a parameter this rank writes (None: another rank does); parameters that are absent there come whole.
    A folder that holds a trace already is refused. `append` is called from one thread, with increasing steps. Arrays
    handed in are kept by reference until they are written (at most `chunk_bytes` and one step), so the caller must not
    change them. A full disk raises `OSError` out of `append`; that record is lost, what was buffered before it is tried
    again by the next `append`, `flush` or `close`.
    """

    def __init__(
        self,
        path: str | Path,
        header: Header,
        *,
        rank: int = 0,
        placements: Mapping[str, Placement | None] | None = None,
        chunk_bytes: int = 64 << 20,
        chunk_steps: int = 256,
    ) -> None:
        if not 1 <= chunk_steps <= MAX_STEPS_PER_SEAL or chunk_bytes < 1:
            raise TraceError(
                f"chunk_steps {chunk_steps} must be 1 to {MAX_STEPS_PER_SEAL}, chunk_bytes {chunk_bytes} 1 or more"
            )
        if not 0 <= rank < header.ranks:
            raise TraceError(f"rank {rank} of {header.ranks}: ranks count from 0")
        self.path = as_place(path)
        self.header, self.rank = header, rank
        self.bytes_written = 0
        self.sealed_steps = 0
        self.lost_steps = 0
        self.closed = False
        self._chunk_bytes, self._chunk_steps = chunk_bytes, chunk_steps
        self._tables = SchemaTables.of(header)
        self._placements = dict(placements or {})
        for name, part in self._placements.items():  # what a reader would refuse is refused now
            param = self._param(name, "placement")
            if part is not None:
                placement_from_json(part.to_json(), param.shape, f"placement of {clip(name)}")
        self._local = local_tables(self._tables, self._placements)
        self._buffer: list[StepRecord] = []
        self._buffered_bytes = self._buffered_tensors = self._buffered_text = 0
        self._last_step, self._doubtful = -1, False
        self._seals, self._previous = 0, NO_HASH
        raw, digest = dump_signed(header_to_json(header))
        self._folder = _claim(self.path, rank, header.ranks)
        if rank == 0:
            self._write(self.path / "header.json", raw, new=True)
        raw, self._header_hash = dump_signed(
            rank_to_json(rank, header, digest if rank == 0 else None, self._placements)
        )
        self._write(self._folder / "header.json", raw, new=True)
        self._lock = take_lock(self._folder / "header.json")

    def append(self, record: StepRecord) -> None:
        """Take one step; write and seal the buffered ones when enough have come together.

        A record that does not fit the header raises `TraceError` and is not taken.
        """
        if self.closed:
            raise TraceError(f"{short(self.path)} is closed; open another trace to record more")
        record, size = self._checked(record)
        text_size = self._text_size(record)
        if text_size > _STEP_TEXT_BYTES:
            raise TraceError(
                f"step {record.step} has {text_size} bytes of scalars, presence and expert ids, at most "
                f"{_STEP_TEXT_BYTES} fit in a seal; log less"
            )
        if self._buffered_tensors + len(record.tensors) > MAX_TENSORS_PER_CHUNK or self._is_full():
            self.flush()  # the second case: an earlier write failed and is tried again
        before = (self._last_step, self._buffered_bytes, self._buffered_tensors, self._buffered_text)
        self._buffer.append(record)
        self._last_step = record.step
        self._buffered_bytes += size
        self._buffered_tensors += len(record.tensors)
        self._buffered_text += text_size
        if self._is_full():
            try:
                self.flush()
            except Exception:  # what `append` raised for is not in the trace, so nothing grows or blocks the buffer
                self._buffer.pop()
                self._last_step, self._buffered_bytes, self._buffered_tensors, self._buffered_text = before
                raise

    def _is_full(self) -> bool:
        return (
            self._buffered_bytes >= self._chunk_bytes
            or len(self._buffer) >= self._chunk_steps
            or self._buffered_text >= _SEAL_TEXT_BYTES
        )

    def _text_size(self, record: StepRecord) -> int:
        """About what a step takes in its seal, so that the seal stays far below its limit."""
        presence = self._tables.presence_digits if record.presence else 0
        ids = sum(8 * len(x) + 64 for x in record.experts.values())
        return presence + ids + 24 * len(record.routing) + len(repr(record.scalars)) + 64

    def flush(self) -> None:
        """Write and seal what is buffered; `OSError` leaves it buffered."""
        if not self._buffer:
            return
        number, steps, files = self._seals, self._buffer, []
        tensors = [((s.step, *key), tensor) for s in steps for key, tensor in s.tensors.items()]
        if tensors:
            files.append(write_chunk(self._folder / f"chunk-{number:06d}.safetensors", tensors))
        ordered = sorted(
            ((s.step, r) for s in steps for r in s.routing), key=lambda x: (x[1].layer, x[0], x[1].micro_step)
        )
        files += self._write_routing(number, ordered)
        if files:
            sync_folder(self._folder)  # the files are in the folder before the seal that names them is
        seal = Seal(
            number=number,
            rank=self.rank,
            header=self._header_hash,
            previous=self._previous,
            files=tuple(files),
            steps=tuple(self._seal_step(s) for s in steps),
        )
        raw, digest = dump_signed(seal_to_json(seal))
        self._doubtful = isinstance(self._folder, StorePath)  # a put may succeed although the answer is lost
        self._write(self._folder / f"seal-{number:06d}.json", raw)
        self._doubtful = False
        self.bytes_written += sum(f.bytes for f in files)
        self.sealed_steps += len(steps)
        self._seals, self._previous = number + 1, digest
        self._drop_buffer()

    def close(self, *, discard: bool = False) -> None:
        """Seal what is buffered and end the trace.

        After an `OSError` the writer can be closed again, when there is room; `discard=True` gives up on the steps that
        are buffered and counts them as lost.
        """
        if self.closed:
            return
        if discard:
            self.lost_steps += len(self._buffer)
            self._drop_buffer()
        self.flush()
        if self._doubtful:
            (self._folder / f"seal-{self._seals:06d}.json").unlink()
        end = End(self._seals, self._previous, self.lost_steps, recovered=False)
        self._write(self._folder / "end.json", dump_signed(end_to_json(self.rank, end))[0])
        self.closed = True
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _drop_buffer(self) -> None:
        self._buffer = []
        self._buffered_bytes = self._buffered_tensors = self._buffered_text = 0

    def _write(self, path: Path, raw: bytes, *, new: bool = False) -> None:
        try:
            write_file(path, raw, new=new)
        except FileExistsError:  # another run claimed the place in the same moment
            raise TraceError(
                f"{str(self.path)!r} already holds a trace; choose another path or remove it first"
            ) from None
        self.bytes_written += len(raw)

    def _write_routing(self, number: int, ordered: list[tuple[int, RoutingRecord]]) -> Iterator[FileEntry]:
        if any(len(record.is_pad) for _, record in ordered):
            yield write_routing(self._folder / f"routing-{number:06d}.parquet", ordered, self.header.layers)
        for stream in ("scores", "logits"):
            tensors: list[tuple[Key, RawTensor]] = []
            for step, record in ordered:
                value = getattr(record, stream)
                if value is not None:
                    raw = value if isinstance(value, RawTensor) else raw_from_array(value, f"{stream} of step {step}")
                    tensors.append(((step, stream, f"{record.layer}.{record.micro_step}"), raw))
            if tensors:
                yield write_chunk(self._folder / f"{stream}-{number:06d}.safetensors", tensors)

    def _checked(self, record: StepRecord) -> tuple[StepRecord, int]:
        """Check a record against the header; return one that shares its arrays, and its size in bytes."""
        if not self._last_step < record.step < 1 << 53:
            raise TraceError(f"step {record.step} after step {self._last_step}: steps must increase")
        size, tensors = 0, {}
        for (stream, name), tensor in record.tensors.items():
            where = f"{stream} of {clip(name)} at step {record.step}"
            check_stream(stream)
            if stream in _PARAM_STREAMS or stream.startswith("state."):
                param = self._param(name, where)
                if stream in _PARAM_STREAMS:
                    _check_shape(tensor, param, self._placements.get(name), record.experts.get(name), where)
            if stream in _small.SMALL:
                _small.check_slot(stream, name, tensor.dtype, tuple(tensor.shape), self._local, where)
                _small.check_values(stream, name, tensor.data, self._local, where)
            tensors[stream, name] = check_tensor(tensor, where)
            size += tensor.data.nbytes
        for name, codes in record.presence.items():
            param = self._param(name, f"presence at step {record.step}")
            if codes.size != presence_width(param) or codes.dtype != np.uint8 or (codes.size and codes.max() > 3):
                raise TraceError(
                    f"presence of {name!r} at step {record.step} must be uint8 codes 0 to 3, one per expert"
                )
        for name, ids in record.experts.items():
            param = self._param(name, f"experts at step {record.step}")
            _check_experts(np.asarray(ids), param, self._placements.get(name), record.step)
        size += self._check_routing(record)
        for name in record.scalars:
            text(name, f"name of a scalar of step {record.step}", MAX_NAME)
        scalars = encode_value(record.scalars, f"scalars of step {record.step}")
        return (
            StepRecord(
                record.step,
                tensors,
                record.presence,
                record.experts,
                record.routing,
                scalars,
                record.recorded,
                record.skipped,
            ),
            size,
        )

    def _check_routing(self, record: StepRecord) -> int:
        size, seen = 0, set()
        for routing in record.routing:
            layer = self._tables.layers.get(routing.layer)
            if layer is None:
                raise TraceError(f"routing of step {record.step}: layer {routing.layer} is not in the header")
            if (routing.layer, routing.micro_step) in seen or routing.micro_step < 0:
                raise TraceError(
                    f"routing of step {record.step}, layer {routing.layer}: micro-step {routing.micro_step} twice"
                )
            seen.add((routing.layer, routing.micro_step))
            check_routing(routing, layer, record.step)
            size += routing.topk_expert_ids.nbytes
            for value in (routing.scores, routing.logits):
                if isinstance(value, RawTensor):
                    check_tensor(value, f"scores or logits of step {record.step}")
                if value is not None:
                    size += (value.data if isinstance(value, RawTensor) else value).nbytes
        return size

    def _param(self, name: str, where: str) -> ParamInfo:
        if name not in self._tables.params:
            raise TraceError(f"{where}: parameter {clip(name)} is not in the header's table; add it there first")
        return self._tables.params[name]

    def _seal_step(self, record: StepRecord) -> SealedStep:
        presence = ""
        if record.presence:
            pieces = []
            for param in self.header.params:
                codes = record.presence.get(param.name)
                width = presence_width(param)
                pieces.append(b"0" * width if codes is None else (codes.reshape(-1) + np.uint8(48)).tobytes())
            presence = b"".join(pieces).decode()
        return SealedStep(
            step=record.step,
            recorded=record.recorded,
            skipped=record.skipped,
            scalars=record.scalars,
            presence=presence,
            experts={name: tuple(np.asarray(ids).tolist()) for name, ids in record.experts.items()},
            routing=tuple((r.layer, r.micro_step, len(r.is_pad)) for r in record.routing),
        )


def _claim(path: Path, rank: int, ranks: int) -> Path:
    """Make the rank's folder; refuse a path that holds anything but the folders of other ranks of this run."""
    folder = path / f"rank-{rank:05d}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = names_in(path)
    except (FileExistsError, NotADirectoryError):
        raise TraceError(f"{str(path)!r} is not a folder; a trace is a folder, choose another path") from None
    if (rank == 0 and "header.json" in taken) or folder.name in taken:
        raise TraceError(f"{str(path)!r} already holds a trace; choose another path or remove it first")
    for name in taken:
        match = RANK_FOLDER.fullmatch(name)
        if not (name == "header.json" or name == ".header.json.tmp" or (match and int(match[1]) < ranks)):
            raise TraceError(f"{str(path)!r} is not empty (it holds {clip(name)}); a trace needs a folder of its own")
    try:
        if not isinstance(path, StorePath):  # a store has no folders; headers are put only where there are none
            folder.mkdir()
    except FileExistsError:
        raise TraceError(f"{str(path)!r} already holds a trace; choose another path or remove it first") from None
    sync_folder(path)
    sync_folder(path.parent)  # else the whole trace, however well its files are synced, may be gone after a crash
    return folder


def _check_shape(tensor: RawTensor, param: ParamInfo, part: Placement | None, ids: Any, where: str) -> None:
    """A parameter's tensor has the shape of this rank's part, or that with the recorded experts along their axis."""
    shape = param.shape if part is None else part.shape(param.shape)
    allowed = [shape]
    if ids is not None and param.expert_axis is not None and not (part is not None and part.is_flat):
        axis = param.expert_axis
        allowed.append((*shape[:axis], len(ids), *shape[axis + 1 :]))
    if tuple(tensor.shape) not in allowed:
        raise TraceError(f"{where}: shape {tuple(tensor.shape)} is not {' or '.join(map(str, allowed))}")


def _check_experts(ids: np.ndarray, param: ParamInfo, part: Placement | None, step: int) -> None:
    top = presence_width(param) if param.expert_axis is not None else 0
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids.size and (ids.min() < 0 or ids.max() >= top)):
        raise TraceError(f"experts of {param.name!r} at step {step} must be a list of ids from 0 to {top - 1}")
    if (np.diff(ids.astype(np.int64)) <= 0).any():
        raise TraceError(f"experts of {param.name!r} at step {step} must be strictly increasing")
    if part is not None and part.splits(param.expert_axis) and ids.size:
        assert param.expert_axis is not None
        if foreign := sorted(set(ids.tolist()) - set(part.indices(param.expert_axis).tolist())):
            raise TraceError(f"experts of {param.name!r} at step {step}: id {foreign[0]} belongs to another rank")
