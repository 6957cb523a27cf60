"""The sample of experts where each process holds some of them only: each draws among its own.

Legend: E experts of a layer, e those held here, n recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from traces.expert_sample import ExpertSample, Place, load_of
from traces.hooks import MicroStep
from traces.layouts import MoELayer
from traces.record_at import RecordAt
from traces.sharing import Sharing
from traces.views import ParamInfo


class PartSample(ExpertSample):
    """A sample of n of E becomes n * e / E of the experts held here, ranked by the load this process's tokens give.

    Ids are positions among the own experts. Where an expert's matrix itself is cut, every process must keep the same
    experts: the sample is then spread over the ids, without a load.
    """

    def __init__(self, at: RecordAt, layers: Sequence[MoELayer], device: torch.device, sharing: Sharing) -> None:
        super().__init__(at, layers, device)
        self._own: dict[str, np.ndarray] = {}
        self._cut: set[str] = set()
        self._whole = {info.name: info for info in sharing.params}
        for name, part in sharing.parts.items():
            axis = self._whole[name].expert_axis
            if axis is not None and part.splits(axis):
                self._own[name] = part.indices(axis)
            if axis is not None and (part.is_flat or set(part.runs) != {axis}):
                self._cut.add(name)
        self._loads: dict[int, Tensor] = {}
        self._mine: dict[Place, Tensor | None] = {}

    def begin(self, step: int, micro_steps: Sequence[MicroStep]) -> None:
        """A recorded step begins: draw where a draw is due."""
        if not self.thins or (self._loads and not (self.at.resample and self.at.starts_burst(step))):
            return
        super().begin(step, micro_steps)
        self._loads = {n: load_of(micro_steps, layer, self._device) for n, layer in self._layers.items()}
        self._mine = {}

    def ids(self, info: ParamInfo) -> Tensor | None:
        """Positions of the recorded experts among those held here, int64 [n] increasing; None for all."""
        if info.name not in self._own and info.name not in self._cut:
            return super().ids(info)
        place = self.place(info)
        if place is None:  # a stretch of a flattened stack is recorded as it is
            return None
        if place not in self._mine:
            self._mine[place] = self._draw(info)
        return self._mine[place]

    def _draw(self, info: ParamInfo) -> Tensor | None:
        total = self._whole[info.name].num_experts or 0
        own = self._own.get(info.name, np.arange(total))
        if isinstance(self.at.experts, tuple):
            kept = np.flatnonzero(np.isin(own, self.at.experts))
            return None if len(kept) == len(own) else torch.from_numpy(kept).to(self._device)
        if not isinstance(self.at.experts, int) or not len(own):
            return None
        count = max(1, round(self.at.experts * len(own) / total))
        if count >= len(own):
            return None
        places = torch.from_numpy(np.linspace(0, len(own) - 1, count).round().astype(np.int64)).to(self._device)
        load = self._loads.get(-1 if info.layer is None else info.layer)
        if info.name in self._cut or load is None or len(load) < total:
            return places
        order = torch.argsort(load[torch.from_numpy(own).to(self._device)], stable=True)
        return order[places].sort().values
