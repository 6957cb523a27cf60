"""AdamW on everything but routed experts (or another role), so that arms differ in that role alone."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipes import ONE_D, REST, Recipe
from toolkit.recipes._checks import not_negative, one_of, positive
from toolkit.recipes._tables import adam_chain
from toolkit.variants import Variant
from toolkit.variants._edit import EXPERT
from traces.errors import GradreelError
from traces.views import ROLES


def change(recipe: Recipe, lr: float = 1e-3, weight_decay: float = 0.01, but: str = EXPERT) -> Recipe:
    """Every role but `but` by AdamW at the rate `lr`, whatever rate the recipe was built with.

    `recipe("mesh+adam_rest(6e-4)", lr=2e-3)` runs experts at 2e-3 and the rest at 6e-4; a schedule scales both. On
    adamw it gives the experts a rate of their own.
    """
    positive("adam_rest lr", lr)
    not_negative("adam_rest weight_decay", weight_decay)
    one_of("adam_rest but", but, ROLES)
    if not recipe.lr:
        raise GradreelError(f"adam_rest: recipe {recipe.name} has lr 0; give it a positive lr")
    old = recipe.groups
    if but not in old and REST not in old:
        raise GradreelError(f"recipe {recipe.name} has no row for {but}; adam_rest needs one")
    adam = adam_chain(
        weight_decay=weight_decay,
        rounding=next(iter(old.values())).stages[-1].options["rounding"],
        lr_scale=lr / recipe.lr,
    )
    kept = old.get(but) or old[REST]
    vectors = old.get(f"{but}/{ONE_D}") or old.get(ONE_D) or kept
    groups = {but: kept, f"{but}/{ONE_D}": vectors, ONE_D: adam, REST: adam}
    if groups == old:
        raise GradreelError(f"variant adam_rest finds nothing to change in recipe {recipe.name}: it is there already")
    return replace(recipe, groups=groups)


VARIANT = Variant(
    "adam_rest", change, "adam_rest, adam_rest(6e-4), adam_rest(but=attention)", "AdamW on every role but one"
)
