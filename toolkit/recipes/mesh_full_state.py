"""MESH's full-state diagnostics: what its experts would do with as much state as AdamW has."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import Recipe, RecipeFamily
from toolkit.recipes._tables import adam_chain
from toolkit.recipes.mesh import MeshOptions, table
from toolkit.stages import chain
from toolkit.stages._make import stage

EXPERTS = ("momentum", "adam", "sinkhorn_of_adam")


@dataclass(frozen=True)
class MeshFullStateOptions(MeshOptions):
    """`experts`: "momentum" keeps MESH's momentum in optimizer state; "adam" runs Adam on experts alone;
    "sinkhorn_of_adam" normalises Adam's update. The other roles stay as in MESH.
    """

    experts: str = "momentum"
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.one_of("experts", self.experts, EXPERTS)
        _checks.betas("adam_betas", self.adam_betas)
        _checks.positive("adam_eps", self.adam_eps)


def build(options: MeshFullStateOptions) -> Recipe:
    """MESH's table with one of three chains for experts."""
    sinkhorn = stage("sr_sinkhorn", sweeps=options.sweeps, compat=options.compat)
    end = stage("apply", weight_decay=options.weight_decay, rounding=options.rounding)
    adam = adam_chain(betas=options.adam_betas, eps=options.adam_eps).stages[:-1]
    stages = {
        "momentum": (stage("ema", beta=options.beta), sinkhorn),
        "adam": adam,
        "sinkhorn_of_adam": (*adam, stage("divide"), sinkhorn),
    }[options.experts]
    return Recipe(
        name="mesh_full_state",
        groups=table(options, chain(*stages, end)),
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 2.3, "ours": 2.0 if options.experts == "sinkhorn_of_adam" else 1.0},
    )


RECIPE = RecipeFamily(
    name="mesh_full_state",
    options=MeshFullStateOptions,
    build=build,
    paper="arXiv 2608.04407",
    summary="MESH with full expert state: momentum, Adam, or Sinkhorn of Adam's update",
    checked_against="a float64 loop; mesh itself for momentum",
    rate="as mesh; share 1.07",
)
