"""From a recipe to what the compiled loop can do: the chain of its routed experts, as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.errors import GradreelError
from traces.views import ParamInfo

if TYPE_CHECKING:
    from toolkit.recipes import Recipe

IDLE = {"skip": 0, "decay": 1, "as_zero": 2}
#: Rules that are no published optimizer, but take one apart: scale without shape.
CONTROLS = {
    "rms": ("rms_normalise",),
    "momentum_then_rms": ("ema", "rms_normalise"),
}


@dataclass(frozen=True)
class Program:
    """A chain as the loop reads it: `ops` [stages] of codes, `numbers` [stages, 3] of their switches, slots counted."""

    ops: np.ndarray
    numbers: np.ndarray
    slots: int
    idle: int
    lr_scale: float
    recipe: Recipe = field(repr=False)


def resolve(name: str | Recipe) -> Recipe:
    """The recipe called `name`: any of the project's, or one of `CONTROLS` (`rms`, `momentum_then_rms`)."""
    from toolkit.recipes import REST, Recipe
    from toolkit.stages import chain
    from toolkit.stages._make import stage
    from toolkit.variants import recipe

    if isinstance(name, str) and name in CONTROLS:
        rows = chain(*map(stage, CONTROLS[name]), stage("apply"))
        return Recipe(name=name, groups={REST: rows}, lr=1e-2, idle="skip")
    return recipe(name)


def parameter(experts: int, m: int, n: int, dtype: str = "float64") -> ParamInfo:
    """The stack of experts [E, m, n] as recipes see it."""
    return ParamInfo(
        name="experts",
        role="routed_expert",
        shape=(experts, m, n),
        dtype=dtype,
        layer=0,
        expert_axis=0,
        num_experts=experts,
        matrix_axes=(1, 2),
    )


def program(name: str | Recipe, m: int, n: int) -> Program:
    """Translate a recipe for experts of m x n. Errors: GradreelError for a stage that the loop does not know."""
    from ablations.simulate import _kernel as k

    def sweeps_of(o: Mapping[str, Any]) -> tuple[int, float, float]:
        from toolkit.kernels.sr_sinkhorn import output_scale

        return k.SINKHORN, o["sweeps"], output_scale(o["compat"], m)

    def newton(o: Mapping[str, Any]) -> tuple[int, float, float, float]:
        if m > n or o["dtype"] != "float32":
            raise GradreelError(
                f"newton_schulz is simulated for m <= n in full precision, not {m} x {n} in {o['dtype']}"
            )
        scale = {"original": 1.0, "match_rms_adamw": 0.2 * max(m, n) ** 0.5, "none": 1.0}[o["scale"]]
        return k.NEWTON, o["sweeps"], o["eps"], scale

    def second(o: Mapping[str, Any]) -> tuple[int, float, float]:
        if o["eps_mode"] != "add_to_sqrt" or o["correct"] != "before" or o["power"] is not None:
            raise GradreelError("second_moment is simulated in Adam's form only (eps_mode add_to_sqrt, correct before)")
        return k.SECOND, o["beta"], o["eps"]

    table: dict[str, Callable[[Mapping[str, Any]], tuple[float, ...]]] = {
        "hidden_ema": lambda o: (k.HIDDEN_EMA, o["beta"]),
        "ema": lambda o: (k.EMA, o["beta"]),
        "heavy_ball": lambda o: (k.HEAVY_BALL, o["beta"], float(o["nesterov"])),
        "sr_sinkhorn": sweeps_of,
        "sign": lambda o: (k.SIGN,),
        "rms_normalise": lambda o: (k.RMS,),
        "second_moment": second,
        "unbias": lambda o: (k.UNBIAS, o["beta"]),
        "divide": lambda o: (k.DIVIDE,),
        "snr": lambda o: (k.SNR, o["beta"]),
        "lion": lambda o: (k.LION, o["beta1"], o["beta2"]),
        "newton_schulz": newton,
        "apply": lambda o: (k.APPLY, o["weight_decay"]),
    }
    built = resolve(name)
    chain = built.chain_for(parameter(1, m, n))
    rows = []
    for stage in chain:
        if stage.name not in table:
            raise GradreelError(
                f"recipe {built.name}: stage {stage.name} cannot be simulated; allowed: {', '.join(table)}"
            )
        rows.append(table[stage.name](stage.options))
    numbers = np.zeros((len(rows), 3))
    for at, row in enumerate(rows):
        numbers[at, : len(row) - 1] = row[1:]
    ops = np.array([int(row[0]) for row in rows], np.int64)
    return Program(ops, numbers, len(chain.slots()), IDLE[built.idle], chain.lr_scale, built)
