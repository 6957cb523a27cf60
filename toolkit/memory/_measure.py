"""The categories of a plan, read from a live run: bytes of tensors exactly, and what the process or device holds.

Categories are storages counted once: weights with buffers, gradients, pinned gradients, optimizer state, step counters.
What lies between their sum and the peak (activations, temporaries, the interpreter) has no owner that could be asked;
on CUDA the allocator tells its own peak for each phase, on a CPU the resident memory of the process stands in for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from toolkit.memory._plan import MemoryPlan

#: What is read exactly, in the words of a plan.
EXACT = ("weight_bytes", "gradient_bytes", "state_bytes", "pinned_gradient_bytes", "step_counter_bytes")
_COUNTER = "step"


@dataclass(frozen=True)
class Reading:
    """One moment of a run. `bytes` maps `EXACT` to bytes; `held_bytes` is resident memory (CPU) or what the allocator
    has given out (CUDA), `peak_bytes` the most of it since the meter began."""

    bytes: dict[str, int]
    held_bytes: int
    peak_bytes: int
    device: str = "cpu"


@dataclass
class Measured:
    """What a `Meter` saw. Gradients are those that the last optimizer step met, all else what was there after it;
    `batch`, `sequence` and `micro_steps` are that step's, for a plan to stand beside. Peaks are over all steps."""

    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EXACT, 0))
    began_bytes: int = 0
    peak_bytes: int = 0
    phase_peaks: dict[str, int] = field(default_factory=dict)
    device: str = "cpu"
    steps: int = 0
    batch: int = 0
    sequence: int = 0
    micro_steps: int = 0

    def rows(self, plan: MemoryPlan | None = None) -> list[tuple[str, int, int | None]]:
        """(category, measured bytes, planned bytes or None): the exact ones, their sum, and the peak."""
        found = [(name, self.bytes[name], None if plan is None else plan.bytes_of(name)) for name in EXACT]
        total = sum(self.bytes.values())
        kept = None if plan is None else sum(plan.bytes_of(name) for name in EXACT)
        grown = self.peak_bytes - (self.began_bytes if self.device == "cpu" else 0)
        return [*found, ("all of these", total, kept), ("peak_bytes", grown, None if plan is None else plan.peak_bytes)]

    def lines(self, plan: MemoryPlan | None = None) -> list[str]:
        """A plain table: measured, planned, difference; in bytes and GiB."""
        lines = [f"{'':<18}{'measured B':>20}{'GiB':>10}{'planned B':>20}{'difference B':>18}{'%':>9}"]
        for name, size, planned in self.rows(plan):
            text = f"{name.removesuffix('_bytes').replace('_', ' '):<18}{size:>20,}{size / 2**30:>10.3f}"
            if planned is not None:
                text += f"{planned:>20,}{size - planned:>18,}{_percent(size, planned):>9}"
            lines.append(text)
        if self.device == "cpu":
            lines.append(
                f"The peak is that of resident memory, less the {self.began_bytes:,} B before the first forward: it "
                "holds what libraries and the allocator keep as well."
            )
        else:
            lines += [f"peak of {phase} by the allocator: {size:,} B" for phase, size in self.phase_peaks.items()]
        return lines


def _percent(size: int, planned: int) -> str:
    return f"{100 * (size / planned - 1):+.1f}" if planned else "" if size else "+0.0"


def measure(model: nn.Module, optimizer: Any = None) -> Reading:
    """Read the bytes of every category now: `model`'s weights and gradients, and what `optimizer` keeps.

    Gradients are there between backward and `zero_grad`, state after the first step. Errors: GradreelError for a
    `model` that is no module.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise GradreelError(f"measure got {type(model).__name__}; allowed: a torch.nn.Module, and its optimizer")
    parameters = list(model.parameters())
    optimizers = [] if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    pinned = [t for one in optimizers for t in _pinned(one)]
    owned = {_address(t) for t in pinned}
    state: list[Tensor] = []
    counters: list[Tensor] = []
    for one in optimizers:
        for values in one.state.values():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and _address(value) not in owned:
                    (counters if key == _COUNTER else state).append(value)
    gradients = [p.grad for p in parameters if p.grad is not None and _address(p.grad) not in owned]
    found = dict(
        zip(EXACT, map(_bytes, ([*parameters, *model.buffers()], gradients, state, pinned, counters)), strict=True)
    )
    device = next((p.device for p in parameters if p.device.type == "cuda"), None)
    if device is not None:
        held, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return Reading(found, held, most, str(device))
    return Reading(found, resident_bytes(), peak_resident_bytes())


def _pinned(optimizer: Any) -> list[Tensor]:
    """Gradient buffers of hidden momentum that an optimizer of this project holds."""
    keys = ((stepper.state, stepper.buffer_key) for stepper in getattr(optimizer, "_steppers", {}).values())
    return [state[key] for state, key in keys if key is not None]


def _address(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())


def _bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors, each storage once; of a distributed tensor this rank's part."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        size = local.untyped_storage().nbytes()
        if size:
            seen[_address(local)] = size
    return sum(seen.values())


def resident_bytes() -> int:
    """Resident memory of this process now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The largest resident memory this process had; 0 where the system does not say."""
    import sys

    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Meter:
    """Measures a training run through process-wide hooks, from the first training forward on.

    with Meter() as meter: train(..)  # unchanged
    meter.measured.lines(plan)

    `model` is the outermost module that trains, `optimizer` the one that steps; both are None until they showed
    themselves. `told` is called with the meter after every step.
    """

    def __init__(self, told: Callable[[Meter], None] | None = None) -> None:
        self.measured = Measured()
        self.model: nn.Module | None = None
        self.optimizer: Any = None
        self._told = told
        self._handles: list[Any] = []
        self._forwards = 0

    def __enter__(self) -> Meter:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._handles = [
            register_module_forward_pre_hook(self._on_forward),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def require(self) -> Measured:
        """What was measured; GradreelError where no optimizer step was seen."""
        if not self.measured.steps:
            raise GradreelError(
                "no optimizer step of a training model was seen, nothing was measured; run a script that trains a "
                "torch.nn.Module with a torch.optim.Optimizer"
            )
        return self.measured

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        import torch

        if self.model is None:
            if not module.training or not torch.is_grad_enabled() or not any(True for _ in module.parameters()):
                return
            self.model = module
            self.measured.began_bytes = resident_bytes() - _bytes([*module.parameters(), *module.buffers()])
            self._restart()
        if module is self.model and module.training and torch.is_grad_enabled():
            self._forwards += 1
            self._shape(args)

    def _shape(self, args: Any) -> None:
        import sys

        import torch

        # A process-wide hook is not given the keyword arguments; they are read from the caller.
        kwargs = sys._getframe(2).f_locals.get("kwargs")
        given = [*args, *(kwargs.values() if isinstance(kwargs, dict) else ())]
        ids = next(
            (t for t in given if isinstance(t, torch.Tensor) and t.dim() == 2 and not t.is_floating_point()), None
        )
        if ids is not None:
            self.measured.batch, self.measured.sequence = int(ids.shape[0]), int(ids.shape[1])

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if self.model is not None:
            self.optimizer = optimizer
            self._read("forward and backward")

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self.model is None or optimizer is not self.optimizer:
            return
        self._read("step")
        self.measured.steps += 1
        self.measured.micro_steps, self._forwards = max(1, self._forwards), 0
        if self._told is not None:
            self._told(self)

    def _read(self, phase: str) -> None:
        reading, measured = measure(self._model, self.optimizer), self.measured
        for name, size in reading.bytes.items():
            if (name == "gradient_bytes") == (phase != "step"):
                measured.bytes[name] = size
        measured.device = reading.device
        measured.peak_bytes = max(measured.peak_bytes, reading.peak_bytes, reading.held_bytes)
        measured.phase_peaks[phase] = max(measured.phase_peaks.get(phase, 0), reading.peak_bytes)
        self._restart()

    @property
    def _model(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def _restart(self) -> None:
        # So that each phase has a peak of its own on CUDA; resident memory has but one.
        import torch

        if torch.cuda.is_available() and any(p.is_cuda for p in self._model.parameters()):
            torch.cuda.reset_peak_memory_stats()
