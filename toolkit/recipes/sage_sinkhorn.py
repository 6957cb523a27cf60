"""The hybrid of SAGE on vocabulary and stateless Sinkhorn elsewhere: MESH without momentum."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes._recipe import Recipe, RecipeFamily
from toolkit.recipes._tables import sinkhorn_chain
from toolkit.recipes.mesh import TableOptions, table


@dataclass(frozen=True)
class SageSinkhornOptions(TableOptions):
    """MESH's switches without beta."""


def build(options: SageSinkhornOptions) -> Recipe:
    """MESH's table with stateless experts."""
    experts = sinkhorn_chain(
        sweeps=options.sweeps, compat=options.compat, weight_decay=options.weight_decay, rounding=options.rounding
    )
    return Recipe(
        name="sage_sinkhorn",
        groups=table(options, experts),
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 2.3, "ours": 1.0},
    )


RECIPE = RecipeFamily(
    name="sage_sinkhorn",
    options=SageSinkhornOptions,
    build=build,
    paper="arXiv 2604.07663, arXiv 2608.04407",
    summary="SAGE on vocabulary, stateless Sinkhorn on matrices, no state elsewhere",
    checked_against="a float64 loop",
    rate="as mesh; vocabulary at the 0.002 that SAGE publishes; share 1.10",
)
