"""The optimizer's state on its way to disk and back, bit for bit."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from traces.errors import GradreelError

if TYPE_CHECKING:
    from toolkit.optim._optimizer import RecipeOptimizer

SCHEMA = 1
KEY = "gradreel"


def save(optimizer: RecipeOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """torch's packed state plus our own entry; `attached` says whether backward adds onto hidden momentum."""
    attached = any(hidden.active for hidden in optimizer._hidden.values())
    about = {"schema": SCHEMA, "recipe": optimizer.recipe.name, "seed": optimizer.seed, "attached": attached}
    return {**packed, KEY: about}


def load(optimizer: RecipeOptimizer, given: dict[str, Any]) -> None:
    """Check everything, then copy. Saved tensors stay untouched."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, given)
        given = given if changed is None else changed
    mine = given.get(KEY)
    if mine is None:
        raise GradreelError(f"this state_dict has no {KEY!r} entry; allowed: the state of a recipe's optimizer")
    if mine["schema"] != SCHEMA:
        raise GradreelError(f"state_dict schema is {mine['schema']}; allowed: {SCHEMA}")
    if mine["recipe"] != optimizer.recipe.name:
        raise GradreelError(f"state_dict is of recipe {mine['recipe']!r}, the optimizer of {optimizer.recipe.name!r}")
    groups, saved = optimizer.param_groups, given["param_groups"]
    sizes, found = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if sizes != found:
        raise GradreelError(f"state_dict has groups of {found} parameters; the optimizer has {sizes}")
    ids = [i for group in saved for i in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    pairs = [(p, given["state"].get(i, {})) for p, i in zip(parameters, ids, strict=True)]
    for parameter, values in pairs:
        _check(optimizer, parameter, values)
    with torch.no_grad():
        for parameter, values in pairs:
            if not values and parameter not in optimizer._steppers:
                continue
            for key, slot in optimizer._stepper(parameter).state.items():
                if key in values:
                    slot.copy_(values[key])
                else:
                    slot.zero_()
    for group, old in zip(groups, saved, strict=True):
        group.update({k: copy.deepcopy(v) for k, v in old.items() if k not in ("params", "param_names")})
    optimizer.seed = int(mine["seed"])
    for stepper in optimizer._steppers.values():
        stepper.seed = optimizer.seed
    for hidden in optimizer._hidden.values():
        if hidden.active or mine.get("attached", False):
            hidden.resumed()
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _check(optimizer: RecipeOptimizer, parameter: Any, values: dict[str, Any]) -> None:
    if not values:
        return
    stepper = optimizer._stepper(parameter)
    name, wanted = stepper.info.name, stepper.state
    if set(values) != set(wanted):
        raise GradreelError(f"{name}: state_dict holds {sorted(values)}; the optimizer keeps {sorted(wanted)}")
    for key, slot in wanted.items():
        value = values[key]
        if tuple(value.shape) != tuple(slot.shape) or value.dtype != slot.dtype:
            raise GradreelError(
                f"{name}: {key} in the state_dict is {tuple(value.shape)} {value.dtype}; "
                f"allowed: {tuple(slot.shape)} {slot.dtype}"
            )
