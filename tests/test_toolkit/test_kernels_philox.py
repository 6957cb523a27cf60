"""Random numbers: published vectors, independence of chunking, 64-bit element indices."""

import pytest
import torch

from toolkit.kernels._philox import philox_block, philox_words
from toolkit.stages._rng import CounterRng, StoredUniforms
from traces.errors import GradreelError

# Known answers published with Random123 for philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert philox_block(counter, key) == answer
    block = counter[0] | counter[1] << 32
    step = counter[2] | counter[3] << 32
    assert philox_words(key, step, 4 * block, 4).tolist() == list(answer)


@pytest.mark.parametrize("offset", [0, 1, 2**31 - 3, 2**32 - 5, 2**34 - 6, 2**40 + 3])
def test_words_equal_the_scalar_blocks_at_any_offset(offset):
    words = philox_words((7, 9), 5, offset, 23).tolist()
    expected = []
    for element in range(offset, offset + 23):
        block = element // 4
        expected.append(philox_block((block & 0xFFFFFFFF, block >> 32, 5, 0), (7, 9))[element % 4])
    assert words == expected


def test_any_chunking_gives_the_same_numbers(monkeypatch):
    rng = CounterRng(3, 11, "layers.0.experts.down_proj")
    whole = rng.uniform((7, 13))
    flat = torch.cat([rng.uniform((n,), offset=at) for at, n in ((0, 1), (1, 50), (51, 3), (54, 37))])
    assert torch.equal(whole.reshape(-1), flat)
    monkeypatch.setattr("toolkit.kernels._philox._CHUNK_BLOCKS", 3)
    assert torch.equal(whole, rng.uniform((7, 13)))


def test_numbers_differ_by_seed_step_key_and_purpose():
    base = CounterRng(0, 1, "a")
    others = [CounterRng(1, 1, "a"), CounterRng(0, 2, "a"), CounterRng(0, 1, "b"), base.fork("projection")]
    draws = [tuple(r.uniform((8,)).tolist()) for r in [base, *others]]
    assert len(set(draws)) == 5
    assert CounterRng(0, 1, 1).philox_key != CounterRng(0, 1, "1").philox_key


def test_uniform_is_in_range_and_uniform():
    u = CounterRng(5, 1, "w").uniform((200_000,)).double()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * (1 / 12) ** 0.5 / 200_000**0.5
    assert torch.histc(u, 16, 0, 1).min() > 12_500 * 0.96


def test_bits16_is_the_top_of_the_uniform():
    rng = CounterRng(5, 1, "w")
    assert torch.equal(rng.bits16((999,)).long(), (rng.uniform((999,)).double() * 65536).floor().long())


def test_stored_uniforms_are_returned_and_bounded():
    values = torch.rand(3, 5)
    stored = StoredUniforms(values)
    assert torch.equal(stored.uniform((3, 5)), values)
    assert torch.equal(stored.uniform((4,), offset=2), values.reshape(-1)[2:6])
    with pytest.raises(GradreelError, match="15 are stored"):
        stored.uniform((16,))


def test_negative_step_is_refused():
    with pytest.raises(GradreelError, match="step is -1"):
        CounterRng(0, -1, "w")
