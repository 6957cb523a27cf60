"""Recipes, one optimizer per file. See `_recipe.py` for what a recipe is."""

from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily, interval
from traces.registry import Registry

RECIPES: Registry[RecipeFamily] = Registry("toolkit.recipes", "RECIPE", "recipe")

__all__ = ["ONE_D", "RECIPES", "REST", "IdlePolicy", "Recipe", "RecipeFamily", "interval"]
