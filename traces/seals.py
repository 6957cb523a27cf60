"""Seals, ends and ranks: how a trace says what exists. FORMAT.md is the normative text.

A seal names the files of a run of steps with their hashes, holds one record per step, and names the seal before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from traces._files import short
from traces._json import MAX_NAME, Fields, clip, decode_value, integer, load_signed, text
from traces.errors import TraceError
from traces.schema import MAX_HEADER_BYTES, Header, LayerInfo
from traces.views import ParamInfo

MAX_SEAL_BYTES = 64 << 20
MAX_STEPS_PER_SEAL = 4096
NO_HASH = "0" * 64
_HASH = "[0-9a-f]{64}"
RANK_FOLDER = re.compile(r"rank-(\d{5})", re.ASCII)
SEAL_NAME = re.compile(r"seal-(\d{6})\.json", re.ASCII)
DATA_NAME = re.compile(r"(chunk|scores|logits)-(\d{6})\.safetensors|(routing)-(\d{6})\.parquet", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One data file as a seal declares it; `rows` for parquet."""

    name: str
    bytes: int
    sha256: str
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class SealedStep:
    """One step as its seal holds it. `routing` is (layer, micro_step, tokens) in writing order."""

    step: int
    recorded: bool
    skipped: bool
    scalars: dict[str, Any]
    presence: str
    experts: dict[str, tuple[int, ...]]
    routing: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """One seal: the files of a run of steps, the steps, and its place in the chain."""

    number: int
    rank: int
    header: str
    previous: str
    files: tuple[FileEntry, ...]
    steps: tuple[SealedStep, ...]
    sha256: str = ""

    @property
    def first_step(self) -> int:
        """First step of the run."""
        return self.steps[0].step

    @property
    def last_step(self) -> int:
        """Last step of the run."""
        return self.steps[-1].step

    def file(self, kind: str) -> FileEntry | None:
        """The file of this kind (`chunk`, `routing`, `scores`, `logits`), or None."""
        return next((f for f in self.files if f.name.startswith(f"{kind}-")), None)


@dataclass(frozen=True, slots=True)
class End:
    """The end of one rank: how many seals, the hash of the last, how many steps were lost to write errors."""

    seals: int
    last_seal: str
    lost_steps: int
    recovered: bool
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class SchemaTables:
    """What seals are checked against: parameters and layers of the header by name and number."""

    params: Mapping[str, ParamInfo]
    layers: Mapping[int, LayerInfo]
    presence_digits: int
    presence_start: Mapping[str, int]

    @classmethod
    def of(cls, header: Header) -> SchemaTables:
        """Tables of a header."""
        params = {p.name: p for p in header.params}
        starts, total = {}, 0
        for param in header.params:
            starts[param.name] = total
            total += presence_width(param)
        return cls(params, {x.layer: x for x in header.layers}, total, starts)

    def presence_of(self, step: SealedStep, name: str) -> str:
        """Presence digits of one parameter in a step; empty where the step holds none."""
        start = self.presence_start[name]
        return step.presence[start : start + presence_width(self.params[name])]


def presence_width(param: ParamInfo) -> int:
    """How many presence codes a parameter has: E for a stack of experts, else 1."""
    return param.shape[param.expert_axis] if param.expert_axis is not None else 1


def seal_to_json(seal: Seal) -> dict[str, Any]:
    """A seal as JSON values."""
    files: list[dict[str, Any]] = []
    for entry in seal.files:
        files.append({"name": entry.name, "bytes": entry.bytes, "sha256": entry.sha256})
        if entry.rows is not None:
            files[-1]["rows"] = entry.rows
    return {
        "kind": "gradreel-seal",
        "number": seal.number,
        "rank": seal.rank,
        "header": seal.header,
        "previous": seal.previous,
        "first_step": seal.first_step,
        "last_step": seal.last_step,
        "files": files,
        "steps": [_step_to_json(step) for step in seal.steps],
    }


def _step_to_json(step: SealedStep) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "step": step.step,
        "recorded": step.recorded,
        "skipped": step.skipped,
        "scalars": step.scalars,
    }
    if step.presence:
        entry["presence"] = step.presence
    if step.experts:
        entry["experts"] = {name: list(ids) for name, ids in step.experts.items()}
    if step.routing:
        entry["routing"] = [list(row) for row in step.routing]
    return entry


def read_seal(path: Path, number: int, rank: int, header: str, schema: SchemaTables) -> Seal:
    """Read a seal strictly. `header` is the hash of the rank's header; the chain is checked by the caller."""
    value, digest = load_signed(path, MAX_SEAL_BYTES)
    where = short(path)
    fields = Fields(value, where)
    fields.text("kind", "gradreel-seal")
    if fields.integer("number") != number or fields.integer("rank") != rank:
        raise TraceError(f"{where} carries another number or rank than its name; it was moved")
    if fields.text("header", _HASH) != header:
        raise TraceError(f"{where} belongs to another trace: it names another rank header")
    previous = fields.text("previous", _HASH)
    first, last = fields.integer("first_step"), fields.integer("last_step")
    files = fields.items("files", 4, lambda v, w: _file(v, w, number))
    steps = fields.items("steps", MAX_STEPS_PER_SEAL, lambda v, w: _sealed_step(v, w, schema))
    fields.done()
    numbers = [step.step for step in steps]
    if not numbers or any(b <= a for a, b in pairwise(numbers)):
        raise TraceError(f"{where}: steps must be present and strictly increasing")
    if (first, last) != (numbers[0], numbers[-1]):
        raise TraceError(f"{where}: says steps {first} to {last}, holds {numbers[0]} to {numbers[-1]}")
    if len({f.name for f in files}) != len(files):
        raise TraceError(f"{where}: a file is listed twice")
    seal = Seal(number, rank, header, previous, files, steps, digest)
    routing, rows = seal.file("routing"), sum(row[2] for step in steps for row in step.routing)
    if (routing.rows if routing else 0) != rows:
        raise TraceError(
            f"{where}: routing of {rows} tokens, but the parquet is said to hold {routing and routing.rows} rows"
        )
    return seal


def _file(value: Any, where: str, number: int) -> FileEntry:
    fields = Fields(value, where)
    name = fields.text("name", limit=64)
    match = DATA_NAME.fullmatch(name)
    if match is None or int(match[2] or match[4]) != number:
        raise TraceError(
            f"{where}: {clip(name)} is not a file this seal may name (chunk-{number:06d}.safetensors and alike)"
        )
    size, digest = fields.integer("bytes"), fields.text("sha256", _HASH)
    rows = fields.integer("rows", 0, 1 << 40) if name.startswith("routing") else None
    fields.done()
    return FileEntry(name, size, digest, rows)


def _sealed_step(value: Any, where: str, schema: SchemaTables) -> SealedStep:
    fields = Fields(value, where)
    step = fields.integer("step")
    where = fields.where = f"{where} (step {step})"
    presence = fields.take("presence", "")
    if presence and (not isinstance(presence, str) or not re.fullmatch(f"[0-3]{{{schema.presence_digits}}}", presence)):
        raise TraceError(f"{where}: presence must be {schema.presence_digits} digits from 0 to 3")
    experts: dict[str, tuple[int, ...]] = {}
    for name, ids in fields.table("experts", {}).items():
        param = schema.params.get(name)
        if param is None or param.expert_axis is None:
            raise TraceError(f"{where}: experts of {clip(name)}, which is no stack of experts in the header")
        limit = presence_width(param)
        top = limit - 1
        chosen = Fields({"experts": ids}, where).items("experts", limit, lambda v, w, t=top: integer(v, w, 0, t))  # type: ignore[misc]
        if any(b <= a for a, b in pairwise(chosen)):
            raise TraceError(f"{where}: experts of {clip(name)} must be strictly increasing")
        experts[name] = chosen
    scalars = {
        text(k, where, MAX_NAME): v for k, v in decode_value(fields.table("scalars"), f"{where}: scalars").items()
    }
    result = SealedStep(
        step=step,
        recorded=fields.flag("recorded", True),
        skipped=fields.flag("skipped", False),
        scalars=scalars,
        presence=presence,
        experts=experts,
        routing=fields.items("routing", 1 << 20, lambda v, w: _routing_row(v, w, schema), default=[]),
    )
    fields.done()
    return result


def _routing_row(value: Any, where: str, schema: SchemaTables) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise TraceError(f"{where}: {clip(value)} must be [layer, micro_step, tokens]")
    layer = integer(value[0], where, 0, 1 << 20)
    if layer not in schema.layers:
        raise TraceError(f"{where}: layer {layer} is not in the header")
    return (layer, integer(value[1], where, 0, 1 << 30), integer(value[2], where, 0, (1 << 31) - 1))


def end_to_json(rank: int, end: End) -> dict[str, Any]:
    """The end of a rank as JSON values."""
    return {
        "kind": "gradreel-end",
        "rank": rank,
        "seals": end.seals,
        "last_seal": end.last_seal,
        "lost_steps": end.lost_steps,
        "recovered": end.recovered,
    }


def read_end(path: Path, rank: int) -> End:
    """Read `end.json` strictly."""
    value, digest = load_signed(path, MAX_HEADER_BYTES)
    fields = Fields(value, short(path))
    fields.text("kind", "gradreel-end")
    if fields.integer("rank") != rank:
        raise TraceError(f"{short(path)} belongs to another rank")
    end = End(
        seals=fields.integer("seals", 0, 1_000_000),
        last_seal=fields.text("last_seal", _HASH),
        lost_steps=fields.integer("lost_steps"),
        recovered=fields.flag("recovered", False),
        sha256=digest,
    )
    fields.done()
    return end
