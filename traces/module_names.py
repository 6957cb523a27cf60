"""Names of modules and parameters without what wrappers add to them, and what names say."""

from __future__ import annotations

import re

from torch import nn

ROUTER_NAMES = ("gate", "router", "gating", "wg")
ROUTER_CLASS = re.compile(r"(Router|Gate|Gating)$")
SHARED_NAMES = ("shared_expert", "shared_experts", "shared_mlp", "shared_expert_gate", "residual_mlp")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


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


def is_shared(name: str) -> bool:
    """Whether a module or parameter belongs to an expert that every token passes."""
    return any(part in SHARED_NAMES for part in name.split("."))


def block_number(name: str) -> int | None:
    """The first number in a dotted name, which counts blocks in every common model; None without one."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
