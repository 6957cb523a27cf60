"""How many bytes a recording takes: per step, per 1000 steps, and whether the next step still fits the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traces.hooks import MicroStep
from traces.layouts import MoELayer
from traces.record_at import RecordAt, format_bytes
from traces.schema import LayerInfo
from traces.views import ParamInfo


class Plan:
    """Sizes of one recording, exact but for the compression of the routing."""

    def __init__(self, at: RecordAt, infos: Sequence[ParamInfo], layers: Sequence[MoELayer]) -> None:
        self.at, self._infos, self._layers = at, list(infos), list(layers)
        self.tokens = 0
        self.snapshot_bytes = at.snapshot_bytes(self._infos)
        self.step_bytes = at.step_bytes(self._infos, self.layer_infos(), 0)

    def layer_infos(self) -> tuple[LayerInfo, ...]:
        """The MoE layers as the header lists them; K is what was seen, or declared, or 1."""
        return tuple(
            LayerInfo(layer.layer, layer.block_name or layer.experts_name, layer.num_experts, layer.top_k or 1)
            for layer in self._layers
        )

    def check_room(self) -> None:
        """Refuse a budget in which not even one step fits."""
        self.at.check_budget(self._infos, self.layer_infos(), self.tokens)

    def learn(self, micro_steps: Sequence[MicroStep]) -> None:
        """Take the number of tokens and of executed slots from the first step."""
        for layer in self._layers:
            for micro in micro_steps:
                capture = micro.capture(layer)
                if capture is not None and capture.topk_expert_ids is not None:
                    layer.top_k = max(int(capture.topk_expert_ids.shape[1]), layer.top_k or 0)
        self.tokens = sum(micro.tokens for micro in micro_steps)
        self.step_bytes = self.at.step_bytes(self._infos, self.layer_infos(), self.tokens)

    def has_room(self, used_bytes: int, step_bytes: int) -> bool:
        """Whether a step of `step_bytes` and the closing snapshot still fit."""
        budget = self.at.budget_bytes
        return budget is None or used_bytes + step_bytes + self.snapshot_bytes <= budget

    def sentence(self, path: Path | None) -> str:
        """The plan in one line, for people."""
        at, budget = self.at, self.at.budget_bytes
        when = "every step" if at.every == 1 else f"one step of {at.every}"
        if at.bursts:
            when = f"{at.bursts[0]} steps of each {at.bursts[1]}"
        limit = "no budget"
        if budget is not None:
            steps = max(0, budget - 2 * self.snapshot_bytes) // self.step_bytes
            limit = f"the budget of {format_bytes(budget)} holds about {steps} of them"
        thousand = at.estimate(self._infos, self.layer_infos(), self.tokens, 1000)
        return (
            f"recording {when}, {len(self._infos)} parameters and {len(self._layers)} MoE layers, to {path}: "
            f"{format_bytes(self.step_bytes)} a recorded step, {format_bytes(thousand)} per 1000 steps; {limit}"
        )
