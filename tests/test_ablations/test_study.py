"""The study of a trace, its ranking, and what it says against training."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from ablations.presets import Ablation, Arm
from ablations.report import write_reports
from ablations.runner import run
from ablations.study import compare_predictions, replay_results, study_trace
from ablations.study._score import block_weights, harm_scores, spearman, weighted_means
from ablations.train import Schedule, train
from toolkit.frame import OPEN_LOOP_NOTE, read_frame
from toolkit.optim import make_optimizer
from traces.errors import GradreelError
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder

_FILE = Path(__file__).with_name("tiny_experiment.py")
_SPEC = importlib.util.spec_from_file_location("tiny_experiment", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny)

STEPS = 9


def recorded(path: Path, **at: object) -> Path:
    from ablations.models import MoELanguageModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MoELanguageModel(tiny.TINY)
    optimizer = make_optimizer(model, "adamw", lr=3e-3)

    def batches(step: int, micro_step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    with Recorder(path, model, optimizer, at=RecordAt(**at), notify=lambda _: None):  # type: ignore[arg-type]
        train(model, optimizer, batches, STEPS, schedule=Schedule(STEPS))
    return path


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, pl.DataFrame]:
    root = tmp_path_factory.mktemp("study")
    trace = recorded(root / "run.trace")
    found = study_trace(trace, root / "out", progress=False)
    assert found.path == root / "out"
    return trace, root / "out", found.frame


# ------------------------------------------------------------------------------------------------- one trace


def test_components_are_what_the_trace_says(studied: tuple[Path, Path, pl.DataFrame]) -> None:
    """Tokens, idle runs, stable rank and signal to noise by hand, in float64, from the recorded tensors."""
    trace, _, frame = studied
    reel = open_trace(trace)
    names = [p for p, info in reel.infos.items() if info.role == "routed_expert"]
    tokens = np.stack([r.tokens_per_expert for r in reel.routing_steps(0)])
    component = {
        (str(r["metric"]), r["expert"]): r["value"]
        for r in frame.filter(pl.col("metric").str.starts_with("component.")).iter_rows(named=True)
    }
    for expert in range(4):
        assert component["component.tokens_per_expert", expert] == pytest.approx(tokens[:, expert].mean())
        idle = [len(list(run)) for no, run in itertools.groupby(tokens[:, expert] == 0) if no]
        assert component["component.idle_run_length", expert] == max(idle, default=0)
        shares, ratios = [], []
        for name in names:
            grads = np.stack([reel.gradient(name, s).double().numpy()[expert] for s in reel.steps])  # type: ignore[union-attr]
            active = grads[tokens[:, expert] > 0]
            first = grads[0]  # a rank is taken in every tenth step
            if np.abs(first).max() > 0:
                singular = np.linalg.svd(first, compute_uv=False)
                shares.append((singular**2).sum() / singular[0] ** 2 / min(first.shape))
            if len(active) > 1:
                mean = active.mean(0)
                ratios.append((mean**2).sum() * (len(active) - 1) / ((active - mean) ** 2).sum())
        for metric, wanted in (("stable_rank_share", shares), ("gradient_snr", ratios)):
            got = component[f"component.{metric}", expert]
            assert got == pytest.approx(np.mean(wanted), rel=1e-4) if wanted else got is None


def test_every_role_and_expert_has_its_measures_with_intervals(studied: tuple[Path, Path, pl.DataFrame]) -> None:
    _, _, frame = studied
    metrics = set(frame["metric"])
    assert {"grad_cos", "sign_flip_rate", "gradient_snr", "burstiness", "coherence", "amplification"} <= metrics
    assert {"max_vio", "load_cv", "update_cos", "stable_rank", "straightness", "grad_norm_low"} <= metrics
    roles = frame.filter((pl.col("metric") == "grad_norm") & (pl.col("flag") == "mean"))["role"].cast(pl.String)
    assert set(roles) == {"router", "routed_expert"}
    experts = frame.filter((pl.col("metric") == "grad_norm") & (pl.col("role") == "routed_expert"))
    assert set(experts["expert"].drop_nulls()) == {0, 1, 2, 3}
    keys = ["param", "layer", "expert", "lag", "flag", "role"]
    for name in ("grad_norm", "amplification", "predicted_harm"):
        sides = [
            frame.filter(pl.col("metric") == f"{name}_{end}").select(*keys, pl.col("value").alias(end))
            for end in ("low", "high")
        ]
        both = sides[0].join(sides[1], on=keys, nulls_equal=True)
        assert both.height
        assert (both["low"] <= both["high"]).all()


def test_the_report_stands_alone(studied: tuple[Path, Path, pl.DataFrame]) -> None:
    _, out, _ = studied
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert "<svg" in page
    assert "http://" not in page
    assert "https://" not in page
    for said in (OPEN_LOOP_NOTE, "predicted harm", "gradient_snr"):
        assert said in page
        assert said in text
    assert not list(out.glob(".measuring-*"))
    assert read_frame(out / "study.parquet").height > 100


def test_routing_alone_can_be_studied(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "routing.trace", streams=("routing", "scalars"))
    found = study_trace(trace, tmp_path / "out", progress=False)
    assert set(found.ranking[0]) == {"layer", "expert", "score", "low", "high", "tokens_per_expert", "idle_run_length"}
    assert found.ranking[0]["tokens_per_expert"] <= found.ranking[-1]["tokens_per_expert"]


def test_bursts_can_be_studied(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "bursts.trace", bursts=(3, 5))
    assert len(study_trace(trace, tmp_path / "out", progress=False).ranking) == 4


def test_what_cannot_be_studied_is_one_line(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "scalars.trace", streams=("scalars",))
    with pytest.raises(GradreelError, match=r"no recorded step|neither gradients nor routing"):
        study_trace(trace, tmp_path / "out", progress=False)
    with pytest.raises(GradreelError, match="whose files never change"):
        study_trace(trace, trace, progress=False)
    with pytest.raises(GradreelError, match="holds no results of an experiment"):
        replay_results(tmp_path)


# ---------------------------------------------------------------------------------------------------- scores


def test_scores_are_means_of_ranks() -> None:
    table = {"tokens_per_expert": np.array([1.0, 5.0, 3.0]), "idle_run_length": np.array([9.0, 0.0, np.nan])}
    assert harm_scores(table).tolist() == [1.0, 0.0, 0.5]
    same = {"tokens_per_expert": np.array([1.0, 2.0, 2.0]), "idle_run_length": np.zeros(3)}
    assert harm_scores(same).tolist() == [1.0, 0.25, 0.25]
    assert np.isnan(harm_scores({"tokens_per_expert": np.full(2, np.nan)})).all()


def test_blocks_keep_neighbours_together_and_means_leave_gaps_out() -> None:
    weights = block_weights(np.arange(27), resamples=200)
    assert weights.shape == (200, 27)
    assert (weights.sum(axis=1) == 27).all()
    values = np.array([[1.0, np.nan], [3.0, 4.0]])
    means = weighted_means(values, np.array([[1.0, 1.0], [2.0, 0.0]]))
    assert means[0].tolist() == [2.0, 4.0]
    assert means[1, 0] == 1.0
    assert np.isnan(means[1, 1])


def test_the_interval_of_a_mean_covers_as_often_as_it_says() -> None:
    """Of neighbours correlated by 0.5, a bootstrap of single steps is too narrow; blocks come near the 95%."""
    draw = np.random.default_rng(3)
    noise = draw.standard_normal((200, 400))
    series = np.zeros_like(noise)
    for step in range(1, 200):
        series[step] = 0.5 * series[step - 1] + noise[step]
    drawn = weighted_means(series, block_weights(np.arange(200)))
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    assert 0.86 <= ((low <= 0) & (high >= 0)).mean() <= 0.97


def test_spearman_against_scipy_and_by_hand() -> None:
    from scipy import stats

    draw = np.random.default_rng(0)
    x = draw.integers(0, 6, 30).astype(float)
    y = x + draw.standard_normal(30) * 2
    found = spearman(x, y)
    assert found.rho == pytest.approx(stats.spearmanr(x, y).statistic)
    z, half = math.atanh(found.rho), 1.959964 * math.sqrt((1 + found.rho**2 / 2) / 27)
    assert (found.low, found.high) == (pytest.approx(math.tanh(z - half)), pytest.approx(math.tanh(z + half)))
    four = spearman(np.array([1.0, 2, 3, 4]), np.array([1.0, 2, 3, 4]))
    assert (four.rho, four.low, four.p) == (1.0, None, pytest.approx(2 / 24))
    assert spearman(np.array([1.0, 2, np.nan]), np.array([1.0, 2, 3])).rho is None
    assert spearman(np.ones(5), np.arange(5.0)).words == "undefined (n = 5)"


# ---------------------------------------------------------------------------------------- against closed loop


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    arms = {
        "sinkgd": Arm("sinkgd(alpha=1.0)"),
        "mesh": Arm("mesh"),
        "sign": Arm("sinkgd(alpha=1.0)+sign_only"),
        "forced": Arm("mesh", routing="recorded"),
    }
    size = replace(tiny.SIZE, steps=8, settings={"few": {}, "more": {"batch": 4}}, grid=(1e-3,))
    preset = Ablation("small", "Is it?", "It is.", arms, "sinkgd", {"cpu": size}, ways=("shared", "tuned"))
    run(preset, out=root, executor="here")
    return root


def test_replay_stands_beside_the_closed_loop(results: Path) -> None:
    agreed = replay_results(results, steps=4, progress=False)
    assert {(one.way, one.setting) for one in agreed} == {(w, s) for w in ("tuned", "shared") for s in ("few", "more")}
    assert {"update_cos", "update_sign_flip_rate", "update_rms", "amplification"} <= {one.measure for one in agreed}
    frame = read_frame(results / "replay.parquet")
    value = {
        (r["arm"], r["metric"]): r["value"]
        for r in frame.filter(pl.col("metric").str.starts_with("open.")).iter_rows(named=True)
    }
    assert value["few/mesh", "open.update_cos"] > value["few/sinkgd", "open.update_cos"]
    assert ("few/forced", "open.update_cos") not in value
    losses = read_frame(results / "frame.parquet").filter(
        (pl.col("metric") == "paired_difference") & (pl.col("run") == "tuned")
    )
    closed = dict(losses.group_by("arm").agg(pl.col("value").mean()).iter_rows()) | {"few/sinkgd": 0.0}
    arms = ("sinkgd", "mesh", "sign")
    order = [
        np.argsort(np.argsort(v))
        for v in (
            [value[f"few/{arm}", "open.update_cos"] for arm in arms],
            [closed[f"few/{arm}"] for arm in arms],
        )
    ]
    one = next(a for a in agreed if (a.way, a.setting, a.measure) == ("tuned", "few", "update_cos"))
    assert one.found.n == 3
    assert one.found.rho == pytest.approx(np.corrcoef(*order)[0, 1])
    written = write_reports(results)
    for file in (written.html, written.markdown):
        text = file.read_text()
        assert "Replay against closed loop" in text
        assert OPEN_LOOP_NOTE in text
        assert "at most 3 arms" in text


def test_predictions_are_compared_with_outcomes(results: Path, tmp_path: Path) -> None:
    if not (results / "replay.parquet").is_file():
        replay_results(results, steps=4, progress=False)
    references = Path(study_file()).parents[1] / "reference" / "simulate"
    found = compare_predictions([results, references / "rank_or_rate"], tmp_path)
    presets = [c for c in found.conditions if c.source == "presets"]
    assert [c.name for c in presets] == ["small few", "small more"]
    assert set(presets[0].components) >= {"tokens_per_expert", "amplification", "stable_rank_share"}
    losses = read_frame(results / "frame.parquet").filter(
        (pl.col("metric") == "paired_difference") & (pl.col("run") == "tuned") & (pl.col("arm") == "few/mesh")
    )
    assert presets[0].gap == pytest.approx(-losses["value"].mean())
    worlds = [c for c in found.conditions if c.source == "simulations"]
    frame = read_frame(references / "rank_or_rate" / "frame.parquet")
    ratio = frame.filter((pl.col("metric") == "risk_ratio_tuned") & (pl.col("arm") == "mesh"))
    assert len(worlds) == ratio.height
    gaps = {c.name.split(" ", 1)[1]: c.gap for c in worlds}
    assert gaps == pytest.approx({r["run"]: math.log(r["value"]) for r in ratio.iter_rows(named=True)})
    assert found.correlations["simulations", "condition_harm"].n == len(worlds)
    assert found.correlations["presets", "condition_harm"].rho is None  # two conditions order nothing
    assert "undefined (n = 2)" in (tmp_path / "report.md").read_text()
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_results_without_a_studied_reel_are_named(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("provenance.json", "frame.parquet"):
        (tmp_path / name).write_bytes((results / name).read_bytes())
    with pytest.raises(GradreelError, match="no condition to compare"):
        compare_predictions([tmp_path])
    assert f"gradreel study {tmp_path}" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(GradreelError, match="holds no results"):
        compare_predictions([tmp_path / "nowhere"])
    about = json.loads((tmp_path / "provenance.json").read_text())
    about["kind"] = "something else"
    (tmp_path / "provenance.json").write_text(json.dumps(about))
    with pytest.raises(GradreelError, match="no condition to compare"):
        compare_predictions([tmp_path])


def study_file() -> str:
    import ablations.study

    return str(ablations.study.__file__)


def test_the_committed_comparison_is_of_the_references() -> None:
    """What it says of worlds is in their frames, and its correlations are those of its own conditions."""
    reference = Path(study_file()).parents[1] / "reference"
    kept = read_frame(reference / "study" / "prediction.parquet")
    worlds = [reference / "simulate" / name for name in ("rank_or_rate", "smoothing_phase")]
    gaps = kept.filter((pl.col("metric") == "condition_gap") & (pl.col("arm") == "simulations"))
    by_name = dict(gaps.select("run", "value").iter_rows())
    now = {c.name: c.gap for c in compare_predictions(worlds).conditions}
    assert now == pytest.approx({name: by_name[name] for name in now})
    for source in ("presets", "simulations"):
        mine = kept.filter(pl.col("arm") == source)
        pair = [
            dict(mine.filter(pl.col("metric") == metric).select("run", "value").iter_rows())
            for metric in ("condition_harm", "condition_gap")
        ]
        names = sorted(pair[0])
        found = spearman(*(np.array([values[name] for name in names]) for values in pair))
        said = mine.filter((pl.col("metric") == "condition_rho") & (pl.col("param") == "condition_harm"))
        assert said["value"].to_list() == [pytest.approx(found.rho)]
        assert said["support"].to_list() == [found.n]
