"""A fixed batch routed through the model now and then, without a trace of it in the training.

What a forward can change is put back: random states, buffers, training modes, the recorder's own counts. Gradients and
weights are not touched, since nothing is differentiated.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from traces.errors import GradreelError
from traces.hooks import ForwardWatch, MicroStep


class ProbeBatch:
    """`batch` is what the model is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments.

    Tensors are copied to the model's device once. The model runs in evaluation mode, without dropout and router noise,
    under the autocast of the last training forward.
    """

    def __init__(self, batch: Any, watch: ForwardWatch, device: torch.device) -> None:
        self._watch = watch
        if not isinstance(batch, (Tensor, tuple, list, Mapping)):
            raise GradreelError(
                f"probe is a {type(batch).__name__}; give what the model is called with: a tensor, a tuple of "
                "arguments, or a dict of keyword arguments"
            )
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        if isinstance(batch, Mapping):
            self._kwargs = {str(key): _on(value, device) for key, value in batch.items()}
        else:
            self._args = tuple(_on(value, device) for value in ((batch,) if isinstance(batch, Tensor) else batch))

    def route(self) -> MicroStep:
        """Route the batch with the weights as they are now; raises whatever the model raises."""
        root = self._watch.root
        with undisturbed(root), self._watch.aside(self._args, self._kwargs) as micro, torch.no_grad():
            for module in root.modules():
                module.training = False  # not `eval()`, which a model may have made its own
            with self._watch.autocast():
                root(*self._args, **self._kwargs)
        return micro

    def check(self, micro: MicroStep) -> None:
        """Raise `GradreelError` naming the first MoE layer that the batch did not reach."""
        for layer in self._watch.layers:
            capture = micro.capture(layer)
            if capture is None or capture.topk_expert_ids is None:
                raise GradreelError(
                    f"probe: no expert ids were seen at module {layer.experts_name!r}; give a batch that the model "
                    "routes through every MoE layer when it is called with it"
                )


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back what a forward of `model` may have changed: random states, buffers, training modes.

    Random states are torch's of the CPU and of each GPU that holds a parameter or buffer, Python's, numpy's, and those
    of generators that are attributes of a module. Other attributes that a forward writes are not known here.
    """
    modules = list(model.modules())
    training = [module.training for module in modules]
    buffers = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers]
    contents = [(b, b._version, b.clone()) for b in model.buffers()]
    tensors = (*model.parameters(), *model.buffers())
    devices = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
    generators = {id(g): g for m in modules for g in vars(m).values() if isinstance(g, torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    own, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)
        for generator, state in states:
            generator.set_state(state)
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for now, before in buffers:
            now.clear()
            now.update(before)
        for buffer, version, content in contents:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(content)


def _on(value: Any, device: torch.device) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
