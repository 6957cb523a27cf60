"""What the callbacks share: one Recorder whose life is that of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from traces.recorder import Recorder


class Reel:
    """Opens a Recorder when training begins and closes it once; `options` are those of `Recorder`."""

    def __init__(self, path: str | Path | None, options: dict[str, Any]) -> None:
        self._path, self._options = path, options
        self.recorder: Recorder | None = None

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Start recording; `optimizer` None, one, or several."""
        if self.recorder is None:
            recorder = Recorder(self._path, model, optimizer, **self._options)
            recorder.__enter__()
            self.recorder = recorder

    def log(self, values: dict[str, Any]) -> None:
        """Keep what is a plain number, with the current step."""
        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        if self.recorder is not None and numbers:
            self.recorder.log(**numbers)

    def end(self, error: BaseException | None = None) -> None:
        """Finish the trace; after an `error` without complaints of its own. A second call does nothing."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.__exit__(None if error is None else type(error), error, None)
