"""Many lanes at once: tokens are drawn once per world, seed and expert, and every lane steps on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ablations.simulate._arms import Program, program
from ablations.simulate._world import World, schedule, task, tokens_per_expert
from traces.errors import GradreelError

if TYPE_CHECKING:
    from toolkit.recipes import Recipe

_KINDS = {"tokens": 0, "matched": 1, "quadratic": 2}
#: Points of a run at which the risk is computed, evenly spaced; the last one is the last step.
EVALUATIONS = 20
RISK, STABLE_RANK, UPDATE_RMS = 0, 1, 2


@dataclass(frozen=True)
class Lane:
    """One arm at one lr. `matched`: every update is scaled to RMS 1, which is what stateless Sinkhorn has."""

    recipe: str | Recipe
    lr: float
    matched: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lr, (int, float)) or isinstance(self.lr, bool) or not 0 < self.lr < float("inf"):
            raise GradreelError(f"lr is {self.lr!r}; allowed: numbers in (0, inf)")


@dataclass(frozen=True)
class Outcome:
    """`values` float64 [lanes, seeds, E, evaluations, 3]: excess risk, stable rank of what is normalised, update RMS.

    The risk of a run that diverged is NaN or infinite; stable rank and RMS are NaN where the expert was idle. `weights`
    float64 [lanes, seeds, E, m, n] are the last ones, and only kept where asked for.
    """

    steps: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None


def evaluation_steps(world: World, count: int = EVALUATIONS) -> np.ndarray:
    """The steps (from 1) after which the risk is computed, int64, ending with the last."""
    return np.unique(np.linspace(world.steps / count, world.steps, count).round().astype(np.int64).clip(1))


def run_lanes(
    world: World,
    lanes: Sequence[Lane],
    seeds: Sequence[int],
    *,
    threads: int | None = None,
    keep_weights: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> Outcome:
    """Run every lane on every seed. Tokens are shared by the lanes of a seed, so that comparisons are paired.

    A lane's numbers depend on the world, its arm, its lr and the seed: not on other lanes, seeds or the number of
    threads. `on_done` is called with the number of expert runs finished.
    """
    if not lanes or not seeds:
        raise GradreelError(f"{len(lanes)} lanes and {len(seeds)} seeds; allowed: at least one of each")
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
            raise GradreelError(f"seed is {seed!r}; allowed: whole numbers in [0, 2^63)")
    shape = (world.rows, world.columns)
    programs: dict[str, Program] = {}
    labels = []
    for lane in lanes:
        label = lane.recipe if isinstance(lane.recipe, str) else f"{lane.recipe.name}#{id(lane.recipe)}"
        labels.append(label)
        if label not in programs:
            programs[label] = program(lane.recipe, *shape)
    table = _Table(programs, labels, lanes)
    steps = evaluation_steps(world)
    values = np.full((len(lanes), len(seeds), world.experts, steps.size, 3), np.nan)
    weights = np.zeros((len(lanes), len(seeds), world.experts, *shape)) if keep_weights else None
    counts = {seed: tokens_per_expert(world, seed) for seed in seeds}

    def one(job: tuple[int, int]) -> None:
        s, e = job
        values[:, s, e], last = _run_one(world, table, seeds[s], e, counts[seeds[s]][e], steps)
        if weights is not None:
            weights[:, s, e] = last

    jobs = [(s, e) for s in range(len(seeds)) for e in range(world.experts)]
    with ThreadPoolExecutor(max(1, threads or min(len(jobs), os.cpu_count() or 1))) as pool:
        for _ in pool.map(one, jobs):
            if on_done is not None:
                on_done(1)
    return Outcome(steps, values, weights)


class _Table:
    """All lanes as arrays."""

    def __init__(self, programs: dict[str, Program], labels: list[str], lanes: Sequence[Lane]) -> None:
        names = list(programs)
        longest = max(p.ops.size for p in programs.values())
        self.ops = np.zeros((len(names), longest), np.int64)
        self.numbers = np.zeros((len(names), longest, 3))
        self.idle = np.array([programs[name].idle for name in names], np.int64)
        for at, name in enumerate(names):
            found = programs[name]
            self.ops[at, : found.ops.size] = found.ops
            self.numbers[at, : found.ops.size] = found.numbers
        # One more than any needs: the loop looks at the next slot before it knows whether there is one.
        self.slots = 1 + max(p.slots for p in programs.values())
        self.arm_of = np.array([names.index(label) for label in labels], np.int64)
        pairs = zip(lanes, labels, strict=True)
        self.lr = np.array([lane.lr * programs[label].lr_scale for lane, label in pairs])
        self.match = np.array([lane.matched for lane in lanes])


def _run_one(
    world: World, table: _Table, seed: int, expert: int, counts: np.ndarray, steps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    from ablations.simulate._kernel import run_expert

    mine = task(world, seed, expert)
    lanes, m, n = table.lr.size, world.rows, world.columns
    evaluate = np.zeros(world.steps, bool)
    evaluate[steps - 1] = True
    weights, slots = np.zeros((lanes, m, n)), np.zeros((lanes, table.slots, m, n))
    out = np.full((lanes, steps.size, 3), np.nan)
    run_expert(
        _KINDS[world.gradient], counts, world.rank or 0, mine.root, mine.sigma,
        world.basis == "axes" or world.spectrum == 0, mine.target, world.noise, world.drift, schedule(world), evaluate,
        seed & 0xFFFFFFFF, seed >> 32, expert, weights, slots, table.ops, table.numbers, table.idle, table.arm_of,
        table.lr, table.match, out,
    )  # fmt: skip
    return out, weights
