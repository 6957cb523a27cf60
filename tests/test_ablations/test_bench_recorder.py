"""The recorder's benchmark: its arithmetic on made-up times, and one short real run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ablations.bench_recorder import bench_recorder, ratio_of, run_bench
from ablations.presets import PRESETS
from traces import GradreelError
from traces.console import CheckFailed


def test_the_interval_holds_the_true_median_and_shrinks_with_pairs() -> None:
    noise = np.random.default_rng(3)
    plain = noise.lognormal(-2, 0.3, 2000)
    recorded = plain * noise.normal(1.05, 0.02, 2000)
    many, few = ratio_of(recorded, plain), ratio_of(recorded[:50], plain[:50])
    assert many.low < 1.05 < many.high
    assert many.low < many.median < many.high
    assert few.low < few.median < few.high
    assert (many.high - many.low) < (few.high - few.low) / 3
    assert many.pairs == 2000


def test_rare_slow_steps_show_in_the_sums_and_not_in_the_median() -> None:
    plain = np.full(400, 0.1)
    recorded = plain.copy()
    recorded[::20] += 0.2
    ratio = ratio_of(recorded, plain)
    assert ratio.median == ratio.high == 1.0
    assert ratio.of_sums == pytest.approx(1.1)
    assert ratio.of_sums_low < 1.1 < ratio.of_sums_high


def test_a_short_real_run_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = PRESETS.get("demo")
    model = dataclasses.replace(demo.model, hidden_size=32, expert_hidden=16, dense_hidden=32, num_heads=2)
    small = dataclasses.replace(demo, model=model, batch=2, length=32)
    full, statistics, bursts = bench_recorder(6, modes=("full", "statistics", "bursts"), preset=small, folder=tmp_path)
    for result in (full, statistics, bursts):
        assert result.overhead.pairs == result.control.pairs == 6
        assert result.tokens_per_step == 64
    gradient_bytes = 4 * 2 * (8 * 3 * 16 * 32 + 8 * 32)  # two MoE layers: experts and router, float32
    assert gradient_bytes < full.trace_bytes_per_step < 3 * gradient_bytes
    assert statistics.trace_bytes_per_step < gradient_bytes / 2  # the snapshots of so short a run are in it
    assert bursts.trace_bytes_per_step < full.trace_bytes_per_step / 2
    assert [result.bar for result in (full, statistics, bursts)] == [1.08, 1.03, 1.01]
    assert list(tmp_path.iterdir()) == []


def test_bursts_are_16_recorded_steps_and_484_idle_ones() -> None:
    from ablations.bench_recorder import _of_mode

    times = {"full": np.array([2.0, 3.0]), "idle": np.array([1.0, 1.0])}
    assert _of_mode("bursts", times).tolist() == pytest.approx([1 + 16 / 500, 1 + 2 * 16 / 500])
    assert _of_mode("full", times).tolist() == [2.0, 3.0]


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(GradreelError, match="pairs is 1; allowed: at least 2"):
        bench_recorder(1)
    with pytest.raises(GradreelError, match=r"mode.*'fast'.*statistics"):
        bench_recorder(3, modes=("fast",))


def test_the_json_row_carries_device_unit_and_versions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ablations import bench_recorder as module

    ratio = ratio_of(np.full(5, 1.05), np.ones(5))
    three = (1.0, 2.0, 3.0)
    made_up = module.OverheadResult("full", ratio, ratio, three, three, 10.0, 64, "cpu", 2, {"torch": "x"}, 1.08)
    monkeypatch.setattr(module, "bench_recorder", lambda *a, **k: [made_up])
    run_bench(json=True)
    row = json.loads(capsys.readouterr().out)
    assert row["op"] == "recorder"
    assert row["device"] == "cpu"
    assert row["versions"] == {"torch": "x"}
    assert row["mode"] == "full"
    assert row["unit"] == "ratio of seconds"
    assert row["overhead"]["median"] == pytest.approx(1.05)
    run_bench()
    assert "within the bar of 1.08" in capsys.readouterr().out
    slow = dataclasses.replace(made_up, overhead=dataclasses.replace(ratio, high=1.09))
    monkeypatch.setattr(module, "bench_recorder", lambda *a, **k: [made_up, slow])
    with pytest.raises(CheckFailed, match=r"full up to 1.0900 \(bar 1.08\)"):
        run_bench()
