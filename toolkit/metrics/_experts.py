"""Per-expert reductions over the tensors of a view.

Legend: E experts of the parameter (1 without an expert axis), e recorded experts, L elements per expert.

Everything here comes back as float64 numpy [E] with one convention: NaN where there is nothing to say (the expert or
the tensor was not recorded), +inf where the data held NaN or Inf. The engine writes both as null and flags the second
as `nonfinite`, so that a broken expert is told from an idle one and touches no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.metrics import _sums_cpu
from traces.views import NONE, NONZERO, ZERO, ParamInfo, StepView

#: Elements converted to float64 at a time (32 MiB); smaller tensors are converted once per view and kept.
PIECE = 1 << 22
_FIELDS = tuple(f.name for f in fields(StepView))


class SharedView(StepView):
    """A view that remembers what was computed from it, so that ten metrics convert a gradient once.

    `gradient_memo` outlives the recipes of one step: what depends on the gradient alone is computed once for all.
    """

    __slots__ = ("gradient_memo", "memo")
    memo: dict[Any, Any]
    gradient_memo: dict[Any, Any]


def shared(view: StepView, gradient_memo: dict[Any, Any] | None = None) -> SharedView:
    """`view` with an empty memo; `gradient_memo` is that of an earlier view of the same step and parameter."""
    out = object.__new__(SharedView)
    for name in _FIELDS:
        setattr(out, name, getattr(view, name))
    out.memo = {}
    out.gradient_memo = {} if gradient_memo is None else gradient_memo
    return out


def memoised(view: StepView, key: tuple[str, ...], compute: Callable[[], Any]) -> Any:
    """`compute()`, kept under `key` if the view is a `SharedView`. The names in `key` are the fields it depends on."""
    if not isinstance(view, SharedView):
        return compute()
    store = view.gradient_memo if all(name == "gradient" for name in key[1:]) else view.memo
    if key not in store:
        store[key] = compute()
    return store[key]


def experts_of(info: ParamInfo) -> int:
    """E: the number of experts stacked in the parameter, 1 without an expert axis."""
    if info.expert_axis is None:
        return 1
    return info.num_experts if info.num_experts is not None else info.shape[info.expert_axis]


def info_of(view: StepView) -> ParamInfo:
    """The parameter of a view; metrics of scope parameter are only fed views that have one."""
    if view.param is None:
        raise ValueError("a metric of scope parameter was fed a view without a parameter")
    return view.param


def expert_ids(view: StepView) -> np.ndarray | None:
    """Ids of the recorded experts [e]; None means all E, in order."""
    return None if view.experts is None or info_of(view).expert_axis is None else np.asarray(view.experts)


def stacked(view: StepView, field: str) -> Tensor | None:
    """The tensor `field` as [e, ..] with the expert axis first (e = 1 without one), native dtype, lent, not copied."""
    tensor: Tensor | None = getattr(view, field)
    if tensor is None:
        return None
    tensor = tensor.detach()
    axis, ids = info_of(view).expert_axis, expert_ids(view)
    if axis is None:
        return tensor.unsqueeze(0)
    if ids is not None and tensor.shape[axis] != len(ids):
        tensor = tensor.index_select(axis, torch.as_tensor(ids, dtype=torch.int64, device=tensor.device))
    return tensor.movedim(axis, 0)


def flat(view: StepView, field: str) -> Tensor | None:
    """The tensor `field` as [e, L], native dtype; it may share memory with the view."""

    def compute() -> Tensor | None:
        tensor = stacked(view, field)
        return None if tensor is None else tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))

    return memoised(view, ("flat", field), compute)


def wide(view: StepView, field: str) -> Tensor | None:
    """The tensor `field` [e, L], ready to be summed: as it is where `_sums_cpu` serves it or it is larger than PIECE,
    else as float64, converted once."""

    def compute() -> Tensor | None:
        tensor = flat(view, field)
        if tensor is None or tensor.numel() > PIECE or _sums_cpu.usable(tensor):
            return tensor
        return tensor.to(torch.float64)

    return memoised(view, ("wide", field), compute)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Columns of tensors [e, L] as float64 [e, l], at most PIECE elements each: squares of 1e-45 and of 1e38 neither
    vanish nor overflow, and a bank of 2^31 elements is never converted as a whole."""
    experts, length = tensors[0].shape
    width = max(PIECE // max(experts, 1), 1)
    for start in range(0, length, width):
        yield tuple(tensor[:, start : start + width].to(torch.float64) for tensor in tensors)


def inner(left: Tensor, right: Tensor) -> np.ndarray:
    """Inner products [e] of tensors [e, L], in float64; inf where they are not finite."""
    if _sums_cpu.usable(left, right):
        return finite_or_inf(_sums_cpu.inner(left, right))
    total = torch.zeros(left.shape[0], dtype=torch.float64, device=left.device)
    for a, b in pieces(left, right):
        total += torch.linalg.vecdot(a, b)
    return to_numpy(total)


def owned(view: StepView, field: str) -> Tensor | None:
    """A copy of `flat(view, field)` that may be kept after the view is gone."""
    tensor = flat(view, field)
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)


def spread(values: np.ndarray, view: StepView) -> np.ndarray:
    """Values of the recorded experts [e] -> [E], NaN elsewhere."""
    ids = expert_ids(view)
    if ids is None:
        return values
    out = np.full(experts_of(info_of(view)), np.nan)
    out[ids] = values
    return out


def to_numpy(values: Tensor) -> np.ndarray:
    """float64 [e] on the host; anything not finite becomes +inf."""
    return finite_or_inf(values.detach().to("cpu", torch.float64).numpy())


def finite_or_inf(values: np.ndarray) -> np.ndarray:
    """Values with anything not finite as +inf."""
    return np.where(np.isfinite(values), values, np.inf)


def nothing_known(view: StepView) -> np.ndarray:
    """NaN [E]."""
    return np.full(experts_of(info_of(view)), np.nan)


def elements(view: StepView) -> int:
    """L: elements per expert."""
    info = info_of(view)
    return info.numel // max(experts_of(info), 1)


def dot(view: StepView, left: str, right: str) -> np.ndarray:
    """Inner products [E] of two tensors of the view, in float64."""

    def compute() -> np.ndarray:
        a, b = wide(view, left), wide(view, right)
        return nothing_known(view) if a is None or b is None else spread(inner(a, b), view)

    first, second = sorted((left, right))
    return memoised(view, ("dot", first, second), compute)


def norm(view: StepView, field: str) -> np.ndarray:
    """L2 norms [E], in float64."""
    return np.sqrt(dot(view, field, field))


def norm_of_sum(view: StepView, *terms: tuple[float, str]) -> np.ndarray:
    """L2 norms [E] of a signed sum of tensors, in float64: `norm_of_sum(view, (1, "weight"), (1, "delta"))`."""

    def compute() -> np.ndarray:
        tensors = [tensor for _, field in terms if (tensor := wide(view, field)) is not None]
        if len(tensors) < len(terms):
            return nothing_known(view)
        return spread(size_of_sum([sign for sign, _ in terms], tensors), view)

    names = tuple(field for _, field in terms)
    return memoised(view, ("norm" + "".join(f"{sign:+g}" for sign, _ in terms), *names), compute)


def size_of_sum(signs: Sequence[float], tensors: Sequence[Tensor]) -> np.ndarray:
    """L2 norms [e] of a signed sum of tensors [e, L], in float64; inf where they are not finite."""
    if len(tensors) in (2, 3) and _sums_cpu.usable(*tensors):
        return np.sqrt(finite_or_inf(_sums_cpu.squares_of_sum(tuple(signs), tuple(tensors))))
    squares = torch.zeros(tensors[0].shape[0], dtype=torch.float64, device=tensors[0].device)
    for parts in pieces(*tensors):
        total = signs[0] * parts[0]
        for sign, part in zip(signs[1:], parts[1:], strict=True):
            total.add_(part, alpha=sign)
        squares += torch.linalg.vecdot(total, total)
    return to_numpy(squares.sqrt())


def quotient(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """numerator / denominator [E]: NaN where either is unknown or the denominator is 0, inf where either is inf."""
    unknown = np.isnan(numerator) | np.isnan(denominator)
    broken = (np.isinf(numerator) | np.isinf(denominator)) & ~unknown
    good = ~unknown & ~broken & (denominator != 0)
    out = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    np.divide(numerator, denominator, out=out, where=good)
    out[broken] = np.inf
    return out


def cosine(product: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Cosines [E] from inner products and the two norms; NaN where one of the vectors is zero or unknown."""
    out = quotient(quotient(product, left), right)
    return np.where(np.isfinite(out), np.clip(out, -1.0, 1.0), out)


def activity(view: StepView) -> tuple[np.ndarray, np.ndarray]:
    """(active, idle), bool [E]: whether the expert had a gradient this step, or is known to have had none.

    Active: presence `nonzero`. Idle: presence `none` or `zero` (`.grad` was None, or the slice is exactly zero). Where
    presence says `not_recorded` the gradient decides; without a gradient the expert is neither.
    """

    def compute() -> tuple[np.ndarray, np.ndarray]:
        squares = dot(view, "gradient", "gradient")
        active, idle = squares > 0, squares == 0
        if view.presence is None:
            return active, idle if view.gradient is not None else np.ones_like(idle)
        codes = np.atleast_1d(np.asarray(view.presence))
        if len(codes) != len(squares):
            codes = spread(codes.astype(np.float64), view)
        return (codes == NONZERO) | (active & (codes == 0)), (codes == NONE) | (codes == ZERO) | (idle & (codes == 0))

    return memoised(view, ("activity", "gradient"), compute)


def tokens_of(view: StepView) -> np.ndarray | None:
    """Routed tokens per expert, float64 [E], or None where routing was not recorded for this parameter."""
    info = info_of(view)
    counts = view.tokens_per_expert
    if counts is None:
        return None
    tokens = np.atleast_1d(np.asarray(counts, dtype=np.float64))
    if len(tokens) == experts_of(info):
        return tokens
    if info.expert is not None and info.expert_axis is None and info.expert < len(tokens):
        return tokens[info.expert : info.expert + 1]
    return spread(tokens, view) if expert_ids(view) is not None else None


def common_rows(left: np.ndarray | None, right: np.ndarray | None, experts: int) -> tuple[Any, Any, Any]:
    """Positions in two selections of experts (ids, or None for all), and the ids, of the experts in both.

    Slices where both hold everything, so that indexing with them copies nothing.
    """
    if left is None and right is None:
        return slice(None), slice(None), slice(None)
    everyone = np.arange(experts)
    ids, mine, theirs = np.intersect1d(
        everyone if left is None else left, everyone if right is None else right, return_indices=True
    )
    return mine, theirs, ids
