"""What a metric is: a bounded accumulator over a stream of views.

A metric declares what it needs; the engine (replay, a live run, an ablation) feeds it views in step order and turns
what it yields into rows of the Frame. It never sees files, optimizers or plots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from traces.views import ParamInfo, StepView

Scope = Literal["parameter", "layer", "run"]
Group = Literal["load", "routing", "gradient", "update", "trajectory", "cost"]

#: What a metric may need. The first block comes from the trace, the second from an optimizer at work.
TRACE_NEEDS = ("gradient", "routing", "presence", "scores", "logits", "micro_norms", "probe", "scalars")
RECIPE_NEEDS = ("weight", "update", "delta", "reference", "cost")


@dataclass(frozen=True, slots=True)
class Subject:
    """What one accumulator watches: a parameter (scope parameter), a layer (scope layer), or the run.

    `experts` is the number E of values per step (1 for a parameter without an expert axis); `lags` are the metric's
    lags, possibly overridden by the caller. `cost` holds `state_bytes` and the like for the cost group.
    """

    param: ParamInfo | None
    layer: int | None
    experts: int
    lags: tuple[int, ...]
    cost: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Measure:
    """One value, or one per expert, that a metric yields.

    `value` is a float, or float64 [E] with NaN meaning undefined (written as null). `step` None means "over the whole
    recording". `support` says how much data stands behind the value (elements, pairs or steps), scalar or [E].
    """

    value: float | np.ndarray
    step: int | None = None
    lag: int | None = None
    support: float | np.ndarray | None = None
    flag: str = ""


@dataclass(frozen=True)
class Metric:
    """What a metric file exports as `METRIC`.

    `init(subject) -> state`; `update(state, view) -> iterable of Measure or None`, called in step order;
    `result(state) -> iterable of Measure`, called once at the end. State is bounded: it may grow with the number of
    lags, not with the number of steps. `unit` is `1` for pure numbers. `formula` and `citation` feed the dictionary.
    """

    name: str
    group: Group
    needs: tuple[str, ...]
    scope: Scope
    unit: str
    formula: str
    citation: str
    init: Callable[[Subject], Any]
    update: Callable[[Any, StepView], Iterable[Measure] | None]
    result: Callable[[Any], Iterable[Measure]]
    lags: tuple[int, ...] = ()
    doc: str = ""

    @property
    def per_recipe(self) -> bool:
        """Whether the value depends on the recipe replayed, or on the trace alone."""
        return any(need in RECIPE_NEEDS for need in self.needs)


def nothing(state: Any) -> Iterable[Measure]:
    """A `result` for metrics that report step by step."""
    return ()
