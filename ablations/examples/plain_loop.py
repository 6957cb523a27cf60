"""A loop of one's own: MESH with clipping of this step's gradient, recorded."""

from __future__ import annotations

import sys
from pathlib import Path

from ablations.examples._small import batches, small_model
from toolkit.optim import clip_fresh_gradients, make_optimizer
from traces import RecordAt, Recorder


def main(path: str | Path, steps: int = 8) -> list[float]:
    """Train, record into `path`, return the losses."""
    model = small_model()
    optimizer = make_optimizer(model, "mesh", lr=3e-3)
    optimizer.track_fresh_gradients()  # so that clipping below finds this step's gradient beside the momentum
    losses = []
    with Recorder(path, model, optimizer, at=RecordAt()) as reel:
        for batch in batches(steps):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            norm = clip_fresh_gradients(optimizer, 1.0)  # never torch's clip_grad_norm_: it does not see the experts
            reel.log(loss=loss, grad_norm=norm)
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "plain_loop.trace"))
