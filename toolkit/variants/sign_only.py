"""Keep the signs and drop the Sinkhorn normalisation."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipes import Recipe
from toolkit.recipes._checks import one_of
from toolkit.stages import Chain, Stage
from toolkit.stages._make import stage
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows, position, replace_stage

OF = ("momentum", "gradient", "before_sinkhorn")
_MOMENTA = ("ema", "hidden_ema", "heavy_ball", "unbias")


def change(recipe: Recipe, of: str = "momentum", rows: str = "experts") -> Recipe:
    """`of="momentum"`: sign where sr_sinkhorn stands, behind the momentum if there is one. "gradient": the sign of the
    gradient, without momentum. "before_sinkhorn": sign, then Sinkhorn."""
    one_of("sign_only of", of, OF)

    def edit(chain: Chain) -> Chain:
        if of == "gradient" and position(chain, "sr_sinkhorn") >= 0:
            kept = tuple(s for s in chain.stages if s.name not in _MOMENTA)
            chain = replace(chain, stages=kept)
        return replace_stage(chain, "sr_sinkhorn", substitute)

    def substitute(sinkhorn: Stage) -> Stage | tuple[Stage, ...]:
        return (stage("sign"), sinkhorn) if of == "before_sinkhorn" else stage("sign")

    return changed(recipe, edit_rows(recipe, rows, edit), "sign_only", "it replaces stage sr_sinkhorn")


VARIANT = Variant(
    "sign_only", change, "sign_only, sign_only(gradient), sign_only(before_sinkhorn)", "sign in place of Sinkhorn"
)
