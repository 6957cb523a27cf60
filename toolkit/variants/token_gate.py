"""Hold back experts with few tokens."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipes import Recipe
from toolkit.recipes._checks import whole
from toolkit.stages import Chain
from toolkit.stages._make import stage
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows


def change(recipe: Recipe, min_tokens: int = 1) -> Recipe:
    """No update for experts with fewer than `min_tokens` tokens; their momentum and weight decay go on.

    Needs recorded routing.
    """
    whole("min_tokens", min_tokens)
    gate = stage("token_gate", min_tokens=min_tokens)

    def edit(chain: Chain) -> Chain:
        kept = tuple(s for s in chain.stages if s.name != "token_gate")
        return replace(chain, stages=(*kept[:-1], gate, kept[-1]))

    return changed(recipe, edit_rows(recipe, "experts", edit), "token_gate", "give another number of tokens")


VARIANT = Variant("token_gate", change, "token_gate(8)", "no step for experts with few tokens")
