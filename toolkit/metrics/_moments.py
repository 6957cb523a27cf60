"""Mean and scatter of the gradients of one expert over time, by Welford's recurrence.

Only active steps count (presence `nonzero`): an idle step is no draw of the gradient. A step whose gradient of an
expert is not finite is left out for that expert and remembered. Memory: one float64 copy of the parameter; the
recurrence is exact for a constant gradient, where sums of squares would cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.metrics._experts import activity, dot, expert_ids, inner, pieces, wide
from toolkit.metrics._metric import Subject
from traces.views import StepView


@dataclass
class Moments:
    """`count` [E] active steps, `scatter` [E] = sum of ||g_t - mean||^2, `broken` [E]."""

    count: np.ndarray
    scatter: np.ndarray
    broken: np.ndarray
    mean: Tensor | None = None

    @classmethod
    def start(cls, subject: Subject) -> Moments:
        """No step seen."""
        count, scatter, broken = np.zeros((3, subject.experts))
        return cls(count, scatter, broken)

    def add(self, view: StepView) -> None:
        """Take in one step."""
        gradient = wide(view, "gradient")
        active, _ = activity(view)
        size = dot(view, "gradient", "gradient")
        self.broken += active & np.isinf(size)
        use = active & np.isfinite(size)
        if gradient is None or not use.any():
            return
        if self.mean is None:
            self.mean = torch.zeros(len(self.count), gradient.shape[1], dtype=torch.float64, device=gradient.device)
        rows, ids = _rows(use, expert_ids(view))
        everyone = len(ids) == len(self.count) == gradient.shape[0]
        self.count[ids] += 1
        share = torch.as_tensor(1.0 / self.count[ids], device=gradient.device).unsqueeze(1)
        where, take = (torch.as_tensor(index, device=gradient.device) for index in (ids, rows))
        moved = torch.zeros(len(ids), dtype=torch.float64, device=gradient.device)
        for part, mean in pieces(gradient, self.mean):  # the mean is float64 already: its pieces are views
            if everyone:
                step = part - mean
                mean.addcmul_(step, share)
            else:
                step = part[take] - mean[where]
                mean[where] = torch.addcmul(mean[where], step, share)
            moved += torch.linalg.vecdot(step, step)
        self.scatter[ids] += moved.cpu().numpy() * (self.count[ids] - 1) / self.count[ids]

    def squares(self) -> np.ndarray:
        """||mean||^2 [E]; 0 for an expert never active."""
        if self.mean is None:
            return np.zeros(len(self.count))
        return inner(self.mean, self.mean)


def _rows(use: np.ndarray, recorded: np.ndarray | None) -> tuple[Any, np.ndarray]:
    """(positions in the recorded slices, ids) of the experts to use."""
    if recorded is None:
        ids = np.flatnonzero(use)
        return ids, ids
    rows = np.flatnonzero(use[recorded])
    return rows, recorded[rows]
