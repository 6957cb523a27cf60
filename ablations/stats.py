"""What paired runs say about two arms: differences, intervals, effect sizes, and a verdict against a threshold.

Arms of one seed share initial weights and batches, so they are compared seed by seed. With three seeds no bootstrap
over seeds can be valid (27 resamples, and an interval that never leaves the three values), so the interval that decides
is Student's t over the paired differences, exact for normal differences at any n >= 2. Beside it stands a hierarchical
bootstrap, which resamples seeds and validation windows: it shows what the validation text adds, and is too narrow as
long as seeds are few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from traces.errors import GradreelError

Verdict = Literal["better", "worse", "not decided"]
LEVEL = 0.95
_RESAMPLES = 2000
_AT_ONCE = 250


@dataclass(frozen=True)
class Paired:
    """An arm against the baseline. Losses in nats per byte; a negative `mean` is an arm that is better.

    `differences` are those of single seeds, arm minus baseline. `low`, `high`: Student's t interval of their mean, None
    with fewer than two. `boot_low`, `boot_high`: hierarchical bootstrap, None without validation windows. `noise` is
    the standard error that the finite validation text alone gives the mean. `effect` is the mean over the standard
    deviation of the differences with Hedges' correction for few seeds, None where that is undefined; `p` is Student's
    two-sided p of no difference and `p_holm` the same after Holm's correction over the arms compared together.
    `diverged` counts seeds on which the arm diverged and the baseline did not.
    """

    arm: str
    baseline: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float | None
    low: float | None
    high: float | None
    boot_low: float | None
    boot_high: float | None
    noise: float | None
    effect: float | None
    p: float | None
    p_holm: float | None
    diverged: int
    threshold: float
    verdict: Verdict
    reason: str


def t_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | tuple[None, None]:
    """Student's interval for the mean of `values`; (None, None) with fewer than two, no width if all are equal."""
    from scipy import stats

    data = np.asarray(values, dtype=np.float64)
    if data.size < 2:
        return None, None
    half = float(stats.t.ppf(0.5 + level / 2, data.size - 1)) * float(data.std(ddof=1)) / math.sqrt(data.size)
    return float(data.mean()) - half, float(data.mean()) + half


def hierarchical_bootstrap(
    windows: Sequence[np.ndarray], *, level: float = LEVEL, resamples: int = _RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over seeds, resampling seeds and then the windows of each: `windows` [seeds][N].

    Every seed is evaluated on the same windows, so one resample of windows serves all its seeds.
    """
    table = np.stack([np.asarray(w, dtype=np.float64) for w in windows])
    draw = np.random.default_rng(seed)
    count, size = table.shape
    blocks = []
    # A resample is a table of counts; a few hundred at a time keep memory small.
    for start in range(0, resamples, _AT_ONCE):
        now = min(_AT_ONCE, resamples - start)
        rows = draw.multinomial(count, np.full(count, 1 / count), now) / count
        columns = draw.multinomial(size, np.full(size, 1 / size), now) / size
        blocks.append(((rows @ table) * columns).sum(axis=1))
    means = np.concatenate(blocks)
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def evaluation_noise(windows: Sequence[np.ndarray]) -> float:
    """Standard error of the mean difference from the finite validation text: `windows` [seeds][N], arm minus baseline.

    All seeds share the windows, so they are averaged over seeds first.
    """
    mean = np.stack([np.asarray(w, dtype=np.float64) for w in windows]).mean(axis=0)
    return float(mean.std(ddof=1) / math.sqrt(mean.size)) if mean.size > 1 else math.nan


def effect_size(values: Sequence[float]) -> float | None:
    """Mean over standard deviation (Cohen's d of paired samples), times Hedges' 1 - 3 / (4 (n - 1) - 1) (1981)."""
    data = np.asarray(values, dtype=np.float64)
    if data.size < 2 or data.std(ddof=1) == 0:
        return None
    small = 1 - 3 / (4 * (data.size - 1) - 1)
    return float(data.mean() / data.std(ddof=1)) * small


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Holm's step-down correction (1979); None stays None and counts as no comparison."""
    known = sorted((p, name) for name, p in p_values.items() if p is not None)
    found: dict[str, float | None] = dict.fromkeys(p_values)
    highest = 0.0
    for rank, (p, name) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        found[name] = highest
    return found


def compare(
    losses: Mapping[str, Mapping[int, float | None]],
    baseline: str,
    threshold: float,
    windows: Mapping[str, Mapping[int, Sequence[float]]] | None = None,
) -> list[Paired]:
    """Every arm of `losses` (arm -> seed -> final loss, None where it diverged) against `baseline`.

    An arm is better (worse) when the interval leaves out 0 and the mean difference is at least `threshold` below
    (above) it; one that diverges on a seed on which the baseline does not is worse. All else is not decided.
    """
    if baseline not in losses:
        raise GradreelError(f"baseline {baseline!r} has no runs; allowed: {', '.join(losses) or 'none'}")
    base = losses[baseline]
    rows = [
        _one(arm, baseline, own, base, threshold, (windows or {}).get(arm, {}), (windows or {}).get(baseline, {}))
        for arm, own in losses.items()
        if arm != baseline
    ]
    adjusted = holm({row.arm: row.p for row in rows})
    return [Paired(**{**row.__dict__, "p_holm": adjusted[row.arm]}) for row in rows]


def _one(
    arm: str,
    baseline: str,
    own: Mapping[int, float | None],
    base: Mapping[int, float | None],
    threshold: float,
    own_windows: Mapping[int, Sequence[float]],
    base_windows: Mapping[int, Sequence[float]],
) -> Paired:
    both = [s for s in sorted(own) if own[s] is not None and base.get(s) is not None]
    diverged = sum(own[s] is None and base.get(s) is not None for s in own)
    gaps = [float(own[s]) - float(base[s]) for s in both]  # type: ignore[arg-type]
    low, high = t_interval(gaps)
    parts = [
        np.asarray(own_windows[s]) - np.asarray(base_windows[s])
        for s in both
        if len(own_windows.get(s, ())) > 1 and len(own_windows[s]) == len(base_windows.get(s, ()))
    ]
    boot = hierarchical_bootstrap(parts) if parts and len(parts) == len(both) else (None, None)
    mean = float(np.mean(gaps)) if gaps else None
    verdict, reason = _decide(mean, low, high, diverged, len(own), threshold)
    return Paired(
        arm=arm,
        baseline=baseline,
        seeds=tuple(both),
        differences=tuple(gaps),
        mean=mean,
        low=low,
        high=high,
        boot_low=boot[0],
        boot_high=boot[1],
        noise=evaluation_noise(parts) if parts else None,
        effect=effect_size(gaps),
        p=_p_value(gaps),
        p_holm=None,
        diverged=diverged,
        threshold=threshold,
        verdict=verdict,
        reason=reason,
    )


def _decide(
    mean: float | None, low: float | None, high: float | None, diverged: int, seeds: int, threshold: float
) -> tuple[Verdict, str]:
    if diverged:
        return "worse", f"it diverged on {diverged} of {seeds} seeds on which the baseline did not"
    if mean is None:
        return "not decided", "there is no seed on which both ended"
    if low is None or high is None:
        return "not decided", "one seed gives no interval"
    if low <= 0 <= high:
        return "not decided", "the interval holds 0"
    if abs(mean) < threshold:
        return "not decided", f"the difference is smaller than the threshold of {threshold:g}"
    return ("better" if mean < 0 else "worse"), "the interval leaves out 0 and the difference reaches the threshold"


def _p_value(gaps: Sequence[float]) -> float | None:
    from scipy import stats

    if len(gaps) < 2 or np.std(gaps) == 0:
        return None
    return float(stats.ttest_1samp(gaps, 0.0).pvalue)
