"""From risks at every lr to verdicts: tuned lr, shared lr, matched norms; paired by seed, with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ablations.simulate._engine import RISK, STABLE_RANK, UPDATE_RMS, Outcome
from ablations.simulate._preset import Simulation
from ablations.simulate._world import World

Way = Literal["tuned", "shared", "matched"]
WAYS: tuple[Way, ...] = ("tuned", "shared", "matched")
#: Share of the evaluations, from the end, that are averaged where the lr does not fall to 0 or the target moves.
TAIL = 0.25
#: A risk above this is that of a run that diverged; at W = 0 it is about the number of rows.
DIVERGED = 1e9


@dataclass(frozen=True)
class Effect:
    """The baseline's risk over the arm's (above 1: the arm is better), a 95% interval, and the verdict."""

    world: str
    arm: str
    way: Way
    ratio: float
    low: float
    high: float
    verdict: str
    seeds: int


@dataclass(frozen=True)
class WorldResult:
    """One world: final risks {arm: [lr, seed]}, the tuned lr of each arm, whether it lies on the edge of its grid.

    `risk` {(arm, way): [seed]}, `rank` and `rms` {arm: float} at the tuned lr: medians over the run's evaluations.
    """

    label: str
    world: World
    grid: dict[str, np.ndarray]
    tuned: dict[str, float]
    edge: dict[str, bool]
    risk: dict[tuple[str, Way], np.ndarray]
    rank: dict[str, float]
    rms: dict[str, float]


def final_risk(world: World, outcome: Outcome) -> np.ndarray:
    """Excess risk at the end of each run, mean over experts, [lanes, seeds]; NaN or infinite where it diverged."""
    risks = outcome.values[..., RISK]
    count = 1 if world.schedule == "cosine" and not world.drift else max(1, round(TAIL * outcome.steps.size))
    with np.errstate(over="ignore", invalid="ignore"):
        mean = risks[..., -count:].mean(axis=(2, 3))
    return np.where(mean > DIVERGED, np.inf, mean)


def typical(outcome: Outcome, what: int) -> np.ndarray:
    """Median over seeds, experts and evaluations of the stable rank or the update RMS, [lanes]; NaN if always idle."""
    values = outcome.values[..., what]
    flat = np.where(np.isfinite(values), values, np.nan).reshape(values.shape[0], -1)
    return np.array([np.nanmedian(row) if np.isfinite(row).any() else np.nan for row in flat])


def tuned_at(risks: np.ndarray) -> int:
    """Index of the lr of least geometric mean risk, [lr, tuning seeds]; a run that diverged rules its lr out."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.log(risks).mean(axis=1)
    return int(np.argmin(np.where(np.isfinite(risks).all(axis=1), scores, np.inf)))


def effect_of(world: str, arm: str, way: Way, baseline: np.ndarray, mine: np.ndarray, threshold: float) -> Effect:
    """Ratio of geometric means over seeds, with Student's interval of the paired differences of logarithms."""
    from scipy import stats

    good = np.isfinite(baseline) & np.isfinite(mine) & (baseline > 0) & (mine > 0)
    if not good.all() or good.size < 2:
        # A run that diverged has no risk to average; which of the two did it says who is worse.
        lost = (~np.isfinite(mine)).sum() - (~np.isfinite(baseline)).sum()
        verdict = "worse" if lost > 0 else "better" if lost < 0 else "not decided"
        return Effect(world, arm, way, math.nan, math.nan, math.nan, verdict, int(good.sum()))
    differences = np.log(baseline) - np.log(mine)
    middle = differences.mean()
    error = differences.std(ddof=1) / math.sqrt(differences.size)
    half = float(stats.t.ppf(0.975, differences.size - 1)) * error
    ratio, low, high = (float(np.exp(v)) for v in (middle, middle - half, middle + half))
    return Effect(world, arm, way, ratio, low, high, verdict_of(low, high, threshold), differences.size)


def verdict_of(low: float, high: float, threshold: float) -> str:
    """better, worse, equal or not decided, from the interval of the ratio."""
    if low > threshold:
        return "better"
    if high < 1 / threshold:
        return "worse"
    return "equal" if low > 1 / threshold and high < threshold else "not decided"


def effects(simulation: Simulation, results: list[WorldResult]) -> list[Effect]:
    """Every arm against the baseline, in every world, in the three ways."""
    found = []
    for result in results:
        for way in WAYS:
            base = result.risk[simulation.baseline, way]
            for arm in simulation.arms:
                if arm != simulation.baseline:
                    mine = result.risk[arm, way]
                    found.append(effect_of(result.label, arm, way, base, mine, simulation.threshold))
    return found


def rows(simulation: Simulation, results: list[WorldResult]) -> Iterator[dict[str, Any]]:
    """The rows of the Frame. `run` is a world, or `WORLD;lr=..` for one lr of an arm's grid.

    Per world: `world.NAME` (its numbers). Per lr: `excess_risk` of each seed, `lr`. Per arm: `tuned_lr`,
    `tuned_lr_on_edge`, `stable_rank`, `update_rms`, and for each way `excess_risk_WAY` per seed, `risk_ratio_WAY` with
    `_low` and `_high`, the baseline's risk over the arm's.
    """
    recipes = simulation.arms
    for result in results:
        place = {"run": result.label, "unit": "1"}
        for name, value in result.world.to_dict().items():
            if isinstance(value, (int, float)):
                yield {**place, "metric": f"world.{name}", "value": float(value)}
        yield {**place, "metric": "world.tokens_over_min_side", "value": result.world.share_of_rank}
        for arm, recipe in recipes.items():
            mine = {**place, "arm": arm, "recipe": recipe, "role": "routed_expert"}
            seeds = (*simulation.tuning_seeds, *simulation.seeds)
            for lr, line in zip(simulation.rates_of(arm), result.grid[arm], strict=True):
                at = {**mine, "run": f"{result.label};lr={lr:g}", "step": result.world.steps}
                yield {**at, "metric": "lr", "value": lr}
                for seed, value in zip(seeds, line, strict=True):
                    flag = "" if np.isfinite(value) else "diverged"
                    yield {**at, "metric": "excess_risk", "seed": seed, "value": float(value), "flag": flag}
            yield {**mine, "metric": "tuned_lr", "value": result.tuned[arm]}
            yield {**mine, "metric": "tuned_lr_on_edge", "value": float(result.edge[arm])}
            yield {**mine, "metric": "stable_rank", "value": result.rank[arm], "step": None}
            yield {**mine, "metric": "update_rms", "value": result.rms[arm]}
            for way in WAYS:
                for seed, value in zip(simulation.seeds, result.risk[arm, way], strict=True):
                    flag = "" if np.isfinite(value) else "diverged"
                    yield {**mine, "metric": f"excess_risk_{way}", "seed": seed, "value": float(value), "flag": flag}
    for effect in effects(simulation, results):
        at = {"run": effect.world, "arm": effect.arm, "recipe": recipes[effect.arm], "role": "routed_expert"}
        flag = "" if math.isfinite(effect.ratio) else "diverged"
        for end, value in (("", effect.ratio), ("_low", effect.low), ("_high", effect.high)):
            metric = f"risk_ratio_{effect.way}{end}"
            yield {**at, "metric": metric, "value": value, "support": effect.seeds, "flag": flag, "unit": "1"}


def world_result(
    simulation: Simulation, label: str, main: Outcome, matched: Outcome, tuned: dict[str, int]
) -> WorldResult:
    """Put together the outcome of the whole grid and that of the shared lr, each arm matched and as it is."""
    world = simulation.worlds[label]
    risks, ranks, sizes = final_risk(world, main), typical(main, STABLE_RANK), typical(main, UPDATE_RMS)
    at_matched = final_risk(world, matched)
    count = len(simulation.tuning_seeds)
    found = WorldResult(label, world, {}, {}, {}, {}, {}, {})
    start = 0
    for at, arm in enumerate(simulation.arms):
        values = simulation.rates_of(arm)
        line = risks[start : start + len(values)]
        best = tuned[arm]
        found.grid[arm], found.tuned[arm] = line, values[best]
        found.edge[arm] = len(values) > 1 and best in (0, len(values) - 1)
        found.rank[arm], found.rms[arm] = float(ranks[start + best]), float(sizes[start + best])
        found.risk[arm, "tuned"] = line[best, count:]
        found.risk[arm, "matched"] = at_matched[2 * at]
        found.risk[arm, "shared"] = at_matched[2 * at + 1]
        start += len(values)
    return found
