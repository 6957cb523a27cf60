"""Bytes planned from shapes against bytes allocated, and against published figures."""

from __future__ import annotations

import pytest

from toolkit.memory import account
from toolkit.recipes import RECIPES, Stepper
from toolkit.variants import recipe
from traces.views import ParamInfo

PARAMS = [
    ParamInfo("up", "routed_expert", (4, 10, 6), "bfloat16", expert_axis=0, num_experts=4, matrix_axes=(1, 2)),
    ParamInfo("turned", "routed_expert", (6, 4, 10), expert_axis=1, num_experts=4, matrix_axes=(2, 0)),
    ParamInfo("bias", "routed_expert", (4, 10), expert_axis=0, num_experts=4),
    ParamInfo("one", "routed_expert", (10, 6), expert=3, matrix_axes=(0, 1)),
    ParamInfo("gate", "router", (4, 6), matrix_axes=(0, 1)),
    ParamInfo("gate_bias", "router_bias", (4,)),
    ParamInfo("wide", "attention", (6, 6), "float64", matrix_axes=(0, 1)),
    ParamInfo("kernel", "other", (6, 2, 3, 3), matrix_axes=(0, 1)),
    ParamInfo("words", "embedding", (50, 6), "bfloat16", matrix_axes=(0, 1)),
    ParamInfo("head", "head", (50, 6), matrix_axes=(0, 1)),
    ParamInfo("norm", "norm", (6,)),
    ParamInfo("scale", "other", ()),
]
KINDS = ("state_bytes", "pinned_gradient_bytes", "step_counter_bytes")
NAMES = [*RECIPES.names(), "sgd(momentum=0.9)", "mesh+normalise_first", "mesh+adam_rest", "mesh_b(block=4)"]


@pytest.mark.parametrize("name", NAMES)
def test_account_equals_what_is_allocated(name: str) -> None:
    built = recipe(name)
    rows = {row["role"]: row for row in account(built, PARAMS)}
    for role in {p.role for p in PARAMS}:
        steppers = [Stepper(built, p) for p in PARAMS if p.role == role]
        for kind in KINDS:
            assert rows[role][kind] == sum(getattr(s, kind) for s in steppers), (role, kind)
        slots = sum(t.nbytes for s in steppers for key, t in s.state.items() if key != "step")
        assert rows[role]["state_bytes"] + rows[role]["pinned_gradient_bytes"] == slots
        assert rows[role]["parameters"] == sum(p.numel for p in PARAMS if p.role == role)


def test_tied_weights_count_once() -> None:
    tied = [*PARAMS, ParamInfo("again", "head", (50, 6), matrix_axes=(0, 1), tied_to="words")]
    assert account(recipe("adamw"), tied) == account(recipe("adamw"), PARAMS)


def _study() -> list[ParamInfo]:
    """The 6.78B model of arXiv 2607.19058: two pre-LayerNorm blocks, one of them with 128 experts."""
    width, vocabulary = 4096, 50304
    params = [
        ParamInfo("words", "embedding", (vocabulary, width), "bfloat16", matrix_axes=(0, 1)),
        ParamInfo("positions", "embedding", (256, width), "bfloat16", matrix_axes=(0, 1)),
        ParamInfo("router", "router", (128, width), matrix_axes=(0, 1)),
    ]
    for block in range(2):
        for name, rows in (("q", width), ("k", 1024), ("v", 1024), ("o", width)):
            shape = (rows, width)
            params.append(ParamInfo(f"{block}.{name}", "attention", shape, "bfloat16", matrix_axes=(0, 1)))
    for name in ("gate", "up", "down"):
        square = (width, width)
        params.append(ParamInfo(name, "dense_ffn", square, "bfloat16", matrix_axes=(0, 1)))
        stack = ParamInfo(f"e.{name}", "routed_expert", (128, *square), "bfloat16", None, None, 0, 128, (1, 2))
        params.append(stack)
    for norm in range(5):
        params += [ParamInfo(f"norm{norm}.{part}", "norm", (width,)) for part in ("weight", "bias")]
    return params


@pytest.mark.parametrize(
    ("tiers", "state_bytes"),
    [
        ("full", 1_380_800_000),
        ("expert_momentum", 27_150_603_776),
        ("factored_router", 1_378_719_744),
        ("uniform", 27_150_620_672),
    ],
)
def test_published_state_of_skewadam(tiers: str, state_bytes: int) -> None:
    params = _study()
    assert sum(p.numel for p in params) == 6_784_327_680
    rows = account(recipe("skewadam", paper_exact=True, tiers=tiers), params)
    assert sum(row["state_bytes"] for row in rows) == state_bytes


def test_published_state_of_adamw_and_sgd() -> None:
    rows = account(recipe("adamw"), _study())
    assert sum(row["state_bytes"] for row in rows) == 54_274_621_440
    assert not any(row["state_bytes"] for row in account(recipe("sgd"), _study()))


def test_published_state_of_the_study() -> None:
    def total(name: str) -> int:
        return sum(row["state_bytes"] for row in account(recipe(name), _study()))

    assert total("lion") == 27_137_310_720
    assert total("galore(rank=128, refresh=0, side=both)") == 1_735_196_672
    assert total("adafactor") == 13_309_952
    # Adam on embedding, positions, LayerNorm and router, one momentum elsewhere.
    assert total("muon(compat=study)") == 27_967_946_752


def test_mesh_keeps_vocabulary_momentum_alone() -> None:
    # nanowhale-110M: two untied tables of 129280 x 320; everything else has no state (arXiv 2608.04407).
    tables = [ParamInfo(n, n, (129_280, 320), matrix_axes=(0, 1)) for n in ("embedding", "head")]
    experts = ParamInfo("up", "routed_expert", (4, 640, 320), expert_axis=0, num_experts=4, matrix_axes=(1, 2))
    rows = {row["role"]: row for row in account(recipe("mesh"), [*tables, experts, PARAMS[-2]])}
    assert rows["embedding"]["state_bytes"] + rows["head"]["state_bytes"] == 330_959_360
    assert rows["routed_expert"]["state_bytes"] == rows["norm"]["state_bytes"] == 0
    assert rows["routed_expert"]["pinned_gradient_bytes"] == 4 * 640 * 320 * 4
