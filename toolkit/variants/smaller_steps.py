"""The same direction with a smaller step."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipes import Recipe
from toolkit.recipes._checks import positive
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows
from traces.errors import GradreelError

#: A larger factor only overflows.
MOST = 1e6


def change(recipe: Recipe, factor: float = 0.3, rows: str = "experts") -> Recipe:
    """lr x `factor` on routed experts (`rows=all`: everywhere)."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise GradreelError(f"smaller_steps factor is {factor!r}; allowed: numbers in (0, inf)")
    positive("smaller_steps factor", factor)
    if factor > MOST:
        raise GradreelError(f"smaller_steps factor is {factor}; allowed: (0, {MOST:g}]")
    result = edit_rows(recipe, rows, lambda chain: replace(chain, lr_scale=chain.lr_scale * factor))
    return changed(recipe, result, "smaller_steps", "give a factor other than 1")


VARIANT = Variant("smaller_steps", change, "smaller_steps(0.3)", "lr times a factor on routed experts")
