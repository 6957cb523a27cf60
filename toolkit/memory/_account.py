"""Bytes of optimizer state and of pinned gradients, from slots and shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolkit.recipes import Recipe
from traces.views import ParamInfo

KINDS = ("state_bytes", "pinned_gradient_bytes", "step_counter_bytes")


def account(recipe: Recipe, params: Iterable[ParamInfo]) -> list[dict[str, Any]]:
    """One row per role: `role`, `parameters` (elements), `state_bytes`, `pinned_gradient_bytes`, `step_counter_bytes`.

    `pinned_gradient_bytes` counts gradient buffers that must survive between steps (hidden momentum); step counters
    are kept apart, since published tables leave them out. Tied parameters (`tied_to`) count once. Nothing is
    allocated. Errors: GradreelError where the recipe has no row for a parameter.
    """
    from toolkit.recipes._layout import Layout
    from toolkit.recipes._stepper import counter_shape, slot_dtype

    rows: dict[str, dict[str, Any]] = {}
    for info in params:
        if info.tied_to is not None:
            continue
        row = rows.setdefault(info.role, {"role": info.role, "parameters": 0, **dict.fromkeys(KINDS, 0)})
        row["parameters"] += info.numel
        chain, shape = recipe.chain_for(info), Layout(info).canonical_shape
        for _, slot in chain.slots():
            kind = "state_bytes" if slot.home == "state" else "pinned_gradient_bytes"
            row[kind] += _count(slot.shape(shape)) * slot_dtype(slot, info).itemsize
        counter = counter_shape(recipe, chain, info)
        row["step_counter_bytes"] += 0 if counter is None else 8 * _count(counter)
    return [rows[role] for role in sorted(rows)]


def account_slots(recipe: Recipe, params: Iterable[ParamInfo]) -> dict[tuple[str, str], int]:
    """Bytes by (role, name of the slot), step counters left out; tied parameters count once."""
    from toolkit.recipes._layout import Layout
    from toolkit.recipes._stepper import slot_dtype

    found: dict[tuple[str, str], int] = {}
    for info in params:
        if info.tied_to is None:
            shape = Layout(info).canonical_shape
            for _, slot in recipe.chain_for(info).slots():
                count = _count(slot.shape(shape)) * slot_dtype(slot, info).itemsize
                found[info.role, slot.name] = found.get((info.role, slot.name), 0) + count
    return found


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
