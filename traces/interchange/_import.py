"""A routing-only log of another tool as a trace: read twice, once for the tables of the header, once for the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from traces._store import StorePath, as_place
from traces.errors import GradreelError, unknown
from traces.interchange import _csv, _megatron
from traces.interchange._lines import Place
from traces.routing import id_dtype
from traces.schema import MAX_EXPERTS, Header, LayerInfo, RoutingRecord, StepRecord
from traces.writer import TraceWriter

KINDS = ("megatron", "csv")
#: What one step of one file may take in memory while it is put together.
MAX_STEP_BYTES = 512 << 20
_CHUNK_BYTES = 4 << 20
_ROW_BYTES = 32


@dataclass(frozen=True, slots=True)
class Block:
    """What one layer routed in one micro-step: ids int64 [T, K], -1 where a slot was not executed."""

    place: Place
    layer: Any
    ids: np.ndarray


@dataclass(slots=True)
class Tables:
    """What the header needs to know of all files."""

    experts: dict[Any, int] = field(default_factory=dict)
    slots: dict[Any, int] = field(default_factory=dict)
    stages: set[str] = field(default_factory=set)
    steps: int = 0


def import_routing(
    source: str | Path,
    out: str | Path,
    *,
    kind: str | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> Path:
    """Make the new trace `out` of a log (formats: `traces.interchange`) and return its place.

    `kind` is one of `KINDS`, found by the name of `source` where it is None. `num_experts` is E of every layer
    (default: of each layer the largest id seen, and 1). `top_k` joins so many activations of a CSV without tokens to
    one token. Each file of a folder becomes a rank. Memory: a line, and one step of one file (at most `MAX_STEP_BYTES`,
    else an error).

    Errors: `GradreelError` for a source that is no such log, with file, line and value; nothing is left at `out` then,
    if the log is refused on the first reading.
    """
    place, target = as_place(source), as_place(out)
    if isinstance(place, StorePath):
        raise GradreelError(f"{str(place)!r} is a URL; a log is read from this machine, copy it here")
    if not place.exists():
        raise GradreelError(f"{str(source)!r} does not exist; give a log of routing")
    kind = kind or ("csv" if place.suffix.lower() == ".csv" else "megatron")
    if kind not in KINDS:
        raise unknown("kind of log", kind, KINDS)
    if num_experts is not None and not 1 <= num_experts <= MAX_EXPERTS:
        raise GradreelError(f"num_experts {num_experts} must be 1 to {MAX_EXPERTS}")
    if top_k is not None and (kind != "csv" or not 1 <= top_k <= 4096):
        raise GradreelError(f"top_k {top_k} must be 1 to 4096, and belongs to a CSV without a column token")
    if kind == "csv" and place.is_dir():
        raise GradreelError(f"{str(source)!r} is a folder; give one CSV file")
    files = [place] if kind == "csv" else _megatron.files_of(place)
    tables = Tables()
    for file in files:
        for _, blocks in _steps(file, kind, top_k, tables):
            _learn(tables, blocks, num_experts)
    if not tables.experts:
        raise GradreelError(f"{str(source)!r} holds no activation; there is nothing to import")
    numbers = _layer_numbers(tables)
    header = _header(tables, numbers, num_experts, source=place.name, kind=kind, ranks=len(files))
    for rank, file in enumerate(files):
        with TraceWriter(target, header, rank=rank, chunk_bytes=_CHUNK_BYTES) as writer:
            dtype = id_dtype(max(layer.num_experts for layer in header.layers))
            for step, blocks in _steps(file, kind, top_k, Tables()):
                writer.append(_record(step, blocks, numbers, dtype))
                progress(1)
    return target


def _steps(file: Path, kind: str, top_k: int | None, tables: Tables) -> Iterator[tuple[int, list[Block]]]:
    """The steps of one file in order; `tables` learns the stages that Megatron's records name."""
    if kind == "csv":
        yield from _csv_steps(file, top_k)
        return
    for step, group in groupby(_megatron.records(file), key=lambda record: record.step):
        blocks, size = [], 0
        for record in group:
            tables.stages.add(record.stage)
            ids = record.ids.astype(np.int32) if record.ids.size and abs(record.ids).max() < 1 << 31 else record.ids
            size += ids.nbytes + _ROW_BYTES * len(ids)
            _check_size(size, record.place, step)
            blocks.append(Block(record.place, record.layer, ids))
        yield step, blocks


def _csv_steps(file: Path, top_k: int | None) -> Iterator[tuple[int, list[Block]]]:
    for step, group in groupby(_csv.activations(file), key=lambda piece: piece.step):
        pieces, size = [], 0
        for piece in group:
            if piece.token is not None and top_k is not None:
                raise GradreelError(
                    f"{file.name} has a column token, which says what belongs together; leave top_k out"
                )
            pieces.append(piece)
            size += piece.layer.nbytes * 3 + _ROW_BYTES * len(piece.layer)
            _check_size(size, piece.place, step)
        layer = np.concatenate([p.layer for p in pieces])
        expert = np.concatenate([p.expert for p in pieces])
        token = None if pieces[0].token is None else np.concatenate([p.token for p in pieces])
        blocks = []
        for number in np.unique(layer).tolist():
            chosen = layer == number
            ids = _tokens(expert[chosen], None if token is None else token[chosen], top_k, pieces[0].place)
            blocks.append(Block(pieces[0].place, ("", None, number), ids))
        yield step, blocks


def _tokens(expert: np.ndarray, token: np.ndarray | None, top_k: int | None, place: Place) -> np.ndarray:
    """Activations [N] of one layer and step as tokens [T, K], filled up with -1."""
    if token is None:
        width = top_k or 1
        if len(expert) % width:
            raise place.error(
                f"a layer of this step has {len(expert)} activations, which top_k {width} does not divide"
            )
        return expert.reshape(-1, width)
    order = np.argsort(token, kind="stable")
    _, first, counts = np.unique(token[order], return_index=True, return_counts=True)
    width = int(counts.max())
    if width > 4096:
        raise place.error(f"a token of this step has {width} activations in one layer; at most 4096 are allowed")
    _check_size(len(counts) * width * 8, place, 0)
    ids = np.full((len(counts), width), -1, np.int64)
    rows = np.repeat(np.arange(len(counts)), counts)
    ids[rows, np.arange(len(expert)) - np.repeat(first, counts)] = expert[order]
    return ids


def _check_size(size: int, place: Place, step: int) -> None:
    if size > MAX_STEP_BYTES:
        raise place.error(f"step {step} takes more than {MAX_STEP_BYTES >> 20} MiB in memory; split the log")


def _learn(tables: Tables, blocks: list[Block], num_experts: int | None) -> None:
    tables.steps += 1
    for block in blocks:
        top = int(block.ids.max()) if block.ids.size else -1
        low = int(block.ids.min()) if block.ids.size else 0
        limit = num_experts or MAX_EXPERTS
        if low < -1 or top >= limit:
            wrong = low if low < -1 else top
            raise block.place.error(
                f"expert {wrong} of layer {block.layer[2]}; ids run from -1 (not executed) to {limit - 1}"
            )
        tables.experts[block.layer] = max(tables.experts.get(block.layer, 1), top + 1)
        tables.slots[block.layer] = max(tables.slots.get(block.layer, 1), block.ids.shape[1])


def _layer_numbers(tables: Tables) -> dict[Any, int]:
    """The decoder's layers keep their numbers; those of other blocks, which may have the same, come after them."""
    plain = {key: key[2] for key in tables.experts if key[0] in ("", "decoder") and key[1] is None}
    after = max(plain.values(), default=-1) + 1
    others = sorted((key for key in tables.experts if key not in plain), key=lambda k: (k[0], k[1] or 0, k[2]))
    return plain | {key: after + i for i, key in enumerate(others)}


def _header(
    tables: Tables, numbers: dict[Any, int], num_experts: int | None, *, source: str, kind: str, ranks: int
) -> Header:
    layers = [
        LayerInfo(
            layer=number,
            module=f"layers.{number}" if kind == "csv" else _megatron.module_of(key),
            num_experts=num_experts or tables.experts[key],
            top_k=tables.slots[key],
        )
        for key, number in sorted(numbers.items(), key=lambda item: item[1])
    ]
    imported: dict[str, Any] = {"from": source, "kind": kind}
    if tables.stages:
        imported["stage"] = ", ".join(sorted(tables.stages)[:4])
    if num_experts is None:
        imported["num_experts"] = "the largest id seen, and 1"
    return Header(
        layers=tuple(layers),
        streams=("routing", "scalars"),
        run={"model": f"not recorded, routing imported from {source}"},
        provenance={"imported": imported},
        ranks=ranks,
    )


def _record(step: int, blocks: list[Block], numbers: dict[Any, int], dtype: np.dtype[Any]) -> StepRecord:
    routing, count = [], dict.fromkeys(numbers.values(), 0)
    for block in blocks:
        number = numbers[block.layer]
        ids = block.ids.astype(dtype)
        routing.append(RoutingRecord(number, count[number], ids, np.zeros(len(ids), np.bool_)))
        count[number] += 1
    return StepRecord(step, routing=routing)
