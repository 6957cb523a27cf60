"""Where a model keeps its experts, and how the executed expert ids can be read while it runs.

Legend: E num_experts, K top_k, T tokens, H hidden size, I expert width.

Most families share one pattern: a router module that returns (logits [T, E], weights [T, K], indices [T, K]) and an
experts module that is called with (hidden [T, H], indices [T, K], weights [T, K]) and holds stacked weights
[E, 2I, H] and [E, H, I]. Detection looks for that pattern, and for a plain list of equal experts, by structure. A model
that fits neither is declared with a `Layout`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from traces.errors import GradreelError

ROUTER_NAMES = ("gate", "router", "gating", "wg")
ROUTER_CLASS = re.compile(r"(Router|Gate|Gating)$")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
SHARED_NAMES = ("shared_expert", "shared_experts", "shared_mlp", "shared_expert_gate", "residual_mlp")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_EXAMPLE = "layout=Layout(experts='*.mlp.experts', router='*.mlp.gate', num_experts=8)"


@dataclass(frozen=True)
class Layout:
    """A user's declaration of the MoE layers of a model that detection does not recognise.

    `experts` and `router` are patterns (`*` matches anything) over module names, wrapper prefixes left out.
    `num_experts` is needed where the weights do not show it; `top_k` where the router returns logits only.
    `transposed=True` says that stacked weights are [E, in, out]. `read(module, args, kwargs, output)` is called after
    the router and returns (topk_expert_ids [T, K], topk_scores [T, K] or None, router_logits [T, E] or None).
    """

    experts: str
    router: str | None = None
    num_experts: int | None = None
    top_k: int | None = None
    transposed: bool | None = None
    read: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] | None = None


@dataclass
class MoELayer:
    """One MoE layer of a live model. `containers` maps the name of each expert container to its module."""

    layer: int
    block_name: str
    containers: dict[str, nn.Module]
    num_experts: int
    is_list: bool
    router_name: str | None = None
    router: nn.Module | None = None
    top_k: int | None = None
    layout: Layout | None = None
    gives_probabilities: bool = False  # the router returns probabilities where others return logits

    @property
    def experts_name(self) -> str:
        """Name of the (first) experts module."""
        return next(iter(self.containers))

    @property
    def experts(self) -> nn.Module:
        """The (first) experts module."""
        return self.containers[self.experts_name]


@dataclass
class Capture:
    """What one hook saw of one layer in one micro-step; tensors are on the model's device.

    `topk_expert_ids` and `scores` [T, K], `logits` [T, E].
    """

    topk_expert_ids: Tensor | None = None
    scores: Tensor | None = None
    logits: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def strip_wrappers(name: str) -> str:
    """Leave out what DDP, `torch.compile`, FSDP and checkpoint wrappers add to a module's or parameter's name."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    if parts == ["module"]:
        return ""
    return ".".join(parts)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by stripped name; of a wrapper and what it wraps, the wrapped module keeps the name."""
    return {strip_wrappers(name): module for name, module in model.named_modules()}


def below(name: str, root: str) -> bool:
    """Whether the module or parameter `name` is `root` or lies in its subtree."""
    return root == "" or name == root or name.startswith(root + ".")


def expert_counts(model: nn.Module) -> set[int]:
    """Every number of experts that the model's config, nested configs included, speaks of."""
    found: set[int] = set()
    seen: set[int] = set()
    queue = [getattr(module, "config", None) for module in (model, *model.modules())]
    while queue:
        config = queue.pop()
        if config is None or id(config) in seen or isinstance(config, (nn.Module, torch.Tensor)):
            continue
        seen.add(id(config))
        items = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        for key, value in items.items():
            if isinstance(value, int) and not isinstance(value, bool) and _names_expert_count(str(key)):
                found.add(value)
            elif "config" in str(key) and not isinstance(value, (str, int, float, bool, type(None))):
                queue.append(value)
    return found


def _names_expert_count(key: str) -> bool:
    key = key.lower()
    return "experts" in key and "per_tok" not in key and "shared" not in key and ("num" in key or "n_" in key)


def find_moe_layers(
    model: nn.Module, layout: Layout | Mapping[str, Any] | Sequence[Any] | None = None
) -> list[MoELayer]:
    """Find every MoE layer of `model`, in module order.

    `layout` declares layers instead of detecting them: a `Layout`, a mapping of its fields, or a list of those.
    Raises `GradreelError` where nothing is found, and says how to declare the layout.
    """
    modules = named_modules(model)
    if layout is None:
        layers = _detect(model, modules)
        if not layers:
            counts = expert_counts(model)
            raise GradreelError(
                f"{_class_of(model)} has no MoE layer that is recognised: no module holds stacked expert weights "
                f"[E, ...] or a list of equal experts (config speaks of E = {sorted(counts) or 'nothing'}); give a "
                f"model with experts, or declare them, as in {_EXAMPLE}"
            )
    else:
        layers = [layer for item in _as_layouts(layout) for layer in _declared(item, modules)]
    _number(layers)
    return layers


def _class_of(model: nn.Module) -> str:
    while (inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None)) is not None:
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return f"model {type(model).__name__}"


def _as_layouts(layout: Layout | Mapping[str, Any] | Sequence[Any]) -> list[Layout]:
    if isinstance(layout, Layout):
        return [layout]
    if isinstance(layout, Mapping):
        try:
            return [Layout(**layout)]
        except TypeError:
            allowed = ", ".join(Layout.__dataclass_fields__)
            raise GradreelError(f"layout {dict(layout)!r}: allowed fields are {allowed}; experts is required") from None
    if isinstance(layout, (list, tuple)) and layout:
        return [one for item in layout for one in _as_layouts(item)]
    raise GradreelError(f"layout {layout!r} is not a Layout; write for example {_EXAMPLE}")


# --- detection -------------------------------------------------------------------------------------------------------


def _detect(model: nn.Module, modules: dict[str, nn.Module]) -> list[MoELayer]:
    counts = expert_counts(model)
    containers: dict[str, tuple[int, bool]] = {}
    for name, module in modules.items():
        if not name or any(part in SHARED_NAMES for part in name.split(".")):
            continue
        if any(below(name, other) for other in containers):
            continue
        parent = modules.get(name.rpartition(".")[0])
        stacked = _stacked_experts(name, module, parent, counts)
        if stacked:
            containers[name] = (stacked, False)
        elif _is_expert_list(name, module, parent):
            containers[name] = (len(list(module.children())), True)
    for name, module in modules.items():  # the last resort: it is named so, and nothing else explains it
        if (
            name.rpartition(".")[2] == "experts"
            and not any(below(name, other) or below(other, name) for other in containers)
            and not any(part in SHARED_NAMES for part in name.split("."))
            and any(True for _ in module.parameters())
            and not any(child.rpartition(".")[2] in ROUTER_NAMES for child, _ in module.named_modules())
            and len(counts) == 1
        ):
            containers[name] = (next(iter(counts)), False)
    return _group(containers, modules)


def _stacked_experts(name: str, module: nn.Module, parent: nn.Module | None, counts: set[int]) -> int:
    """E where `module` itself holds stacked expert weights, else 0."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0
    sizes = {p.shape[0] for p in module.parameters(recurse=False) if p.ndim >= 3}
    if len(sizes) != 1:
        return 0
    size = sizes.pop()
    own = next((getattr(module, key) for key in ("num_experts", "n_experts") if hasattr(module, key)), None)
    named = "expert" in name.rpartition(".")[2].lower() or "expert" in type(module).__name__.lower()
    beside_router = parent is not None and _router_child(parent, size) is not None
    if own == size or named or (beside_router and (not counts or size in counts)):
        return size
    return 0


def _is_expert_list(name: str, module: nn.Module, parent: nn.Module | None) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or len(module) < 2:
        return False
    children = list(module.children())
    shapes = [[(n, tuple(p.shape)) for n, p in child.named_parameters()] for child in children]
    if not shapes[0] or any(shape != shapes[0] for shape in shapes):
        return False
    if "expert" in name.rpartition(".")[2].lower() or "expert" in type(children[0]).__name__.lower():
        return True
    return parent is not None and _router_child(parent, len(children)) is not None


def _router_child(parent: nn.Module, num_experts: int, skip: Iterable[nn.Module] = ()) -> str | None:
    """Name of the child of `parent` that looks like the router over `num_experts`, or None."""
    skipped = {id(module) for module in skip}
    named, shaped = None, None
    for name, child in parent.named_children():
        if id(child) in skipped or name in SHARED_NAMES or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            continue
        fits = any(p.ndim <= 2 and p.shape[:1] == (num_experts,) for p in child.parameters())
        looks = name in ROUTER_NAMES or ROUTER_CLASS.search(type(child).__name__) is not None
        if looks and (fits or named is None) and (fits or not isinstance(child, nn.Linear)):
            named = name
        if isinstance(child, nn.Linear) and child.out_features == num_experts and shaped is None:
            shaped = name
    return named or shaped


def _group(containers: dict[str, tuple[int, bool]], modules: dict[str, nn.Module]) -> list[MoELayer]:
    layers: dict[str, MoELayer] = {}
    for name, (num_experts, is_list) in containers.items():
        block = name.rpartition(".")[0]
        if block in layers:
            layers[block].containers[name] = modules[name]
            continue
        layer = MoELayer(0, block, {name: modules[name]}, num_experts, is_list)
        _attach_router(layer, modules)
        layers[block] = layer
    return list(layers.values())


def _attach_router(layer: MoELayer, modules: dict[str, nn.Module]) -> None:
    level = layer.block_name
    for _ in range(3):  # experts may sit one wrapper deeper than their router
        parent = modules.get(level)
        if parent is not None:
            child = _router_child(parent, layer.num_experts, skip=layer.containers.values())
            if child is not None:
                layer.router_name = f"{level}.{child}" if level else child
                layer.router = modules[layer.router_name] = getattr(parent, child)
                break
        if not level:
            break
        level = level.rpartition(".")[0]
    for owner in (layer.router, modules.get(layer.block_name), layer.experts):
        layer.top_k = layer.top_k or _top_k_of(owner)


def _top_k_of(module: nn.Module | None) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for key in ("top_k", "topk", "k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k"):
            value = getattr(holder, key, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _declared(layout: Layout, modules: dict[str, nn.Module]) -> list[MoELayer]:
    names = [name for name in modules if name and fnmatch.fnmatchcase(name, layout.experts)]
    if not names:
        raise GradreelError(
            f"layout: no module is named like experts={layout.experts!r}; the model's modules are for example "
            f"{', '.join(list(modules)[1:8])}"
        )
    layers = []
    for name in names:
        module = modules[name]
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        sizes = {p.shape[0] for p in module.parameters() if p.ndim >= 3}
        guess = len(list(module.children())) if is_list else (sizes.pop() if len(sizes) == 1 else 0)
        num_experts = layout.num_experts or guess
        if num_experts < 1:
            raise GradreelError(f"layout: module {name!r} does not show its number of experts; give num_experts=")
        shown = {guess} if is_list else {p.shape[0] for p in module.parameters() if p.ndim >= 3}
        if shown and num_experts not in shown:
            raise GradreelError(
                f"layout: num_experts is {num_experts}, module {name!r} holds {', '.join(map(str, sorted(shown)))}; "
                "leave num_experts out, or name the module that holds the experts"
            )
        layer = MoELayer(0, name.rpartition(".")[0], {name: module}, num_experts, is_list, layout=layout)
        _attach_router(layer, modules)
        if layout.router is not None:
            _declare_router(layer, layout.router, modules)
        layer.top_k = layout.top_k or layer.top_k
        layers.append(layer)
    return layers


def _declare_router(layer: MoELayer, pattern: str, modules: dict[str, nn.Module]) -> None:
    matches = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
    if not matches:
        raise GradreelError(
            f"layout: no module is named like router={pattern!r}; beside {layer.experts_name!r} "
            f"there are {', '.join(n for n in modules if below(n, layer.block_name))[:200]}"
        )
    # Of several routers the one nearest in the tree belongs to these experts.
    layer.router_name = max(matches, key=lambda name: _common(name, layer.experts_name))
    layer.router = modules[layer.router_name]


def _common(one: str, other: str) -> int:
    count = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        count += 1
    return count


def _number(layers: list[MoELayer]) -> None:
    numbers = [block_number(layer.experts_name) for layer in layers]
    if None in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(layers)))
    for layer, number in zip(layers, numbers, strict=True):
        assert number is not None
        layer.layer = number


def block_number(name: str) -> int | None:
    """The first number in a dotted name, which counts blocks in every common model; None without one."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


# --- what hooks read -------------------------------------------------------------------------------------------------


def read_experts_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Capture | None:
    """Executed ids and their scores out of the arguments of an experts module; None where it gets no ids."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return _ids_and_scores(tensors)


def read_router_output(output: Any, num_experts: int) -> Capture:
    """Logits, and ids and scores where the router returns them, out of whatever it returned."""
    tensors = [value for value in _flatten(output) if isinstance(value, Tensor)]
    logits = next((t for t in tensors if t.is_floating_point() and t.ndim >= 2 and t.shape[-1] == num_experts), None)
    capture = _ids_and_scores([t for t in tensors if t is not logits]) or Capture()
    capture.logits = logits
    return capture


def _ids_and_scores(tensors: list[Tensor]) -> Capture | None:
    floats = [t for t in tensors if t.is_floating_point()]
    for ids in tensors:
        if ids.dtype not in _INTEGERS or ids.ndim < 1:
            continue
        scores = next((t for t in floats if t.shape == ids.shape), None)
        if ids.ndim >= 2 or scores is not None:
            return Capture(ids, scores)
    return None


def _flatten(output: Any) -> list[Any]:
    if isinstance(output, Mapping):
        return [item for value in output.values() for item in _flatten(value)]
    if isinstance(output, (tuple, list)):
        return [item for value in output for item in _flatten(value)]
    return [output]


def topk_lowest_first(logits: Tensor, top_k: int) -> Tensor:
    """Ids [T, K] of the largest logits; of equal logits the lowest index wins, which `torch.topk` leaves open."""
    order = torch.sort(logits.detach(), dim=-1, descending=True, stable=True).indices
    return order[..., :top_k]
