"""Models, data and closed-loop training runs to ask questions with. Public names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablations.presets import load_preset
    from ablations.runner import run
    from ablations.simulate import simulate

_PLACES = {"load_preset": "ablations.presets", "run": "ablations.runner", "simulate": "ablations.simulate"}
__all__ = ["load_preset", "run", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ablations' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
