"""Accelerate: the loop it documents, with accumulation and clipping, a recipe as optimizer, and the recorder."""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate import Accelerator

from ablations.examples._small import batches, small_model
from toolkit.optim import make_optimizer
from traces import Recorder


def main(path: str | Path, steps: int = 8, recipe: str = "mesh") -> list[float]:
    """Train, record into `path`, return the losses of every second batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = small_model()
    # `clip_grad_norm_` below rewrites `.grad`, so momentum is kept apart from it.
    optimizer = make_optimizer(model, recipe, lr=3e-3, hidden_momentum="apart")
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    with Recorder(path, model, optimizer) as reel:
        for batch in batches(2 * steps):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    reel.log(loss=loss)
                    losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "accelerate_loop.trace"))
