"""Where two traces differ first: the step, and the tensor or number in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from traces._json import clip
from traces._micro import micro_steps
from traces.errors import GradreelError
from traces.reader import Trace
from traces.schema import RawTensor
from traces.slicing import _Keys, between

#: Numbers that say how long something took are never the same twice.
_TIMES = ("step_ms", "seconds", "time")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which two traces differ. `what`: `gradient of NAME`, `routing of layer 3`, `scalar loss`."""

    step: int
    what: str
    how: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}: {self.how}"


def first_difference(
    first: Trace,
    second: Trace,
    *,
    steps: tuple[int | None, int | None] = (None, None),
    params: str = "*",
    progress: Callable[[int], None] = lambda steps: None,
) -> Difference | None:
    """Compare two traces step by step, bit by bit, and return the first difference; None where there is none.

    In a step: whether it is recorded, scalars (other than times), presence, recorded experts, routing, tensors by name.
    `steps` (first, last) and `params` (a pattern) narrow it down. Ranks are put together, so a distributed run can be
    compared with one of a single process. One tensor of each trace is in memory at a time.

    `GradreelError` where the two cannot be compared: parameters of other names, shapes or dtypes, other MoE layers, no
    step in common.
    """
    names = _comparable(first, second, params)
    mine, theirs = set(between(first.all_steps, steps)), set(between(second.all_steps, steps))
    if not mine & theirs:
        raise GradreelError(
            f"{first.path.name} and {second.path.name} have no step in common, so there is nothing to compare"
        )
    keys = (_Keys(first), _Keys(second))
    for step in sorted(mine | theirs):
        if step not in mine or step not in theirs:
            has = first if step in mine else second
            return Difference(step, "the step", f"is only in {has.path}")
        found = next(_differences(first, second, step, names, keys), None)
        if found is not None:
            return found
        progress(1)
    return None


def _comparable(first: Trace, second: Trace, params: str) -> list[str]:
    both = f"{first.path.name} and {second.path.name} cannot be compared"
    a = {name: info for name, info in first.infos.items() if fnmatchcase(name, params)}
    b = {name: info for name, info in second.infos.items() if fnmatchcase(name, params)}
    if only := sorted(a.keys() ^ b.keys()):
        where = first if only[0] in a else second
        raise GradreelError(f"{both}: parameter {clip(only[0])} is only in {where.path.name} ({len(only)} such)")
    for name, info in a.items():
        other = b[name]
        for what, x, y in (("shape", info.shape, other.shape), ("dtype", info.dtype, other.dtype)):
            if x != y:
                raise GradreelError(f"{both}: {what} of {clip(name)} is {x} in one, {y} in the other")
    layers = [[(x.layer, x.num_experts) for x in trace.layers] for trace in (first, second)]
    if layers[0] != layers[1]:
        raise GradreelError(f"{both}: their MoE layers, or numbers of experts, are others")
    return list(a)


def _differences(
    first: Trace, second: Trace, step: int, names: list[str], keys: tuple[_Keys, _Keys]
) -> Iterator[Difference]:
    a, b = first._record(step), second._record(step)
    for what in ("recorded", "skipped"):
        if getattr(a, what) != getattr(b, what):
            yield Difference(step, what, f"{getattr(a, what)} against {getattr(b, what)}")
    for name in sorted(a.scalars.keys() | b.scalars.keys()):
        x, y = a.scalars.get(name), b.scalars.get(name)
        if not name.endswith(_TIMES) and repr(x) != repr(y):  # by repr: NaN is like NaN
            yield Difference(step, f"scalar {clip(name)}", f"{clip(x)} against {clip(y)}")
    for name in names:
        x, y = first.presence(name, step), second.presence(name, step)
        if (x != y).any():
            at = int(np.flatnonzero(np.atleast_1d(x != y))[0])
            yield Difference(step, f"presence of {name}", f"expert {at}" if x.ndim else "another")
        x, y = first.experts(name, step), second.experts(name, step)
        if (x is None) != (y is None) or (x is not None and y is not None and not np.array_equal(x, y)):
            yield Difference(step, f"recorded experts of {name}", "other ones")
    for layer in first.layers:
        yield from _routing(first, second, step, layer.layer)
    chosen, infos = set(names), {*first.infos, *second.infos}
    wanted = [{key for key in one.of(step) if key[1] in chosen or key[1] not in infos} for one in keys]
    for stream, name in sorted(wanted[0] | wanted[1]):
        if ((stream, name) in wanted[0]) != ((stream, name) in wanted[1]):
            has = first if (stream, name) in wanted[0] else second
            yield Difference(step, f"{stream} of {name}", f"is only in {has.path}")
            continue
        how = _how(first.raw(stream, name, step), second.raw(stream, name, step))
        if how is not None:
            yield Difference(step, f"{stream} of {name}", how)


def _routing(first: Trace, second: Trace, step: int, layer: int) -> Iterator[Difference]:
    what = f"routing of layer {layer}"
    a, b = (
        [micro for rank in trace._ranks for micro in micro_steps(rank, step) if micro.layer == layer]
        for trace in (first, second)
    )
    for name in ("topk_expert_ids", "is_pad"):
        x, y = (np.concatenate([getattr(m, name) for m in found]) if found else np.empty(0) for found in (a, b))
        if x.shape != y.shape:
            yield Difference(step, what, f"{len(x)} tokens against {len(y)}")
            return
        if not x.size:
            continue
        if (wrong := np.flatnonzero((x != y).reshape(len(x), -1).any(axis=1))).size:
            at = int(wrong[0])
            yield Difference(step, what, f"{name} of token {at}: {x[at].tolist()} against {y[at].tolist()}")


def _how(a: RawTensor | None, b: RawTensor | None) -> str | None:
    """In what two tensors differ, bit by bit; None where in nothing."""
    if a is None or b is None:
        return None if a is b else "is only in one"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    x, y = a.data.reshape(-1), b.data.reshape(-1)
    if not x.size:
        return None
    wrong = np.flatnonzero((x.view(np.uint8).reshape(len(x), -1) != y.view(np.uint8).reshape(len(x), -1)).any(axis=1))
    if not wrong.size:
        return None
    at = int(wrong[0])
    index = [int(i) for i in np.unravel_index(at, a.shape)] if a.shape else []
    values: list[Any] = [raw.numbers().reshape(-1)[at].item() for raw in (a, b)]
    largest = ""
    if a.dtype.startswith(("float32", "float64", "float16", "bfloat")):
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(a.numbers().reshape(-1)[wrong].astype(np.float64) - b.numbers().reshape(-1)[wrong])
        largest = f", by at most {np.nanmax(gap):.6g}" if np.isfinite(gap).any() else ""
    return f"{values[0]!r} against {values[1]!r} at {index}; {wrong.size} of {x.size} elements differ{largest}"
