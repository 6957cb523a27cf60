"""`within(view, inner)`: let stages work on another grouping of the same elements.

A view turns [.., m, n] into another canonical tensor and back. It is how an optimizer's grouping is ablated: all
experts as one tall matrix, gate and up apart, transposed, in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from toolkit.stages._shapes import gradient_of
from toolkit.stages._stage import Chain, Context, Ratio, Shape, Slot, Slots, Stage
from traces.errors import GradreelError


@dataclass(frozen=True)
class View:
    """A regrouping. `forward(x, ctx)` gives the regrouped tensor, `backward(y, shape)` undoes it.

    `shape` maps shapes as `forward` maps tensors. `joins_experts`: the result has no expert axis any more.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Shape], Tensor]
    shape: Callable[[Shape], Shape]
    joins_experts: bool = False


def _identity(x: Tensor, *_: Any) -> Tensor:
    return x


def per_expert() -> View:
    """Every matrix on its own: what a recipe does unless told otherwise."""
    return View("per_expert", _identity, _identity, lambda shape: shape)


def stacked() -> View:
    """[E, m, n] as one matrix of E*m rows (and [m, n] as itself)."""

    def shape(given: Shape) -> Shape:
        tall = 1
        for size in given[:-1]:
            tall *= size
        return (tall, given[-1])

    return View("stacked", lambda x: x.reshape(shape(tuple(x.shape))), lambda y, s: y.reshape(s), shape, True)


def transposed() -> View:
    """Rows as columns and columns as rows."""
    return View(
        "transposed",
        lambda x: x.transpose(-2, -1),
        lambda y, s: y.transpose(-2, -1),
        lambda s: (*s[:-2], s[-1], s[-2]),
    )


def row_blocks(rows: int) -> View:
    """Blocks of `rows` rows, each a matrix: [.., m, n] -> [.., m / rows, rows, n]."""
    if rows < 1:
        raise GradreelError(f"row_blocks is {rows}; allowed: whole numbers of at least 1")

    def shape(given: Shape) -> Shape:
        if given[-2] % rows:
            raise GradreelError(f"row_blocks({rows}) does not divide the {given[-2]} rows of shape {given}")
        return (*given[:-2], given[-2] // rows, rows, given[-1])

    return View(f"row_blocks({rows})", lambda x: x.reshape(shape(tuple(x.shape))), lambda y, s: y.reshape(s), shape)


def gate_up_split() -> View:
    """The upper half of the rows (gate) and the lower half (up) as two matrices: [.., 2F, n] -> [.., 2, F, n]."""

    def shape(given: Shape) -> Shape:
        if given[-2] % 2:
            raise GradreelError(f"gate_up_split needs an even number of rows, got shape {given}")
        return (*given[:-2], 2, given[-2] // 2, given[-1])

    return View("gate_up_split", lambda x: x.reshape(shape(tuple(x.shape))), lambda y, s: y.reshape(s), shape)


def _run(x: Tensor | Ratio, slots: Slots, ctx: Context, *, view: View, inner: tuple[Stage, ...]) -> Any:
    shape = tuple(gradient_of(x).shape)
    inside = replace(ctx, expert_stacked=False, presence=None, tokens_per_expert=None) if view.joins_experts else ctx
    if isinstance(x, Ratio):
        expand = x.denominator.expand(shape)
        y: Any = Ratio(view.forward(x.numerator), view.forward(expand), x.divisor)
    else:
        y = view.forward(x)
    keys = Chain(inner).slots()
    for stage, mine in zip(inner, slots_of_stages(inner, [key for key, _ in keys], slots), strict=True):
        y = stage(y, mine, inside)
    if isinstance(y, Ratio):
        full = view.shape(shape)
        return Ratio(view.backward(y.numerator, shape), view.backward(y.denominator.expand(full), shape), y.divisor)
    return view.backward(y, shape)


def slots_of_stages(stages: tuple[Stage, ...], keys: list[str], slots: Slots) -> list[Slots]:
    """For each stage its own slots under their own names; `keys` are the keys of all slots in order."""
    remaining = iter(keys)
    return [{slot.name: slots[next(remaining)] for slot in stage.slots} for stage in stages]


def _through(view: View, slot: Slot, key: str) -> Slot:
    def shape(given: Shape) -> Shape:
        return slot.shape(view.shape(given))

    return replace(slot, name=key, shape=shape)


class Within(Stage):
    """The stage `within` makes; prints as `within(stacked: sr_sinkhorn(sweeps=5))`."""

    def describe(self) -> str:
        """The view and the stages inside."""
        return f"within({self.options['view'].name}: {' -> '.join(s.describe() for s in self.options['inner'])})"


def within(view: View, *inner: Stage) -> Stage:
    """A stage that runs `inner` on the view. Its slots are the inner ones, in the view's shapes."""
    if view.joins_experts and any(stage.counts_steps for stage in inner):
        raise GradreelError(f"within({view.name}): {', '.join(s.name for s in inner)} counts steps per expert")
    return Within(
        name="within",
        apply=_run,
        slots=tuple(_through(view, slot, key) for key, slot in Chain(inner).slots()),
        options={"view": view, "inner": inner},
        normalising=any(stage.normalising for stage in inner),
        counts_steps=any(stage.counts_steps for stage in inner),
        doc="Let stages work on another grouping of the same elements.",
    )
