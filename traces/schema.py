"""What the files of a trace hold, and the strict reading and writing of it. FORMAT.md is the normative text.

Legend: E experts, K top-k, T tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from traces._files import short
from traces._json import Fields, clip, decode_value, encode_value, integer, load_signed, text
from traces.errors import TraceError
from traces.views import ROLES, ParamInfo

FORMAT_VERSION = "1.0"
MAX_HEADER_BYTES = 64 << 20
MAX_SEAL_BYTES = 64 << 20
MAX_PARAMS = 1_000_000
MAX_STEPS_PER_SEAL = 4096
MAX_EXPERTS = 1 << 20
MAX_DIMENSIONS = 16
NO_HASH = "0" * 64
_HASH = "[0-9a-f]{64}"
_STREAM = re.compile(r"[a-z][a-z_]{0,31}(\.[A-Za-z0-9_]{1,64})?")
RANK_FOLDER = re.compile(r"rank-(\d{5})")
SEAL_NAME = re.compile(r"seal-(\d{6})\.json")
DATA_NAME = re.compile(r"(chunk|scores|logits)-(\d{6})\.safetensors|(routing)-(\d{6})\.parquet")

#: dtype name as torch says it -> (name in safetensors, numpy dtype of the stored bits)
DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "float64": ("F64", np.dtype("<f8")),
    "float32": ("F32", np.dtype("<f4")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype("<u2")),
    "float8_e4m3fn": ("F8_E4M3", np.dtype("u1")),
    "float8_e5m2": ("F8_E5M2", np.dtype("u1")),
    "int64": ("I64", np.dtype("<i8")),
    "int32": ("I32", np.dtype("<i4")),
    "int16": ("I16", np.dtype("<i2")),
    "int8": ("I8", np.dtype("i1")),
    "uint64": ("U64", np.dtype("<u8")),
    "uint32": ("U32", np.dtype("<u4")),
    "uint16": ("U16", np.dtype("<u2")),
    "uint8": ("U8", np.dtype("u1")),
    "bool": ("BOOL", np.dtype("?")),
}
SAFETENSORS_DTYPES = {code: name for name, (code, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One MoE layer: its number, the experts' module name, E and K."""

    layer: int
    module: str
    num_experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Header:
    """What holds for the whole trace.

    `run` and `provenance` are free metadata; `run["groups"]` lists the optimizer's groups, each a dict with the
    `params` names it holds. `record` is `RecordAt.to_json()`. `ranks` is the number of writing processes.
    """

    params: tuple[ParamInfo, ...] = ()
    layers: tuple[LayerInfo, ...] = ()
    streams: tuple[str, ...] = ("gradient", "routing", "scalars")
    run: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    format_version: str = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class RawTensor:
    """Bits of a tensor without torch: dtype by torch's name, shape, and a C-contiguous array (bfloat16 as uint16)."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """Executed routing of one layer in one micro-step.

    `topk_expert_ids` [T, K] integer, -1 where a slot was not executed; `is_pad` [T] bool. `scores` [T, K] and `logits`
    [T, E] are optional (a `RawTensor`, or an array of a dtype numpy knows).
    """

    layer: int
    micro_step: int
    topk_expert_ids: np.ndarray
    is_pad: np.ndarray
    scores: np.ndarray | RawTensor | None = None
    logits: np.ndarray | RawTensor | None = None


@dataclass(slots=True)
class StepRecord:
    """One optimizer step as it is handed to the writer.

    `tensors` is keyed by (stream, parameter). `presence` holds codes of traces.views, uint8 [E] or 0-d. `experts` names
    the recorded slices of a parameter (strictly increasing ids); a parameter that is absent there is recorded whole.
    `recorded=False` marks a step of which only scalars are kept, or the closing snapshot of the weights.
    """

    step: int
    tensors: dict[tuple[str, str], RawTensor] = field(default_factory=dict)
    presence: dict[str, np.ndarray] = field(default_factory=dict)
    experts: dict[str, np.ndarray] = field(default_factory=dict)
    routing: list[RoutingRecord] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    recorded: bool = True
    skipped: bool = False


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


# ---------------------------------------------------------------------------------------------------------- header


def header_to_json(header: Header) -> dict[str, Any]:
    """The header as JSON values; mistakes of the caller raise `TraceError` here, before anything is written."""
    payload = {
        "kind": "gradreel-trace",
        "format_version": header.format_version,
        "ranks": header.ranks,
        "streams": list(header.streams),
        "record": encode_value(header.record, "header.record"),
        "run": encode_value(header.run, "header.run"),
        "provenance": encode_value(header.provenance, "header.provenance"),
        "layers": [
            {"layer": x.layer, "module": x.module, "num_experts": x.num_experts, "top_k": x.top_k}
            for x in header.layers
        ],
        "params": [_param_to_json(p) for p in header.params],
    }
    header_from_json(payload, "header")  # what a reader would refuse is refused now
    return payload


def header_from_json(value: Any, where: str) -> Header:
    """Read a header strictly."""
    fields = Fields(value, where)
    fields.text("kind", "gradreel-trace")
    version = _version(fields)
    header = Header(
        format_version=version,
        ranks=fields.integer("ranks", 1, 100_000),
        streams=fields.items("streams", 256, _stream),
        record=decode_value(fields.table("record"), f"{where}: record"),
        run=decode_value(fields.table("run"), f"{where}: run"),
        provenance=decode_value(fields.table("provenance"), f"{where}: provenance"),
        layers=fields.items("layers", 100_000, _layer),
        params=fields.items("params", MAX_PARAMS, _param),
    )
    fields.done()
    for kind, names in (("parameter", [p.name for p in header.params]), ("layer", [x.layer for x in header.layers])):
        if len(set(names)) != len(names):
            raise TraceError(f"{where}: {kind} {clip(_first_repeated(names))} is listed twice")
    return header


def read_header(path: Path) -> tuple[Header, str]:
    """Read `header.json`; return it and its hash."""
    value, digest = load_signed(path, MAX_HEADER_BYTES)
    return header_from_json(value, short(path)), digest


def _version(fields: Fields) -> str:
    version = fields.text("format_version", r"\d{1,4}\.\d{1,4}")
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise TraceError(
            f"{fields.where}: format version {version} is not readable here, this gradreel reads {FORMAT_VERSION}; "
            "use the gradreel release that wrote it"
        )
    return version


def _first_repeated(names: list[Any]) -> Any:
    seen: set[Any] = set()
    return next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]


def _stream(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _STREAM.fullmatch(value):
        raise TraceError(f"{where}: {clip(value)} is not a stream name (lower-case letters and _, `state.SLOT`)")
    return value


def check_stream(name: str) -> None:
    """Refuse a stream name that the format does not allow."""
    _stream(name, "stream")


def _layer(value: Any, where: str) -> LayerInfo:
    fields = Fields(value, where)
    layer = LayerInfo(
        layer=fields.integer("layer", 0, 1 << 20),
        module=fields.text("module"),
        num_experts=fields.integer("num_experts", 1, MAX_EXPERTS),
        top_k=fields.integer("top_k", 1, 4096),
    )
    fields.done()
    return layer


def _param_to_json(param: ParamInfo) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": param.name, "role": param.role, "shape": list(param.shape), "dtype": param.dtype}
    for name in ("layer", "expert", "expert_axis", "num_experts", "tied_to"):
        if getattr(param, name) is not None:
            entry[name] = getattr(param, name)
    for name in ("matrix_axes", "strides"):
        if getattr(param, name) is not None:
            entry[name] = list(getattr(param, name))
    return entry


def _param(value: Any, where: str) -> ParamInfo:
    fields = Fields(value, where)
    name = fields.text("name", limit=512)
    if not name or not name.isprintable():
        raise TraceError(f"{where}: name {clip(name)} is empty or not printable")
    where = fields.where = f"{where} ({clip(name)})"
    role, dtype = fields.text("role"), fields.text("dtype")
    if role not in ROLES:
        raise TraceError(f"{where}: unknown role {clip(role)}. Choices: {', '.join(ROLES)}")
    if dtype not in DTYPES:
        raise TraceError(f"{where}: dtype {clip(dtype)} cannot be stored. Choices: {', '.join(DTYPES)}")
    shape = fields.items("shape", MAX_DIMENSIONS, lambda v, w: integer(v, w, 0, 1 << 48))
    if math.prod(shape) > 1 << 53:
        raise TraceError(f"{where}: shape {shape} has more than 2^53 elements")
    strides = matrix_axes = None
    if (raw := fields.take("strides", None)) is not None:
        strides = Fields({"strides": raw}, where).items("strides", MAX_DIMENSIONS, integer)
    if (raw := fields.take("matrix_axes", None)) is not None:
        axes = Fields({"matrix_axes": raw}, where).items("matrix_axes", 2, lambda v, w: integer(v, w, 0, 15))
        matrix_axes = (axes[0], axes[1]) if len(axes) == 2 else (-1, -1)
    param = ParamInfo(
        name=name,
        role=role,
        shape=shape,
        dtype=dtype,
        layer=fields.optional_integer("layer"),
        expert=fields.optional_integer("expert"),
        expert_axis=fields.optional_integer("expert_axis"),
        num_experts=fields.optional_integer("num_experts", 1, MAX_EXPERTS),
        matrix_axes=matrix_axes,
        strides=strides,
        tied_to=text(tied, f"{where}: tied_to") if (tied := fields.take("tied_to", None)) is not None else None,
    )
    fields.done()
    _check_axes(param, where)
    return param


def _check_axes(param: ParamInfo, where: str) -> None:
    dims = len(param.shape)
    axis = param.expert_axis
    if axis is not None and (axis >= dims or param.num_experts != param.shape[axis]):
        raise TraceError(
            f"{where}: expert axis {axis} of shape {param.shape} does not hold {param.num_experts} experts"
        )
    if param.matrix_axes is not None:
        rows, columns = param.matrix_axes
        if rows == columns or not (0 <= rows < dims and 0 <= columns < dims) or axis in param.matrix_axes:
            raise TraceError(f"{where}: matrix axes {param.matrix_axes} do not fit shape {param.shape}")
    if param.strides is not None and len(param.strides) != dims:
        raise TraceError(f"{where}: strides {param.strides} do not fit shape {param.shape}")


# ------------------------------------------------------------------------------------------------- rank, seal, end


def rank_to_json(rank: int, ranks: int, header: str | None) -> dict[str, Any]:
    """A rank's own header. Version 1.0 knows whole (replicated) tensors only, so both tables are empty."""
    return {
        "kind": "gradreel-rank",
        "format_version": FORMAT_VERSION,
        "rank": rank,
        "ranks": ranks,
        "header": header,
        "expert_offsets": {},
        "placements": {},
    }


def read_rank_header(path: Path, rank: int, ranks: int, header: str) -> str:
    """Check a rank's header against the trace's; return its hash."""
    value, digest = load_signed(path, MAX_HEADER_BYTES)
    where = short(path)
    fields = Fields(value, where)
    fields.text("kind", "gradreel-rank")
    _version(fields)
    if fields.integer("rank") != rank or fields.integer("ranks") != ranks:
        raise TraceError(f"{where} belongs to another rank or to a run with another number of ranks")
    said = fields.take("header")
    if said != header and not (said is None and rank > 0):
        raise TraceError(
            f"{where} belongs to another trace: header.json has hash {header[:12]}..., it says {clip(said, 20)}"
        )
    for name in ("expert_offsets", "placements"):
        if fields.table(name):
            raise TraceError(f"{where}: {name} is not empty; sharded tensors need a newer gradreel, upgrade to read it")
    fields.done()
    return digest


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
    if not numbers or any(b <= a for a, b in zip(numbers, numbers[1:], strict=False)):
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


@dataclass(frozen=True, slots=True)
class SchemaTables:
    """What seals are checked against: parameters and layers of the header by name and number."""

    params: Mapping[str, ParamInfo]
    layers: Mapping[int, LayerInfo]
    presence_digits: int

    @classmethod
    def of(cls, header: Header) -> SchemaTables:
        """Tables of a header."""
        params = {p.name: p for p in header.params}
        return cls(params, {x.layer: x for x in header.layers}, sum(presence_width(p) for p in header.params))


def presence_width(param: ParamInfo) -> int:
    """How many presence codes a parameter has: E for a stack of experts, else 1."""
    return param.shape[param.expert_axis] if param.expert_axis is not None else 1


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
        if any(b <= a for a, b in zip(chosen, chosen[1:], strict=False)):
            raise TraceError(f"{where}: experts of {clip(name)} must be strictly increasing")
        experts[name] = chosen
    scalars = {text(k, where, 512): v for k, v in decode_value(fields.table("scalars"), f"{where}: scalars").items()}
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
