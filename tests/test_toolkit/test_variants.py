"""What each variant changes and leaves, and the table of roles they edit."""

from __future__ import annotations

import pytest
import torch

from toolkit.recipes import Stepper
from toolkit.variants import recipe
from traces.views import ParamInfo

EXPERT = ParamInfo("e", "routed_expert", (2, 4, 6), expert_axis=0, num_experts=2, matrix_axes=(1, 2))
ROLES = {
    "routed_expert": EXPERT,
    "shared_expert": ParamInfo("s", "shared_expert", (4, 6), matrix_axes=(0, 1)),
    "attention": ParamInfo("a", "attention", (4, 6), matrix_axes=(0, 1)),
    "dense_ffn": ParamInfo("f", "dense_ffn", (4, 6), matrix_axes=(0, 1)),
    "other": ParamInfo("o", "other", (4, 6), matrix_axes=(0, 1)),
    "embedding": ParamInfo("m", "embedding", (9, 6), matrix_axes=(0, 1)),
    "head": ParamInfo("h", "head", (9, 6), matrix_axes=(0, 1)),
    "router": ParamInfo("r", "router", (2, 6), matrix_axes=(0, 1)),
    "1-D": ParamInfo("n", "norm", (6,)),
}

ADAM = "second_moment ema unbias apply"
SINKHORN = "sr_sinkhorn apply"
SAGE = "sage apply"
VECTOR = "rms_normalise apply"
MOMENTUM_FACTORED = "factored_second_moment ema unbias rms_clip apply"
TABLE = {
    "skewadam": {
        "routed_expert": "factored_second_moment rms_clip apply",
        "rest": MOMENTUM_FACTORED,
        "vocabulary": MOMENTUM_FACTORED,
        "router": "second_moment rms_clip apply",
        "1-D": "second_moment ema unbias rms_clip apply",
    },
    "sinkgd": {"routed_expert": SINKHORN, "rest": SINKHORN, "vocabulary": ADAM, "router": ADAM, "1-D": ADAM},
    "mesh": {
        "routed_expert": "hidden_ema sr_sinkhorn apply",
        "rest": SINKHORN,
        "vocabulary": SAGE,
        "router": SINKHORN,
        "1-D": VECTOR,
    },
    "mesh_b": {
        "routed_expert": "hidden_ema inverse_rms sr_sinkhorn apply",
        "rest": SINKHORN,
        "vocabulary": SAGE,
        "router": SINKHORN,
        "1-D": VECTOR,
    },
    "adamw": {"routed_expert": ADAM, "rest": ADAM, "vocabulary": ADAM, "router": ADAM, "1-D": ADAM},
}
ROW_OF_ROLE = {"embedding": "vocabulary", "head": "vocabulary", "router": "router", "1-D": "1-D"}


def names(recipe_name: str, role: str) -> str:
    return " ".join(stage.name for stage in recipe(recipe_name).chain_for(ROLES[role]))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("role", ROLES)
def test_which_rule_serves_which_role(name: str, role: str) -> None:
    row = "routed_expert" if role == "routed_expert" else ROW_OF_ROLE.get(role, "rest")
    assert names(name, role) == TABLE[name][row]


def test_decay_by_role_in_skewadam() -> None:
    def decay(role: str, **options: bool) -> float:
        return recipe("skewadam", **options).chain_for(ROLES[role]).stages[-1].options["weight_decay"]

    assert [decay(r) for r in ("routed_expert", "attention", "router", "1-D")] == [0.05, 0.05, 0.0, 0.0]
    assert decay("1-D", paper_exact=True) == 0.05


@pytest.mark.parametrize("name", ["mesh", "sinkgd", "skewadam"])
@pytest.mark.parametrize("role", ROLES)
def test_adam_rest(name: str, role: str) -> None:
    want = TABLE[name]["routed_expert"] if role == "routed_expert" else ADAM
    assert names(f"{name}+adam_rest", role) == want


def test_adam_rest_keeps_its_own_rate() -> None:
    for lr in (1e-3, 2e-2):
        built = recipe("mesh+adam_rest(6e-4)", lr=lr)
        assert built.lr * built.chain_for(ROLES["attention"]).lr_scale == pytest.approx(6e-4)
        assert built.lr * built.chain_for(EXPERT).lr_scale == lr
    # So that an AdamW arm can have a rate for experts alone.
    assert recipe("adamw+adam_rest(6e-4)", lr=1e-2).chain_for(EXPERT).lr_scale == 1.0


def test_variants_touch_experts_only_unless_told_otherwise() -> None:
    assert names("sinkgd+sign_only", "routed_expert") == "sign apply"
    assert names("sinkgd+sign_only", "attention") == SINKHORN
    assert names("sinkgd+sign_only(momentum, all)", "attention") == "sign apply"
    built = recipe("adamw+smaller_steps(0.3)")
    assert built.chain_for(EXPERT).lr_scale == 0.3
    assert built.chain_for(ROLES["attention"]).lr_scale == 1.0
    assert recipe("adamw+smaller_steps(0.3, all)").chain_for(ROLES["attention"]).lr_scale == 0.3


def test_smaller_steps_scales_the_step_and_nothing_else() -> None:
    torch.manual_seed(0)
    gradient, moves = torch.randn(2, 4, 6), []
    for name in ("sinkgd", "sinkgd+smaller_steps(0.25)"):
        weight = torch.zeros(2, 4, 6)
        Stepper(recipe(name), EXPERT).step(weight, gradient, lr=1.0)
        moves.append(weight)
    torch.testing.assert_close(moves[1], moves[0] * 0.25)


def test_stacked_joins_experts() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(2, 4, 6)
    gradient[0] *= 100
    for name, together in (("sinkgd", False), ("sinkgd+regrouped(stacked)", True)):
        update = Stepper(recipe(name), EXPERT).step(torch.zeros(2, 4, 6), gradient, lr=1.0, want_update=True)
        assert update is not None
        column_rms = update.square().mean((0, 1) if together else 1).sqrt()
        torch.testing.assert_close(column_rms, torch.ones_like(column_rms), rtol=1e-3, atol=1e-3)
        assert torch.allclose(update[0].square().mean(0), torch.ones(6), atol=1e-3) is not together


def test_regrouping_back() -> None:
    assert recipe("sinkgd+regrouped(stacked)+regrouped(per_expert)").groups == recipe("sinkgd").groups


def test_normalise_first_moves_momentum_into_state() -> None:
    torch.manual_seed(0)
    hidden, first = Stepper(recipe("mesh"), EXPERT), Stepper(recipe("mesh+normalise_first"), EXPERT)
    assert (hidden.state_bytes, hidden.pinned_gradient_bytes) == (0, 2 * 4 * 6 * 4)
    assert (first.state_bytes, first.pinned_gradient_bytes) == (2 * 4 * 6 * 4, 0)
    noise = [torch.randn(2, 4, 6) for _ in range(50)]
    rms = []
    for stepper in (hidden, first):
        weight = torch.zeros(2, 4, 6)
        updates = [stepper.step(weight, g, lr=0.0, want_update=True) for g in noise]
        rms.append(float(torch.stack(updates[10:]).square().mean().sqrt()))  # type: ignore[arg-type]
    # White noise: RMS shrinks to sqrt((1 - beta) / (1 + beta)) = 0.229 where it is averaged after normalisation.
    assert rms[0] == pytest.approx(1.0, abs=1e-3)
    assert rms[1] == pytest.approx(0.229, abs=0.03)
