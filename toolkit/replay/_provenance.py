"""What a result must say about how it came to be."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from toolkit.frame import OPEN_LOOP_NOTE
from toolkit.recipes import Recipe
from toolkit.replay._plan import Plan
from toolkit.replay._source import Source


def versions() -> dict[str, str]:
    """Versions of Python and of the packages whose arithmetic a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("gradreel", "torch", "numpy", "polars"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def machine(device: str) -> dict[str, Any]:
    """Device, processor kind and thread counts."""
    import torch

    return {
        "device": device,
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """A recipe in words: every row of its table with its chain and all switches."""
    return {
        "name": recipe.name,
        "paper": recipe.paper,
        "idle": recipe.idle,
        "options": dict(recipe.options),
        "groups": {key: chain.describe() for key, chain in recipe.groups.items()},
    }


def describe_lr(rule: Any) -> Any:
    """A rule for the learning rate as JSON."""
    return getattr(rule, "__name__", "function") if callable(rule) else rule


def provenance_of(kind: str, source: Source, plan: Plan, **more: Any) -> dict[str, Any]:
    """The dictionary stored in the Frame's file and shown in the report."""
    return {
        "kind": kind,
        "open_loop": OPEN_LOOP_NOTE,
        "trace": source.describe(plan.steps),
        "recipes": {e.label: describe_recipe(e.recipe) | {"lr": describe_lr(e.lr)} for e in plan.entrants},
        "parameters": sum(len(group) for group in plan.groups),
        "parameter_groups": len(plan.groups),
        "match": plan.match,
        "gaps": plan.gaps,
        "bursts": len(plan.bursts),
        "versions": versions(),
        "notes": list(plan.notes),
        **more,
    }
