"""The JSON lines of Megatron-LM's RouterTracer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traces._json import clip, parse_json
from traces._store import names_in
from traces.errors import TraceError
from traces.interchange._lines import Place, lines

MAX_LINE_BYTES = 16 << 20
_MAX_REST_BYTES = 64 << 10
_FILE = re.compile(r"router_trace_rank(\d{1,5})\.jsonl", re.ASCII)
_INDICES = re.compile(rb'"top_indices"\s*:\s*(\[[-+0-9.eENaInfity,\[\]\s]*\])')
_SPACE = b" \t\r\n"
_DECODER = re.compile(r"decoder\.layers\.(\d{1,7})", re.ASCII)
_MTP = re.compile(r"mtp\.layers\.(\d{1,7})\.mtp_model_layer\.layers\.(\d{1,7})", re.ASCII)

#: Which layer a record is about: its block, the head of multi-token prediction, the number.
LayerKey = tuple[str, int | None, int]


@dataclass(frozen=True, slots=True)
class Record:
    """One line: the ids [T, K] that a layer's router chose in one micro-step."""

    place: Place
    step: int
    layer: LayerKey
    stage: str
    ids: np.ndarray


def files_of(source: Path) -> list[Path]:
    """The logs of a folder by rank, or the one file itself."""
    if not source.is_dir():
        return [source]
    found = {int(m[1]): source / name for name in names_in(source) if (m := _FILE.fullmatch(name))}
    if not found:
        raise TraceError(f"{str(source)!r} holds no router_trace_rank*.jsonl; give such a folder, or one of its files")
    return [found[rank] for rank in sorted(found)]


def records(path: Path) -> Iterator[Record]:
    """The records of one file, in its order; `TraceError` with file and line at the first that is none."""
    last = -1
    for number, line in lines(path, MAX_LINE_BYTES):
        if not line.strip():
            continue
        record = _record(line, Place(path, number))
        if record.step < last:
            raise record.place.error(f"step {record.step} comes after step {last}; records must be in order of steps")
        last = record.step
        yield record


def _record(line: bytes, place: Place) -> Record:
    match = _INDICES.search(line)
    if match is None:
        _rest(line, place)  # where it is no JSON at all, say that
        raise place.error("no top_indices, a list of one list of expert ids per token; is this a RouterTracer log?")
    rest = _rest(line[: match.start(1)] + b"null" + line[match.end(1) :], place)
    step, layer = _integer(rest, "step", place, 1 << 53), _integer(rest, "layer", place, 1 << 20)
    block = rest.get("block", "decoder")
    mtp = None if rest.get("mtp_idx") is None else _integer(rest, "mtp_idx", place, 1 << 20)
    stage = rest.get("stage", "pre_dispatch")
    for name, text in (("block", block), ("stage", stage)):
        if not isinstance(text, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text):
            raise place.error(f"{name} is {clip(text)}, not a word")
    ids = _ids(match[1], place)
    for name, found in (("topk", ids.shape[1]), ("num_tokens", ids.shape[0])):
        if rest.get(name) is not None and (said := _integer(rest, name, place, 1 << 31)) != found and ids.size:
            raise place.error(f"{name} says {said}, top_indices holds {found}")
    return Record(place, step, (block, mtp, layer), stage, ids)


def _rest(text: bytes, place: Place) -> dict[str, Any]:
    """The record without its ids."""
    if len(text) > _MAX_REST_BYTES:
        raise place.error(f"{len(text)} bytes beside top_indices; at most {_MAX_REST_BYTES} belong there")
    try:
        found = parse_json(text, "record")
    except TraceError as error:
        raise place.error(str(error).removeprefix("record: ")) from None
    if not isinstance(found, dict):
        raise place.error("is no JSON object")
    return found


def _integer(record: dict[str, Any], name: str, place: Place, top: int) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= top:
        raise place.error(f"{name} is {clip(value)}; it must be a whole number from 0 to {top}")
    return value


def _ids(text: bytes, place: Place) -> np.ndarray:
    """`[[1, 2], [3, 4]]` as int64 [T, K], read without a Python object per number."""
    packed = text.translate(None, _SPACE)
    if packed in (b"[]", b"[[]]"):
        return np.empty((0, 1), np.int64)
    width = packed[: packed.find(b"]")].count(b",") + 1
    number = rb"-?[0-9]{1,10}"
    row = rb"\[" + number + rb"(?:," + number + rb"){%d}\]" % (width - 1)
    if not 1 <= width <= 4096 or not re.fullmatch(rb"\[(?:" + row + rb",)*+" + row + rb"\]", packed):
        raise place.error(f"top_indices is {clip(text[:40])}..., not one list of {width} whole numbers per token")
    flat = np.fromstring(packed[2:-2].replace(b"],[", b","), dtype=np.int64, sep=",")
    return flat.reshape(-1, width)


def key_of(module: str, layer: int) -> LayerKey:
    """The record's words for a layer, by its module name; ("decoder", None, layer) if that is no name of Megatron's."""
    if match := _MTP.search(module):
        return "mtp", int(match[1]), int(match[2])
    if match := _DECODER.search(module):
        return "decoder", None, int(match[1])
    return "decoder", None, layer


def module_of(key: LayerKey) -> str:
    """A module name for a layer, from which `key_of` finds the layer again."""
    block, mtp, layer = key
    if block == "mtp" and mtp is not None:
        return f"mtp.layers.{mtp}.mtp_model_layer.layers.{layer}"
    return f"{block}.layers.{layer}" if mtp is None else f"{block}.{mtp}.layers.{layer}"


def line_of(step: int, key: LayerKey, rank: int, ids: np.ndarray, stage: str) -> bytes:
    """One record as RouterTracer writes it."""
    block, mtp, layer = key
    record: dict[str, Any] = {"step": step, "stage": stage, "block": block, "layer": layer, "rank": rank}
    record |= {"num_tokens": int(ids.shape[0]), "topk": int(ids.shape[1])}
    if mtp is not None:
        record["mtp_idx"] = mtp
    record["top_indices"] = ids.tolist()
    return json.dumps(record).encode() + b"\n"
