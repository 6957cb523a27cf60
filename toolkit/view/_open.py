"""From a trace, a run's folder or a Frame to what the page shows. Only here traces are read and replayed.

Legend: E experts, S recorded steps.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from toolkit.frame import OPEN_LOOP_NOTE, SCHEMA, conform, empty_frame, read_frame, read_provenance
from toolkit.view.page._content import GRADIENT, LOAD, UPDATE, Content, Progress
from traces.errors import GradreelError, NotRecorded

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from traces.reader import Trace

#: What the page offers to compute updates of, besides what it is told.
RECIPES = ("adamw", "mesh", "skewadam", "sinkgd", "muon", "lion", "sgd")


class View:
    """A trace or run to look at. As the last value of a notebook's cell it is the page, served by this process.

    `figure(...)` gives the same pictures as plain plotly figures, which need no server: for notebooks that are kept,
    or read on another machine than the one they run on.
    """

    def __init__(self, content: Content, port: int = 0) -> None:
        self.content = content
        self._port = port
        self._server: Any = None

    @property
    def server(self) -> Any:
        """The server, made at the first call; see `toolkit.view.page._serve.Server`."""
        if self._server is None:
            from toolkit.view.page._serve import Server

            self._server = Server(self.content, self._port)
        return self._server

    @property
    def url(self) -> str:
        """Where the page is, once `start` was called or the object was shown."""
        return str(self.server.url)

    def start(self) -> str:
        """Serve on a thread and return the address."""
        self.server.start()
        return self.url

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _repr_html_(self) -> str:
        address = html.escape(self.start(), quote=True)
        return f'<iframe src="{address}" width="100%" height="900" style="border:0"></iframe>'

    def figure(
        self,
        kind: str = "heatmap",
        *,
        layer: int | None = None,
        expert: int | None = None,
        step: int | None = None,
        recipes: Sequence[str] = (),
    ) -> go.Figure:
        """One plotly figure: `heatmap` (load over steps), `bars` (load at `step`) or `curves` (of `expert`).

        `layer` None is the first one. `curves` computes what is missing: the gradient's measures, and the updates under
        `recipes` (replay is open-loop: it compares updates, not losses).
        """
        from toolkit.view.page import _figures as figures

        content = self.content
        chosen = content.layers[0] if layer is None else layer
        if chosen not in content.layers:
            raise GradreelError(f"layer {layer} is not here; allowed: {', '.join(map(str, content.layers))}")
        load = content.load(chosen)
        if kind == "heatmap":
            return figures.heatmap(load, step=step, expert=expert)
        if kind == "bars":
            return figures.bars(load, step, expert)
        if kind != "curves":
            raise GradreelError(f"figure {kind!r} is unknown; allowed: heatmap, bars, curves")
        if content.source.recipes and not all(content.has(chosen, metric) for metric in GRADIENT):
            content.add(chosen, content.source.gradients(chosen, _silent))
        if lacking := [name for name in recipes if not content.has(chosen, "update_rms", [name])]:
            content.add(chosen, content.source.updates(chosen, lacking, _silent))
        param = next(iter(content.params(chosen)), None)
        return figures.curves(content.rows(chosen), load, expert=expert, param=param, step=step)


def view(source: Any, *, recipes: Sequence[str] = (), port: int = 0) -> View:
    """Look at `source`, expert by expert: a trace (a path or an open one), a run's folder, or a Frame (or its file).

    A run's folder holds a `frame.parquet`, as `demo` and `run` leave it; a trace beside it supplies what the Frame
    lacks. `recipes` stand first among those the page offers to compute. `port` 0 is any free one.
    Raises GradreelError where `source` is none of these, or damaged.
    """
    return View(Content(_source(source, tuple(recipes))), port)


def _source(source: Any, recipes: tuple[str, ...]) -> TraceSource | FrameSource:
    from toolkit.variants import recipe
    from traces._store import StorePath, as_place
    from traces.reader import Trace, open_trace

    for name in recipes:
        recipe(name)  # an unknown one is told now
    offered = tuple(dict.fromkeys((*recipes, *RECIPES)))
    if isinstance(source, Trace):
        return TraceSource(source, offered)
    if isinstance(source, pl.DataFrame):
        return FrameSource(conform(source, "the frame"), "Frame", {}, None)
    place = as_place(source)
    if isinstance(place, StorePath) or (place / "rank-00000").exists() or (place / "header.json").exists():
        return TraceSource(open_trace(place), offered)
    file = place / "frame.parquet" if place.is_dir() else place
    if place.is_dir() and not file.is_file():
        raise GradreelError(f"{str(place)!r} holds neither a trace nor a frame.parquet; give a trace or a run's folder")
    traces = sorted(place.glob("*.trace")) if place.is_dir() else []
    beside = TraceSource(open_trace(traces[0]), offered) if len(traces) == 1 else None
    title = f"Run {place.resolve().name}" if place.is_dir() else f"Frame {place.name}"
    return FrameSource(read_frame(file), title, read_provenance(file), beside)


class TraceSource:
    """Loads from the routing of a trace at once; gradients and updates from a replay, when asked for."""

    def __init__(self, trace: Trace, recipes: tuple[str, ...]) -> None:
        self.trace = trace
        self.title = f"Trace {trace.path.name}"
        self.caption = f"Trace {trace.id}, {len(trace.steps)} recorded steps. {OPEN_LOOP_NOTE}."
        self.recipes = recipes if "gradient" in trace.streams else ()
        if not trace.layers:
            raise NotRecorded(f"{str(trace.path)!r} has no MoE layer; there are no experts to look at")

    def layers(self) -> list[int | None]:
        """The numbers of the MoE layers."""
        return [layer.layer for layer in self.trace.layers]

    def loads(self, layer: int | None) -> pl.DataFrame:
        """`expert_load` of every expert and step, padding left out, from the routing as it was executed."""
        if layer is None or "routing" not in self.trace.streams:
            return empty_frame()
        experts = self.trace.layer(layer).num_experts
        table = self.trace.routing().filter(pl.col("layer") == layer, ~pl.col("is_pad"))
        slots = [name for name in table.collect_schema().names() if name.startswith("expert_")]
        parts = [table.group_by("step", pl.col(slot).cast(pl.Int32).alias("expert")).len() for slot in slots]
        counted = pl.concat(pl.collect_all(parts)).filter(pl.col("expert") >= 0)
        steps = np.array(self.trace.steps, np.int64)
        counts = np.zeros((len(steps), experts))
        np.add.at(
            counts, (np.searchsorted(steps, counted["step"]), counted["expert"].to_numpy()), counted["len"].to_numpy()
        )
        totals = counts.sum(1, keepdims=True)
        shares = np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
        return _rows(
            step=np.repeat(steps, experts),
            expert=np.tile(np.arange(experts, dtype=np.int32), len(steps)),
            value=pl.Series(shares.reshape(-1)).fill_nan(None),
            layer=pl.lit(layer),
            metric=pl.lit(LOAD),
            unit=pl.lit("1"),
            run=pl.lit(self.trace.id),
        )

    def rows(self, layer: int | None) -> pl.DataFrame:
        """What the stream `statistics` knows already; nothing where it was not recorded."""
        if "statistics" not in self.trace.streams:
            return empty_frame()
        found = [self.trace.statistics(name) for name in self._params(layer)]
        table = pl.concat(found) if found else pl.DataFrame()
        if table.is_empty():
            return empty_frame()
        keys = {key: pl.col(key) for key in ("step", "param", "layer", "expert")}
        lags = {"grad_norm": None, "grad_cos": 1, "sign_flip_rate": 1}
        parts = [
            table.select(**keys, value=pl.col(metric), metric=pl.lit(metric), lag=pl.lit(lag, pl.Int32))
            for metric, lag in lags.items()
        ]
        return _filled(pl.concat(parts))

    def gradients(self, layer: int | None, progress: Progress) -> pl.DataFrame:
        """The gradient's measures per expert; a recipe without state goes along, since a replay needs one."""
        return self._replayed(layer, ["sgd"], GRADIENT, progress)

    def updates(self, layer: int | None, recipes: Sequence[str], progress: Progress) -> pl.DataFrame:
        """The update's measures per expert under each recipe, from the first recorded step on."""
        return self._replayed(layer, list(recipes), UPDATE, progress)

    def _replayed(
        self, layer: int | None, recipes: list[str], metrics: Sequence[str], progress: Progress
    ) -> pl.DataFrame:
        from toolkit.replay import replay

        params = self._params(layer)
        if not params:
            raise NotRecorded(f"no routed expert of layer {layer} was recorded")
        gaps = None if self.trace.contiguous() else "bursts"
        result = replay(
            self.trace, recipes, list(metrics), lags=1, per_expert=True, params=params, gaps=gaps, progress=progress
        )
        return result.frame

    def _params(self, layer: int | None) -> list[str]:
        return [p.name for p in self.trace.infos.values() if p.layer == layer and p.role == "routed_expert"]


class FrameSource:
    """What a Frame holds; a trace beside it supplies the rest."""

    def __init__(self, frame: pl.DataFrame, title: str, provenance: dict[str, Any], trace: TraceSource | None) -> None:
        self.title = title
        self._trace = trace
        self.recipes = trace.recipes if trace else ()
        self._frame = frame.filter(pl.col("step").is_not_null())
        recorded = provenance.get("trace")
        of = recorded.get("id") if isinstance(recorded, dict) else None
        known = f"Trace {of}. " if of else ""
        measured = set(self._frame["metric"].unique())
        closed = "loss" in measured and not measured & set(UPDATE)
        self.caption = f"{known}{'Training runs: means over seeds' if closed else OPEN_LOOP_NOTE}."
        if self._frame.is_empty():
            raise GradreelError(f"{title}: no row of the frame has a step; there is nothing to show over time")

    def layers(self) -> list[int | None]:
        """The layers that have a row per expert; None stands for a Frame without experts."""
        found = self._frame.filter(pl.col("expert").is_not_null())["layer"].drop_nulls().unique().sort().to_list()
        return found or (self._trace.layers() if self._trace else [None])

    def loads(self, layer: int | None) -> pl.DataFrame:
        """The Frame's `expert_load` rows, else the trace's."""
        own = self._of(layer).filter(pl.col("metric") == LOAD, pl.col("expert").is_not_null())
        return own if own.height or self._trace is None else self._trace.loads(layer)

    def rows(self, layer: int | None) -> pl.DataFrame:
        """The Frame's rows of the layer."""
        return self._of(layer)

    def gradients(self, layer: int | None, progress: Progress) -> pl.DataFrame:
        """From the trace beside the Frame; no rows without one."""
        return self._trace.gradients(layer, progress) if self._trace else empty_frame()

    def updates(self, layer: int | None, recipes: Sequence[str], progress: Progress) -> pl.DataFrame:
        """From the trace beside the Frame; no rows without one."""
        return self._trace.updates(layer, recipes, progress) if self._trace else empty_frame()

    def _of(self, layer: int | None) -> pl.DataFrame:
        return self._frame if layer is None else self._frame.filter(pl.col("layer") == layer)


def _rows(**columns: Any) -> pl.DataFrame:
    arrays = {name: column for name, column in columns.items() if not isinstance(column, pl.Expr)}
    constants = {name: column for name, column in columns.items() if isinstance(column, pl.Expr)}
    return _filled(pl.DataFrame(arrays).with_columns(**constants))


def _filled(table: pl.DataFrame) -> pl.DataFrame:
    """`table` with the columns of a Frame that it lacks."""
    lacking = [pl.lit("" if name == "flag" else None).alias(name) for name in SCHEMA if name not in table.columns]
    return conform(table.with_columns(lacking), "the view")


def _silent(count: int, total: int | None) -> None:
    """Nobody watches."""
