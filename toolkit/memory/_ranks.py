"""What the fullest rank of a parallel run holds of every parameter.

Order of the cuts: pipeline stages take whole layers, expert parallelism whole experts, tensor parallelism rows or
columns, FSDP the rows (or experts) of what is left. An optimizer steps what its rank holds, except where a chain needs
whole matrices that FSDP has cut: then, as `toolkit.optim` does with DTensors, weight and gradient are gathered and the
state of the whole matrix is on every rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolkit.memory._settings import Parallel
from toolkit.memory._shapes import Architecture
from toolkit.recipes import Recipe
from traces.errors import GradreelError
from traces.views import ParamInfo

#: Matrices that tensor parallelism cuts by columns, since their input is what the ranks share.
OUTPUT_SIDE = re.compile(r"(down|o_proj|o_b_proj|out_proj|\bwo\b|\bw2\b|fc2|dense_4h_to_h|c_proj)")
#: Low-rank maps before the heads are split; every rank holds them whole.
_BEFORE_HEADS = re.compile(r"(q_a_proj|kv_a_proj|o_a_proj|kv_proj_with_mqa)")
_CUT_ROLES = ("attention", "dense_ffn", "shared_expert", "routed_expert", "embedding", "head")


@dataclass(frozen=True)
class Held:
    """One kind of parameter on one rank.

    `stored` elements of weight and gradient lie there; the optimizer steps `stepped`. `gathered`: `stepped` is whole
    and lives only while it is stepped. `unsharded` is the number of elements during forward and backward. `count`
    parameters are alike.
    """

    stepped: ParamInfo
    stored: int
    unsharded: int
    gathered: bool
    frozen: bool
    count: int = 1


def stages_of(arch: Architecture, pipeline: int) -> list[list[ParamInfo]]:
    """The parameters of each pipeline stage: layers in runs of nearly equal length, embeddings first, the rest last."""
    if pipeline == 1:
        return [list(arch.params)]
    layers = sorted({info.layer for info in arch.params if info.layer is not None})
    if pipeline > len(layers):
        raise GradreelError(
            f"pipeline degree {pipeline} exceeds the {len(layers)} layers of {arch.name}; allowed: up to {len(layers)}"
        )
    home = {layer: index * pipeline // len(layers) for index, layer in enumerate(layers)}
    stages: list[list[ParamInfo]] = [[] for _ in range(pipeline)]
    has_head = any(info.role == "head" for info in arch.params)
    for info in arch.params:
        if info.layer is not None:
            stages[home[info.layer]].append(info)
        elif info.role == "embedding":
            stages[0].append(info)
            if not has_head and info.matrix_axes is not None and "pos" not in info.name:
                stages[-1].append(replace(info, role="head"))  # a tied table is needed at both ends
        else:
            stages[-1].append(info)
    return stages


def check_degrees(arch: Architecture, parallel: Parallel) -> None:
    """Raise GradreelError where the model cannot be cut as asked."""
    experts = num_experts(arch.params)
    if parallel.expert > 1 and not experts:
        raise GradreelError(f"expert degree is {parallel.expert}, but {arch.name} has no routed experts; allowed: 1")
    if parallel.expert > 1 and any(count % parallel.expert for count in experts):
        raise GradreelError(
            f"expert degree {parallel.expert} does not divide the {', '.join(map(str, sorted(experts)))} experts of a "
            f"layer of {arch.name}"
        )
    heads = first_of(arch.config, "num_attention_heads", "num_heads", "n_head")
    if parallel.tensor > 1 and heads and heads % parallel.tensor:
        raise GradreelError(
            f"tensor degree {parallel.tensor} does not divide the {heads} attention heads of {arch.name}"
        )
    if parallel.pipeline > 1:
        stages_of(arch, parallel.pipeline)


def num_experts(params: Iterable[ParamInfo]) -> set[int]:
    """Every number of experts of a layer."""
    stacked: set[int] = set()
    listed: dict[int | None, set[int]] = {}
    for info in params:
        if info.role != "routed_expert":
            continue
        if info.num_experts is not None:
            stacked.add(info.num_experts)
        elif info.expert is not None:
            listed.setdefault(info.layer, set()).add(info.expert)
    return stacked | {len(ids) for ids in listed.values()}


@dataclass(frozen=True)
class Kind:
    """Parameters of one layer that every rank cuts alike: one of them, and how many there are."""

    info: ParamInfo
    key: tuple[Any, ...]
    layer: int | None
    count: int


def kinds_of(params: Iterable[ParamInfo], parallel: Parallel, frozen: frozenset[str]) -> list[Kind]:
    """Like parameters of a layer counted together; of a list of experts, those of one rank."""
    params = list(params)
    listed = max(num_experts(params), default=0)
    counts: Counter[tuple[Any, ...]] = Counter()
    first: dict[tuple[Any, ...], ParamInfo] = {}
    for info in params:
        if info.expert is not None and parallel.expert > 1 and info.expert >= listed // parallel.expert:
            continue  # on another rank
        key = (
            *(info.role, info.shape, info.dtype, info.expert_axis, info.matrix_axes, info.expert is None),
            *(OUTPUT_SIDE.search(info.name) is not None, _BEFORE_HEADS.search(info.name) is not None),
            *(_is_key_or_value(info.name), info.name in frozen),
        )
        counts[(info.layer, *key)] += 1
        first.setdefault((info.layer, *key), info)
    return [Kind(first[key], key[1:], key[0], count) for key, count in counts.items()]


def held_by_rank(
    kinds: Iterable[Kind], recipe: Recipe, parallel: Parallel, config: Mapping[str, Any], frozen: frozenset[str]
) -> tuple[list[Held], dict[int | None, Counter[str]]]:
    """What the fullest rank holds, like parameters counted together, and what FSDP gathers of each layer: elements by
    dtype.
    """
    counts: Counter[tuple[Any, ...]] = Counter()
    held: dict[tuple[Any, ...], Held] = {}
    gathered: dict[int | None, Counter[str]] = {}
    for kind in kinds:
        counts[kind.key] += kind.count
        if kind.key not in held:
            held[kind.key] = _held(kind.info, recipe, parallel, config, frozen)
        mine = held[kind.key]
        if mine.unsharded != mine.stored:
            gathered.setdefault(kind.layer, Counter())[kind.info.dtype] += kind.count * mine.unsharded
    return [replace(mine, count=counts[key]) for key, mine in held.items()], gathered


def _held(
    info: ParamInfo, recipe: Recipe, parallel: Parallel, config: Mapping[str, Any], frozen: frozenset[str]
) -> Held:
    local = _cut_tensor(_cut_experts(info, parallel), parallel, config)
    degree = parallel.fsdp
    if info.role == "routed_expert":
        degree = max(1, parallel.fsdp // parallel.expert)
    if degree == 1 or not local.shape:
        return Held(local, local.numel, local.numel, False, info.name in frozen)
    rows = -(-local.shape[0] // degree)
    mine = replace(
        local,
        shape=(rows, *local.shape[1:]),
        num_experts=rows if local.expert_axis == 0 else local.num_experts,
        strides=None,
    )
    gathered = _needs_whole(local, recipe)
    return Held(local if gathered else mine, mine.numel, local.numel, gathered, info.name in frozen)


def _cut_experts(info: ParamInfo, parallel: Parallel) -> ParamInfo:
    if parallel.expert == 1 or info.expert_axis is None:
        return info
    shape = list(info.shape)
    shape[info.expert_axis] //= parallel.expert
    return replace(info, shape=tuple(shape), num_experts=shape[info.expert_axis], strides=None)


def _cut_tensor(info: ParamInfo, parallel: Parallel, config: Mapping[str, Any]) -> ParamInfo:
    if parallel.tensor == 1 or info.role not in _CUT_ROLES or info.matrix_axes is None:
        return info
    if _BEFORE_HEADS.search(info.name):
        return info
    rows, columns = info.matrix_axes
    by_columns = info.role not in ("embedding", "head") and OUTPUT_SIDE.search(info.name) is not None
    axis, degree = (columns if by_columns else rows), parallel.tensor
    kv_heads = first_of(config, "num_key_value_heads", "num_kv_heads")
    if kv_heads and _is_key_or_value(info.name):
        degree = min(degree, kv_heads)  # fewer heads than ranks: each rank holds one, some hold the same
    shape = list(info.shape)
    shape[axis] = -(-shape[axis] // degree)
    return replace(info, shape=tuple(shape), strides=None)


def _is_key_or_value(name: str) -> bool:
    return re.search(r"\b[kv]_proj\b", name) is not None


def _needs_whole(info: ParamInfo, recipe: Recipe) -> bool:
    """The rule of `toolkit.optim` for a DTensor cut along axis 0."""
    from toolkit.recipes._stepper import couples_experts, is_elementwise

    chain = recipe.chain_for(info)
    by_expert = info.expert_axis == 0 and not any(couples_experts(stage) for stage in chain)
    last = (len(info.shape) - 2, len(info.shape) - 1)
    plain = info.matrix_axes is None or tuple(axis % len(info.shape) for axis in info.matrix_axes) == last
    return not (by_expert or (is_elementwise(chain) and plain and info.expert_axis in (None, 0)))


def first_of(config: Mapping[str, Any], *keys: str) -> int:
    """The first whole number that `config`, or a text config inside it, gives under one of `keys`; 0 without one."""
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        for key in keys:
            value = values.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0
