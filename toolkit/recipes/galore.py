"""GaLore: Adam in the space of the gradient's leading singular vectors."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily
from toolkit.recipes._tables import adam_chain
from toolkit.stages import chain
from toolkit.stages._make import stage
from toolkit.stages._subspace import SIDES, Projector, subspace


@dataclass(frozen=True)
class GaLoreOptions:
    """`side="smaller"` projects the shorter axis, as published; "both" with `refresh=0` and `scale=1` is the SkewAdam
    study's form. `refresh` 0: the basis of the first gradient for ever. `scale` is the paper's alpha.
    """

    lr: float = 1e-2
    rank: int = 128
    refresh: int = 200
    side: str = "smaller"
    scale: float = 0.25
    adam_scale: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    idle: IdlePolicy = "as_zero"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        _checks.whole("rank", self.rank)
        _checks.whole("refresh", self.refresh, low=0)
        _checks.one_of("side", self.side, SIDES)
        for name in ("scale", "adam_scale", "eps"):
            _checks.positive(name, getattr(self, name))
        _checks.betas("betas", self.betas)


def build(options: GaLoreOptions) -> Recipe:
    """Projected Adam on every matrix, Adam on 1-D parameters at lr x `adam_scale`."""
    adam = adam_chain(
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        rounding=options.rounding,
        lr_scale=options.adam_scale,
    )
    projected = subspace(Projector(options.rank, options.refresh, options.side), *adam.stages[:-1], scale=options.scale)
    matrices = chain(projected, stage("apply", weight_decay=options.weight_decay, rounding=options.rounding))
    return Recipe(
        name="galore",
        groups={ONE_D: adam, REST: matrices},
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 6.0, "ours": 4.0},
    )


RECIPE = RecipeFamily(
    name="galore",
    options=GaLoreOptions,
    build=build,
    paper="arXiv 2403.03507",
    summary="Adam on a projection of every matrix, its basis renewed every 200 steps",
    checked_against="pytorch-optimizer's GaLore; a float64 loop; the state size published by the SkewAdam study",
    rate="as published; share 1.01",
)
