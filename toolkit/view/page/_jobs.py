"""What takes long runs on a thread of its own; the page asks how far it is."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import polars as pl

from toolkit.view.page._content import GRADIENT, UPDATE, Content
from traces.errors import GradreelError


class _Stopped(Exception):
    """The page is closed; the result is not wanted any more."""


class Jobs:
    """One job at a time, in the order asked for; what was asked for already is not done again."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._queue: queue.Queue[tuple[int | None, tuple[str, ...]]] = queue.Queue()
        self._asked: set[tuple[int | None, tuple[str, ...]]] = set()
        self._lock = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.finished = 0
        self.note = ""

    @property
    def busy(self) -> bool:
        """Whether something is being computed or waits."""
        return self._waiting > 0

    def lacks_gradients(self, layer: int | None) -> bool:
        """Whether the gradient measures of a layer are not there, can be computed, and were not asked for."""
        if not self._content.source.recipes or (layer, ()) in self._asked:
            return False
        return not all(self._content.has(layer, metric) for metric in GRADIENT)

    def want_gradients(self, layer: int | None) -> None:
        """Compute the gradient measures of a layer, unless they are there."""
        if self.lacks_gradients(layer):
            self._put(layer, ())

    def want_updates(self, layer: int | None, recipes: Sequence[str]) -> None:
        """Compute the updates of a layer under `recipes`, those that are not there."""
        lacking = [name for name in recipes if not all(self._content.has(layer, m, [name]) for m in UPDATE)]
        if lacking:
            self._put(layer, tuple(lacking))

    def _put(self, layer: int | None, recipes: tuple[str, ...]) -> None:
        with self._lock:
            if (layer, recipes) in self._asked:
                return
            self._asked.add((layer, recipes))
            self._waiting += 1
            self._queue.put((layer, recipes))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="gradreel view")
                self._thread.start()

    def stop(self) -> None:
        """End the work at the next tensor and wait for that: a library must not compute while Python shuts down."""
        self._stopping = True
        if self._thread is not None:
            self._queue.put((None, ()))
            self._thread.join(timeout=60)

    def _work(self) -> None:
        while not self._stopping:
            layer, recipes = self._queue.get()
            if self._stopping:
                return
            try:
                self.note = self._do(layer, recipes)
            except _Stopped:
                return
            with self._lock:
                self._waiting -= 1
                self.finished += 1

    def _do(self, layer: int | None, recipes: tuple[str, ...]) -> str:
        what = f"updates of layer {layer} under {', '.join(recipes)}" if recipes else f"gradients of layer {layer}"
        began, done = time.monotonic(), 0

        def progress(count: int, total: int | None) -> None:
            nonlocal done
            if self._stopping:
                raise _Stopped
            done += count
            share = f"{done / total:.0%}, " if total else ""
            self.note = f"Computing {what}: {share}{time.monotonic() - began:.0f} s"

        progress(0, None)
        source = self._content.source
        try:
            rows = source.updates(layer, recipes, progress) if recipes else source.gradients(layer, progress)
            self._content.add(layer, rows.filter(pl.col("expert").is_not_null()))
        except GradreelError as error:
            return f"Not computed, {what}: {error}"
        except _Stopped:
            raise
        except Exception as error:
            return f"Not computed, {what}: {type(error).__name__}: {error}"
        return f"Computed {what} in {time.monotonic() - began:.1f} s" if rows.height else ""
