"""Philox4x32-10, the counter-based generator behind every random number of this project.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.3.

Element e of a tensor takes word e % 4 of block e // 4; the block's counter is (block as two 32-bit words, step as two
32-bit words) and its key two more words. So a number depends on (key, step, element) alone: the same in any chunk,
on any device, and in the fused kernels, up to 2^64 elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
ROUNDS = 10
_CHUNK_BLOCKS = 1 << 18


def philox_block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block in plain integers: the truth the vectorised forms are tested against. Four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox_words(key: tuple[int, int], step: int, offset: int, count: int, device: object = "cpu") -> Tensor:
    """The 32-bit words of elements `offset` .. `offset + count - 1`, int64 [count] with values in [0, 2^32)."""
    import torch

    out = torch.empty(count, dtype=torch.int64, device=device)  # type: ignore[call-overload]
    if count == 0:
        return out
    first, last = offset // 4, (offset + count - 1) // 4
    for start in range(first, last + 1, _CHUNK_BLOCKS):
        stop = min(start + _CHUNK_BLOCKS, last + 1)
        words = _blocks(key, step, start, stop - start, device)
        lo, hi = max(offset, 4 * start), min(offset + count, 4 * stop)
        out[lo - offset : hi - offset] = words[lo - 4 * start : hi - 4 * start]
    return out


def _blocks(key: tuple[int, int], step: int, first: int, blocks: int, device: object) -> Tensor:
    # int64 products wrap, which leaves the low 64 bits right; masking after the shift drops the copied sign.
    import torch

    index = torch.arange(blocks, dtype=torch.int64, device=device)  # type: ignore[call-overload]
    low = (index + (first & _MASK)) & _MASK
    high = (((index + (first & _MASK)) >> 32) + (first >> 32)) & _MASK
    c0, c1 = low, high
    c2 = torch.full_like(index, step & _MASK)
    c3 = torch.full_like(index, (step >> 32) & _MASK)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1).reshape(-1)
