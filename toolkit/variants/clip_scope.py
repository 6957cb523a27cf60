"""Another scope of the RMS clip."""

from __future__ import annotations

from toolkit.recipes import Recipe
from toolkit.recipes._checks import one_of
from toolkit.stages.rms_clip import CLIP_SCOPES
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows, replace_stage


def change(recipe: Recipe, scope: str, rows: str = "experts") -> Recipe:
    """`matrix` clips every expert by its own RMS, `tensor` the whole stack by one."""
    one_of("clip_scope", scope, CLIP_SCOPES)
    result = edit_rows(
        recipe, rows, lambda chain: replace_stage(chain, "rms_clip", lambda s: s.with_options(clip_scope=scope))
    )
    return changed(recipe, result, "clip_scope", "it needs stage rms_clip with another scope")


VARIANT = Variant("clip_scope", change, "clip_scope(tensor), clip_scope(matrix)", "what the RMS clip spans")
