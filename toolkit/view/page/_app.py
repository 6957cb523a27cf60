"""The page's controls and what they change: a Dash app, whose scripts all come from this machine."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from dash import Dash, Input, Output, Patch, State, ctx, dcc, html, no_update

from toolkit.view.page import _figures as figures
from toolkit.view.page._content import Content
from toolkit.view.page._jobs import Jobs

_POLL_MS = 500
_GRAPH: Any = {"displaylogo": False, "displayModeBar": False}


def build(content: Content, jobs: Jobs, prefix: str) -> Dash:
    """The app for `content`, whose long work `jobs` does, served below `prefix` (between two slashes)."""
    app = Dash(
        __name__,
        url_base_pathname=prefix,
        serve_locally=True,
        title=content.source.title,
        update_title="",
        assets_folder="assets",
    )
    app.layout = _layout(content)
    _heat_callbacks(app, content)
    _curve_callbacks(app, content, jobs)
    return app


def _layout(content: Content) -> html.Div:
    source = content.source
    layers = [{"label": "all" if n is None else f"layer {n}", "value": _word(n)} for n in content.layers]
    first = layers[0]["value"]
    compute = [
        html.Label(["recipes", dcc.Dropdown(list(source.recipes), list(source.recipes[:2]), id="recipes", multi=True)]),
        html.Button("Compute updates", id="compute", n_clicks=0),
    ]
    return html.Div(
        [
            html.H1(source.title),
            html.P(source.caption, className="caption"),
            html.Div(
                [
                    html.Label(["layer", dcc.Dropdown(layers, first, id="layer", clearable=False)]),
                    html.Label(["expert", dcc.Dropdown(id="expert", clearable=False)]),
                    html.Label(["parameter", dcc.Dropdown(id="param", clearable=False)], className="wide"),
                    html.Div(compute, className="compute", style={} if source.recipes else {"display": "none"}),
                ],
                className="controls",
            ),
            html.Div(
                [
                    html.Span(id="step-label", className="label"),
                    html.Div(
                        dcc.Slider(0, 1, 1, value=0, id="step", updatemode="drag", allow_direct_input=False),
                        className="slider",
                    ),
                ],
                className="steps",
            ),
            html.P(id="note", className="note"),
            html.Div(
                [
                    html.Div([dcc.Graph(id="heat", config=_GRAPH), dcc.Graph(id="bars", config=_GRAPH)]),
                    html.Div([dcc.Graph(id="curves", config=_GRAPH)]),
                ],
                className="panels",
            ),
            dcc.Interval(id="poll", interval=_POLL_MS, disabled=False),
            dcc.Store(id="computed", data=0),
        ],
        className="page",
    )


def _heat_callbacks(app: Dash, content: Content) -> None:
    @app.callback(
        Output("heat", "figure"),
        Output("step", "max"),
        Output("step", "marks"),
        Output("step", "value"),
        Output("expert", "options"),
        Output("expert", "value"),
        Input("layer", "value"),
        State("expert", "value"),
    )
    def show_layer(word: str, expert: int | None) -> tuple[Any, ...]:
        layer = _layer(word)
        load, steps, experts = content.load(layer), content.steps(layer), content.experts(layer)
        if expert not in experts:
            order = load.order()
            expert = load.experts[order[0]] if load.experts else (experts[0] if experts else None)
        middle = (len(steps) - 1) // 2 if steps else 0
        figure = figures.heatmap(load, step=steps[middle] if steps else None, expert=expert)
        return figure, max(len(steps) - 1, 0), figures.marks(steps), middle, experts, expert

    @app.callback(
        Output("expert", "value", allow_duplicate=True),
        Output("step", "value", allow_duplicate=True),
        Input("heat", "clickData"),
        Input("bars", "clickData"),
        State("layer", "value"),
        prevent_initial_call=True,
    )
    def pick(heat: dict[str, Any] | None, bar: dict[str, Any] | None, word: str) -> tuple[Any, Any]:
        load = content.load(_layer(word))
        if ctx.triggered_id == "bars" and bar:
            return int(bar["points"][0]["x"]), no_update
        if not heat:
            return no_update, no_update
        point = heat["points"][0]
        expert = figures.expert_at(load, int(point["y"]))
        step = int(point["x"])
        return (no_update if expert is None else expert), load.steps.index(step) if step in load.steps else no_update

    @app.callback(
        Output("step-label", "children"),
        Output("bars", "figure"),
        Output("heat", "figure", allow_duplicate=True),
        Output("curves", "figure", allow_duplicate=True),
        Input("step", "value"),
        Input("expert", "value"),
        State("layer", "value"),
        State("curves", "figure"),
        prevent_initial_call=True,
    )
    def move(place: int, expert: int | None, word: str, drawn: dict[str, Any] | None) -> tuple[Any, ...]:
        layer = _layer(word)
        load, step = content.load(layer), _step(content, layer, place)
        heat, curves = Patch(), Patch()
        heat["layout"]["shapes"] = figures.heat_shapes(load, step, expert)
        panels = sum(key.startswith("yaxis") for key in (drawn or {}).get("layout", {}))
        curves["layout"]["shapes"] = figures.curve_shapes(panels, step)
        label = "no step" if step is None else f"step {step}"
        return label, figures.bars(load, step, expert), heat, curves if panels else no_update


def _curve_callbacks(app: Dash, content: Content, jobs: Jobs) -> None:
    @app.callback(
        Output("curves", "figure"),
        Output("param", "options"),
        Output("param", "value"),
        Output("poll", "disabled"),
        Input("expert", "value"),
        Input("param", "value"),
        Input("computed", "data"),
        Input("compute", "n_clicks"),
        State("recipes", "value"),
        State("layer", "value"),
        State("step", "value"),
    )
    def show_expert(
        expert: int | None, param: str | None, _: int, clicks: int, recipes: list[str] | None, word: str, place: int
    ) -> tuple[go.Figure, list[str], str | None, bool]:
        layer = _layer(word)
        if ctx.triggered_id == "compute" and clicks:
            jobs.want_updates(layer, recipes or [])
        params = content.params(layer)
        chosen = param if param in params else next(iter(params), None)
        figure = figures.curves(
            content.rows(layer), content.load(layer), expert=expert, param=chosen, step=_step(content, layer, place)
        )
        return figure, params, chosen, not (jobs.busy or jobs.lacks_gradients(layer))

    @app.callback(
        Output("note", "children"),
        Output("computed", "data"),
        Output("poll", "disabled", allow_duplicate=True),
        Input("poll", "n_intervals"),
        State("computed", "data"),
        State("layer", "value"),
        prevent_initial_call=True,
    )
    def poll(count: int, seen: int, word: str) -> tuple[str, Any, bool]:
        if count > 1:  # the first look comes first
            jobs.want_gradients(_layer(word))
        elif jobs.lacks_gradients(_layer(word)):
            return jobs.note, no_update, False
        done, busy = jobs.finished, jobs.busy
        return jobs.note, done if done != seen else no_update, not busy


def _word(layer: int | None) -> str:
    return "" if layer is None else str(layer)


def _layer(word: str) -> int | None:
    return int(word) if word else None


def _step(content: Content, layer: int | None, place: int | None) -> int | None:
    steps = content.steps(layer)
    return steps[min(max(int(place or 0), 0), len(steps) - 1)] if steps else None
