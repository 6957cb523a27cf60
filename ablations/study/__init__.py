"""The study of temporal instability: what a trace says a stateless update would do, and whether training agreed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablations.study._agreement import replay_results
    from ablations.study._compare import compare_predictions
    from ablations.study._trace import study_trace

_PLACES = {
    "compare_predictions": "ablations.study._compare",
    "replay_results": "ablations.study._agreement",
    "study_trace": "ablations.study._trace",
}
__all__ = ["compare_predictions", "replay_results", "study_trace"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ablations.study' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
