"""MESH-B: MESH with a coarse adaptive multiplier per neuron or per block of neurons."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import Recipe, RecipeFamily, interval
from toolkit.recipes.mesh import MeshOptions, table
from toolkit.stages import chain
from toolkit.stages._make import stage
from toolkit.stages.inverse_rms import with_blocks


@dataclass(frozen=True)
class MeshBOptions(MeshOptions):
    """`multiplier="after"` acts behind the normalisation; "before" it cancels, which is what an ablation can show.

    `block` is the number of neurons (rows) that share one value: 1 is one per neuron. `moment_beta` averages their
    mean square, `moment_of` the momentum (all there is where backward adds onto the buffer) or the "gradient".
    """

    multiplier: str = "after"
    moment_of: str = "momentum"
    block: int = 1
    moment_beta: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.one_of("multiplier", self.multiplier, ("after", "before"))
        _checks.one_of("moment_of", self.moment_of, ("momentum", "gradient"))
        _checks.whole("block", self.block)
        interval("moment_beta", self.moment_beta, 0.0, 1.0, open_high=True)


def build(options: MeshBOptions) -> Recipe:
    """MESH's table with the multiplier in the experts' row."""
    multiplier = with_blocks(beta=options.moment_beta, block=options.block)
    between = [] if options.multiplier == "after" else [stage("divide")]
    momentum = stage("hidden_ema", beta=options.beta)
    first = [momentum, multiplier] if options.moment_of == "momentum" else [multiplier, momentum]
    experts = chain(
        *first,
        *between,
        stage("sr_sinkhorn", sweeps=options.sweeps, compat=options.compat),
        stage("apply", weight_decay=options.weight_decay, rounding=options.rounding),
    )
    return Recipe(
        name="mesh_b",
        groups=table(options, experts),
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 2.3, "ours": 1.0 if options.multiplier == "after" else 2.0},
    )


RECIPE = RecipeFamily(
    name="mesh_b",
    options=MeshBOptions,
    build=build,
    paper="arXiv 2608.04407",
    summary="MESH times an inverse RMS per neuron or block, after the normalisation unless told otherwise",
    checked_against="a float64 loop written from the formulas",
    rate="as mesh; share 1.11",
)
