"""Variants, one modification of a recipe per file.

`VARIANT.change(recipe, *arguments) -> Recipe`. A variant that finds nothing to change raises, so that `adamw+sign_only`
can never silently be `adamw`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.recipes import Recipe
from toolkit.variants._named import recipe
from traces.registry import Registry


@dataclass(frozen=True)
class Variant:
    """What a variant file exports as `VARIANT`. `usage` shows its arguments, `smaller_steps(0.3)` for instance."""

    name: str
    change: Callable[..., Recipe]
    usage: str
    summary: str


VARIANTS: Registry[Variant] = Registry("toolkit.variants", "VARIANT", "variant")

__all__ = ["VARIANTS", "Variant", "recipe"]
