"""What a recording says to its user while it goes on, and the one thing it raises."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from traces.errors import GradreelError
from traces.sink import TraceSink


class Notices:
    """Tells through `notify` (default: stderr), each kind of notice once."""

    def __init__(self, notify: Callable[[str], None] | None, path: Path | None, strict: bool) -> None:
        self.tell = notify or _to_stderr
        self._path, self._strict = path, strict
        self._told: set[str] = set()

    def tell_once(self, kind: str, message: str) -> None:
        """Tell this kind of notice the first time only."""
        if kind not in self._told:
            self._told.add(kind)
            self.tell(message)

    def tell_misfits(self, steps: Sequence[int], misrouted: Sequence[int]) -> None:
        """Steps whose attention mask has another number of tokens than was routed, or whose ids were not executed."""
        if misrouted:
            self.tell(
                f"in {len(misrouted)} steps, first in step {misrouted[0]}, listed experts were given other tokens than "
                "their router chose; the routing of those layers is left out there; declare how executed ids are "
                "read, layout=Layout(experts=..., router=..., read=...)"
            )
        if steps:
            self.tell(
                f"the attention mask did not fit the routed tokens in {len(steps)} steps, first in step {steps[0]}; "
                "all their tokens are recorded as real; call reel.mask(mask) with one entry per routed token"
            )

    def tell_first_error(self, sink: TraceSink | None) -> None:
        """The writer thread could not write a step: say so while something can still be done about it."""
        error = sink.first_error if sink is not None else None
        if error is not None:
            self.tell_once(
                "the writer's first error",
                f"a step could not be written to {str(self._path)!r} ({type(error).__name__}: {error}); training goes "
                "on, later steps are tried again, what is lost is counted",
            )

    def raise_if_strict(self, sink: TraceSink | None) -> None:
        """With `strict=True` a lost step ends training."""
        if self._strict and sink is not None and (sink.first_error is not None or sink.dropped):
            error = sink.first_error
            why = f"{type(error).__name__}: {error}" if error is not None else f"{sink.dropped} steps were dropped"
            raise GradreelError(
                f"recording to {str(self._path)!r} failed ({why}); strict=True ends training here"
            ) from error


def _to_stderr(message: str) -> None:
    print(f"gradreel: {message}", file=sys.stderr, flush=True)
