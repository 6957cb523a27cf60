"""Predicted harm of a stateless update: a mean of ranks, and rank correlations with their uncertainty.

Legend: U units that are ranked against each other (experts of a trace, or conditions), S steps, R resamples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

#: What is thought to make a stateless update harmful: +1 where more of it does, -1 where less of it does.
COMPONENTS: dict[str, int] = {
    "stable_rank_share": -1,
    "tokens_per_expert": -1,
    "gradient_snr": -1,
    "amplification": 1,
    "idle_run_length": 1,
}
RESAMPLES = 500
LEVEL = 0.95
_EXACT = 7  # up to so many units every permutation is tried
_PERMUTATIONS = 5000


def harm_scores(table: Mapping[str, np.ndarray]) -> np.ndarray:
    """The mean, over the components in `table` (name -> [.., U]), of a unit's rank by it: [.., U] in [0, 1].

    Rank 0 is the least harmful unit and 1 the most, ties share their mean rank. A component that is undefined for a
    unit is left out of that unit's mean; one that is equal for all says nothing and is left out for all.
    """
    ranks = []
    for name, values in table.items():
        rank = ranked(COMPONENTS[name] * np.asarray(values, dtype=np.float64))
        spread = np.nanmax(rank, axis=-1, initial=0.0) > np.nanmin(rank, axis=-1, initial=1.0)
        ranks.append(np.where(spread[..., None], rank, np.nan))
    return _mean(np.stack(np.broadcast_arrays(*ranks)), axis=0)


def ranked(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis scaled to [0, 1], ties averaged, NaN where undefined."""
    from scipy.stats import rankdata

    known = np.isfinite(values)
    ranks = rankdata(np.where(known, values, np.nan), axis=-1, nan_policy="omit")
    count = known.sum(axis=-1, keepdims=True)
    return np.where(known, (ranks - 1) / np.maximum(count - 1, 1), np.nan)


def block_weights(steps: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """How often each step is drawn in each resample of a moving-block bootstrap: [R, S].

    Blocks of ceil(S^(1/3)) neighbouring recorded steps (Kuensch 1989, Annals of Statistics 17), so that what
    neighbours share stays together; the last block is cut to give S steps.
    """
    count = len(steps)
    length = math.ceil(count ** (1 / 3))
    draw = np.random.default_rng(seed)
    starts = draw.integers(0, count - length + 1, size=(resamples, -(-count // length)))
    picked = (starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :count]
    weights = np.zeros((resamples, count))
    np.add.at(weights, (np.arange(resamples)[:, None], picked), 1.0)
    return weights


def weighted_means(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Means over steps of `values` [S, U] under each row of `weights` [R, S], undefined values left out: [R, U]."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (weights @ np.where(known, values, 0.0)) / (weights @ known)


def over_units(means: np.ndarray, resamples: int = RESAMPLES, seed: int = 1) -> np.ndarray:
    """The mean over resampled units of `means` [R or 1, U]: [R]."""
    count = means.shape[-1]
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    known = np.isfinite(means)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (weights * np.where(known, means, 0.0)).sum(axis=1) / (weights * known).sum(axis=1)


def ends(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The percentile interval over the first axis; NaN where fewer than half of the resamples are defined."""
    known = np.isfinite(samples).mean(axis=0) >= 0.5
    filled = np.where(known, samples, 0.0)
    low, high = np.nanquantile(filled, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2], axis=0)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


@dataclass(frozen=True)
class Correlation:
    """Spearman's rho of n pairs; `low`, `high` None where no interval is defined; `p` from permutations, two-sided."""

    rho: float | None
    low: float | None
    high: float | None
    p: float | None
    n: int

    @property
    def words(self) -> str:
        """The correlation for a table."""
        if self.rho is None:
            return f"undefined (n = {self.n})"
        interval = "" if self.low is None else f" [{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.rho:+.2f}{interval}, p {self.p:.2g}, n = {self.n}"


def spearman(x: np.ndarray, y: np.ndarray) -> Correlation:
    """Spearman's rank correlation over the pairs that are defined.

    Interval: Fisher's z with variance (1 + rho^2 / 2) / (n - 3) (Bonett and Wright 2000, Psychometrika 65), from 4
    pairs on and for |rho| < 1; it takes the pairs as independent. p: all permutations up to 7 pairs, else 5000 drawn
    ones.
    """
    from scipy.stats import norm, rankdata

    good = np.isfinite(x) & np.isfinite(y)
    n = int(good.sum())
    a, b = (rankdata(v[good]) if n else np.empty(0) for v in (np.asarray(x), np.asarray(y)))
    if n < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Correlation(None, None, None, None, n)
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    rho = float(np.clip((a * b).mean(), -1, 1))
    if n <= _EXACT:
        orders = np.array(list(itertools.permutations(range(n))))
    else:
        draw = np.random.default_rng(0)
        orders = np.stack([np.arange(n), *(draw.permutation(n) for _ in range(_PERMUTATIONS))])
    p = float((np.abs((a[orders] * b).mean(axis=1)) >= abs(rho) - 1e-12).mean())
    if n < 4 or abs(rho) > 1 - 1e-12:
        return Correlation(rho, None, None, p, n)
    half = float(norm.ppf(0.5 + LEVEL / 2)) * math.sqrt((1 + rho**2 / 2) / (n - 3))
    low, high = math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)
    return Correlation(rho, low, high, p, n)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    known = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known, values, 0.0).sum(axis=axis) / known.sum(axis=axis)
