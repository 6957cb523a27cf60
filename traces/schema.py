"""What the files of a trace hold, and the strict reading and writing of it. FORMAT.md is the normative text.

Legend: E experts, K top-k, T tokens.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from traces._files import short
from traces._json import MAX_NAME, Fields, clip, decode_value, encode_value, integer, load_signed, text
from traces.errors import TraceError
from traces.views import ROLES, ParamInfo

FORMAT_VERSION = "1.1"
MAX_HEADER_BYTES = 64 << 20
MAX_PARAMS = 1_000_000
MAX_EXPERTS = 1 << 20
MAX_DIMENSIONS = 16
_STREAM = re.compile(r"[a-z][a-z_]{0,31}(\.[A-Za-z0-9_]{1,64})?")

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

    def numbers(self) -> np.ndarray:
        """The values as numpy knows them: bfloat16 widened to float32, everything else as it is."""
        if self.dtype == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data


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
    version = check_version(fields)
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


def check_version(fields: Fields) -> str:
    """Take the format version of a file; another major version raises `TraceError`."""
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
    name = fields.text("name", limit=MAX_NAME)
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
