"""Angle by which one step turns each expert's weight."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics._experts import dot
from toolkit.metrics._metric import Measure, Metric, Subject, nothing
from traces.views import StepView


def update(state: Subject, view: StepView) -> Iterable[Measure]:
    """Null for a weight of zero before or after the step, and for a parameter that was not stepped."""
    weight, delta, mixed = dot(view, "weight", "weight"), dot(view, "delta", "delta"), dot(view, "weight", "delta")
    value = turned(weight, delta, mixed)
    yield Measure(value, view.step, support=np.isfinite(value).astype(np.float64))


def turned(weight: np.ndarray, delta: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    """Angle [E] between W and W + D from |W|^2, |D|^2 and <W, D>; an arc cosine would lose the small angles."""
    unknown = np.isnan(weight) | np.isnan(delta) | np.isnan(mixed)
    broken = (np.isinf(weight) | np.isinf(delta) | np.isinf(mixed)) & ~unknown
    after = weight + 2 * mixed + delta
    good = ~unknown & ~broken & (weight > 0) & (after > 0)
    out = np.where(broken, np.inf, np.nan)
    sideways = np.sqrt(np.maximum(weight[good] * delta[good] - mixed[good] ** 2, 0.0))
    out[good] = np.arctan2(sideways, weight[good] + mixed[good])
    return out


METRIC = Metric(
    name="angular_update",
    group="trajectory",
    needs=("weight", "delta"),
    scope="parameter",
    unit="rad",
    formula="angle between W_t and W_{t+1}",
    citation="Kosson, Messmer and Jaggi 2023, arXiv 2305.17212 (angular updates in rotational equilibrium)",
    init=lambda subject: subject,
    update=update,
    result=nothing,
    doc="In [0, pi], from float64 inner products. Support: 1 or 0.",
)
