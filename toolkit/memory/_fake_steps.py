"""What `tracked_peak` runs: a model on fake tensors, and the optimizer step of a recipe shortened without loss.

Parameters alike in shape, dtype, layout and chain have the same temporaries, so one of each kind is stepped, in the
last step only; of a stack of experts that is stepped in blocks, two blocks; and random numbers are drawn once per
parameter and size. State and gradients of all are there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from toolkit.recipes import Stepper
from toolkit.recipes._stepper import BLOCK, STEP, couples_experts
from toolkit.stages._rng import CounterRng
from traces.errors import GradreelError
from traces.views import ParamInfo

if TYPE_CHECKING:
    from toolkit.memory._tracked import Tracker
    from toolkit.recipes import Recipe


def build_fake(model: Any, checkpointing: str) -> tuple[nn.Module, list[str]]:
    """The model on fake tensors in training mode, and what was assumed. To be called under a FakeTensorMode."""
    notes = ["tokens are spread evenly over experts; kernels' own workspaces and fragmentation are not counted"]
    if callable(model) and not isinstance(model, nn.Module) and not hasattr(model, "to_dict"):
        built = model()
    else:
        from toolkit.memory._shapes import build_on_meta

        with _disable_current_modes():
            described = build_on_meta(model)
        built = _on_fake_tensors(described)
    config: Any = getattr(built, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if hasattr(built, "set_experts_implementation"):
        built.set_experts_implementation("grouped_mm")
        notes.append("experts run as one grouped product (grouped_mm)")
    if checkpointing == "full":
        if not hasattr(built, "gradient_checkpointing_enable"):
            raise GradreelError(
                f"{type(built).__name__} has no gradient_checkpointing_enable; track it with checkpointing='none'"
            )
        built.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return built.train(), notes


def _on_fake_tensors(model: nn.Module) -> nn.Module:
    """A copy of `model` whose every tensor is a fake one on the CPU; tied tensors stay tied."""
    known: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")

    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in known:
                known[id(parameter)] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
        for tensor in [*module._buffers.values(), *vars(module).values()]:
            if isinstance(tensor, Tensor) and id(tensor) not in known:
                known[id(tensor)] = fake(tensor)
    return copy.deepcopy(model, known)


def token_batch(batch: int, sequence: int) -> dict[str, Tensor]:
    """Token ids and labels, int64 [batch, sequence]."""
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def make_step(
    tracker: Tracker,
    model: nn.Module,
    recipe: str | Recipe | None,
    optimizer: Callable[[nn.Module], Any] | None,
    step: str,
) -> RecipeStep | OptimizerStep | None:
    """The optimizer of a tracked run; None for none."""
    if step not in ("ours", "original"):
        raise GradreelError(f"step is {step!r}; allowed: ours, original")
    if optimizer is not None:
        return OptimizerStep(tracker, optimizer(model))
    if recipe is None:
        return None
    from toolkit.variants import recipe as named

    return RecipeStep(tracker, model, named(recipe) if isinstance(recipe, str) else recipe, original=step == "original")


class OptimizerStep:
    """Any optimizer as it is."""

    last = False

    def __init__(self, tracker: Tracker, optimizer: Any) -> None:
        self.tracker, self.optimizer = tracker, optimizer

    def is_pinned(self, parameter: nn.Parameter) -> bool:
        """Whether backward adds onto a buffer that survives."""
        return False

    def step(self) -> None:
        """Take a step and name what it keeps."""
        self.optimizer.step()
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self.tracker.mark([value], "step_counter_bytes" if key == STEP else "state_bytes")

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)


class RecipeStep:
    """The step of a recipe on every parameter, hidden momentum attached: what `RecipeOptimizer` does, shortened.

    `original`: the declared number of float32 temporaries of the original code, one parameter at a time, in place of
    the chain. The original optimizers met experts as matrices of their own.
    """

    def __init__(self, tracker: Tracker, model: nn.Module, recipe: Recipe, *, original: bool) -> None:
        self.last = False  # whether the step that comes is the last one
        from traces.roles import describe_params, named_parameters

        self.tracker, self.recipe = tracker, recipe
        self.temporaries = recipe.temporaries["original"] if original else None
        named = named_parameters(model)
        self._work: list[tuple[nn.Parameter, Stepper]] = []
        self._buffers: dict[nn.Parameter, Stepper] = {}
        for info in describe_params(model):
            parameter = named.get(info.name)
            if info.tied_to is not None or parameter is None or not parameter.requires_grad:
                continue
            stepper = Stepper(recipe, info)
            self._work.append((parameter, stepper))
            for key, tensor in stepper.state.items():
                pinned = key == stepper.buffer_key
                category = "pinned_gradient_bytes" if pinned else "state_bytes"
                tracker.mark([tensor], "step_counter_bytes" if key == STEP else category)
            if stepper.buffer_key is not None:
                self._attach(parameter, stepper)

    def is_pinned(self, parameter: nn.Parameter) -> bool:
        """Whether backward adds onto a buffer that survives."""
        return parameter in self._buffers

    def step(self) -> None:
        """Step one parameter of each kind, if it is the last step."""
        if not self.last:
            return
        seen: set[Any] = set()
        for parameter, stepper in self._work:
            pinned, info = parameter in self._buffers, stepper.info
            gradient = self._buffer(stepper) if pinned else parameter.grad
            kind = _kind(stepper)
            if gradient is None or kind in seen:
                continue
            seen.add(kind)
            self.tracker.place = info.name
            if self.temporaries is not None:
                _hold(info, self.temporaries)
                continue
            weight, gradient, short = _shortened(parameter.detach(), gradient.detach(), stepper)
            short.rng = _DrawnOnce(info.name)
            short.step(weight, gradient, lr=1e-3, gradient_in_buffer=pinned)
        self.tracker.place = ""

    def zero_grad(self) -> None:
        """Drop the gradients; buffers stay."""
        for parameter, _ in self._work:
            parameter.grad = None

    def _buffer(self, stepper: Stepper) -> Tensor:
        assert stepper.buffer_key is not None
        return stepper.layout.restore(stepper.state[stepper.buffer_key])

    def _attach(self, parameter: nn.Parameter, stepper: Stepper) -> None:
        # As toolkit.optim does: the buffer is .grad while autograd accumulates, and the arriving gradient is looked at.
        self._buffers[parameter] = stepper
        arriving: list[Tensor] = []
        if parameter.dtype != torch.float32:
            parameter.grad_dtype = torch.float32

        def before(gradient: Tensor) -> None:
            parameter.grad = self._buffer(stepper)
            arriving.append(gradient.detach())

        def after(_: Tensor) -> None:
            parameter.grad = None
            arriving.clear()

        parameter.register_hook(before)
        parameter.register_post_accumulate_grad_hook(after)


class _DrawnOnce:
    """Random numbers whose making is seen the first time; later ones of the same size are there at once."""

    philox_key = None

    def __init__(self, name: str) -> None:
        self._rng, self._drawn = CounterRng(0, 1, name), set[tuple[str, tuple[int, ...]]]()

    def fork(self, purpose: str) -> _DrawnOnce:
        """Itself."""
        return self

    def uniform(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """float32, as `CounterRng`."""
        return self._draw("uniform", shape, torch.float32)

    def bits16(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """int32, as `CounterRng`."""
        return self._draw("bits16", shape, torch.int32)

    def _draw(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if (kind, shape) in self._drawn:
            return torch.empty(shape, dtype=dtype)
        self._drawn.add((kind, shape))
        return getattr(self._rng, kind)(shape)


def _kind(stepper: Stepper) -> tuple[Any, ...]:
    """What decides the temporaries of a step."""
    info = stepper.info
    return (
        id(stepper.chain),
        info.shape,
        info.strides,
        info.dtype,
        info.expert_axis,
        info.matrix_axes,
        info.expert is None,
    )


def _hold(info: ParamInfo, count: float) -> None:
    # All at once, and gone on return; a fraction is a part of one.
    elements = info.numel // (info.num_experts or 1) if info.expert_axis is not None else info.numel
    whole = [torch.empty(elements, dtype=torch.float32) for _ in range(int(count))]
    whole.append(torch.empty(int(elements * (count - int(count))), dtype=torch.float32))


def _shortened(weight: Tensor, gradient: Tensor, stepper: Stepper) -> tuple[Tensor, Tensor, Stepper]:
    """The first two blocks of a stack of experts that is stepped in blocks; everything else as it is."""
    info, layout = stepper.info, stepper.layout
    each = max(1, BLOCK * layout.experts // max(1, info.numel))
    if not layout.expert_stacked or layout.experts <= 2 * each or any(map(couples_experts, stepper.chain)):
        return weight, gradient, stepper
    axis, count = info.expert_axis, 2 * each
    assert axis is not None
    shape = (*info.shape[:axis], count, *info.shape[axis + 1 :])
    with _disable_current_modes():
        short = Stepper(stepper.recipe, replace(info, shape=shape, num_experts=count, strides=None), device="meta")
    short.state = dict(_first(stepper, count))
    return weight.narrow(axis, 0, count), gradient.narrow(axis, 0, count), short


def _first(stepper: Stepper, count: int) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in stepper.state.items():
        apart = stepper._per_expert.get(key, key == STEP and tensor.dim() == 1)
        yield key, tensor[:count] if apart else tensor
