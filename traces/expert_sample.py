"""Which experts of each layer are recorded: chosen by load where the ids are, before anything is copied.

Legend: E experts, K top-k, T tokens, n experts recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from traces.hooks import MicroStep
from traces.layouts import MoELayer
from traces.record_at import RecordAt
from traces.views import ParamInfo

Place = tuple[int | None, int]


class ExpertSample:
    """The experts of a `RecordAt`, drawn at the first recorded step, or at each burst with `resample=True`.

    Ids are tensors on the training device, so that a GPU is never waited for.
    """

    def __init__(self, at: RecordAt, layers: Sequence[MoELayer], device: torch.device) -> None:
        self.at, self._device = at, device
        self._layers = {layer.layer: layer for layer in layers}
        self._drawn: dict[Place, Tensor] = {}

    @property
    def thins(self) -> bool:
        """Whether anything less than all experts is recorded."""
        return self.at.experts != "all"

    def begin(self, step: int, micro_steps: Sequence[MicroStep]) -> None:
        """A recorded step begins: draw where a draw is due. Padding and dropped slots are no load."""
        if not self.thins or (self._drawn and not (self.at.resample and self.at.starts_burst(step))):
            return
        self._drawn = {}
        for number, layer in self._layers.items():
            count = layer.num_experts - layer.zero_experts  # those without weights have no gradient
            ids = self._choose(count, load_of(micro_steps, layer, self._device)[:count])
            if ids is not None:
                self._drawn[number, count] = ids

    def ids(self, info: ParamInfo) -> Tensor | None:
        """Ids of the recorded experts of the layer of an expert parameter, int64 [n] increasing; None for all.

        A stack that no layer lists is drawn without a load.
        """
        place = self.place(info)
        if place is None:
            return None
        if place not in self._drawn:
            ids = self._choose(place[1], None)
            if ids is None:
                return None
            self._drawn[place] = ids
        return self._drawn[place]

    def place(self, info: ParamInfo) -> Place | None:
        """Layer and E of an expert parameter of which not all may be recorded; None for any other."""
        if not self.thins or info.role != "routed_expert":
            return None
        if info.expert_axis is not None:
            return (info.layer, info.shape[info.expert_axis])
        if info.expert is not None and info.layer in self._layers:
            return (info.layer, self._layers[info.layer].num_experts - self._layers[info.layer].zero_experts)
        return None

    def leaves_out(self, info: ParamInfo) -> bool:
        """Whether one expert of a list is known to be left out; a GPU is not asked, so the writer asks again."""
        if info.expert is None or info.expert_axis is not None:
            return False
        ids = self.ids(info)
        return ids is not None and ids.device.type == "cpu" and info.expert not in ids.tolist()

    def _choose(self, count: int, load: Tensor | None) -> Tensor | None:
        """`RecordAt.choose_experts` without leaving the device."""
        if isinstance(self.at.experts, tuple):
            fixed = self.at.choose_experts(count)
            return None if fixed is None else torch.from_numpy(fixed).to(self._device)
        if not isinstance(self.at.experts, int) or self.at.experts >= count:
            return None
        places = torch.from_numpy(self.at.places(count)).to(self._device)
        if load is None:
            return places
        order = torch.argsort(load, stable=True)
        return order[places].sort().values


def load_of(micro_steps: Iterable[MicroStep], layer: MoELayer, device: torch.device) -> Tensor:
    """Executed slots of real tokens per expert, int64 [E], all micro-steps together; stays on the device."""
    counts = torch.zeros(layer.num_experts + 1, dtype=torch.int64, device=device)
    for micro in micro_steps:
        capture = micro.capture(layer)
        if capture is None or capture.topk_expert_ids is None:
            continue
        ids = capture.topk_expert_ids.long()
        out = (ids < 0) | (ids >= layer.num_experts)
        mask = micro.mask_of(layer)
        if mask is not None and mask.numel() == len(ids):
            out = out | ~mask.to(device=ids.device, dtype=torch.bool).reshape(-1, 1)
        ids = torch.where(out, layer.num_experts, ids).reshape(-1).to(device)
        counts.scatter_add_(0, ids, torch.ones_like(ids))  # bincount would wait for the device
    return counts[:-1]
