"""What happens to an expert without tokens, with a spike, or with a NaN, under every recipe."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from torch import Tensor

from toolkit.recipes import RECIPES, Stepper
from toolkit.variants import recipe
from traces.errors import GradreelError
from traces.views import NONE, NONZERO, NOT_RECORDED, ZERO, ParamInfo

E, M, N = 4, 6, 5
INFO = ParamInfo("experts", "routed_expert", (E, M, N), expert_axis=0, num_experts=E, matrix_axes=(1, 2))
RECIPE_NAMES = RECIPES.names()


def _gradients(steps: int, idle: tuple[int, ...] = (1,)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(E, M, N, generator=generator) for _ in range(steps)]
    for gradient in gradients:
        gradient[list(idle)] = 0
    return gradients


def _start() -> Tensor:
    return torch.randn(E, M, N, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", [*RECIPE_NAMES, "skewadam(paper_exact=True)"])
@pytest.mark.parametrize("idle", ["skip", "decay", "as_zero"])
def test_zero_gradient_gives_zero_update(name: str, idle: str) -> None:
    built = recipe(name, idle=idle)
    stepper, weight = Stepper(built, INFO), _start()
    before = weight.clone()
    for gradient in _gradients(4):
        update = stepper.step(
            weight, gradient, lr=built.lr, presence=[NONZERO, ZERO, NONZERO, NONZERO], want_update=True
        )
        assert update is not None
        assert torch.equal(update[1], torch.zeros(M, N))
        assert torch.isfinite(weight).all()
    if idle != "as_zero":
        assert torch.equal(weight[1], before[1])
    assert not torch.equal(weight[0], before[0])
    for key, slot in stepper.state.items():
        # Adafactor's eps lives in its moments; a basis has to be some basis.
        if key != "step" and not key.endswith("_basis") and slot.dim() and slot.shape[0] == E:
            assert float(slot[1].abs().max()) <= (1.001e-30 if name == "adafactor" else 0.0), key


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_skip_equals_a_loop_over_experts(name: str) -> None:
    # The counter of an expert counts its own steps, so a stack is no more than E parameters side by side.
    built = recipe(name, idle="skip")
    stepper, weight = Stepper(built, INFO), _start()
    single = ParamInfo("experts", "routed_expert", (M, N), expert=0, matrix_axes=(0, 1))
    alone, weights = [Stepper(built, single) for _ in range(E)], list(_start())
    for step, gradient in enumerate(_gradients(9, idle=())):
        busy = [(step + e) % (e + 1) == 0 for e in range(E)]
        gradient[~torch.tensor(busy)] = 0
        stepper.step(weight, gradient, lr=built.lr, presence=[NONZERO if b else ZERO for b in busy])
        for e in range(E):
            alone[e].step(weights[e], gradient[e] if busy[e] else None, lr=built.lr)
    torch.testing.assert_close(weight, torch.stack(weights), rtol=1e-5, atol=1e-6)


def test_none_against_zero_under_adamw() -> None:
    start = torch.ones(1, 2, 2)
    info = ParamInfo("experts", "routed_expert", (1, 2, 2), expert_axis=0, num_experts=1, matrix_axes=(1, 2))
    options = {"lr": 0.1, "weight_decay": 0.1}
    for gradient, want in ((None, 1.0), (torch.zeros(1, 2, 2), 0.99**10)):
        stepper, weight = Stepper(recipe("adamw", **options), info), start.clone()
        for _ in range(10):
            stepper.step(weight, gradient, lr=0.1, presence=[ZERO])
        torch.testing.assert_close(weight, torch.full_like(weight, want))
    assert round(0.99**10, 3) == 0.904


@pytest.mark.parametrize("code", [NONE, NOT_RECORDED])
@pytest.mark.parametrize("idle", ["skip", "decay", "as_zero"])
def test_experts_without_gradient_are_untouched_under_any_policy(code: int, idle: str) -> None:
    built = recipe("adamw", idle=idle)
    stepper, weight = Stepper(built, INFO), _start()
    before = weight.clone()
    gradient = _gradients(1, idle=())[0]
    stepper.step(weight, gradient, lr=0.1, presence=[NONZERO, code, NONZERO, NONZERO])
    assert torch.equal(weight[1], before[1])
    assert not stepper.state["momentum"][1].any()
    assert not torch.equal(weight[0], before[0])


def test_idle_for_a_thousand_steps_after_momentum() -> None:
    moved = {}
    for idle in ("skip", "as_zero", "decay"):
        built = recipe("mesh", idle=idle)
        stepper, weight = Stepper(built, INFO), _start()
        first = _gradients(1, idle=())[0]
        stepper.step(weight, first, lr=1e-3, presence=[NONZERO] * E)
        before = weight.clone()
        for gradient in _gradients(1000):
            stepper.step(weight, gradient, lr=1e-3, presence=[NONZERO, ZERO, NONZERO, NONZERO])
        moved[idle] = float((weight[1] - before[1]).norm())
    # RMS 1 at lr 1e-3 in a constant direction: 1000 steps move every element by 1 in the mean square.
    assert moved["skip"] == moved["decay"] == 0.0
    assert moved["as_zero"] == pytest.approx((M * N) ** 0.5, rel=1e-2)


def test_defaults_of_the_idle_policy() -> None:
    for name in RECIPE_NAMES:
        built = recipe(name)
        experts = built.chain_for(INFO)
        normalising = any(stage.normalising for stage in experts) and name != "lion"
        assert built.idle == ("skip" if normalising else "as_zero"), name


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_one_expert_with_nan(name: str) -> None:
    results = []
    for bad in (False, True):
        built = recipe(name)
        stepper, weight = Stepper(built, INFO), _start()
        for gradient in _gradients(3, idle=()):
            if bad:
                gradient[2, 1, 1] = torch.nan
            stepper.step(weight, gradient, lr=built.lr, presence=[NONZERO] * E)
        results.append(weight)
    clean, damaged = results
    assert not torch.isfinite(damaged[2]).all()
    for other in (0, 1, 3):
        assert torch.equal(clean[other], damaged[other]), other


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_transposed_layout_equals_a_loop(name: str) -> None:
    # Stored [E, n, m] with rows in axis 2, as llama4 and gpt_oss do; and experts in the middle.
    built = recipe(name)
    for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0)):
        axes = [order.index(a) for a in range(3)]
        stored = _start().permute(order).contiguous()
        info = ParamInfo(
            "experts",
            "routed_expert",
            tuple(stored.shape),
            expert_axis=axes[0],
            num_experts=E,
            matrix_axes=(axes[1], axes[2]),
        )
        stepper, plain, weight = Stepper(built, info), Stepper(built, INFO), _start()
        for gradient in _gradients(3):
            presence = [NONZERO, ZERO, NONZERO, NONZERO]
            stepper.step(stored, gradient.permute(order).contiguous(), lr=built.lr, presence=presence)
            plain.step(weight, gradient, lr=built.lr, presence=presence)
        torch.testing.assert_close(stored.permute(axes), weight, rtol=1e-6, atol=1e-7)


def test_presence_of_the_wrong_length() -> None:
    stepper = Stepper(recipe("adamw"), INFO)
    with pytest.raises(GradreelError, match=r"experts: presence has 3 entries; allowed: 4"):
        stepper.step(_start(), _start(), lr=0.1, presence=[3, 3, 3])


def test_all_experts_idle_is_no_step() -> None:
    stepper, weight = Stepper(recipe("mesh"), INFO), _start()
    before = weight.clone()
    update = stepper.step(weight, torch.zeros(E, M, N), lr=0.1, presence=[ZERO] * E, want_update=True)
    assert update is not None
    assert not update.any()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("name", [*RECIPE_NAMES, "skewadam(paper_exact=True)", "sinkgd+regrouped(stacked)"])
def test_blocks_of_experts_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("toolkit.recipes._stepper")
    built, results = recipe(name), []
    for block in (1 << 24, 2 * M * N, 1):
        monkeypatch.setattr(module, "BLOCK", block)
        for busy in ([NONZERO] * E, [NONZERO, ZERO, NONZERO, NONZERO]):
            info = dataclasses.replace(INFO, dtype="bfloat16")
            stepper, weight = Stepper(built, info), _start().to(torch.bfloat16)
            updates = [
                stepper.step(weight, g.to(torch.bfloat16), lr=built.lr, presence=busy, want_update=True)
                for g in _gradients(3, idle=() if busy[1] == NONZERO else (1,))
            ]
            results.append((weight, torch.stack(updates)))  # type: ignore[arg-type]
    for index, (weight, updates) in enumerate(results[2:]):
        torch.testing.assert_close(updates, results[index % 2][1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weight, results[index % 2][0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["mesh", "muon", "skewadam", "mesh_full_state(experts=adam)"])
def test_a_stack_without_experts_steps(name: str) -> None:
    """A rank may hold none of them."""
    info = ParamInfo(
        "p", "routed_expert", (0, 4, 5), dtype="bfloat16", expert_axis=0, num_experts=0, matrix_axes=(1, 2)
    )
    empty = torch.zeros(0, 4, 5, dtype=torch.bfloat16)
    update = Stepper(recipe(name), info).step(empty, empty.clone(), lr=0.1, presence=[], want_update=True)
    assert update is not None
    assert (tuple(update.shape), update.dtype) == ((0, 4, 5), torch.float32)
