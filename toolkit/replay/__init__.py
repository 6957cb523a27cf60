"""Replay a recorded run through other optimizers. Replay is open-loop: it compares updates, not losses."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.replay._compare import compare
    from toolkit.replay._engine import ReplayResult, replay
    from toolkit.replay._plane import weight_plane
    from toolkit.replay._routing_only import routing_metrics
    from toolkit.replay._selfcheck import SelfCheck, selfcheck
    from toolkit.replay._source import check_parameters

_PLACES = {
    "ReplayResult": "toolkit.replay._engine",
    "SelfCheck": "toolkit.replay._selfcheck",
    "check_parameters": "toolkit.replay._source",
    "compare": "toolkit.replay._compare",
    "replay": "toolkit.replay._engine",
    "routing_metrics": "toolkit.replay._routing_only",
    "selfcheck": "toolkit.replay._selfcheck",
    "weight_plane": "toolkit.replay._plane",
}
__all__ = [
    "ReplayResult",
    "SelfCheck",
    "check_parameters",
    "compare",
    "replay",
    "routing_metrics",
    "selfcheck",
    "weight_plane",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'toolkit.replay' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


class _Callable(ModuleType):
    """This package under the name it shares with its function: whichever of the two an import hands out, it replays."""

    def __call__(self, *arguments: Any, **options: Any) -> ReplayResult:
        """`toolkit.replay.replay` with these arguments."""
        result: ReplayResult = self.replay(*arguments, **options)
        return result


# Importing a subpackage binds it in its parent, so `from toolkit import replay` gives this module and not the function.
sys.modules[__name__].__class__ = _Callable
