"""Stochastic gradient descent, as torch computes it."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import REST, IdlePolicy, Recipe, RecipeFamily, interval
from toolkit.stages import chain
from toolkit.stages._make import stage
from traces.errors import GradreelError


@dataclass(frozen=True)
class SGDOptions:
    """Switches of `torch.optim.SGD` (dampening 0); `weight_decay` is an L2 term in the gradient.

    torch's default rate, 0.001, hardly trains a language model; 0.1 is ours.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    idle: IdlePolicy = "as_zero"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        interval("momentum", self.momentum, 0.0, 1.0, open_high=True)
        if self.nesterov and not self.momentum:
            raise GradreelError("nesterov is True with momentum 0.0; allowed: momentum in (0.0, 1.0)")


def build(options: SGDOptions) -> Recipe:
    """One chain for every role; slots only where there is momentum."""
    stages = []
    if options.weight_decay:
        stages.append(stage("coupled_decay", weight_decay=options.weight_decay))
    if options.momentum:
        stages.append(stage("heavy_ball", beta=options.momentum, nesterov=options.nesterov))
    table = chain(*stages, stage("apply", rounding=options.rounding))
    ours = float(options.nesterov) + (options.weight_decay > 0)
    return Recipe(
        name="sgd", groups={REST: table}, lr=options.lr, idle=options.idle, temporaries={"original": 0.0, "ours": ours}
    )


RECIPE = RecipeFamily(
    name="sgd",
    options=SGDOptions,
    build=build,
    paper="Robbins and Monro 1951",
    summary="gradient descent, with momentum if asked for, on every role",
    checked_against="torch.optim.SGD",
    rate="0.1 beat torch's 0.001, which gets 0.10; share 0.88",
)
