"""One tensor out of the folders that hold it: whole from one rank, or put together from the parts of several.

Legend: E experts, e recorded ones, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from traces._rank import RankFolder
from traces.chunks import ChunkFile, Slot
from traces.errors import NotRecorded, TraceError, unknown
from traces.placements import Placement, place, uncovered
from traces.schema import DTYPES, RawTensor
from traces.seals import presence_width
from traces.views import ParamInfo

if TYPE_CHECKING:
    from traces._ranks import Ranks

_SHAPED = ("gradient", "grad_buffer", "weight")
Found = tuple[ChunkFile, Slot]


def slot_of(rank: RankFolder, stream: str, name: str, step: int) -> Found | None:
    """Where a rank keeps a tensor, or None."""
    seal = rank.seal_of(step)
    chunk = rank.chunk(seal) if seal is not None else None
    slot = chunk.index().get((step, stream, name)) if chunk is not None else None
    return (chunk, slot) if chunk is not None and slot is not None else None


# ---------------------------------------------------------------------------------------------- from one rank


def check_whole(rank: RankFolder, found: Found, stream: str, info: ParamInfo | None, name: str, step: int) -> None:
    """A whole tensor has the parameter's shape, with the recorded experts only along their axis."""
    chunk, slot = found
    if info is None:
        raise unknown("parameter", name, rank.tables.params)
    ids = rank.step(step).experts.get(name)
    shapes = [info.shape]
    if ids is not None and info.expert_axis is not None:
        shapes.append((*info.shape[: info.expert_axis], len(ids), *info.shape[info.expert_axis + 1 :]))
    if slot.shape not in shapes:
        raise TraceError(f"{chunk.where}: {stream} of {name!r} at step {step} has shape {slot.shape}, not {shapes[0]}")


def read_whole(
    rank: RankFolder, found: Found, stream: str, info: ParamInfo | None, step: int, experts: Sequence[int] | None
) -> RawTensor:
    """A tensor of one rank, or some experts of it."""
    chunk, slot = found
    axis = positions = None
    if experts is not None:
        assert info is not None
        ids = rank.step(step).experts.get(info.name)
        axis, chosen = _checked_experts(info, experts)
        stored_whole = ids is None or slot.shape[axis] == presence_width(info)
        positions = chosen if stored_whole else _positions(chosen, ids or (), f"{stream} of", info, step)
    data = chunk.read(slot, axis, positions)
    return RawTensor(slot.dtype, tuple(data.shape), data)


def _checked_experts(info: ParamInfo, experts: Sequence[int]) -> tuple[int, list[int]]:
    if info.expert_axis is None:
        raise NotRecorded(f"{info.name!r} is no stack of experts; ask for it without `experts`")
    total = presence_width(info)
    chosen = [int(e) for e in experts]
    if bad := [e for e in chosen if not 0 <= e < total]:
        raise unknown(f"expert of {info.name!r}", str(bad[0]), [f"0 to {total - 1}"])
    return info.expert_axis, chosen


def _positions(chosen: Sequence[int], ids: Sequence[int], what: str, info: ParamInfo, step: int) -> list[int]:
    where = {int(e): i for i, e in enumerate(ids)}
    if absent := [e for e in chosen if e not in where]:
        raise NotRecorded(
            f"{what} expert {absent[0]} of {info.name!r} at step {step} was not recorded; there are {list(where)}"
        )
    return [where[e] for e in chosen]


# ------------------------------------------------------------------------------------------ from several ranks


class _Piece:
    """One rank's part of one tensor: `ids` are the global expert ids of its slices, None where all."""

    def __init__(self, rank: RankFolder, part: Placement, found: Found | None, ids: tuple[int, ...] | None) -> None:
        self.rank, self.part, self.found, self.ids = rank, part, found, ids

    def read(self) -> np.ndarray:
        """The bits."""
        assert self.found is not None
        return self.found[0].read(self.found[1])


def read_split(
    ranks: Ranks, stream: str, info: ParamInfo, step: int, experts: Sequence[int] | None
) -> RawTensor | None:
    """A parameter's tensor from the parts of all ranks; None where no rank has any of it.

    A part whose rank had no gradient in this step (`.grad` None) is zero; presence tells.
    """
    pieces = []
    for rank, part in ranks.writers(info.name):
        if part is None or rank.seal_of(step) is None:
            continue
        found = slot_of(rank, stream, info.name, step)
        pieces.append(_Piece(rank, part, found, _ids_of(rank, part, info, step, stream)))
    there = [piece for piece in pieces if piece.found is not None]
    if not there:
        return None
    where = f"{stream} of {info.name!r} at step {step}"
    dtype = there[0].found[1].dtype  # type: ignore[index]
    for piece in there:
        if piece.found[1].dtype != dtype:  # type: ignore[index]
            raise TraceError(f"{where}: rank {there[0].rank.rank} stored {dtype}, rank {piece.rank.rank} another dtype")
    if stream not in _SHAPED and not all(_is_shaped(piece, info) for piece in there):
        return _read_odd(there, stream, info, where, experts)
    if experts is not None:
        axis, chosen = _checked_experts(info, experts)
        if all(set(piece.part.runs) == {axis} for piece in pieces):
            return _read_experts(ranks, pieces, info, step, where, dtype, chosen)
    whole, parts, ids = _compressed(pieces, info)
    _check_shapes(pieces, parts, whole, where)
    usable = [
        (p, part) for p, part in zip(pieces, parts, strict=True) if p.found is not None or _is_none(p, info, step)
    ]
    gap = uncovered(whole, [(piece.rank.rank, part) for piece, part in usable], where)
    if gap is not None:
        raise _gap(ranks, where, step, gap, pieces)
    out = np.empty(whole, DTYPES[dtype][1])  # its parts were seen to be there, so it is no larger than the files
    for piece, part in usable:
        if piece.found is None:
            place(out, part, np.zeros(part.shape(whole), DTYPES[dtype][1]))
        else:
            place(out, part, piece.read())
    if experts is not None:
        axis, chosen = _checked_experts(info, experts)
        positions = chosen if ids is None else _positions(chosen, ids, f"{stream} of", info, step)
        out = np.take(out, positions, axis=axis)
    return RawTensor(dtype, tuple(out.shape), out)


def _ids_of(rank: RankFolder, part: Placement, info: ParamInfo, step: int, stream: str) -> tuple[int, ...] | None:
    """Global ids of the slices a rank stored: the recorded ones, else its own; None where all, in order."""
    if info.expert_axis is None or part.is_flat:
        return None
    ids = rank.step(step).experts.get(info.name)
    if ids is not None and stream in ("gradient", "grad_buffer"):
        return ids
    return tuple(part.indices(info.expert_axis).tolist()) if part.splits(info.expert_axis) else None


def _is_shaped(piece: _Piece, info: ParamInfo) -> bool:
    return piece.found is not None and piece.found[1].shape == piece.part.shape(info.shape)


def _is_none(piece: _Piece, info: ParamInfo, step: int) -> bool:
    """Whether a rank without a tensor had nothing to write: `.grad` was None, or its part is empty."""
    if any(piece.part.count(axis) == 0 for axis in piece.part.runs):
        return True
    codes = set(piece.rank.tables.presence_of(piece.rank.step(step), info.name))
    return "1" in codes and codes <= {"0", "1"}


def _compressed(
    pieces: Sequence[_Piece], info: ParamInfo
) -> tuple[tuple[int, ...], list[Placement], tuple[int, ...] | None]:
    """The shape of what was recorded, each part as it lies in that, and the ids (None: all experts)."""
    axis = info.expert_axis
    parts = [piece.part for piece in pieces]
    if axis is None or all(piece.ids is None for piece in pieces):
        return info.shape, parts, None
    every = range(presence_width(info))
    union = sorted({i for piece in pieces for i in (every if piece.ids is None else piece.ids)})
    thinned = any(
        piece.ids is not None and (not piece.part.splits(axis) or len(piece.ids) != piece.part.count(axis))
        for piece in pieces
    )
    if not thinned:
        return info.shape, parts, None
    place_of = {expert: index for index, expert in enumerate(union)}
    moved = [
        piece.part.replaced(axis, [place_of[i] for i in (every if piece.ids is None else piece.ids)])
        for piece in pieces
    ]
    return (*info.shape[:axis], len(union), *info.shape[axis + 1 :]), moved, tuple(union)


def _check_shapes(pieces: Sequence[_Piece], parts: Sequence[Placement], whole: Sequence[int], where: str) -> None:
    for piece, part in zip(pieces, parts, strict=True):
        if piece.found is not None and piece.found[1].shape != part.shape(whole):
            raise TraceError(
                f"{piece.found[0].where}: {where} has shape {piece.found[1].shape}, not {part.shape(whole)}"
            )


def _read_experts(
    ranks: Ranks,
    pieces: Sequence[_Piece],
    info: ParamInfo,
    step: int,
    where: str,
    dtype: str,
    chosen: Sequence[int],
) -> RawTensor:
    """Some experts, where each lies whole on one rank: only their bytes are read."""
    axis = info.expert_axis
    assert axis is not None
    shape = (*info.shape[:axis], len(chosen), *info.shape[axis + 1 :])
    owner: dict[int, tuple[_Piece, int]] = {}
    for piece in pieces:
        for position, expert in enumerate(piece.ids or ()):
            if expert in owner:
                raise TraceError(f"{where}: ranks {owner[expert][0].rank.rank} and {piece.rank.rank} hold {expert}")
            owner[expert] = (piece, position)
    if absent := [e for e in chosen if e not in owner]:
        raise _gap(ranks, where, step, f"expert {absent[0]}", pieces)
    for piece in pieces:
        if piece.found is None and not _is_none(piece, info, step):
            raise _gap(ranks, where, step, f"the part of rank {piece.rank.rank}", pieces)
        slots = (*info.shape[:axis], len(piece.ids or ()), *info.shape[axis + 1 :])
        if piece.found is not None and piece.found[1].shape != slots:
            raise TraceError(f"{piece.found[0].where}: {where} has shape {piece.found[1].shape}, not {slots}")
    out = np.zeros(shape, DTYPES[dtype][1])  # at most as many slices as were asked for
    for piece in pieces:
        mine = [(index, owner[e][1]) for index, e in enumerate(chosen) if owner[e][0] is piece]
        if mine and piece.found is not None:
            data = piece.found[0].read(piece.found[1], axis, [position for _, position in mine])
            out[(slice(None),) * axis + ([index for index, _ in mine],)] = data
    return RawTensor(dtype, shape, out)


def _read_odd(
    there: Sequence[_Piece], stream: str, info: ParamInfo, where: str, experts: Sequence[int] | None
) -> RawTensor:
    """Optimizer state and small streams: one value for all ranks, one entry per expert or row, or parts of sums."""
    slots = [piece.found[1] for piece in there]  # type: ignore[index]
    if all(slot.shape == () for slot in slots):
        return RawTensor(slots[0].dtype, (), there[0].read())
    axis = info.expert_axis if info.expert_axis is not None else 0
    small = stream == "statistics"
    if small and not all(set(piece.part.runs) == {info.expert_axis} for piece in there):
        return _summed(there, slots, where)
    along = len(slots[0].shape) - 1 if small else 0
    if any(
        set(piece.part.runs) != {axis} or not slot.shape or slot.shape[along] != piece.part.count(axis)
        for slot, piece in zip(slots, there, strict=True)
    ):
        raise NotRecorded(f"{where}: the ranks keep it in shapes that cannot be joined; open one rank's chunk itself")
    whole = tuple(info.shape[axis] if i == along else size for i, size in enumerate(slots[0].shape))
    parts = [Placement({along: piece.part.runs[axis]}) for piece in there]
    _check_shapes(there, parts, whole, where)
    gap = uncovered(whole, [(p.rank.rank, part) for p, part in zip(there, parts, strict=True)], where)
    if gap is not None:
        raise NotRecorded(f"{where}: {gap} was not recorded by the rank that holds it")
    out = np.empty(whole, DTYPES[slots[0].dtype][1])
    for piece, part in zip(there, parts, strict=True):
        place(out, part, piece.read())
    if experts is not None and info.expert_axis is not None:
        out = np.take(out, [int(e) for e in experts], axis=along)
    return RawTensor(slots[0].dtype, tuple(out.shape), out)


def _summed(there: Sequence[_Piece], slots: Sequence[Slot], where: str) -> RawTensor:
    """Statistics are sums and counts, so those of the parts of one matrix add up."""
    if any(slot.shape != slots[0].shape for slot in slots):
        raise NotRecorded(f"{where}: the ranks keep it in shapes that cannot be joined; open one rank's chunk itself")
    total = np.sum([piece.read() for piece in there], axis=0)
    return RawTensor(slots[0].dtype, slots[0].shape, total)


def _gap(ranks: Ranks, where: str, step: int, gap: str, pieces: Sequence[_Piece]) -> NotRecorded:
    if lacking := ranks.lacking(step):
        return NotRecorded(f"{where}: {gap} is missing; {lacking} sealed no step {step}")
    silent = [str(piece.rank.rank) for piece in pieces if piece.found is None]
    by = f"rank {', '.join(silent)} holds it and recorded nothing" if silent else "no rank recorded it"
    return NotRecorded(f"{where}: {gap} is missing; {by}")
