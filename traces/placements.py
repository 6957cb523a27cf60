"""Where one rank's part of a tensor lies in the whole one.

A part is described axis by axis, as runs [first, count] of indices in the order the rank holds them: rows 4 and 5 of
eight are {0: [[4, 2]]}. Axes that are not named are whole. A part that is a stretch of the flattened tensor, as ZeRO
cuts it, is {FLAT: [[first, count]]}. Nothing here allocates by a declared size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from traces._json import clip, integer
from traces.errors import TraceError
from traces.views import ParamInfo

#: The "axis" of a part that is cut from the flattened tensor.
FLAT = -1
MAX_RUNS = 1 << 16
_MAX_CELLS = 1 << 20
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Placement:
    """One rank's part. `runs` maps each split axis (or `FLAT`) to its runs."""

    runs: Mapping[int, Runs]

    @classmethod
    def of(cls, indices: Mapping[int, Iterable[int]]) -> Placement:
        """From the global indices along each split axis, in the order the rank holds them."""
        return cls({axis: runs_of(list(found)) for axis, found in indices.items()})

    @cached_property
    def key(self) -> tuple[tuple[int, Runs], ...]:
        """The same as a hashable value."""
        return tuple(sorted(self.runs.items()))

    @property
    def is_flat(self) -> bool:
        """Whether the part is cut from the flattened tensor."""
        return FLAT in self.runs

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part of a tensor of shape `whole`."""
        if self.is_flat:
            return (self.count(FLAT),)
        return tuple(self.count(axis) if axis in self.runs else size for axis, size in enumerate(whole))

    def count(self, axis: int) -> int:
        """How many indices along a split axis are held."""
        return sum(count for _, count in self.runs[axis])

    def splits(self, axis: int | None) -> bool:
        """Whether the part may hold only some indices along an axis."""
        return axis is not None and axis in self.runs

    def indices(self, axis: int) -> np.ndarray:
        """The held indices along a split axis, int64. Only for parts that were seen to have this size."""
        pieces = [np.arange(first, first + count, dtype=np.int64) for first, count in self.runs[axis]]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def replaced(self, axis: int, indices: Iterable[int]) -> Placement:
        """The same part with other indices along one axis."""
        return Placement({**self.runs, axis: runs_of(list(indices))})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"flat" if axis == FLAT else str(axis): [list(run) for run in runs] for axis, runs in sorted(self.key)}


def local_info(param: ParamInfo, part: Placement | None) -> ParamInfo:
    """A description of one rank's part of a parameter: a tensor of its own, with the experts held here."""
    if part is None:
        return param
    shape = part.shape(param.shape)
    if part.is_flat:
        return replace(param, shape=shape, expert_axis=None, num_experts=None, matrix_axes=None, strides=None)
    experts = shape[param.expert_axis] if param.expert_axis is not None else param.num_experts
    return replace(param, shape=shape, num_experts=experts, strides=None)


def runs_of(indices: Sequence[int]) -> Runs:
    """[0, 1, 2, 7] as ((0, 3), (7, 1))."""
    found: list[list[int]] = []
    for index in indices:
        if found and index == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([int(index), 1])
    return tuple((first, count) for first, count in found)


def placement_from_json(value: Any, whole: Sequence[int], where: str) -> Placement:
    """Read a placement strictly against the shape of the whole tensor; `TraceError` otherwise."""
    if not isinstance(value, dict) or not value:
        raise TraceError(f"{where}: {clip(value)} must map axes to runs [first, count]")
    runs: dict[int, Runs] = {}
    for name, listed in value.items():
        if name == "flat":
            axis, size = FLAT, math.prod(whole)
        elif name.isascii() and name.isdigit() and len(name) < 3 and int(name) < len(whole):
            axis, size = int(name), whole[int(name)]
        else:
            raise TraceError(f"{where}: {clip(name)} is no axis of shape {tuple(whole)}")
        if not isinstance(listed, list) or len(listed) > MAX_RUNS:
            raise TraceError(f"{where}: axis {name} must list at most {MAX_RUNS} runs [first, count]")
        runs[axis] = tuple(_run(run, size, f"{where}: axis {name}") for run in listed)
        _check_disjoint(runs[axis], f"{where}: axis {name}")
    if FLAT in runs and len(runs) > 1:
        raise TraceError(f"{where}: a flat part names no axes")
    return Placement(runs)


def _run(value: Any, size: int, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise TraceError(f"{where}: {clip(value)} must be [first, count]")
    first = integer(value[0], where, 0, size)
    return first, integer(value[1], where, 0, size - first)


def _check_disjoint(runs: Runs, where: str) -> None:
    end = 0
    for first, count in sorted(run for run in runs if run[1]):
        if first < end:
            raise TraceError(f"{where}: index {first} is listed twice")
        end = first + count


# ------------------------------------------------------------------------------------------------ several parts


def uncovered(whole: Sequence[int], parts: Sequence[tuple[int, Placement]], where: str) -> str | None:
    """What no part holds, in words; None where the parts (rank, placement) are the whole tensor, each element once.

    An element that two ranks hold raises `TraceError`.
    """
    if not parts:
        return "all of it"
    flat = any(part.is_flat for _, part in parts)
    if flat and not all(part.is_flat for _, part in parts):
        raise TraceError(f"{where}: some ranks hold it as a stretch of the flattened tensor and some by axes")
    sizes = {FLAT: math.prod(whole)} if flat else dict(enumerate(whole))
    axes = sorted({axis for _, part in parts for axis in part.runs})
    cuts = {axis: _cuts(axis, sizes[axis], parts) for axis in axes}
    if math.prod(max(len(c) - 1, 0) for c in cuts.values()) > _MAX_CELLS:
        raise TraceError(f"{where}: {len(parts)} ranks split it into more than {_MAX_CELLS} pieces")
    held = np.zeros([len(cuts[axis]) - 1 for axis in axes], np.uint32)
    for rank, part in parts:
        for cell in _cells(part, axes, cuts):
            if held[cell].any():
                other = next(r for r, p in parts if r != rank and _overlap(p, part, axes, cuts))
                raise TraceError(f"{where}: ranks {other} and {rank} hold the same part of it")
            held[cell] += 1
    if held.all():
        return None
    gap = np.argwhere(held == 0)[0]
    pieces = []
    for axis, cell in zip(axes, gap, strict=True):
        first, last = cuts[axis][cell], cuts[axis][cell + 1] - 1
        name = "element" if flat else f"axis {axis}, index"
        pieces.append(f"{name} {first}" if first == last else f"{name} {first} to {last}")
    return ", ".join(pieces)


def _cuts(axis: int, size: int, parts: Sequence[tuple[int, Placement]]) -> list[int]:
    found = {0, size}
    for _, part in parts:
        for first, count in part.runs.get(axis, ()):
            found |= {first, first + count}
    return sorted(found)


def _cells(part: Placement, axes: Sequence[int], cuts: Mapping[int, list[int]]) -> Iterable[tuple[slice, ...]]:
    """The cells of the grid of cuts that a part holds, as slices."""
    from itertools import product

    choices = []
    for axis in axes:
        where = {cut: index for index, cut in enumerate(cuts[axis])}
        if axis in part.runs:
            choices.append([slice(where[f], where[f + n]) for f, n in part.runs[axis] if n])
        else:
            choices.append([slice(0, len(cuts[axis]) - 1)])
    return product(*choices)


def _overlap(one: Placement, other: Placement, axes: Sequence[int], cuts: Mapping[int, list[int]]) -> bool:
    mine = set(_flat_cells(one, axes, cuts))
    return any(cell in mine for cell in _flat_cells(other, axes, cuts))


def _flat_cells(part: Placement, axes: Sequence[int], cuts: Mapping[int, list[int]]) -> Iterable[tuple[int, ...]]:
    from itertools import product

    for slices in _cells(part, axes, cuts):
        yield from product(*(range(s.start, s.stop) for s in slices))


def assembled(
    whole: Sequence[int], parts: Sequence[tuple[Placement, Callable[[], np.ndarray]]], dtype: np.dtype[Any]
) -> np.ndarray:
    """One array of shape `whole` from parts that were checked to cover it."""
    out = np.empty(tuple(whole), dtype)
    for part, read in parts:
        place(out, part, read())
    return out


def place(out: np.ndarray, part: Placement, data: np.ndarray) -> None:
    """Write one part into the whole array."""
    if part.is_flat:
        flat, start = out.reshape(-1), 0
        for first, count in part.runs[FLAT]:
            flat[first : first + count] = data[start : start + count]
            start += count
        return
    for target, source in _blocks(part, out.ndim):
        out[target] = data[source]


def _blocks(part: Placement, dimensions: int) -> Iterable[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    from itertools import product

    choices: list[list[tuple[slice, slice]]] = []
    for axis in range(dimensions):
        if axis not in part.runs:
            choices.append([(slice(None), slice(None))])
            continue
        pairs, start = [], 0
        for first, count in part.runs[axis]:
            pairs.append((slice(first, first + count), slice(start, start + count)))
            start += count
        choices.append(pairs)
    for blocks in product(*choices):
        yield tuple(target for target, _ in blocks), tuple(source for _, source in blocks)
