"""Normalise every gradient, then average: steps shrink where gradients disagree."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily, interval
from toolkit.stages import Chain, chain
from toolkit.stages._make import stage


@dataclass(frozen=True)
class NormaliseThenMomentumOptions:
    """On white noise the update's RMS shrinks to sqrt((1 - beta) / (1 + beta)); on a constant gradient it stays 1."""

    lr: float = 2e-3
    beta: float = 0.9
    sweeps: int = 5
    compat: str = "paper"
    weight_decay: float = 0.0
    idle: IdlePolicy = "skip"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        interval("beta", self.beta, 0.0, 1.0, open_high=True)
        _checks.whole("sweeps", self.sweeps)
        _checks.one_of("compat", self.compat, ("paper", "unit_columns"))


def table(options: NormaliseThenMomentumOptions, momentum: str) -> dict[str, Chain]:
    """Sinkhorn (on 1-D parameters: division by the RMS), then the stage `momentum`, on every role."""
    smooth = stage(momentum, beta=options.beta)
    end = stage("apply", weight_decay=options.weight_decay, rounding=options.rounding)
    return {
        ONE_D: chain(stage("rms_normalise"), smooth, end),
        REST: chain(stage("sr_sinkhorn", sweeps=options.sweeps, compat=options.compat), smooth, end),
    }


def build(options: NormaliseThenMomentumOptions) -> Recipe:
    """The same rule on every role."""
    groups = table(options, "ema")
    return Recipe(name="normalise_then_momentum", groups=groups, lr=options.lr, idle=options.idle)


RECIPE = RecipeFamily(
    name="normalise_then_momentum",
    options=NormaliseThenMomentumOptions,
    build=build,
    paper="order of arXiv 2608.04407 turned round",
    summary="Sinkhorn, then a moving average, on every role",
    checked_against="a float64 loop",
    rate="twice mesh's, since averaging shrinks the step; share 1.04",
)
