"""What an expert learns and when: a target, inputs, noise, routing. Needs no torch.

Legend: E experts of m x n, k tokens an active expert gets in a step.

An expert with target T sees tokens x ~ N(0, Sigma) and answers T x + noise. From k tokens its gradient is the mean of
k outer products ((W - T) x - noise) x^T, of rank k at most; its expectation is (W - T) Sigma, the gradient of half the
excess risk tr((W - T) Sigma (W - T)^T).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from traces.errors import GradreelError, unknown

Gradient = Literal["tokens", "matched", "quadratic"]
GRADIENTS = ("tokens", "matched", "quadratic")
SCHEDULES = ("cosine", "constant")
BASES = ("rotated", "axes")
_MOST = {"experts": 4096, "rows": 4096, "columns": 4096, "tokens": 1 << 20, "steps": 10_000_000, "rank": 1 << 20}


@dataclass(frozen=True)
class World:
    """One problem. Every seed draws its own targets, basis, routing and tokens; worlds share draws of equal seeds.

    `tokens` k of an expert that is active. `activity` is the share of steps at which it is, `persistence` the lag-1
    correlation of being active (0: independent steps). `zipf` None gives every active expert k tokens; otherwise the
    counts are Poisson with means k E p_e, p_e ~ (e + 1)^-zipf, and may be 0.
    `noise` is the standard deviation of the label noise of one output, `drift` that of the step of each target element
    (a random walk). `spectrum` a: eigenvalue j of Sigma is ~ j^-a, their mean 1; `basis` says whether its directions
    are the axes or turned at random, per expert.
    `gradient`: "tokens" as above. "matched": the expected gradient plus symmetric noise, the sum of `rank` outer
    products a b^T / sqrt(k rank) with a ~ N(0, A), b ~ N(0, Sigma) independent and A = (W - T) Sigma (W - T)^T +
    noise^2 I. Its covariance A x Sigma / k is the same for every rank, and that of k tokens but for the part they owe
    to a and b being dependent, about one in n. "quadratic": the expected gradient plus noise of covariance
    noise^2 / k I x Sigma, the noisy quadratic, which is what many tokens tend to.
    Weights start at 0, targets at N(0, 1 / n). `schedule` of the lr: "cosine" to 0, or "constant".
    """

    experts: int = 8
    rows: int = 24
    columns: int = 24
    tokens: int = 8
    activity: float = 1.0
    persistence: float = 0.0
    zipf: float | None = None
    noise: float = 0.1
    drift: float = 0.0
    spectrum: float = 1.0
    basis: str = "rotated"
    gradient: str = "tokens"
    rank: int | None = None
    steps: int = 500
    schedule: str = "cosine"

    def __post_init__(self) -> None:
        for name in ("experts", "rows", "columns", "tokens", "steps"):
            _whole(name, getattr(self, name))
        _number("activity", self.activity, 0.0, 1.0, open_low=True)
        _number("persistence", self.persistence, 0.0, 1.0, open_high=True)
        if self.zipf is not None:
            _number("zipf", self.zipf, 0.0, 10.0)
        _number("noise", self.noise, 0.0, 1e6)
        _number("drift", self.drift, 0.0, 1e6)
        _number("spectrum", self.spectrum, 0.0, 10.0)
        for name, choices in (("gradient", GRADIENTS), ("schedule", SCHEDULES), ("basis", BASES)):
            if getattr(self, name) not in choices:
                raise unknown(name, str(getattr(self, name)), choices)
        if (self.rank is not None) != (self.gradient == "matched"):
            raise GradreelError(
                f"rank is {self.rank} with gradient {self.gradient!r}; allowed: a rank with 'matched', None otherwise"
            )
        if self.rank is not None:
            _whole("rank", self.rank)

    @property
    def share_of_rank(self) -> float:
        """Tokens of an active expert over min(m, n)."""
        return self.tokens / min(self.rows, self.columns)

    def to_dict(self) -> dict[str, Any]:
        """The world as plain values."""
        return asdict(self)


def world(**changes: Any) -> World:
    """A World with some values changed; an unknown one is an error that lists the allowed ones."""
    allowed = [f.name for f in fields(World)]
    for name in changes:
        if name not in allowed:
            raise unknown("value of a world", name, allowed)
    return World(**changes)


def _whole(name: str, value: Any) -> None:
    most = _MOST[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise GradreelError(f"{name} is {value!r}; allowed: whole numbers in [1, {most}]")


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> None:
    from toolkit.recipes import interval

    interval(name, value, low, high, open_low=open_low, open_high=open_high)


def eigenvalues(world: World) -> np.ndarray:
    """Eigenvalues of Sigma, float64 [n], descending, mean 1."""
    values = np.arange(1, world.columns + 1, dtype=float) ** -world.spectrum
    return values / values.mean()


def schedule(world: World) -> np.ndarray:
    """The factor on lr at each step, float64 [steps]."""
    if world.schedule == "constant":
        return np.ones(world.steps)
    return 0.5 * (1 + np.cos(np.pi * np.arange(world.steps) / world.steps))


def _generator(seed: int, *place: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *place))))


def tokens_per_expert(world: World, seed: int) -> np.ndarray:
    """Counts of tokens, int64 [E, steps]. An expert's row depends on its own number and the seed."""
    counts = np.full((world.experts, world.steps), world.tokens, np.int64)
    if world.zipf is not None:
        share = np.arange(1, world.experts + 1, dtype=float) ** -world.zipf
        means = world.tokens * world.experts * share / share.sum()
        for e in range(world.experts):
            counts[e] = _generator(seed, 1, e).poisson(means[e], world.steps)
    if world.activity < 1:
        a, rho = world.activity, world.persistence
        for e in range(world.experts):
            uniform = _generator(seed, 2, e).random(world.steps)
            on = uniform[0] < a
            for t in range(world.steps):
                if t:
                    on = uniform[t] < (a + rho * (1 - a) if on else a * (1 - rho))
                if not on:
                    counts[e, t] = 0
    return counts


@dataclass(frozen=True)
class Task:
    """What one expert of one seed starts from: target [m, n], root [n, n] with root root^T = sigma, its counts."""

    target: np.ndarray
    root: np.ndarray
    sigma: np.ndarray


def task(world: World, seed: int, expert: int) -> Task:
    """The expert's own draws, from (seed, expert) alone."""
    target = _generator(seed, 3, expert).standard_normal((world.rows, world.columns)) / math.sqrt(world.columns)
    values = eigenvalues(world)
    if world.basis == "axes" or world.spectrum == 0:
        return Task(target, np.diag(np.sqrt(values)), np.diag(values))
    turn, triangle = np.linalg.qr(_generator(seed, 4, expert).standard_normal((world.columns, world.columns)))
    turn = turn * np.sign(np.diag(triangle))
    return Task(target, turn * np.sqrt(values), (turn * values) @ turn.T)
