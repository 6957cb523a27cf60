"""APOLLO: channel-wise step sizes from a random projection."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily
from toolkit.recipes._tables import adam_chain
from toolkit.stages import chain
from toolkit.stages._make import stage
from toolkit.stages.apollo import with_rank


@dataclass(frozen=True)
class ApolloOptions:
    """`growth` bounds how fast the update's norm may grow from step to step (0: not at all bounded)."""

    lr: float = 1e-2
    rank: int = 128
    refresh: int = 200
    scale: float = 1.0
    growth: float = 1.01
    adam_scale: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    idle: IdlePolicy = "as_zero"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        _checks.whole("rank", self.rank)
        _checks.whole("refresh", self.refresh)
        _checks.not_negative("growth", self.growth)
        for name in ("scale", "adam_scale", "eps"):
            _checks.positive(name, getattr(self, name))
        _checks.betas("betas", self.betas)


def build(options: ApolloOptions) -> Recipe:
    """APOLLO on every matrix, Adam on 1-D parameters at lr x `adam_scale`."""
    moments = {"beta1": options.betas[0], "beta2": options.betas[1], "eps": options.eps}
    apollo = with_rank(
        rank=options.rank, refresh=options.refresh, scale=options.scale, growth=options.growth, **moments
    )
    adam = adam_chain(
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        rounding=options.rounding,
        lr_scale=options.adam_scale,
    )
    matrices = chain(apollo, stage("apply", weight_decay=options.weight_decay, rounding=options.rounding))
    return Recipe(
        name="apollo",
        groups={ONE_D: adam, REST: matrices},
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 2.0, "ours": 4.0},
    )


RECIPE = RecipeFamily(
    name="apollo",
    options=ApolloOptions,
    build=build,
    paper="arXiv 2412.05270",
    summary="the gradient scaled per channel by Adam's step in a random projection",
    checked_against="a float64 loop",
    rate="as published; share 1.02",
)
