"""Finding the MoE layers of a model nobody described, by structure first and by names second.

Legend: E experts that have weights, Z experts without weights (identity experts, ids E to E + Z - 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from traces.module_names import ROUTER_CLASS, ROUTER_NAMES, SHARED_NAMES, below, is_shared

_WITHOUT_WEIGHTS = re.compile(r"zero|identity|null|copy|const")
_TOP_K = ("top_k", "topk", "k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")


@dataclass
class Found:
    """One MoE block: its expert containers by name, E + Z, and Z. `is_list`: a module an expert."""

    block_name: str
    containers: dict[str, nn.Module]
    num_experts: int
    zero_experts: int
    is_list: bool


def detect(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[Found]:
    """Every MoE block of `model`, in module order."""
    counts, without = expert_counts(model)
    found: dict[str, tuple[int, int, bool]] = {}
    for name, module in modules.items():
        if not name or is_shared(name) or any(below(name, other) for other in found):
            continue
        parent = modules.get(name.rpartition(".")[0])
        stacked = _stacked_experts(name, module, parent, counts, without)
        if stacked is not None:
            found[name] = (*stacked, False)
        elif _is_expert_list(name, module, parent):
            children = list(module.children())
            found[name] = (len(children), sum(not _has_weights(child) for child in children), True)
    for name, module in modules.items():  # the last resort: it is named so, and nothing else explains it
        if (
            name.rpartition(".")[2] == "experts"
            and not any(below(name, other) or below(other, name) for other in found)
            and not is_shared(name)
            and _has_weights(module)
            and not any(child.rpartition(".")[2] in ROUTER_NAMES for child, _ in module.named_modules())
            and len(counts) == 1
        ):
            found[name] = (next(iter(counts)), 0, False)
    return _grouped(found, modules)


def expert_counts(model: nn.Module) -> tuple[set[int], set[int]]:
    """Every E, and every Z, that the model's config, nested configs included, speaks of."""
    counts: set[int] = set()
    without: set[int] = set()
    seen: set[int] = set()
    queue = [getattr(module, "config", None) for module in (model, *model.modules())]
    while queue:
        config = queue.pop()
        if config is None or id(config) in seen or isinstance(config, (nn.Module, torch.Tensor)):
            continue
        seen.add(id(config))
        items = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        for key, value in items.items():
            name = str(key).lower()
            if isinstance(value, int) and not isinstance(value, bool):
                if "expert" in name and "num" in name and _WITHOUT_WEIGHTS.search(name):
                    without.add(value)
                elif _names_expert_count(name):
                    counts.add(value)
            elif "config" in name and not isinstance(value, (str, float, type(None))):
                queue.append(value)
    return counts, without - {0}


def _names_expert_count(key: str) -> bool:
    return "experts" in key and "per_tok" not in key and "shared" not in key and ("num" in key or "n_" in key)


def find_router(
    block_name: str, num_experts: int, containers: Iterable[nn.Module], modules: Mapping[str, nn.Module]
) -> tuple[str, nn.Module] | None:
    """Name and module of the router over `num_experts`, beside the experts or up to two levels above."""
    skip = list(containers)
    level = block_name
    for _ in range(3):  # experts may sit one wrapper deeper than their router
        parent = modules.get(level)
        if parent is not None:
            child = _router_child(parent, num_experts, skip, deep=level == block_name)
            if child is not None:
                return (f"{level}.{child}" if level else child), getattr(parent, child)
        if not level:
            break
        level = level.rpartition(".")[0]
    return None


def top_k_of(*modules: nn.Module | None) -> int | None:
    """K as the first of `modules`, or its config, says."""
    for module in modules:
        for holder in (module, getattr(module, "config", None)):
            for key in _TOP_K:
                value = getattr(holder, key, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
    return None


def stack_sizes(module: nn.Module, recurse: bool = True) -> set[int]:
    """Lengths of the first axis of every parameter of three axes or more."""
    return {p.shape[0] for p in module.parameters(recurse=recurse) if p.ndim >= 3}


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _stacked_experts(
    name: str, module: nn.Module, parent: nn.Module | None, counts: set[int], without: set[int]
) -> tuple[int, int] | None:
    """(E + Z, Z) where `module` itself holds stacked expert weights, else None."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return None
    sizes = stack_sizes(module, recurse=False)
    # A stack may have room for experts that need no weights, beside one that has none.
    if not sizes or (len(sizes) > 1 and max(sizes) - min(sizes) not in without):
        return None
    size = min(sizes)
    own = {getattr(module, key) for key in ("num_experts", "n_experts") if isinstance(getattr(module, key, None), int)}
    named = "expert" in name.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()
    beside = [] if parent is None else [child for child in parent.children() if child is not module]
    zero = next((z for z in sorted(without) if any(_fits(child, size + z) for child in beside)), 0)
    beside_router = zero > 0 or (parent is not None and _router_child(parent, size, [module]) is not None)
    if size in own or named or (beside_router and (not counts or size in counts)):
        return size + zero, zero
    return None


def _is_expert_list(name: str, module: nn.Module, parent: nn.Module | None) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    children = [child for child in module.children() if _has_weights(child)]
    if len(children) < 2:
        return False
    shapes = [[(n, tuple(p.shape)) for n, p in child.named_parameters()] for child in children]
    if any(shape != shapes[0] for shape in shapes):
        return False
    if "expert" in name.rpartition(".")[2].lower() or "expert" in type(children[0]).__name__.lower():
        return True
    return parent is not None and _router_child(parent, len(module), []) is not None


def _fits(router: nn.Module, num_experts: int) -> bool:
    """Whether a weight of `router` has a row per expert."""
    return any(p.ndim <= 2 and p.shape[:1] == (num_experts,) for p in router.parameters())


def _router_child(parent: nn.Module, num_experts: int, skip: Iterable[nn.Module], *, deep: bool = False) -> str | None:
    """Name of the child of `parent` that looks like the router over `num_experts`, or None.

    By name or class, else a linear layer with E outputs; with `deep` also a module whose last one has E outputs.
    """
    skipped = {id(module) for module in skip}
    named, shaped, ending = None, None, None
    for name, child in parent.named_children():
        if id(child) in skipped or name in SHARED_NAMES or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            continue
        fits = _fits(child, num_experts)
        looks = name in ROUTER_NAMES or ROUTER_CLASS.search(type(child).__name__) is not None
        if looks and (fits or named is None) and (fits or not isinstance(child, nn.Linear)):
            named = name
        if isinstance(child, nn.Linear) and child.out_features == num_experts and shaped is None:
            shaped = name
        linear = [module for module in child.modules() if isinstance(module, nn.Linear)]
        if deep and linear and linear[-1].out_features == num_experts and ending is None:
            ending = name
    return named or shaped or ending


def _grouped(found: Mapping[str, tuple[int, int, bool]], modules: Mapping[str, nn.Module]) -> list[Found]:
    blocks: dict[str, Found] = {}
    for name, (num_experts, zero_experts, is_list) in found.items():
        block = name.rpartition(".")[0]
        if block in blocks:
            blocks[block].containers[name] = modules[name]
        else:
            blocks[block] = Found(block, {name: modules[name]}, num_experts, zero_experts, is_list)
    return list(blocks.values())
