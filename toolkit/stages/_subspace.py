"""`subspace(projector, inner)`: let stages work on a projection of every matrix (GaLore).

The projected tensor R is what the inner stages see; their result is lifted back. The basis is a slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from toolkit.stages._shapes import direction
from toolkit.stages._stage import Chain, Context, Ratio, Shape, Slot, Slots, Stage
from toolkit.stages._within import slots_of_stages

SIDES = ("smaller", "both")


@dataclass(frozen=True)
class Projector:
    """Leading singular vectors of the gradient, taken at step 1 and then every `refresh` steps (0: never again).

    "smaller" projects the shorter axis (GaLore, arXiv 2403.03507): R = P^T G is [r, n] for m <= n, G Q is [m, r]
    otherwise. "both" projects both (the SkewAdam study's form): R = U^T G V is [r, r]. r is at most min(m, n).
    """

    rank: int = 128
    refresh: int = 200
    side: str = "smaller"

    def _rank(self, shape: Shape) -> int:
        return min(self.rank, *shape[-2:])

    def _sides(self, shape: Shape) -> tuple[bool, bool]:
        both, left = self.side == "both", shape[-2] <= shape[-1]
        return both or left, both or not left

    def shape(self, shape: Shape) -> Shape:
        """Shape of the projection."""
        left, right = self._sides(shape)
        rank = self._rank(shape)
        return (*shape[:-2], rank if left else shape[-2], rank if right else shape[-1])

    def left_shape(self, shape: Shape) -> Shape:
        """Shape of the basis of rows, [.., m, r], [.., m, 0] where there is none."""
        return (*shape[:-1], self._rank(shape) if self._sides(shape)[0] else 0)

    def right_shape(self, shape: Shape) -> Shape:
        """Shape of the basis of columns, [.., n, r], [.., n, 0] where there is none."""
        return (*shape[:-2], shape[-1], self._rank(shape) if self._sides(shape)[1] else 0)

    def renew(self, x: Tensor, slots: Slots, step: int | Tensor) -> None:
        """Take new bases where it is time. A non-finite matrix gives a NaN basis, and disturbs no other."""
        due = _due(step, self.refresh)
        if isinstance(due, Tensor):
            ids = due.nonzero().flatten()
            if ids.numel():
                part = {key: slots[key].index_select(0, ids) for key in ("row_basis", "column_basis")}
                self._take(x.index_select(0, ids), part)
                for key, basis in part.items():
                    slots[key].index_copy_(0, ids, basis)
        elif due:
            self._take(x, slots)

    def _take(self, x: Tensor, slots: Slots) -> None:
        finite = torch.isfinite(x).all(-1).all(-1)[..., None, None]
        u, _, vh = torch.linalg.svd(torch.where(finite, x, 0.0), full_matrices=False)
        for key, vectors in (("row_basis", u), ("column_basis", vh.mT)):
            width = slots[key].shape[-1]
            slots[key].copy_(torch.where(finite, vectors[..., :width], torch.nan))

    def down(self, x: Tensor, slots: Slots) -> Tensor:
        """The projection of x."""
        left, right = self._sides(tuple(x.shape))
        x = slots["row_basis"].mT @ x if left else x
        return x @ slots["column_basis"] if right else x

    def up(self, projected: Tensor, slots: Slots, shape: Shape) -> Tensor:
        """Back to the full space."""
        left, right = self._sides(shape)
        projected = slots["row_basis"] @ projected if left else projected
        return projected @ slots["column_basis"].mT if right else projected


def _due(step: int | Tensor, refresh: int) -> bool | Tensor:
    return (step == 1) if not refresh else ((step - 1) % refresh == 0)


def _run(
    x: Tensor | Ratio, slots: Slots, ctx: Context, *, projector: Projector, inner: tuple[Stage, ...], scale: float
) -> Tensor:
    full = direction(x)
    projector.renew(full, slots, ctx.step)
    y: Any = projector.down(full, slots)
    inside = replace(ctx, weight=y)
    keys = [key for key, _ in Chain(inner).slots()]
    for stage, mine in zip(inner, slots_of_stages(inner, keys, slots), strict=True):
        y = stage(y, mine, inside)
    return projector.up(direction(y), slots, tuple(full.shape)).mul_(scale)


class Subspace(Stage):
    """The stage `subspace` makes."""

    def describe(self) -> str:
        """The projector and the stages inside."""
        inner = " -> ".join(stage.describe() for stage in self.options["inner"])
        p = self.options["projector"]
        return f"subspace(rank={p.rank}, refresh={p.refresh}, side={p.side}, scale={self.options['scale']}: {inner})"


def subspace(projector: Projector, *inner: Stage, scale: float = 1.0) -> Stage:
    """A stage that runs `inner` on the projection and multiplies the lifted result by `scale`."""

    def through(slot: Slot, key: str) -> Slot:
        return replace(slot, name=key, shape=lambda given: slot.shape(projector.shape(given)))

    return Subspace(
        name="subspace",
        apply=_run,
        slots=(
            Slot("row_basis", projector.left_shape),
            Slot("column_basis", projector.right_shape),
            *(through(slot, key) for key, slot in Chain(inner).slots()),
        ),
        options={"projector": projector, "inner": inner, "scale": scale},
        normalising=any(stage.normalising for stage in inner),
        counts_steps=True,
        doc="Let stages work on a projection of every matrix.",
    )
