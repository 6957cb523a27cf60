"""Names such as `mesh(beta=0.95)+sign_only`: what they build, and the one line a wrong one gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.recipes import Recipe
from toolkit.variants import recipe
from traces.errors import GradreelError
from traces.views import ParamInfo

EXPERT = ParamInfo("e", "routed_expert", (2, 4, 6), expert_axis=0, num_experts=2, matrix_axes=(1, 2))


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("mesh", "hidden_ema(beta=0.9) -> sr_sinkhorn(sweeps=5, "),
        ("mesh(beta=0.95)", "hidden_ema(beta=0.95) -> "),
        (" mesh ( beta = .5 , sweeps = 2 ) ", "hidden_ema(beta=0.5) -> sr_sinkhorn(sweeps=2, "),
        ("mesh+sign_only", "hidden_ema(beta=0.9) -> sign -> apply"),
        ("mesh + sign_only(gradient)", "sign -> apply"),
        ("mesh+sign_only('before_sinkhorn')", "hidden_ema(beta=0.9) -> sign -> sr_sinkhorn"),
        ("sinkgd+regrouped(stacked)", "within(stacked: sr_sinkhorn("),
        ("sinkgd+regrouped(row_blocks, 2)", "within(row_blocks(2): sr_sinkhorn("),
        ("mesh+normalise_first", "sr_sinkhorn(sweeps=5, compat=paper, backend=None) -> ema(beta=0.9) -> apply"),
        ("mesh+sign_only+regrouped(transposed)", "hidden_ema(beta=0.9) -> within(transposed: sign) -> apply"),
        ("adamw(betas=(0.8, 0.9))", "second_moment(beta=0.9, "),
    ],
)
def test_chain_of_a_name(name: str, chain: str) -> None:
    assert recipe(name).chain_for(EXPERT).describe().startswith(chain)


@pytest.mark.parametrize("name", ["mesh+sign_only", "mesh(beta=0.95)+smaller_steps(0.3)", "sinkgd+regrouped(stacked)"])
def test_name_of_the_result_is_the_name(name: str) -> None:
    assert recipe(name).name == name
    assert recipe(recipe(name).name).groups.keys() == recipe(name).groups.keys()


def test_switches_show_in_the_name() -> None:
    built = recipe("mesh+sign_only", beta=0.95, sage_betas=(0.8, 0.9))
    assert built.name == "mesh(beta=0.95, sage_betas=(0.8, 0.9))+sign_only"
    assert built.options == {"beta": 0.95, "sage_betas": (0.8, 0.9)}
    again = recipe(built.name)
    assert {k: c.describe() for k, c in again.groups.items()} == {k: c.describe() for k, c in built.groups.items()}


def test_a_recipe_passes_through() -> None:
    built = recipe("mesh")
    assert recipe(built) is built
    with pytest.raises(GradreelError, match=r"recipe mesh is built already; give beta when building it"):
        recipe(built, beta=0.9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mehs", r"unknown recipe 'mehs'; did you mean 'mesh'\? Choices: "),
        ("mesh+sign_onyl", r"unknown variant 'sign_onyl'; did you mean 'sign_only'\? Choices: "),
        ("", r"recipe name '': a name is missing; write NAME\+VARIANT"),
        ("mesh+", r"a name is missing"),
        ("mesh(", r"recipe name 'mesh\('"),
        ("mesh(beta=0.9", r"a closing \) is missing"),
        ("mesh sign_only", r"unexpected 'sign_only'"),
        ("mesh; import os", r"unexpected ';'"),
        ("mesh+sign_only(__import__('os'))", r"a closing \) is missing"),
        ("mesh(0.9)", r"mesh takes switch=value, not 0.9"),
        ("mesh(beta=0.9, beta=0.8)", r"beta is given twice"),
        ("mesh(beta=0.9, 5)", r"a plain value follows a named one"),
        ("mesh(gamma=1)", r"recipe mesh has no option 'gamma'; allowed: beta, compat, "),
        ("mesh(beta=1)", r"beta is 1; allowed: \[0.0, 1.0\)"),
        ("mesh+smaller_steps(1, 2, 3, 4)", r"wrong arguments in .*; usage: smaller_steps\(0.3\)"),
        ("mesh+smaller_steps(0)", r"smaller_steps factor is 0; allowed: \(0.0, inf\)"),
        ("mesh+smaller_steps(fast)", r"smaller_steps factor is 'fast'"),
        ("mesh+regrouped(sideways)", r"regrouped grouping is 'sideways'; allowed: per_expert, stacked"),
        ("mesh+regrouped(row_blocks)", r"allowed: regrouped\(row_blocks, 64\)"),
        ("adamw+sign_only", r"variant sign_only finds nothing to change in recipe adamw"),
        ("sinkgd+normalise_first", r"variant normalise_first finds nothing to change in recipe sinkgd"),
        ("sinkgd+regrouped(per_expert)", r"variant regrouped finds nothing to change in recipe sinkgd"),
        ("mesh+smaller_steps(1)", r"variant smaller_steps finds nothing to change"),
        ("mesh+adam_rest+adam_rest", r"variant adam_rest finds nothing to change"),
        ("mesh+smaller_steps(1e300)", r"smaller_steps factor is 1e\+300; allowed: \(0, 1e\+06\]"),
        ("mesh+smaller_steps(" + "9" * 1500 + ")", r"the number 999999999999\.\.\. is too long"),
        ("x" * 1500, r"unknown recipe 'x{100}'\.\.\.\. Choices: adafactor"),
        ("mesh+" + "sign_only+" * 1000, r"'mesh\+sign_only.*' ?\.\.\. has 10005 characters, at most 2000"),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(GradreelError, match=message) as caught:
        recipe(name)
    assert "\n" not in str(caught.value)


@given(text=st.text(alphabet="mesh+()=,.'\"0123456789 \n_x-", max_size=30))
def test_any_text_is_a_recipe_or_one_line(text: str) -> None:
    message, built = "", None
    try:
        built = recipe(text)
    except GradreelError as error:
        message = str(error)
    assert isinstance(built, Recipe) or message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamw", {"lr": -1.0}, r"lr is -1.0; allowed: \[0.0, inf\)"),
        ("adamw", {"lr": float("nan")}, r"lr is nan; allowed"),
        ("adamw", {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0; allowed: \[0.0, 1.0\)"),
        ("adamw", {"betas": 0.9}, r"betas is 0.9; allowed: two numbers"),
        ("adamw", {"eps": 0.0}, r"eps is 0.0; allowed: \(0.0, inf\)"),
        ("adamw", {"weight_decay": -0.1}, r"weight_decay is -0.1; allowed"),
        ("adamw", {"idle": "sleep"}, r"idle is 'sleep'; allowed: skip, decay, as_zero"),
        ("adamw", {"rounding": "up"}, r"rounding is 'up'; allowed: nearest, stochastic, dither"),
        ("sgd", {"nesterov": True}, r"nesterov is True with momentum 0.0"),
        ("skewadam", {"tiers": "none"}, r"tiers is 'none'; allowed: full, expert_momentum, factored_router, uniform"),
        ("skewadam", {"eps_mode": "big"}, r"eps_mode is 'big'; allowed: v_floor, add_to_sqrt, adafactor"),
        ("sinkgd", {"sweeps": 0}, r"sweeps is 0; allowed: whole numbers of at least 1"),
        ("sinkgd", {"compat": "mine"}, r"compat is 'mine'; allowed: paper, unit_columns"),
        ("mesh_b", {"block": 0.5}, r"block is 0.5; allowed: whole numbers"),
        ("mesh_b", {"multiplier": "beside"}, r"multiplier is 'beside'; allowed: after, before"),
    ],
)
def test_switches_out_of_range(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(name, **options)
