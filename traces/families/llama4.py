"""Llama 4: no ids anywhere. The router gives sigmoid scores, zero but for the chosen, and every expert runs on all
tokens scaled by them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from traces.families._family import Family


def read(
    router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and scores [T, K] of the scores [T, E] above zero. A chosen score that underflows to zero ran on nothing."""
    scores, logits = output
    best = scores.detach().topk(int(router.top_k), dim=-1)  # type: ignore[arg-type]
    return torch.where(best.values > 0, best.indices, -1), best.values, logits


FAMILY = Family(name="llama4", classes=("Llama4TextExperts",), read=read, transposed=("gate_up_proj", "down_proj"))
