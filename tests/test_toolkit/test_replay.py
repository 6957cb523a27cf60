"""Replay against loops written by hand with torch's own optimizers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch

from toolkit.frame import OPEN_LOOP_NOTE, read_frame, read_provenance
from toolkit.replay import check_parameters, replay
from toolkit.replay._plan import MEMORY_BYTES, bytes_of, make_plan
from toolkit.replay._source import Source
from toolkit.replay._walk import Walk, Want
from traces.errors import GradreelError, NotRecorded
from traces.reader import open_trace
from traces.views import ParamInfo

METRICS = ["grad_norm", "update_rms", "update_cos", "grad_cos"]


def final_weights(path, recipes, **options):
    """{label: {parameter: weight after the last step}} of one pass."""
    source = Source.of(path)
    plan = make_plan(source, recipes, **options)
    found = {entrant.label: {} for entrant in plan.entrants}
    for group in plan.groups:
        walk = Walk(source, plan, group, {}, want=Want())
        for _ in walk:
            pass
        for name, tracks in walk.tracks.items():
            for track in tracks:
                found[track.entrant.label][name] = track.weight.clone()
    return found


def by_hand(run, lr_of, *, steps=None, restart=(), wd=0.01):
    """torch.optim.AdamW over the recorded gradients."""
    params = {name: w.clone().requires_grad_() for name, w in run.weights[1].items()}
    optimizer = torch.optim.AdamW(list(params.values()), lr=1.0, weight_decay=wd, foreach=False)
    for step in steps or sorted(run.gradients):
        if step in restart:
            optimizer.state.clear()
        for name, p in params.items():
            p.grad = run.gradients[step][name]
        optimizer.param_groups[0]["lr"] = lr_of(step)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def shape(run, step):
    return run.lrs[step] / max(run.lrs.values())


def assert_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def test_adamw_is_bit_equal_to_torch_on_the_recorded_schedule(plain_run):
    found = final_weights(plain_run.path, "adamw", lr={"adamw": 3e-3})
    assert_equal(found["adamw"], by_hand(plain_run, lambda step: 3e-3 * shape(plain_run, step)))


@pytest.mark.parametrize(("rule", "expected"), [("recorded", "recorded"), (lambda step: 1e-3 * step, "function")])
def test_rates_can_be_the_recorded_ones_or_a_function(plain_run, rule, expected):
    found = final_weights(plain_run.path, {"a": "adamw"}, lr={"a": rule})
    lr_of = plain_run.lrs.__getitem__ if expected == "recorded" else rule
    assert_equal(found["a"], by_hand(plain_run, lr_of))


def test_recipes_in_one_pass_equal_recipes_one_at_a_time(plain_run):
    names = ["adamw", "sgd", "sinkgd", "mesh"]
    together = final_weights(plain_run.path, names)
    for name in names:
        assert_equal(together[name], final_weights(plain_run.path, name)[name])


def test_each_gradient_is_read_once_however_many_recipes_and_groups(plain_run, monkeypatch):
    trace = open_trace(plain_run.path)
    read = []
    real = type(trace).gradient
    monkeypatch.setattr(type(trace), "gradient", lambda self, p, s, e=None: read.append((p, s)) or real(self, p, s, e))
    result = replay(trace, ["adamw", "mesh", "sinkgd"], METRICS, memory_bytes=1)
    assert len(read) == len(set(read)) == 12 * 5
    assert result.provenance["parameter_groups"] == 5


def test_groups_fit_the_budget_and_do_not_change_the_result(plain_run):
    source = Source.of(plain_run.path)
    plan = make_plan(source, ["adamw", "mesh"], memory_bytes=6000)
    assert 1 < len(plan.groups) < 5
    whole = replay(plain_run.path, ["adamw", "mesh"], METRICS, memory_bytes=MEMORY_BYTES).frame
    parts = replay(plain_run.path, ["adamw", "mesh"], METRICS, memory_bytes=1).frame
    assert whole.sort(pl.all()).equals(parts.sort(pl.all()))


def held_bytes(walk):
    """Bytes of everything a walk keeps between two steps."""
    tensors = [t for t in walk.initial.values() if t is not None]
    for tracks in walk.tracks.values():
        for track in tracks:
            tensors += [track.weight, track.before, *track.stepper.state.values()]
    return sum(t.nbytes for t in tensors)


def test_what_a_group_holds_stays_within_its_plan_and_does_not_grow(plain_run):
    source = Source.of(plain_run.path)
    plan = make_plan(source, ["adamw", "mesh"], memory_bytes=6000)
    for group in plan.groups:
        walk = Walk(source, plan, group, {}, want=Want())
        held = [held_bytes(walk) for _ in walk]
        assert len(set(held)) == 1
        assert held[0] <= sum(bytes_of(subject.cut, plan.entrants) for subject in group)


def test_frame_on_disk_with_provenance(plain_run, tmp_path):
    result = replay(plain_run.path, ["adamw", "sinkgd"], METRICS, out=tmp_path / "r.parquet", per_expert=["update_rms"])
    frame = read_frame(tmp_path / "r.parquet")
    assert result.frame.equals(frame)
    assert set(frame["recipe"].drop_nulls()) == {"adamw", "sinkgd"}
    assert set(frame["run"]) == {open_trace(plain_run.path).id}
    experts = frame.filter((pl.col("metric") == "update_rms") & (pl.col("role") == "routed_expert"))
    assert set(experts["expert"]) == {0, 1, 2, 3}
    provenance = read_provenance(tmp_path / "r.parquet")
    assert provenance["open_loop"] == OPEN_LOOP_NOTE
    assert provenance["recipes"]["adamw"]["lr"] == 1e-3
    assert provenance["recipes"]["adamw"]["groups"]
    assert provenance["versions"]["torch"]
    assert provenance["threads"] == torch.get_num_threads()
    assert provenance["trace"]["id"] == frame["run"][0]
    assert provenance["seed"] == 0


def test_update_rms_against_numpy(plain_run):
    frame = replay(plain_run.path, "sgd", ["update_rms", "grad_norm"]).frame
    rows = frame.filter(
        (pl.col("param") == "attn.weight") & (pl.col("metric") == "grad_norm") & pl.col("step").is_not_null()
    )
    expected = [float(np.linalg.norm(plain_run.gradients[s]["attn.weight"].double().numpy())) for s in rows["step"]]
    np.testing.assert_allclose(rows["value"].to_numpy(), expected, rtol=1e-6)


def test_match_gives_every_recipe_the_references_rms_and_rate(plain_run):
    names = ["adamw", "sinkgd", "mesh"]
    frame = replay(plain_run.path, names, ["update_rms"], match="update_rms", per_expert=True).frame
    rows = frame.filter(pl.col("param") == "attn.weight").pivot("recipe", index="step", values="value")
    np.testing.assert_allclose(rows["sinkgd"].to_numpy(), rows["adamw"].to_numpy(), rtol=1e-5)
    np.testing.assert_allclose(rows["mesh"].to_numpy(), rows["adamw"].to_numpy(), rtol=1e-5)
    free = replay(plain_run.path, names, ["update_rms"], per_expert=True).frame
    other = free.filter(pl.col("param") == "attn.weight").pivot("recipe", index="step", values="value")
    assert not np.allclose(other["sinkgd"].to_numpy(), other["adamw"].to_numpy(), rtol=1e-2)


def test_match_moves_the_weight_as_far_as_the_reference(plain_run):
    """Without decay: |W_after - W_before| of the matched recipe equals the reference's, step by step."""
    source = Source.of(plain_run.path)
    recipes = {"a": "adamw(weight_decay=0.0)", "b": "sgd(weight_decay=0.0)"}
    plan = make_plan(source, recipes, match="update_rms")
    checked = 0
    for moment in Walk(source, plan, plan.groups[0], {}, want=Want()):
        first, second = moment.outcomes
        assert float(second.delta.norm()) == pytest.approx(float(first.delta.norm()), rel=1e-4)
        checked += 1
    assert checked == 12 * len(plan.groups[0])


def test_a_recipe_matched_to_itself_is_itself(plain_run):
    """The trial step that learns the RMS leaves no trace in the state."""
    found = final_weights(plain_run.path, {"one": "adamw", "two": "adamw"}, match="update_rms")
    assert_equal(found["two"], found["one"])


def test_gaps_refuse_stateful_recipes_only(tiny_run):
    run = tiny_run(keep=lambda step: (step - 1) % 6 < 3)
    with pytest.raises(GradreelError) as caught:
        replay(run.path, ["sinkgd", "adamw"], METRICS)
    message = str(caught.value)
    assert "adamw keeps state" in message
    assert "between 3 and 7" in message
    assert "gaps='bursts'" in message
    assert "\n" not in message
    replay(run.path, "sgd(momentum=0.0)", METRICS)


@pytest.mark.parametrize("gaps", ["bursts", "ignore"])
def test_gaps_policies_against_a_loop_by_hand(tiny_run, gaps):
    run = tiny_run(keep=lambda step: (step - 1) % 6 < 3)
    steps = [1, 2, 3, 7, 8, 9]
    found = final_weights(run.path, "adamw", gaps=gaps)["adamw"]
    restart = (7,) if gaps == "bursts" else ()
    assert_equal(found, by_hand(run, lambda s: 1e-3 * shape(run, s), steps=steps, restart=restart))


def test_a_skipped_step_is_no_gap_and_becomes_a_row(tiny_run):
    run = tiny_run(skip=lambda step: step == 5)
    frame = replay(run.path, "adamw", METRICS).frame
    skipped = frame.filter(pl.col("flag") == "skipped")
    assert skipped.select("step", "metric").rows() == [(5, "skipped_step")]
    steps = [s for s in range(1, 13) if s != 5]
    found = final_weights(run.path, "adamw")["adamw"]
    assert_equal(found, by_hand(run, lambda s: 1e-3 * shape(run, s), steps=steps))


def test_without_weights_only_update_metrics_are_offered(tiny_run):
    run = tiny_run(with_weights=False)
    result = replay(run.path, "adamw", ["update_rms", "update_cos"])
    assert result.frame.filter(pl.col("metric") == "update_rms").height
    assert any("only metrics of the update" in note for note in result.notes)
    with pytest.raises(NotRecorded, match="weight"):
        replay(run.path, "adamw", ["path_length"])
    assert "path_length" not in set(replay(run.path, "adamw").frame["metric"])


def test_a_missing_stream_is_named(tiny_run):
    run = tiny_run(streams=("gradient", "scalars"))
    with pytest.raises(NotRecorded, match="routing"):
        replay(run.path, "adamw", ["expert_load"])
    run = tiny_run(streams=("routing", "scalars"))
    with pytest.raises(NotRecorded, match="gradient"):
        replay(run.path, "adamw", METRICS)


def test_none_gradients_leave_weight_and_state_alone(tiny_run):
    run = tiny_run(hide=lambda step, name, g: None if name == "norm.weight" and step % 2 == 0 else g)
    found = final_weights(run.path, "adamw")["adamw"]
    assert_equal(found, by_hand(run, lambda s: 1e-3 * shape(run, s)))


def test_subset_of_experts_equals_those_experts_of_the_whole(tiny_run):
    whole, part = tiny_run(), tiny_run(experts=lambda step: (1, 3))
    names = ["adamw", "sinkgd"]
    all_of, some = final_weights(whole.path, names), final_weights(part.path, names)
    for name in names:
        for param in ("experts.up", "experts.down"):
            assert some[name][param].shape[0] == 2
            assert torch.equal(some[name][param], all_of[name][param][[1, 3]])
    result = replay(part.path, "adamw", ["update_rms", "amplification"], per_expert=True)
    rows = result.frame.filter(pl.col("role") == "routed_expert")
    assert set(rows["expert"]) == {1, 3}
    assert any("subset of experts" in note for note in result.notes)
    full = replay(whole.path, "adamw", ["update_rms", "amplification"], per_expert=True).frame
    keys = ["step", "param", "expert", "metric"]
    both = rows.join(full, on=keys, how="left", suffix="_full").filter(pl.col("value").is_not_null())
    assert both.height
    np.testing.assert_array_equal(both["value"].to_numpy(), both["value_full"].to_numpy())


def test_experts_that_change_from_step_to_step_are_cut_to_the_common_ones(tiny_run):
    names = ["adamw", "sinkgd"]
    whole = final_weights(tiny_run().path, names)
    part = final_weights(tiny_run(experts=lambda step: (0, 1, 3) if step % 2 else (1, 2, 3)).path, names)
    for name in names:
        assert torch.equal(part[name]["experts.up"], whole[name]["experts.up"][[1, 3]])
    with pytest.raises(NotRecorded, match=r"no expert of experts\.up was recorded in every step"):
        replay(tiny_run(experts=lambda step: (0, 1) if step % 2 else (2, 3)).path, "adamw", METRICS)


def test_one_bad_expert_diverges_alone(tiny_run):
    def poison(step, name, gradient):
        if name == "experts.up" and step == 4:
            gradient = gradient.clone()
            gradient[2, 0, 0] = float("nan")
        return gradient

    clean, bad = tiny_run(), tiny_run(hide=poison)
    names = ["adamw", "sinkgd", "mesh"]
    result = replay(bad.path, names, METRICS)
    rows = result.frame.filter(pl.col("flag") == "diverged")
    assert {(r["recipe"], r["step"], r["expert"], r["value"]) for r in rows.iter_rows(named=True)} == {
        (name, 4, 2, 4.0) for name in names
    }
    healthy, poisoned = final_weights(clean.path, names), final_weights(bad.path, names)
    for name in names:
        others = [0, 1, 3]
        assert torch.equal(healthy[name]["experts.up"][others], poisoned[name]["experts.up"][others])
        assert not torch.isfinite(poisoned[name]["experts.up"][2]).all()


def test_a_diverging_recipe_is_a_row_and_the_others_go_on(plain_run):
    recipes = ["sgd", "adamw"]
    result = replay(plain_run.path, recipes, METRICS, lr={"sgd": lambda step: 3e38 if step >= 6 else 1e-3})
    rows = result.frame.filter(pl.col("flag") == "diverged")
    assert set(rows["recipe"]) == {"sgd"}
    assert rows["step"].min() in (6, 7)
    assert set(rows["param"]) == set(Source.of(plain_run.path).infos)
    alone = final_weights(plain_run.path, "adamw")["adamw"]
    lr = {"sgd": lambda step: 3e38 if step >= 6 else 1e-3}
    assert_equal(final_weights(plain_run.path, recipes, lr=lr)["adamw"], alone)


def test_cost_rows(plain_run):
    frame = replay(plain_run.path, ["adamw", "mesh"], ["state_bytes", "pinned_gradient_bytes", "step_ms"]).frame
    costs = {(r["recipe"], r["param"], r["metric"]): r["value"] for r in frame.iter_rows(named=True)}
    assert costs["adamw", "experts.up", "state_bytes"] == 2 * 4 * 10 * 6 * 4
    assert costs["adamw", "experts.up", "pinned_gradient_bytes"] == 0
    assert costs["mesh", "experts.up", "pinned_gradient_bytes"] == 4 * 10 * 6 * 4
    assert costs["mesh", "experts.up", "step_ms"] > 0


def test_step_ms_is_the_mean_over_all_steps_but_the_first(plain_run, monkeypatch):
    from toolkit.replay import _walk

    readings = iter(range(10_000))

    def perf_counter():
        """Read before and after each step of two parameters in turn: the n-th step of either takes n^2 seconds."""
        reading = next(readings)
        return float((reading // 4 + 1) ** 2) if reading % 2 else 0.0

    monkeypatch.setattr(_walk, "time", SimpleNamespace(perf_counter=perf_counter))
    params = ["norm.weight", "attn.weight"]
    frame = replay(plain_run.path, "adamw", ["step_ms"], params=params).frame
    expected = 1e3 * sum(n**2 for n in range(2, 13)) / 11
    values = dict(frame.select("param", "value").rows())
    assert values == {name: pytest.approx(expected) for name in params}


def test_presence_and_counts_reach_the_recipe(plain_run, monkeypatch):
    from toolkit.replay import _walk

    seen = {}
    real = _walk.Stepper

    class Spy(real):
        def step(self, weight, gradient, **options):
            if self.info.name == "experts.up":
                seen[len(seen) + 1] = (options["presence"], options["tokens_per_expert"])
            return super().step(weight, gradient, **options)

    monkeypatch.setattr(_walk, "Stepper", Spy)
    replay(plain_run.path, "mesh", ["update_rms"])
    for step, (presence, tokens) in seen.items():
        np.testing.assert_array_equal(tokens, plain_run.tokens[step])
        np.testing.assert_array_equal(presence == 3, plain_run.tokens[step] > 0)


def test_backend_is_used_and_recorded(plain_run):
    result = replay(plain_run.path, "sinkgd", METRICS, backend="eager")
    assert result.provenance["backend"] == "eager"
    assert "backend=eager" in result.provenance["recipes"]["sinkgd"]["groups"]["routed_expert"]
    with pytest.raises(GradreelError, match="unknown backend 'fast'"):
        replay(plain_run.path, "sinkgd", METRICS, backend="fast")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recipes": "adamv"}, "unknown recipe 'adamv'; did you mean 'adamw'"),
        ({"recipes": []}, "needs an optimizer at work; give at least one recipe"),
        ({"recipes": ["adamw", "adamw"]}, "given twice"),
        ({"metrics": ["update_rmz"]}, "update_rms"),
        ({"params": ["experts.sideways"]}, "unknown parameter"),
        ({"steps": [3, 99]}, "step 99 was not recorded; recorded: 1 to 12"),
        ({"steps": (50, 60)}, "no recorded step"),
        ({"match": "norm"}, "unknown match 'norm'"),
        ({"device": "abacus"}, "device is 'abacus'; allowed: cpu"),
        ({"memory_bytes": "much"}, "'much' is not a size"),
        ({"gaps": "fill"}, "unknown gaps policy 'fill'"),
        ({"lr": {"mesh": 1.0}}, "unknown recipe in lr 'mesh'"),
        ({"lr": {"adamw": -1.0}}, "lr of adamw is -1.0; allowed"),
        ({"lr": {"adamw": "fast"}}, "lr of adamw is 'fast'; allowed"),
    ],
)
def test_wrong_arguments_are_one_line(plain_run, options, text):
    arguments = {"recipes": "adamw", "metrics": ["update_rms"], **options}
    with pytest.raises(GradreelError) as caught:
        replay(plain_run.path, arguments.pop("recipes"), arguments.pop("metrics"), **arguments)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t[::-1], ["another order", "attn.weight where experts.down is expected"]),
        (lambda t: (ParamInfo("attn.w", "attention", (6, 6)), *t[1:]), ["lacks attn.w", "has also attn.weight"]),
        (lambda t: (ParamInfo("attn.weight", "attention", (6, 7)), *t[1:]), ["attn.weight (6, 6) instead of (6, 7)"]),
        (lambda t: t[1:], ["has also attn.weight"]),
    ],
)
def test_another_parameter_table_is_refused_with_the_names(plain_run, change, words):
    table = open_trace(plain_run.path).header.params
    check_parameters(table, table)
    with pytest.raises(GradreelError) as caught:
        replay(plain_run.path, "adamw", ["update_rms"], expect=change(table))
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
