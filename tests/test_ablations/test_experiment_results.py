"""What is done with finished runs: the report, the reference results and the check against them, the command line."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from ablations.presets import PRESETS
from ablations.report import headline, is_results, write_reports
from ablations.runner import _check
from ablations.runner._check import DIFFERS, EQUAL, NOISE, adopt, check
from traces.console import CheckFailed
from traces.errors import GradreelError, UnknownName

_FILE = Path(__file__).with_name("tiny_experiment.py")
_SPEC = importlib.util.spec_from_file_location("tiny_experiment", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("results")
    tiny.run(tiny.PRESET, out=folder, executor="here")
    return folder


@pytest.fixture
def reference(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_check, "REFERENCE", tmp_path / "reference")
    return adopt("tiny", "cpu", root, report="# tiny\n")


def test_the_report_says_verdict_rule_ways_and_provenance(root: Path) -> None:
    written = write_reports(root)
    page, text = written.html.read_text(), written.markdown.read_text()
    assert written.headline.startswith("Against sinkgd, each at its own best lr, 2 seeds: ")
    for words in (written.headline, "It does if it runs.", "All arms at one lr", "Each arm at its own best lr"):
        assert words in page
        assert words in text
    assert page.index(written.headline) < page.index("Comparisons") < page.index("Figures") < page.index("Provenance")
    for name in ("paired_differences", "lr_sensitivity", "loss_curves", "delta_rms_curves"):
        assert f'<figure id="{name}">' in page
    assert "Not drawn" not in page
    assert "src=" not in page.replace('src="data:', "")
    assert "http://" not in page.replace("http://www.w3.org", "")
    rows = [line for line in text.splitlines() if line.startswith("| mesh |")]
    assert len(rows) == 4  # three ways and the grid
    assert is_results(root)


def test_a_folder_without_results_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(GradreelError, match="holds no results of an experiment"):
        write_reports(tmp_path)
    (tmp_path / "provenance.json").write_text('{"kind": "replay"}')
    with pytest.raises(GradreelError, match="of kind 'replay'"):
        write_reports(tmp_path)


def test_the_headline_says_when_nothing_was_compared() -> None:
    assert headline({"verdicts": [], "baseline": "x"}).startswith("Nothing is decided")


def test_runs_made_again_are_equal_to_the_reference(root: Path, reference: Path, tmp_path: Path) -> None:
    found = check(tiny.PRESET, "cpu", tmp_path / "again", executor="here")
    assert {one.outcome for one in found} == {EQUAL}
    assert len(found) == len(list(root.glob("[!.]*/run.json")))
    kept = pl.read_parquet(reference / "frame.parquet")
    assert set(kept["metric"].unique()) >= {"valid_loss", "peak_lr", "delta_rms", "paired_difference"}
    assert "loss" not in set(kept["metric"].unique())
    assert (reference / "frame.parquet").stat().st_size < 100_000


def test_a_sample_is_the_same_every_time_and_brings_what_it_matches(reference: Path, tmp_path: Path) -> None:
    two = [check(tiny.PRESET, "cpu", tmp_path / name, sample=3, executor="here") for name in ("a", "b")]
    assert two[0] == two[1]
    assert 3 <= len(two[0]) <= 6
    with pytest.raises(GradreelError, match="sample is 0"):
        check(tiny.PRESET, "cpu", tmp_path / "c", sample=0)


def test_another_loss_is_noise_or_a_difference(root: Path, reference: Path) -> None:
    file = reference / "provenance.json"
    provenance = json.loads(file.read_text())
    noise = _check._seed_noise(provenance["table"])
    assert noise > 0
    by_id = provenance["table"]
    first, second, third, *_ = sorted(by_id)
    by_id[first]["final_loss"] += 1.5 * noise
    by_id[second]["final_loss"] += 20 * noise
    by_id[third]["batches_sha256"] = "0"
    file.write_text(json.dumps(provenance))
    # The runs are there already, so nothing is made; what later stages ask for may have changed with the losses.
    plan_ids = set(by_id)
    specs = [spec for spec in _specs(provenance) if spec.id in plan_ids]
    found = {spec.id: _check._compare(spec, by_id[spec.id], _finished(root, spec.id), None, noise) for spec in specs}
    outcomes = {run_id: found[run_id].outcome for run_id in (first, second, third) if run_id in found}
    assert outcomes == {k: v for k, v in {first: NOISE, second: DIFFERS, third: DIFFERS}.items() if k in outcomes}
    assert len(outcomes) == 3
    assert "other data" in found[third].reason


def _specs(provenance: dict) -> list:  # type: ignore[type-arg]
    from ablations.runner._plan import Plan
    from ablations.runner._spec import Finished

    plan = Plan(tiny.PRESET, tiny.SIZE)
    fresh = {k: Finished(k, {}, v["final_loss"], None, "", "") for k, v in provenance["table"].items()}
    plan.first()
    plan.second(fresh)
    plan.third(fresh)
    return plan.specs()


def _finished(root: Path, run_id: str) -> object:
    from ablations.runner._store import finished

    return finished(root, run_id)


def test_a_changed_preset_and_a_missing_reference_are_told(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    other = replace(tiny.PRESET, sizes={"cpu": replace(tiny.SIZE, steps=7)})
    with pytest.raises(GradreelError, match="runs that its reference lacks"):
        check(other, "cpu", tmp_path / "x", executor="here")
    monkeypatch.setattr(_check, "REFERENCE", tmp_path / "none")
    with pytest.raises(GradreelError, match="has no reference results at size cpu; there are: none"):
        check(tiny.PRESET, "cpu", tmp_path / "x", executor="here")
    with pytest.raises(GradreelError, match="holds results of preset tiny, not of order"):
        adopt("order", "cpu", _results_copy(tmp_path, reference), report="")


def _results_copy(tmp_path: Path, reference: Path) -> Path:
    return Path(shutil.copytree(reference, tmp_path / "copy"))


def test_the_command_line_checks_reports_and_plans(
    root: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ablations.cli_run import report
    from ablations.runner._cli import parse_changes, print_plan, run_check

    monkeypatch.setitem(PRESETS._added, "tiny", tiny.PRESET)
    run_check("tiny", "cpu", tmp_path / "again", "here", 1, 2)
    assert "equal, 0 within noise, 0 differs" in capsys.readouterr().out
    provenance = json.loads((reference / "provenance.json").read_text())
    for entry in provenance["table"].values():
        entry["weights_sha256"] = "0"
    (reference / "provenance.json").write_text(json.dumps(provenance))
    with pytest.raises(CheckFailed, match="runs differ from the reference"):
        run_check("tiny", "cpu", tmp_path / "again", "here", 1, 2)
    capsys.readouterr()
    report(root)
    assert "report.html" in capsys.readouterr().out
    print_plan(tiny.PRESET, tiny.SIZE, root, 2)
    shown = " ".join(capsys.readouterr().out.split())
    assert "runs: at most 16 of 6 steps (6 of them the lr grid)" in shown
    assert parse_changes(["steps=3", "schedule=wsd", "grid=(1e-3, 2e-3)", "model.top_k=2"]) == {
        "steps": 3,
        "schedule": "wsd",
        "grid": (1e-3, 2e-3),
        "model.top_k": 2,
    }
    with pytest.raises(GradreelError, match="not NAME=VALUE"):
        parse_changes(["steps"])


def test_a_size_can_be_cut_down_and_changed() -> None:
    from ablations.runner._run import chosen

    preset, size = chosen(tiny.PRESET, "cpu", arms=["mesh"], seeds=1, changes={"steps": 3, "model.top_k": 2})
    assert list(preset.arms) == ["sinkgd", "mesh"]
    assert (size.steps, size.seeds, size.model.top_k) == (3, (0,), 2)
    for options, error in (
        ({"arms": ["nothing"]}, UnknownName),
        ({"changes": {"nothing": 1}}, UnknownName),
        ({"changes": {"model.nothing": 1}}, UnknownName),
        ({"changes": {"steps": 0}}, GradreelError),
        ({"seeds": 5}, GradreelError),
    ):
        with pytest.raises(error):
            chosen(tiny.PRESET, "cpu", **options)
    with pytest.raises(UnknownName):
        chosen(tiny.PRESET, "gpu")
