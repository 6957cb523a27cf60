"""Which recipe really trained a trace, from what its header says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.recipes import Recipe
from toolkit.replay._source import Source
from toolkit.variants import recipe as make_recipe
from traces.errors import GradreelError

Group = Mapping[str, Any]


def _adamw(group: Group) -> Recipe:
    return make_recipe("adamw", betas=tuple(group["betas"]), eps=group["eps"], weight_decay=group["weight_decay"])


def _sgd(group: Group) -> Recipe:
    if group.get("dampening"):
        raise GradreelError(f"the trace was trained by SGD with dampening {group['dampening']}; recipe sgd has none")
    names = ("momentum", "nesterov", "weight_decay")
    return make_recipe("sgd", **{name: group[name] for name in names})


#: torch's own optimizers: (family, recipe of a group, slot of torch -> slot of the recipe).
TORCH_OPTIMIZERS: dict[str, tuple[str, Callable[[Group], Recipe], dict[str, str]]] = {
    "AdamW": ("adamw", _adamw, {"exp_avg": "momentum", "exp_avg_sq": "second_moment"}),
    "SGD": ("sgd", _sgd, {"momentum_buffer": "momentum"}),
}


def trained_by(source: Source, given: str | Recipe | None = None) -> list[tuple[Recipe, list[str]]]:
    """The recipe of each of the recorded optimizer's groups, with the names of its parameters that have gradients.

    `given` None, or the name of the recorded optimizer's family, takes every hyper-parameter from the header. A
    Recipe, a name with switches, or another family is taken as it is. Raises GradreelError where the header does not
    say enough.
    """
    groups = [(group, [n for n in group.get("params", ()) if n in source.infos]) for group in source.groups]
    taken = {name for _, names in groups for name in names}
    left = [name for name in source.infos if name not in taken]
    if given is not None and not _is_family(source, given):
        return [(make_recipe(given), list(source.infos))]
    if not groups:
        raise GradreelError(
            "the header names no optimizer groups; give the recipe that trained the trace, with its switches"
        )
    if left:
        raise GradreelError(
            f"the header names no optimizer group for {left[0]}; give the recipe that trained the trace"
        )
    return [(recipe_of_group(source, group), names) for group, names in groups if names]


def recipe_of_group(source: Source, group: Group) -> Recipe:
    """One recorded group's recipe, hyper-parameters as recorded."""
    named = group.get("recipe") or source.trace.header.run.get("recipe")
    if named:
        return make_recipe(str(named))
    optimizer = optimizer_of(source, group)
    if optimizer not in TORCH_OPTIMIZERS:
        raise GradreelError(
            f"the trace was trained by {optimizer}, which no recipe is known to reproduce; give a recipe with its "
            f"switches, or train with {', '.join(TORCH_OPTIMIZERS)} or an optimizer of toolkit.optim"
        )
    _, build, _ = TORCH_OPTIMIZERS[optimizer]
    try:
        return build(group)
    except KeyError as error:
        raise GradreelError(f"the header lacks {error} of {optimizer}; give a recipe with its switches") from None


def optimizer_of(source: Source, group: Group) -> str:
    """Class name of the optimizer that held a group, `AdamW` for instance."""
    recorded = group.get("optimizer") or source.trace.header.run.get("optimizer") or "unknown"
    return str(recorded).rsplit(".", 1)[-1]


def state_names(source: Source, group: Group) -> dict[str, str]:
    """Recorded slot -> slot of the recipe; slots of toolkit's own optimizers keep their names."""
    return TORCH_OPTIMIZERS.get(optimizer_of(source, group), ("", _adamw, {}))[2]


def _is_family(source: Source, given: str | Recipe) -> bool:
    """Whether `given` is a bare family name that matches the recorded optimizer's."""
    if not isinstance(given, str) or not source.groups:
        return False
    recorded = source.groups[0].get("recipe") or source.trace.header.run.get("recipe")
    optimizer = optimizer_of(source, source.groups[0])
    family = re.split(r"[(+]", str(recorded))[0] if recorded else TORCH_OPTIMIZERS.get(optimizer, ("",))[0]
    return given == family
