"""The known models planned with every recipe: what a figure of memory against model size is drawn from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl


def plan_sizes(
    models: Iterable[str] | None = None, recipes: Iterable[str] | None = None, **settings: Any
) -> pl.DataFrame:
    """A Frame of memory plans on one unsharded device: `run` is the model, `metric` a category of the plan in bytes,
    `parameters` or `peak_bytes`.

    `models`: names of `gradreel list models` (default: all). `recipes`: default all. `settings` are those of
    `plan_memory`; unless they say otherwise weights are bfloat16, one sequence of 1024 tokens makes a step, and blocks
    are recomputed, so that the peak is about the optimizer. Nothing is allocated. Errors: GradreelError for unknown
    names and settings.
    """
    import polars as pl

    from ablations.models.known import KNOWN
    from toolkit.memory import architecture, plan_memory
    from toolkit.recipes import RECIPES

    chosen: dict[str, Any] = {"weights": "bfloat16", "batch": 1, "sequence": 1024, "checkpointing": "full", **settings}
    frames = []
    for model in models or KNOWN.names():
        described = architecture(model)
        limit = described.config.get("max_positions") or chosen["sequence"]
        run = {**chosen, "sequence": min(chosen["sequence"], limit)}
        frames += [plan_memory(described, recipe, **run).frame for recipe in recipes or RECIPES.names()]
    return pl.concat(frames)
