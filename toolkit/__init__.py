"""Optimizers as chains of stages, replay of recorded runs, metrics, plots and reports.

Names are imported on first use, so that a command that needs no torch never loads it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.memory import plan_memory
    from toolkit.replay import compare, replay
    from toolkit.variants import recipe

_PLACES = {
    "compare": "toolkit.replay",
    "plan_memory": "toolkit.memory",
    "recipe": "toolkit.variants",
    "replay": "toolkit.replay",
}
__all__ = ["compare", "plan_memory", "recipe", "replay"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
