"""What flows through the house: one parameter's description, one step's routing, one step of one parameter.

Legend: E experts, K top-k, T tokens, m rows (output features), n columns (input features).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Role = Literal[
    "router",
    "router_bias",
    "routed_expert",
    "shared_expert",
    "embedding",
    "head",
    "norm",
    "attention",
    "dense_ffn",
    "hyper_connection",
    "other",
]
ROLES: tuple[str, ...] = Role.__args__  # type: ignore[attr-defined]

#: Presence codes, uint8, one per expert (or one scalar for a parameter without an expert axis).
NOT_RECORDED, NONE, ZERO, NONZERO = 0, 1, 2, 3
PRESENCE = ("not_recorded", "none", "zero", "nonzero")

STREAMS = (
    "gradient",
    "grad_buffer",
    "weight",
    "routing",
    "scores",
    "logits",
    "statistics",
    "micro_norms",
    "probe",
    "scalars",
)


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """One parameter as the header's table and every stage sees it.

    `expert_axis` is the axis that enumerates experts (None: the parameter holds no stack of experts; a single expert
    of a module list has `expert` set instead). `matrix_axes` are the (row, column) axes of one matrix, rows being
    output features; None for parameters of fewer than two dimensions.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    layer: int | None = None
    expert: int | None = None
    expert_axis: int | None = None
    num_experts: int | None = None
    matrix_axes: tuple[int, int] | None = None
    strides: tuple[int, ...] | None = None
    tied_to: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class RoutingStep:
    """What one MoE layer executed in one optimizer step, all micro-steps joined.

    `topk_expert_ids` is [T, K] int64, -1 where a slot was not executed (dropped); `is_pad` is [T] bool.
    `tokens_per_expert` is [E] int64 and counts executed slots of tokens that are not padding.
    """

    step: int
    layer: int
    num_experts: int
    topk_expert_ids: np.ndarray
    is_pad: np.ndarray
    tokens_per_expert: np.ndarray
    scores: np.ndarray | None = None
    logits: np.ndarray | None = None


@dataclass(slots=True)
class StepView:
    """One step of one parameter (`param` set) or of one layer's routing (`routing` set, `param` None).

    `gradient` is the fresh gradient in the parameter's own layout and recorded dtype, or None where `.grad` was None.
    `weight` is the weight **before** the step. In a replay or a live run with an optimizer, `update` is the direction
    before lr, `delta` the weight change, `reference_update` the update of the replay's reference recipe,
    `initial_weight` the weight before the first step of this recipe. `presence` is uint8 [E] (or a 0-d array);
    `tokens_per_expert` is [E] int64 for expert parameters when routing was recorded. `experts` are the ids of the
    recorded slices, None meaning all, in order. Tensors are lent: a metric that wants one later copies it.
    """

    step: int
    param: ParamInfo | None = None
    layer: int | None = None
    gradient: Tensor | None = None
    presence: np.ndarray | None = None
    weight: Tensor | None = None
    update: Tensor | None = None
    delta: Tensor | None = None
    reference_update: Tensor | None = None
    initial_weight: Tensor | None = None
    reference_weight: Tensor | None = None
    lr: float | None = None
    tokens_per_expert: np.ndarray | None = None
    experts: np.ndarray | None = None
    routing: RoutingStep | None = None
    scalars: dict[str, Any] = field(default_factory=dict)
    micro_norms: np.ndarray | None = None
    micro_tokens: np.ndarray | None = None
    probe: RoutingStep | None = None


StepCallback = Callable[[Iterable[StepView]], None]
