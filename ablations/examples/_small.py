"""The small model and the batches that the examples share."""

from __future__ import annotations

import torch
from torch import Tensor

from ablations.data.corpus import stdlib_corpus
from ablations.models import MoEConfig, MoELanguageModel

BATCH, LENGTH = 4, 32


def small_model(seed: int = 0) -> MoELanguageModel:
    """One dense block and one of 4 experts, over bytes."""
    torch.manual_seed(seed)
    return MoELanguageModel(
        MoEConfig(
            vocab_size=256,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            max_positions=64,
            dense_hidden=32,
            expert_hidden=16,
            num_experts=4,
            top_k=2,
            moe_layers=(1,),
        )
    )


def batches(steps: int) -> list[dict[str, Tensor]]:
    """`steps` batches of the offline corpus: input_ids and labels, int64 [4, 32]."""
    corpus = stdlib_corpus()
    return [corpus.batch(0, step, BATCH, LENGTH, 0) for step in range(1, steps + 1)]
