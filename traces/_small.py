"""The small streams as they lie in a trace: what shape they must have, what values they can hold, their frames.

Legend: E experts (1 without an expert axis), M micro-steps, T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from traces._json import clip
from traces.errors import TraceError
from traces.routing import id_dtype
from traces.schema import LayerInfo, RawTensor
from traces.seals import SchemaTables, presence_width
from traces.statistics_fields import ALONE, STATISTICS
from traces.views import ParamInfo, RoutingStep

if TYPE_CHECKING:
    import polars as pl

SMALL = ("statistics", "micro_norms", "probe")
MAX_MICRO_STEPS = 1 << 20
_COUNTS = ("nonfinite", "zeros", "sign_flips", "sign_support")


def check_slot(stream: str, name: str, dtype: str, shape: tuple[int, ...], tables: SchemaTables, where: str) -> None:
    """Refuse a tensor of a small stream that the header does not allow."""
    if stream == "probe":
        layer = layer_of(name, tables.layers, where)
        wanted = id_dtype(layer.num_experts).name
        if dtype != wanted or len(shape) != 2 or shape[1] > layer.top_k:
            raise TraceError(f"{where}: {dtype} {shape} is not {wanted} [T, K <= {layer.top_k}]")
        return
    param = tables.params.get(name)
    if param is None:
        raise TraceError(f"{where}: parameter {clip(name)} is not in the header's table")
    experts = presence_width(param)
    first = (len(STATISTICS),) if stream == "statistics" else (2, shape[1] if len(shape) == 3 else -1)
    if dtype != "float64" or shape != (*first, experts) or (stream == "micro_norms" and shape[1] > MAX_MICRO_STEPS):
        form = f"[{len(STATISTICS)}, {experts}]" if stream == "statistics" else f"[2, M, {experts}]"
        raise TraceError(f"{where}: {dtype} {shape} is not float64 {form}")


def check_values(stream: str, name: str, values: np.ndarray, tables: SchemaTables, where: str) -> None:
    """Refuse values that cannot have been computed: ids of no expert, negative squares, counts beyond the elements."""
    if not values.size:
        return
    if stream == "probe":
        layer = layer_of(name, tables.layers, where)
        if int(values.min()) < -1 or int(values.max()) >= layer.num_experts:
            raise TraceError(
                f"{where}: ids run from {values.min()} to {values.max()}, allowed are -1 to {layer.num_experts - 1}"
            )
        return
    if stream == "micro_norms":
        norms, tokens = values
        sound = not (norms < 0).any() and not (tokens < 0).any() and not np.isinf(tokens).any()
        sound = sound and bool((np.isnan(tokens) | (tokens == np.floor(tokens))).all())
    else:
        sound = statistics_are_sound(values, tables.params[name])
    if not sound:
        raise TraceError(f"{where}: holds values that no gradient gives, such as a negative square or a broken count")


def statistics_are_sound(values: np.ndarray, param: ParamInfo) -> bool:
    """Whether statistics [len(STATISTICS), E] can be those of a gradient of the parameter."""
    rows = dict(zip(STATISTICS, values, strict=True))
    elements = param.numel // max(presence_width(param), 1)
    if np.isnan(values[: len(ALONE)]).any():
        return False
    if any((rows[name] < 0).any() for name in ("sum_squares", "dot_squares", "previous_squares")):
        return False
    counts = np.stack([rows[name] for name in _COUNTS])
    counts = counts[~np.isnan(counts)]
    if (counts < 0).any() or (counts > elements).any() or (counts != np.floor(counts)).any():
        return False
    return not (rows["sign_flips"] > rows["sign_support"]).any()


def layer_of(name: str, layers: Mapping[int, LayerInfo], where: str) -> LayerInfo:
    """The layer that a tensor of the stream `probe` is named by."""
    number = int(name) if name.isascii() and name.isdigit() and len(name) < 9 else -1
    if number not in layers or name != str(number):
        raise TraceError(f"{where}: {clip(name)} is no MoE layer of the header")
    return layers[number]


def statistics_frame(tensors: Iterable[tuple[int, str, RawTensor]], params: Mapping[str, ParamInfo]) -> pl.DataFrame:
    """One row per step, parameter and expert, with what follows from the stored numbers; undefined values are null."""
    import polars as pl

    counts = dict.fromkeys(_COUNTS, pl.Int64)
    schema = {"step": pl.Int64, "param": pl.String, "layer": pl.Int64, "expert": pl.Int64, "elements": pl.Int64}
    schema |= {name: counts.get(name, pl.Float64) for name in STATISTICS}
    frames = [pl.DataFrame(schema=schema)]
    for step, name, raw in tensors:
        info, experts = params[name], raw.shape[1]
        ids = np.arange(experts) if info.expert_axis is not None else [info.expert] * experts
        same = {"step": step, "param": name, "layer": info.layer, "elements": info.numel // max(experts, 1)}
        columns = {key: [value] * experts for key, value in same.items()} | {"expert": ids}
        rows = pl.DataFrame(columns, schema_overrides={k: v for k, v in schema.items() if k in columns})
        found = {
            key: pl.Series(key, values, pl.Float64).fill_nan(None)
            for key, values in zip(STATISTICS, raw.data, strict=True)
        }
        frames.append(rows.with_columns(**found).cast(schema).select(list(schema)))  # type: ignore[arg-type]
    frame = pl.concat(frames)
    sound = pl.col("nonfinite") == 0
    both = pl.col("dot_squares").sqrt() * pl.col("previous_squares").sqrt()
    return frame.with_columns(
        grad_norm=pl.when(sound).then(pl.col("sum_squares").sqrt()),
        grad_cos=pl.when(sound & (both > 0)).then((pl.col("dot") / both).clip(-1, 1)),
        sign_flip_rate=pl.when(sound & (pl.col("sign_support") > 0)).then(
            pl.col("sign_flips") / pl.col("sign_support")
        ),
    )


def probe_frame(tensors: Iterable[tuple[int, str, RawTensor]], layers: Mapping[int, LayerInfo]) -> pl.DataFrame:
    """One row per step, layer and probe token: step, layer, token, expert_0 .. expert_{K-1}; -1: not executed."""
    import polars as pl

    slots = max((x.top_k for x in layers.values()), default=0)
    schema = {"step": pl.Int64, "layer": pl.Int64, "token": pl.Int64} | {f"expert_{k}": pl.Int32 for k in range(slots)}
    frames = [pl.DataFrame(schema=schema)]
    for step, name, raw in tensors:
        tokens, used = raw.shape
        columns = {"step": np.full(tokens, step), "layer": np.full(tokens, int(name)), "token": np.arange(tokens)}
        for k in range(slots):
            columns[f"expert_{k}"] = raw.data[:, k].astype(np.int32) if k < used else np.full(tokens, -1, np.int32)
        frames.append(pl.DataFrame(columns, schema=schema))
    return pl.concat(frames)


def probe_routing(step: int, layer: LayerInfo, raw: RawTensor) -> RoutingStep:
    """A probe as a `RoutingStep`; its padding was left out when it was recorded."""
    ids = raw.data.astype(np.int64)
    counts = np.bincount(ids[ids >= 0], minlength=layer.num_experts)[: layer.num_experts]
    pad = np.zeros(len(ids), np.bool_)
    return RoutingStep(step, layer.layer, layer.num_experts, ids, pad, counts.astype(np.int64))
