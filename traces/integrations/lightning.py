"""Record a run of Lightning's `Trainer`.

trainer = lightning.Trainer(callbacks=[RecorderCallback("run.trace", module=lambda task: task.model)])
trainer.fit(task, data)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch import nn

from traces.integrations._reel import Reel


class RecorderCallback(Callback):
    """Records from the first to the last step of `fit()`. `options` are those of `traces.Recorder`.

    `module` finds, in the LightningModule, the module whose forward a training step calls (default: the only child,
    the LightningModule itself where there are several). Scalars that the training step returns or logs are not seen;
    give them to `recorder.log`.
    """

    def __init__(
        self, path: str | Path | None, *, module: Callable[[Any], nn.Module] | None = None, **options: Any
    ) -> None:
        self._reel, self._module = Reel(path, options), module or _only_child

    @property
    def recorder(self) -> Any:
        """The Recorder at work, None outside of `fit()`."""
        return self._reel.recorder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has built model and optimizers."""
        self._reel.begin(self._module(pl_module), list(trainer.optimizers))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over."""
        self._reel.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training failed: keep what was recorded."""
        self._reel.end(exception)


def _only_child(task: nn.Module) -> nn.Module:
    children = list(task.children())
    return children[0] if len(children) == 1 else task
