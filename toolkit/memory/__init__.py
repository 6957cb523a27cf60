"""How much memory an optimizer keeps and a training step needs, from declared slots and shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.memory._account import account, account_slots
from toolkit.memory._measure import Meter, measure
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
from toolkit.memory._step_peak import StepPeak, step_peak

if TYPE_CHECKING:
    from toolkit.memory._tracked import tracked_peak

__all__ = [
    "Architecture",
    "MemoryPlan",
    "Meter",
    "Parallel",
    "Precision",
    "Run",
    "StepPeak",
    "account",
    "account_slots",
    "architecture",
    "build_on_meta",
    "measure",
    "model_names",
    "plan_memory",
    "register_builder",
    "register_models",
    "shape_table",
    "step_peak",
    "tracked_peak",
]


def __getattr__(name: str) -> Any:
    # Lazily, since only tracking needs torch at import.
    if name == "tracked_peak":
        from toolkit.memory._tracked import tracked_peak

        return tracked_peak
    raise AttributeError(f"module 'toolkit.memory' has no attribute {name!r}")
