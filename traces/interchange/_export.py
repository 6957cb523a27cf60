"""A trace's routing and tensors as files that other tools read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from traces._files import AsideFile, new_file
from traces._json import clip
from traces._micro import micro_steps
from traces._store import StorePath, as_place
from traces.errors import GradreelError, unknown
from traces.interchange import _megatron
from traces.reader import Trace
from traces.schema import DTYPES, RawTensor
from traces.views import NONE

KINDS = ("megatron", "csv")
_TENSORS = ("gradient", "grad_buffer", "weight")
Quiet: Callable[[int], None] = lambda steps: None  # noqa: E731


def export_routing(
    trace: Trace,
    out: str | Path,
    *,
    kind: str | None = None,
    steps: Iterable[int] | None = None,
    progress: Callable[[int], None] = Quiet,
) -> Path:
    """Write the routing of a trace to `out` and return it: a CSV file, or for `megatron` a new folder of JSON lines.

    `kind` None goes by the name (`.csv`). Tokens that are padding are left out. The CSV has `step, layer, token,
    expert` with -1 for a slot that was not executed; tokens count through micro-steps and ranks. The JSON lines keep
    micro-steps and ranks apart. `steps` None means all.
    """
    if not any(rank.routing(seal) for rank in trace._ranks for seal in rank.seals):
        raise GradreelError(f"{trace.path.name} holds no routing; record the stream 'routing' to export it")
    place = _new_place(out)
    kind = kind or ("csv" if place.suffix.lower() == ".csv" else "megatron")
    if kind not in KINDS:
        raise unknown("kind of log", kind, KINDS)
    chosen = _steps_of(trace, trace.steps if steps is None else steps)
    if kind == "csv":
        _write_csv(trace, place, chosen, progress)
    else:
        _write_megatron(trace, place, chosen, progress)
    return place


def export_tensors(
    trace: Trace,
    out: str | Path,
    *,
    stream: str = "gradient",
    steps: Iterable[int] | None = None,
    params: str = "*",
    progress: Callable[[int], None] = Quiet,
) -> list[Path]:
    """Write one safetensors file per step, `out/STREAM-STEP.safetensors`, and return them; bits as recorded.

    Keys are parameter names. A parameter whose `.grad` was None is absent and named in the file's metadata (`none`,
    JSON); of one that was recorded in part, the metadata (`experts`, JSON) gives the ids of its slices. `params` is a
    pattern such as `*experts*`; `steps` None means all at which the stream holds something.
    """
    if stream not in _TENSORS and not stream.startswith("state."):
        raise unknown("stream of tensors", stream, _TENSORS)
    names = [name for name in trace.infos if fnmatchcase(name, params)]
    if not names:
        raise GradreelError(f"no parameter matches {params!r}; the trace has {_some(trace.infos)}")
    known = trace.weight_steps() if stream == "weight" else trace.steps
    chosen = _steps_of(trace, known if steps is None else steps)
    place = _new_place(out)
    written: list[Path] = []
    for step in chosen:
        found = {name: raw for name in names if (raw := trace.raw(stream, name, step)) is not None}
        none = [n for n in names if n not in found and stream != "weight" and (trace.presence(n, step) == NONE).all()]
        if found or none:
            experts = {n: ids.tolist() for n in found if (ids := trace.experts(n, step)) is not None}
            if not written:
                place.mkdir(parents=True, exist_ok=True)
            written.append(place / f"{stream}-{step:06d}.safetensors")
            _write_safetensors(written[-1], found, {"none": none, "experts": experts, "step": step, "trace": trace.id})
        progress(1)
    if not written:
        raise GradreelError(
            f"{trace.path.name} holds no {stream} of {params!r} in these steps; see gradreel info, and Trace.steps"
        )
    return written


def _new_place(out: str | Path) -> Path:
    place = as_place(out)
    if isinstance(place, StorePath):
        raise GradreelError(f"{str(place)!r} is a URL; exports are written to this machine, copy them from here")
    try:
        if place.is_file() or (place.is_dir() and any(place.iterdir())):
            raise GradreelError(f"{str(place)!r} is there already; choose another path or remove it first")
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradreelError(f"{str(place)!r} cannot be written: {error.strerror or error}") from None
    return place


def _steps_of(trace: Trace, steps: Iterable[int]) -> list[int]:
    known, chosen = set(trace.all_steps), sorted(set(steps))
    if absent := [step for step in chosen if step not in known]:
        raise GradreelError(f"step {absent[0]} is not in {trace.path.name}; it holds {len(known)} steps")
    if not chosen:
        raise GradreelError(f"no step of {trace.path.name} is chosen; it holds {len(known)} steps")
    return chosen


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _write_csv(trace: Trace, place: Path, steps: list[int], progress: Callable[[int], None]) -> None:
    file = AsideFile(place)
    try:
        file.write(b"step,layer,token,expert\n")
        for step in steps:
            for layer in trace.layers:
                routing = trace.routing_step(step, layer.layer)
                if routing is None:
                    continue
                ids = routing.topk_expert_ids[~routing.is_pad]
                for first in range(0, len(ids), 1 << 14):
                    part = ids[first : first + (1 << 14)]
                    lines = [
                        f"{step},{layer.layer},{first + i},{expert}\n"
                        for i, row in enumerate(part.tolist())
                        for expert in row
                    ]
                    file.write("".join(lines).encode())
            progress(1)
        file.commit()
    except BaseException:
        file.discard()
        raise


def _write_megatron(trace: Trace, folder: Path, steps: list[int], progress: Callable[[int], None]) -> None:
    folder.mkdir(exist_ok=True)
    imported = trace.header.provenance.get("imported")
    stage = imported.get("stage") if isinstance(imported, dict) and imported.get("kind") == "megatron" else None
    stage = stage if isinstance(stage, str) and stage.isidentifier() else "executed"
    for rank in trace._ranks:
        keys = {x.layer: _megatron.key_of(x.module, x.layer) for x in rank.header.layers}
        if len(set(keys.values())) < len(keys):
            keys = {number: ("decoder", None, number) for number in keys}
        file = AsideFile(folder / f"router_trace_rank{rank.rank}.jsonl")
        try:
            for step in steps:
                for micro in sorted(micro_steps(rank, step), key=lambda m: (m.micro_step, m.layer)):
                    ids = micro.topk_expert_ids[~micro.is_pad].astype(np.int64)
                    file.write(_megatron.line_of(step, keys[micro.layer], rank.rank, ids, stage))
                progress(1)
            file.commit()
        except BaseException:
            file.discard()
            raise


def _write_safetensors(path: Path, tensors: dict[str, RawTensor], about: dict[str, object]) -> None:
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    ordered = sorted(tensors.items(), key=lambda item: -DTYPES[item[1].dtype][1].itemsize)
    offset = 0
    for name, raw in ordered:
        if name == "__metadata__":
            raise GradreelError(
                f"a parameter called {clip(name)} cannot be kept in safetensors; leave it out by --params"
            )
        end = offset + raw.data.nbytes
        code, shape = DTYPES[raw.dtype][0], list(raw.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = new_file(path)
    try:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, raw in ordered:
            if raw.data.nbytes:
                file.write(np.ascontiguousarray(raw.data).reshape(-1).view(np.uint8))
        file.commit()
    except BaseException:
        file.discard()
        raise
