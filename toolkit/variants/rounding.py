"""Another way to store bfloat16 weights."""

from __future__ import annotations

from toolkit.recipes import Recipe
from toolkit.recipes._checks import ROUNDINGS, one_of
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows, replace_stage


def change(recipe: Recipe, mode: str, rows: str = "all") -> Recipe:
    """`nearest`, `stochastic` or `dither` (SkewAdam's), on every role unless `rows=experts`."""
    one_of("rounding", mode, ROUNDINGS)
    result = edit_rows(
        recipe, rows, lambda chain: replace_stage(chain, "apply", lambda s: s.with_options(rounding=mode))
    )
    return changed(recipe, result, "rounding", f"it rounds {mode} already")


VARIANT = Variant(
    "rounding", change, "rounding(nearest), rounding(stochastic), rounding(dither)", "how bfloat16 weights are stored"
)
