"""Sharded parameters (DTensor, FSDP2): what a rank may step on its own, and what it must gather first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from toolkit.recipes import Recipe
from toolkit.recipes._stepper import couples_experts, is_elementwise
from traces.errors import GradreelError
from traces.views import ParamInfo


class Shard:
    """How one DTensor parameter is stepped.

    `gathered`: weight and gradient are gathered and every rank takes the whole step (its state is whole too);
    otherwise the rank steps its own rows, whose first element has the index `first_element`.
    """

    def __init__(self, parameter: Any, info: ParamInfo, recipe: Recipe) -> None:
        axes = {p.dim for p in parameter.placements if p.is_shard()}
        if any(p.is_partial() for p in parameter.placements):
            raise GradreelError(f"{info.name}: placement {parameter.placements}; allowed: Shard and Replicate")
        chain = recipe.chain_for(info)
        alone = is_elementwise(chain)
        # Elements and experts are counted along axis 0; shards of another expert axis are gathered.
        by_expert = info.expert_axis == 0 and not any(couples_experts(stage) for stage in chain)
        # Random numbers follow the order of rows and columns: a shard of a transposed matrix is no run of them.
        last = (len(info.shape) - 2, len(info.shape) - 1)
        plain = info.matrix_axes is None or tuple(axis % len(info.shape) for axis in info.matrix_axes) == last
        by_row = alone and plain and info.expert_axis in (None, 0)
        self.gathered = bool(axes) and not (axes <= {0} and (by_expert or by_row))
        self.first_element, self.first_expert, self.info = 0, 0, info
        if axes and not self.gathered:
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            row = info.numel // info.shape[0] if info.shape[0] else 0
            self.first_element = int(offset[0]) * row
            experts = shape[0] if info.expert_axis == 0 else info.num_experts
            self.first_expert = int(offset[0]) if info.expert_axis == 0 else 0
            self.info = replace(info, shape=tuple(shape), num_experts=experts, strides=None)

    def own_experts(self, counts: Tensor) -> Tensor:
        """Of one count per expert those of the experts this rank steps."""
        if self.info.expert_axis != 0:
            return counts
        return counts[self.first_expert : self.first_expert + self.info.shape[0]]

    def whole(self, tensor: Any) -> Tensor:
        """What the stepper works on: the gathered tensor or the local one."""
        return tensor.full_tensor() if self.gathered else tensor.to_local()

    def write_back(self, parameter: Any, weight: Tensor) -> None:
        """Store a gathered weight after its step; a local one was changed in place."""
        if not self.gathered:
            return
        from torch.distributed.tensor import distribute_tensor

        mine = distribute_tensor(weight, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(mine.to_local())
