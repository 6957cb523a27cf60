"""weight_plane: projections against numpy in float64 on whole vectors."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from toolkit.replay import replay, weight_plane
from toolkit.replay._plan import make_plan
from toolkit.replay._source import Source
from toolkit.replay._walk import Walk, Want
from traces.errors import GradreelError

SPANNED_BY = ["adamw", "sinkgd", "mesh"]


def ways_by_hand(path, recipes, role):
    """{recipe: [S, N]} displacements of all parameters of a role as one vector, one recipe at a time."""
    source, found = Source.of(path), {}
    for label in recipes:
        plan = make_plan(source, label)
        at: dict[int, list[np.ndarray]] = {}
        for group in plan.groups:
            for moment in Walk(source, plan, group, {}, want=Want()):
                if moment.subject.info.role == role:
                    gap = moment.outcomes[0].after.double() - moment.initial.double()
                    at.setdefault(moment.step, []).append(gap.numpy().ravel().copy())
        found[label] = np.stack([np.concatenate(at[step]) for step in sorted(at)])
    return found


@pytest.mark.parametrize("role", ["routed_expert", "router"])
def test_against_whole_vectors(plain_run, role):
    frame = weight_plane(plain_run.path, SPANNED_BY).frame.filter(pl.col("role") == role)
    table = frame.pivot("metric", index=["recipe", "step"], values="value").sort("step")
    ways = ways_by_hand(plain_run.path, SPANNED_BY, role)
    basis, _ = np.linalg.qr(np.stack([ways["adamw"][-1], ways["sinkgd"][-1]], axis=1))
    basis *= np.sign([basis[:, 0] @ ways["adamw"][-1], basis[:, 1] @ ways["sinkgd"][-1]])
    for label, way in ways.items():
        mine = table.filter(pl.col("recipe") == label)
        flat = way @ basis
        scale = np.linalg.norm(way, axis=1).max()
        np.testing.assert_allclose(mine["plane_along"], flat[:, 0], atol=1e-9 * scale)
        np.testing.assert_allclose(mine["plane_across"], flat[:, 1], atol=1e-9 * scale)
        off = np.linalg.norm(way - flat @ basis.T, axis=1)
        np.testing.assert_allclose(mine["plane_off"], off, atol=1e-6 * scale)


def test_what_spans_the_plane_ends_in_it_and_squares_add_up(plain_run):
    frame = weight_plane(plain_run.path, SPANNED_BY, params=None).frame
    last = frame.filter((pl.col("step") == frame["step"].max()) & (pl.col("role") == "routed_expert"))
    ends = last.pivot("metric", index="recipe", values="value")
    reached = replay(plain_run.path, SPANNED_BY, ["displacement"], per_expert=True).frame
    reached = reached.filter(pl.col("step").is_null() & (pl.col("role") == "routed_expert"))
    for recipe, along, across, off in ends.select("recipe", "plane_along", "plane_across", "plane_off").iter_rows():
        size = np.sqrt(along**2 + across**2 + off**2)
        whole = reached.filter(pl.col("recipe") == recipe)["value"].to_numpy()
        assert size == pytest.approx(np.sqrt((whole**2).sum()), rel=1e-6)
        if recipe == "mesh":
            assert off > 0.01 * size
        else:
            assert off < 1e-5 * size
    assert ends.filter(pl.col("recipe") == "adamw")["plane_across"].item() == pytest.approx(0, abs=1e-9)


def test_two_equal_recipes_span_a_line(plain_run):
    frame = weight_plane(plain_run.path, {"one": "mesh", "two": "mesh"}).frame
    assert frame.filter(pl.col("metric") == "plane_across")["value"].abs().max() == 0.0


def test_one_recipe_spans_no_plane(plain_run):
    with pytest.raises(GradreelError, match="at least two recipes; given: mesh"):
        weight_plane(plain_run.path, ["mesh"])
