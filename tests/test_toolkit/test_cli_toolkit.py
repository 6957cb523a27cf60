"""The verbs of this floor: what they print, where they write, exit codes, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import polars as pl
import pytest

import toolkit.report
from toolkit import cli
from toolkit.frame import OPEN_LOOP_NOTE, read_frame, read_provenance
from toolkit.metrics import METRICS
from traces import console
from traces.schema import Header, RawTensor, StepRecord
from traces.views import NONZERO, ParamInfo
from traces.writer import TraceWriter


@pytest.fixture
def gradreel(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder: `code, stdout, stderr = gradreel("list", "metrics")`."""
    monkeypatch.chdir(tmp_path)
    app = console.new_app("test")
    cli.register(app)

    def run(*words):
        code = console.run(app, [str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_replay_prints_a_table_of_80_columns_and_writes_the_frame(gradreel, plain_run):
    code, shown, error = gradreel("replay", plain_run.path, "-r", "adamw", "-r", "sinkgd+regrouped(stacked)")
    assert (code, error) == (0, "")
    assert OPEN_LOOP_NOTE in shown
    assert "role routed_expert" in shown
    assert "Frame: plain.replay.parquet" in shown
    lines = [line for line in shown.splitlines() if not line.startswith("Frame: ")]
    assert max(map(len, lines)) <= 80
    frame = read_frame("plain.replay.parquet")
    assert set(frame["recipe"].drop_nulls()) == {"adamw", "sinkgd+regrouped(stacked)"}
    assert {"update_cos", "amplification", "state_bytes", "expert_load"} <= set(frame["metric"])
    assert frame.filter(pl.col("metric") == "expert_load")["expert"].null_count() == 0


def test_replay_options_reach_the_engine(gradreel, plain_run):
    options = ["--metric", "update_cos", "--lag", 3, "--lag", 1, "--per-expert", "all", "--steps", "2:9", "--seed", 5]
    more = ["--lr", "adamw(eps=1e-6)=recorded", "--match", "update_rms", "--backend", "eager", "--out", "x/y.parquet"]
    recipes = ["-r", "adamw(eps=1e-6)", "-r", "sinkgd", "--param", "experts.up"]
    # Weights are recorded at step 1 only, which `--steps 2:9` leaves out: metrics of the update still work.
    code, shown, _ = gradreel("replay", plain_run.path, *options, *more, *recipes)
    assert code == 0
    assert "Note: no weight was recorded at step 2" in shown.replace("\n", " ")
    frame, provenance = read_frame("x/y.parquet"), read_provenance("x/y.parquet")
    assert set(frame["param"].drop_nulls()) == {"experts.up"}
    assert set(frame["lag"]) == {1, 3}
    assert set(frame["expert"]) == {0, 1, 2, 3}
    assert set(frame["step"].drop_nulls()) <= set(range(2, 10))
    assert provenance["recipes"]["adamw(eps=1e-6)"]["lr"] == "recorded"
    assert (provenance["match"], provenance["backend"], provenance["seed"]) == ("update_rms", "eager", 5)


def test_selfcheck_flag(gradreel, plain_run, tiny_run):
    words = ["-r", "adamw", "-m", "update_rms", "--selfcheck"]
    code, _, error = gradreel("replay", plain_run.path, *words)
    assert code == 0
    assert error.startswith("selfcheck: bit-exact: adamw")
    run = {"groups": [{"params": ["x"], "optimizer": "torch.optim.AdamW"}]}
    code, _, error = gradreel("replay", tiny_run(run=run).path, *words)
    assert code == 2
    assert error.count("\n") == 1


def test_selfcheck_that_differs_exits_with_1(gradreel, tiny_run):
    import torch

    def lying(params):
        optimizer = torch.optim.AdamW(list(params.values()), lr=1e-2)
        optimizer.param_groups[0]["eps"] = 1e-3
        return optimizer

    run = tiny_run(make=lying)
    header = run.path / "header.json"
    assert '"eps"' in header.read_text()
    words = ["replay", run.path, "-r", "sgd", "-m", "update_rms", "--selfcheck"]
    assert gradreel(*words)[0] == 0
    groups = [{"params": [p.name for p in _table()], "optimizer": "torch.optim.adamw.AdamW", "betas": [0.9, 0.999]}]
    run = tiny_run(make=lying, run={"groups": [groups[0] | {"eps": 1e-8, "weight_decay": 0.01}]})
    code, _, error = gradreel("replay", run.path, *words[2:])
    assert code == 1
    assert "differs from the recorded run: first in attn.weight" in error


def _table():
    from traces.views import ParamInfo

    names = ("attn.weight", "norm.weight", "router.weight", "experts.up", "experts.down")
    return [ParamInfo(name, "other", (1,)) for name in names]


def test_compare(gradreel, plain_run):
    code, shown, _ = gradreel("compare", plain_run.path, "-r", "adamw", "-r", "sinkgd", "-r", "mesh")
    assert code == 0
    assert "adamw vs sinkgd" in shown
    assert "sinkgd vs mesh" in shown
    assert set(read_frame("plain.compare.parquet")["metric"]) == {"pairwise_update_cos", "pairwise_weight_distance"}


def test_report_of_a_frame_and_of_a_trace(gradreel, plain_run, tmp_path, monkeypatch):
    code, shown, error = gradreel("report", plain_run.path, "-r", "sinkgd", "-r", "mesh", "--out", "page.html")
    assert code == 0, error
    assert "Report: page.html" in shown
    assert OPEN_LOOP_NOTE in (tmp_path / "page.html").read_text()
    given = {}

    def fake(path, frame, **options):
        given.update(options, path=str(path), rows=frame.height)
        return toolkit.report.Report(path, "A verdict.")

    monkeypatch.setattr(toolkit.report, "write_report", fake)
    code, shown, _ = gradreel("report", "plain.replay.parquet", "--title", "A title")
    assert (code, shown) == (0, "A verdict.\nReport: plain.replay.html\n")
    assert (given["title"], given["path"]) == ("A title", "plain.replay.html")
    assert given["rows"] == read_frame("plain.replay.parquet").height
    assert given["provenance"]["kind"] == "replay"
    assert list(given["notes"]) == given["provenance"]["notes"]
    code, _, error = gradreel("report", "plain.replay.parquet", "-r", "mesh")
    assert code == 2
    assert "need a trace" in error


@pytest.mark.parametrize("kind", ["recipes", "variants", "metrics", "plots", "stages"])
def test_list_names_every_plugin_with_a_sentence(gradreel, kind):
    code, shown, _ = gradreel("list", kind)
    assert code == 0
    names = cli._registry(kind).names()
    assert [name for name in names if name not in shown] == []
    summaries = dict(cli._summaries(cli._registry(kind)))
    assert [name for name in names if len(summaries[name]) < 10] == []


def test_list_without_a_kind_and_with_one_from_above(gradreel, monkeypatch):
    monkeypatch.setattr(cli, "KINDS", dict(cli.KINDS))
    cli.add_kind("optimizers", "toolkit.recipes", "RECIPES")
    code, shown, _ = gradreel("list")
    assert code == 0
    assert [word for word in cli.KINDS if word not in shown] == []
    assert "adamw" in gradreel("list", "optimizers")[1]


def test_listing_loads_neither_torch_nor_plots():
    code = (
        "import sys; from traces.console import new_app, run; from toolkit import cli;"
        "app = new_app(); cli.register(app);"
        "codes = [run(app, ['list', kind]) for kind in cli.KINDS];"
        "print(codes, [m for m in ('torch', 'seaborn', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0] []"


def test_a_plugin_file_is_listed_and_replayed(gradreel, plain_run, tmp_path, monkeypatch):
    monkeypatch.setattr(METRICS, "_added", {})
    (tmp_path / "mine.py").write_text(
        '"""My own metric."""\n'
        "from dataclasses import replace\n"
        "from toolkit.metrics import METRICS\n"
        'METRIC = replace(METRICS.get("update_rms"), name="my_very_own_rms", doc="What I wanted to know.")\n'
    )
    code, shown, error = gradreel("list", "metrics", "--plugin", "mine.py")
    assert code == 0, error
    assert "my_very_own_rms" in shown
    assert "What I wanted to know." in shown
    code, _, error = gradreel("replay", plain_run.path, "-r", "sgd", "-m", "my_very_own_rms")
    assert code == 0, error
    assert set(read_frame("plain.replay.parquet")["metric"]) == {"my_very_own_rms"}


def test_benches_of_floors_above_are_called(gradreel, monkeypatch):
    called = {}
    monkeypatch.setattr(cli, "BENCHES", {})
    cli.add_bench("thing", lambda **options: called.update(options))
    assert gradreel("bench", "thing", "--json", "--pairs", 4)[0] == 0
    assert called == {"json": True, "pairs": 4}


def test_bench_of_a_kernel(gradreel, monkeypatch):
    from toolkit.kernels import _bench

    def fake(op, device, *, json_path=None, peer=None, rounds, echo):
        echo(f"{op} on {device}, {rounds} rounds")
        if json_path:
            json_path.write_text(json.dumps({"rows": [rounds]}))
        return int(op == "step_statistics")

    monkeypatch.setattr(_bench, "run", fake)
    code, shown, error = gradreel("bench", "sr_sinkhorn", "--json", "--pairs", 5)
    assert (code, json.loads(shown)) == (0, {"rows": [5]})
    assert "5 rounds" in error
    code, shown, error = gradreel("bench", "step_statistics")
    assert code == 1
    assert "a check failed" in error


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["replay", "TRACE", "-r", "adamv"], "unknown recipe 'adamv'; did you mean 'adamw'? Choices: "),
        (["replay", "TRACE", "-r", "mesh+sign"], "unknown variant 'sign'"),
        (["replay", "TRACE", "-m", "update_rmz"], "unknown metric 'update_rmz'; did you mean 'update_rms'?"),
        (["replay", "TRACE", "-m", "routing_churn"], "probe"),
        (["replay", "TRACE", "--lr", "adamw"], "--lr 'adamw' is not NAME=VALUE"),
        (["replay", "TRACE", "--lr", "adamw=fast"], "lr of adamw is 'fast'"),
        (["replay", "TRACE", "--lr", "adamw=1e40"], "lr of adamw is 1e+40; allowed: [0, 1e+30]"),
        (["replay", "TRACE", "--lr", "adamw=1", "--lr", "adamw=2"], "--lr gives adamw twice, 1 and 2"),
        (["replay", "TRACE", "--seed", "9" * 30], "--seed"),
        (["replay", "TRACE", "--steps", "0:0"], "no recorded step"),
        (["replay", "TRACE", "--steps", "7"], "--steps '7' is not FIRST:LAST"),
        (["replay", "TRACE", "--steps", "70:"], "no recorded step"),
        (["replay", "TRACE", "--gaps", "fill"], "unknown gaps policy 'fill'"),
        (["replay", "TRACE", "--backend", "warp"], "unknown backend 'warp'"),
        (["replay", "TRACE", "--lag", "0"], "--lag"),
        (["replay", "TRACE", "--plugin", "none.py"], "plug-in file 'none.py' does not exist"),
        (["replay", "nowhere.trace"], "nowhere.trace"),
        (["replay"], "TRACE"),
        (["compare", "TRACE", "-r", "adamw"], "compare needs at least two recipes"),
        (["report", "nowhere.parquet"], "'nowhere.parquet' does not exist"),
        (["report", "TRACE/header.json"], "is no parquet file"),
        (["list", "metric"], "unknown kind 'metric'; did you mean 'metrics'?"),
        (["bench", "matmul"], "unknown benchmark 'matmul'"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(gradreel, plain_run, tmp_path, words, text):
    code, shown, error = gradreel(*(word.replace("TRACE", str(plain_run.path)) for word in words))
    assert code == 2
    assert shown == ""
    assert error.count("\n") == 1, error
    assert text in error
    assert list(tmp_path.glob("*.parquet*")) == []


def test_a_trace_without_routing_is_replayed_and_reported(gradreel, tmp_path):
    """What needs routing is left out of the defaults, its rows per expert too."""
    up = ParamInfo("up", "routed_expert", (2, 3, 3), expert_axis=0, num_experts=2)
    header = Header(params=(up,), streams=("gradient", "scalars"))
    with TraceWriter(tmp_path / "a.trace", header) as writer:
        for step in (1, 2):
            ones = RawTensor("float32", (2, 3, 3), np.full((2, 3, 3), step, np.float32))
            presence = {"up": np.full(2, NONZERO, np.uint8)}
            writer.append(StepRecord(step, {("gradient", "up"): ones, ("weight", "up"): ones}, presence))
    for verb in ("replay", "report"):
        code, _, error = gradreel(verb, "a.trace", "-r", "adamw", "-r", "sgd")
        assert code == 0, error


def test_a_trace_without_a_sealed_step_says_so(gradreel, tmp_path):
    TraceWriter(tmp_path / "a.trace", Header()).close()
    code, _, error = gradreel("replay", "a.trace", "-r", "adamw")
    assert code == 2
    assert "holds no sealed step" in error


def test_gaps_are_refused_on_the_command_line_too(gradreel, tiny_run):
    run = tiny_run(keep=lambda step: step != 5)
    code, _, error = gradreel("replay", run.path, "-r", "adamw")
    assert code == 2
    assert "between 4 and 6" in error
    assert gradreel("replay", run.path, "-r", "adamw", "-m", "update_rms", "--gaps", "bursts")[0] == 0


def test_help_of_every_verb_has_one_example(gradreel):
    for verb in ("replay", "compare", "report", "list", "bench"):
        code, shown, _ = gradreel(verb, "--help")
        assert code == 0
        assert shown.count(f"Example: gradreel {verb}") == 1
