"""Record, store and read what a mixture-of-experts training run really did.

Names are imported on first use, so that `import traces` costs nothing and `gradreel info` never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traces.errors import GradreelError, NotRecorded, TraceError
    from traces.layouts import Layout
    from traces.reader import Trace, open_trace
    from traces.record_at import RecordAt
    from traces.recorder import Recorder
    from traces.registry import Registry, load_plugin_file
    from traces.roles import classify_roles

_PLACES = {
    "GradreelError": "traces.errors",
    "Layout": "traces.layouts",
    "NotRecorded": "traces.errors",
    "RecordAt": "traces.record_at",
    "Recorder": "traces.recorder",
    "Registry": "traces.registry",
    "Trace": "traces.reader",
    "TraceError": "traces.errors",
    "classify_roles": "traces.roles",
    "load_plugin_file": "traces.registry",
    "open_trace": "traces.reader",
}
__all__ = [
    "GradreelError",
    "Layout",
    "NotRecorded",
    "RecordAt",
    "Recorder",
    "Registry",
    "Trace",
    "TraceError",
    "classify_roles",
    "load_plugin_file",
    "open_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'traces' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
