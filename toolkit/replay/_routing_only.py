"""Measures of routing alone: a replay without recipes, for a trace that needs no gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.frame import FrameWriter
from toolkit.metrics import METRICS, Metric
from toolkit.metrics._engine import MetricEngine
from toolkit.replay._plan import Plan, bursts_of, choose_steps
from toolkit.replay._provenance import machine, provenance_of
from toolkit.replay._source import Source
from traces.console import progress_bar
from traces.errors import NotRecorded
from traces.views import StepView

if TYPE_CHECKING:
    from toolkit.replay._engine import ReplayResult

_NEEDS = {"routing", "scores", "logits"}
NOTE = "no recipe was replayed: only what tokens did was measured"


def routing_metrics(trace: Any) -> list[str]:
    """The metrics that this trace's routing alone supplies."""
    have = _NEEDS & set(trace.streams)
    return [metric.name for metric in METRICS.all() if metric.needs and set(metric.needs) <= have]


def measure_routing(
    source: Source,
    metrics: Iterable[str | Metric] | None,
    *,
    lags: Any = None,
    per_expert: bool | Collection[str] = (),
    steps: Any = None,
    out: str | Path | None = None,
    progress: bool | Callable[[int, int | None], None] | None = None,
    seed: int = 0,
) -> ReplayResult:
    """What `replay` does without a recipe: each layer's routing goes through the metrics, in step order.

    `metrics` None means all that routing alone supplies. A metric that needs more raises `NotRecorded`.
    """
    from toolkit.replay._engine import ReplayResult

    began = time.perf_counter()
    if not source.routed_layers:
        raise NotRecorded("the trace holds no routing, and no recipe is named; name one, 'adamw' for instance")
    chosen = choose_steps(source, steps)
    plan = Plan((), (), chosen, bursts_of(chosen, source.skipped), None, None, (NOTE,))
    engine = MetricEngine(
        routing_metrics(source.trace) if metrics is None else metrics,
        lags,
        per_expert,
        available=_NEEDS & set(source.streams),
        labels={"run": source.id, "arm": None, "seed": seed},
    )
    provenance = provenance_of(
        "replay", source, plan, metrics=engine.names, reference=None, backend=None, seed=seed, **machine("cpu")
    )
    writer = FrameWriter(out, constants={"run": source.id, "seed": seed})
    wanted = set(chosen)
    total = len(chosen) * len(source.routed_layers)
    with writer, progress_bar("measure", total, "layers", wanted=progress) as advance:
        for layer in source.routed_layers:
            for routing in source.routing(layer):
                if routing.step in wanted:
                    engine.feed(StepView(routing.step, layer=layer, routing=routing))
                    writer.write(engine.drain())
                    advance(1)
            writer.write(engine.rows(f"layer {layer}"))
        writer.write(engine.rows())
        writer.write(source.skipped_rows(plan.steps))
        provenance["seconds"] = round(time.perf_counter() - began, 3)
        lazy = writer.close(provenance)
    return ReplayResult(source.trace, lazy, writer.path, provenance, list(plan.notes))
