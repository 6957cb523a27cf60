"""Paired statistics against slow float64 references and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from ablations.stats import compare, effect_size, evaluation_noise, hierarchical_bootstrap, holm, t_interval
from traces.errors import GradreelError


def test_the_interval_is_student_s() -> None:
    values = [0.013, -0.004, 0.009]
    mean = math.fsum(values) / 3
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / 2)
    quantile = 4.302652729911275  # of Student's t at 0.975 with 2 degrees of freedom
    low, high = t_interval(values)
    assert low == pytest.approx(mean - quantile * deviation / math.sqrt(3), rel=1e-12)
    assert high == pytest.approx(mean + quantile * deviation / math.sqrt(3), rel=1e-12)
    assert t_interval([1.0]) == (None, None)
    assert t_interval([2.0, 2.0]) == (2.0, 2.0)


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_covers_as_often_as_it_says(seeds: int) -> None:
    draws = np.random.default_rng(0).normal(0.3, 1.0, (4000, seeds))
    inside = [low <= 0.3 <= high for low, high in (t_interval(row) for row in draws)]
    # Four standard errors of a share of 0.95 in 4000 draws.
    assert abs(np.mean(inside) - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_a_bootstrap_over_three_seeds_covers_too_seldom_which_is_why_it_does_not_decide() -> None:
    draw = np.random.default_rng(1)
    inside = 0
    for _ in range(300):
        windows = [np.full(4, value) for value in draw.normal(0.0, 1.0, 3)]
        low, high = hierarchical_bootstrap(windows, resamples=300)
        inside += low <= 0 <= high
    assert inside / 300 < 0.85


def test_the_bootstrap_equals_a_loop_over_resamples() -> None:
    draw = np.random.default_rng(2)
    table = [draw.normal(0.1 * seed, 1.0, 40) for seed in range(3)]
    means = []
    for _ in range(4000):
        columns = draw.integers(0, 40, 40)
        means.append(np.mean([np.mean(table[row][columns]) for row in draw.integers(0, 3, 3)]))
    low, high = hierarchical_bootstrap(table, resamples=4000)
    want = np.quantile(means, [0.025, 0.975])
    # Two samples of 4000: an end of the interval is known to about 0.02 of its length.
    assert [low, high] == pytest.approx(want, abs=0.05 * float(want[1] - want[0]))


def test_the_noise_of_evaluation_is_that_of_shared_windows() -> None:
    draw = np.random.default_rng(3)
    shared = draw.normal(0, 1, 500)
    windows = [shared + draw.normal(0, 0.1, 500) for _ in range(3)]
    want = float(np.mean(windows, axis=0).std(ddof=1) / math.sqrt(500))
    assert evaluation_noise(windows) == pytest.approx(want, rel=1e-12)
    assert evaluation_noise(windows) > 1.5 * np.mean([w.std(ddof=1) for w in windows]) / math.sqrt(1500)


def test_the_effect_size_is_corrected_for_few_seeds() -> None:
    assert effect_size([1.0, 2.0, 3.0]) == pytest.approx(2.0 * (1 - 3 / 7), rel=1e-12)
    assert effect_size([1.0]) is None
    assert effect_size([1.0, 1.0, 1.0]) is None


def test_holm_steps_down() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": None}) == {"a": 0.03, "b": 0.06, "c": 0.06, "d": None}
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def losses(*gaps: float) -> dict[str, dict[int, float | None]]:
    base = {0: 2.0, 1: 2.5, 2: 1.5}
    return {"base": dict(base), "arm": {seed: base[seed] + gap for seed, gap in enumerate(gaps)}}


@pytest.mark.parametrize(
    ("gaps", "verdict", "reason"),
    [
        ((-0.020, -0.021, -0.019), "better", "reaches the threshold"),
        ((0.020, 0.021, 0.019), "worse", "reaches the threshold"),
        ((-0.020, -0.021, 0.019), "not decided", "holds 0"),
        ((-0.0020, -0.0021, -0.0019), "not decided", "smaller than the threshold"),
        ((-0.02,), "not decided", "one seed"),
    ],
)
def test_the_verdict_needs_interval_and_threshold(gaps: tuple[float, ...], verdict: str, reason: str) -> None:
    (found,) = compare(losses(*gaps), "base", threshold=0.005)
    assert found.verdict == verdict
    assert reason in found.reason
    assert found.differences == pytest.approx(gaps)
    if len(gaps) == 3:
        assert found.p == pytest.approx(
            scipy_stats.ttest_rel([2 + gaps[0], 2.5 + gaps[1], 1.5 + gaps[2]], [2, 2.5, 1.5])[1]
        )


def test_an_arm_that_diverges_alone_is_worse() -> None:
    table = losses(-0.02, -0.021, -0.019)
    table["arm"][1] = None
    (found,) = compare(table, "base", threshold=0.005)
    assert (found.verdict, found.diverged, found.seeds) == ("worse", 1, (0, 2))
    table["base"][1] = None  # both: nobody is to blame
    (found,) = compare(table, "base", threshold=0.005)
    assert found.diverged == 0
    table["arm"] = dict.fromkeys(range(3), 1.0)
    table["base"] = dict.fromkeys(range(3), None)
    (found,) = compare(table, "base", threshold=0.005)
    assert (found.verdict, found.mean) == ("not decided", None)
    with pytest.raises(GradreelError, match="baseline 'nobody' has no runs"):
        compare(table, "nobody", 0.005)


def test_windows_give_a_second_interval_and_the_noise() -> None:
    draw = np.random.default_rng(4)
    table = losses(-0.02, -0.021, -0.019)
    windows = {
        arm: {seed: list(draw.normal(0, 0.01, 64) + float(value or 0)) for seed, value in own.items()}
        for arm, own in table.items()
    }
    (found,) = compare(table, "base", 0.005, windows)
    assert found.boot_low is not None
    assert found.boot_high is not None
    assert found.noise is not None
    assert -0.03 < found.boot_low < found.boot_high < -0.01
    assert 0 < found.noise < 0.005
