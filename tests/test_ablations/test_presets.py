"""Every experiment states what it must before anything is run, and its cheapest size stays cheap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ablations.models.config import MoEConfig
from ablations.presets import PRESETS, Ablation, Arm, load_preset, recording
from ablations.presets._ablation import changed
from ablations.presets._sizes import few_tokens, nanowhale
from ablations.runner._plan import Plan
from toolkit.variants import recipe
from traces.errors import GradreelError, UnknownName

EXPERIMENTS = [preset.name for preset in PRESETS.all() if isinstance(preset, Ablation)]


def test_the_experiments_of_the_two_studies_are_here() -> None:
    wanted = "skewadam_table skewadam_tiers skewadam_eps_regime mesh_headline mesh_what_failed order idle_policy roles "
    assert {*wanted.split(), "lr_schedule", "scale_tokens_per_expert"} <= set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_complete(name: str) -> None:
    preset = load_preset(name)
    assert set(preset.sizes) == {"cpu", "gpu", "paper"}
    assert preset.question.endswith("?")
    assert preset.decides.endswith(".")
    assert len(preset.arms) >= 2
    cpu = preset.sizes["cpu"]
    assert len(cpu.seeds) >= 3
    assert Plan(preset, cpu).most_runs() <= 90
    assert isinstance(cpu.model, MoEConfig)
    for size in preset.sizes.values():
        plan = Plan(preset, size)
        assert plan.first()
        for _, arm, own in plan.arms():
            for lr in own.rates(arm):
                assert recipe(preset.expression(arm, own), lr=lr).lr == lr


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_arms_differ_in_the_experts_alone_where_that_is_the_question(name: str) -> None:
    preset = load_preset(name)
    if not preset.experts_only:
        return
    size = preset.sizes["cpu"]
    rest = {arm: recipe(preset.expression(arm, size), lr=1e-3).groups for arm in preset.arms}
    for groups in rest.values():
        assert groups["rest"].describe() == rest[preset.baseline]["rest"].describe()


def test_recordings_and_experiments_are_told_apart() -> None:
    with pytest.raises(GradreelError, match="records one run"):
        load_preset("demo")
    with pytest.raises(GradreelError, match="gradreel run order"):
        recording("order")
    with pytest.raises(UnknownName, match="did you mean 'order'"):
        load_preset("ordre")


def test_a_wrong_experiment_is_refused() -> None:
    good = load_preset("order")
    for changes, words in (
        ({"baseline": "nobody"}, "not among its arms"),
        ({"ways": ("sideways",)}, "unknown way 'sideways'"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"sizes": {"cpu": few_tokens(grids={"nobody": (1.0,)})}}, "unknown arm of a grid"),
        ({"sizes": {"cpu": few_tokens(settings={"a": {"nothing": 1}})}}, "unknown entry of a size"),
    ):
        with pytest.raises(GradreelError, match=words):
            replace(good, **changes)
    for changes, words in (
        ({"steps": 0}, "steps is 0"),
        ({"grid": (1e-3, 1e-3)}, "grid is"),
        ({"grid": (-1.0,)}, "grid is"),
        ({"tuning_seeds": (7,)}, "tuning_seeds is"),
        ({"length": 10_000}, "max_positions"),
        ({"shared_lr": 0.0}, "shared_lr is"),
        ({"schedule": "sideways"}, "unknown schedule"),
    ):
        with pytest.raises(GradreelError, match=words):
            few_tokens(**changes)


def test_one_entry_of_a_model_from_elsewhere_can_be_changed() -> None:
    size = replace(few_tokens(), model=nanowhale(), length=64)
    other = changed(size, {"model.config": {"n_routed_experts": 64}})
    assert other.model.config["n_routed_experts"] == 64
    assert other.model.config["hidden_size"] == 320
    assert size.model.config["n_routed_experts"] == 4


def test_only_keeps_the_baseline_and_the_order() -> None:
    preset = replace(load_preset("order"), arms={**load_preset("order").arms, "more": Arm("sinkgd")})
    assert list(preset.only(("more", "sinkgd")).arms) == ["momentum_last", "sinkgd", "more"]
