"""A local page to look at a trace or a run, expert by expert: `view("demo.trace")` in Jupyter, or `gradreel view`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.view._open import View, view

__all__ = ["View", "view"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'toolkit.view' has no attribute {name!r}")
    from toolkit.view import _open

    return getattr(_open, name)
