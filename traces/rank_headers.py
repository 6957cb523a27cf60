"""What each rank says about itself, and the one header that all of them together make.

Rank 0's tables are those of the trace's `header.json`; every other rank brings its own, because it may hold other
layers and parameters (pipeline stages), or other parts of the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from traces._files import short
from traces._json import Fields, clip, load_signed
from traces.errors import TraceError
from traces.placements import Placement, local_info, placement_from_json, uncovered
from traces.schema import FORMAT_VERSION, MAX_HEADER_BYTES, Header, check_version, header_from_json, header_to_json
from traces.seals import SchemaTables
from traces.views import ParamInfo


@dataclass(frozen=True)
class RankHeader:
    """One rank: its own tables, and what it writes of each parameter.

    `placements` maps a parameter to the rank's part, or to None where another rank writes it; a parameter that is
    absent there is written whole.
    """

    rank: int
    header: Header
    placements: Mapping[str, Placement | None] = field(default_factory=dict)
    sha256: str = ""

    def writes(self, name: str) -> bool:
        """Whether this rank writes (its part of) a parameter."""
        return self.placements.get(name, self) is not None

    @cached_property
    def local_tables(self) -> SchemaTables:
        """The rank's tables with each parameter as the part that lies here."""
        return local_tables(SchemaTables.of(self.header), self.placements)


def local_tables(tables: SchemaTables, placements: Mapping[str, Placement | None]) -> SchemaTables:
    """Tables of a rank in which each parameter is the part that the rank holds."""
    if not any(placements.values()):
        return tables
    return replace(tables, params={n: local_info(p, placements.get(n)) for n, p in tables.params.items()})


def rank_to_json(
    rank: int, header: Header, digest: str | None, placements: Mapping[str, Placement | None]
) -> dict[str, Any]:
    """A rank's own header. Ranks above 0 add their tables; `digest` is the hash of header.json where it is known."""
    own: dict[str, Any] = {} if rank == 0 else {"own": header_to_json(header)}
    return {
        "kind": "gradreel-rank",
        "format_version": FORMAT_VERSION,
        "rank": rank,
        "ranks": header.ranks,
        "header": digest,
        "expert_offsets": {},
        "placements": {name: None if part is None else part.to_json() for name, part in placements.items()},
        **own,
    }


def read_rank_header(path: Path, rank: int, top: Header, digest: str) -> RankHeader:
    """Check a rank's header against the trace's (`top` with hash `digest`)."""
    value, own_digest = load_signed(path, MAX_HEADER_BYTES)
    where = short(path)
    fields = Fields(value, where)
    fields.text("kind", "gradreel-rank")
    check_version(fields)
    if fields.integer("rank") != rank or fields.integer("ranks") != top.ranks:
        raise TraceError(f"{where} belongs to another rank or to a run with another number of ranks")
    said = fields.take("header")
    if said != digest and not (said is None and rank > 0):
        raise TraceError(
            f"{where} belongs to another trace: header.json has hash {digest[:12]}..., it says {clip(said, 20)}"
        )
    if fields.table("expert_offsets"):
        raise TraceError(f"{where}: expert_offsets is not empty; it needs a newer gradreel, upgrade to read it")
    tables = fields.take("own", None)
    header = top
    if tables is not None:
        header = header_from_json(tables, f"{where}: own")
        if header.ranks != top.ranks:
            raise TraceError(f"{where}: own says {header.ranks} ranks, header.json {top.ranks}")
    params = {p.name: p for p in header.params}
    placements = {name: _placement(name, part, params, where) for name, part in fields.table("placements").items()}
    fields.done()
    return RankHeader(rank, header, placements, own_digest)


def _placement(name: str, value: Any, params: Mapping[str, ParamInfo], where: str) -> Placement | None:
    if name not in params:
        raise TraceError(f"{where}: placement of {clip(name)}, which is no parameter of this rank")
    if value is None:
        return None
    return placement_from_json(value, params[name].shape, f"{where}: placement of {clip(name)}")


# ------------------------------------------------------------------------------------------------ all of them


def merged_header(top: Header, ranks: Sequence[RankHeader]) -> Header:
    """The header of the whole run: every rank's parameters, layers, streams and optimizer groups, in rank order.

    `TraceError` where two ranks describe one parameter or layer differently, or hold parts of one parameter that do
    not fit together.
    """
    others = [one for one in ranks if one.header is not top]
    if others:
        params: dict[str, ParamInfo] = {p.name: p for p in top.params}
        layers = {x.layer: x for x in top.layers}
        for one in others:
            where = f"rank-{one.rank:05d}/header.json"
            for param in one.header.params:
                known = params.setdefault(param.name, param)
                if replace(known, strides=None) != replace(param, strides=None):
                    raise TraceError(
                        f"{where}: parameter {clip(param.name)} is {param.role} {param.shape} {param.dtype}, another "
                        f"rank says {known.role} {known.shape} {known.dtype}; the folders are of different runs"
                    )
            for layer in one.header.layers:
                there = layers.setdefault(layer.layer, layer)
                if (there.module, there.num_experts) != (layer.module, layer.num_experts):
                    raise TraceError(
                        f"{where}: MoE layer {layer.layer} is {clip(layer.module)} with {layer.num_experts} experts, "
                        f"another rank says {clip(there.module)} with {there.num_experts}"
                    )
                layers[layer.layer] = max(there, layer, key=lambda x: x.top_k)
        top = replace(
            top,
            params=tuple(params.values()),
            layers=tuple(layers[number] for number in sorted(layers)),
            streams=tuple(dict.fromkeys(s for one in (top, *(r.header for r in others)) for s in one.streams)),
            run={**top.run, **_joined_groups(top, others)},
        )
    check_parts(top, ranks)
    return top


def check_parts(top: Header, ranks: Sequence[RankHeader]) -> None:
    """Refuse parts of one parameter that overlap, or that leave a gap although every rank is there."""
    everyone = {one.rank for one in ranks} == set(range(top.ranks)) if top.ranks == len(ranks) else False
    parts: dict[str, list[tuple[int, Placement]]] = {}
    for one in ranks:
        for name, part in one.placements.items():
            if part is not None:
                parts.setdefault(name, []).append((one.rank, part))
    for one in ranks:
        known = {p.name for p in one.header.params}
        if mixed := [name for name in parts if name in known and name not in one.placements]:
            holder = parts[mixed[0]][0][0]
            raise TraceError(
                f"parameter {clip(mixed[0])}: rank {holder} holds a part of it and rank {one.rank} the whole; "
                "the ranks do not fit together"
            )
    shapes = {p.name: p.shape for p in top.params}
    sound: set[Any] = set()  # most parameters are split alike
    for name, found in parts.items():
        key = (shapes[name], tuple(part.key for _, part in found))
        if key in sound:
            continue
        where = f"parameter {clip(name)}"
        missing = uncovered(shapes[name], found, where)
        if missing is not None and everyone:
            raise TraceError(f"{where}: no rank holds {missing} of shape {shapes[name]}; the ranks do not fit together")
        sound.add(key)


def _joined_groups(top: Header, others: Sequence[RankHeader]) -> dict[str, Any]:
    """The optimizer groups of all ranks: those of another rank where they hold parameters that no group had."""
    joined = list(_groups(top))
    known = {name for group in joined for name in names_of(group)}
    for one in others:
        for group in _groups(one.header):
            fresh = [name for name in names_of(group) if name not in known]
            if fresh:
                known.update(fresh)
                joined.append({**group, "params": fresh} if isinstance(group, dict) else fresh)
    return {"groups": joined} if "groups" in top.run or joined else {}


def _groups(header: Header) -> list[Any]:
    groups = header.run.get("groups")
    return groups if isinstance(groups, list) else []


def names_of(group: Any) -> list[str]:
    """The parameter names of one optimizer group of a header."""
    names = group.get("params") if isinstance(group, dict) else group
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
