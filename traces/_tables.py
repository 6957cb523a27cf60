"""Frames and routing steps made from the files of a trace. Polars is imported only here, and only when needed.

Legend: E experts, K top-k, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from traces._ranks import Ranks
from traces.schema import DTYPES, Header, LayerInfo, RawTensor
from traces.seals import SealedStep
from traces.views import RoutingStep

if TYPE_CHECKING:
    import polars as pl


def params_frame(header: Header) -> pl.DataFrame:
    """The parameter table of a header."""
    import polars as pl

    rows = [
        {
            "name": p.name,
            "role": p.role,
            "layer": p.layer,
            "expert": p.expert,
            "shape": list(p.shape),
            "dtype": p.dtype,
            "num_experts": p.num_experts,
            "expert_axis": p.expert_axis,
            "tied_to": p.tied_to,
            "numel": p.numel,
            "bytes": p.numel * DTYPES[p.dtype][1].itemsize,
        }
        for p in header.params
    ]
    integers = ("layer", "expert", "num_experts", "expert_axis", "numel", "bytes")
    schema: dict[str, Any] = {"name": pl.String, "role": pl.String, "layer": pl.Int64, "expert": pl.Int64}
    schema |= {"shape": pl.List(pl.Int64), "dtype": pl.String, "num_experts": pl.Int64, "expert_axis": pl.Int64}
    schema |= {"tied_to": pl.String, **dict.fromkeys(integers, pl.Int64)}
    return pl.DataFrame(rows, schema=schema)


def scalars_frame(steps: Iterable[SealedStep]) -> pl.DataFrame:
    """One row per sealed step."""
    import polars as pl

    records = list(steps)
    names = list(dict.fromkeys(name for record in records for name in record.scalars))
    columns: dict[str, Any] = {
        "step": pl.Series([r.step for r in records], dtype=pl.Int64),
        "recorded": pl.Series([r.recorded for r in records], dtype=pl.Boolean),
        "skipped": pl.Series([r.skipped for r in records], dtype=pl.Boolean),
    }
    for name in names:
        label = f"{name}_" if name in ("step", "recorded", "skipped", "nonfinite") else name
        columns[label] = _scalar_column([_finite(record.scalars.get(name)) for record in records])
    flags = [", ".join(f"{k}={v}" for k, v in r.scalars.items() if not _is_finite(v)) for r in records]
    columns["nonfinite"] = pl.Series(flags, dtype=pl.String)
    return pl.DataFrame(columns)


def _is_finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if _is_finite(value) else None


def _scalar_column(values: list[Any]) -> pl.Series:
    """A column of the narrowest kind that holds every value; mixed kinds become text."""
    import polars as pl

    flat = [item for value in values for item in (value if isinstance(value, list) else [value]) if item is not None]
    kinds = {type(item) for item in flat}
    dtype: Any
    if kinds <= {bool}:
        dtype = pl.Boolean if kinds else pl.Float64
    elif kinds == {int}:
        dtype = pl.Int64
    elif kinds <= {int, float}:
        dtype = pl.Float64
    else:
        dtype = pl.String
    convert = (lambda x: x if x is None or isinstance(x, str) else str(x)) if dtype == pl.String else lambda x: x
    if dtype == pl.Float64:
        convert = lambda x: None if x is None else float(x)  # noqa: E731
    if any(isinstance(value, list) for value in values) and kinds <= {bool, int, float, str}:
        rows = [None if v is None else [convert(x) for x in (v if isinstance(v, list) else [v])] for v in values]
        return pl.Series(rows, dtype=pl.List(dtype))
    return pl.Series([convert(value) for value in values], dtype=dtype)


def routing_frame(ranks: Ranks) -> pl.LazyFrame:
    """A lazy frame over every routing file; each file is checked before polars sees it."""
    import polars as pl

    frames = []
    for rank in ranks.folders:
        for seal in rank.seals:
            file = rank.routing(seal)
            kept = [step for step in seal.steps if step in ranks.visible]
            if file is None or not kept or not file.entry.rows:
                continue
            file.check()
            frame = pl.scan_parquet(file.place(keep=True), glob=False)
            if len(kept) < len(seal.steps):
                frame = frame.filter(pl.col("step").is_in(kept))
            frames.append(frame.with_columns(rank=pl.lit(rank.rank, pl.Int32)) if ranks.count > 1 else frame)
    if frames and ranks.count == 1:
        return pl.concat(frames)
    slots = max((x.top_k for x in ranks.header.layers), default=0)
    ids = {f"expert_{k}": pl.Int8 for k in range(slots)}
    if frames:  # stages of a pipeline may have layers with other numbers of experts and slots
        order = ["step", "micro_step", "layer", "token", "is_pad", *ids, "rank"]
        joined = pl.concat(frames, how="diagonal_relaxed")
        return joined.with_columns(pl.col(list(ids)).fill_null(-1)).select(order)
    schema: dict[str, Any] = {"step": pl.Int64, "micro_step": pl.Int32, "layer": pl.Int32, "token": pl.Int32}
    schema |= {"is_pad": pl.Boolean, **ids}
    return pl.LazyFrame(schema=schema)


def routing_step(ranks: Ranks, step: int, layer: LayerInfo) -> RoutingStep | None:
    """One layer's routing in one step, micro-steps and ranks joined; None where not all of it was recorded."""
    ids: list[np.ndarray] = []
    pads: list[np.ndarray] = []
    extras: dict[str, list[np.ndarray]] = {"scores": [], "logits": []}
    for rank in ranks.routing_folders(step, layer.layer) or ():
        seal = rank.seal_of(step)
        assert seal is not None
        rows = sorted(row for row in rank.step(step).routing if row[0] == layer.layer)
        if not rows:
            continue
        count = sum(row[2] for row in rows)
        start = rank.row_start(seal, step, layer.layer)
        slots = next(x.top_k for x in rank.header.layers if x.layer == layer.layer)
        columns = [f"expert_{k}" for k in range(slots)]
        file = rank.routing(seal)
        if count and file is not None:
            data = file.rows(start, start + count, ["is_pad", *columns])
            found = np.stack([data[c] for c in columns], axis=1).astype(np.int64)
            ids.append(np.pad(found, ((0, 0), (0, layer.top_k - slots)), constant_values=-1))
            pads.append(data["is_pad"])
        else:
            ids.append(np.empty((0, layer.top_k), np.int64))
            pads.append(np.empty(0, np.bool_))
        for stream, values in extras.items():
            chunk = rank.chunk(seal, stream)
            for _, micro, _ in rows if chunk is not None else ():
                slot = chunk.index().get((step, stream, f"{layer.layer}.{micro}"))  # type: ignore[union-attr]
                if slot is not None:
                    values.append(RawTensor(slot.dtype, slot.shape, chunk.read(slot)).numbers())  # type: ignore[union-attr]
    if not ids:
        return None
    joined, is_pad = np.concatenate(ids), np.concatenate(pads)
    executed = joined[~is_pad]
    counts = np.bincount(executed[executed >= 0], minlength=layer.num_experts)[: layer.num_experts]
    return RoutingStep(
        step=step,
        layer=layer.layer,
        num_experts=layer.num_experts,
        topk_expert_ids=joined,
        is_pad=is_pad,
        tokens_per_expert=counts.astype(np.int64),
        scores=np.concatenate(extras["scores"]) if extras["scores"] else None,
        logits=np.concatenate(extras["logits"]) if extras["logits"] else None,
    )
