"""All ranks of a trace as one: which steps there are, and each tensor put together from the ranks that hold it.

Legend: E experts, R ranks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from traces import _parts
from traces._rank import RankFolder, absent_ranks, missing_folder, rank_folders
from traces._store import there_is
from traces.errors import NotRecorded
from traces.placements import Placement
from traces.rank_headers import merged_header, names_of
from traces.schema import Header, RawTensor
from traces.seals import SchemaTables, SealedStep, presence_width
from traces.views import ParamInfo

_KEPT_RECORDS = 64
_SHAPED = ("gradient", "grad_buffer", "weight")


class Ranks:
    """The folders of a trace's ranks. `partial` also shows what only some of them sealed.

    A step exists when every rank has sealed it; with `partial` when any has.
    """

    def __init__(
        self, folder: Path, top: Header, digest: str, *, check_hash: bool = True, partial: bool = False
    ) -> None:
        found = rank_folders(folder, top.ranks)
        if (missing := missing_folder(folder, found, top.ranks)) is not None and not (partial and found):
            raise missing
        self.partial, self.count = partial, top.ranks
        self.folders: list[RankFolder] = []
        for rank, path in found.items():
            if partial and top.ranks > 1 and not has_begun(path):
                continue
            self.folders.append(RankFolder(path, rank, top, digest, check_hash=check_hash))
        self.header = merged_header(top, [one.own for one in self.folders])
        self.params = {p.name: p for p in self.header.params}
        self.tables = SchemaTables.of(self.header)
        self.absent = absent_ranks((one.rank for one in self.folders), top.ranks)
        self._writers: dict[str, list[tuple[RankFolder, Placement | None]]] = {}
        self._records: OrderedDict[int, SealedStep] = OrderedDict()

    def refresh(self) -> bool:
        """Take in what the ranks sealed since; whether there was anything new."""
        changed = sum(one.refresh() for one in self.folders) > 0
        if changed:
            for name in ("steps", "recorded", "visible"):  # what follows from the seals is found anew
                self.__dict__.pop(name, None)
            self._records.clear()
        return changed

    # ----------------------------------------------------------------------------------------------------- steps

    @cached_property
    def steps(self) -> list[int]:
        """Every step that exists."""
        return self._common([one.steps for one in self.folders])

    @cached_property
    def recorded(self) -> list[int]:
        """Steps of which more than scalars was recorded."""
        return self._common([one.recorded() for one in self.folders])

    @cached_property
    def visible(self) -> frozenset[int]:
        """`steps`, to look up."""
        return frozenset(self.steps)

    def _common(self, each: list[list[int]]) -> list[int]:
        if not each or (self.absent and not self.partial):
            return []
        if len(each) == 1:
            return list(each[0])
        sets = [set(steps) for steps in each]
        return sorted(set.union(*sets) if self.partial else set.intersection(*sets))

    def lacking(self, step: int) -> str:
        """The ranks that have not sealed a step, in words; empty where all have."""
        return absent_ranks((one.rank for one in self.folders if one.seal_of(step) is not None), self.count)

    def with_step(self, step: int) -> list[RankFolder]:
        """The ranks that sealed a step."""
        return [one for one in self.folders if one.seal_of(step) is not None]

    def record(self, step: int) -> SealedStep:
        """The record of a step as the whole run has it (KeyError where no rank sealed it)."""
        if self.count == 1:
            return self.folders[0].step(step)
        if step not in self._records:
            self._records[step] = self._joined_record(step)
            while len(self._records) > _KEPT_RECORDS:
                self._records.popitem(last=False)
        return self._records[step]

    def _joined_record(self, step: int) -> SealedStep:
        records = [(one, one.step(step)) for one in self.with_step(step)]
        if not records:
            raise KeyError(step)
        kept = [record.recorded for _, record in records]
        experts: dict[str, tuple[int, ...]] = {}
        for name in dict.fromkeys(n for _, record in records for n in record.experts):
            experts[name] = tuple(int(i) for i in self._recorded_experts(name, records))
        return replace(
            records[0][1],
            recorded=any(kept) if self.partial else all(kept),
            skipped=any(record.skipped for _, record in records),
            scalars=self._joined_scalars(records),
            presence="",
            experts={name: ids for name, ids in experts.items() if len(ids) < presence_width(self.params[name])},
        )

    def _recorded_experts(self, name: str, records: list[tuple[RankFolder, SealedStep]]) -> list[int]:
        axis = self.params[name].expert_axis
        ids: set[int] = set()
        for rank, part in self.writers(name):
            record = next((r for one, r in records if one is rank), None)
            if record is None:
                continue
            chosen = record.experts.get(name)
            if chosen is None and part is not None and part.splits(axis):
                chosen = tuple(part.indices(axis).tolist())  # type: ignore[arg-type]
            if chosen is None:
                chosen = tuple(range(presence_width(self.params[name])))
            ids.update(chosen)
            if part is None:
                break  # copies: the lowest rank's counts
        return sorted(ids)

    def _joined_scalars(self, records: list[tuple[RankFolder, SealedStep]]) -> dict[str, Any]:
        """The lowest rank's value of each scalar; tokens are added up, the gradient's norm is put together."""
        scalars: dict[str, Any] = {}
        for _, record in records:
            for name, value in record.scalars.items():
                if scalars.get(name) is None:
                    scalars[name] = value
        parts = [record.scalars.get("grad_norm_local") for _, record in records]
        norms = [float(part) for part in parts if isinstance(part, int | float)]
        scalars.pop("grad_norm_local", None)
        if "grad_norm" not in scalars and len(norms) == self.count:
            scalars["grad_norm"] = math.sqrt(sum(norm * norm for norm in norms))
        counts: dict[int, int] = {}
        for one, record in records:  # stages of a pipeline see the same tokens, so only equal layers are added up
            tokens = record.scalars.get("tokens")
            if isinstance(tokens, int):
                first = min((x.layer for x in one.header.layers), default=-1)
                counts[first] = counts.get(first, 0) + tokens
        if counts:
            scalars["tokens"] = max(counts.values())
        if isinstance(scalars.get("lr"), list) and len(self.header.run.get("groups", ())) > len(scalars["lr"]):
            by_rank = {one.rank: record.scalars.get("lr") for one, record in records}
            scalars["lr"] = [self._rate(by_rank.get(rank), index) for rank, index in self._group_origins]
        return scalars

    @staticmethod
    def _rate(rates: Any, index: int) -> Any:
        return rates[index] if isinstance(rates, list) and index < len(rates) else None

    @cached_property
    def _group_origins(self) -> list[tuple[int, int]]:
        """(rank, number there) of each optimizer group of the joined header."""
        origins: list[tuple[int, int]] = []
        known: set[str] = set()
        for one in self.folders:
            groups = one.header.run.get("groups")
            for number, group in enumerate(groups if isinstance(groups, list) else []):
                fresh = [name for name in names_of(group) if name not in known]
                if one.rank == 0 or fresh:
                    known.update(fresh)
                    origins.append((one.rank, number))
        return origins

    # --------------------------------------------------------------------------------------------------- tensors

    def writers(self, name: str) -> list[tuple[RankFolder, Placement | None]]:
        """The ranks that write a parameter, each with its part of it (None: all of it)."""
        if name not in self._writers:
            self._writers[name] = [
                (one, one.own.placements.get(name))
                for one in self.folders
                if name in one.tables.params and one.own.writes(name)
            ]
        return self._writers[name]

    def is_split(self, name: str) -> bool:
        """Whether several ranks hold parts of a parameter."""
        return any(part is not None for _, part in self.writers(name))

    def raw(self, stream: str, name: str, step: int, experts: Sequence[int] | None = None) -> RawTensor | None:
        """The stored bits of one tensor, or of some experts of it; None where that tensor is not in the trace.

        `NotRecorded` names the rank whose part is missing.
        """
        if step not in self.visible:
            return None
        if name in self.params and self.is_split(name):
            return _parts.read_split(self, stream, self.params[name], step, experts)
        for one in self.folders:
            if name in one.tables.params and not one.own.writes(name):
                continue
            found = _parts.slot_of(one, stream, name, step)
            if found is not None:
                if stream in _SHAPED:
                    _parts.check_whole(one, found, stream, self.params.get(name), name, step)
                return _parts.read_whole(one, found, stream, self.params.get(name), step, experts)
        return None

    def presence(self, info: ParamInfo, step: int) -> np.ndarray:
        """Presence codes, uint8 [E] or 0-d: of each expert the highest code of the ranks that hold it."""
        width = presence_width(info)
        codes = np.zeros(width, np.uint8)
        for one, part in self.writers(info.name):
            if one.seal_of(step) is None:
                continue
            text = one.tables.presence_of(one.step(step), info.name)
            if text:
                np.maximum(codes, np.frombuffer(text.encode(), np.uint8) - np.uint8(48), out=codes)
            if part is None:
                break
        return codes.reshape((width,) if info.expert_axis is not None else ())

    def need_all(self, step: int, what: str) -> None:
        """Raise NotRecorded where a rank that must be asked has not sealed the step."""
        if lacking := self.lacking(step):
            raise NotRecorded(f"{what} is incomplete: {lacking} sealed no step {step}")

    def routing_folders(self, step: int, layer: int) -> list[RankFolder] | None:
        """The ranks that recorded a layer's routing in a step; None where one of them lacks the step."""
        if self.count == 1:
            return self.folders
        if self.partial and self.absent:
            return None
        those = [
            one
            for one in self.folders
            if "routing" in one.header.streams and any(x.layer == layer for x in one.header.layers)
        ]
        return None if any(one.seal_of(step) is None for one in those) else those

    def keys_of(self, stream: str) -> list[tuple[int, str, str]]:
        """(step, stream, name) of every tensor of a stream, in step order."""
        keys: set[tuple[int, str, str]] = set()
        for one in self.folders:
            for seal in one.seals:
                chunk = one.chunk(seal)
                if chunk is not None:
                    keys |= {k for k in chunk.index() if k[1] == stream and k[0] in self.visible}
        return sorted(keys)


def has_begun(folder: Path) -> bool:
    """Whether a rank's folder holds the beginning of a recording."""
    return any(there_is(folder / name) for name in ("header.json", "seal-000000.json"))
