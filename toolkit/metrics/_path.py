"""The way a weight goes: where it started, how far it walked, how far it got.

W_0 is the view's `initial_weight`, else a copy of the first weight seen. A step moves from W_t (`weight`) to
W_t + delta. Experts never recorded stay NaN, those whose weight stopped being finite are inf from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from toolkit.metrics._experts import common_rows, expert_ids, norm, norm_of_sum, nothing_known, owned, size_of_sum, wide
from toolkit.metrics._metric import Subject
from traces.views import StepView


@dataclass
class Path:
    """`length` [E] = summed ||delta||, `steps` [E] behind it, `reached` [E] = ||W - W_0|| after the last step."""

    length: np.ndarray
    steps: np.ndarray
    reached: np.ndarray
    start: Tensor | None = None
    start_experts: np.ndarray | None = None

    @classmethod
    def start_of(cls, subject: Subject) -> Path:
        """Not yet moved."""
        empty = np.zeros(subject.experts)
        return cls(empty, empty.copy(), np.full(subject.experts, np.nan))

    def walk(self, view: StepView) -> None:
        """Add one step to the length; a parameter that was not stepped (no delta) stays where it is."""
        moved = norm(view, "delta")
        known = ~np.isnan(moved)
        self.length[known] += moved[known]
        self.steps += known

    def reach(self, view: StepView) -> np.ndarray:
        """||W_{t+1} - W_0|| [E] after this step, kept as `reached`."""
        terms = [(1.0, "weight")] if view.delta is None else [(1.0, "weight"), (1.0, "delta")]
        if view.initial_weight is not None:
            now = norm_of_sum(view, *terms, (-1.0, "initial_weight"))
        else:
            now = self._from_first_seen(view)
        self.reached = np.where(np.isnan(now), self.reached, now)
        return now

    def _from_first_seen(self, view: StepView) -> np.ndarray:
        """The same against the weights of the experts recorded at the first step; others stay NaN."""
        weight, delta, ids = wide(view, "weight"), wide(view, "delta"), expert_ids(view)
        if weight is None:
            return nothing_known(view)
        if self.start is None:
            self.start, self.start_experts = owned(view, "weight"), ids
        assert self.start is not None
        here, there, common = common_rows(ids, self.start_experts, len(self.steps))
        terms = [weight[here], self.start[there]] if delta is None else [weight[here], self.start[there], delta[here]]
        out = nothing_known(view)
        out[common] = size_of_sum((1.0, -1.0, 1.0)[: len(terms)], terms)
        return out
