"""numba for every CPU kernel: how it is compiled, how tensors reach it, how threads share it.

numba's cache on disk looks at a kernel's own file only: after a change here, or in `_store_cpu.py`, delete the
`__pycache__` folder of this package.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba.extending import overload, register_jitable

if TYPE_CHECKING:
    from torch import Tensor

warnings.filterwarnings("ignore", category=numba.errors.NumbaPerformanceWarning)

#: Sums may be reordered and fused, which is what lets them be vectorised; NaN, Inf and the sign of zero stay exact.
FAST = {"reassoc", "contract"}
_WORTH_A_THREAD = 1 << 16
_pool: ThreadPoolExecutor | None = None


def jit(function: Callable[..., Any]) -> Any:
    """Compile with the flags above and keep the machine code on disk, where a folder can be written."""
    options: dict[str, Any] = {"fastmath": FAST, "nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache: a read-only installation without a home
        return numba.njit(**options)(function)


def as_array(x: Tensor) -> np.ndarray:
    """The tensor's memory as numpy sees it: float32 as such, bfloat16 as its bits (uint16), float16 as float32."""
    import torch

    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy()
    return (x.float() if x.dtype == torch.float16 else x).numpy()


def threads() -> int:
    """How many threads a kernel may use: what torch was told."""
    import torch

    return max(1, torch.get_num_threads())


def over_experts(work: Callable[[int, int], None], experts: int, elements: int) -> None:
    """Call `work(first, last)` over runs of experts of `elements` each, on as many threads as pay."""
    count = min(threads(), experts)
    if count < 2 or experts * elements < _WORTH_A_THREAD:
        if experts:
            work(0, experts)
        return
    edges = [experts * i // count for i in range(count + 1)]
    in_threads([lambda a=a, b=b: work(a, b) for a, b in itertools.pairwise(edges)])  # type: ignore[misc]


def in_threads(calls: list[Callable[[], None]]) -> None:
    """Run all calls, the first one here; numba's own pool is not used, since it allows only one caller at a time."""
    global _pool
    if len(calls) < 2:
        for call in calls:
            call()
        return
    if _pool is None or _pool._max_workers < len(calls) - 1:
        _pool = ThreadPoolExecutor(max(1, len(calls) - 1), "gradreel-kernel")
    futures = [_pool.submit(call) for call in calls[1:]]
    calls[0]()
    for future in futures:
        future.result()


def _widen(value: Any) -> Any:
    raise NotImplementedError


def _bits(value: Any) -> Any:
    raise NotImplementedError


def _magnitude_limit(array: Any) -> Any:
    raise NotImplementedError


@overload(_widen, inline="always")
def _widen_overload(value):  # type: ignore[no-untyped-def]
    if isinstance(value, numba.types.Integer):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


@overload(_bits, inline="always")
def _bits_overload(value):  # type: ignore[no-untyped-def]
    if isinstance(value, numba.types.Integer):
        return lambda value: np.int32(value)
    return lambda value: np.float32(value).view(np.int32)


@overload(_magnitude_limit, inline="always")
def _magnitude_limit_overload(array):  # type: ignore[no-untyped-def]
    if isinstance(array.dtype, numba.types.Integer):
        return lambda array: (np.int32(0x7F80), np.int32(0x7FFF))
    return lambda array: (np.int32(0x7F800000), np.int32(0x7FFFFFFF))


@register_jitable
def widen(value):  # type: ignore[no-untyped-def]
    """An element as float32: itself, or the bfloat16 whose bits it holds."""
    return _widen(value)


@register_jitable
def bits(value):  # type: ignore[no-untyped-def]
    """An element's bit pattern as int32."""
    return _bits(value)


@register_jitable
def magnitude_limit(array):  # type: ignore[no-untyped-def]
    """(smallest magnitude pattern that is not finite, mask that drops the sign) for the array's elements."""
    return _magnitude_limit(array)


def _narrow(value: Any, array: Any) -> Any:
    raise NotImplementedError


@overload(_narrow, inline="always")
def _narrow_overload(value, array):  # type: ignore[no-untyped-def]
    if isinstance(array.dtype, numba.types.Integer):

        def to_bfloat16(value, array):  # type: ignore[no-untyped-def]
            pattern = np.float32(value).view(np.int32)
            # Quiet NaN by hand: rounding its payload up could carry into an infinity or a zero.
            nearest = (pattern + np.int32(0x7FFF) + ((pattern >> np.int32(16)) & np.int32(1))) >> np.int32(16)
            return np.uint16(nearest) if value == value else np.uint16(0x7FC0)

        return to_bfloat16
    return lambda value, array: np.float32(value)


@register_jitable
def narrow(value, array):  # type: ignore[no-untyped-def]
    """A float32 as an element of `array`: itself, or the nearest bfloat16's bits (ties to even)."""
    return _narrow(value, array)


def _typed(value: Any, array: Any) -> Any:
    raise NotImplementedError


@overload(_typed, inline="always")
def _typed_overload(value, array):  # type: ignore[no-untyped-def]
    if array.dtype == numba.types.float64:
        return lambda value, array: np.float64(widen(value))
    return lambda value, array: widen(value)


@register_jitable
def typed(value, array):  # type: ignore[no-untyped-def]
    """An element as a number of `array`'s own precision, float32 or float64."""
    return _typed(value, array)
