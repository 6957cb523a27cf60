"""bfloat16 weights: decay, stochastic rounding, the published dither, and where random numbers come from."""

from __future__ import annotations

import pytest
import torch

from toolkit.recipes import RECIPES, Stepper
from toolkit.stages._rng import CounterRng
from toolkit.variants import recipe
from traces.views import NONZERO, ZERO, ParamInfo


def _info(shape: tuple[int, ...], role: str = "attention") -> ParamInfo:
    stacked = len(shape) == 3
    return ParamInfo(
        "p",
        role,
        shape,
        "bfloat16",
        expert_axis=0 if stacked else None,
        num_experts=shape[0] if stacked else None,
        matrix_axes=(len(shape) - 2, len(shape) - 1),
    )


def _decaying() -> list[str]:
    names = []
    for family in RECIPES.all():
        fields = family.options.__dataclass_fields__
        if "weight_decay" in fields:
            names.append(family.name)
    return names


@pytest.mark.parametrize("name", _decaying())
def test_small_decay_acts_in_expectation(name: str) -> None:
    # lr wd = 1.5e-5 is far below half a bfloat16 step (2e-3): with nearest rounding it would be nothing.
    scale = recipe(name).chain_for(_info((32, 64))).lr_scale
    built = recipe(name, weight_decay=0.05)
    weight = torch.ones(32, 64, dtype=torch.bfloat16)
    stepper = Stepper(built, _info((32, 64)))
    for _ in range(200):
        stepper.step(weight, torch.zeros(32, 64, dtype=torch.bfloat16), lr=3e-4 / scale)
    # The weight is between 1 and 1 - 2^-8, where a step is 2^-8: the mean's standard error is below 1e-4.
    assert float(weight.double().mean()) == pytest.approx((1 - 1.5e-5) ** 200, abs=8e-4)
    assert weight.double().mean() < 1


def test_published_decay_is_nothing_there() -> None:
    weight = torch.ones(8, 8, dtype=torch.bfloat16)
    built = recipe("skewadam", paper_exact=True, rounding="nearest")
    stepper = Stepper(built, _info((8, 8)))
    for _ in range(50):
        stepper.step(weight, torch.zeros(8, 8, dtype=torch.bfloat16), lr=3e-4)
    assert torch.equal(weight, torch.ones_like(weight))


@pytest.mark.parametrize("name", RECIPES.names())
def test_representable_values_are_fixed_points(name: str) -> None:
    torch.manual_seed(0)
    built = recipe(name)
    weight = (torch.randn(32, 32) * 10.0 ** torch.randint(-20, 20, (32, 32))).to(torch.bfloat16)
    before, stepper = weight.clone(), Stepper(built, _info((32, 32)))
    for _ in range(20):
        stepper.step(weight, torch.randn(32, 32).to(torch.bfloat16), lr=0.0)
    assert torch.equal(weight, before)


def test_dither_moves_28_percent_of_still_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256).to(torch.bfloat16)
    before = weight.clone()
    built = recipe("skewadam", paper_exact=True, weight_decay=0.0)
    Stepper(built, _info((256, 256))).step(weight, torch.zeros_like(weight), lr=3e-4)
    assert float((weight != before).double().mean()) == pytest.approx(0.28, abs=0.01)


def test_stochastic_rounding_is_unbiased() -> None:
    # W = 1, update such that W - lr u = 1 - 0.3 ulp (ulp 2^-8 below 1).
    weight = torch.ones(1024, 1024, dtype=torch.bfloat16)
    gradient = torch.ones(1024, 1024, dtype=torch.bfloat16)
    ulp = 2.0**-8
    Stepper(recipe("sgd"), _info((1024, 1024))).step(weight, gradient, lr=0.3 * ulp)
    error = (float(weight.double().mean()) - (1 - 0.3 * ulp)) / ulp
    assert abs(error) < 1e-3  # 2^20 draws of a coin with p = 0.3 have a standard error of 4.5e-4
    assert set(weight.unique().tolist()) == {1.0, 1.0 - ulp}


def test_numbers_follow_the_element() -> None:
    # The same expert draws the same numbers whoever else is idle, and in any chunking.
    start = torch.randn(4, 16, 8).to(torch.bfloat16)
    gradient = torch.randn(4, 16, 8).to(torch.bfloat16)
    info = _info((4, 16, 8), "routed_expert")
    busy = [NONZERO] * 4
    histories = {
        "all busy": [busy, busy, busy],
        "0 and 2 idle first": [[ZERO, NONZERO, ZERO, NONZERO], busy, busy],
        "0 and 2 idle last": [busy, busy, [ZERO, NONZERO, ZERO, NONZERO]],
        "0 never": [[ZERO, NONZERO, NONZERO, NONZERO]] * 3,
    }
    results = {}
    for name, history in histories.items():
        stepper, weight = Stepper(recipe("sinkgd"), info), start.clone()
        for presence in history:
            stepper.step(weight, gradient, lr=1e-2, presence=presence)
        results[name] = weight
    for weight in results.values():
        assert torch.equal(weight[1], results["all busy"][1])
        assert torch.equal(weight[3], results["all busy"][3])
    # Two steps are two steps, whenever they were.
    assert torch.equal(results["0 and 2 idle first"][2], results["0 and 2 idle last"][2])
    assert torch.equal(results["0 never"][0], start[0])


def test_numbers_follow_the_element_into_a_shard() -> None:
    # Two ranks hold experts 0, 1 and 2, 3; expert 0 misses a step. Together they are the whole parameter.
    start = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    gradient = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    history = [[NONZERO] * 4, [ZERO, NONZERO, NONZERO, NONZERO], [NONZERO] * 4]

    def run(first: int, last: int) -> torch.Tensor:
        stepper = Stepper(recipe("sinkgd"), _info((last - first, 16, 8), "routed_expert"))
        stepper.first_element = first * 16 * 8
        weight = start[first:last].clone()
        for presence in history:
            stepper.step(weight, gradient[first:last], lr=1e-2, presence=presence[first:last])
        return weight

    assert torch.equal(torch.cat([run(0, 2), run(2, 4)]), run(0, 4))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("toolkit.stages.apply")
    start, gradient = torch.randn(3, 17, 13).to(torch.bfloat16), torch.randn(3, 17, 13).to(torch.bfloat16)
    results = []
    for chunk in (1 << 22, 100, 13, 5):
        monkeypatch.setattr(module, "CHUNK", chunk)
        weight = start.clone()
        stepper = Stepper(recipe("skewadam"), _info((3, 17, 13), "routed_expert"))
        for _ in range(3):
            stepper.step(weight, gradient, lr=1e-2)
        results.append(weight)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for name in RECIPES.names():
        Stepper(recipe(name), _info((8, 8))).step(weight, torch.ones_like(weight), lr=1e-2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("first", [0, 2**31 - 40, 2**31, 2**32 - 40, 2**32, 2**40])
def test_elements_beyond_2_to_the_31_draw_their_own_numbers(first: int) -> None:
    # A shard of a huge parameter starts at `first`; rounded against numbers drawn one element at a time.
    start, info = torch.randn(16, 5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16), _info((16, 5))
    stepper, weight = Stepper(recipe("sgd"), info, seed=3), start.clone()
    stepper.first_element = first
    gradient = torch.randn(16, 5, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    stepper.step(weight, gradient, lr=1e-3)
    wide = (start.float() - 1e-3 * gradient.float()).view(torch.int32).flatten()
    bits = torch.stack([CounterRng(3, 1, "p").bits16((1,), offset=first + i)[0] for i in range(80)])
    want = ((wide + bits) >> 16 << 16).view(torch.float32).to(torch.bfloat16).reshape(16, 5)
    assert torch.equal(weight, want)


def test_counters_do_not_repeat_beyond_2_to_the_32() -> None:
    rng = CounterRng(0, 1, "p")
    places = (0, 2**31, 2**32, 2**32 + 2**31, 2**33, 2**40, 2**63 - 64)
    drawn = [tuple(rng.words(64, offset=place).tolist()) for place in places]
    assert len(set(drawn)) == len(places)
