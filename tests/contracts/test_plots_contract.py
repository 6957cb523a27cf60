"""What every plot owes, whoever wrote it: it draws every frame that holds its metrics, with a unit on every axis."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest
from matplotlib.figure import Figure

from toolkit.plots import PLOTS
from toolkit.plots._theme import WIDTHS
from traces.errors import GradreelError


def load_frames() -> ModuleType:
    path = Path(__file__).parent.parent / "test_toolkit" / "made_up_frames.py"
    spec = importlib.util.spec_from_file_location("made_up_frames", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made_up = load_frames()
FEW = {name: made_up.RECIPES[name] for name in ("adamw", "sinkgd", "mesh+sign_only")}
HOSTILE = '<script>alert("$\\frac{1}{$")</script>_^{}%\x00\u202e' + "x" * 200


def plain() -> pl.DataFrame:
    return made_up.made_up_frame(steps=tuple(range(1, 11)), recipes=FEW)


def nothing_defined() -> pl.DataFrame:
    return plain().with_columns(
        value=pl.lit(None, dtype=pl.Float64), flag=pl.lit("undefined").cast(plain()["flag"].dtype)
    )


def not_finite() -> pl.DataFrame:
    return plain().with_columns(
        value=pl.when(pl.int_range(pl.len()) % 3 == 0).then(float("inf")).otherwise(pl.lit(float("nan")))
    )


def hostile_names() -> pl.DataFrame:
    return plain().with_columns(
        recipe=pl.when(pl.col("recipe").is_not_null()).then(pl.lit(HOSTILE) + pl.col("recipe")),
        param=pl.lit(HOSTILE) + pl.col("param"),
        run=pl.lit(HOSTILE),
    )


FRAMES: dict[str, Callable[[], pl.DataFrame]] = {
    "plain": plain,
    "one step": lambda: made_up.made_up_frame(steps=(7,), recipes=FEW),
    "two steps": lambda: made_up.made_up_frame(steps=(7, 8), lags=(1,), recipes=FEW),
    "one expert": lambda: made_up.made_up_frame(steps=(1, 2, 3, 4, 5), experts=1, layers=1, recipes=FEW),
    "one recipe": lambda: made_up.made_up_frame(steps=(1, 2, 3, 4, 5), recipes={"mesh": made_up.RECIPES["mesh"]}),
    "many experts": lambda: made_up.made_up_frame(steps=(1, 2, 3), experts=200, layers=1, recipes=FEW),
    "bursts": lambda: made_up.made_up_frame(steps=(1, 2, 3, 4, 501, 502, 503, 504), lags=(1, 2), recipes=FEW),
    "nothing defined": nothing_defined,
    "not finite": not_finite,
    "huge": lambda: made_up.made_up_frame(steps=(1, 2, 3, 4), recipes=FEW, scale=1e30),
    "tiny": lambda: made_up.made_up_frame(steps=(1, 2, 3, 4), recipes=FEW, scale=1e-30),
    "zero": lambda: made_up.made_up_frame(steps=(1, 2, 3, 4), recipes=FEW, scale=0.0),
    "hostile names": hostile_names,
    "recorded run alone": lambda: (
        plain().with_columns(recipe=pl.lit(None, dtype=pl.String)).unique(maintain_order=True)
    ),
}
NAMES = PLOTS.names()


@pytest.fixture(scope="module", params=list(FRAMES))
def edge(request: pytest.FixtureRequest) -> tuple[str, pl.DataFrame]:
    return request.param, FRAMES[request.param]()


def texts_of(figure: Figure) -> list[str]:
    from matplotlib.text import Text

    return [t.get_text() for t in figure.findobj(Text) if isinstance(t, Text) and t.get_text()]


@pytest.mark.parametrize("name", NAMES)
def test_it_draws_every_frame(name: str, edge: tuple[str, pl.DataFrame]) -> None:
    plot = PLOTS.get(name)
    title, frame = edge
    missing = plot.missing(frame)
    if missing:  # one step has no lag
        assert title in ("one step", "recorded run alone")
        with pytest.raises(GradreelError, match=missing[0]):
            plot(frame)
        return
    for width in WIDTHS if title in ("plain", "hostile names") else ("column",):
        figure = plot(frame, width=width)
        assert isinstance(figure, Figure)
        for ax in figure.axes:
            assert ax.has_data() or ax.texts, f"{name} leaves a panel empty on {title!r}"


@pytest.mark.parametrize("name", NAMES)
def test_every_axis_has_its_unit(name: str) -> None:
    figure = PLOTS.get(name)(plain())
    shared = [label for label in (figure.get_supxlabel(), figure.get_supylabel()) if label]  # of small multiples
    for ax in figure.axes:
        labels = [label for label in (ax.get_xlabel(), ax.get_ylabel()) if label] or (
            shared if len(shared) == 2 else []
        )
        assert labels, name
        for label in labels:
            assert re.search(r"\[.+\]$", label), f"{name}: {label!r} has no unit"
    axes = [ax for ax in figure.axes if ax.get_xlabel()]
    named = [ax for ax in axes if ax.get_ylabel() or all("." not in t.get_text() for t in ax.get_yticklabels())]
    assert len(named) == len(axes)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_cut_off(name: str) -> None:
    for width in WIDTHS:
        figure = PLOTS.get(name)(plain(), width=width)
        box = figure.get_tightbbox()
        wide, high = figure.get_size_inches()
        assert box.x0 >= -0.03, (name, width)
        assert box.y0 >= -0.03, (name, width)
        assert box.x1 <= wide + 0.03, (name, width)
        assert box.y1 <= high + 0.03, (name, width)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_metric_is_named(name: str) -> None:
    plot = PLOTS.get(name)
    for metric in plot.requires:
        with pytest.raises(GradreelError, match=f"needs {metric}.*add --metric {metric}"):
            plot(plain().filter(pl.col("metric") != metric))


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_shows(name: str) -> None:
    plot = PLOTS.get(name)
    assert plot.requires
    assert plot.title
    assert plot.caption.endswith(".")
    assert len(plot.caption) > 60
