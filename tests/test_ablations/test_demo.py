"""The demo end to end with tiny settings, and what becomes of folders that are there already."""

import dataclasses
import html
import json
import math
from pathlib import Path

import polars as pl
import pytest
import torch

from ablations import demo
from ablations.presets import PRESETS, Recording
from toolkit.frame import OPEN_LOOP_NOTE, read_frame, read_provenance
from traces import GradreelError, open_trace

ARMS = ("adamw", "sinkgd", "mesh")


@pytest.fixture(scope="module")
def tiny() -> Recording:
    preset = PRESETS.get("demo")
    model = dataclasses.replace(
        preset.model, hidden_size=32, expert_hidden=16, dense_hidden=32, num_heads=2, num_kv_heads=1, head_dim=16
    )
    return dataclasses.replace(preset, model=model, arms=ARMS, batch=4, length=32, steps=12, warmup=2)


@pytest.fixture(scope="module")
def finished(tiny: Recording, tmp_path_factory: pytest.TempPathFactory) -> demo.DemoResult:
    return demo.run_demo(tmp_path_factory.mktemp("runs") / "demo", preset=tiny)


def test_it_leaves_a_trace_a_frame_and_a_report(finished: demo.DemoResult, tiny: Recording) -> None:
    assert sorted(p.name for p in finished.folder.iterdir()) == [
        "demo.json",
        "demo.trace",
        "frame.parquet",
        "report.html",
    ]
    assert [p.name for p in finished.folder.parent.iterdir()] == ["demo"]
    trace = open_trace(finished.trace)
    assert len(trace.steps) == 12
    assert trace.verify() == []
    for layer in (1, 2):
        gradient = trace.gradient(f"layers.{layer}.mlp.experts.gate_up_proj", 7)
        assert gradient.shape == (8, 32, 32)
    frame = read_frame(finished.folder / "frame.parquet")
    assert set(frame["recipe"].drop_nulls()) == set(ARMS)
    assert set(tiny.metrics) <= set(frame["metric"])
    losses = frame.filter(pl.col("metric") == "loss").sort("step")["value"].to_list()
    assert losses == finished.run.losses
    assert read_provenance(finished.folder / "frame.parquet")["experiment"]["preset"] == "demo"


def test_the_recorded_optimizer_is_reproduced_bit_for_bit(finished: demo.DemoResult) -> None:
    assert "bit-exact" in finished.selfcheck


def test_the_last_lines_name_report_verdict_and_three_commands(finished: demo.DemoResult) -> None:
    lines = finished.closing_lines()
    page = html.unescape(finished.report.read_text())
    assert f"Report: {finished.report}" in lines
    assert f"Verdict: {finished.verdict}" in lines
    assert len([line for line in lines if line.startswith("  gradreel ")]) == 3
    assert len(finished.verdict.splitlines()) == 1
    assert OPEN_LOOP_NOTE in page
    assert str(finished.trace) in page
    assert ".demo-" not in page
    assert finished.verdict in page


def test_the_demo_has_every_metric_that_the_figures_need() -> None:
    from toolkit.plots import PLOTS

    for plot in (plot for plot in PLOTS.all() if plot.about == "updates"):
        assert set(plot.requires) <= set(PRESETS.get("demo").metrics), plot.name


def test_its_model_is_of_the_promised_size() -> None:
    from ablations.models import MoELanguageModel

    with torch.device("meta"):
        model = MoELanguageModel(PRESETS.get("demo").model)
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 2e6
    assert len(PRESETS.get("demo").recipes()) == 8


def test_a_rerun_replaces_a_finished_demo_and_nothing_else(
    tiny: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quick(folder: Path, content: str) -> None:
        monkeypatch.setattr(demo, "record_preset", lambda preset, path, **_: (path.parent / "new").write_text(content))
        monkeypatch.setattr(demo, "_replay", lambda preset, folder: _MadeUp())
        monkeypatch.setattr(demo, "_report", lambda *a: "verdict")
        demo.run_demo(folder, preset=tiny)

    target = tmp_path / "runs" / "demo"
    quick(target, "first")
    (target / "stale").touch()
    quick(target, "second")
    assert (target / "new").read_text() == "second"
    assert not (target / "stale").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(GradreelError, match="is no finished demo, so it is left alone"):
        quick(mine, "third")
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "runs"]
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["demo"]


def test_a_demo_that_fails_leaves_the_old_one_whole(
    tiny: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "demo"
    target.mkdir()
    (target / "demo.json").write_text(json.dumps({"made_by": "gradreel demo"}))

    def fails(preset: Recording, path: Path, **_: object) -> None:
        path.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "record_preset", fails)
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(target, preset=tiny)
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]
    assert (target / "demo.json").exists()


def test_a_diverged_run_is_recorded_up_to_there_and_has_its_row(tiny: Recording, tmp_path: Path) -> None:
    wild = dataclasses.replace(tiny, lr=1e30, clip=1e30, steps=8, warmup=0)
    result = demo.run_demo(tmp_path / "demo", preset=wild)
    step = result.run.diverged_at
    assert step is not None
    assert step > 1
    assert not math.isfinite(result.run.losses[-1]) or not math.isfinite(result.run.reports[-1].grad_norm)
    assert open_trace(result.trace).steps == list(range(1, step))
    row = read_frame(result.folder / "frame.parquet").filter((pl.col("metric") == "loss") & (pl.col("step") == step))
    assert row["flag"].to_list() == ["diverged"]
    assert f"diverged at step {step}" in result.report.read_text()


class _MadeUp:
    """What the demo asks of a replay and of its self-check."""

    message = "made up"

    def __init__(self) -> None:
        self.provenance: dict[str, dict[str, str]] = {"trace": {}}

    def selfcheck(self, recipe: object) -> "_MadeUp":
        return self
