"""Stages: small transformations of an update, and the chains they form.

A stage acts on the matrices of one parameter, batched over experts. It never touches the weight; the last member of
a chain, the apply stage, alone does. State lives in declared slots, so that memory can be planned from shapes and
every optimizer can be saved, compared and taken apart.

Canonical layout: matrices lie in the last two axes, [.., m, n], m rows being output features; axis 0 enumerates
experts where `Context.expert_stacked`. 1-D parameters stay [n]. Tensors are in the compute dtype (float32, or float64
for float64 parameters).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.stages._rng import CounterRng

Shape = tuple[int, ...]
Home = Literal["state", "grad_buffer"]
Slots = dict[str, "Tensor"]


def same(shape: Shape) -> Shape:
    """A slot as large as the stage's input."""
    return shape


def rows(shape: Shape) -> Shape:
    """One value per row of each matrix: [.., m, n] -> [.., m]."""
    return shape[:-1]


def columns(shape: Shape) -> Shape:
    """One value per column of each matrix: [.., m, n] -> [.., n]."""
    return (*shape[:-2], shape[-1])


@dataclass(frozen=True, slots=True)
class Slot:
    """One declared piece of state.

    `shape` maps the stage's input shape (canonical layout) to the slot's. `home` is `state` (counted as optimizer
    state) or `grad_buffer` (counted as pinned gradient). Slots start at zero.
    """

    name: str
    shape: Callable[[Shape], Shape] = same
    dtype: str = "float32"
    home: Home = "state"


@dataclass(slots=True)
class Context:
    """What a stage may know beside its input.

    `step` is the count of steps this parameter has taken, this one included: an int, or an int64 tensor [E] when
    experts have taken different numbers. `presence` is bool [E] (None: all present); `tokens_per_expert` int64 [E].
    `gradient_in_buffer`: the grad_buffer slot already holds beta * B + g, as it does in a live run.
    """

    weight: Tensor
    lr: float
    step: int | Tensor
    rng: CounterRng
    expert_stacked: bool = False
    presence: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    gradient_in_buffer: bool = False


@dataclass(frozen=True, slots=True)
class Ratio:
    """An update kept as numerator / denominator / divisor, so that the apply stage can fuse the division.

    torch's AdamW ends in addcdiv(numerator, denominator, value=-lr / divisor); multiplying out first is 1.2e-7 off.
    """

    numerator: Tensor
    denominator: Tensor
    divisor: float | Tensor = 1.0

    def direction(self) -> Tensor:
        """The update as one tensor, before lr."""
        return self.numerator / self.denominator / self.divisor

    def multiply_out(self) -> Tensor:
        """`direction`, in the denominator's memory where it is as large; the ratio must not be used again."""
        top, under = self.numerator, self.denominator
        spread = any(stride == 0 and size > 1 for stride, size in zip(under.stride(), under.shape, strict=True))
        if spread or under.shape != top.shape or under.dtype != top.dtype:
            return (top / under).div_(self.divisor)
        import torch

        return torch.div(top, under, out=under).div_(self.divisor)


Update = "Tensor | Ratio"


@dataclass(frozen=True)
class Stage:
    """One transformation: `apply(x, slots, ctx, **options) -> x`.

    `apply` may write to its own slots only. `options` are the bound switches, part of the stage's identity.
    `normalising`: the output's scale does not depend on the input's. `counts_steps`: needs `Context.step`.
    """

    name: str
    apply: Callable[..., Any]
    slots: tuple[Slot, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    normalising: bool = False
    counts_steps: bool = False
    doc: str = ""

    def __call__(self, x: Any, slots: Slots, ctx: Context) -> Any:
        return self.apply(x, slots, ctx, **self.options)

    def with_options(self, **changes: Any) -> Stage:
        """A copy with some switches changed; an unknown switch is an error."""
        for key in changes:
            if key not in self.options:
                raise GradreelError(f"stage {self.name} has no option {key!r}; allowed: {', '.join(self.options)}")
        return replace(self, options={**self.options, **changes})

    def describe(self) -> str:
        """`name(option=value, ..)`, as printed in tables."""
        if not self.options:
            return self.name
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.options.items())})"


@dataclass(frozen=True)
class Chain:
    """Stages in order; the last one is the apply stage. `lr_scale` multiplies the recipe's base lr for this chain."""

    stages: tuple[Stage, ...]
    lr_scale: float = 1.0

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def slots(self) -> list[tuple[str, Slot]]:
        """All slots under their key in the optimizer state: the slot's name, with a suffix where stages share it."""
        seen: dict[str, int] = {}
        keyed = []
        for stage in self.stages:
            for slot in stage.slots:
                seen[slot.name] = seen.get(slot.name, 0) + 1
                keyed.append((slot.name if seen[slot.name] == 1 else f"{slot.name}_{seen[slot.name]}", slot))
        return keyed

    def replace(self, name: str, change: Callable[[Stage], Stage | tuple[Stage, ...]]) -> Chain:
        """A chain in which every stage called `name` became `change(stage)`."""
        stages: list[Stage] = []
        for stage in self.stages:
            new = change(stage) if stage.name == name else stage
            stages.extend(new if isinstance(new, tuple) else (new,))
        return replace(self, stages=tuple(stages))

    def has(self, name: str) -> bool:
        """Whether a stage called `name` is in the chain."""
        return any(stage.name == name for stage in self.stages)

    @property
    def counts_steps(self) -> bool:
        """Whether a step counter is kept beside the slots."""
        return any(stage.counts_steps for stage in self.stages)

    def describe(self) -> str:
        """`ema(beta=0.9) -> sr_sinkhorn(sweeps=5) -> apply(..)`."""
        return " -> ".join(stage.describe() for stage in self.stages)


def chain(*stages: Stage, lr_scale: float = 1.0) -> Chain:
    """Join stages; the last one must be the apply stage."""
    if not stages or stages[-1].name != "apply" or any(s.name == "apply" for s in stages[:-1]):
        raise GradreelError("a chain ends in exactly one apply stage")
    return Chain(tuple(stages), lr_scale)


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only switches of a stage function with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
