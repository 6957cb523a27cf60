"""Record a run of the Hugging Face `Trainer`.

trainer = Trainer(model, args, train_dataset=..., callbacks=[RecorderCallback("run.trace")])
trainer.train()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from traces.integrations._reel import Reel


class RecorderCallback(TrainerCallback):
    """Records from the first to the last step of `train()`. `options` are those of `traces.Recorder`.

    What the Trainer logs is kept as scalars. Where training ends in an exception, `close()` seals what is still in
    memory; all sealed steps are readable without it.
    """

    def __init__(self, path: str | Path | None, **options: Any) -> None:
        self._reel = Reel(path, options)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """The Trainer has built model and optimizer."""
        self._reel.begin(model, optimizer)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Loss, learning rate and whatever else the Trainer tells."""
        self._reel.log(logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is over."""
        self._reel.end()

    def close(self) -> None:
        """End the recording now."""
        self._reel.end()
