"""Random numbers that follow the element, not the slice it happens to sit in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class SlicedRng:
    """The numbers of some experts of a parameter, or of one rank's shard of it.

    `base` is the index of the shard's first element; `experts` the ids of the slices present, None meaning all, and
    `size` the number of elements of each. `rng` is one generator, or one per expert id where experts have taken
    different numbers of steps. An element so gets the same number whoever else is idle and however many ranks there
    are.
    """

    def __init__(self, rng: Any, *, base: int = 0, experts: list[int] | None = None, size: int = 0) -> None:
        self.rng, self.base, self.experts, self.size = rng, base, experts, size

    def uniform(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """See `CounterRng.uniform`."""
        return self._draw("uniform", shape, device, offset)

    def bits16(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """See `CounterRng.bits16`."""
        return self._draw("bits16", shape, device, offset)

    def _draw(self, method: str, shape: tuple[int, ...], device: Any, offset: int) -> Tensor:
        count = math.prod(shape)
        if self.experts is None:
            return getattr(self.rng, method)(shape, device, offset=self.base + offset)
        if not count:
            return getattr(self._of(self.experts[0]), method)(shape, device)
        parts = []
        while count:
            row, inside = divmod(offset, self.size)
            take = min(count, self.size - inside)
            expert = self.experts[row]
            start = self.base + expert * self.size + inside
            parts.append(getattr(self._of(expert), method)((take,), device, offset=start))
            offset, count = offset + take, count - take
        return torch.cat(parts).reshape(shape)

    def _of(self, expert: int) -> Any:
        return self.rng[expert] if isinstance(self.rng, dict) else self.rng

    @property
    def seed(self) -> int:
        """The seed behind the numbers, for a stage that draws by its own counter; 0 where they were stored."""
        return getattr(self._any, "seed", 0)

    @property
    def key(self) -> str | int:
        """The parameter's key, see `seed`."""
        return getattr(self._any, "key", 0)

    @property
    def _any(self) -> Any:
        return next(iter(self.rng.values())) if isinstance(self.rng, dict) else self.rng
