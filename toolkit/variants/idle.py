"""Another policy for experts without tokens."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipes import IdlePolicy, Recipe
from toolkit.recipes._checks import IDLE_POLICIES, one_of
from toolkit.variants import Variant
from toolkit.variants._edit import changed


def change(recipe: Recipe, policy: IdlePolicy) -> Recipe:
    """`skip` (as if the gradient were None), `decay` (state decays, no step) or `as_zero`."""
    one_of("idle policy", policy, IDLE_POLICIES)
    return changed(recipe, replace(recipe, idle=policy), "idle", f"its idle policy is {policy} already")


VARIANT = Variant("idle", change, "idle(skip), idle(decay), idle(as_zero)", "what happens to experts without tokens")
