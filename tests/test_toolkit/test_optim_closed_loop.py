"""Every recipe trains the demo's model at its listed default rate.

The defaults were kept or set by this run (seed 0, 100 steps of 4 x 128 tokens, warm-up 10, cosine, clip 1; drop of the
validation loss relative to AdamW's 5.39 -> 2.95): sgd 0.88 at 0.1 (0.10 at torch's 0.001), skewadam 0.85 (paper_exact
0.81), sinkgd 1.07, mesh 1.06, mesh_b 1.10, sage_sinkhorn 1.10, normalise_then_momentum 1.04, sink_v 1.04, muon 1.11,
lion 0.52, adafactor 1.06, galore 1.01, apollo 1.02, mesh_full_state 1.06 (adam 1.12). They are smoke rates, not tuned
ones: one seed, no grid.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from ablations.data.corpus import stdlib_corpus
from ablations.models import MoELanguageModel
from ablations.presets.demo import ABLATION
from ablations.train import Schedule, evaluate, train
from toolkit.optim import make_optimizer
from toolkit.recipes import RECIPES

STEPS, BATCH, LENGTH = 100, 4, 128


@cache
def drop(name: str) -> float:
    """By how much the validation loss falls, nats per byte."""
    corpus = stdlib_corpus()
    torch.manual_seed(0)
    model = MoELanguageModel(ABLATION.model)
    held_out = corpus.valid_batches(4, BATCH, LENGTH)
    before = evaluate(model, held_out)
    result = train(
        model,
        make_optimizer(model, name),
        lambda step, micro_step: corpus.batch(0, step, BATCH, LENGTH, micro_step),
        STEPS,
        schedule=Schedule(STEPS, 10),
    )
    assert result.diverged_at is None
    return before - evaluate(model, held_out)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in RECIPES.names() if n != "adamw"])
def test_default_rate_trains(name: str) -> None:
    assert drop(name) >= 0.25 * drop("adamw")
