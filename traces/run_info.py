"""What a header says about a run: the optimizer and its groups, the machine, the versions."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def describe_run(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], device: torch.device
) -> dict[str, Any]:
    """JSON values; what decides the bits of a step is among them (vector width, threads, fused, foreach).

    `groups` are all optimizers' groups in order, each with its `params` names and hyper-parameters.

    `names` maps `id(parameter)` to its name; parameters of other models are left out.
    """
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            entry: dict[str, Any] = {
                key: _plain(value) for key, value in group.items() if key not in ("params", "param_names", "layouts")
            }
            entry["params"] = [names[id(p)] for p in group["params"] if id(p) in names]
            entry["optimizer"] = _class_name(optimizer)
            if isinstance(group.get("lr"), Tensor):
                entry["tensor_lr"] = True  # torch then divides it as a float32 tensor, not as a double
            if len(optimizers) > 1 and _recipe_of(optimizer) is not None:
                entry["recipe"] = _recipe_of(optimizer)
            groups.append(entry)
    first = optimizers[0]
    options: dict[str, Any] = {}
    for key in ("fused", "foreach", "capturable", "differentiable"):
        if key in first.defaults:
            options[key] = _plain(first.defaults[key])
    return {
        "optimizer": _class_name(first) if len(optimizers) == 1 else [_class_name(o) for o in optimizers],
        "recipe": _recipe_of(first) if len(optimizers) == 1 else None,
        "seed": _plain(getattr(first, "seed", None)),
        "groups": groups,
        **options,
        "model": type(model).__name__,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def group_rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """lr of every group, in the order of `groups`; tensors are copied, because schedulers change them in place."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    return [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]


def rates_by_name(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """lr of each of `parameters` that an optimizer holds."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {names[id(p)]: group.get("lr") for group in groups for p in group["params"] if id(p) in names}


def initial_state(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
) -> list[tuple[str, str, Tensor]]:
    """Optimizer state that existed before the recording: (`state.<slot>`, parameter name, tensor)."""
    found = []
    for optimizer in optimizers:
        for name, parameter in parameters.items():
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    value = torch.tensor(value, dtype=torch.float64)
                if isinstance(value, Tensor) and isinstance(slot, str) and slot.isidentifier():
                    found.append((f"state.{slot}", name, value))
    return found


def _recipe_of(optimizer: torch.optim.Optimizer) -> Any:
    """Name of the recipe behind an optimizer that has one; it holds every switch that was set."""
    return _plain(getattr(getattr(optimizer, "recipe", None), "name", None))


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, (list, tuple)) and depth < 4:
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, Mapping) and depth < 4:
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    return str(value)[:200]
