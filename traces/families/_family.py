"""What an adapter says about a family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Family:
    """How the MoE layers of one family differ from the usual layout.

    `classes` names the class of the experts module or of the router. `read(module, args, kwargs, output)` is called
    after the router and returns (topk_expert_ids [T, K], topk_scores [T, K] or None, router_logits [T, E] or None).
    `fused` says that 2-D weights [E * F, H] hold the experts one after another. `transposed` names the weights that
    are stored [in, out] per expert.
    """

    name: str
    classes: tuple[str, ...]
    read: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] | None = None
    fused: bool = False
    transposed: tuple[str, ...] | None = None
