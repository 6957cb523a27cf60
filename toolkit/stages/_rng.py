"""Random numbers that depend on (seed, step, parameter, element) and on nothing else.

No global generator is read or advanced, so a recipe gives the same weights in a replay, in a resumed run, in any
chunking of a tensor and in any order of parameters.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

from toolkit.kernels._philox import philox_words
from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor


class CounterRng:
    """Philox4x32-10 keyed by (`seed`, `key`), its counter made of `step` and the 64-bit element index.

    `key` names the parameter (str or int). `fork(purpose)` gives an independent generator for a second use in the
    same step. Calls have no memory: the same call returns the same numbers.
    """

    def __init__(self, seed: int, step: int, key: str | int = 0) -> None:
        if int(step) < 0:
            raise GradreelError(f"rng step is {step}; steps count from 0 upwards")
        self.seed, self.step, self.key = int(seed), int(step), key
        digest = hashlib.blake2b(f"{self.seed}\0{type(key).__name__}\0{key}".encode(), digest_size=8).digest()
        #: The two 32-bit words a fused kernel needs, beside `step`, to draw the same numbers.
        self.philox_key = (int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))

    def fork(self, purpose: str) -> CounterRng:
        """The generator of another purpose at the same step."""
        return CounterRng(self.seed, self.step, f"{self.key}/{purpose}")

    def words(self, count: int, *, device: Any = "cpu", offset: int = 0) -> Tensor:
        """32-bit words of elements `offset` .. `offset + count - 1`: int64 [count] in [0, 2^32)."""
        return philox_words(self.philox_key, self.step, int(offset), int(count), device)

    def uniform(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """float32 in [0, 1), a multiple of 2^-24. `offset` is the element index of the first one."""
        import torch

        words = self.words(math.prod(shape), device=device, offset=offset)
        return ((words >> 8).to(torch.float32) * 2.0**-24).reshape(shape)

    def bits16(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """int32 in [0, 65536): the upper half of each element's word, so floor(uniform * 65536)."""
        import torch

        words = self.words(math.prod(shape), device=device, offset=offset)
        return (words >> 16).to(torch.int32).reshape(shape)


class StoredUniforms:
    """The interface of `CounterRng` over numbers that were stored, to reproduce a recorded run bit for bit.

    `values` is an array or tensor of floats in [0, 1), one per element of the parameter, in any shape.
    """

    philox_key = None

    def __init__(self, values: Any) -> None:
        import torch

        self._flat = torch.as_tensor(values).detach().to(torch.float32).reshape(-1)

    def fork(self, purpose: str) -> StoredUniforms:
        """Itself: what was stored serves every purpose."""
        return self

    def uniform(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """The stored numbers from element `offset` on, float32."""
        count = math.prod(shape)
        if offset < 0 or offset + count > self._flat.numel():
            raise GradreelError(
                f"stored uniforms: elements {offset} to {offset + count} asked for, {self._flat.numel()} are stored; "
                "store one number per element of the parameter"
            )
        return self._flat[offset : offset + count].reshape(shape).to(device)

    def bits16(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """floor(uniform * 65536), int32."""
        import torch

        return (self.uniform(shape, device, offset=offset) * 65536.0).to(torch.int32)
