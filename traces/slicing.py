"""A part of a trace as a smaller trace, which says what it was cut from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from traces._micro import micro_steps
from traces._store import as_place
from traces.errors import GradreelError
from traces.reader import Trace
from traces.schema import Header, RawTensor, RoutingRecord, StepRecord
from traces.views import NOT_RECORDED, ParamInfo
from traces.writer import TraceWriter

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Cut:
    """What was kept: the new place, the steps, how many parameters, and whether weights stand at the first step."""

    path: Path
    steps: list[int]
    params: int
    begins_with_weights: bool

    def __str__(self) -> str:
        span = f"{len(self.steps)} steps ({self.steps[0]} to {self.steps[-1]}), {self.params} parameters"
        if self.params and not self.begins_with_weights:
            span += "; no weights at its first step, so a replay measures updates only"
        return f"{self.path}: {span}"


def slice_trace(
    trace: Trace,
    out: str | Path,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    params: str = "*",
    experts: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> Cut:
    """Write the steps from `steps[0]` to `steps[1]`, both included, of `trace` as the new trace `out`.

    `params` is a pattern of names such as `*experts*`; `experts` are the ids to keep of every stack and list of
    experts. Routing, scalars and the streams that belong to no parameter are kept whole; bits stay as they are. The
    ranks of a distributed run are put together into one. Weights that stand one step past the last, the outcome of the
    slice, are kept too. The new header says what it was cut from (`provenance["slice"]`).

    Errors: `GradreelError` where nothing is chosen, or a name or id is not there.
    """
    first, last = steps
    chosen = [s for s in trace.all_steps if (first is None or s >= first) and (last is None or s <= last)]
    if not chosen:
        span = trace.all_steps
        has = f"it has {span[0]} to {span[-1]}" if span else "it has none"
        raise GradreelError(f"no step of {trace.path.name} is from {first} to {last}; {has}")
    kept = [p for p in trace.header.params if fnmatchcase(p.name, params) and _is_chosen(p, experts)]
    if not kept and trace.header.params and params != "*":
        raise GradreelError(f"no parameter of {trace.path.name} matches {params!r}; see gradreel info")
    ids = _expert_ids(trace, experts)
    header = _header(trace, kept, chosen, params, ids)
    keys = _Keys(trace)
    with TraceWriter(as_place(out), header, chunk_bytes=_CHUNK_BYTES) as writer:
        for step in chosen:
            writer.append(_cut(trace, step, kept, ids, keys.of(step)))
            progress(1)
        after = chosen[-1] + 1
        outcome = {("weight", p.name) for p in kept} & keys.of(after)
        if after in trace.all_steps and outcome:
            closing = _cut(trace, after, kept, ids, outcome)
            writer.append(StepRecord(after, closing.tensors, {}, closing.experts, recorded=False))
    begins = any(("weight", p.name) in keys.of(chosen[0]) for p in kept)
    return Cut(writer.path, chosen, len(kept), begins)


def _is_chosen(param: ParamInfo, experts: Sequence[int] | None) -> bool:
    return experts is None or param.expert is None or param.expert in experts


def _expert_ids(trace: Trace, experts: Sequence[int] | None) -> list[int] | None:
    if experts is None:
        return None
    ids = sorted(set(experts))
    top = max((x.num_experts for x in trace.layers), default=0)
    if not ids or ids[0] < 0 or ids[-1] >= top:
        raise GradreelError(f"experts {ids} are not all from 0 to {top - 1}; give ids that the layers have")
    return ids


def _header(trace: Trace, kept: list[ParamInfo], steps: list[int], params: str, experts: list[int] | None) -> Header:
    names = {p.name for p in kept}
    kept = [p if p.tied_to in names else replace(p, tied_to=None) for p in kept]
    run = dict(trace.header.run)
    groups = run.get("groups")
    if isinstance(groups, list):
        run["groups"] = [_group(group, names) for group in groups]
    about: dict[str, Any] = {"of": trace.path.name, "id": trace.id, "steps": [steps[0], steps[-1]], "params": params}
    if experts is not None:
        about["experts"] = experts
    if trace.header.ranks > 1:
        about["ranks"] = trace.header.ranks
    return Header(
        params=tuple(kept),
        layers=trace.header.layers,
        streams=trace.header.streams,
        run=run,
        record=trace.header.record,
        provenance={**trace.header.provenance, "slice": about},
    )


def _group(group: Any, names: set[str]) -> Any:
    if isinstance(group, dict) and isinstance(group.get("params"), list):
        return {**group, "params": [name for name in group["params"] if name in names]}
    return group


class _Keys:
    """(stream, name) of every tensor of a step, whichever rank holds it; one seal's index is looked at at a time."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._names = set(trace.infos)

    def of(self, step: int) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for rank in self._trace._ranks:
            seal = rank.seal_of(step)
            chunk = None if seal is None else rank.chunk(seal)
            if chunk is not None:
                found |= {(stream, name) for at, stream, name in chunk.index() if at == step}
        return found


def _cut(
    trace: Trace, step: int, kept: list[ParamInfo], ids: list[int] | None, keys: set[tuple[str, str]]
) -> StepRecord:
    record = trace._record(step)
    result = StepRecord(step, scalars=record.scalars, recorded=record.recorded, skipped=record.skipped)
    known = {p.name: p for p in kept}
    for param in kept:
        codes = trace.presence(param.name, step)
        whole = trace.experts(param.name, step)
        if ids is not None and param.expert_axis is not None:
            mine = np.array([e for e in ids if whole is None or e in whole], np.int64)
            left = np.full_like(codes, NOT_RECORDED)
            left[mine] = codes[mine]
            codes = left
            if len(mine) < len(left):
                result.experts[param.name] = mine
        elif whole is not None:
            result.experts[param.name] = whole
        if codes.any():
            result.presence[param.name] = codes
    for stream, name in sorted(keys):
        if name in trace.infos and name not in known:
            continue
        raw = _tensor(trace, stream, name, step, known.get(name), result.experts.get(name) if ids is not None else None)
        if raw is not None:
            result.tensors[stream, name] = raw
    result.routing = list(_routing(trace, step))
    return result


def _tensor(
    trace: Trace, stream: str, name: str, step: int, param: ParamInfo | None, ids: np.ndarray | None
) -> RawTensor | None:
    shaped = stream in ("gradient", "grad_buffer", "weight")
    if not shaped or param is None or ids is None:
        return trace.raw(stream, name, step)
    return trace.raw(stream, name, step, ids.tolist()) if len(ids) else None


def _routing(trace: Trace, step: int) -> Iterator[RoutingRecord]:
    """The micro-steps of all ranks, numbered anew where several ranks had the same layer."""
    count: dict[int, int] = {}
    for rank in trace._ranks:
        for micro in micro_steps(rank, step):
            if trace.header.ranks > 1:
                micro = replace(micro, micro_step=count.get(micro.layer, 0))
            count[micro.layer] = count.get(micro.layer, 0) + 1
            yield micro


def steps_between(text: str) -> tuple[int | None, int | None]:
    """`"10:20"` as (10, 20), ends included; either may be left out."""
    first, mark, last = text.partition(":")
    try:
        ends = (int(first) if first else None, int(last) if last else None)
    except ValueError:
        mark, ends = "", (None, None)
    if not mark:
        raise GradreelError(f"--steps {text[:40]!r} is not FIRST:LAST; write --steps 10:20, --steps 10: or --steps :20")
    return ends


def ids_of(text: str) -> list[int]:
    """`"0,4,8-11"` as [0, 4, 8, 9, 10, 11]."""
    found: list[int] = []
    for piece in text.split(","):
        first, mark, last = piece.strip().partition("-")
        if not first.isdecimal() or (mark and not last.isdecimal()) or len(first) > 7 or len(last) > 7:
            raise GradreelError(f"--experts {text[:40]!r} is no list of ids; write --experts 0,4,8-11")
        found += range(int(first), int(last or first) + 1)
    return found


def between(steps: Iterable[int], ends: tuple[int | None, int | None]) -> list[int]:
    """The steps from the first to the last of `ends`, both included."""
    first, last = ends
    return [s for s in steps if (first is None or s >= first) and (last is None or s <= last)]
