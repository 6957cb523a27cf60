"""Learning rates of a replay: the shape of the recorded schedule, the height of the recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from traces.errors import GradreelError, unknown

#: A larger rate only overflows float32.
MOST = 1e30
#: What a caller may give per recipe: a base rate, "recorded" (the recorded rate itself), or a function of the step.
LrRule = float | str | Callable[[int], float]


@dataclass
class RecordedLr:
    """The recorded rates, by parameter and step. `lookup(step, param)` is None where none was recorded."""

    lookup: Callable[[int, str], float | None]
    all_steps: tuple[int, ...]
    group_of: Mapping[str, Any]
    _peaks: dict[Any, float | None] = field(default_factory=dict)

    def at(self, step: int, param: str) -> float | None:
        """The rate of `param`'s group in `step`."""
        return self.lookup(step, param)

    def peak(self, param: str) -> float | None:
        """The largest rate of `param`'s group over every step seen, recorded or not."""
        key = self.group_of.get(param, param)
        if key not in self._peaks:
            rates = [rate for step in self.all_steps if (rate := self.lookup(step, param)) is not None]
            self._peaks[key] = max(rates, default=None)
        return self._peaks[key]

    def shape(self, step: int, param: str) -> float | None:
        """Recorded rate over recorded peak, in [0, 1]; None where no rate, or only zero, was recorded."""
        rate, peak = self.at(step, param), self.peak(param)
        return rate / peak if rate is not None and peak else None


def check_rule(label: str, rule: Any) -> LrRule:
    """`rule` if it is one; a GradreelError with the value and what is allowed otherwise."""
    if callable(rule) or rule == "recorded":
        return rule
    try:
        rate = float(rule)
    except (TypeError, ValueError):
        raise GradreelError(f"lr of {label} is {rule!r}; allowed: a number >= 0, or 'recorded'") from None
    if not 0 <= rate <= MOST:
        raise GradreelError(f"lr of {label} is {rate}; allowed: [0, {MOST:g}]")
    return rate


def rules_for(labels: list[str], lr: Mapping[str, Any] | float | str | None) -> dict[str, LrRule]:
    """The caller's `lr` argument as one rule per recipe; recipes without one are left out."""
    if lr is None:
        return {}
    if not isinstance(lr, Mapping):
        return {label: check_rule(label, lr) for label in labels}
    for label in lr:
        if label not in labels:
            raise unknown("recipe in lr", label, labels)
    return {label: check_rule(label, rule) for label, rule in lr.items()}


def rate_at(rule: LrRule, recorded: RecordedLr, step: int, param: str) -> float:
    """The base rate of one recipe in one step, before its chain's own scale."""
    if callable(rule):
        return float(rule(step))
    if isinstance(rule, str):
        rate = recorded.at(step, param)
        if rate is None:
            raise GradreelError(f"no lr was recorded for {param} at step {step}; give a number instead of 'recorded'")
        return rate
    shape = recorded.shape(step, param)
    return rule if shape is None else rule * shape
