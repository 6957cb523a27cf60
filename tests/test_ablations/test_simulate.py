"""Simulations as a user meets them: worlds, tuned lr, verdicts, the frame, going on after a break, the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from ablations.cli import build_app
from ablations.simulate import Lane, Simulation, World, grid, rates, run_lanes, simulate
from ablations.simulate._engine import Outcome, evaluation_steps
from ablations.simulate._result import effect_of, final_risk, tuned_at, verdict_of
from ablations.simulate._world import eigenvalues, schedule, task, tokens_per_expert
from ablations.simulate.bench import bench_simulate
from ablations.simulate.presets import SIMULATIONS
from toolkit.frame import SCHEMA, read_frame, read_provenance
from toolkit.plots import PLOTS
from traces.console import run
from traces.errors import GradreelError

BASE = World(experts=2, rows=4, columns=6, steps=40)


def small(**changes: Any) -> Simulation:
    values: dict[str, Any] = {
        "name": "small",
        "question": "Which?",
        "decides": "The interval.",
        "worlds": grid(BASE, tokens=(1, 4), activity=(1.0, 0.5)),
        "arms": {"stateless": "sinkgd(alpha=1.0)", "mesh": "mesh", "sgd": "sgd"},
        "baseline": "stateless",
        "lr": (0.003, 0.01, 0.03),
        "grids": {"sgd": (0.01, 0.03, 1000.0)},
        "seeds": (0, 1, 2),
    }
    return Simulation(**{**values, **changes})


# -------------------------------------------------------------------------------------------------------------- worlds


def test_activity_and_persistence_are_those_asked_for() -> None:
    active = tokens_per_expert(World(experts=40, steps=4000, activity=0.3, persistence=0.8, tokens=5), 0) > 0
    assert active.mean() == pytest.approx(0.3, abs=0.02)
    centred = active - active.mean()
    assert (centred[:, 1:] * centred[:, :-1]).mean() / centred.var() == pytest.approx(0.8, abs=0.02)
    alone = tokens_per_expert(World(experts=40, steps=4000, activity=0.3, tokens=5), 0)
    assert set(np.unique(alone)) == {0, 5}


def test_zipf_loads_follow_their_shares() -> None:
    counts = tokens_per_expert(World(experts=4, steps=5000, zipf=1.0, tokens=6), 3)
    share = 1 / np.arange(1, 5)
    np.testing.assert_allclose(counts.mean(1), 24 * share / share.sum(), rtol=0.03)
    np.testing.assert_allclose(counts.var(1), counts.mean(1), rtol=0.1)


def test_one_more_expert_changes_no_other() -> None:
    few, many = (World(experts=e, steps=50, activity=0.4) for e in (2, 5))
    np.testing.assert_array_equal(tokens_per_expert(few, 1), tokens_per_expert(many, 1)[:2])
    short = run_lanes(World(experts=2, rows=4, columns=4, steps=9), [Lane("mesh", 0.1)], [0], threads=1).values
    longer = run_lanes(World(experts=3, rows=4, columns=4, steps=9), [Lane("mesh", 0.1)], [0], threads=1).values
    assert short.tobytes() == longer[:, :, :2].tobytes()


@pytest.mark.parametrize("basis", ["axes", "rotated"])
def test_inputs_have_the_spectrum(basis: str) -> None:
    world = World(columns=12, spectrum=1.5, basis=basis)
    mine = task(world, 0, 0)
    np.testing.assert_allclose(mine.root @ mine.root.T, mine.sigma, atol=1e-12)
    values = np.sort(np.linalg.eigvalsh(mine.sigma))[::-1]
    np.testing.assert_allclose(values, eigenvalues(world), rtol=1e-10)
    np.testing.assert_allclose(values / values[0], np.arange(1, 13) ** -1.5, rtol=1e-10)
    assert values.mean() == pytest.approx(1)
    assert (np.abs(mine.sigma - np.diag(np.diag(mine.sigma))).max() > 0.01) == (basis == "rotated")


def test_schedules() -> None:
    falling = schedule(World(steps=10))
    assert falling[0] == 1
    assert falling[5] == pytest.approx(0.5)
    assert falling[-1] < 0.03
    assert (schedule(World(steps=10, schedule="constant")) == 1).all()
    assert evaluation_steps(World(steps=3)).tolist() == [1, 2, 3]
    assert evaluation_steps(World(steps=1000))[-1] == 1000


# ------------------------------------------------------------------------------------------------------------ verdicts


def test_the_tuned_lr_is_the_least_geometric_mean_and_never_diverged() -> None:
    risks = np.array([[4.0, 4.0], [1.0, 3.0], [0.1, np.nan], [0.01, np.inf]])
    assert tuned_at(risks) == 1
    assert tuned_at(np.array([[1.0, 16.0], [5.0, 5.0]])) == 0


def test_an_effect_is_the_paired_ratio_with_students_interval() -> None:
    mine = np.array([1.0, 2.0, 4.0])
    effect = effect_of("w", "a", "tuned", mine * np.exp([0.5, 0.7, 0.9]), mine, 1.1)
    half = 4.302652729911275 * 0.2 / math.sqrt(3)  # t of 2 degrees of freedom
    assert effect.ratio == pytest.approx(math.exp(0.7))
    assert (effect.low, effect.high) == (pytest.approx(math.exp(0.7 - half)), pytest.approx(math.exp(0.7 + half)))
    assert effect.verdict == "better"


def test_verdicts() -> None:
    assert verdict_of(1.2, 2.0, 1.1) == "better"
    assert verdict_of(0.5, 0.8, 1.1) == "worse"
    assert verdict_of(0.95, 1.05, 1.1) == "equal"
    assert verdict_of(0.95, 1.5, 1.1) == "not decided"
    assert verdict_of(1.05, 1.5, 1.1) == "not decided"
    lost = effect_of("w", "a", "tuned", np.array([1.0, 1.0]), np.array([np.nan, 1.0]), 1.1)
    assert (lost.verdict, math.isnan(lost.ratio)) == ("worse", True)


def test_the_final_risk_averages_where_the_end_is_not_still() -> None:
    values = np.zeros((1, 1, 2, 8, 3))
    values[..., 0] = np.arange(8)
    outcome = Outcome(np.arange(1, 9), values, None)
    assert final_risk(World(), outcome)[0, 0] == 7
    assert final_risk(World(schedule="constant"), outcome)[0, 0] == 6.5
    assert final_risk(World(drift=0.1), outcome)[0, 0] == 6.5


# ------------------------------------------------------------------------------------------------------------- results


def test_the_frame_holds_the_grid_the_tuned_lr_and_the_ratios(tmp_path: Path) -> None:
    result = simulate(small(), out=tmp_path, threads=1)
    assert list(result.frame.columns) == list(SCHEMA)
    assert read_frame(tmp_path / "frame.parquet").equals(result.frame)
    assert read_provenance(tmp_path / "frame.parquet")["question"] == "Which?"
    assert json.loads((tmp_path / "provenance.json").read_text())["worlds"]["tokens=1,activity=0.5"]["tokens"] == 1
    label = "tokens=4,activity=1.0"
    lanes = [Lane("mesh", lr) for lr in (0.003, 0.01, 0.03)]
    direct = final_risk(BASE, run_lanes(World(**{**BASE.to_dict(), "tokens": 4}), lanes, [1000, 1001, 0, 1, 2]))
    best = tuned_at(direct[:, :2])

    def rows(metric: str, arm: str, world: str = label) -> pl.DataFrame:
        frame = result.frame
        return frame.filter((pl.col("metric") == metric) & (pl.col("arm") == arm) & (pl.col("run") == world))

    assert rows("tuned_lr", "mesh")["value"].to_list() == [(0.003, 0.01, 0.03)[best]]
    np.testing.assert_allclose(rows("excess_risk_tuned", "mesh")["value"], direct[best, 2:])
    base = rows("excess_risk_tuned", "stateless")["value"].to_numpy()
    ratio = np.exp(np.log(base / direct[best, 2:]).mean())
    assert rows("risk_ratio_tuned", "mesh")["value"].item() == pytest.approx(ratio)
    # At lr 1000 plain descent diverges: its rows stay, flagged.
    assert rows("excess_risk", "sgd", f"{label};lr=1000")["flag"].to_list() == ["diverged"] * 5
    # Updates of RMS 1 have nothing to match; those of sgd have.
    np.testing.assert_allclose(
        rows("excess_risk_shared", "mesh")["value"], rows("excess_risk_matched", "mesh")["value"]
    )
    gap = rows("excess_risk_shared", "sgd")["value"] - rows("excess_risk_matched", "sgd")["value"]
    assert gap.abs().min() > 0
    assert result.effect(label, "mesh").ratio == pytest.approx(ratio)
    assert PLOTS.get("smoothing_phase")(result.frame).axes


def test_a_broken_off_run_goes_on_to_the_same_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = simulate(small(), threads=1)
    simulate(small().smaller(worlds=["tokens=1,activity=1.0"]), out=tmp_path, threads=1)
    kept = sorted((tmp_path / "worlds").glob("*.npy"))
    assert len(kept) == 2
    kept[0].write_bytes(kept[0].read_bytes()[:100])  # cut: made again
    assert simulate(small(), out=tmp_path, threads=2).frame.equals(whole.frame)
    assert len(list((tmp_path / "worlds").iterdir())) == 8

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("ran again")

    monkeypatch.setattr("ablations.simulate._run.run_lanes", refuse)
    assert simulate(small(), out=tmp_path).frame.equals(whole.frame)


def test_a_tuned_lr_on_the_edge_is_told() -> None:
    result = simulate(small(lr=(1e-6, 2e-6), grids={}).smaller(worlds=["tokens=4,activity=1.0"]), threads=1)
    assert any("tuned lr of mesh lies on the edge of its grid in 1 of 1 worlds" in note for note in result.notes)


WRONG: dict[str, Callable[[], Any]] = {
    r"tokens is 0; allowed: whole numbers in \[1": lambda: World(tokens=0),
    r"experts is 0; allowed: whole": lambda: World(experts=0),
    r"steps is True; allowed: whole": lambda: World(steps=True),
    r"noise is -1.0; allowed: \[0.0": lambda: World(noise=-1.0),
    r"noise is nan; allowed: \[0.0": lambda: World(noise=math.nan),
    r"activity is 0.0; allowed: \(0.0": lambda: World(activity=0.0),
    r"persistence is 1.0; allowed: \[0.0, 1.0\)": lambda: World(persistence=1.0),
    r"unknown gradient 'token'; did you mean 'tokens'": lambda: World(gradient="token"),
    r"rank is None with gradient 'matched'": lambda: World(gradient="matched"),
    r"unknown value of a world 'token'; did you mean 'tokens'": lambda: grid(token=(1,)),
    r"lr is nan; allowed: numbers in \(0, inf\)": lambda: Lane("mesh", math.nan),
    r"lr is 0; allowed": lambda: Lane("mesh", 0),
    r"0 lanes and 1 seeds": lambda: run_lanes(BASE, [], [0]),
    r"seed is -1; allowed": lambda: run_lanes(BASE, [Lane("sgd", 0.1)], [-1]),
    r"a grid of 0 lr": lambda: rates(1e-3, 1e-1, 0),
    r"simulation small: lr grid of stateless is \(\)": lambda: small(lr=()),
    r"simulation small: lr grid of mesh is \(nan,\)": lambda: small(lr=(0.1,), grids={"mesh": (math.nan,)}),
    r"simulation small: lr grid of stateless is \(0.1, 0.01\); give each lr once": lambda: small(lr=(0.1, 0.01)),
    r"simulation small: 0 worlds": lambda: small(worlds={}),
    r"'adam' is not among its arms: stateless, mesh, sgd": lambda: small(baseline="adam"),
    r"none in both": lambda: small(seeds=(0, 1, 1000)),
    r"threshold is 1.0; allowed: above 1": lambda: small(threshold=1.0),
    r"has no world 'x'; it has tokens=1": lambda: small().smaller(worlds=["x"]),
    r"unknown simulation 'phase'": lambda: simulate("phase"),
    r"a simulation is a name or a Simulation, not int": lambda: simulate(3),  # type: ignore[arg-type]
    r"unknown recipe 'mush'; did you mean 'mesh'": lambda: simulate(small(arms={"stateless": "mush"}, grids={})),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_mistake_is_one_line(message: str) -> None:
    with pytest.raises(GradreelError, match=message) as caught:
        WRONG[message]()
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(GradreelError, match=r"cannot write to .*name a folder"):
        simulate(small(), out=tmp_path / "file" / "deeper")


# ------------------------------------------------------------------------------------------------- presets and command


@pytest.mark.parametrize("name", SIMULATIONS.names())
def test_every_simulation_runs_and_says_what_it_asks(name: str) -> None:
    simulation = SIMULATIONS.get(name)
    assert simulation.question.endswith("?")
    assert len(simulation.decides) > 40
    first = next(iter(simulation.worlds))
    short = simulation.smaller(steps=3, seeds=3, worlds=[first])
    assert simulate(short, threads=1).frame.height > 0


def test_the_command_prints_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "smoothing_phase", "--world", "tokens=1,activity=1.0", "--steps", "5", "--seeds", "3"]
    assert run(build_app(), [*arguments, "--threads", "1", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "tokens=1,activity=1.0" in shown
    assert "Decides: In each world alone" in shown
    assert (tmp_path / "frame.parquet").is_file()


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app(), ["simulate"]) == 0
    assert "smoothing_phase: For which tokens" in capsys.readouterr().out
    assert run(build_app(), ["simulate", "smoothing_phas"]) == 2
    assert "did you mean 'smoothing_phase'?" in capsys.readouterr().err
    assert run(build_app(), ["list", "simulations"]) == 0
    assert "rank_or_rate" in capsys.readouterr().out


def test_the_bench_counts_what_it_ran() -> None:
    result = bench_simulate(1, steps=2, seeds=1)
    assert (result.configurations, result.steps, result.threads) == (50, 2, 2)
    assert result.microseconds_per_expert_step == pytest.approx(result.processor_seconds / (50 * 2 * 8) * 1e6)
