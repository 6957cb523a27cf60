"""Properties that stages keep for any input: scale, permutation of experts, zeros, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from toolkit.stages import Context, Ratio, Stage
from toolkit.stages import _within as views
from toolkit.stages._make import stage
from toolkit.stages._rng import CounterRng
from toolkit.stages.inverse_rms import with_blocks

SMOOTH = {
    "ema": stage("ema"),
    "heavy_ball": stage("heavy_ball"),
    "hidden_ema": stage("hidden_ema"),
    "coupled_decay": stage("coupled_decay"),
    "second_moment": stage("second_moment"),
    "second_moment v_floor": stage("second_moment", eps_mode="v_floor"),
    "second_moment adafactor": stage("second_moment", eps_mode="adafactor", eps=1e-30),
    "factored": stage("factored_second_moment"),
    "factored v_floor": stage("factored_second_moment", eps_mode="v_floor"),
    "factored after": stage("factored_second_moment", eps_mode="v_floor", correct="after"),
    "factored adafactor": stage("factored_second_moment", eps_mode="adafactor", eps=1e-30),
    "unbias": stage("unbias"),
    "rms_clip": stage("rms_clip"),
    "inverse_rms": with_blocks(block=2),
    "sage": stage("sage"),
    "divide": stage("divide"),
}
NORMALISING = {
    "sr_sinkhorn": stage("sr_sinkhorn", backend="eager"),
    "sign": stage("sign"),
    "rms_normalise": stage("rms_normalise"),
    "stacked": views.within(views.stacked(), stage("sr_sinkhorn", backend="eager")),
    "transposed": views.within(views.transposed(), stage("sr_sinkhorn", backend="eager")),
    "row blocks": views.within(views.row_blocks(2), stage("sr_sinkhorn", backend="eager")),
    "gate up": views.within(views.gate_up_split(), stage("sr_sinkhorn", backend="eager")),
}
ALL = {**SMOOTH, **NORMALISING}

seeds = st.integers(0, 2**16)
sizes = st.tuples(st.integers(1, 4), st.sampled_from([2, 4, 6]), st.integers(1, 5))


def run(one: Stage, gradients: list[Tensor], steps: Any = None) -> Tensor:
    """The last output of `one` over several steps, on fresh slots, as one tensor."""
    shape = tuple(gradients[0].shape)
    slots = {slot.name: torch.zeros(slot.shape(shape)) for slot in one.slots}
    for step, gradient in enumerate(gradients, 1):
        ctx = Context(
            torch.zeros(shape),
            0.1,
            step if steps is None else steps,
            CounterRng(0, step),
            expert_stacked=len(shape) == 3,
        )
        out = one(gradient, slots, ctx)
    return out.direction() if isinstance(out, Ratio) else out.clone()


def some(seed: int, size: tuple[int, ...], count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(count)]


@given(seed=seeds, size=sizes, power=st.integers(-60, 60))
@pytest.mark.parametrize("name", NORMALISING)
def test_scale_invariance(name: str, seed: int, size: tuple[int, int, int], power: int) -> None:
    gradients = some(seed, size)
    scaled = [g * 2.0**power for g in gradients]
    torch.testing.assert_close(run(ALL[name], scaled), run(ALL[name], gradients), rtol=1e-5, atol=1e-6)


@given(seed=seeds, size=sizes)
@pytest.mark.parametrize("name", [n for n in ALL if n != "stacked"])
def test_permuting_experts_commutes(name: str, seed: int, size: tuple[int, int, int]) -> None:
    gradients = some(seed, size)
    order = torch.randperm(size[0], generator=torch.Generator().manual_seed(seed))
    permuted = run(ALL[name], [g[order] for g in gradients])
    torch.testing.assert_close(permuted, run(ALL[name], gradients)[order], rtol=1e-6, atol=1e-7)


@given(seed=seeds, size=sizes)
@pytest.mark.parametrize("name", ALL)
def test_idle_experts_give_exactly_zero(name: str, seed: int, size: tuple[int, int, int]) -> None:
    gradients = some(seed, size)
    idle = seed % size[0]
    for gradient in gradients:
        gradient[idle] = 0
    out = run(ALL[name], gradients)
    assert torch.equal(out[idle], torch.zeros(size[1:]))
    assert torch.isfinite(out).all()


@given(seed=seeds, size=sizes)
@pytest.mark.parametrize("name", [n for n in ALL if n != "stacked"])
def test_a_stack_equals_a_loop(name: str, seed: int, size: tuple[int, int, int]) -> None:
    gradients = some(seed, size)
    together = run(ALL[name], gradients)
    alone = torch.stack([run(ALL[name], [g[e] for g in gradients]) for e in range(size[0])])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@given(seed=seeds, size=sizes)
@pytest.mark.parametrize("name", [n for n, s in ALL.items() if s.counts_steps])
def test_step_counters_per_expert(name: str, seed: int, size: tuple[int, int, int]) -> None:
    gradients = some(seed, size, 1)
    counts = torch.arange(1, size[0] + 1)
    together = run(ALL[name], gradients, steps=counts)
    alone = torch.stack([run(ALL[name], [gradients[0][e]], steps=e + 1) for e in range(size[0])])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@given(seed=seeds, size=sizes)
def test_views_equal_a_loop(seed: int, size: tuple[int, int, int]) -> None:
    x = some(seed, size, 1)
    sinkhorn = stage("sr_sinkhorn", backend="eager")
    e, m, n = size
    tall = run(sinkhorn, [x[0].reshape(1, e * m, n)]).reshape(size)
    torch.testing.assert_close(run(NORMALISING["stacked"], x), tall)
    turned = torch.stack([run(sinkhorn, [one.T[None].contiguous()])[0].T for one in x[0]])
    torch.testing.assert_close(run(NORMALISING["transposed"], x), turned)
    halves = [run(sinkhorn, [part.contiguous()]) for part in x[0].chunk(2, 1)]
    torch.testing.assert_close(run(NORMALISING["gate up"], x), torch.cat(halves, 1))


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8])
def test_inverse_rms_has_rms_one_and_bounded_multipliers(block: int) -> None:
    gradient = some(0, (2, 7, 5), 1)[0] * 10.0 ** torch.arange(-3.0, 4.0)[None, :, None]
    gradient[:, 2] = 0
    one = with_blocks(block=block)
    slots = {s.name: torch.zeros(s.shape((2, 7, 5))) for s in one.slots}
    ctx = Context(torch.zeros(2, 7, 5), 0.1, 1, CounterRng(0, 1), expert_stacked=True)
    ratio = one(gradient, slots, ctx)
    assert slots["block_moment"].shape == (2, -(-7 // block))
    multiplier = 1 / ratio.denominator[..., 0]
    blocks = [multiplier[:, i : i + block] for i in range(0, 7, block)]
    assert all((b == b[:, :1]).all() for b in blocks)
    live = slots["block_moment"] > 0
    squares = torch.stack([b[:, 0] ** 2 for b in blocks], 1)
    torch.testing.assert_close((squares * live).sum(1) / live.sum(1), torch.ones(2))


def test_multiplier_before_sinkhorn_cancels() -> None:
    gradient = some(1, (3, 6, 5), 1)
    multiplied = run(with_blocks(), gradient)
    sinkhorn = stage("sr_sinkhorn", sweeps=10, backend="eager")
    cosine = torch.cosine_similarity(run(sinkhorn, [multiplied]).flatten(1), run(sinkhorn, gradient).flatten(1), dim=1)
    assert (cosine > 0.99999).all()
    assert torch.cosine_similarity(multiplied.flatten(), gradient[0].flatten(), dim=0) < 0.999


def test_eps_modes_put_eps_where_they_say() -> None:
    tiny = [torch.full((1, 2, 2), 1e-6)]
    floor = run(stage("second_moment", eps_mode="v_floor", eps=1e-8, correct="after"), tiny)
    torch.testing.assert_close(floor, tiny[0] / 1e-4 * (1 - 0.999) ** 0.5)
    corrected = run(stage("second_moment", eps_mode="v_floor", eps=1e-8), tiny)
    torch.testing.assert_close(corrected, tiny[0] / 1e-4)
    adam = run(stage("second_moment", eps=1e-6), tiny)
    torch.testing.assert_close(adam, torch.full((1, 2, 2), 0.5))


def test_floored_fraction() -> None:
    from toolkit.stages.factored_second_moment import floored_fraction

    gradient = torch.full((1, 4, 2), 1.0)
    gradient[:, :, 1] = 1e-9
    one = stage("factored_second_moment", eps_mode="v_floor", beta=0.0)
    slots = {s.name: torch.zeros(s.shape((1, 4, 2))) for s in one.slots}
    one(gradient, slots, Context(torch.zeros(1, 4, 2), 0.1, 1, CounterRng(0, 1), expert_stacked=True))
    assert floored_fraction(slots, eps=1e-8, eps_row=1e-8) == {"rows": 0.0, "columns": 0.5}


def test_clip_scope() -> None:
    x = torch.ones(2, 3, 3)
    x[0] *= 10
    matrix = run(stage("rms_clip", clip_scope="matrix"), [x])
    torch.testing.assert_close(matrix, torch.ones(2, 3, 3))
    tensor = run(stage("rms_clip", clip_scope="tensor"), [x])
    torch.testing.assert_close(tensor, x / 50.5**0.5)
