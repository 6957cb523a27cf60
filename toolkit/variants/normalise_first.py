"""Normalise, then smooth: the order of momentum and normalisation turned round."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipes import Recipe
from toolkit.stages import Chain
from toolkit.stages._make import stage
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows, position


def change(recipe: Recipe, rows: str = "experts") -> Recipe:
    """Move sr_sinkhorn (or the sign in its place) before the momentum.

    Hidden momentum becomes an ordinary moving average in optimizer state: the gradient buffer can only hold a sum of
    raw gradients.
    """
    return changed(
        recipe, edit_rows(recipe, rows, _edit), "normalise_first", "it needs a normalising stage behind a momentum"
    )


def _edit(chain: Chain) -> Chain:
    momentum = position(chain, "ema", "hidden_ema", "heavy_ball")
    normal = position(chain, "sr_sinkhorn", "sign")
    if not 0 <= momentum < normal:
        return chain
    stages = list(chain.stages)
    stages.insert(momentum, stages.pop(normal))
    hidden = stages[momentum + 1]
    if hidden.name == "hidden_ema":
        stages[momentum + 1] = stage("ema", beta=hidden.options["beta"])
    return replace(chain, stages=tuple(stages))


VARIANT = Variant("normalise_first", change, "normalise_first", "normalise the gradient, then smooth")
