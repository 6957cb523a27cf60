"""What became of the gradients of a backward pass that no optimizer step followed: kept to be added to, or thrown away.

An optimizer under GradScaler calls no hook when it skips a step over an inf, so that a skipped step looks like
accumulation until `zero_grad` is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from traces.views import ParamInfo


class BackwardWatch:
    """Watches a few parameters whose `.grad` every backward sets.

    `seen` turns True with each backward pass; the recorder resets it after each step.
    """

    def __init__(self, infos: Sequence[ParamInfo], parameters: Mapping[str, nn.Parameter]) -> None:
        self.seen = False
        self._witnesses = choose_witnesses(infos, parameters)
        self._held: tuple[nn.Parameter, Tensor | None, int] | None = None
        self._version: int | None = None  # of the first witness's gradient after its last backward
        self._handles: list[Any] = []

    def install(self) -> None:
        """Add the hook."""
        self._handles = [p.register_post_accumulate_grad_hook(self._on_backward) for p in self._witnesses[:1]]

    def remove(self) -> None:
        """Take it away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget(self) -> None:
        """A step takes the gradients that are there."""
        self._held = None

    def thrown_away(self) -> int | None:
        """How many micro-steps' gradients were thrown away since `holds`; None where they are still there.

        Backward accumulates into one tensor; another one in its place means that `zero_grad` came between.
        """
        if self._held is None:
            return None
        witness, gradient, count = self._held
        now = witness.grad
        if now is gradient or (now is not None and now.requires_grad):  # create_graph replaces it at each backward
            return None
        self._held = None
        return count

    def holds(self, micro_steps: int) -> bool:
        """Whether the gradients of so many micro-steps still lie in `.grad`; if not, that is forgotten."""
        held = next((p for p in self._witnesses if p.grad is not None), None)
        if held is None or self._emptied():
            self._held, self.seen = None, False
            return False
        if self._held is None:
            self._held = (held, held.grad, micro_steps)
        return True

    def _on_backward(self, parameter: Tensor) -> None:
        self.seen = True
        self._version = parameter.grad._version if parameter.grad is not None else None

    def _emptied(self) -> bool:
        """`zero_grad(set_to_none=False)` keeps the tensor, so that only its content tells what became of it.

        It is read, which waits for the device, only where something wrote into it since its last backward.
        """
        gradient = self._witnesses[0].grad
        if gradient is None or gradient.layout is not torch.strided or gradient._version == self._version:
            return False
        return not bool(gradient.any()) or not bool(gradient.isfinite().all())


def choose_witnesses(infos: Sequence[ParamInfo], parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Parameters whose `.grad` every backward sets: the first routers, else all that are trained."""
    trained = [info for info in infos if parameters[info.name].requires_grad]
    routers = [parameters[info.name] for info in trained if info.role == "router"]
    return routers[:4] or [parameters[info.name] for info in trained]
