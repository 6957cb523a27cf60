"""Momentum that lives where gradients accumulate.

The buffer is a named float32 tensor of the optimizer's state. It becomes `.grad` just before autograd accumulates and
leaves again right after, so that backward adds onto it, and no zero_grad, clipping or unscaling ever meets history.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from toolkit.recipes import Stepper
from traces.errors import GradreelError
from traces.views import NONZERO, ZERO

MODES = ("auto", "attached", "apart")
_MARK = "_gradreel_hidden_momentum"


class HiddenMomentum:
    """The gradient buffer of one parameter that backward adds onto.

    Until `active` the buffer holds no history and `.grad` is an ordinary gradient: whether anything else rewrites
    gradients (a GradScaler, several processes) is known at the first step only. `pending` counts backward passes since
    the last step. `fresh` is this step's own gradient, kept only while `tracking`. `presence` says per expert whether
    any gradient element was non-zero.
    """

    def __init__(self, parameter: torch.nn.Parameter, stepper: Stepper, *, active: bool) -> None:
        previous = getattr(parameter, _MARK, lambda: None)()
        if previous is not None:
            previous.close()
        self.parameter, self.stepper = parameter, stepper
        self.active, self.pending, self.tracking, self.steps = active, 0, False, 0
        self.fresh: Tensor | None = None
        self.presence: Tensor | None = None
        self._arriving: Tensor | None = None
        if parameter.dtype != torch.float32:
            parameter.grad_dtype = torch.float32
        mine = weakref.ref(self)

        # Weak, so that a parameter does not keep a dropped optimizer alive.
        def before(gradient: Tensor) -> None:
            if (record := mine()) is not None and record.active:
                record._before_accumulation(gradient)

        def after(_: Tensor) -> None:
            if (record := mine()) is not None and record.active:
                record._after_accumulation()

        self._handles = [parameter.register_hook(before), parameter.register_post_accumulate_grad_hook(after)]
        setattr(parameter, _MARK, mine)

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.stepper.info.name

    @property
    def buffer(self) -> Tensor:
        """The buffer in the parameter's own layout; shares memory with the slot."""
        key = self.stepper.buffer_key
        assert key is not None
        return self.stepper.layout.restore(self.stepper.state[key])

    def close(self) -> None:
        """Remove the hooks: `.grad` is ordinary from now on, or another optimizer takes the parameter over."""
        for handle in self._handles:
            handle.remove()
        if self.parameter.dtype != torch.float32 and self.parameter.grad is None:
            self.parameter.grad_dtype = self.parameter.dtype

    def finish_step(self) -> None:
        """Forget this step's gradient; called after every step."""
        self.steps += self.pending > 0
        self.pending, self.fresh, self.presence = 0, None, None

    def resumed(self) -> None:
        """The buffer was loaded: it holds history from now on."""
        self.active, self.steps = True, self.steps + 1
        self.pending, self.fresh, self.presence = 0, None, None

    def codes(self) -> Tensor:
        """Presence codes of this step, uint8 [E] on the CPU."""
        assert self.presence is not None
        return torch.where(self.presence.cpu(), NONZERO, ZERO).to(torch.uint8)

    def fresh_gradient(self) -> Tensor | None:
        """This step's gradient, None where there was no backward."""
        if not self.pending:
            return None
        if self.fresh is not None:
            return self.fresh
        if self.steps == 0:
            return self.buffer  # nothing but this step's gradient is in it yet
        raise GradreelError(
            f"{self.name}: its gradient was added onto the momentum buffer and not kept; call "
            "optimizer.track_fresh_gradients() before the backward pass, or use hidden_momentum='apart'"
        )

    def scale_fresh(self, gradient: Tensor, factor: Tensor) -> None:
        """Multiply this step's gradient by `factor`, inside the buffer too."""
        factor = factor.to(gradient.device)
        if gradient is self.fresh:
            self.buffer.add_((gradient * (factor - 1)).to(self.buffer.dtype))
        gradient.mul_(factor)

    def _before_accumulation(self, gradient: Tensor) -> None:
        buffer, held = self.buffer, self.parameter.grad
        if held is not None and held.data_ptr() != buffer.data_ptr():
            raise GradreelError(
                f"{self.name}: .grad was set by hand while hidden momentum is attached; use torch.autograd.grad for "
                "probes, or hidden_momentum='apart'"
            )
        self.parameter.grad = buffer
        self._address, self._arriving = buffer.data_ptr(), gradient.detach()
        # torch.autograd.grad comes through here too, but accumulates nothing: whatever has not arrived by the end of
        # this pass leaves no mark.
        torch.autograd.Variable._execution_engine.queue_callback(self._withdraw)

    def _withdraw(self) -> None:
        if self._arriving is None:
            return
        self._arriving, held = None, self.parameter.grad
        if held is not None and held.data_ptr() == self._address:
            self.parameter.grad = None

    def _after_accumulation(self) -> None:
        held, gradient, self._arriving = self.parameter.grad, self._arriving, None
        if held is None or held.data_ptr() != self._address:
            self.parameter.grad = None
            raise GradreelError(
                f"{self.name}: backward replaced the momentum buffer instead of adding to it (create_graph=True does); "
                "use torch.autograd.grad for probes, or hidden_momentum='apart'"
            )
        self.parameter.grad = None
        self.pending += 1
        assert gradient is not None
        seen = _nonzero_experts(gradient, self.stepper)
        self.presence = seen if self.presence is None else self.presence | seen
        if self.tracking:
            self.fresh = gradient.clone() if self.fresh is None else self.fresh.add_(gradient)


def _nonzero_experts(gradient: Tensor, stepper: Stepper) -> Tensor:
    """bool [E]: whether the expert's gradient holds anything but zeros (NaN counts as something)."""
    if not stepper.layout.expert_stacked:
        return (torch.linalg.vector_norm(gradient, ord=torch.inf) != 0).reshape(1)
    x = stepper.layout.canonical(gradient)
    if x.dim() == 1:
        return x != 0
    return torch.linalg.vector_norm(x, ord=torch.inf, dim=tuple(range(1, x.dim()))) != 0


def presence_codes(gradient: Tensor, stepper: Stepper) -> Tensor:
    """Presence codes of a gradient, uint8 [E] on the CPU."""
    return torch.where(_nonzero_experts(gradient, stepper).cpu(), NONZERO, ZERO).to(torch.uint8)


def resolve(mode: str, stepper: Stepper, *, maximize: bool, parameter: Any) -> bool:
    """Whether a buffer may be attached: nothing else rewrites `.grad` (one process, no DTensor), the weight is stepped
    in its own shape, and no stage before the momentum needs this step's gradient."""
    plain = not hasattr(parameter, "to_local") and not several_processes() and not maximize
    plain = plain and tuple(parameter.shape) == tuple(stepper.info.shape)
    plain = plain and stepper.chain.stages[0].name == "hidden_ema"
    if mode == "attached" and not plain:
        raise GradreelError(
            f"{stepper.info.name}: hidden_momentum is 'attached' with several processes, DTensors, maximize, experts "
            "fused into 2-D weights or a stage before the momentum; use 'apart' (or 'auto'), which keeps the buffer "
            "beside this step's gradient"
        )
    return mode != "apart" and plain


def several_processes() -> bool:
    """Whether gradients are reduced over a process group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
