"""SinkGD: no state at all on matrices, only a normalisation of the gradient."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily
from toolkit.recipes._tables import adam_chain, sinkhorn_chain

COMPAT = ("paper", "unit_columns")


@dataclass(frozen=True)
class SinkGDOptions:
    """`alpha` multiplies lr on normalised matrices and, as `adam_scale`, on what Adam serves.

    The paper gives lr 0.02 and alpha 0.05 for matrices; that Adam takes the same 0.001 is our choice.
    """

    lr: float = 2e-2
    alpha: float = 0.05
    sweeps: int = 5
    compat: str = "paper"
    weight_decay: float = 0.0
    adam_scale: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    idle: IdlePolicy = "skip"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        _checks.positive("alpha", self.alpha)
        _checks.positive("adam_scale", self.adam_scale)
        _checks.positive("eps", self.eps)
        _checks.betas("betas", self.betas)
        _checks.whole("sweeps", self.sweeps)
        _checks.one_of("compat", self.compat, COMPAT)


def build(options: SinkGDOptions) -> Recipe:
    """Sinkhorn on every matrix but vocabulary and router; Adam on those and on 1-D parameters."""
    sinkhorn = sinkhorn_chain(
        sweeps=options.sweeps,
        compat=options.compat,
        weight_decay=options.weight_decay,
        rounding=options.rounding,
        lr_scale=options.alpha,
    )
    adam = adam_chain(betas=options.betas, eps=options.eps, rounding=options.rounding, lr_scale=options.adam_scale)
    return Recipe(
        name="sinkgd",
        groups={
            "routed_expert": sinkhorn,
            "embedding": adam,
            "head": adam,
            "router": adam,
            ONE_D: adam,
            REST: sinkhorn,
        },
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 2.0, "ours": 1.0},
    )


RECIPE = RecipeFamily(
    name="sinkgd",
    options=SinkGDOptions,
    build=build,
    paper="arXiv 2502.06742",
    summary="stateless Sinkhorn normalisation of each matrix, Adam on vocabulary, router and 1-D",
    checked_against="a float64 loop over matrices, rows and columns",
    rate="as published, with its alpha; share 1.07",
)
