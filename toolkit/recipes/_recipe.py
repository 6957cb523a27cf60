"""Recipes: an optimizer as a table from roles to chains.

`recipe("mesh+sign_only", beta=0.95)` finds the family in this folder, builds its table with the options given, and
passes it through the variants named after the plus signs.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from toolkit.stages import Chain
from traces.errors import GradreelError
from traces.views import ROLES, ParamInfo

IdlePolicy = Literal["skip", "decay", "as_zero"]
#: Key of the table row for parameters of fewer than two dimensions, whatever their role.
ONE_D = "1-D"
#: Key of the row for every role without a row of its own.
REST = "rest"


@dataclass(frozen=True)
class Recipe:
    """A frozen optimizer: which chain serves which role.

    `groups` maps a role, `"1-D"` or `"rest"` to a chain; for one parameter the order is: role + "/1-D" if its matrices
    have fewer than two axes, "1-D", the role, "rest". `lr` is the default base rate. `idle` says what happens to an
    expert without tokens. `temporaries` counts parameter-sized float32 temporaries at the peak of one step, of the
    original code (or of this one where none was measured) and of this one, for float32 matrices (galore and apollo:
    whose shorter side is no longer than their rank). Stacks of experts, and elementwise chains on any parameter, are
    stepped 2^24 elements at a time, so theirs are smaller still. bfloat16 parameters add one widened gradient, and
    40 MiB for rounding 2^20 elements at a time.
    """

    name: str
    groups: Mapping[str, Chain]
    lr: float
    idle: IdlePolicy
    paper: str = ""
    doc: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    temporaries: Mapping[str, float] = field(default_factory=lambda: {"original": 1.0, "ours": 1.0})

    def chain_for(self, info: ParamInfo) -> Chain:
        """The chain that serves `info`; raises GradreelError where the table has no row for it."""
        role = "router" if info.role == "router_bias" else info.role
        one_d = info.matrix_axes is None
        keys = [f"{role}/{ONE_D}", ONE_D, role, REST] if one_d else [role, REST]
        for key in keys:
            if key in self.groups:
                return self.groups[key]
        raise GradreelError(f"recipe {self.name} has no chain for {info.name} (role {info.role}, shape {info.shape})")

    def map_chains(self, change: Callable[[str, Chain], Chain]) -> Recipe:
        """A recipe in which every row's chain became `change(key, chain)`."""
        return replace(self, groups={key: change(key, c) for key, c in self.groups.items()})

    def is_stateful(self) -> bool:
        """Whether any chain keeps a slot or counts steps, so that a gap in the recording matters."""
        return any(c.slots() or c.counts_steps for c in self.groups.values())


@dataclass(frozen=True)
class RecipeFamily:
    """What a recipe file exports as `RECIPE`.

    `options` is a frozen dataclass type that validates itself in `__post_init__`; `build(options)` returns the Recipe.
    `rate` says where the default lr comes from and how it did: by what share of AdamW's drop of the validation loss it
    trains the demo's model in 100 steps (seed 0, batches of 4 x 128 bytes, warm-up 10, cosine, clip 1). These are
    smoke rates, not tuned ones: one seed, no grid.
    """

    name: str
    options: type
    build: Callable[[Any], Recipe]
    paper: str
    summary: str
    checked_against: str = ""
    rate: str = ""

    def __call__(self, **changes: Any) -> Recipe:
        """Build with some options changed; an unknown option is an error that lists the allowed ones."""
        allowed = {f.name for f in fields(self.options)}
        for key in changes:
            if key not in allowed:
                raise GradreelError(f"recipe {self.name} has no option {key!r}; allowed: {', '.join(sorted(allowed))}")
        for option in fields(self.options):
            value = changes.get(option.name, option.default)
            allowed_none = option.type == "bool | None" and value is None
            if option.type in ("bool", "bool | None") and not isinstance(value, bool) and not allowed_none:
                raise GradreelError(f"{option.name} is {value!r}; allowed: True, False")
        built = self.build(self.options(**changes))
        unknown_rows = {k.split("/")[0] for k in built.groups} - {*ROLES, ONE_D, REST}
        if unknown_rows:
            raise GradreelError(f"recipe {self.name}: no such role: {', '.join(sorted(unknown_rows))}")
        return built


def interval(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> None:
    """Raise GradreelError with the value and the allowed interval unless `value` is a number in it (NaN never is)."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    above = number and (value > low if open_low else value >= low)
    below = number and (value < high if open_high else value <= high)
    if not (above and below):
        brackets = ("(" if open_low else "[", ")" if open_high else "]")
        shown = str(value) if number else repr(value)
        raise GradreelError(f"{name} is {shown}; allowed: {brackets[0]}{low}, {high}{brackets[1]}")
