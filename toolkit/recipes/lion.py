"""Lion."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import REST, IdlePolicy, Recipe, RecipeFamily
from toolkit.stages import chain
from toolkit.stages._make import stage


@dataclass(frozen=True)
class LionOptions:
    """Lion's published switches. Idle experts keep moving by the sign of their momentum under the default `as_zero`."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.01
    idle: IdlePolicy = "as_zero"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        _checks.betas("betas", self.betas)


def build(options: LionOptions) -> Recipe:
    """One chain for every role."""
    table = chain(
        stage("lion", beta1=options.betas[0], beta2=options.betas[1]),
        stage("apply", weight_decay=options.weight_decay, rounding=options.rounding),
    )
    return Recipe(
        name="lion",
        groups={REST: table},
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 7.0, "ours": 1.0},
    )


RECIPE = RecipeFamily(
    name="lion",
    options=LionOptions,
    build=build,
    paper="arXiv 2302.06675",
    summary="the sign of momentum and gradient together, one moment, on every role",
    checked_against="pytorch-optimizer's Lion; a golden run of the SkewAdam study's Lion; a float64 loop",
    rate="as published; share 0.52",
)
