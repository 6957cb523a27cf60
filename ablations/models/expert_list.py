"""Experts as a list of modules, one per expert, as the SkewAdam study has them: each matrix is a parameter of its own.

It computes what the stacked experts of `moe.py` do. What differs is memory: no temporary is larger than one matrix,
factored state is kept per projection, and an expert without tokens gets no gradient at all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ablations.models.moe import Experts, MoELanguageModel, MoELayer, SwiGLU


class ExpertList(nn.ModuleList):
    """E SwiGLU experts of three matrices each: `gate_proj` and `up_proj` [F, D], `down_proj` [D, F]."""

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """`tokens` [T, D], `indices` int64 [T, K], `weights` [T, K] -> [T, D], the weighted sum of K experts."""
        top_k = indices.shape[1]
        expert_of_slot = indices.flatten()  # slot = token * K + rank
        order = torch.argsort(expert_of_slot, stable=True)
        counts = torch.bincount(expert_of_slot, minlength=len(self)).tolist()
        slots = tokens[order // top_k].split(counts)
        parts = [expert(mine) for expert, mine in zip(self, slots, strict=True) if len(mine)]
        weighted = torch.cat(parts) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // top_k, weighted)


def list_experts(model: MoELanguageModel) -> MoELanguageModel:
    """Turn the stacked experts of `model` into lists, in place, with the same weights; returns `model`."""
    for module in model.modules():
        if isinstance(module, MoELayer) and isinstance(module.experts, Experts):
            stacked = module.experts
            gate, up = stacked.gate_up_proj.detach().chunk(2, dim=1)
            down = stacked.down_proj.detach()
            experts = ExpertList()
            for each in range(len(down)):
                with torch.device("meta"):
                    expert = SwiGLU(model.config, down.shape[2])
                for name, stack in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                    getattr(expert, name).weight = nn.Parameter(stack[each].clone())
                experts.append(expert)
            module.experts = experts  # type: ignore[assignment]
    return model
