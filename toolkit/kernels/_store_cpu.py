"""Writing a row of weights on the CPU: decay, step, and the rounding of bfloat16 with its random numbers.

A row is W <- round(keep W - k u). The numbers are those of `toolkit.kernels._rounding` with the same generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.kernels._numba import jit, narrow, widen
from traces.errors import GradreelError, unknown

NEAREST, STOCHASTIC, DITHER = 0, 1, 2
MODES = {"nearest": NEAREST, "stochastic": STOCHASTIC, "dither": DITHER}


@jit
def philox_row(key0, key1, step, offset, words):  # type: ignore[no-untyped-def]
    """Words of elements 4 * (offset // 4) onwards into uint32 `words`, whose size is a multiple of 4."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    first = np.uint64(offset) // np.uint64(4)
    s0, s1 = np.uint64(step) & mask, np.uint64(step) >> shift
    for b in range(words.size // 4):
        block = first + np.uint64(b)
        c0, c1, c2, c3 = block & mask, block >> shift, s0, s1
        k0, k1 = np.uint64(key0), np.uint64(key1)
        for _ in range(10):
            p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
            c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & mask, (p0 >> shift) ^ c3 ^ k1, p0 & mask
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
        words[4 * b] = np.uint32(c0)
        words[4 * b + 1] = np.uint32(c1)
        words[4 * b + 2] = np.uint32(c2)
        words[4 * b + 3] = np.uint32(c3)


@jit
def store_row(row, u, k, keep, own, mode, words, at, uniforms):  # type: ignore[no-untyped-def]
    """row <- round(keep row - k u). `own`: decay first, in the row's own dtype.

    Random numbers: element j takes words[at + j], or uniforms[j] where `uniforms` is not empty.
    """
    n = row.size
    keep, k = np.float32(keep), np.float32(k)
    if mode == 0:
        for j in range(n):
            decayed = widen(row[j]) * keep
            if own:
                decayed = widen(narrow(decayed, row))
            row[j] = narrow(decayed - k * u[j], row)
        return
    stored = uniforms.size > 0
    for j in range(n):
        decayed = widen(row[j]) * keep
        if own:
            decayed = widen(narrow(decayed, row))
        value = decayed - k * u[j]
        if mode == 1:
            bits = np.int32(uniforms[j] * np.float32(65536)) if stored else np.int32(words[at + j] >> np.uint32(16))
            pattern = np.float32(value).view(np.int32)
            finite = (pattern & np.int32(0x7F800000)) != np.int32(0x7F800000)
            row[j] = np.uint16((pattern + bits) >> np.int32(16)) if finite else narrow(value, row)
        else:
            noise = uniforms[j] if stored else np.float32(words[at + j] >> np.uint32(8)) * np.float32(2.0**-24)
            row[j] = narrow(value + (noise - np.float32(0.5)) * abs(value) * np.float32(2.0**-7), row)


class RowNoise:
    """The random numbers of one parameter's rows: philox in the kernel, or what another generator gives.

    `n` is the length of a row. `key()` is what the kernels take: (mode, key0, key1, step, stored uniforms or empty).
    """

    def __init__(self, mode: str, rng: Any, bfloat16: bool, n: int) -> None:
        if mode not in MODES:
            raise unknown("rounding", mode, MODES)
        self.mode = MODES[mode] if bfloat16 else NEAREST
        if self.mode != NEAREST and rng is None:
            raise GradreelError(f"rounding {mode!r} needs random numbers; pass rng")
        self.rng = rng if self.mode != NEAREST else None
        key = getattr(self.rng, "philox_key", None)
        self.inside = self.rng is None or (key is not None and hasattr(self.rng, "step"))
        self.key = key if key is not None and self.inside else (0, 0)
        self.step = int(self.rng.step) if self.rng is not None and self.inside else 0
        self.words_size = (n + 7) // 4 * 4 if self.mode != NEAREST else 0

    def words(self) -> np.ndarray:
        """Scratch for one thread."""
        return np.empty(self.words_size, np.uint32)

    def uniforms(self, shape: tuple[int, int], offset: int) -> np.ndarray:
        """Numbers for one matrix from a generator the kernel does not know; an empty array where it needs none."""
        if self.inside or self.rng is None:
            return np.empty((0, 0), np.float32)
        if self.mode == STOCHASTIC:  # through bits, so that the kernel's floor(u * 65536) returns them exactly
            return self.rng.bits16(shape, "cpu", offset=offset).float().mul_(2.0**-16).numpy()
        return self.rng.uniform(shape, "cpu", offset=offset).numpy()
