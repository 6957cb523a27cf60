"""Check a whole trace: every byte against its seal, every seal against the chain, every tensor against the header."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traces import _small
from traces._copies import COPIES
from traces._files import short
from traces._json import clip
from traces._rank import RankFolder, SealSummary, find_trace, missing_folder, rank_folders
from traces._store import as_place, names_in, there_is
from traces.chunks import ChunkFile, Key, Slot
from traces.errors import TraceError
from traces.rank_headers import merged_header
from traces.schema import Header
from traces.seals import RANK_FOLDER

_ROWS_AT_ONCE = 1 << 18
_COMPARED_STEPS = 2  # of the copies that several ranks wrote
Span = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (`severity` "damage") or worth knowing ("note").

    `file` is relative to the trace, `steps` the first and last step concerned (None where it is not about steps).
    """

    file: str
    steps: Span
    message: str
    severity: str = "damage"

    def __str__(self) -> str:
        return self.message


def verify_trace(path: str | Path, progress: Callable[[int], None] | None = None) -> list[Finding]:
    """Read everything and return what is wrong; empty for a sound, finished trace.

    Every bit of every file is covered. `progress` is called with the bytes of each file that was checked. `TraceError`
    only where `path` is no trace at all.
    """
    folder = as_place(path)
    try:
        folder, header, digest = find_trace(path)
        ranks = rank_folders(folder, header.ranks)
    except TraceError as error:
        if not there_is(folder / "header.json"):
            raise
        return [Finding("header.json" if "header.json" in str(error) else folder.name, None, str(error))]
    found = [
        Finding(name, None, f"{short(folder / name)} does not belong to the trace", "note")
        for name in names_in(folder)
        if name != "header.json" and not RANK_FOLDER.fullmatch(name)
    ]
    if (missing := missing_folder(folder, ranks, header.ranks)) is not None:
        found.append(Finding(folder.name, None, str(missing)))
    sound: list[RankFolder] = []
    for number, rank_folder in ranks.items():
        try:
            rank = RankFolder(rank_folder, number, header, digest, tolerant=True)
        except TraceError as error:
            found.append(Finding(f"{rank_folder.name}/header.json", None, str(error)))
            continue
        sound.append(rank)
        found += _rank_findings(rank, header, progress)
    found += _joint_findings(sound, header)
    return found


def _joint_findings(ranks: list[RankFolder], header: Header) -> Iterator[Finding]:
    """What only shows where several ranks are laid side by side."""
    if len(ranks) < 2:
        return
    try:
        merged_header(header, [rank.own for rank in ranks])
    except TraceError as error:
        yield Finding("header.json", None, str(error))
        return
    sealed = {rank.rank: set(rank.steps) for rank in ranks}
    every = set().union(*sealed.values())
    for rank in ranks:
        if lacking := sorted(every - sealed[rank.rank]):
            message = (
                f"{short(rank.folder)} lacks {len(lacking)} of {len(every)} steps that other ranks sealed, first step "
                f"{lacking[0]}; open_trace(path, partial=True) reads what is there"
            )
            yield Finding(rank.folder.name, (lacking[0], lacking[-1]), message, "note")
    yield from _differing_copies(ranks)


def _differing_copies(ranks: list[RankFolder]) -> Iterator[Finding]:
    """Ranks that write the same whole parameter must write the same bits: else one name means two parameters."""
    told: set[str] = set()
    for step in sorted(set.intersection(*(set(rank.recorded()) for rank in ranks)))[:_COMPARED_STEPS]:
        first: dict[str, tuple[RankFolder, ChunkFile, Slot]] = {}
        for rank in ranks:
            seal = rank.seal_of(step)
            chunk = rank.chunk(seal) if seal is not None else None
            try:
                index = chunk.index() if chunk is not None else {}
            except TraceError:
                continue  # told already
            for (at, stream, name), slot in index.items():
                if at != step or stream not in ("gradient", "weight") or name in told or name in rank.own.placements:
                    continue
                assert chunk is not None
                other = first.setdefault(f"{stream}/{name}", (rank, chunk, slot))
                if other[0] is rank or np.array_equal(_bits(*other[1:]), _bits(chunk, slot)):
                    continue
                told.add(name)
                message = (
                    f"{stream} of {name!r} at step {step} differs between rank {other[0].rank} and rank {rank.rank}; "
                    "ranks that hold different parameters must name them differently, Recorder(..., global_names=...)"
                )
                yield Finding(f"{rank.folder.name}/{chunk.path.name}", (step, step), message)


def _bits(chunk: ChunkFile, slot: Slot) -> np.ndarray:
    return chunk.read(slot).reshape(-1).view(np.uint8)


def _rank_findings(rank: RankFolder, header: Header, progress: Callable[[int], None] | None) -> Iterator[Finding]:
    name = rank.folder.name
    for seal in rank.seals:
        for entry in seal.files:
            span = (seal.steps[0], seal.steps[-1])
            try:
                _check_file(rank, seal, entry.name, header)
            except TraceError as error:
                yield Finding(f"{name}/{entry.name}", span, str(error))
            if progress is not None:
                progress(entry.bytes)
    after = rank.seals[-1].steps[-1] if rank.seals else 0
    for file, problem in rank.problems:
        yield Finding(f"{name}/{file}", (after + 1, after + 1), str(problem))
    if rank.end is None and not rank.problems:
        message = (
            f"{short(rank.folder)} is unfinished: {len(rank.steps)} steps are sealed; run `gradreel recover` on it"
        )
        yield Finding(f"{name}/end.json", None, message, "note")
    if rank.end is not None and rank.end.lost_steps:
        message = f"{short(rank.folder)} lost {rank.end.lost_steps} steps to write errors while it was recorded"
        yield Finding(f"{name}/end.json", None, message, "note")
    known = {"header.json", "end.json", "unsealed", *(f"seal-{s.number:06d}.json" for s in rank.seals)}
    known |= {entry.name for seal in rank.seals for entry in seal.files} | {file for file, _ in rank.problems}
    for file in sorted(set(names_in(rank.folder)) - known):
        yield Finding(
            f"{name}/{file}", None, f"{short(rank.folder / file)} is named by no seal; it is not read", "note"
        )


def _check_file(rank: RankFolder, seal: SealSummary, name: str, header: Header) -> None:
    kind = name.split("-")[0]
    if (entry := seal.file(kind)) is not None:
        COPIES.forget(rank.folder / name, entry)  # the file in the store is what is checked
    if kind == "routing":
        _check_routing(rank, seal)
        return
    chunk = rank.chunk(seal, kind)
    assert chunk is not None
    for key, slot in chunk.index().items():
        if rank.seal_of(key[0]) is not seal:
            raise TraceError(f"{chunk.where}: holds a tensor of step {key[0]}, which its seal does not name")
        if kind == "chunk":
            _check_slot(chunk, key, slot, rank)
        elif key[1] != kind:
            raise TraceError(f"{chunk.where}: holds the stream {clip(key[1])}")
    chunk.forget()


def _check_slot(chunk: ChunkFile, key: Key, slot: Slot, rank: RankFolder) -> None:
    step, stream, name = key
    if stream in _small.SMALL:
        where = f"{chunk.where}: {stream} of {clip(name)} at step {step}"
        _small.check_slot(stream, name, slot.dtype, slot.shape, rank.own.local_tables, where)
        _small.check_values(stream, name, chunk.read(slot), rank.own.local_tables, where)
    if stream not in ("gradient", "grad_buffer", "weight"):
        return
    param = rank.tables.params.get(name)
    if param is None:
        raise TraceError(f"{chunk.where}: {stream} of {clip(name)} at step {step}, which the header does not know")
    part = rank.own.placements.get(name)
    if not rank.own.writes(name):
        raise TraceError(f"{chunk.where}: {stream} of {name!r} at step {step}, which another rank writes")
    shape = param.shape if part is None else part.shape(param.shape)
    expected = list(shape)
    ids = rank.step(step).experts.get(name)
    if ids is not None and param.expert_axis is not None and slot.shape != shape and not (part and part.is_flat):
        expected[param.expert_axis] = len(ids)
    if list(slot.shape) != expected:
        raise TraceError(f"{chunk.where}: {stream} of {name!r} at step {step} has shape {slot.shape}, not {expected}")
    if stream != "weight" and set(rank.tables.presence_of(rank.step(step), name)) == {"1"}:
        raise TraceError(f"{chunk.where}: {stream} of {name!r} at step {step} is there, its presence says none")


def _check_routing(rank: RankFolder, seal: SealSummary) -> None:
    """Compare the key columns with the seal and the ids with their layers, block by block."""
    file = rank.routing(seal)
    assert file is not None
    file.check()
    blocks = sorted((layer, s, micro, n) for s in seal.steps for layer, micro, n in rank.step(s).routing)
    layers = rank.tables.layers
    start = 0
    for layer, step, micro, count in blocks:
        info = layers[layer]
        ids = [f"expert_{k}" for k in range(info.top_k)]
        for first in range(0, count, _ROWS_AT_ONCE):
            stop = min(first + _ROWS_AT_ONCE, count)
            data = file.rows(start + first, start + stop, ["step", "micro_step", "layer", "token", *ids])
            where = f"{file.where}: routing of step {step}, layer {layer}"
            for name, value in (("step", step), ("micro_step", micro), ("layer", layer)):
                if (data[name] != value).any():
                    raise TraceError(f"{where}: column {name} does not say {value}")
            if (data["token"] != np.arange(first, stop)).any():
                raise TraceError(f"{where}: tokens are not numbered from 0")
            for name in ids:
                if (data[name] < -1).any() or (data[name] >= info.num_experts).any():
                    raise TraceError(f"{where}: {name} holds an id outside -1 to {info.num_experts - 1}")
        start += count
    file.forget()
