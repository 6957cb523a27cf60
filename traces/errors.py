"""Errors that a user can act on.

Every message is one line: what is wrong, where, the value, what is allowed, what to do. The command line prints it
and exits with 2; nothing here is ever shown as a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 100


class GradreelError(ValueError):
    """A user's mistake or a damaged input. `str(error)` is the whole message."""


class TraceError(GradreelError):
    """A trace that is missing, damaged, hostile, or of another format version."""


class NotRecorded(GradreelError, LookupError):
    """The trace is sound, but does not hold what was asked for (step, stream, parameter or expert)."""


class UnknownName(GradreelError):
    """A name that no registry, trace or table holds."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UnknownName:
    """Build the error for a name that is not among `choices`, with the nearest one first."""
    known = sorted(choices)
    near = difflib.get_close_matches(name[:_SHOWN], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    shown = repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}..."
    return UnknownName(f"unknown {kind} {shown}{hint} Choices: {', '.join(known) or 'none'}")
