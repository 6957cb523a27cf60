"""MESH: momentum in the gradient buffer, then Sinkhorn, so that experts need no optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily, interval
from toolkit.recipes._tables import sage_chain, sinkhorn_chain, stateless_vector_chain
from toolkit.stages import Chain, chain
from toolkit.stages._make import stage


@dataclass(frozen=True)
class TableOptions:
    """What MESH's relatives share. The paper publishes neither sweeps nor lr; these are ours.

    `sage_scale` and `vector_scale` multiply lr on vocabulary matrices and on 1-D parameters.
    """

    lr: float = 1e-3
    sweeps: int = 5
    compat: str = "paper"
    weight_decay: float = 0.0
    sage_betas: tuple[float, float] = (0.9, 0.99)
    sage_eps: float = 1e-8
    sage_weight_decay: float = 0.01
    sage_scale: float = 2.0
    vector_scale: float = 1.0
    idle: IdlePolicy = "skip"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        _checks.whole("sweeps", self.sweeps)
        _checks.one_of("compat", self.compat, ("paper", "unit_columns"))
        _checks.betas("sage_betas", self.sage_betas)
        _checks.positive("sage_eps", self.sage_eps)
        _checks.not_negative("sage_weight_decay", self.sage_weight_decay)
        _checks.positive("sage_scale", self.sage_scale)
        _checks.positive("vector_scale", self.vector_scale)


@dataclass(frozen=True)
class MeshOptions(TableOptions):
    """`beta` decays the gradient buffer once a step; not published either."""

    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        interval("beta", self.beta, 0.0, 1.0, open_high=True)


def table(options: TableOptions, experts: Chain) -> dict[str, Chain]:
    """The rows that MESH and its relatives share, around the experts' chain."""
    sage = sage_chain(
        betas=options.sage_betas,
        eps=options.sage_eps,
        weight_decay=options.sage_weight_decay,
        rounding=options.rounding,
        lr_scale=options.sage_scale,
    )
    sinkhorn = sinkhorn_chain(
        sweeps=options.sweeps,
        compat=options.compat,
        weight_decay=options.weight_decay,
        rounding=options.rounding,
    )
    return {
        "routed_expert": experts,
        "embedding": sage,
        "head": sage,
        "router": sinkhorn,
        ONE_D: stateless_vector_chain(rounding=options.rounding, lr_scale=options.vector_scale),
        REST: sinkhorn,
    }


def build(options: MeshOptions) -> Recipe:
    """Hidden momentum and Sinkhorn on routed experts, SAGE on vocabulary, Sinkhorn on the rest, no state on 1-D."""
    experts = chain(
        stage("hidden_ema", beta=options.beta),
        stage("sr_sinkhorn", sweeps=options.sweeps, compat=options.compat),
        stage("apply", weight_decay=options.weight_decay, rounding=options.rounding),
    )
    return Recipe(
        name="mesh",
        groups=table(options, experts),
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 2.3, "ours": 1.0},
    )


RECIPE = RecipeFamily(
    name="mesh",
    options=MeshOptions,
    build=build,
    paper="arXiv 2608.04407",
    summary="hidden momentum then Sinkhorn on routed experts, SAGE on vocabulary, no other state",
    checked_against="a float64 loop written from the formulas",
    rate="AdamW's, since the paper gives none; share 1.07",
)
