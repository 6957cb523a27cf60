"""How much memory an optimizer keeps and a training step needs, from declared slots and shapes alone."""

from __future__ import annotations

from toolkit.memory._account import account, account_slots
from toolkit.memory._plan import MemoryPlan, plan_memory
from toolkit.memory._settings import Parallel, Precision, Run
from toolkit.memory._shapes import (
    Architecture,
    architecture,
    build_on_meta,
    model_names,
    register_builder,
    register_models,
    shape_table,
)

__all__ = [
    "Architecture",
    "MemoryPlan",
    "Parallel",
    "Precision",
    "Run",
    "account",
    "account_slots",
    "architecture",
    "build_on_meta",
    "model_names",
    "plan_memory",
    "register_builder",
    "register_models",
    "shape_table",
]
