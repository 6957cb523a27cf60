"""Pairs of steps a fixed distance apart, shared by every metric with lags.

A ring keeps the last max(lags) tensors of **consecutive** steps. A step that does not follow the last one empties it:
across the gap between two bursts no pair exists. A pair counts for an expert only if both of its tensors are recorded
and not zero (an idle step has no direction); pairs with NaN or Inf are left out of the mean and reported as nonfinite
where nothing else is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from toolkit.metrics._experts import (
    common_rows,
    cosine,
    expert_ids,
    experts_of,
    flat,
    info_of,
    inner,
    norm,
    nothing_known,
    owned,
    wide,
)
from toolkit.metrics._metric import Measure, Subject
from traces.views import StepView

T = TypeVar("T")
LAGS = (1, 2, 4, 8)
Functions = tuple[
    Callable[[Subject], Any], Callable[[Any, StepView], Iterable[Measure]], Callable[[Any], Iterable[Measure]]
]


class Ring(Generic[T]):
    """The last `depth` items of consecutive steps."""

    def __init__(self, depth: int) -> None:
        self.items: deque[T] = deque(maxlen=depth)
        self.last: int | None = None

    def follow(self, step: int) -> None:
        """Say that `step` comes next; forget everything unless it follows the last one."""
        if self.last is not None and step != self.last + 1:
            self.items.clear()
        self.last = step

    def back(self, lag: int) -> T | None:
        """The item `lag` steps before the current one; None where there is none."""
        return self.items[-lag] if lag <= len(self.items) else None

    def keep(self, item: T) -> None:
        """Add the current step's item."""
        self.items.append(item)


@dataclass
class PairSums:
    """Per lag: summed values and weights [E] over the good pairs, and the number of pairs that were not finite."""

    subject: Subject
    ring: Ring[Any]
    total: dict[int, np.ndarray] = field(default_factory=dict)
    weight: dict[int, np.ndarray] = field(default_factory=dict)
    broken: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def start(cls, subject: Subject) -> PairSums:
        """Zero sums for every lag of the subject."""
        state = cls(subject, Ring(max(subject.lags)))
        for lag in subject.lags:
            state.total[lag], state.weight[lag], state.broken[lag] = (np.zeros(subject.experts) for _ in range(3))
        return state

    @classmethod
    def start_single(cls, subject: Subject) -> PairSums:
        """Zero sums for a metric with one value per pair, not one per expert."""
        return cls.start(replace(subject, experts=1))

    def add(self, lag: int, value: np.ndarray, weight: np.ndarray) -> None:
        """Add value * weight [E] where the value is finite; count where it is inf; skip where it is NaN."""
        good = np.isfinite(value)
        self.total[lag][good] += value[good] * weight[good]
        self.weight[lag][good] += weight[good]
        self.broken[lag] += np.isinf(value)

    def means(self) -> Iterable[Measure]:
        """One measure per lag over the whole recording; support is the summed weight."""
        for lag in self.subject.lags:
            weight = self.weight[lag]
            value = np.where(self.broken[lag] > 0, np.inf, np.nan)
            np.divide(self.total[lag], weight, out=value, where=weight > 0)
            yield Measure(value, None, lag, weight.copy())

    def single_means(self) -> Iterable[Measure]:
        """`means` of a metric with one value per pair."""
        for measure in self.means():
            value, support = np.asarray(measure.value), np.asarray(measure.support, dtype=np.float64)
            yield Measure(float(value[0]), None, measure.lag, float(support[0]))


@dataclass(frozen=True, slots=True)
class _Direction:
    """A kept tensor [e, L] with the norms [E] it has."""

    tensor: Tensor
    norms: np.ndarray
    experts: np.ndarray | None


def lagged_cos(field_name: str) -> Functions:
    """init, update and result of the mean cosine between the tensors `field_name` of two steps a lag apart.

    Memory: max(lags) copies of the tensor in its own dtype.
    """

    def update(state: PairSums, view: StepView) -> Iterable[Measure]:
        state.ring.follow(view.step)
        norms = norm(view, field_name)
        now = wide(view, field_name)
        for lag in state.subject.lags:
            value = np.full(state.subject.experts, np.nan)
            before: _Direction | None = state.ring.back(lag)
            if before is not None and now is not None:
                product = _product(view, now, before)
                value = cosine(product, norms, before.norms)
            state.add(lag, value, np.ones_like(value))
            if lag == state.subject.lags[0]:
                yield Measure(value, view.step, lag, np.isfinite(value).astype(np.float64))
        kept = owned(view, field_name)
        state.ring.keep(None if kept is None else _Direction(kept, norms, expert_ids(view)))

    return PairSums.start, update, PairSums.means


def _product(view: StepView, now: Tensor, before: _Direction) -> np.ndarray:
    """Inner products [E] with an earlier tensor; experts recorded at one step only are NaN."""
    mine, theirs, common = common_rows(expert_ids(view), before.experts, experts_of(info_of(view)))
    out = nothing_known(view)
    out[common] = inner(now[mine], before.tensor[theirs])
    return out


def lagged_flips(field_name: str) -> Functions:
    """init, update and result of the share of elements whose sign differs between two steps a lag apart.

    Elements that are zero at either step do not count; support is the number of elements compared. Memory: max(lags)
    times two bits per element.
    """

    def update(state: PairSums, view: StepView) -> Iterable[Measure]:
        state.ring.follow(view.step)
        now = _signs(view, field_name)
        for lag in state.subject.lags:
            before: _Signs | None = state.ring.back(lag)
            value = np.full(state.subject.experts, np.nan)
            compared = np.zeros(state.subject.experts)
            if before is not None and now is not None:
                value, compared = _flip_rate(now, before, state.subject.experts)
            state.add(lag, value, compared)
            if lag == state.subject.lags[0]:
                yield Measure(value, view.step, lag, compared)
        state.ring.keep(now)

    return PairSums.start, update, PairSums.means


@dataclass(frozen=True, slots=True)
class _Signs:
    """Positive and negative elements as bits, uint8 [e, ceil(L/8)], padded to whole 64-bit words."""

    positive: np.ndarray
    negative: np.ndarray
    norms: np.ndarray
    experts: np.ndarray | None


def _signs(view: StepView, field_name: str) -> _Signs | None:
    tensor = flat(view, field_name)
    if tensor is None:
        return None
    return _Signs(_bits(tensor > 0), _bits(tensor < 0), norm(view, field_name), expert_ids(view))


def _bits(mask: Tensor) -> np.ndarray:
    packed = np.packbits(mask.cpu().numpy(), axis=1)
    spare = -packed.shape[1] % 8
    return np.pad(packed, ((0, 0), (0, spare))).view(np.uint64) if spare else packed.view(np.uint64)


def _flip_rate(now: _Signs, before: _Signs, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """(share of flipped signs, elements compared), both [E]."""
    mine, theirs, common = common_rows(now.experts, before.experts, experts)
    p, n, q, m = now.positive[mine], now.negative[mine], before.positive[theirs], before.negative[theirs]
    flipped = np.bitwise_count((p & m) | (n & q)).sum(axis=1, dtype=np.int64)
    both = np.bitwise_count((p | n) & (q | m)).sum(axis=1, dtype=np.int64).astype(np.float64)
    value, compared = np.full(experts, np.nan), np.zeros(experts)
    rate = np.full(len(both), np.nan)
    np.divide(flipped, both, out=rate, where=both > 0)
    broken = np.isinf(now.norms[common]) | np.isinf(before.norms[common])
    value[common], compared[common] = np.where(broken, np.inf, rate), np.where(broken, 0.0, both)
    return value, compared
