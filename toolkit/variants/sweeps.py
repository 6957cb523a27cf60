"""Another number of Sinkhorn sweeps."""

from __future__ import annotations

from toolkit.recipes import Recipe
from toolkit.recipes._checks import whole
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows, replace_stage


def change(recipe: Recipe, count: int, rows: str = "experts") -> Recipe:
    """sr_sinkhorn with `count` sweeps."""
    whole("sweeps", count)
    result = edit_rows(
        recipe, rows, lambda chain: replace_stage(chain, "sr_sinkhorn", lambda s: s.with_options(sweeps=count))
    )
    return changed(recipe, result, "sweeps", "it needs stage sr_sinkhorn with another number of sweeps")


VARIANT = Variant("sweeps", change, "sweeps(3)", "another number of Sinkhorn sweeps on routed experts")
