"""Every switch of every recipe refuses what it cannot mean, as a ValueError with the value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from toolkit.recipes import RECIPES
from toolkit.variants import recipe

SWITCHES = [(family.name, field.name) for family in RECIPES.all() for field in dataclasses.fields(family.options)]


def wrong_values(default: Any, name: str) -> list[Any]:
    if isinstance(default, bool):
        return ["yes", 2]
    if isinstance(default, tuple):
        return [(1.0, 0.5), (0.5, 1.0), (-0.1, 0.5), (0.5, math.nan), (0.5,), 0.9, ("a", "b"), None]
    if isinstance(default, int):
        return [-1, 2.5, math.nan, "many", True]
    if isinstance(default, float):
        wrong: list[Any] = [-1.0, math.nan, math.inf, "much", (0.1,)]
        return wrong + ([1.0] if name in ("beta", "momentum", "moment_beta") else [])
    if isinstance(default, str):
        return ["nonsense", 3]
    return []


@pytest.mark.parametrize(("name", "switch"), SWITCHES, ids=[f"{n}-{s}" for n, s in SWITCHES])
def test_wrong_values_are_refused(name: str, switch: str) -> None:
    default = getattr(RECIPES.get(name).options(), switch)
    for value in wrong_values(default, switch):
        with pytest.raises(ValueError, match=r"is .*allowed: ") as caught:
            recipe(name, **{switch: value})
        assert "\n" not in str(caught.value)
        parts = value if isinstance(value, tuple) else (value,)
        assert any(f"is {shown};" in str(caught.value) for part in (*parts, value) for shown in (part, repr(part)))


@pytest.mark.parametrize("name", RECIPES.names())
def test_edges_that_work(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(RECIPES.get(name).options)}
    edges = {"lr": 0.0, "beta": 0.0, "momentum": 0.0, "betas": (0.0, 0.0), "weight_decay": 0.0}
    for switch in fields & set(edges):
        recipe(name, **{switch: edges[switch]})
    assert recipe(name, lr=0.0).lr == 0.0
