"""Everything the gradient metrics need, from one read of a gradient (and one of the gradient before it).

Legend: E experts (1 where there is no expert axis), S elements per expert.

All sums are float64 and run over finite elements; how many were not finite is counted beside them, so that a caller
can call a value undefined instead of wrong. A sign flip is a pair of finite non-zero elements of opposite sign; its
support is the number of pairs of finite non-zero elements.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from toolkit.kernels._dispatch import choose
from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor

OP = "step_statistics"
BUILT = ("reference", "eager", "cpu")
_CHUNK_ELEMENTS = 1 << 20


@dataclass(slots=True)
class StepStatistics:
    """One value per expert, [E]. Sums and the maximum are float64, counts int64, on the gradient's device.

    Of the gradient: `sum`, `sum_squares`, `sum_abs`, `max_abs`, and the counts `zeros` and `nonfinite`. Of its pair
    with the previous one: `dot`; `dot_squares` and `previous_squares`, the squared norms of both over the elements
    finite in both, so that cosine = dot / sqrt(dot_squares * previous_squares); `sign_flips` and `sign_support`.
    None without a previous one.
    """

    backend: str
    elements: int
    sum: Tensor
    sum_squares: Tensor
    sum_abs: Tensor
    max_abs: Tensor
    zeros: Tensor
    nonfinite: Tensor
    dot: Tensor | None = None
    dot_squares: Tensor | None = None
    previous_squares: Tensor | None = None
    sign_flips: Tensor | None = None
    sign_support: Tensor | None = None

    def as_dict(self) -> dict[str, Tensor]:
        """The tensors by name, those that exist."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("backend", "elements")}
        return {name: value for name, value in values.items() if value is not None}


ALONE = ("sum", "sum_squares", "sum_abs", "max_abs", "zeros", "nonfinite")
PAIRED = ("dot", "dot_squares", "previous_squares", "sign_flips", "sign_support")
COUNTS = ("zeros", "nonfinite", "sign_flips", "sign_support")


def step_statistics(
    gradient: Tensor, previous: Tensor | None = None, *, expert_axis: int | None = None, backend: str | None = None
) -> StepStatistics:
    """Statistics of `gradient`, per slice of `expert_axis` (None: of the whole), and of its pair with `previous`.

    Any floating dtype and layout; `previous` has the same shape and device. `backend`: reference (Python floats, for
    tests), eager, cpu, or None. Errors: shapes that differ, an axis out of range, an unknown or unable backend.
    """
    chosen = choose(OP, gradient, backend, BUILT)
    if previous is not None and (previous.shape != gradient.shape or previous.device != gradient.device):
        raise GradreelError(
            f"{OP}: gradient is {tuple(gradient.shape)} on {gradient.device}, previous {tuple(previous.shape)} on "
            f"{previous.device}; give two of the same shape and place"
        )
    if expert_axis is not None and not -gradient.dim() <= expert_axis < gradient.dim():
        raise GradreelError(f"{OP}: expert_axis {expert_axis} of a tensor of shape {tuple(gradient.shape)}")
    if chosen == "cpu" and previous is not None and previous.dtype != gradient.dtype:
        previous = previous.to(gradient.dtype)
    g = _slices(gradient.detach(), expert_axis)
    p = None if previous is None else _slices(previous.detach(), expert_axis)
    if chosen == "cpu":
        from toolkit.kernels import step_statistics_cpu

        values = step_statistics_cpu.run(g, p)
    else:
        values = _reference(g, p) if chosen == "reference" else _eager(g, p)
    return StepStatistics(backend=chosen, elements=g.shape[1], **values)


def _slices(x: Tensor, expert_axis: int | None) -> Tensor:
    if expert_axis is None:
        return x.reshape(1, -1)
    x = x.movedim(expert_axis, 0)
    return x.reshape(len(x), -1) if x.numel() else x.new_empty((len(x), 0))


def _eager(g: Tensor, p: Tensor | None) -> dict[str, Tensor]:
    import torch

    names = ALONE if p is None else ALONE + PAIRED
    out = {
        name: torch.zeros(len(g), dtype=torch.int64 if name in COUNTS else torch.float64, device=g.device)
        for name in names
    }
    # Two axes of chunks, so that the float64 copy stays small however large one expert or their number is.
    width = max(1, min(g.shape[1], _CHUNK_ELEMENTS))
    height = max(1, _CHUNK_ELEMENTS // width)
    for i in range(0, len(g), height):
        for j in range(0, g.shape[1], width):
            here = (slice(i, i + height), slice(j, j + width))
            _add_chunk({name: value[here[0]] for name, value in out.items()}, g[here], None if p is None else p[here])
    return out


def _add_chunk(out: dict[str, Tensor], g: Tensor, p: Tensor | None) -> None:
    import torch

    x = g.double()
    finite = torch.isfinite(x)
    x = torch.where(finite, x, 0.0)
    out["sum"] += x.sum(1)
    out["sum_squares"] += x.square().sum(1)
    out["sum_abs"] += x.abs().sum(1)
    out["max_abs"].copy_(torch.maximum(out["max_abs"], x.abs().amax(1)))
    out["zeros"] += (g == 0).sum(1)
    out["nonfinite"] += (~finite).sum(1)
    if p is None:
        return
    y = p.double()
    finite &= torch.isfinite(y)
    x, y = torch.where(finite, x, 0.0), torch.where(finite, y, 0.0)
    out["dot"] += (x * y).sum(1)
    out["dot_squares"] += x.square().sum(1)
    out["previous_squares"] += y.square().sum(1)
    out["sign_flips"] += (x.sign() * y.sign() < 0).sum(1)
    out["sign_support"] += ((x != 0) & (y != 0)).sum(1)


def _reference(g: Tensor, p: Tensor | None) -> dict[str, Tensor]:
    import math

    import torch

    columns: dict[str, list[Any]] = {name: [] for name in (ALONE if p is None else ALONE + PAIRED)}
    for e in range(len(g)):
        x = g[e].double().tolist()
        finite = [a for a in x if math.isfinite(a)]
        columns["sum"].append(math.fsum(finite))
        columns["sum_squares"].append(math.fsum(a * a for a in finite))
        columns["sum_abs"].append(math.fsum(abs(a) for a in finite))
        columns["max_abs"].append(max((abs(a) for a in finite), default=0.0))
        columns["zeros"].append(sum(a == 0 for a in x))
        columns["nonfinite"].append(len(x) - len(finite))
        if p is None:
            continue
        pairs = [(a, b) for a, b in zip(x, p[e].double().tolist(), strict=True) if math.isfinite(a + b)]
        signed = [(a, b) for a, b in pairs if a != 0 and b != 0]
        columns["dot"].append(math.fsum(a * b for a, b in pairs))
        columns["dot_squares"].append(math.fsum(a * a for a, _ in pairs))
        columns["previous_squares"].append(math.fsum(b * b for _, b in pairs))
        columns["sign_flips"].append(sum((a < 0) != (b < 0) for a, b in signed))
        columns["sign_support"].append(len(signed))
    return {
        name: torch.tensor(values, dtype=torch.int64 if name in COUNTS else torch.float64, device=g.device)
        for name, values in columns.items()
    }
