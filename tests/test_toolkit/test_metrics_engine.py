"""The engine: which metrics run, how often, and what rows come out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from toolkit.frame import SCHEMA
from toolkit.metrics import METRICS, Metric
from toolkit.metrics._engine import MetricEngine
from toolkit.metrics._experts import shared, wide
from traces.errors import GradreelError, NotRecorded, UnknownName
from traces.views import NONE, ParamInfo, RoutingStep, StepView

E = 5
INFO = ParamInfo("w", "routed_expert", (E, 4, 3), layer=2, expert_axis=0, num_experts=E, matrix_axes=(1, 2))
AVAILABLE = {"gradient", "weight", "routing", "scalars", "update", "delta", "reference", "cost"}


def view(step: int, info: ParamInfo = INFO, seed: int = 0, **more: Any) -> StepView:
    rng = np.random.default_rng((seed, step))
    gradient = torch.tensor(rng.normal(size=info.shape), dtype=torch.float32)
    return StepView(step, info, layer=info.layer, gradient=gradient, **more)


def layer_view(step: int, counts: list[int]) -> StepView:
    ids = np.repeat(np.arange(E), counts)[:, None]
    routing = RoutingStep(step, 2, E, ids, np.zeros(len(ids), bool), np.array(counts))
    return StepView(step, layer=2, routing=routing)


def table(engine: MetricEngine) -> pl.DataFrame:
    return pl.DataFrame(list(engine.rows()), schema=SCHEMA, orient="row")


def spy(name: str, calls: list[tuple[str, int]]) -> Metric:
    metric = METRICS.get(name)

    def update(state: Any, seen: StepView) -> Any:
        calls.append((name, seen.step))
        return metric.update(state, seen)

    return replace(metric, update=update)


def test_rows_are_a_frame_with_a_summary_over_experts() -> None:
    engine = MetricEngine(["grad_norm"], available=AVAILABLE, labels={"run": "r", "arm": "a", "seed": 3})
    engine.feed(view(1))
    frame = table(engine)
    norms = view(1).gradient.double().reshape(E, -1).norm(dim=1).numpy()
    assert frame["flag"].to_list() == ["mean", "p10", "p50", "p90"]
    np.testing.assert_allclose(frame["value"], [norms.mean(), *np.quantile(norms, [0.1, 0.5, 0.9])])
    assert frame["support"].unique().to_list() == [12.0]
    for column, wanted in {
        "run": "r",
        "arm": "a",
        "seed": 3,
        "recipe": None,
        "step": 1,
        "param": "w",
        "role": "routed_expert",
        "layer": 2,
        "expert": None,
        "lag": None,
        "unit": "gradient",
    }.items():
        assert frame[column].unique().to_list() == [wanted], column


def test_per_expert_rows_only_where_asked() -> None:
    engine = MetricEngine(["grad_norm", "grad_cos"], lags=1, per_expert=["grad_norm"], available=AVAILABLE)
    engine.feed(view(1))
    engine.feed(view(2))
    frame = table(engine)
    single = frame.filter(pl.col("metric") == "grad_norm")
    assert single["expert"].to_list() == [*range(E), *range(E)]
    assert set(single["flag"]) == {""}
    assert frame.filter(pl.col("metric") == "grad_cos")["expert"].null_count() > 0
    for step in (1, 2):
        found = single.filter(pl.col("step") == step)["value"]
        np.testing.assert_allclose(found, view(step).gradient.double().reshape(E, -1).norm(dim=1).numpy())


def test_a_parameter_without_experts_gets_one_plain_row() -> None:
    dense = ParamInfo("d", "attention", (4, 3), matrix_axes=(0, 1))
    single = replace(dense, name="experts.3.w", role="routed_expert", expert=3)
    engine = MetricEngine(["grad_norm"], available=AVAILABLE)
    engine.feed(view(1, dense))
    engine.feed(view(1, single))
    frame = table(engine)
    assert frame["flag"].to_list() == ["", ""]
    assert frame["expert"].to_list() == [None, 3]


def test_undefined_and_nonfinite_are_null_and_told_apart() -> None:
    broken = view(1)
    broken.gradient[1] = float("nan")
    engine = MetricEngine(["grad_norm"], per_expert=True, available=AVAILABLE)
    engine.feed(broken)
    engine.feed(StepView(2, INFO, presence=np.full(E, NONE, np.uint8)))
    frame = table(engine)
    assert frame["flag"].to_list() == ["", "nonfinite", "", "", "", *["undefined"] * E]
    assert frame["value"].is_null().to_list() == [False, True, False, False, False, *[True] * E]
    engine = MetricEngine(["grad_norm"], available=AVAILABLE)
    engine.feed(broken)
    engine.feed(StepView(2, INFO, presence=np.full(E, NONE, np.uint8)))
    frame = table(engine)
    assert frame["flag"].to_list() == ["nonfinite", "mean", "p10", "p50", "p90", "undefined"]
    assert frame.row(0, named=True)["support"] == 1
    rest = broken.gradient[[0, 2, 3, 4]].double().reshape(4, -1).norm(dim=1).mean().item()
    assert frame.row(1, named=True)["value"] == pytest.approx(rest)
    assert not frame["value"].is_nan().any()


def test_a_subset_of_experts_has_rows_of_its_own_ids_only() -> None:
    part = view(1)
    part.gradient, part.experts = part.gradient[[4, 2]], np.array([4, 2])
    engine = MetricEngine(["grad_norm", "coherence"], per_expert=True, available=AVAILABLE)
    engine.feed(part)
    frame = table(engine)
    norms = frame.filter(pl.col("metric") == "grad_norm")
    assert norms["expert"].to_list() == [4, 2]
    np.testing.assert_allclose(norms["value"], part.gradient.double().reshape(2, -1).norm(dim=1).numpy())
    assert frame.filter(pl.col("metric") == "coherence")["expert"].to_list() == [2, 4]


def test_metrics_of_the_trace_run_once_and_those_of_recipes_once_each() -> None:
    calls: list[tuple[str, int]] = []
    engine = MetricEngine([spy("grad_norm", calls), spy("update_rms", calls)], available=AVAILABLE)
    for step in (1, 2):
        recorded = view(step)
        engine.feed(recorded)
        for name, factor in (("adamw", 2), ("mesh", 3)):
            engine.feed(replace(recorded, update=recorded.gradient * factor), recipe=name)
    frame = table(engine)
    assert calls.count(("grad_norm", 1)) == 1
    assert calls.count(("update_rms", 1)) == 2
    assert set(frame.filter(pl.col("metric") == "update_rms")["recipe"]) == {"adamw", "mesh"}
    rms = {r["recipe"]: r["value"] for r in frame.iter_rows(named=True) if r["metric"] == "update_rms"}
    assert rms["mesh"] == pytest.approx(3 * rms["adamw"] / 2), "no recipe is given another one's numbers"
    assert frame.filter(pl.col("metric") == "grad_norm")["recipe"].unique().to_list() == [None]


def test_a_live_run_needs_no_recipe_name() -> None:
    engine = MetricEngine(["grad_norm", "update_rms"], available=AVAILABLE)
    seen = view(1)
    engine.feed(replace(seen, update=seen.gradient))
    assert set(table(engine)["metric"]) == {"grad_norm", "update_rms"}


def test_recipes_share_one_conversion_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.metrics._sums_cpu.usable", lambda *tensors: False)
    converted: list[torch.Tensor] = []
    metric = METRICS.get("update_rms")

    def update(state: Any, seen: StepView) -> Any:
        tensor = wide(seen, "gradient")
        assert tensor is not None
        converted.append(tensor)
        return ()

    engine = MetricEngine([replace(metric, update=update)], available=AVAILABLE)
    first = view(1)
    for name in "abc":
        engine.feed(replace(first, update=first.gradient), recipe=name)
    assert len({t.data_ptr() for t in converted}) == 1
    first.gradient.mul_(2)  # a buffer that is used again for the next step is another gradient
    engine.feed(replace(first, step=2, update=first.gradient), recipe="a")
    assert torch.equal(converted[-1], first.gradient.double().reshape(E, -1))


def test_a_shared_view_does_not_mix_up_pairs_of_tensors() -> None:
    from toolkit.metrics._experts import dot, norm_of_sum

    seen = view(1)
    seen.update, seen.delta, seen.weight = seen.gradient * 2, seen.gradient * 3, seen.gradient * 5
    plain, kept = seen, shared(seen)
    for _ in range(2):
        for left, right in [("update", "delta"), ("delta", "update"), ("gradient", "weight"), ("weight", "weight")]:
            np.testing.assert_array_equal(dot(kept, left, right), dot(plain, left, right))
        for terms in [((1, "weight"), (-1, "delta")), ((1, "weight"), (1, "delta"))]:
            np.testing.assert_array_equal(norm_of_sum(kept, *terms), norm_of_sum(plain, *terms))


def test_subjects_may_alternate_or_follow_each_other() -> None:
    other = replace(INFO, name="x")

    def values(order: list[tuple[int, ParamInfo]]) -> pl.DataFrame:
        engine = MetricEngine(["grad_cos"], lags=[1, 2], available=AVAILABLE)
        for step, info in order:
            engine.feed(view(step, info))
        return table(engine).sort("param", "step", "lag", "flag")

    alternating = values([(step, info) for step in (1, 2, 3) for info in (INFO, other)])
    in_turn = values([(step, info) for info in (INFO, other) for step in (1, 2, 3)])
    assert alternating.equals(in_turn)


def test_rows_of_one_subject_free_its_state_and_drain_goes_on() -> None:
    engine = MetricEngine(["grad_cos"], lags=1, available=AVAILABLE)
    for step in (1, 2):
        engine.feed(view(step))
        engine.feed(view(step, replace(INFO, name="x")))
        assert len(list(engine.drain())) > 0
        assert list(engine.drain()) == []
    ended = list(engine.rows("w"))
    assert {row["param"] for row in ended} == {"w"}
    assert {row["step"] for row in ended} == {None}
    assert {row["param"] for row in engine.rows()} == {"x"}
    assert list(engine.rows()) == []


def test_steps_out_of_order_are_refused() -> None:
    engine = MetricEngine(["grad_norm"], available=AVAILABLE)
    engine.feed(view(2))
    with pytest.raises(ValueError, match="step 1 of w was fed after step 2"):
        engine.feed(view(1))


def test_costs_reach_the_cost_group_per_recipe() -> None:
    engine = MetricEngine(["state_bytes", "pinned_gradient_bytes", "step_ms"], available=AVAILABLE)
    for step in (1, 2):
        seen = view(step)
        engine.feed(seen)
        cost = {"state_bytes": 64, "pinned_gradient_bytes": 0, "step_ms": float(step)}
        engine.feed(replace(seen, update=seen.gradient), "adamw", cost)
        engine.feed(replace(seen, update=seen.gradient), "mesh", {"state_bytes": 0, "pinned_gradient_bytes": 240})
    found = {(r["recipe"], r["metric"]): r["value"] for r in engine.rows()}
    assert found == {
        ("adamw", "state_bytes"): 64,
        ("adamw", "pinned_gradient_bytes"): 0,
        ("adamw", "step_ms"): 1.5,
        ("mesh", "state_bytes"): 0,
        ("mesh", "pinned_gradient_bytes"): 240,
        ("mesh", "step_ms"): None,
    }


def test_layers_and_parameters_are_kept_apart() -> None:
    engine = MetricEngine(["max_vio", "expert_load", "grad_norm"], per_expert=["expert_load"], available=AVAILABLE)
    engine.feed(layer_view(1, [4, 1, 0, 0, 0]))
    engine.feed(view(1))
    frame = table(engine)
    vio = frame.filter((pl.col("metric") == "max_vio") & (pl.col("step") == 1))
    assert vio.select("value", "layer", "param", "flag").rows() == [(3.0, 2, None, "")]
    load = frame.filter((pl.col("metric") == "expert_load") & (pl.col("step") == 1))
    assert load["value"].to_list() == [0.8, 0.2, 0, 0, 0]
    assert load["expert"].to_list() == list(range(E))


def test_a_metric_of_scope_run_sees_every_view() -> None:
    seen: list[tuple[int, str | None]] = []

    def update(state: Any, v: StepView) -> Any:
        seen.append((v.step, None if v.param is None else v.param.name))

    metric = replace(METRICS.get("grad_norm"), name="mine", scope="run", update=update)
    engine = MetricEngine([metric], available=AVAILABLE)
    engine.feed(layer_view(1, [1] * E))
    engine.feed(view(1))
    engine.feed(view(1), recipe="adamw")
    engine.feed(view(1, replace(INFO, name="x")))
    assert seen == [(1, None), (1, "w"), (1, "x")]


def test_without_names_every_metric_whose_needs_are_met() -> None:
    assert MetricEngine(available={"scores"}).names == []
    assert MetricEngine(available={"routing"}).names == [m.name for m in METRICS.all() if m.needs == ("routing",)]
    everything = MetricEngine(available=AVAILABLE).names
    assert {"grad_cos", "update_cos", "cos_to_reference", "max_vio", "state_bytes"} <= set(everything)
    assert not {"gradient_noise_scale", "router_saturation", "topk_margin"} & set(everything)


@pytest.mark.parametrize(
    ("name", "available", "wanted"),
    [
        (
            "grad_cos",
            {"routing"},
            "metric grad_cos needs the stream 'gradient', which was not recorded (recorded: routing)",
        ),
        ("gradient_noise_scale", {"gradient"}, "needs the stream 'micro_norms'"),
        ("topk_margin", {"routing"}, "record it with RecordAt(streams=(..., 'logits'))"),
        ("router_saturation", set(), "needs the stream 'probe', which was not recorded (recorded: none)"),
        ("displacement", {"gradient", "update"}, "needs the stream 'weight'"),
        ("update_cos", {"gradient"}, "give at least one recipe"),
        ("cos_to_reference", {"gradient", "update"}, "give at least two recipes"),
        ("path_length", {"gradient", "update"}, "record the weights"),
    ],
)
def test_a_need_that_is_not_met_is_named_before_work_starts(name: str, available: set[str], wanted: str) -> None:
    with pytest.raises(NotRecorded) as caught:
        MetricEngine([name], available=available)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lags", [0, -1, [1, 0], [], [1.5], True, {"grad_cos": [0]}, ["1"]])
def test_bad_lags_are_refused_with_the_value(lags: Any) -> None:
    with pytest.raises(GradreelError, match="whole numbers of steps from 1"):
        MetricEngine(["grad_cos"], lags=lags)


def test_lags_per_metric() -> None:
    engine = MetricEngine(["grad_cos", "sign_flip_rate"], lags={"grad_cos": [3, 1, 3]}, available=AVAILABLE)
    for step in range(1, 6):
        engine.feed(view(step))
    frame = table(engine).filter(pl.col("step").is_null())
    assert frame.filter(pl.col("metric") == "grad_cos")["lag"].unique(maintain_order=True).to_list() == [1, 3]
    assert set(frame.filter(pl.col("metric") == "sign_flip_rate")["lag"]) == set(METRICS.get("sign_flip_rate").lags)
    with pytest.raises(GradreelError, match="'grad_norm', which is no lagged metric asked for; allowed: grad_cos"):
        MetricEngine(["grad_norm", "grad_cos"], lags={"grad_norm": 1})


@pytest.mark.parametrize("given", ["grad_cosine", ["grad_cosine"]])
def test_unknown_names(given: Any) -> None:
    with pytest.raises(GradreelError) as caught:
        MetricEngine(given)
    assert "grad_cos" in str(caught.value)
    with pytest.raises(UnknownName, match="did you mean 'grad_norm'"):
        MetricEngine(["grad_cos"], per_expert=["grad_normm"])
    with pytest.raises(GradreelError, match="not among the metrics; add it"):
        MetricEngine(["grad_cos"], per_expert=["grad_norm"])
    with pytest.raises(GradreelError, match="allowed: a name or a Metric"):
        MetricEngine([3])  # type: ignore[list-item]


def test_two_metrics_of_one_name_are_refused_and_a_repeated_name_is_one() -> None:
    assert MetricEngine(["grad_cos", "grad_cos"]).names == ["grad_cos"]
    with pytest.raises(GradreelError, match="two metrics are called 'grad_cos'"):
        MetricEngine(["grad_cos", replace(METRICS.get("grad_cos"), unit="2")])
