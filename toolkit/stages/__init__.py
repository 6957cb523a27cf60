"""Stages, one per file. See `_stage.py` for what a stage is."""

from toolkit.stages._stage import (
    Chain,
    Context,
    Ratio,
    Shape,
    Slot,
    Slots,
    Stage,
    chain,
    columns,
    defaults_of,
    rows,
    same,
)
from traces.registry import Registry

STAGES: Registry[Stage] = Registry("toolkit.stages", "STAGE", "stage")

__all__ = [
    "STAGES",
    "Chain",
    "Context",
    "Ratio",
    "Shape",
    "Slot",
    "Slots",
    "Stage",
    "chain",
    "columns",
    "defaults_of",
    "rows",
    "same",
]
