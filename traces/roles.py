"""What each parameter is for: router, routed expert, embedding, norm, and so on.

Rules are tried in a fixed order and the first match wins (`classify_roles`). They look at structure (which module owns
a stack of experts, which one is the output embedding) before they look at names, so that a family nobody listed still
gets sensible roles.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from traces.errors import GradreelError, unknown
from traces.layouts import MoELayer, find_moe_layers
from traces.module_names import ROUTER_CLASS, below, block_number, is_shared, named_modules, strip_wrappers
from traces.views import ROLES, ParamInfo

_BIAS = re.compile(r"(e_score_correction_bias|score_correction_bias|correction_bias|expert_bias(es)?|routing_bias)$")
_HYPER = re.compile(r"^(hc_.*|.*_hc|mhc.*|hyper_.*)$")
_ATTENTION = {
    "attn",
    "attention",
    "self_attn",
    "self_attention",
    "cross_attn",
    "linear_attn",
    "selfattention",
    "encdecattention",
    "mamba",
    "conv",
    "mixer",
}
_DENSE = {"mlp", "mlps", "ffn", "feed_forward", "fc", "wi", "wo"}
_HEAD = {"lm_head", "output_layer", "embed_out", "output", "head", "unembed"}
_INPUT_SIDE = re.compile(r"(gate|up|w1|w3|v1|fc1|wi|in_proj|input)")
_OUTPUT_SIDE = re.compile(r"(down|w2|fc2|wo|out_proj|output)")


def classify_roles(model: nn.Module, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give every parameter of `model` one role; tied weights appear once, wrapper prefixes are left out of names.

    `overrides` maps a parameter name, or a pattern with `*`, to a role and comes before every rule. A pattern that
    matches nothing and a role that does not exist raise `GradreelError`.
    """
    return _Rules(model, overrides).roles()


def describe_params(
    model: nn.Module, overrides: Mapping[str, str] | None = None, layout: Any = None
) -> list[ParamInfo]:
    """Describe every parameter: role, layer, expert axis and matrix axes, in the order of `named_parameters()`.

    `matrix_axes` are (row, column) axes with rows = output features, whichever way the weight is stored. The `shape` of
    fused experts [E * F, H] is that of their view [E, F, H].
    """
    rules = _Rules(model, overrides, layout)
    roles = rules.roles()
    return [rules.describe(name, roles[name]) for name in rules.parameters]


def role_table(model: nn.Module, overrides: Mapping[str, str] | None = None) -> str:
    """The assignment as printed text, one line per parameter: role, layer, experts, shape, name."""
    rows = [("role", "layer", "experts", "shape", "parameter")]
    rules = _Rules(model, overrides)
    roles = rules.roles()
    for info in (rules.describe(name, roles[name]) for name in rules.parameters):
        layer = "" if info.layer is None else str(info.layer)
        experts = (
            str(info.num_experts)
            if info.expert_axis is not None
            else ("" if info.expert is None else f"#{info.expert}")
        )
        tie = f"  (tied to {rules.ties[info.name]})" if info.name in rules.ties else ""
        rows.append((info.role, layer, experts, "x".join(map(str, info.shape)) or "scalar", info.name + tie))
    for name, buffer in model.named_buffers():
        if _BIAS.search(name):
            rows.append(("router_bias", "", "", "x".join(map(str, buffer.shape)), strip_wrappers(name) + "  (buffer)"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in rows)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by stripped name, tied weights once, under their first name."""
    return {strip_wrappers(name): parameter for name, parameter in model.named_parameters()}


class _Rules:
    def __init__(self, model: nn.Module, overrides: Mapping[str, str] | None, layout: Any = None) -> None:
        self.model = model
        self.modules = named_modules(model)
        self.parameters = named_parameters(model)
        self.overrides = dict(overrides or {})
        try:
            self.layers = find_moe_layers(model, layout)
        except GradreelError:
            if layout is not None:
                raise
            self.layers = []  # a dense model has roles too
        self.owners = {name: self.modules.get(name.rpartition(".")[0]) for name in self.parameters}
        self.embeddings = self._weights_of("get_input_embeddings")
        self.heads = self._weights_of("get_output_embeddings")
        self.ties = self._tied_names()
        self._check_overrides()

    def roles(self) -> dict[str, str]:
        return {name: self._role(name) for name in self.parameters}

    def describe(self, name: str, role: str) -> ParamInfo:
        parameter = self.parameters[name]
        layer = self._layer_of(name)
        moe = self._container_of(name)
        shape, strides = tuple(parameter.shape), tuple(parameter.stride())
        expert_axis = num_experts = expert = None
        if moe is not None and role == "routed_expert":
            if moe[0].is_list:
                expert = self._index_in_list(name, moe[1], moe[0])
            else:
                own = moe[0].held
                if moe[0].fused and parameter.ndim == 2 and shape[0] % own == 0:
                    rows = shape[0] // own
                    shape, strides = (own, rows, shape[1]), (rows * strides[0], *strides)
                if shape and shape[0] in (own, moe[0].num_experts if moe[0].global_expert_ids is None else own):
                    expert_axis, num_experts = 0, shape[0]
        return ParamInfo(
            name=name,
            role=role,
            shape=shape,
            dtype=str(parameter.dtype).removeprefix("torch."),
            layer=layer,
            expert=expert,
            expert_axis=expert_axis,
            num_experts=num_experts,
            matrix_axes=self._matrix_axes(name, len(shape), expert_axis, moe[0] if moe else None),
            strides=strides,
        )

    def _role(self, name: str) -> str:
        parameter, owner = self.parameters[name], self.owners[name]
        parts = name.split(".")
        for pattern, role in self.overrides.items():
            if fnmatch.fnmatchcase(name, pattern):
                return role
        if id(parameter) in self.embeddings:
            return "embedding"
        if id(parameter) in self.heads:
            return "head"
        if is_shared(name):
            return "shared_expert"
        if _BIAS.search(name):
            return "router_bias"
        if self._in_router(name):
            return "router"
        if self._container_of(name) is not None:
            return "routed_expert"
        if any(_HYPER.match(part) for part in parts):
            return "hyper_connection"
        if "Norm" in type(owner).__name__ or (len(parts) > 1 and parts[-2].lower().endswith("norm")):
            return "norm"
        if _ATTENTION.intersection(part.lower() for part in parts):
            return "attention"
        if parameter.ndim == 2 and _DENSE.intersection(parts):
            return "dense_ffn"
        if isinstance(owner, nn.Embedding):
            return "embedding"
        if _HEAD.intersection(parts[:-1]):
            return "head"
        return "other"

    def _in_router(self, name: str) -> bool:
        for layer in self.layers:
            if layer.router_name and below(name, layer.router_name):
                return True
            if not below(name, layer.block_name) or any(below(name, container) for container in layer.containers):
                continue
            inner = name[len(layer.block_name) + 1 if layer.block_name else 0 :].split(".")[:-1]
            path = layer.block_name
            for part in inner:
                path = f"{path}.{part}" if path else part
                if ROUTER_CLASS.search(type(self.modules.get(path)).__name__):
                    return True
        return False

    def _container_of(self, name: str) -> tuple[MoELayer, str] | None:
        for layer in self.layers:
            for container in layer.containers:
                if below(name, container):
                    return layer, container
        return None

    def _layer_of(self, name: str) -> int | None:
        # The deepest block wins: an MoE layer inside another's block is its own layer.
        owners = [layer for layer in self.layers if layer.block_name and below(name, layer.block_name)]
        owners = owners or [layer for layer in self.layers if any(below(name, c) for c in layer.containers)]
        if owners:
            return max(owners, key=lambda layer: len(layer.block_name)).layer
        if any(layer.layer != block_number(layer.experts_name) for layer in self.layers):
            return None  # MoE layers were counted, so the numbers in names mean something else
        return block_number(name.rpartition(".")[0])

    def _index_in_list(self, name: str, container: str, layer: MoELayer) -> int:
        child = name[len(container) + 1 :].split(".")[0]
        return [key for key, _ in layer.containers[container].named_children()].index(child)

    def _matrix_axes(
        self, name: str, ndim: int, expert_axis: int | None, layer: MoELayer | None
    ) -> tuple[int, int] | None:
        owner = self.owners[name]
        if expert_axis is not None:
            if ndim < 3:
                return None
            assert layer is not None
            return (ndim - 1, ndim - 2) if self._is_transposed(name, layer) else (ndim - 2, ndim - 1)
        if ndim < 2:
            return None
        if type(owner).__name__ == "Conv1D":  # GPT-2's linear layer keeps [in, out]
            return (1, 0)
        return (ndim - 2, ndim - 1)

    def _is_transposed(self, name: str, layer: MoELayer) -> bool:
        if isinstance(layer.transposed, bool):
            return layer.transposed
        if layer.transposed is not None:
            return name.rpartition(".")[2] in layer.transposed
        declared = getattr(self.owners[name], "is_transposed", None)
        if isinstance(declared, bool):
            return declared
        width = next((p.shape[-1] for p in layer.router.parameters() if p.ndim == 2), None) if layer.router else None
        votes = 0  # over all stacks of the layer: a square one says nothing, its neighbour may
        for other, parameter in self.parameters.items():
            if parameter.ndim < 3 or not any(below(other, container) for container in layer.containers):
                continue
            rows, columns = parameter.shape[-2:]
            if width is None or rows == columns or width not in (rows, columns):
                continue
            leaf = (
                other.rpartition(".")[2]
                if "proj" in other.rpartition(".")[2] or "w" in other.rpartition(".")[2]
                else other
            )
            if _OUTPUT_SIDE.search(leaf):
                votes += 1 if columns == width else -1
            elif _INPUT_SIDE.search(leaf):
                votes += 1 if rows == width else -1
        return votes > 0

    def _weights_of(self, method: str) -> set[int]:
        found: set[int] = set()
        for module in self.model.modules():
            getter = getattr(module, method, None)
            if getter is None:
                continue
            try:
                target = getter()
            except (NotImplementedError, AttributeError, TypeError):
                continue  # transformers' base class raises where a model has none
            if isinstance(target, nn.Module):
                found.update(id(parameter) for parameter in target.parameters())
        return found

    def _tied_names(self) -> dict[str, str]:
        first = {id(parameter): name for name, parameter in self.parameters.items()}
        ties: dict[str, str] = {}
        for raw, parameter in self.model.named_parameters(remove_duplicate=False):
            name, own = strip_wrappers(raw), first[id(parameter)]
            if name != own:
                ties.setdefault(own, name)
        return ties

    def _check_overrides(self) -> None:
        for pattern, role in self.overrides.items():
            if role not in ROLES:
                raise unknown("role", role, ROLES)
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self.parameters):
                raise GradreelError(
                    f"role override {pattern!r} matches no parameter; one name is {next(iter(self.parameters), '')!r}"
                )
