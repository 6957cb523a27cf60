"""The page's figures, in the colours of every other figure. Each is an ordinary plotly Figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from toolkit.plots._theme import GRID, INK, RECORDED, ROLE_COLOURS, SOFT, recipe_order, recipe_styles
from toolkit.view.page._content import GRADIENT, LOAD, UPDATE, Load, pooled

#: The largest heatmap that is sent: more columns or rows than a screen has pixels show nothing more.
MAX_COLUMNS, MAX_ROWS = 600, 512
_SPAN = 2.0  # a quarter to four times the uniform load, as in the report's heatmap
_IDLE = -2.25
_MAP = ("#3b1d6e", "#6c579f", "#a79fca", "#dcdcea", "#f7f1e8", "#fbd9a5", "#efa13f", "#c0690d", "#8a4307")
PICKED = ROLE_COLOURS["routed_expert"]  # no recipe has it
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_TITLES = {
    LOAD: "load [share of slots]",
    "grad_norm": "gradient norm [L2]",
    "grad_cos": "gradient cosine, lag 1",
    "sign_flip_rate": "gradient sign flips, lag 1",
    "update_rms": "update RMS",
    "update_cos": "update cosine, lag 1",
    "update_sign_flip_rate": "update sign flips, lag 1",
    "cos_to_gradient": "cosine of update to gradient",
    "loss": "training loss [nats]",
    "valid_loss": "validation loss [nats]",
    "delta_rms": "weight change RMS",
}
_LOG = {"grad_norm", "update_rms", "delta_rms"}
_LAYOUT: dict[str, Any] = {
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "margin": {"l": 62, "r": 12, "t": 34, "b": 42},
    "hoverlabel": {"font": {"size": 12}},
    "dragmode": "zoom",
}


def heatmap(load: Load, *, step: int | None = None, expert: int | None = None) -> go.Figure:
    """Load over steps, one row per expert, the busiest on top; a line marks `step`, a frame marks `expert`."""
    figure = go.Figure(layout=_LAYOUT)
    if not load.steps:
        return say(figure, "No routing here, so there is no load to show")
    order = load.order()
    with np.errstate(divide="ignore", invalid="ignore"):
        rows, _ = pooled(load.matrix[order], 0, MAX_ROWS)
        shown, columns = pooled(rows, 1, MAX_COLUMNS)
        z = np.log2(shown * len(load.experts))
    z = np.where(np.isneginf(z), np.float32(_IDLE), np.clip(z, -_SPAN, _SPAN)).astype(np.float32)
    start = (-_SPAN - _IDLE) / (_SPAN - _IDLE) / 2
    scale = [[0.0, "#000000"], [start, "#000000"]]
    scale += [[start + (1 - start) * i / (len(_MAP) - 1), colour] for i, colour in enumerate(_MAP)]
    figure.add_heatmap(
        z=z,
        x=[load.steps[i] for i in columns],
        y=np.arange(len(z)),
        zmin=_IDLE,
        zmax=_SPAN,
        colorscale=scale,
        colorbar={
            "title": {"text": "load /<br>uniform"},
            "tickvals": [_IDLE, -2, -1, 0, 1, 2],
            "ticktext": ["idle", "", "½", "1", "2", "≥4"],
            "thickness": 12,
        },
        customdata=np.broadcast_to(_labels(load, order, len(z))[:, None], z.shape) if z.size <= 20_000 else None,
        hovertemplate="step %{x}<br>log2(load / uniform) %{z:.2f}<extra></extra>",
    )
    ticks = np.unique(np.linspace(0, len(z) - 1, min(len(z), 12)).round().astype(int))
    figure.update_yaxes(
        title="expert, busiest on top",
        autorange="reversed",
        tickvals=ticks,
        ticktext=[_labels(load, order, len(z))[i] for i in ticks],
        showgrid=False,
        zeroline=False,
    )
    figure.update_xaxes(title="step", showgrid=False, zeroline=False)
    figure.update_layout(title=_title("Expert load over time; click to pick an expert and a step"), height=430)
    figure.update_layout(shapes=heat_shapes(load, step, expert), uirevision="heat")
    return figure


def _labels(load: Load, order: np.ndarray, rows: int) -> np.ndarray:
    size = -(-len(order) // max(rows, 1))
    return np.array([str(load.experts[order[i]]) for i in range(0, len(order), max(size, 1))])


def row_of(load: Load, expert: int) -> int | None:
    """The heatmap's row that holds an expert."""
    if expert not in load.experts or not load.steps:
        return None
    size = -(-len(load.experts) // MAX_ROWS)
    return int(np.flatnonzero(load.order() == load.experts.index(expert))[0]) // size


def expert_at(load: Load, row: int) -> int | None:
    """The expert in a row of the heatmap; of several that share a row, the busiest."""
    size, order = -(-len(load.experts) // MAX_ROWS) if load.experts else 1, load.order()
    place = int(row) * size
    return load.experts[order[place]] if 0 <= place < len(order) else None


def heat_shapes(load: Load, step: int | None, expert: int | None) -> list[dict[str, Any]]:
    """The marks of the heatmap: the step's line and the expert's frame."""
    shapes = [] if step is None else [step_line(step, "y domain")]
    row = None if expert is None else row_of(load, expert)
    if row is not None:
        line = {"color": PICKED, "width": 1.5}
        box = {"x0": 0, "x1": 1, "y0": row - 0.5, "y1": row + 0.5}
        shapes.append({"type": "rect", "xref": "x domain", "yref": "y", "line": line, **box})
    return shapes


def step_line(step: int, yref: str, xref: str = "x") -> dict[str, Any]:
    """An upright line at a step."""
    line = {"color": INK, "width": 1, "dash": "dot"}
    return {"type": "line", "xref": xref, "yref": yref, "x0": step, "x1": step, "y0": 0, "y1": 1, "line": line}


def bars(load: Load, step: int | None, expert: int | None) -> go.Figure:
    """Load of every expert at one step, in the order of their ids, the picked one in its own colour."""
    figure = go.Figure(layout=_LAYOUT)
    figure.update_layout(height=230, bargap=0.1, showlegend=False)
    if step is None or step not in load.steps:
        return say(figure, "No routing at this step")
    values = load.matrix[:, load.steps.index(step)]
    colours = [PICKED if each == expert else "#0072b2" for each in load.experts]
    template = "expert %{x}: %{y:.4f}<extra></extra>"
    figure.add_bar(x=load.experts, y=values, marker={"color": colours, "line": {"width": 0}}, hovertemplate=template)
    figure.add_hline(y=1 / len(load.experts), line={"color": SOFT, "width": 1, "dash": "dot"})
    idle = int((values == 0).sum())
    figure.update_layout(title=_title(f"Step {step}: {idle} of {len(load.experts)} experts idle; dots: uniform load"))
    figure.update_xaxes(title="expert", showgrid=False)
    figure.update_yaxes(title="load [share of slots]", gridcolor=GRID, rangemode="tozero")
    return figure


def curves(rows: pl.DataFrame, load: Load, *, expert: int | None, param: str | None, step: int | None) -> go.Figure:
    """What one expert did over time, one panel a measure; without an expert what the run as a whole did."""
    panels = list(_panels(rows, load, expert, param))
    if not panels:
        return say(go.Figure(layout=_LAYOUT), "No row per expert in this frame")
    titles = [_TITLES.get(name, name) for name, _ in panels]
    figure = make_subplots(
        len(panels), 1, shared_xaxes=True, vertical_spacing=0.28 / len(panels) / 1.6, subplot_titles=titles
    )
    names = recipe_order({series for _, lines in panels for series, _, _ in lines})
    styles, seen = recipe_styles(names), set()
    for place, (metric, lines) in enumerate(panels, start=1):
        log = metric in _LOG and _is_wide(v for _, _, y in lines for v in y)
        for name, x, values in sorted(lines, key=lambda line: names.index(line[0])):
            style = styles[name]
            y = [v if v else None for v in values] if log else values  # a zero, of an idle expert, has no logarithm
            mode = "lines+markers" if len(x) <= 250 else "lines"  # a value between two gaps has no line
            dash = _DASHES[("o", "s", "^", "D", "v").index(style.marker)]
            colour = PICKED if name == RECORDED else style.colour
            legend = {"name": name, "legendgroup": name, "showlegend": name not in seen}
            line = {"color": colour, "width": 1.4, "dash": dash}
            figure.add_scatter(x=x, y=y, mode=mode, marker={"size": 3}, line=line, row=place, col=1, **legend)
            seen.add(name)
        if log:
            figure.update_yaxes(type="log", exponentformat="power", dtick=1, row=place, col=1)
    figure.update_layout(**_LAYOUT)
    figure.update_annotations(font={"size": 12, "color": INK}, xanchor="left", x=0)
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_xaxes(title="step", row=len(panels), col=1)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, nticks=4)
    what = "The run" if expert is None else f"Expert {expert}" + (f", {param}" if param else "")
    top = 52 + 24 * -(-sum(8 * len(name) + 56 for name in names) // 420)  # pixels, with the legend's rows
    height = 140 * len(panels) + top + 40
    legend = {"orientation": "h", "x": 0, "y": 1 - 36 / height, "yanchor": "top", "yref": "container"}
    figure.update_layout(title=_title(what), height=height, legend=legend, margin={"t": top}, uirevision="curves")
    figure.update_layout(shapes=curve_shapes(len(panels), step))
    return figure


def _is_wide(values: Iterable[float | None]) -> bool:
    """Whether the positive values span more than 1.5 decades."""
    positive = [v for v in values if v is not None and v > 0]
    return bool(positive) and max(positive) > 10**1.5 * min(positive)


def curve_shapes(panels: int, step: int | None) -> list[dict[str, Any]]:
    """The step's line in each panel."""
    if step is None:
        return []
    tails = ["" if n == 1 else str(n) for n in range(1, panels + 1)]
    return [step_line(step, f"y{tail} domain", f"x{tail}") for tail in tails]


def _panels(
    rows: pl.DataFrame, load: Load, expert: int | None, param: str | None
) -> Iterator[tuple[str, list[tuple[str, list[Any], list[Any]]]]]:
    """(metric, [(series, steps, values)]) for each measure that there is, in a fixed order."""
    if expert is None:
        whole = rows.filter(
            pl.col("expert").is_null(), pl.col("step").is_not_null(), pl.col("flag").is_in(["", "mean"])
        )
        present = whole["metric"].unique().to_list()
        order = [name for name in _TITLES if name in present]
        order += sorted(set(present) - set(order))
        for metric in order[:8]:
            yield metric, list(_lines(whole.filter(pl.col("metric") == metric)))
        return
    if expert in load.experts and load.steps:
        values = load.matrix[load.experts.index(expert)].astype(float)
        yield LOAD, [(RECORDED, load.steps, [None if np.isnan(v) else v for v in values.tolist()])]
    own = rows.filter(
        pl.col("expert") == expert, pl.col("step").is_not_null(), pl.col("lag").is_null() | (pl.col("lag") == 1)
    )
    own = own if param is None else own.filter(pl.col("param") == param)
    for metric in (*GRADIENT, *UPDATE):
        lines = list(_lines(own.filter(pl.col("metric") == metric)))
        if lines:
            yield metric, lines


def _lines(rows: pl.DataFrame) -> Iterator[tuple[str, list[Any], list[Any]]]:
    series = pl.coalesce("arm", "recipe", pl.lit(RECORDED)).alias("series")
    means = rows.group_by(series, "step").agg(pl.col("value").mean()).sort("series", "step")
    for (name,), part in means.partition_by("series", as_dict=True, maintain_order=True).items():
        yield str(name), part["step"].to_list(), part["value"].to_list()


def say(figure: go.Figure, message: str) -> go.Figure:
    """An empty figure that says why it is empty."""
    figure.update_layout(height=160, xaxis={"visible": False}, yaxis={"visible": False})
    font = {"color": SOFT, "size": 14}
    figure.add_annotation(text=message, showarrow=False, font=font, xref="paper", yref="paper", x=0.5, y=0.5)
    return figure


def _title(text: str) -> dict[str, Any]:
    return {"text": text, "x": 0, "xref": "paper", "font": {"size": 13}, "y": 0.99, "yanchor": "top", "pad": {"t": 6}}


def marks(steps: Sequence[int]) -> dict[int, str]:
    """Labels of the slider, which goes over places in `steps`."""
    if not steps:
        return {0: "no step"}
    places = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).round().astype(int))
    return {int(place): str(steps[place]) for place in places}
