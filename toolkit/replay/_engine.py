"""Replay a trace through recipes and measure what they would have done.

Replay is open-loop: it compares updates, not losses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.frame import FrameWriter
from toolkit.metrics import Metric
from toolkit.metrics._engine import MetricEngine
from toolkit.replay._plan import MEMORY_BYTES, Plan, check_device, make_plan
from toolkit.replay._provenance import machine, provenance_of
from toolkit.replay._routing_only import measure_routing
from toolkit.replay._source import Described, Source, check_parameters
from toolkit.replay._walk import Moment, Outcome, Track, Walk, Want
from traces.console import progress_bar
from traces.views import RoutingStep, StepView

if TYPE_CHECKING:
    import polars as pl

    from toolkit.replay._selfcheck import SelfCheck

Tokens = dict[tuple[int, int], np.ndarray]


@dataclass
class ReplayResult:
    """What a replay found. `path` is None where the Frame was kept in memory; `notes` are sentences for the reader."""

    trace: Any
    lazy: pl.LazyFrame
    path: Path | None
    provenance: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def frame(self) -> pl.DataFrame:
        """The Frame, read into memory."""
        return self.lazy.collect()

    def selfcheck(self, recipe: Any = None) -> SelfCheck:
        """Whether `recipe`, the one that really trained the trace, reproduces the recorded weights bit for bit."""
        from toolkit.replay._selfcheck import selfcheck

        return selfcheck(self.trace, recipe)


def replay(
    trace: Any,
    recipes: Any,
    metrics: Iterable[str | Metric] | None = None,
    *,
    backend: str | None = None,
    match: str | None = None,
    gaps: str | None = None,
    lr: Any = None,
    lags: Any = None,
    per_expert: bool | Collection[str] = (),
    params: Iterable[str] | None = None,
    steps: Any = None,
    out: str | Path | None = None,
    progress: bool | Callable[[int, int | None], None] | None = None,
    seed: int = 0,
    device: str = "cpu",
    memory_bytes: int | str = MEMORY_BYTES,
    expect: Iterable[Described] | None = None,
) -> ReplayResult:
    """Replay `trace` (a Trace or a path) through `recipes` and measure what they would have done.

    Replay is open-loop: it compares updates, not losses.

    `recipes`: a name (`"mesh+sign_only"`), a Recipe, a list of either, or {label: either}. None or an empty list
    measures routing alone, for which no gradients are needed. All run in one pass: a gradient is read once. Each recipe
    moves its own copy of the weights recorded at the first step. The first recipe is the reference of
    `cos_to_reference`, `drift_from_reference` and `match`.
    `metrics`: names or Metric objects; None means all that the trace can supply.
    `lr`: per recipe, by label, a base rate (default: the recipe's own), `"recorded"`, or a function of the step. A base
    rate is multiplied by the recorded rate over the recorded peak; "recorded" is the recorded rate itself.
    `match="update_rms"`: the other recipes run at the reference's rate, their updates scaled, parameter by parameter,
    to the RMS of the reference's; weight decay follows the rate that results.
    `gaps`: what a recipe with state does where steps are missing: refuse (None), start anew ("bursts"), or go on as if
    nothing were missing ("ignore"). Weights always go on.
    `steps`: (first, last) or a list. `params`: names. `out`: parquet file of the Frame, else it is kept in memory.
    `progress`: None shows a bar on a terminal, True always, False never; a function is called with (count, total).
    `memory_bytes` (a number, or "2GiB"): parameters are replayed in groups that fit; each tensor is still read once.

    `expect`: parameters (objects with `name` and `shape`, in order) that the trace must have been recorded from; a
    renamed, moved or reshaped one is refused by name.

    A recipe whose weights stop being finite gets a row `diverged` (value: the step, flag `diverged`) for each expert it
    happens to; the other experts and recipes go on. Without recorded weights only metrics of the update are offered.
    Raises GradreelError (one line) for wrong names and values, NotRecorded where the trace lacks what is needed.
    """
    began = time.perf_counter()
    source = Source.of(trace)
    if expect is not None:
        check_parameters(source.trace.header.params, expect)
    if recipes is None or (isinstance(recipes, Sized) and not recipes):
        return measure_routing(
            source, metrics, lags=lags, per_expert=per_expert, steps=steps, out=out, progress=progress, seed=seed
        )
    draft = make_plan(
        source,
        recipes,
        lr=lr,
        backend=backend,
        match=match,
        gaps=gaps,
        params=params,
        steps=steps,
        memory_bytes=memory_bytes,
    )
    engine = MetricEngine(
        metrics,
        lags,
        per_expert,
        available=offers(source, draft),
        labels={"run": source.id, "arm": None, "seed": seed},
    )
    plan = draft.regrouped(memory_bytes, history_of(engine.metrics, lags))
    provenance = provenance_of(
        "replay",
        source,
        plan,
        metrics=engine.names,
        reference=plan.entrants[0].label,
        backend=backend,
        seed=seed,
        **machine(check_device(device)),
    )
    total = len(plan.steps) * provenance["parameters"]
    writer = FrameWriter(out, constants={"run": source.id, "seed": seed})
    with writer, progress_bar("replay", total, "tensors", wanted=progress) as advance:
        tokens = _route(source, plan, engine, writer)
        for group in plan.groups:
            walk = Walk(source, plan, group, tokens, want=_want(engine), device=device, seed=seed)
            for moment in walk:
                _measure(engine, moment, source)
                writer.write(engine.drain())
                advance(1)
            for subject in group:
                writer.write(engine.rows(subject.info.name))
                writer.write(diverged_rows(walk.tracks[subject.info.name]))
        writer.write(engine.rows())
        writer.write(source.skipped_rows(plan.steps))
        provenance["seconds"] = round(time.perf_counter() - began, 3)
        lazy = writer.close(provenance)
    return ReplayResult(source.trace, lazy, writer.path, provenance, list(plan.notes))


def offers(source: Source, plan: Plan) -> set[str]:
    """What metrics may ask for: the recorded streams and what the recipes at work supply."""
    found = set(source.streams) - {"weight"} | {"update", "cost"}
    if not plan.lacks_weight:
        found |= {"weight", "delta"}
    if len(plan.entrants) > 1:
        found.add("reference")
    return found


def history_of(metrics: Iterable[Metric], lags: Any) -> tuple[int, int]:
    """How many past tensors the lagged metrics keep: once for the trace, and once per recipe."""
    kept = {False: 0, True: 0}
    for metric in metrics:
        if not metric.lags:
            continue
        chosen = lags.get(metric.name) if isinstance(lags, Mapping) else lags
        deepest = max(metric.lags if chosen is None else [chosen] if isinstance(chosen, int) else chosen)
        kept[metric.per_recipe] += int(deepest)
    return kept[False], kept[True]


def _want(engine: MetricEngine) -> Want:
    needs = engine.needs
    return Want(
        update=bool({"update", "reference"} & needs),
        delta="delta" in needs,
        before=bool({"weight", "reference"} & needs),
    )


def _route(source: Source, plan: Plan, engine: MetricEngine, writer: FrameWriter) -> Tokens:
    """Read the routing once: feed the layer metrics and keep the counts that recipes and parameter metrics use."""

    def feed(routing: RoutingStep) -> None:
        engine.feed(StepView(routing.step, layer=routing.layer, routing=routing))
        writer.write(engine.drain())

    tokens = read_tokens(source, plan, feed)
    if "probe" in engine.needs:
        for probe in source.probes(plan.steps):
            engine.feed(StepView(probe.step, layer=probe.layer, probe=probe))
            writer.write(engine.drain())
    for layer in source.routed_layers:
        writer.write(engine.rows(f"layer {layer}"))
    return tokens


def read_tokens(source: Source, plan: Plan, feed: Callable[[RoutingStep], None] | None = None) -> Tokens:
    """The counts [E] by (layer, step), for the layers of the plan; `feed` gets each step's routing as it passes."""
    tokens: Tokens = {}
    wanted = set(plan.steps)
    layers = {subject.info.layer for subject in plan.subjects}
    for layer in source.routed_layers:
        if layer not in layers:
            continue
        for routing in source.routing(layer):
            if routing.step in wanted:
                tokens[layer, routing.step] = routing.tokens_per_expert
                if feed is not None:
                    feed(routing)
    return tokens


def _measure(engine: MetricEngine, moment: Moment, source: Source) -> None:
    """Feed the recorded side once and each recipe's side under its label."""
    subject = moment.subject
    norms, counts = source.micro_norms(subject, moment.step) if "micro_norms" in engine.needs else (None, None)
    recorded = StepView(
        moment.step,
        param=subject.info,
        layer=subject.info.layer,
        gradient=moment.gradient,
        presence=moment.presence,
        tokens_per_expert=moment.tokens,
        experts=subject.experts,
        micro_norms=norms,
        micro_tokens=counts,
    )
    engine.feed(recorded)
    reference = next((o for o in moment.outcomes if o.track.is_reference), None)
    for outcome in moment.outcomes:
        engine.feed(_view(recorded, moment, outcome, reference), outcome.track.entrant.label, _cost(outcome.track))


def _view(recorded: StepView, moment: Moment, outcome: Outcome, reference: Outcome | None) -> StepView:
    return StepView(
        recorded.step,
        param=recorded.param,
        layer=recorded.layer,
        gradient=recorded.gradient,
        presence=recorded.presence,
        weight=outcome.before,
        update=outcome.update,
        delta=outcome.delta,
        reference_update=None if reference is None else reference.update,
        initial_weight=moment.initial,
        reference_weight=None if reference is None else reference.before,
        lr=outcome.lr,
        tokens_per_expert=recorded.tokens_per_expert,
        experts=recorded.experts,
    )


def _cost(track: Track) -> dict[str, Any]:
    return {
        "state_bytes": track.stepper.state_bytes,
        "pinned_gradient_bytes": track.stepper.pinned_gradient_bytes,
        "step_ms": track.step_ms,
    }


def diverged_rows(tracks: Sequence[Track]) -> Iterator[dict[str, Any]]:
    """One row per expert (or parameter) whose weights stopped being finite, at the step where they did."""
    for track in tracks:
        info = track.subject.info
        for step, expert in track.diverged:
            yield {
                "recipe": track.entrant.label,
                "step": step,
                "param": info.name,
                "role": info.role,
                "layer": info.layer,
                "expert": expert,
                "metric": "diverged",
                "value": float(step),
                "flag": "diverged",
                "unit": "step",
            }
