"""The peak of a whole training step, tracked storage by storage under fake tensors: nothing is allocated.

Forward, backward and optimizer step run as they are, on tensors that have shapes and no memory. Each storage that an
operation makes is counted from the operation on until nothing refers to it, as an allocator would.

What a fake tensor cannot tell is given: tokens spread evenly over experts (as many bytes in all as any routing that
drops nothing), and a number read from a tensor is 1.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from traces.errors import GradreelError

if TYPE_CHECKING:
    from toolkit.recipes import Recipe

#: What a storage that is alive at the peak is for; the names are those of a plan.
ALIVE = (
    "weight_bytes",
    "gradient_bytes",
    "pinned_gradient_bytes",
    "state_bytes",
    "step_counter_bytes",
    "activation_bytes",
    "temporary_bytes",
)
#: The caching allocator of CUDA gives out multiples of this.
BLOCK_BYTES = 512
PHASES = ("build", "forward", "backward", "step")


@dataclass(frozen=True)
class PhasePeak:
    """The most that was alive within one phase of one step.

    `bytes` counts tensors as they are, `rounded_bytes` each storage rounded up to 512 bytes. `module` is the module at
    work (forward), the parameter whose gradient came last (backward) or the parameter stepped (our own step); `op` and
    `shape` are those of the tensor whose making reached the peak. `alive`: (category, bytes), largest first.
    """

    step: int
    phase: str
    bytes: int
    rounded_bytes: int
    alive: tuple[tuple[str, int], ...]
    module: str
    op: str
    shape: tuple[int, ...]

    @property
    def where(self) -> str:
        """One line: phase, operation, place."""
        place = f" at {self.module}" if self.module else ""
        return f"{self.phase} of step {self.step}: {self.op} {list(self.shape)}{place}"


@dataclass(frozen=True)
class TrackedPeak:
    """The peak of a tracked run, and the peak of each phase of each step, in the order they came."""

    peak: PhasePeak
    phases: tuple[PhasePeak, ...]
    assumptions: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of tensors alive at the peak."""
        return self.peak.bytes

    @property
    def rounded_bytes(self) -> int:
        """The same with every storage rounded up to the 512 bytes that CUDA's allocator gives out."""
        return max(p.rounded_bytes for p in self.phases)

    @property
    def where(self) -> str:
        """Where the peak was, one line."""
        return self.peak.where

    @property
    def alive(self) -> tuple[tuple[str, int], ...]:
        """What was alive at the peak: (category, bytes), largest first."""
        return self.peak.alive

    def bytes_of(self, category: str) -> int:
        """Bytes of one category at the peak."""
        return dict(self.alive).get(category, 0)

    def of_phase(self, phase: str) -> PhasePeak:
        """The highest peak of a phase over all steps."""
        found = [p for p in self.phases if p.phase == phase]
        if not found:
            raise GradreelError(f"no phase {phase!r} was tracked; allowed: {', '.join(dict.fromkeys(PHASES))}")
        return max(found, key=lambda p: p.bytes)

    def lines(self) -> list[str]:
        """Plain text: the peak, where, what was alive, and each phase's own peak."""
        rows = [f"tracked peak {_both(self.bytes)} ({_both(self.rounded_bytes)} in blocks of {BLOCK_BYTES} B)"]
        rows += [f"  in {self.where}"]
        rows += [f"  {name.removesuffix('_bytes').replace('_', ' '):<16} {_both(size)}" for name, size in self.alive]
        rows += [f"  peak of {p.phase}, step {p.step}: {_both(p.bytes)}" for p in self.phases if p.phase != "build"]
        return [*rows, *(f"  {text}" for text in self.assumptions)]


def _both(size: int) -> str:
    return f"{size / 2**30:,.3f} GiB ({size / 10**9:,.3f} GB)"


class Tracker(TorchDispatchMode):
    """Counts the storages alive under it, by category. Enter it inside a `FakeTensorMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.phase, self.place = 0, "build", ""
        self.live = dict.fromkeys(ALIVE, 0)
        self.total = self.rounded = 0
        self.peaks: dict[tuple[int, str], PhasePeak] = {}
        self._top: dict[tuple[int, str], list[int]] = {}
        self._storages: dict[int, list[Any]] = {}  # address of a storage: category, bytes, weak reference

    def begin(self, phase: str, step: int | None = None) -> None:
        """What is made from now on belongs to `phase`."""
        self.phase, self.step, self.place = phase, self.step if step is None else step, ""
        self._top.setdefault((self.step, phase), [0, 0])
        self._look("", ())

    def mark(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Count the storages of `tensors` under `category` from now on."""
        for tensor in tensors:
            if tensor is None or not isinstance(tensor, FakeTensor):
                continue
            self._count(tensor)
            entry = self._storages[tensor.untyped_storage()._cdata]
            self.live[entry[0]] -= entry[1]
            self.live[category] += entry[1]
            entry[0] = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _one(args[0])
        if func is torch.ops.aten.bincount.default:
            return _even_counts(args[0], kwargs.get("minlength", args[2] if len(args) > 2 else 0))
        result = func(*args, **kwargs)
        made: Any = result if isinstance(result, (list, tuple)) else (result,)
        for tensor in made:
            if isinstance(tensor, FakeTensor) and self._count(tensor):
                self._look(func, tensor.shape)
        return result

    def _count(self, tensor: Tensor) -> bool:
        # True where the storage was not known.
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages:
            return False
        size = storage.nbytes()
        category = {"forward": "activation_bytes", "build": "weight_bytes"}.get(self.phase, "temporary_bytes")

        def gone(_: Any) -> None:
            name, freed, _ref = self._storages.pop(address)
            self.live[name] -= freed
            self.total -= freed
            self.rounded -= _in_blocks(freed)

        self._storages[address] = [category, size, weakref.ref(storage, gone)]
        self.live[category] += size
        self.total += size
        self.rounded += _in_blocks(size)
        return size > 0

    def _look(self, func: Any, shape: Any) -> None:
        key = (self.step, self.phase)
        top = self._top.setdefault(key, [0, 0])
        top[1] = max(top[1], self.rounded)
        if self.total > top[0]:
            top[0] = self.total
            self.peaks[key] = PhasePeak(
                self.step, self.phase, self.total, 0, tuple(self.live.items()), self.place, str(func), tuple(shape)
            )

    def phase_peaks(self) -> tuple[PhasePeak, ...]:
        """Each phase's peak, in the order the phases began."""
        peaks = []
        for key, peak in self.peaks.items():
            alive = tuple(sorted(((c, b) for c, b in peak.alive if b), key=lambda each: -each[1]))
            op = peak.op.removesuffix(".default") or "begin"
            peaks.append(
                PhasePeak(peak.step, peak.phase, peak.bytes, self._top[key][1], alive, peak.module, op, peak.shape)
            )
        return tuple(peaks)


def _in_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _one(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _even_counts(ids: Tensor, bins: int) -> Tensor:
    with _disable_current_modes():
        counts = torch.full((bins,), ids.numel() // max(1, bins))
        counts[: ids.numel() % max(1, bins)] += 1
        return counts


@contextlib.contextmanager
def _places(tracker: Tracker, model: nn.Module) -> Iterator[None]:
    """Keep `tracker.place` at the innermost module whose forward is running."""
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        stack.append(tracker.place)
        tracker.place = names.get(module, tracker.place)

    def leave(module: nn.Module, *_: Any) -> None:
        tracker.place = stack.pop() if stack else ""

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tracked_peak(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    optimizer: Callable[[nn.Module], Any] | None = None,
    step: str = "ours",
    batch: int = 1,
    sequence: int = 2048,
    micro_steps: int = 1,
    steps: int = 2,
    checkpointing: str = "none",
    make_batch: Callable[[], dict[str, Any]] | None = None,
    clip: float | None = None,
) -> TrackedPeak:
    """Track `steps` training steps of `model` and return the peak. Nothing of the model's size is allocated.

    `model`: a module (on the meta device or real: it is copied, not touched), a function that builds one, a config or
    a registered name. `recipe`: a name or a Recipe; `step` "ours" runs this project's step, "original" the declared
    number of parameter-sized temporaries of the original code. Instead `optimizer(model)` gives any object with
    `step()` and `zero_grad()`, such as a `torch.optim.Optimizer`. With neither there is no step.

    A step is `micro_steps` times forward and backward on `batch` x `sequence` token ids, clipping of the norm to
    `clip` (None: none), the optimizer's step, `zero_grad(set_to_none=True)`. Outputs stay alive until the next forward
    has made its own, as in a plain loop. `make_batch()` replaces the token ids; the loss is the output's `.loss`.
    State exists from the second step on. `checkpointing`: "none" or "full" (Hugging Face models).

    Not counted: what a kernel allocates inside one operation, cuBLAS workspaces, fragmentation.
    Errors: GradreelError for a model without `.loss`, and for what cannot run on fake tensors.
    """
    from toolkit.memory._fake_steps import build_fake, make_step, token_batch

    if checkpointing not in ("none", "full"):
        raise GradreelError(f"checkpointing is {checkpointing!r}; allowed under tracking: none, full")
    if recipe is not None and optimizer is not None:
        raise GradreelError("tracked_peak got a recipe and an optimizer; give one of them")
    tracker = Tracker()
    with FakeTensorMode(allow_non_fake_inputs=True), tracker:
        built, notes = build_fake(model, checkpointing)
        tracker.mark([*built.parameters(), *built.buffers()], "weight_bytes")
        parameters = {name: p for name, p in built.named_parameters() if p.requires_grad}
        stepper = make_step(tracker, built, recipe, optimizer, step)
        handles = [_follow(tracker, name, p, stepper) for name, p in parameters.items()]
        batches = make_batch or (lambda: token_batch(batch, sequence))
        out: Any = None
        with _places(tracker, built):
            for number in range(1, steps + 1):
                for _ in range(micro_steps):
                    tracker.begin("forward", number)
                    out = built(**batches())
                    loss = getattr(out, "loss", None)
                    if not isinstance(loss, Tensor):
                        raise GradreelError(
                            f"{type(built).__name__} gave an output without a loss; give a make_batch with labels"
                        )
                    tracker.begin("backward")
                    (loss / micro_steps if micro_steps > 1 else loss).backward()
                    del loss
                tracker.begin("step")
                if clip is not None:
                    nn.utils.clip_grad_norm_(list(parameters.values()), clip)
                if stepper is not None:
                    stepper.last = number == steps
                    stepper.step()
                    stepper.zero_grad()
        for handle in handles:
            handle.remove()
        del out
    phases = tracker.phase_peaks()
    return TrackedPeak(max(phases, key=lambda p: p.bytes), phases, tuple(notes))


def _follow(tracker: Tracker, name: str, parameter: nn.Parameter, stepper: Any) -> Any:
    pinned = stepper is not None and stepper.is_pinned(parameter)

    def arrived(p: Tensor) -> None:
        if not pinned:
            tracker.mark([p.grad], "gradient_bytes")
        tracker.place = name

    return parameter.register_post_accumulate_grad_hook(arrived)
