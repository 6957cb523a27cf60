"""Rounding to bfloat16: exact expectation, fixed points, specials, and the published dither."""

import math

import pytest
import torch

from toolkit.stages._rng import CounterRng, StoredUniforms
from toolkit.stages._rounding import ROUNDINGS, dithered_bf16, rounded, stochastic_bf16
from traces.errors import GradreelError


def all_bf16():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_stochastic_rounding_leaves_every_representable_value_alone():
    values = all_bf16()
    for bits in (0, 1, 32767, 65535):
        out = stochastic_bf16(values.float(), torch.full((65536,), bits, dtype=torch.int32))
        numbers = ~values.isnan()
        assert torch.equal(out[numbers].view(torch.int16), values[numbers].view(torch.int16))
        assert out[~numbers].isnan().all()


def test_signalling_nan_payload_does_not_become_infinity():
    nan = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    out = stochastic_bf16(nan, torch.zeros(2, dtype=torch.int32))
    assert out.isnan().all()


@pytest.mark.parametrize("value", [1.0 + 2.0**-9, -3.14159, 1e-40, 65504.123, 2.0**-126 * 1.7, 1.9999999])
def test_stochastic_rounding_is_exactly_unbiased(value):
    x = torch.full((65536,), value, dtype=torch.float32)
    out = stochastic_bf16(x, torch.arange(65536, dtype=torch.int32)).double()
    assert float(out.mean()) == pytest.approx(float(x[0].double()), rel=1e-12)
    assert len(out.unique()) == 2


def test_stochastic_rounding_of_a_tiny_decay_works_in_expectation():
    weight = torch.ones(4000, dtype=torch.bfloat16)
    for step in range(1, 101):
        weight = rounded(weight.float() * (1 - 1.5e-5), torch.bfloat16, "stochastic", CounterRng(0, step, "w"))
    expected = (1 - 1.5e-5) ** 100
    assert float(weight.double().mean()) == pytest.approx(expected, abs=4 * (1.5e-3 * 2**-9 / 4000) ** 0.5)
    still = torch.ones(4, dtype=torch.bfloat16)
    assert torch.equal(rounded(still.float() * (1 - 1.5e-5), torch.bfloat16, "nearest"), still)


def test_infinities_pass_through():
    x = torch.tensor([math.inf, -math.inf])
    for mode in ("nearest", "stochastic"):
        assert torch.equal(rounded(x, torch.bfloat16, mode, CounterRng(0, 1, "w")).float(), x)


def test_dither_follows_its_formula_and_moves_representable_values():
    x, u = torch.randn(500, generator=torch.Generator().manual_seed(1)), torch.rand(500)
    expected = torch.tensor([float(a) for a in x]) + (u - 0.5) * x.abs() / 128
    assert torch.equal(dithered_bf16(x, u), expected.to(torch.bfloat16))
    ones = torch.ones(10_000)
    out = rounded(ones, torch.bfloat16, "dither", CounterRng(0, 1, "w"))
    assert 0.15 < float((out != 1).float().mean()) < 0.4


def test_stored_uniforms_feed_the_rounding():
    x, u = torch.randn(3, 4), torch.rand(3, 4)
    assert torch.equal(rounded(x, torch.bfloat16, "dither", StoredUniforms(u)), dithered_bf16(x, u))


@pytest.mark.parametrize("mode", ROUNDINGS)
def test_chunks_round_as_the_whole(mode):
    x, rng = torch.randn(40), CounterRng(2, 3, "w")
    whole = rounded(x, torch.bfloat16, mode, rng)
    parts = [rounded(x[a:b], torch.bfloat16, mode, rng, offset=a) for a, b in ((0, 7), (7, 40))]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("mode", ROUNDINGS)
def test_a_dtype_that_needs_no_rounding_is_returned_as_it_is(mode):
    x = torch.randn(5)
    assert rounded(x, torch.float32, mode) is x


def test_bad_arguments_are_one_clear_line():
    x = torch.zeros(3)
    with pytest.raises(GradreelError, match="unknown rounding 'up'"):
        rounded(x, torch.bfloat16, "up")
    with pytest.raises(GradreelError, match="pass rng"):
        rounded(x, torch.bfloat16, "stochastic")
    with pytest.raises(GradreelError, match=r"not torch\.float16"):
        rounded(x, torch.float16, "dither", CounterRng(0, 1, "w"))
