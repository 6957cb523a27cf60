"""`gradreel plan` and the answers behind it: what it prints in 80 columns, what it writes, and that answers hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import ablations.models.known  # noqa: F401  registers the names
from toolkit import cli_plan
from toolkit.frame import read_frame
from toolkit.memory import Parallel, Precision, Run, architecture
from toolkit.memory._answers import _changes, _layouts, find_layout, fit
from toolkit.memory._plan import Planner
from toolkit.memory._reported import REPORTED, reported_for
from toolkit.recipes import RECIPES
from toolkit.variants import recipe
from traces import console

GB = 10**9
STUDY = "skewadam-6.78b"


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder: `code, stdout, stderr = plan(STUDY, "-r", "adamw")`."""
    monkeypatch.chdir(tmp_path)
    app = console.new_app("test")
    cli_plan.register(app)
    app.command("other")(lambda: None)  # with one command alone its name would be taken for an argument

    def run(*words):
        code = console.run(app, ["plan", *[str(word) for word in words]])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_two_recipes_side_by_side(plan):
    code, shown, error = plan(
        STUDY, "--recipe", "skewadam", "--recipe", "adamw", "--json", "p.json", "--out", "p.parquet"
    )
    assert code == 0
    assert max(map(len, shown.splitlines())) <= 80
    assert "1,380,800,000" in shown
    assert "54,274,621,440" in shown
    assert "GiB" in shown
    assert "GB" in shown
    assert "Accuracy as papers report it (not measured here)" in shown
    assert "skewadam 108.4" in " ".join(shown.split())
    assert "JSON: p.json" in error
    written = json.loads(Path("p.json").read_text(encoding="utf-8"))
    assert [p["bytes"]["state_bytes"] for p in written["plans"]] == [1_380_800_000, 54_274_621_440]
    assert {figure["recipe"] for figure in written["reported"]} == {"skewadam", "adamw"}
    frame = read_frame("p.parquet")
    assert set(frame["recipe"]) == {"skewadam", "adamw"}
    assert set(frame["run"]) == {STUDY}


def test_many_recipes_are_one_table(plan):
    code, shown, _ = plan("nanowhale-110m", *[word for name in RECIPES.names() for word in ("-r", name)])
    assert code == 0
    assert max(map(len, shown.splitlines())) <= 80
    assert all(f"\n{name} " in shown for name in RECIPES.names())
    assert "0.331" in next(line for line in shown.splitlines() if line.startswith("mesh "))


def test_one_gpu_is_answered(plan):
    code, shown, _ = plan(STUDY, "-r", "skewadam", "-r", "adamw", "--gpu", "40GB")
    text = " ".join(shown.split())
    assert code == 0
    assert "skewadam: needs" in text
    assert "it fits, with" in text
    assert "adamw: needs" in text
    assert "it does not fit, by" in text
    assert "Least change that fits: optimizer state on the host" in text


def test_a_layout_is_found(plan):
    code, shown, _ = plan("olmoe-1b-7b", "-r", "adamw", "--gpus", "8x80GB", "--json", "p.json")
    assert code == 0
    assert "adamw: 8 GPUs of 74.506 GiB (80.000 GB): fsdp 8" in " ".join(shown.split())
    written = json.loads(Path("p.json").read_text(encoding="utf-8"))
    assert written["answers"][0]["fits"] is True
    assert written["plans"][0]["parallel"]["fsdp"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "unknown model 'nope'"),
        ([STUDY, "-r", "adam"], "unknown recipe 'adam'"),
        ([STUDY, "--tensor", "3"], "tensor degree 3 does not divide the 32 attention heads of skewadam-6.78b"),
        ([STUDY, "--gpu", "40"], "memory '40' is not understood; allowed: a number and a unit, such as 40GB"),
        ([STUDY, "--gpu", "40GB", "--gpus", "8x80GB"], "give one of the two"),
        ([STUDY, "--fsdp", "2", "--gpus", "8x80GB"], "--gpus looks for the degrees itself, but fsdp 2 is given"),
        ([STUDY, "--fsdp", "2", "--track"], "--track follows one process"),
        ([STUDY, "--json", "."], "it is a folder"),
    ],
)
def test_mistakes_are_one_line(plan, words, message):
    code, _, error = plan(*words)
    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1


SETTINGS = {"precision": Precision(), "parallel": Parallel(), "run": Run(batch=8, sequence=2048, attention="eager")}


@pytest.mark.parametrize(("name", "gigabytes"), [("adamw", 80), ("adamw", 40), ("skewadam", 24), ("mesh", 30)])
def test_the_least_change_is_the_least(name, gigabytes):
    planner = Planner(architecture("olmoe-1b-7b"))
    built = recipe(name)
    answer = fit(planner, built, gigabytes * GB, **SETTINGS)
    assert not answer.fits
    assert answer.changed.peak_bytes <= gigabytes * GB < answer.plan.peak_bytes
    cheaper = []
    changes = _changes(planner, **SETTINGS, pinned=answer.plan.pinned_gradient_bytes > 0)
    for _, words, precision, parallel, run in sorted(changes, key=lambda change: change[0]):
        if words == answer.change:
            break
        cheaper.append(planner.plan(built, precision=precision, parallel=parallel, run=run).peak_bytes)
    assert all(peak > gigabytes * GB for peak in cheaper)
    total = answer.changed.run.batch * answer.changed.run.micro_steps
    assert total == 8  # the gradient is of as many sequences as before


def test_hidden_momentum_leaves_the_gpu_only_apart_from_gradients():
    answer = fit(Planner(architecture("olmoe-1b-7b")), recipe("mesh"), 40 * GB, **SETTINGS)
    assert "momentum apart from gradients" in " ".join(answer.change)
    assert answer.changed.pinned_gradient_bytes == 0
    assert answer.changed.host_bytes >= answer.plan.pinned_gradient_bytes


def test_what_fits_needs_no_change():
    answer = fit(Planner(architecture(STUDY)), recipe("skewadam"), 80 * GB, **SETTINGS)
    assert answer.fits
    assert answer.change is None
    assert len(answer.lines()) == 1


def test_what_can_never_fit_says_how_near_it_came():
    answer = fit(Planner(architecture("nanowhale-110m")), recipe("adamw"), GB, **SETTINGS)
    assert not answer.fits
    assert answer.change is None
    assert "No change that was tried fits; the smallest needs" in answer.lines()[1]


def test_layouts_use_every_gpu_and_the_cheapest_that_fits_wins():
    planner, run = Planner(architecture("mixtral-8x7b")), Run()
    layouts = list(_layouts(planner, 16, run))
    assert {parallel.world for _, parallel, _ in layouts} == {16}
    assert len({(parallel, changed) for _, parallel, changed in layouts}) == len(layouts)
    plan, fits = find_layout(planner, recipe("adamw"), 16, 80 * GB, precision=Precision(), run=run)
    assert fits
    assert plan.peak_bytes <= 80 * GB
    chosen = next(cost for cost, parallel, changed in layouts if (parallel, changed) == (plan.parallel, plan.run))
    for cost, parallel, changed in layouts:
        if cost < chosen:
            other = planner.plan(recipe("adamw"), precision=Precision(), parallel=parallel, run=changed)
            assert other.peak_bytes > 80 * GB
    smallest, fits = find_layout(planner, recipe("adamw"), 2, 20 * GB, precision=Precision(), run=run)
    assert not fits
    assert smallest.peak_bytes > 20 * GB


def test_reported_figures_belong_to_recipes_that_exist():
    assert all(recipe(figure.recipe) for figure in REPORTED)
    assert [f.value for f in reported_for("skewadam(paper_exact=True)")] == ["108.4"]
    assert [f.value for f in reported_for("skewadam(tiers='uniform')")] == ["108.3"]
    for other in ("mesh+sign_only", "mesh(beta=0.5)", "sgd"):
        assert reported_for(other) == []


def test_one_planner_tells_recipes_apart():
    """Recipes that come and go may share an address; plans must not."""
    planner = Planner(architecture("olmoe-1b-7b"))
    states = {}
    for name in RECIPES.names() * 2:
        state = planner.plan(recipe(name), **SETTINGS).state_bytes
        assert states.setdefault(name, state) == state
    alone = Planner(architecture("olmoe-1b-7b")).plan(recipe("lion"), **replace_run(sequence=16))
    assert states["lion"] == alone.state_bytes


def replace_run(**changes):
    return {**SETTINGS, "run": replace(SETTINGS["run"], **changes)}
