"""A one-process trace dealt out to ranks, and a forger of rank folders whose hashes stay right."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from traces import open_trace
from traces._json import dump_signed
from traces.placements import FLAT, Placement
from traces.schema import RawTensor, RoutingRecord, StepRecord
from traces.views import ParamInfo
from traces.writer import TraceWriter

Parts = dict[str, list[Placement | None]]


def deal(infos: list[ParamInfo]) -> Parts:
    """What each of two ranks holds: experts by id, other matrices by columns, by stretches, or on one rank only."""
    parts: Parts = {}
    for number, info in enumerate(infos):
        half = (info.shape[0] + 1) // 2
        if info.expert_axis is not None:
            parts[info.name] = [Placement({0: ((0, half),)}), Placement({0: ((half, info.shape[0] - half),)})]
        elif number % 3 == 0:
            parts[info.name] = [None, None]  # written whole, by rank 0
        elif number % 3 == 1:
            parts[info.name] = [Placement({1: ((1, info.shape[1] - 1),)}), Placement({1: ((0, 1),)})]
        else:
            parts[info.name] = [Placement({FLAT: ((0, 5),)}), Placement({FLAT: ((5, info.numel - 5),)})]
    return parts


def cut_raw(raw: RawTensor, part: Placement | None) -> RawTensor:
    if part is None:
        return raw
    data = raw.data
    if part.is_flat:
        data = data.reshape(-1)[part.indices(FLAT)]
    else:
        for axis in part.runs:
            data = np.take(data, part.indices(axis), axis=axis)
    data = np.ascontiguousarray(data)
    return RawTensor(raw.dtype, data.shape, data)


def write_ranks(source: Path, target: Path, *, chunk_steps: int = 4, until: tuple[int, int] | None = None) -> Parts:
    """Write the trace `source` again as one of two ranks; rank r stops after step `until[r]` without an end."""
    trace = open_trace(source)
    infos = list(trace.infos.values())
    parts = deal(infos)
    for rank in (0, 1):
        said: dict[str, Placement | None] = {}
        for name, held in parts.items():
            if held[rank] is not None or rank:  # None for rank 1: rank 0 writes it
                said[name] = held[rank]
        header = replace(trace.header, ranks=2)
        writer = TraceWriter(target, header, rank=rank, placements=said, chunk_steps=chunk_steps)
        for step in trace.all_steps:
            if until is not None and step > until[rank]:
                writer.flush()
                if writer._lock is not None:  # a process that is gone holds no lock
                    os.close(writer._lock)
                break
            writer.append(_share(trace, step, rank, parts, said))
        else:
            writer.close()
    return parts


def _share(trace: Any, step: int, rank: int, parts: Parts, said: dict[str, Placement | None]) -> StepRecord:
    sealed = trace._record(step)
    record = StepRecord(step, recorded=sealed.recorded, skipped=sealed.skipped, scalars=dict(sealed.scalars))
    for name, held in parts.items():
        if rank and said[name] is None:
            continue
        for stream in ("gradient", "weight"):
            raw = trace.raw(stream, name, step)
            if raw is not None:
                record.tensors[stream, name] = cut_raw(raw, held[rank])
        codes = trace.presence(name, step)
        part = held[rank]
        if part is not None and trace.param(name).expert_axis is not None:
            own = np.zeros_like(codes)
            own[part.indices(0)] = codes[part.indices(0)]
            codes = own
        if sealed.recorded:
            record.presence[name] = codes
    for layer in trace.layers:
        routing = trace.routing_step(step, layer.layer) if sealed.recorded else None
        if routing is not None:
            middle = len(routing.is_pad) // 3
            mine = slice(0, middle) if rank == 0 else slice(middle, None)
            ids = routing.topk_expert_ids[mine].astype(np.int16)
            record.routing.append(RoutingRecord(layer.layer, 0, ids, routing.is_pad[mine]))
    return record


def forge(folder: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a signed file of one rank's folder and make every hash after it right again."""
    value = json.loads((folder / file).read_text())
    value.pop("sha256")
    change(value)
    (folder / file).write_bytes(dump_signed(value)[0])
    header = json.loads((folder / "header.json").read_text())["sha256"]
    previous = "0" * 64
    for seal in sorted(folder.glob("seal-*.json")):
        value = json.loads(seal.read_text())
        value.pop("sha256")
        value.update(header=header, previous=previous)
        raw, previous = dump_signed(value)
        seal.write_bytes(raw)
    if (folder / "end.json").exists():
        value = json.loads((folder / "end.json").read_text())
        value.pop("sha256")
        value.update(last_seal=previous)
        (folder / "end.json").write_bytes(dump_signed(value)[0])


def forge_top(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the trace's own header, and what rank 0 says of its hash."""
    value = json.loads((path / "header.json").read_text())
    value.pop("sha256")
    change(value)
    raw, digest = dump_signed(value)
    (path / "header.json").write_bytes(raw)
    forge(path / "rank-00000", "header.json", lambda v: v.update(header=digest, ranks=value["ranks"]))
