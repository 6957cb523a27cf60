"""From a model's configuration to the model and the way to call it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ablations.models.config import MoEConfig
from ablations.models.huggingface import HuggingFace
from ablations.models.moe import MoELanguageModel, Output
from ablations.train import Call, call_plainly


def build_model(config: MoEConfig | HuggingFace) -> tuple[nn.Module, Call]:
    """The model with weights from torch's global generator, and a function that runs it on a batch of ours."""
    if isinstance(config, HuggingFace):
        return config.build(), call_huggingface
    return MoELanguageModel(config), call_plainly


def call_huggingface(model: nn.Module, batch: dict[str, Tensor]) -> Output:
    """Run a causal language model of transformers on labels that are shifted already.

    Its own loss would shift them once more; its router's losses are left out, so that the loss is the cross-entropy.
    """
    logits: Any = model(input_ids=batch["input_ids"], use_cache=False).logits
    wide = logits.flatten(0, 1).float()
    cross_entropy = F.cross_entropy(wide, batch["labels"].flatten(), ignore_index=-1)
    nothing = cross_entropy.new_zeros(())
    return Output(logits, cross_entropy, cross_entropy, nothing, nothing)
