"""Where a model keeps its experts, and how the executed expert ids can be read while it runs.

Legend: E num_experts, K top_k, T tokens, H hidden size, I expert width.

Most families share one pattern: a router module that returns (logits [T, E], weights [T, K], indices [T, K]) and an
experts module that is called with (hidden [T, H], indices [T, K], weights [T, K]) and holds stacked weights
[E, 2I, H] and [E, H, I]. Detection looks for that pattern, and for a plain list of equal experts, by structure. A model
that fits neither is declared with a `Layout`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from traces.detection import detect, expert_counts, find_router, stack_sizes, top_k_of
from traces.errors import GradreelError
from traces.families import family_of
from traces.module_names import below, block_number, named_modules

_EXAMPLE = "layout=Layout(experts='*.mlp.experts', router='*.mlp.gate', num_experts=8)"


@dataclass(frozen=True)
class Layout:
    """A user's declaration of the MoE layers of a model that detection does not recognise.

    `experts` and `router` are patterns (`*` matches anything) over module names, wrapper prefixes left out.
    `num_experts` is needed where the weights do not show it; `top_k` where the router returns logits only.
    `transposed` says that stacked weights are [E, in, out]: all of them, or those of the given names. `fused` says that
    2-D weights [E * F, H] hold the experts one after another. `zero_experts` of the `num_experts` ids, the last ones,
    have no weights. `read(module, args, kwargs, output)` is called after the router and returns (topk_expert_ids
    [T, K] with -1 where a slot was not executed, topk_scores [T, K] or None, router_logits [T, E] or None); `router`
    may be any module for it, also the one that holds the experts. Under expert parallelism `global_expert_ids` are the
    ids of the experts that this process holds, in the order of its weights, out of `num_experts` in the whole run.
    """

    experts: str
    router: str | None = None
    num_experts: int | None = None
    top_k: int | None = None
    transposed: bool | Collection[str] | None = None
    fused: bool = False
    zero_experts: int = 0
    read: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] | None = None
    global_expert_ids: Collection[int] | None = None


@dataclass
class MoELayer:
    """One MoE layer of a live model. `containers` maps the name of each expert container to its module.

    `num_experts` counts the ids a router can choose, `zero_experts` those of them, the last, that have no weights.
    """

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
    zero_experts: int = 0
    fused: bool = False
    in_decoder: bool = False  # of a model that has an encoder too
    transposed: bool | Collection[str] | None = None
    read: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] | None = None
    read_at: nn.Module | None = None  # whose output `read` is given; the router by default
    global_expert_ids: tuple[int, ...] | None = None  # of the experts held here, where other processes hold others

    @property
    def held(self) -> int:
        """How many experts with weights this process holds."""
        if self.global_expert_ids is not None:
            return len(self.global_expert_ids)
        return self.num_experts - self.zero_experts

    @property
    def experts_name(self) -> str:
        """Name of the (first) experts module."""
        return next(iter(self.containers))

    @property
    def experts(self) -> nn.Module:
        """The (first) experts module."""
        return self.containers[self.experts_name]


def find_moe_layers(
    model: nn.Module, layout: Layout | Mapping[str, Any] | Sequence[Any] | None = None
) -> list[MoELayer]:
    """Find every MoE layer of `model`, in module order.

    `layout` declares layers instead of detecting them: a `Layout`, a mapping of its fields, or a list of those.
    Raises `GradreelError` where nothing is found, and says how to declare the layout.
    """
    modules = named_modules(model)
    if layout is None:
        layers = [
            MoELayer(0, f.block_name, f.containers, f.num_experts, f.is_list, zero_experts=f.zero_experts)
            for f in detect(model, modules)
        ]
        for layer in layers:
            _attach_router(layer, modules)
            _ask_family(layer)
        if not layers:
            counts, _ = expert_counts(model)
            raise GradreelError(
                f"{_class_of(model)} has no MoE layer that is recognised: no module holds stacked expert weights "
                f"[E, ...] or a list of equal experts (config speaks of E = {sorted(counts) or 'nothing'}); give a "
                f"model with experts, or declare them, as in {_EXAMPLE}"
            )
    else:
        layers = [layer for item in _as_layouts(layout) for layer in _declared(item, modules)]
    _number(layers)
    return layers


def check_visible(layers: Sequence[MoELayer]) -> None:
    """Refuse experts whose weights do not show which part belongs to which expert, unless they were declared."""
    for layer in layers:
        if layer.is_list or layer.fused or layer.layout is not None:
            continue
        sizes = {layer.num_experts, layer.num_experts - layer.zero_experts}
        weights = [tuple(p.shape) for container in layer.containers.values() for p in container.parameters()]
        if not any(len(shape) > 1 and shape[0] in sizes for shape in weights):
            shown = ", ".join(str(list(shape)) for shape in weights[:3])
            raise GradreelError(
                f"module {layer.experts_name!r}: its weights {shown} have no axis of {layer.num_experts} experts; "
                f"declare them, layout=Layout(experts={layer.experts_name!r}, num_experts={layer.num_experts}, "
                "fused=True) where they are [E * F, H] with one expert after another, without fused= to record them "
                "whole"
            )


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
        sizes = {len(list(module.children()))} if is_list else stack_sizes(module)
        num_experts = layout.num_experts or (sizes.copy().pop() if len(sizes) == 1 else 0)
        if num_experts < 1:
            raise GradreelError(f"layout: module {name!r} does not show its number of experts; give num_experts=")
        if not 0 <= layout.zero_experts < num_experts:
            raise GradreelError(
                f"layout: zero_experts is {layout.zero_experts}; allowed: 0 to {num_experts - 1} of {num_experts}"
            )
        held = _held_ids(layout, num_experts)
        if sizes and not sizes & ({len(held)} if held else {num_experts, num_experts - layout.zero_experts}):
            raise GradreelError(
                f"layout: {f'global_expert_ids are {len(held)}' if held else f'num_experts is {num_experts}'}, module "
                f"{name!r} holds {', '.join(map(str, sorted(sizes)))}; "
                "leave num_experts out, or name the module that holds the experts"
            )
        layer = MoELayer(0, name.rpartition(".")[0], {name: module}, num_experts, is_list, layout=layout)
        layer.global_expert_ids = held
        _attach_router(layer, modules)
        _ask_family(layer)
        if layout.router is not None:
            _declare_router(layer, layout.router, modules)
        layer.top_k = layout.top_k or layer.top_k
        layer.zero_experts = layout.zero_experts
        layer.fused = layout.fused or layer.fused
        layer.transposed = layer.transposed if layout.transposed is None else layout.transposed
        layer.read = layout.read or layer.read
        layers.append(layer)
    return layers


def _held_ids(layout: Layout, num_experts: int) -> tuple[int, ...] | None:
    if layout.global_expert_ids is None:
        return None
    try:
        ids = tuple(int(i) for i in layout.global_expert_ids)
    except (TypeError, ValueError):
        ids = ()
    if layout.num_experts is None or not ids or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < num_experts:
        raise GradreelError(
            f"layout: global_expert_ids is {str(layout.global_expert_ids)[:80]} of num_experts={layout.num_experts}; "
            "give different ids below num_experts, the number of experts of the whole run"
        )
    return ids


def _attach_router(layer: MoELayer, modules: dict[str, nn.Module]) -> None:
    found = find_router(layer.block_name, layer.num_experts, layer.containers.values(), modules)
    if found is not None:
        layer.router_name, layer.router = found
        modules[found[0]] = found[1]
    layer.top_k = top_k_of(layer.router, modules.get(layer.block_name), layer.experts)


def _ask_family(layer: MoELayer) -> None:
    family = family_of(*layer.containers.values(), layer.router)
    if family is not None:
        layer.fused, layer.transposed, layer.read = family.fused, family.transposed, family.read


def _declare_router(layer: MoELayer, pattern: str, modules: dict[str, nn.Module]) -> None:
    matches = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
    if not matches:
        raise GradreelError(
            f"layout: no module is named like router={pattern!r}; beside {layer.experts_name!r} "
            f"there are {', '.join(n for n in modules if below(n, layer.block_name))[:200]}"
        )
    # Of several routers the one nearest in the tree belongs to these experts.
    nearest = max(matches, key=lambda name: _common(name, layer.experts_name))
    layer.read_at = modules[nearest]
    if not below(layer.experts_name, nearest):  # what holds the experts is read, but is no router
        layer.router_name, layer.router = nearest, modules[nearest]


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
