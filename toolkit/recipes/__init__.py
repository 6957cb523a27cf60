"""Recipes, one optimizer per file. See `_recipe.py` for what a recipe is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily, interval
from traces.registry import Registry

if TYPE_CHECKING:
    from toolkit.recipes._stepper import Stepper

RECIPES: Registry[RecipeFamily] = Registry("toolkit.recipes", "RECIPE", "recipe")

__all__ = ["ONE_D", "RECIPES", "REST", "IdlePolicy", "Recipe", "RecipeFamily", "Stepper", "interval"]


def __getattr__(name: str) -> Any:
    # Lazily, since only the stepper needs torch: names and tables can be listed without it.
    if name == "Stepper":
        from toolkit.recipes._stepper import Stepper

        return Stepper
    raise AttributeError(f"module 'toolkit.recipes' has no attribute {name!r}")
