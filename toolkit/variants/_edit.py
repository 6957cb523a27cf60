"""How variants edit a recipe: which rows they touch, and stages found inside `within` too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from toolkit.recipes import ONE_D, REST, Recipe
from toolkit.recipes._checks import one_of
from toolkit.stages import Chain, Stage
from toolkit.stages._within import within
from traces.errors import GradreelError

#: Variants change how routed experts move, or every row of the table.
ROWS = ("experts", "all")
EXPERT = "routed_expert"


def edit_rows(recipe: Recipe, rows: str, change: Callable[[Chain], Chain]) -> Recipe:
    """Change the routed experts' row (made explicit if `rest` served them), or all rows."""
    one_of("rows", rows, ROWS)
    if rows == "all":
        return recipe.map_chains(lambda key, chain: change(chain))
    groups = dict(recipe.groups)
    if EXPERT not in groups and REST not in groups:
        raise GradreelError(f"recipe {recipe.name} has no row for {EXPERT}; use rows=all")
    groups[EXPERT] = change(groups.get(EXPERT, groups.get(REST)))  # type: ignore[arg-type]
    vectors = groups.get(f"{EXPERT}/{ONE_D}", groups.get(ONE_D))
    if vectors is None:
        groups[f"{EXPERT}/{ONE_D}"] = groups[EXPERT]
    return replace(recipe, groups=groups)


def changed(recipe: Recipe, result: Recipe, variant: str, needs: str) -> Recipe:
    """`result`, unless it has the same chains as `recipe`: then an error that says what the variant needs."""
    before = {key: (chain.describe(), chain.lr_scale) for key, chain in recipe.groups.items()}
    after = {key: (chain.describe(), chain.lr_scale) for key, chain in result.groups.items()}
    new_rows = [key for key in after if key not in before and after[key] != before.get(REST)]
    if not new_rows and all(after[key] == before[key] for key in before) and result.idle == recipe.idle:
        raise GradreelError(f"variant {variant} finds nothing to change in recipe {recipe.name}: {needs}")
    return result


def replace_stage(chain: Chain, name: str, change: Callable[[Stage], Stage | tuple[Stage, ...]]) -> Chain:
    """`Chain.replace`, also inside `within`."""
    return replace(chain, stages=_replaced(chain.stages, name, change))


def _replaced(
    stages: tuple[Stage, ...], name: str, change: Callable[[Stage], Stage | tuple[Stage, ...]]
) -> tuple[Stage, ...]:
    result: list[Stage] = []
    for stage in stages:
        if stage.name == name:
            new = change(stage)
            result.extend(new if isinstance(new, tuple) else (new,))
        elif stage.name == "within":
            inner = _replaced(stage.options["inner"], name, change)
            result.append(within(stage.options["view"], *inner) if inner != stage.options["inner"] else stage)
        else:
            result.append(stage)
    return tuple(result)


def position(chain: Chain, *names: str) -> int:
    """Index of the first stage called one of `names` (a `within` counts if it holds one), -1 if there is none."""
    for index, stage in enumerate(chain.stages):
        inside = stage.options.get("inner", (stage,))
        if any(s.name in names for s in inside):
            return index
    return -1
