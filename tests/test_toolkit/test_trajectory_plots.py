"""What the figures of experts and of trajectories draw."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from toolkit.frame import OPEN_LOOP_NOTE
from toolkit.plots import PLOTS, caption_of
from toolkit.plots._select import tidy
from toolkit.plots.cosine_heatmap import sorted_cosines
from toolkit.plots.expert_intervals import interval_table
from toolkit.plots.expert_small_multiples import expert_panel
from toolkit.plots.recipe_distances import pair_matrix
from toolkit.plots.trajectory_plane import plane_panel, ways_of
from traces.errors import GradreelError

_spec = importlib.util.spec_from_file_location("made_up_frames", Path(__file__).with_name("made_up_frames.py"))
assert _spec is not None
assert _spec.loader is not None
made_up = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made_up)


def cosines(values: dict[int, tuple[float, ...]]) -> pl.DataFrame:
    where = {"metric": "grad_cos", "role": "routed_expert", "layer": 3, "run": "r"}
    rows = [
        {**where, "param": param, "expert": expert, "step": step, "lag": lag, "value": value + shift}
        for param, shift in (("up", 0.1), ("down", -0.1))
        for expert, row in values.items()
        for step, value in enumerate(row, start=2)
        for lag in (1, 2)
    ]
    return made_up.as_frame(rows)


def test_the_steadiest_expert_is_on_top_and_an_idle_one_has_no_cosine() -> None:
    matrix, experts, steps = sorted_cosines(cosines({0: (0.1, float("nan")), 1: (0.5, 0.7), 2: (-0.2, 0.0)}), 3)
    assert experts == [1, 0, 2]
    assert steps == [2, 3]
    np.testing.assert_allclose(matrix, [[0.5, 0.7], [0.1, np.nan], [-0.2, 0.0]], atol=1e-12)


def test_intervals_are_those_of_the_frame_and_missing_ones_stay_out() -> None:
    where = {"role": "routed_expert", "layer": 0, "param": "w", "lag": 1}
    rows = [{**where, "metric": "grad_cos", "expert": expert, "value": 0.1 * expert} for expert in (1, 2)]
    rows += [
        {**where, "metric": f"grad_cos_{end}", "expert": 1, "value": v} for end, v in (("low", 0.0), ("high", 0.3))
    ]
    table = interval_table(tidy(made_up.as_frame(rows)), "grad_cos").sort("expert")
    assert table.select("expert", "low", "high").rows() == [(1, 0.0, 0.3), (2, None, None)]


def test_idle_steps_are_shaded() -> None:
    ax = expert_panel(Figure().subplots(), [1, 2, 3], np.array([0.1, np.nan, 0.2]), [2], "expert 0")
    (shade,) = ax.patches
    assert (shade.get_x(), shade.get_width()) == (1.5, 1.0)


def test_small_multiples_draw_the_busiest_and_the_least_busy_expert_of_the_layer_asked_for() -> None:
    frame = made_up.made_up_frame(steps=tuple(range(1, 8)), experts=20)
    loads = frame.filter((pl.col("metric") == "expert_load") & (pl.col("layer") == 1))
    by_load = loads.group_by("expert").agg(pl.col("value").mean()).sort("value", descending=True)["expert"].to_list()
    figure = PLOTS.get("expert_small_multiples")(frame, layer=1)
    titles = [ax.get_title(loc="left").split(",")[0] for ax in figure.axes]
    assert len(titles) == 8
    assert (titles[0], titles[-1]) == (f"expert {by_load[0]}", f"expert {by_load[-1]}")
    with pytest.raises(GradreelError, match="layer 9 has no cosine"):
        PLOTS.get("expert_small_multiples")(frame, layer=9)


def test_the_plane_passes_through_the_planted_points_from_the_start_on() -> None:
    frame = made_up.made_up_frame(steps=(1, 2, 3))
    way = ways_of(tidy(frame), "routed_expert")["sgd"]
    np.testing.assert_allclose(way[:, :2], [[1, 0.5], [2, 1.0], [3, 1.5]])
    ax = plane_panel(Figure().subplots(), frame, "routed_expert")
    assert all((line.get_xdata()[0], line.get_ydata()[0]) == (0, 0) for line in ax.lines if len(line.get_xdata()) > 1)


def test_pairs_are_symmetric_and_a_recipe_with_itself_stays_empty() -> None:
    rows = made_up.as_frame(
        [
            {"metric": "pairwise_weight_distance", "recipe": pair, "step": 1, "value": value}
            for pair, value in (("mesh vs adamw", 2.0), ("adamw vs mesh+sign_only", 3.0))
        ]
    )
    matrix, names = pair_matrix(rows)
    assert names == ["adamw", "mesh", "mesh+sign_only"]
    np.testing.assert_allclose(matrix, [[np.nan, 2, 3], [2, np.nan, np.nan], [3, np.nan, np.nan]])


def test_captions_name_the_trace_and_say_open_loop_where_recipes_were_replayed() -> None:
    frame = made_up.made_up_frame(steps=(1, 2, 3))
    replayed = caption_of(PLOTS.get("trajectory_plane"), frame)
    assert "Trace demo-3f9a1c." in replayed
    assert replayed.endswith(f"{OPEN_LOOP_NOTE}.")
    assert OPEN_LOOP_NOTE not in caption_of(PLOTS.get("cosine_heatmap"), frame)
