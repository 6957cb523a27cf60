"""The engine: feeds views to metrics and turns what they yield into rows of the Frame.

    engine = MetricEngine(["grad_cos", "update_rms"], available={"gradient", "update", "delta", "weight"})
    for view in ...:
        engine.feed(view)                               # what depends on the trace alone
        for name, view_of_recipe in ...:
            engine.feed(view_of_recipe, recipe=name)    # what depends on the recipe
        writer.write(engine.drain())                    # rows of single steps, as they come
    writer.write(engine.rows())                         # the rest, and what is known only at the end

Metrics of the trace alone are computed once per step, whichever feed comes first; all recipes of a step share one
conversion of the gradient. Each subject (parameter or layer) must be fed in step order; subjects may alternate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolkit.metrics import METRICS
from toolkit.metrics._experts import SharedView, experts_of, shared
from toolkit.metrics._metric import RECIPE_NEEDS, Measure, Metric, Subject
from traces.errors import GradreelError, NotRecorded
from traces.views import StepView

_QUANTILES = ((0.1, "p10"), (0.5, "p50"), (0.9, "p90"))
#: What every trace knows without recording a stream for it.
_ALWAYS = frozenset({"presence", "scalars"})
_FROM_OPTIMIZER = {
    "update": "an optimizer at work; give at least one recipe",
    "delta": "the change of the weights; record the weights (they are by default) and give at least one recipe",
    "reference": "a reference recipe; give at least two recipes",
    "cost": "an optimizer at work; give at least one recipe",
}
Lags = Mapping[str, Sequence[int]] | Sequence[int] | int | None


@dataclass
class _Watch:
    """One metric at work on one subject."""

    metric: Metric
    subject: Subject
    state: Any
    labels: dict[str, Any]
    per_expert: bool
    expert: int | None
    stacked: bool
    last_steps: dict[str, int] = field(default_factory=dict)
    seen: set[int] | None = field(default_factory=set)


class MetricEngine:
    """Metrics over a stream of views.

    `metrics`: names or Metric objects; None means every metric whose needs are met. `lags`: one lag or several for all
    lagged metrics, or a mapping from metric name to lags. `per_expert`: True, or the names of the metrics that get one
    row per expert instead of a summary over experts. `available`: the streams recorded and what the caller offers
    (see `needs` of a metric); given, it is checked here, before any work. `labels`: constant columns (run, arm, seed).

    Raises GradreelError for unknown names and bad lags, NotRecorded where a need is not met.
    """

    def __init__(
        self,
        metrics: Iterable[str | Metric] | None = None,
        lags: Lags = None,
        per_expert: bool | Collection[str] = False,
        *,
        available: Iterable[str] | None = None,
        labels: Mapping[str, Any] | None = None,
    ) -> None:
        self.metrics = _resolve(metrics, available)
        if available is not None:
            check_needs(self.metrics, available)
        self._lags = _lags_by_metric(self.metrics, lags)
        self._per_expert = _per_expert_names(self.metrics, per_expert)
        self._labels = dict(labels or {})
        self._watches: dict[tuple[str, str | None, str], _Watch] = {}
        self._costs: dict[tuple[str | None, str], dict[str, Any]] = {}
        self._buffer: list[dict[str, Any]] = []
        self._gradient_memo: tuple[Any, int, str, dict[Any, Any]] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the metrics computed."""
        return [metric.name for metric in self.metrics]

    @property
    def needs(self) -> set[str]:
        """Everything the metrics need, so that a caller computes no more than that."""
        return {need for metric in self.metrics for need in metric.needs}

    def feed(self, view: StepView, recipe: str | None = None, cost: Mapping[str, Any] | None = None) -> None:
        """Give every metric that applies to `view` its step.

        Without `recipe` and without an update only metrics of the trace alone run. `cost` holds `state_bytes`,
        `pinned_gradient_bytes`, `step_ms` of this recipe on this parameter, as known now.
        """
        at_work = recipe is not None or view.update is not None or view.delta is not None
        subject = _subject_key(view)
        if cost is not None:
            self._costs.setdefault((recipe, subject), {}).update(cost)
        shared_view = self._share(view, subject)
        for metric in self.metrics:
            if not _applies(metric, view) or (metric.per_recipe and not at_work):
                continue
            watch = self._watch(metric, view, recipe if metric.per_recipe else None, subject)
            last = watch.last_steps.get(subject, view.step - 1)
            if view.step == last and not metric.per_recipe:
                continue
            if view.step <= last:
                raise ValueError(f"{metric.name}: step {view.step} of {subject} was fed after step {last}")
            watch.last_steps[subject] = view.step
            if view.experts is None:
                watch.seen = None
            elif watch.seen is not None:
                watch.seen.update(int(i) for i in view.experts)
            for measure in metric.update(watch.state, shared_view) or ():
                self._buffer.extend(_rows(watch, measure, view.experts))

    def drain(self) -> Iterator[dict[str, Any]]:
        """Rows finished since the last call; the metrics go on."""
        rows, self._buffer = self._buffer, []
        return iter(rows)

    def rows(self, subject: str | None = None) -> Iterator[dict[str, Any]]:
        """Rows finished since the last call, then the results over the whole recording; frees the metrics' memory.

        `subject`: end only the metrics of this parameter (its name), once no more views of it will come.
        """
        yield from self.drain()
        for key in [k for k in self._watches if subject is None or k[2] == subject]:
            watch = self._watches.pop(key)
            ids = None if watch.seen is None else np.array(sorted(watch.seen), dtype=np.int64)
            for measure in watch.metric.result(watch.state):
                yield from _rows(watch, measure, ids)

    def _share(self, view: StepView, subject: str) -> SharedView:
        if view.gradient is None:
            return shared(view)
        memo = self._gradient_memo
        if memo is None or memo[0] is not view.gradient or memo[1:3] != (view.step, subject):
            memo = self._gradient_memo = (view.gradient, view.step, subject, {})
        return shared(view, memo[3])

    def _watch(self, metric: Metric, view: StepView, recipe: str | None, subject: str) -> _Watch:
        key = (metric.name, recipe, "run" if metric.scope == "run" else subject)
        if key not in self._watches:
            self._watches[key] = self._start(metric, view, recipe, subject)
        return self._watches[key]

    def _start(self, metric: Metric, view: StepView, recipe: str | None, subject: str) -> _Watch:
        info = view.param if metric.scope == "parameter" else None
        layer = None if metric.scope == "run" else (info.layer if info is not None else view.layer)
        stacked = False
        experts = 1
        if info is not None:
            experts, stacked = experts_of(info), info.expert_axis is not None
        elif metric.scope == "layer":
            routing = view.routing if view.routing is not None else view.probe
            experts, stacked = (routing.num_experts, True) if routing is not None else (1, False)
            layer = routing.layer if layer is None and routing is not None else layer
        cost = self._costs.setdefault((recipe, subject), {})
        watched = Subject(info, layer, experts, self._lags.get(metric.name, ()), cost)
        labels = {
            "run": None,
            "arm": None,
            "seed": None,
            **self._labels,
            "recipe": recipe,
            "step": None,
            "param": None if info is None else info.name,
            "role": None if info is None else info.role,
            "layer": layer,
            "expert": None,
            "metric": metric.name,
            "lag": None,
            "value": None,
            "support": None,
            "flag": "",
            "unit": metric.unit,
        }
        expert = None if info is None else info.expert
        per_expert = metric.name in self._per_expert
        return _Watch(metric, watched, metric.init(watched), labels, per_expert, expert, stacked)


def check_needs(metrics: Iterable[Metric], available: Iterable[str]) -> None:
    """Raise NotRecorded for the first metric whose needs `available` does not meet, naming the stream to record."""
    have = _ALWAYS | set(available)
    for metric in metrics:
        for need in metric.needs:
            if need in have:
                continue
            if need in _FROM_OPTIMIZER:
                raise NotRecorded(f"metric {metric.name} needs {_FROM_OPTIMIZER[need]}, or leave the metric out")
            streams = ", ".join(sorted(have - _ALWAYS - set(RECIPE_NEEDS) | ({"weight"} & have))) or "none"
            raise NotRecorded(
                f"metric {metric.name} needs the stream {need!r}, which was not recorded (recorded: {streams}); "
                f"record it with RecordAt(streams=(..., {need!r})), or leave the metric out"
            )


def _resolve(metrics: Iterable[str | Metric] | None, available: Iterable[str] | None) -> list[Metric]:
    if metrics is None:
        have = None if available is None else _ALWAYS | set(available)
        return [m for m in METRICS.all() if have is None or set(m.needs) <= have]
    if isinstance(metrics, str):
        raise GradreelError(f"metrics is the text {metrics!r}; allowed: a list of names; write [{metrics!r}]")
    found: dict[str, Metric] = {}
    for item in metrics:
        metric = METRICS.get(item) if isinstance(item, str) else item
        if not isinstance(metric, Metric):
            raise GradreelError(f"metric {item!r} is a {type(item).__name__}; allowed: a name or a Metric")
        if found.setdefault(metric.name, metric) is not metric:
            raise GradreelError(f"two metrics are called {metric.name!r}; rename one")
    return list(found.values())


def _lags_by_metric(metrics: Sequence[Metric], lags: Lags) -> dict[str, tuple[int, ...]]:
    lagged = {metric.name: metric.lags for metric in metrics if metric.lags}
    if lags is None:
        return {name: tuple(sorted(set(default))) for name, default in lagged.items()}
    if not isinstance(lags, Mapping):
        valid = _valid_lags("lags", lags)
        return dict.fromkeys(lagged, valid)
    for name in lags:
        if name not in lagged:
            allowed = ", ".join(sorted(lagged)) or "none"
            raise GradreelError(f"lags are given for {name!r}, which is no lagged metric asked for; allowed: {allowed}")
    return {
        name: _valid_lags(f"lags of {name}", lags[name]) if name in lags else tuple(sorted(set(default)))
        for name, default in lagged.items()
    }


def _valid_lags(what: str, lags: Sequence[int] | int) -> tuple[int, ...]:
    items = [lags] if isinstance(lags, int) else list(lags)
    for lag in items:
        if isinstance(lag, bool) or not isinstance(lag, int | np.integer) or lag < 1:
            raise GradreelError(f"{what}: {lag!r} is not a lag; allowed: whole numbers of steps from 1")
    if not items:
        raise GradreelError(f"{what}: empty; allowed: whole numbers of steps from 1, at least one")
    return tuple(sorted({int(lag) for lag in items}))


def _per_expert_names(metrics: Sequence[Metric], per_expert: bool | Collection[str]) -> set[str]:
    names = {metric.name for metric in metrics}
    if isinstance(per_expert, bool):
        return names if per_expert else set()
    wanted = {per_expert} if isinstance(per_expert, str) else set(per_expert)
    for name in sorted(wanted - names):
        METRICS.get(name)  # an unknown name lists the choices
        raise GradreelError(f"per-expert rows are asked for {name!r}, which is not among the metrics; add it to them")
    return wanted


def _applies(metric: Metric, view: StepView) -> bool:
    if metric.scope == "parameter":
        return view.param is not None
    if metric.scope == "layer":
        source = view.probe if "probe" in metric.needs else view.routing
        return view.param is None and source is not None
    return True


def _subject_key(view: StepView) -> str:
    if view.param is not None:
        return view.param.name
    routing = view.routing if view.routing is not None else view.probe
    layer = view.layer if view.layer is not None or routing is None else routing.layer
    return "run" if layer is None else f"layer {layer}"


def _rows(watch: _Watch, measure: Measure, ids: np.ndarray | None) -> Iterator[dict[str, Any]]:
    """Rows of one measure: one for a single value, else one per expert or a summary over experts."""
    base = {**watch.labels, "step": measure.step, "lag": measure.lag, "flag": measure.flag}
    value = np.asarray(measure.value, dtype=np.float64)
    support = None if measure.support is None else np.asarray(measure.support, dtype=np.float64)
    if value.ndim == 0 or not watch.stacked:
        one = None if support is None else float(support.reshape(-1)[0])
        base["expert"] = watch.expert
        yield _row(base, float(value.reshape(-1)[0]), one)
        return
    experts = np.arange(len(value)) if ids is None else np.asarray(ids)
    value = value[experts]
    if support is not None:
        support = support[experts] if support.ndim else np.full(len(experts), float(support))
    if watch.per_expert:
        for position, expert in enumerate(experts):
            base["expert"] = int(expert)
            yield _row(base, float(value[position]), None if support is None else float(support[position]))
        return
    yield from _summary(base, value, support)


def _row(base: dict[str, Any], value: float, support: float | None) -> dict[str, Any]:
    """A row with value null and a flag that says why, where there is no finite value."""
    if np.isfinite(value):
        return {**base, "value": value, "support": support}
    return {**base, "value": None, "support": support, "flag": "undefined" if np.isnan(value) else "nonfinite"}


def _summary(base: dict[str, Any], value: np.ndarray, support: np.ndarray | None) -> Iterator[dict[str, Any]]:
    """mean, p10, p50 and p90 over the experts with a finite value, and how many experts were nonfinite.

    Support of a summary is the mean support of the experts behind it, in the unit of the per-expert rows; without a
    support it is the number of those experts. Support of the `nonfinite` row is the number of experts.
    """
    broken = int(np.isinf(value).sum())
    if broken:
        yield {**base, "flag": "nonfinite", "support": float(broken)}
    good = np.isfinite(value)
    kept = value if good.all() else value[good]
    if not len(kept):
        if not broken:
            yield {**base, "flag": "undefined", "support": 0.0}
        return
    behind = float(len(kept))
    if support is not None:
        behind = float((support if good.all() else support[good]).mean())
    ordered = np.sort(kept)
    yield {**base, "flag": "mean", "value": float(kept.mean()), "support": behind}
    for share, flag in _QUANTILES:
        yield {**base, "flag": flag, "value": _quantile(ordered, share), "support": behind}


def _quantile(ordered: np.ndarray, share: float) -> float:
    """Linear interpolation between order statistics, as numpy's default, without its overhead per call."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
