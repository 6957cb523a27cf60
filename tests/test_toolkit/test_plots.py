"""What the figures draw, and what they say where there is nothing to draw."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import polars as pl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from toolkit.plots import PLOTS, save_figure
from toolkit.plots._save import inline_svg
from toolkit.plots._select import bands, rows_of, thin_steps, tidy, whole_recording
from toolkit.plots._theme import FAMILY_COLOURS, recipe_order, recipe_styles, text
from toolkit.plots.amplification_by_tokens import amplification_rows
from toolkit.plots.expert_load_heatmap import load_matrix
from toolkit.plots.memory_bars import memory_table, readable_bytes
from toolkit.plots.update_cos_curves import cosine_curves
from traces.errors import GradreelError


def load_helper() -> ModuleType:
    path = Path(__file__).with_name("made_up_frames.py")
    spec = importlib.util.spec_from_file_location("made_up_frames", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made_up = load_helper()
TWO = {name: made_up.RECIPES[name] for name in ("sinkgd", "mesh")}


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    return made_up.made_up_frame(steps=tuple(range(1, 13)))


def test_bands_are_the_quantiles_of_ordinary_values() -> None:
    rows = made_up.as_frame(
        [
            {"metric": "update_rms", "recipe": "mesh", "role": "routed_expert", "param": "w", "expert": e, "value": v}
            for e, v in enumerate([1.0, 2.0, 3.0, 4.0, float("nan")])
        ]
    )
    table = bands(rows_of(tidy(rows), "update_rms"), ["recipe"])
    assert table.row(0) == ("mesh", 2.5, pytest.approx(1.3), pytest.approx(3.7), 4)


def test_bands_fall_back_to_summaries_and_never_mix_them_with_values() -> None:
    base = {"metric": "update_rms", "recipe": "mesh", "role": "routed_expert", "param": "w"}
    summary = [
        {**base, "flag": f, "value": v} for f, v in zip(made_up.SUMMARY_FLAGS, (5.0, 1.0, 4.0, 9.0), strict=True)
    ]
    only_summary = bands(rows_of(tidy(made_up.as_frame(summary)), "update_rms"), ["recipe"])
    assert only_summary.row(0)[1:4] == (4.0, 1.0, 9.0)
    both = made_up.as_frame([*summary, *({**base, "expert": e, "value": 2.0} for e in range(3))])
    assert bands(rows_of(tidy(both), "update_rms"), ["recipe"]).row(0)[1:] == (2.0, 2.0, 2.0, 3)


def test_a_row_over_the_recording_outweighs_rows_of_steps() -> None:
    base = {"metric": "update_cos", "recipe": "mesh", "role": "routed_expert", "param": "w", "expert": 0, "lag": 1}
    rows = [{**base, "step": 2, "value": 0.9}, {**base, "step": 3, "value": 0.7}, {**base, "value": 0.1}]
    assert whole_recording(rows_of(tidy(made_up.as_frame(rows)), "update_cos"))["value"].to_list() == [0.1]
    assert whole_recording(rows_of(tidy(made_up.as_frame(rows[:2])), "update_cos"))["value"].to_list() == [0.8]


def test_thinning_keeps_every_value_and_bounds_the_steps() -> None:
    rows = pl.DataFrame({"step": list(range(1, 1001)), "value": [1.0] * 1000})
    thin = thin_steps(rows, 240)
    assert thin.height == 1000
    assert thin["step"].n_unique() <= 240
    assert thin["step"].is_between(1, 1000).all()


def test_the_heatmap_sorts_experts_by_load_and_scales_by_the_uniform_load() -> None:
    loads = {0: (0.1, 0.1), 1: (0.6, 0.5), 2: (0.3, 0.4)}
    rows = [
        {"metric": "expert_load", "layer": 4, "expert": e, "step": s, "value": v}
        for e, both in loads.items()
        for s, v in zip((7, 9), both, strict=True)
    ]
    matrix, experts, steps = load_matrix(made_up.as_frame(rows), 4)
    assert experts == [1, 2, 0]
    assert steps == [7, 9]
    np.testing.assert_allclose(matrix, 3 * np.array([[0.6, 0.5], [0.3, 0.4], [0.1, 0.1]]))


def test_the_cosine_curve_passes_through_the_planted_values() -> None:
    rows = [
        {
            "metric": "update_cos",
            "recipe": "mesh",
            "role": "routed_expert",
            "param": "w",
            "expert": e,
            "lag": lag,
            "value": v,
        }
        for lag, v in ((1, 0.8), (2, 0.5), (4, 0.1))
        for e in range(4)
    ]
    figure = Figure()
    ax = cosine_curves(figure.subplots(), made_up.as_frame(rows))
    drawn = next(line for line in ax.lines if len(line.get_xdata()) == 3)
    np.testing.assert_allclose(drawn.get_ydata(), [0.8, 0.5, 0.1])
    assert drawn.get_color() == FAMILY_COLOURS["mesh"]


def test_amplification_takes_tokens_from_support_else_from_the_counts() -> None:
    base = {"metric": "amplification", "recipe": "mesh", "role": "routed_expert", "param": "w", "layer": 1, "step": 3}
    rows = [
        {**base, "expert": 0, "value": 2.0, "support": 5.0},
        {**base, "expert": 1, "value": 3.0},
        {**base, "expert": 2, "value": 4.0, "support": 0.0},
        {"metric": "tokens_per_expert", "layer": 1, "step": 3, "expert": 1, "value": 11.0},
    ]
    found = amplification_rows(made_up.as_frame(rows)).sort("expert")
    assert found.select("expert", "tokens").rows() == [(0, 5.0), (1, 11.0)]


def test_memory_adds_parameters_and_takes_the_largest_step() -> None:
    base = {"metric": "state_bytes", "recipe": "adamw", "role": "routed_expert"}
    rows = [
        {**base, "param": "a", "step": 1, "value": 100.0},
        {**base, "param": "a", "step": 2, "value": 300.0},
        {**base, "param": "b", "value": 50.0},
        {**base, "value": 1e9},
        {**base, "metric": "pinned_gradient_bytes", "recipe": "mesh", "value": 7.0},
    ]
    table = memory_table(made_up.as_frame(rows))
    assert table.rows() == [("adamw", 350.0, None), ("mesh", None, 7.0)]


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (9_437_184, "9.00 MiB"), (123 * 2**30, "123 GiB")],
)
def test_bytes_are_readable(count: int, words: str) -> None:
    assert readable_bytes(count) == words


def test_a_family_has_one_colour_and_its_variants_differ_otherwise() -> None:
    names = ["mesh", "mesh+sign_only", "mesh+smaller_steps(0.3)", "sinkgd", "brand_new"]
    styles = recipe_styles(names)
    assert {styles[n].colour for n in names[:3]} == {FAMILY_COLOURS["mesh"]}
    assert len({str(styles[n].line) for n in names[:3]}) == 3
    assert recipe_styles(["mesh"])["mesh"] == styles["mesh"]
    assert recipe_styles(["brand_new"])["brand_new"].colour == styles["brand_new"].colour
    assert recipe_order([*reversed(names), None]) == ["sinkgd", *names[:3], "brand_new", "recorded run"]


@pytest.mark.parametrize("missing", ["none", "green cones", "red cones"])
def test_families_can_be_told_apart_under_colour_vision_deficiencies(missing: str) -> None:
    """Every pair of families keeps a distance in RGB, seen as Viénot, Brettel and Mollon (1999) simulate it."""
    to_cones = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    sight = {
        "none": np.eye(3),
        "green cones": np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]]),
        "red cones": np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]]),
    }[missing]
    seen = {}
    for name, colour in FAMILY_COLOURS.items():
        rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]) ** 2.2
        seen[name] = np.clip(np.linalg.solve(to_cones, sight @ to_cones @ rgb), 0, 1) ** (1 / 2.2)
    distances = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a in seen for b in seen if a < b}
    closest = min(distances, key=lambda pair: distances[pair])
    assert distances[closest] > 0.15, closest


def test_labels_cannot_switch_on_mathematics_or_hide() -> None:
    assert text("$\\frac{$") == "\\$\\frac{\\$"
    assert text("_hidden").endswith("_hidden")
    assert not text("_hidden").startswith("_")
    assert len(text("x" * 500)) == 40
    assert "\x00" not in text("a\x00b\n")


def test_figures_are_saved_twice_and_repeat_byte_for_byte(frame: pl.DataFrame, tmp_path: Path) -> None:
    plot = PLOTS.get("memory_bars")
    svg, png = save_figure(plot(frame), tmp_path / "deep" / "memory")
    assert png.read_bytes().startswith(b"\x89PNG")
    again, _ = save_figure(plot(frame), tmp_path / "again")
    assert svg.read_bytes() == again.read_bytes()
    (tmp_path / "file").write_text("")
    with pytest.raises(GradreelError, match="cannot write the figure"):
        save_figure(plot(frame), tmp_path / "file" / "x")


def test_inline_figures_hold_no_address_and_unique_ids(frame: pl.DataFrame) -> None:
    plot = PLOTS.get("expert_load_heatmap")
    first, second = (inline_svg(plot(frame), key, 'a "label" <b>') for key in ("one", "two"))
    assert "http" not in first
    assert "<b>" not in first
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg, known in zip((first, second), ids, strict=True):
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) <= known
    assert "var(--ink)" in first


def test_drawing_leaves_nothing_behind(frame: pl.DataFrame) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    before = dict(mpl.rcParams)
    PLOTS.get("update_cos_curves")(frame)
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == before


def test_importing_the_plots_loads_no_drawing_library() -> None:
    code = (
        "import sys, toolkit.plots as p; p.PLOTS.all(); import toolkit.report; "
        "print([m for m in ('torch', 'seaborn', 'matplotlib', 'scipy', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tick_labels_do_not_touch(frame: pl.DataFrame) -> None:
    for plot in PLOTS.all():
        figure = plot(frame, width="column")
        renderer = FigureCanvasAgg(figure).get_renderer()
        for ax in figure.axes:
            boxes = [t.get_window_extent(renderer) for t in ax.get_xticklabels() if t.get_text() and t.get_visible()]
            low, high = ax.get_window_extent(renderer).intervalx
            boxes = sorted((b for b in boxes if low - 20 <= (b.x0 + b.x1) / 2 <= high + 20), key=lambda b: b.x0)
            assert all(a.x1 <= b.x0 for a, b in pairwise(boxes)), (plot.name, ax.get_title(loc="left"))


def test_summaries_where_experts_are_needed_are_an_error_that_says_what_to_add() -> None:
    frame = made_up.made_up_frame(steps=(1, 2, 3, 4), summaries=True, recipes=TWO)
    for plot, metric in (("expert_load_heatmap", "expert_load"), ("amplification_by_tokens", "amplification")):
        with pytest.raises(GradreelError, match=f"--per-expert {metric}"):
            PLOTS.get(plot)(frame)


def test_a_table_that_is_no_frame_is_refused() -> None:
    with pytest.raises(GradreelError, match="it lacks run, arm"):
        tidy(pl.DataFrame({"metric": ["x"]}))


def test_an_unknown_width_lists_the_choices(frame: pl.DataFrame) -> None:
    with pytest.raises(GradreelError, match="column, page"):
        PLOTS.get("memory_bars")(frame, width="wall")
