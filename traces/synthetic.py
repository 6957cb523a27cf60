"""Traces with known statistics, to test readers, metrics and replay against numbers that were put in.

Legend: E experts, K top-k, T tokens, D model width, F expert hidden width, S steps, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traces.errors import GradreelError
from traces.record_at import RecordAt
from traces.schema import Header, LayerInfo, RawTensor, RoutingRecord, StepRecord
from traces.views import NONE, NONZERO, ZERO, ParamInfo
from traces.writer import TraceWriter


@dataclass(frozen=True, slots=True)
class Expected:
    """What was put in. Arrays are indexed by position in `steps`, then layer, then expert.

    - `lag_correlation` [E]: the correlation of a gradient element with itself one step before (rho); at lag k it is
      rho^k, and so is the expected cosine of two gradients k steps apart.
    - `gradient_rms` [E]: standard deviation of a gradient element.
    - `active` [S, L, E] bool: the expert got tokens, so its gradient is not zero.
    - `tokens_per_expert` [S, L, E] int64: executed slots of tokens that are not padding.
    - `repeat_probability`: chance that a token repeats its predecessor's experts (the Markov part of the routing).
    - `popularity` [L, E]: the Zipf weights a fresh token draws from.
    - `idle_runs`: expert -> (first step, number of steps) planted without tokens, in every layer.
    - `weights`: the weights after the last step, by parameter, float32.
    """

    steps: tuple[int, ...]
    lag_correlation: np.ndarray
    gradient_rms: np.ndarray
    active: np.ndarray
    tokens_per_expert: np.ndarray
    repeat_probability: float
    popularity: np.ndarray
    idle_runs: dict[int, tuple[int, int]]
    weights: dict[str, np.ndarray]


def write_synthetic(
    path: str | Path,
    *,
    steps: int = 32,
    num_experts: int = 8,
    top_k: int = 2,
    layers: int = 1,
    tokens: int = 256,
    width: int = 16,
    hidden: int = 24,
    rho: float | Sequence[float] = 0.5,
    gradient_rms: float | Sequence[float] = 1e-2,
    activity: float | Sequence[float] = 1.0,
    zipf: float = 1.0,
    repeat_probability: float = 0.5,
    idle_runs: Mapping[int, tuple[int, int]] | None = None,
    padding: float = 0.0,
    lr: float = 1e-2,
    dtype: str = "float32",
    idle_as_none: bool = False,
    at: RecordAt | None = None,
    seed: int = 0,
    chunk_steps: int = 8,
) -> Expected:
    """Write a finished trace of a model that exists only as statistics, and return what was put in.

    Per layer there are a router [E, D] and the stacks `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F]. Each
    expert's gradient is an AR(1) process with its own `rho` and `gradient_rms`; an expert without tokens has an
    exact-zero slice (with `idle_as_none` and all experts idle the gradient is None). An expert is offered
    tokens with probability `activity` per step, and not during its idle run. Weights follow plain SGD with `lr` in
    float32, so that replaying `sgd` reproduces them. `padding` is the fraction of tokens at the end that are padding.
    """
    rng = np.random.default_rng(seed)
    rho_e, rms_e, activity_e = (
        _per_expert(n, v, num_experts)
        for n, v in (("rho", rho), ("gradient_rms", gradient_rms), ("activity", activity))
    )
    _check(rho_e, activity_e, num_experts, top_k, dtype, repeat_probability)
    at = at or RecordAt(budget=None)
    runs = dict(idle_runs or {})
    infos = _params(layers, num_experts, width, hidden, dtype)
    popularity = np.stack([_zipf(rng.permutation(num_experts), zipf) for _ in range(layers)])
    state = {p.name: rng.standard_normal(p.shape, np.float32) * _spread(rms_e, p) for p in infos}
    weights = {p.name: (rng.standard_normal(p.shape, np.float32) * np.float32(width**-0.5)) for p in infos}
    is_pad = np.arange(tokens) >= round(tokens * (1 - padding))
    active: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    recorded: list[int] = []
    with TraceWriter(path, _header(infos, layers, num_experts, top_k, at, lr, seed), chunk_steps=chunk_steps) as writer:
        for step in range(1, steps + 1):
            offered = rng.random((layers, num_experts)) < activity_e
            for expert, (first, length) in runs.items():
                offered[:, expert] &= not first <= step < first + length
            offered = _enough(offered, popularity, top_k, runs, step)
            routing, count = [], np.zeros((layers, num_experts), np.int64)
            for layer in range(layers):
                ids = route(rng, popularity[layer] * offered[layer], tokens, top_k, repeat_probability)
                routing.append(RoutingRecord(layer, 0, ids, is_pad))
                count[layer] = np.bincount(ids[~is_pad].reshape(-1), minlength=num_experts)
            gradients = {}
            for p in infos:
                _advance(state[p.name], rng, _spread(rho_e, p), _spread(rms_e, p), first=step == 1)
                gradients[p.name] = _to_bits(_masked(state[p.name], p, count), dtype)
            record = StepRecord(
                step,
                scalars={"loss": float(2 + 3 / step), "lr": [lr], "tokens": int((~is_pad).sum())},
                recorded=at.records(step),
            )
            if record.recorded:
                _fill(record, infos, gradients, weights, count, routing, idle_as_none, first=not recorded)
                recorded.append(step)
                active.append(count > 0)
                counts.append(count)
            writer.append(record)
            for p in infos:
                weights[p.name] = weights[p.name] - np.float32(lr) * _from_bits(gradients[p.name], dtype)
        closing = {("weight", p.name): _raw(weights[p.name]) for p in infos}
        writer.append(StepRecord(steps + 1, closing, recorded=False))
    return Expected(
        steps=tuple(recorded),
        lag_correlation=rho_e,
        gradient_rms=rms_e,
        active=np.array(active),
        tokens_per_expert=np.array(counts),
        repeat_probability=repeat_probability,
        popularity=popularity,
        idle_runs=runs,
        weights=weights,
    )


def route(rng: np.random.Generator, popularity: np.ndarray, tokens: int, top_k: int, repeat: float) -> np.ndarray:
    """Draw K different experts per token, [T, K] int64, most preferred first.

    A token repeats its predecessor's experts with probability `repeat`; else it draws without replacement from
    `popularity` [E] (perturbed log weights, top K). Weights of zero are never drawn.
    """
    with np.errstate(divide="ignore"):
        noisy = np.log(popularity) + rng.gumbel(size=(tokens, len(popularity)))
    fresh = np.argsort(-noisy, axis=1, kind="stable")[:, :top_k]
    source = np.where(rng.random(tokens) < repeat, 0, np.arange(tokens))
    return fresh[np.maximum.accumulate(source)].astype(np.int64)


def _per_expert(name: str, value: float | Sequence[float], num_experts: int) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if array.shape not in ((), (num_experts,)):
        raise GradreelError(
            f"{name} has shape {array.shape}; give one number, or one for each of {num_experts} experts"
        )
    return np.broadcast_to(array, (num_experts,)).copy()


def _check(rho: np.ndarray, activity: np.ndarray, num_experts: int, top_k: int, dtype: str, repeat: float) -> None:
    if not 1 <= top_k <= num_experts:
        raise GradreelError(f"top_k {top_k} of {num_experts} experts; it must be from 1 to the number of experts")
    if (abs(rho) >= 1).any() or (activity < 0).any() or (activity > 1).any() or not 0 <= repeat < 1:
        raise GradreelError("rho must lie within (-1, 1), activity within [0, 1], repeat_probability within [0, 1)")
    if dtype not in ("float32", "bfloat16"):
        raise GradreelError(f"dtype {dtype!r} is not made here; choose float32 or bfloat16")


def _params(layers: int, num_experts: int, width: int, hidden: int, dtype: str) -> list[ParamInfo]:
    def stack(layer: int, name: str, role: str, *shape: int) -> ParamInfo:
        whole = (num_experts, *shape)
        axes = (1, 2) if len(whole) == 3 else (0, 1)
        axis = 0 if role == "routed_expert" else None
        return ParamInfo(
            f"layers.{layer}.mlp.{name}",
            role,
            whole,
            "float32",
            layer=layer,
            expert_axis=axis,
            num_experts=num_experts,
            matrix_axes=axes,
        )

    found = []
    for layer in range(layers):
        found.append(stack(layer, "gate.weight", "router", width))
        found.append(stack(layer, "experts.gate_up_proj", "routed_expert", 2 * hidden, width))
        found.append(stack(layer, "experts.down_proj", "routed_expert", width, hidden))
    return found


def _header(
    infos: list[ParamInfo], layers: int, num_experts: int, top_k: int, at: RecordAt, lr: float, seed: int
) -> Header:
    group = {"params": [p.name for p in infos], "lr": lr, "momentum": 0.0, "weight_decay": 0.0}
    return Header(
        params=tuple(infos),
        layers=tuple(LayerInfo(n, f"layers.{n}.mlp.experts", num_experts, top_k) for n in range(layers)),
        streams=("gradient", "routing", "scalars"),
        run={"model": "synthetic", "optimizer": "torch.optim.sgd.SGD", "groups": [group], "seed": seed},
        record=at.to_json(),
        provenance={"source": "traces.synthetic"},
    )


def _zipf(ranks: np.ndarray, exponent: float) -> np.ndarray:
    weights = (ranks + 1.0) ** -exponent
    return weights / weights.sum()


def _enough(
    offered: np.ndarray, popularity: np.ndarray, top_k: int, runs: Mapping[int, tuple[int, int]], step: int
) -> np.ndarray:
    """Offer the most popular experts too where fewer than K are offered; a planted idle run is never broken."""
    blocked = [e for e, (first, length) in runs.items() if first <= step < first + length]
    if offered.shape[1] - len(blocked) < top_k:
        raise GradreelError(f"step {step}: {len(blocked)} planted idle experts leave fewer than top_k={top_k}")
    for row, weights in zip(offered, popularity, strict=True):
        for expert in np.argsort(-weights, kind="stable"):
            if row.sum() >= top_k:
                break
            row[expert] |= int(expert) not in blocked
    return offered


def _spread(values: np.ndarray, param: ParamInfo) -> np.ndarray:
    """Per-expert values, shaped to scale a parameter; the router, which has no expert axis, has one row per expert."""
    return values.astype(np.float32).reshape(-1, *[1] * (len(param.shape) - 1))


def _advance(state: np.ndarray, rng: np.random.Generator, rho: np.ndarray, rms: np.ndarray, first: bool) -> None:
    if not first:
        state *= rho
        state += np.sqrt(1 - rho**2) * rms * rng.standard_normal(state.shape, np.float32)


def _masked(state: np.ndarray, param: ParamInfo, count: np.ndarray) -> np.ndarray:
    if param.role != "routed_expert" or param.layer is None:
        return state
    return np.where(_spread((count[param.layer] > 0).astype(np.float32), param) > 0, state, np.float32(0))


def _to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """A copy as stored: float32, or bfloat16 bits rounded to nearest even."""
    if dtype == "float32":
        return values.copy()
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    return bits if dtype == "float32" else (bits.astype(np.uint32) << 16).view(np.float32)


def _raw(array: np.ndarray) -> RawTensor:
    return RawTensor("bfloat16" if array.dtype == np.uint16 else "float32", array.shape, array)


def _fill(
    record: StepRecord,
    infos: list[ParamInfo],
    gradients: dict[str, np.ndarray],
    weights: dict[str, np.ndarray],
    count: np.ndarray,
    routing: list[RoutingRecord],
    idle_as_none: bool,
    first: bool,
) -> None:
    record.routing = routing
    for p in infos:
        if first:
            record.tensors["weight", p.name] = _raw(weights[p.name])
        if p.role != "routed_expert" or p.layer is None:
            record.presence[p.name] = np.array(NONZERO, np.uint8)
        else:
            record.presence[p.name] = np.where(count[p.layer] > 0, NONZERO, ZERO).astype(np.uint8)
            if idle_as_none and not count[p.layer].any():
                record.presence[p.name][:] = NONE
                continue
        record.tensors["gradient", p.name] = _raw(gradients[p.name])
