"""Lightning: automatic optimization with its closures, a recipe as optimizer, the recorder as callback."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
from torch import Tensor
from torch.utils.data import DataLoader

from ablations.examples._small import batches, small_model
from toolkit.optim import clip_fresh_gradients, make_optimizer
from traces.integrations.lightning import RecorderCallback


class Task(lightning.LightningModule):
    """A language model under a recipe; clips this step's gradient, not the momentum that backward adds it onto."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.model, self.recipe = small_model(), recipe
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, self.recipe, lr=3e-3)
        optimizer.track_fresh_gradients()
        return optimizer

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        clip_fresh_gradients(getattr(optimizer, "optimizer", optimizer), 1.0)


def main(path: str | Path, steps: int = 8, recipe: str = "mesh") -> list[float]:
    """Train, record into `path`, return the losses."""
    task = Task(recipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[RecorderCallback(path)],
        )
        data: Any = batches(steps)
        trainer.fit(task, DataLoader(data, batch_size=None))
    return task.losses


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "lightning_fit.trace"))
