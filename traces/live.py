"""The StepViews of a live step, for metrics without a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from traces.layouts import MoELayer
from traces.records import Job, plain_scalar, routing_records, routing_step
from traces.spool import presence_codes, raw_tensor
from traces.views import NONE, ParamInfo, StepView


def live_views(
    job: Job,
    infos: Mapping[str, ParamInfo],
    parameters: Mapping[str, nn.Parameter],
    gradients: Mapping[str, Tensor | None],
    layers: Sequence[MoELayer],
    rates: Mapping[str, Any],
) -> list[StepView]:
    """One view per MoE layer with routing, then one per parameter. Tensors are the model's own, before the update."""
    records = routing_records(job.micro_steps, layers)
    routings = {layer.layer: found for layer in layers if (found := routing_step(job.step, records, layer)) is not None}
    scalars = {key: plain_scalar(value) for key, value in job.scalars.items()}
    views = [StepView(job.step, layer=number, routing=routing, scalars=scalars) for number, routing in routings.items()]
    for name, gradient in gradients.items():
        info = infos[name]
        routing = routings.get(info.layer) if info.layer is not None and info.role == "routed_expert" else None
        counts = None if routing is None else routing.tokens_per_expert
        if gradient is not None and gradient.shape != info.shape and gradient.numel() == info.numel:
            gradient = gradient.reshape(info.shape)  # fused experts [E * F, H] as [E, F, H]
        weight = parameters[name].detach()
        views.append(
            StepView(
                job.step,
                param=info,
                layer=info.layer,
                gradient=gradient,
                presence=_presence(info, gradient),
                weight=weight.view(info.shape) if weight.numel() == info.numel else weight,
                lr=plain_scalar(rates.get(name)),
                tokens_per_expert=counts if counts is None else counts[: info.num_experts],
                routing=None,
                scalars=scalars,
            )
        )
    return views


def _presence(info: ParamInfo, gradient: Tensor | None) -> np.ndarray:
    num_experts = info.num_experts if info.expert_axis is not None else None
    if gradient is None:
        return np.full(() if num_experts is None else (num_experts,), NONE, np.uint8)
    if info.expert_axis:
        gradient = gradient.movedim(info.expert_axis, 0)
    raw = raw_tensor(gradient.detach().cpu().contiguous())
    return presence_codes(raw.data, raw.dtype, num_experts)
