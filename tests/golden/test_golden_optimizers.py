"""The numbers of the original SkewAdam code and of its study's other optimizers, reproduced by stage chains.

Each case of `golden_optimizers_cases.json` holds 20 steps: gradients, learning rates, the parameter after every step,
the optimizer's state, and for bfloat16 the uniforms that drove the dither.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from toolkit.recipes import REST, Recipe, Stepper
from toolkit.recipes.skewadam import SkewAdamOptions, tier
from toolkit.stages._rng import StoredUniforms
from toolkit.variants import recipe
from traces.views import ParamInfo

HERE = Path(__file__).parent
CASES = json.loads((HERE / "golden_optimizers_cases.json").read_text())
SKEWADAM = sorted(name for name, case in CASES.items() if case["optimizer"] == "skewadam")
#: Slot of ours -> stored state of the original.
STATES = {
    "momentum": "state_exp_avg",
    "second_moment": "state_v",
    "row_moment": "state_v_row",
    "column_moment": "state_v_col",
}


@cache
def _all() -> dict[str, Tensor]:
    return load_file(HERE / "golden_optimizers.safetensors")


def _case(name: str) -> dict[str, Tensor]:
    return {key.split("/")[1]: tensor for key, tensor in _all().items() if key.startswith(f"{name}/")}


def _info(case: dict[str, Any]) -> ParamInfo:
    shape = tuple(case["shape"])
    matrix = (len(shape) - 2, len(shape) - 1) if len(shape) > 1 else None
    return ParamInfo("p", "other", shape, case["dtype"], expert_axis=0 if len(shape) == 3 else None, matrix_axes=matrix)


def _skewadam(case: dict[str, Any]) -> Recipe:
    options = SkewAdamOptions(
        paper_exact=True, betas=tuple(case["betas"]), eps=case["eps"], eps_row=case["eps"], weight_decay=0.05
    )
    chain = tier(
        options,
        momentum=case["use_momentum"],
        factored=case["use_factored"] and len(case["shape"]) > 1,
        weight_decay=case["weight_decay"],
    )
    return Recipe("one_tier", {REST: chain}, lr=case["lr"], idle="as_zero")


def _run(stepper: Stepper, stored: dict[str, Tensor]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    weight, after = stored["p0"].clone(), []
    for step in range(len(stored["lr"])):
        if "uniform" in stored:
            stepper.rng = StoredUniforms(stored["uniform"][step])
        gradient = stored["grads"][step].to(weight.dtype) if stored["grad_present"][step] else None
        stepper.step(weight, gradient, lr=float(stored["lr"][step]))
        after.append((weight.clone(), {key: slot.clone() for key, slot in stepper.state.items()}))
    return after


def test_all_cases_are_here() -> None:
    assert len(CASES) == 27
    assert len(SKEWADAM) == 22


@pytest.mark.parametrize("name", SKEWADAM)
def test_skewadam_case(name: str) -> None:
    case, stored = CASES[name], _case(name)
    for step, (weight, state) in enumerate(_run(Stepper(_skewadam(case), _info(case)), stored)):
        if case["dtype"] == "bfloat16":
            assert torch.equal(weight, stored["p"][step]), f"step {step + 1}"
        else:
            torch.testing.assert_close(weight, stored["p"][step], rtol=2e-6, atol=1e-6, msg=f"step {step + 1}")
        for key, other in STATES.items():
            if key in state:
                want = stored[other][step].reshape(state[key].shape)
                torch.testing.assert_close(state[key], want, rtol=2e-6, atol=1e-6 * float(want.abs().max()))
        assert int(state["step"]) == step + 1


def test_the_recipe_gives_each_role_its_tier() -> None:
    built = recipe("skewadam", paper_exact=True)
    for role, momentum, factored, decay in (
        ("routed_expert", False, True, 0.05),
        ("attention", True, True, 0.05),
        ("embedding", True, True, 0.05),
        ("router", False, False, 0.0),
    ):
        chain = built.chain_for(ParamInfo("p", role, (6, 5), matrix_axes=(0, 1)))
        want = tier(SkewAdamOptions(paper_exact=True), momentum=momentum, factored=factored, weight_decay=decay)
        assert chain.describe() == want.describe(), role


def test_adamw_case() -> None:
    case, stored = CASES["adamw_f32_2d"], _case("adamw_f32_2d")
    stepper = Stepper(recipe("adamw", weight_decay=case["weight_decay"]), _info(case))
    for step, (weight, _) in enumerate(_run(stepper, stored)):
        torch.testing.assert_close(weight, stored["p"][step], rtol=2e-6, atol=1e-6, msg=f"step {step + 1}")


def test_a_changed_switch_leaves_the_numbers() -> None:
    # The tolerances would not notice a rule that only resembles the original.
    name = "sk_f32_2d_tiny_grad"
    case, stored = CASES[name], _case(name)
    corrected = SkewAdamOptions(weight_decay=0.0)
    chain = tier(corrected, momentum=True, factored=True, weight_decay=0.0)
    stepper = Stepper(Recipe("one_tier", {REST: chain}, lr=case["lr"], idle="as_zero"), _info(case))
    weight, _ = _run(stepper, stored)[0]
    assert (weight - stored["p"][0]).abs().max() > 1e-3


OTHERS = {
    "lion_f32_2d": ("lion", {"weight_decay": 0.05}, {"momentum": "state_exp_avg"}),
    "adafactor_f32_2d": (
        "adafactor",
        {"weight_decay": 0.05, "clip_scope": "tensor"},
        {"row_moment": "state_exp_avg_sq_row", "column_moment": "state_exp_avg_sq_col"},
    ),
    "adafactor_f32_1d": (
        "adafactor",
        {"weight_decay": 0.05, "clip_scope": "tensor"},
        {"second_moment": "state_exp_avg_sq"},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_lion_and_adafactor_cases(name: str) -> None:
    built, options, states = OTHERS[name]
    stored = _case(name)
    stepper = Stepper(recipe(built, **options), _info(CASES[name]))
    for step, (weight, state) in enumerate(_run(stepper, stored)):
        torch.testing.assert_close(weight, stored["p"][step], rtol=2e-6, atol=1e-6, msg=f"step {step + 1}")
        for key, other in states.items():
            want = stored[other][step].reshape(state[key].shape)
            torch.testing.assert_close(state[key], want, rtol=2e-6, atol=1e-6 * float(want.abs().max()))


def test_muon_case() -> None:
    # Three Newton-Schulz sweeps in bfloat16 differ by about 1e-2 between machines.
    stored = _case("muon_f32_2d")
    stepper = Stepper(recipe("muon", compat="study"), _info(CASES["muon_f32_2d"]))
    for step, (weight, state) in enumerate(_run(stepper, stored)):
        path = float((stored["p"][: step + 1] - stored["p0"]).abs().max())
        assert float((weight - stored["p"][step]).abs().max()) <= 2e-2 * path, f"step {step + 1}"
        want = stored["state_momentum_buffer"][step]
        torch.testing.assert_close(state["momentum"], want, rtol=2e-6, atol=1e-6 * float(want.abs().max()))
