"""The closed form of a step's temporaries against the same step tracked storage by storage."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.memory._step_peak import step_peak
from toolkit.memory._tracked import Tracker
from toolkit.recipes import RECIPES, Recipe, Stepper
from toolkit.variants import recipe
from traces.errors import GradreelError
from traces.views import ParamInfo

TABLE = ParamInfo("words", "embedding", (4096, 256), matrix_axes=(0, 1))
SQUARE = ParamInfo("q", "attention", (1024, 1024), matrix_axes=(0, 1))
GATE = ParamInfo("gate", "router", (64, 1024), matrix_axes=(0, 1))
STACK = ParamInfo("experts", "routed_expert", (6, 512, 512), expert_axis=0, num_experts=6, matrix_axes=(1, 2))
VECTOR = ParamInfo("norm", "norm", (4096,))
CASES = [(TABLE, "float32"), (SQUARE, "float32"), (GATE, "bfloat16"), (STACK, "bfloat16")]
NAMES = [
    *RECIPES.names(),
    "sgd(momentum=0.9)",
    "mesh+adam_rest",
    "sinkgd+regrouped(stacked)",
    "mesh_full_state(experts=adam)",
]


def tracked_bytes(built: Recipe, info: ParamInfo) -> int:
    tracker, dtype = Tracker(), getattr(torch, info.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), tracker:
        weight, gradient = torch.empty(info.shape, dtype=dtype), torch.empty(info.shape, dtype=dtype)
        stepper = Stepper(built, info)
        before = tracker.total
        tracker.begin("step", 1)
        stepper.step(weight, gradient, lr=1e-3)
        assert tracker.total == before  # nothing but state outlives a step
    return max(p.bytes for p in tracker.phase_peaks() if p.phase == "step") - before


@pytest.mark.parametrize("name", NAMES)
def test_closed_form_of_every_recipe_is_what_a_tracked_step_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.recipes._stepper.BLOCK", 1 << 20)  # so that the stack is stepped in two blocks
    built = recipe(name)
    for info, dtype in CASES:
        info = dataclasses.replace(info, dtype=dtype)
        assert step_peak(built, [info]).bytes == pytest.approx(tracked_bytes(built, info), rel=0.01, abs=4096), (
            info.name
        )


def test_the_largest_need_counts_and_says_where() -> None:
    found = step_peak(recipe("muon"), [TABLE, SQUARE, GATE, VECTOR])
    assert (found.where, found.temporaries, found.bytes) == ("q", 4.0, 4 * 4 * 1024 * 1024)
    assert step_peak(recipe("adamw"), [TABLE, GATE]).where == "words"


def test_originals_step_experts_as_matrices_of_their_own() -> None:
    found = step_peak(recipe("skewadam"), [STACK, GATE], original=True)
    assert found.bytes == 6 * 4 * 512 * 512
    for name, count in {"skewadam": 6, "adamw": 7, "muon": 8, "lion": 7, "galore": 6, "adafactor": 4}.items():
        assert step_peak(recipe(name), [TABLE], original=True).bytes == count * 4 * 4096 * 256


def test_fused_sinkhorn_needs_one_matrix() -> None:
    built = recipe("mesh")
    assert step_peak(built, [SQUARE], sinkhorn="fused").bytes == 4 * SQUARE.numel
    assert step_peak(built, [SQUARE]).bytes == 44 * SQUARE.numel


def test_wrong_use_is_one_line() -> None:
    with pytest.raises(GradreelError, match="no parameters"):
        step_peak(recipe("adamw"), [])
    with pytest.raises(GradreelError, match="allowed: torch, fused"):
        step_peak(recipe("adamw"), [SQUARE], sinkhorn="fast")
