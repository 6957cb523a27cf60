"""compare: pairwise cosines and distances against numpy in float64."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch

from toolkit.frame import read_frame
from toolkit.replay import compare
from toolkit.replay._plan import make_plan
from toolkit.replay._source import Source
from toolkit.replay._walk import Walk, Want
from traces.errors import GradreelError

RECIPES = ["adamw", "sinkgd", "mesh"]


def by_hand(path, recipes, role):
    """{(pair, step): (cosine, distance)} from whole vectors, one recipe at a time."""
    source = Source.of(path)
    updates, weights = {}, {}
    for label in recipes:
        plan = make_plan(source, label)
        for group in plan.groups:
            for moment in Walk(source, plan, group, {}, want=Want()):
                if moment.subject.info.role == role and moment.outcomes[0].update is not None:
                    key = (label, moment.step)
                    updates.setdefault(key, []).append(moment.outcomes[0].update.double().numpy().ravel())
                    weights.setdefault(key, []).append(moment.outcomes[0].after.double().numpy().ravel().copy())
    found = {}
    for i, a in enumerate(recipes):
        for b in recipes[i + 1 :]:
            for step in source.steps:
                u, v = (np.concatenate(updates[label, step]) for label in (a, b))
                x, y = (np.concatenate(weights[label, step]) for label in (a, b))
                cosine = u @ v / np.linalg.norm(u) / np.linalg.norm(v)
                found[f"{a} vs {b}", step] = (cosine, np.linalg.norm(x - y))
    return found


@pytest.mark.parametrize("role", ["routed_expert", "attention"])
def test_against_whole_vectors(plain_run, role, tmp_path):
    frame = compare(plain_run.path, RECIPES, out=tmp_path / "c.parquet", memory_bytes=1).frame
    assert read_frame(tmp_path / "c.parquet").equals(frame)
    rows = frame.filter(pl.col("role") == role).pivot("metric", index=["recipe", "step"], values="value")
    expected = by_hand(plain_run.path, RECIPES, role)
    assert rows.height == len(expected) == 3 * 12
    for row in rows.iter_rows(named=True):
        cosine, distance = expected[row["recipe"], row["step"]]
        assert row["pairwise_update_cos"] == pytest.approx(cosine, abs=1e-12)
        assert row["pairwise_weight_distance"] == pytest.approx(distance, rel=1e-12)
    support = frame.filter(pl.col("role") == "routed_expert")["support"]
    assert set(support) == {2.0}


def test_a_recipe_against_itself(plain_run):
    frame = compare(plain_run.path, {"one": "mesh", "two": "mesh"}).frame
    assert set(frame["recipe"]) == {"one vs two"}
    cosines = frame.filter(pl.col("metric") == "pairwise_update_cos")["value"]
    np.testing.assert_allclose(cosines.to_numpy(), 1.0, atol=1e-12)
    assert set(frame.filter(pl.col("metric") == "pairwise_weight_distance")["value"]) == {0.0}


def test_undefined_and_missing_values(tiny_run):
    """A zero update has no direction (null, never 0); a None gradient leaves the tensor out of the support."""

    def hide(step, name, gradient):
        if name == "attn.weight":
            return torch.zeros_like(gradient) if step == 2 else gradient
        return None if name == "norm.weight" and step == 3 else gradient

    frame = compare(tiny_run(steps=4, hide=hide).path, ["sgd", "sinkgd"]).frame
    cosines = frame.filter(pl.col("metric") == "pairwise_update_cos")
    attention = cosines.filter((pl.col("role") == "attention") & (pl.col("step") == 2))
    assert attention.select("value", "flag").rows() == [(None, "undefined")]
    assert cosines.filter((pl.col("role") == "norm") & (pl.col("step") == 3)).height == 0


def test_without_weights_there_are_no_distances(tiny_run):
    result = compare(tiny_run(steps=3, with_weights=False).path, ["sgd", "sinkgd"])
    assert set(result.frame["metric"]) == {"pairwise_update_cos"}
    assert any("only metrics of the update" in note for note in result.notes)


def test_one_recipe_is_refused(plain_run):
    with pytest.raises(GradreelError, match="at least two recipes; given: adamw"):
        compare(plain_run.path, "adamw")
