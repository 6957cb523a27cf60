"""What a simulation file states before anything is run. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ablations.simulate._world import World, world
from traces.errors import GradreelError


def rates(low: float, high: float, count: int) -> tuple[float, ...]:
    """A geometric grid of lr, rounded to three digits."""
    if not (0 < low <= high < float("inf")) or count < 1:
        raise GradreelError(f"a grid of {count} lr from {low} to {high}; allowed: 0 < low <= high, at least one")
    return tuple(float(f"{x:.3g}") for x in np.geomspace(low, high, count))


def grid(base: World | None = None, **axes: Sequence[Any]) -> dict[str, World]:
    """One World per point of the product of `axes`, named by it: `tokens=1,activity=0.2`."""
    start = (base or World()).to_dict()
    found = {}
    for point in itertools.product(*axes.values()):
        changed = dict(zip(axes, point, strict=True))
        found[",".join(f"{name}={value}" for name, value in changed.items())] = world(**{**start, **changed})
    return found


@dataclass(frozen=True)
class Simulation:
    """What a simulation file exports as `SIMULATION`.

    `question` is what it asks, `decides` the rule that answers it. Every arm (label -> recipe) runs in every world at
    every lr of its own grid (`grids`, else `lr`) on `tuning_seeds` and `seeds`. The lr of least risk on the tuning
    seeds is the arm's tuned lr; all comparisons use `seeds`, paired. The shared lr is the baseline's tuned one. An
    effect is the ratio of the baseline's risk to the arm's: its interval has to lie beyond `threshold` (or below one
    over it) for "better" ("worse"), within both for "equal"; anything else is "not decided".
    """

    name: str
    question: str
    decides: str
    worlds: Mapping[str, World]
    arms: Mapping[str, str]
    baseline: str
    lr: tuple[float, ...]
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tuning_seeds: tuple[int, ...] = (1000, 1001)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    threshold: float = 1.1

    def __post_init__(self) -> None:
        place = f"simulation {self.name}"
        if not self.worlds or not self.arms:
            raise GradreelError(f"{place}: {len(self.worlds)} worlds, {len(self.arms)} arms; allowed: at least one")
        for arm in self.arms:
            values = self.rates_of(arm)
            if not values or not all(isinstance(x, (int, float)) and 0 < x < float("inf") for x in values):
                raise GradreelError(f"{place}: lr grid of {arm} is {values}; allowed: one or more numbers in (0, inf)")
            if list(values) != sorted(set(values)):
                raise GradreelError(f"{place}: lr grid of {arm} is {values}; give each lr once, ascending")
        for arm in (self.baseline, *self.grids):
            if arm not in self.arms:
                raise GradreelError(f"{place}: {arm!r} is not among its arms: {', '.join(self.arms)}")
        if len(self.seeds) < 3 or not self.tuning_seeds or set(self.seeds) & set(self.tuning_seeds):
            raise GradreelError(
                f"{place}: seeds {self.seeds}, tuning seeds {self.tuning_seeds}; allowed: three or more, one or more, "
                "none in both"
            )
        if not self.threshold > 1:
            raise GradreelError(f"{place}: threshold is {self.threshold}; allowed: above 1")

    def rates_of(self, arm: str) -> tuple[float, ...]:
        """The lr grid of one arm."""
        return self.grids.get(arm, self.lr)

    def smaller(
        self, *, steps: int | None = None, seeds: int | None = None, worlds: Sequence[str] | None = None
    ) -> Simulation:
        """The same simulation with fewer steps, with its first seeds, or in some of its worlds."""
        chosen = dict(self.worlds)
        if worlds is not None:
            lacking = [name for name in worlds if name not in chosen]
            if lacking:
                raise GradreelError(f"simulation {self.name} has no world {lacking[0]!r}; it has {'; '.join(chosen)}")
            chosen = {name: chosen[name] for name in worlds}
        if steps is not None:
            chosen = {name: replace(each, steps=steps) for name, each in chosen.items()}
        return replace(self, worlds=chosen, seeds=self.seeds if seeds is None else self.seeds[:seeds])

    @property
    def summary(self) -> str:
        """One line for lists."""
        return self.question

    @property
    def configurations(self) -> int:
        """How many (world, arm, lr, seed) it runs."""
        each = sum(len(self.rates_of(arm)) for arm in self.arms)
        return each * len(self.worlds) * (len(self.seeds) + len(self.tuning_seeds))

    def to_dict(self) -> dict[str, Any]:
        """The simulation as plain values, for the provenance of what it produced."""
        return {
            "simulation": self.name,
            "question": self.question,
            "decides": self.decides,
            "worlds": {name: each.to_dict() for name, each in self.worlds.items()},
            "arms": dict(self.arms),
            "baseline": self.baseline,
            "lr": {arm: list(self.rates_of(arm)) for arm in self.arms},
            "tuning_seeds": list(self.tuning_seeds),
            "seeds": list(self.seeds),
            "threshold": self.threshold,
        }
