"""Normalise over another grouping of the same elements."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipes import Recipe
from toolkit.recipes._checks import one_of, whole
from toolkit.stages import Chain, Stage
from toolkit.stages import _within as views
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows
from traces.errors import GradreelError

GROUPINGS = ("per_expert", "stacked", "gate_up_split", "gate_up_joined", "transposed", "row_blocks")


def change(recipe: Recipe, grouping: str = "stacked", size: int | None = None, rows: str = "experts") -> Recipe:
    """Run sr_sinkhorn (or the sign in its place) of the routed experts on another view of them.

    "stacked": all experts as one tall matrix. "gate_up_split": the gate's and the up projection's rows apart.
    "transposed": columns first. "row_blocks": `size` rows each. "per_expert", "gate_up_joined": back to one matrix
    per expert, as recipes do unless told otherwise.
    """
    one_of("regrouped grouping", grouping, GROUPINGS)
    if (grouping == "row_blocks") != (size is not None):
        raise GradreelError(
            f"regrouped({grouping}) with size {size}; allowed: regrouped(row_blocks, 64), no size otherwise"
        )
    if size is not None:
        whole("regrouped size", size)
    result = edit_rows(recipe, rows, lambda chain: _regroup(chain, grouping, size))
    needs = "it needs a normalising stage grouped otherwise (recipes work per expert unless regrouped)"
    return changed(recipe, result, "regrouped", needs)


def _regroup(chain: Chain, grouping: str, size: int | None) -> Chain:
    stages: list[Stage] = []
    for stage in chain.stages:
        inner = stage.options["inner"] if stage.name == "within" else (stage,)
        if not any(s.name in ("sr_sinkhorn", "sign") for s in inner):
            stages.append(stage)
        elif grouping in ("per_expert", "gate_up_joined"):
            stages.extend(inner)
        else:
            view = views.row_blocks(size) if size is not None else getattr(views, grouping)()
            stages.append(views.within(view, *inner))
    return replace(chain, stages=tuple(stages))


VARIANT = Variant(
    "regrouped",
    change,
    "regrouped(stacked), regrouped(gate_up_split), regrouped(transposed), regrouped(row_blocks, 2)",
    "Sinkhorn over another grouping of the experts' elements",
)
