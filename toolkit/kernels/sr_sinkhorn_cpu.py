"""sr_sinkhorn on the CPU: one expert at a time, one read of it per sweep, no copy of it.

Legend: x [m, n], w [m] row factors, v [n] column factors, so that the direction is w_i x_ij v_j. The sweeps
themselves are in `_sweep_cpu.py`; here are the threads, the directions, and the weights they go into.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.kernels._numba import as_array, in_threads, jit, narrow, over_experts, threads, widen
from toolkit.kernels._store_cpu import RowNoise, philox_row, store_row
from toolkit.kernels._sweep_cpu import HIGH, LOW, columns_from, solve_here, sweep_rows
from toolkit.kernels.sr_sinkhorn import SinkhornResult, output_scale, reshape_result

if TYPE_CHECKING:
    from torch import Tensor

#: Up to here float64 throughout: a few microseconds, and single large elements round less.
_SMALL = 1 << 13
#: From here one matrix is split over threads.
_SPLIT = 1 << 21


@jit
def _write(x, w, v, scale, out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        factor = w[i] * scale
        for j in range(x.shape[1]):
            out[i, j] = narrow(np.float32(np.float64(widen(x[i, j])) * factor * v[j]), out)


@jit
def _subtract(x, w, v, scale, kept, weight):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        factor = w[i] * scale
        for j in range(x.shape[1]):
            step = np.float64(widen(x[i, j])) * factor * v[j]
            weight[i, j] = narrow(np.float32(np.float64(widen(weight[i, j])) * kept - step), weight)


@jit
def _subtract_narrow(x, w, v, kept, weight):  # type: ignore[no-untyped-def]
    """`_subtract` with float32 factors: its extra rounding vanishes in that of the weight."""
    for i in range(x.shape[0]):
        line, row, factor = x[i], weight[i], w[i]
        for j in range(x.shape[1]):
            row[j] = narrow(widen(row[j]) * kept - widen(line[j]) * factor * v[j], row)


@jit
def _subtract_noisy(x, w, v, scale, kept, weight, noise, key0, key1, step, base, words, uniforms, none, u):  # type: ignore[no-untyped-def]
    """`_subtract` with random rounding of bfloat16, row by row."""
    for i in range(x.shape[0]):
        factor = w[i] * scale
        line = x[i]
        for j in range(u.size):
            u[j] = np.float32(np.float64(widen(line[j])) * factor * v[j])
        first = base + i * u.size
        if uniforms.size == 0:
            philox_row(key0, key1, step, first, words)
        store_row(weight[i], u, 1.0, kept, False, noise, words, first % 4, uniforms[i] if uniforms.size > 0 else none)


@jit
def _cosine(x, w, v):  # type: ignore[no-untyped-def]
    dot = mine = its = 0.0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            a = np.float64(widen(x[i, j]))
            b = a * w[i] * v[j]
            dot += a * b
            mine += a * a
            its += b * b
    return dot / math.sqrt(mine * its) if mine * its > 0 else np.nan


class _Scratch:
    """What one thread needs beside the tensors: a few rows and columns."""

    def __init__(self, m: int, n: int, count: int) -> None:
        self.w, self.v, self.c = np.empty(m, np.float32), np.empty(n, np.float32), np.empty(n, np.float32)
        self.w_wide, self.v_wide, self.t_wide, self.c_wide = np.empty(m), np.empty(n), np.empty(n), np.empty(n)
        self.w_out, self.v_out = np.empty((count, m)), np.empty((count, n))


def _solve(x: np.ndarray, wanted: np.ndarray, s: _Scratch, parts: int) -> bool:
    """Fill s.w_out and s.v_out for one matrix; False where it holds a NaN or an infinity."""
    if x.size > _SMALL:
        if parts > 1 and x.size >= _SPLIT:
            done = _solve_split(x, wanted, s, parts)
        else:
            done = _solve_serial(x, wanted, s, False)
        if done:
            return True
    return _solve_serial(x, wanted, s, True)


def _solve_serial(x: np.ndarray, wanted: np.ndarray, s: _Scratch, wide: bool) -> bool:
    return bool(solve_here(x, wanted, wide, s.w, s.v, s.c, s.w_wide, s.v_wide, s.t_wide, s.c_wide, s.w_out, s.v_out))


def _solve_split(x: np.ndarray, wanted: np.ndarray, s: _Scratch, parts: int) -> bool:
    """`solve_here` with the rows of one matrix shared among threads."""
    m, n = x.shape
    edges = [m * p // parts // 4 * 4 for p in range(parts)] + [m]
    c, c_wide, sums = np.zeros((parts, n), np.float32), np.zeros((parts, n)), np.zeros((parts, n))
    s.v[:], s.v_wide[:] = 1, 1
    good = [True] * parts

    def part(p: int, up: bool, wide: bool) -> None:
        w, v, scratch = (s.w_wide, s.v_wide, c_wide[p]) if wide else (s.w, s.v, c[p])
        good[p] = sweep_rows(x, edges[p], edges[p + 1], up, w, v, scratch, sums[p], LOW, HIGH)

    at = 0
    for sweep in range(1, int(wanted[-1]) + 1):
        up, first, wide = sweep % 2 == 0, sweep == 1, sweep == wanted[at]
        in_threads([partial(part, p, up, wide) for p in range(parts)])
        s.c_wide[:] = sums.sum(0)
        sums[:] = 0
        if not all(good) or not columns_from(x, first, s.c_wide, s.v, s.v_wide, LOW, HIGH):
            return False
        if wide:
            s.w_out[at], s.v_out[at] = s.w_wide, s.v_wide
            at += 1
    return True


def _ordinary(factors: np.ndarray, scale: float) -> bool:
    """Whether the factors, times `scale`, are well inside float32's range."""
    size = np.abs(factors) * abs(scale)
    return bool(size.max(initial=0.0) < 1e18 and size.min(initial=1.0, where=size > 0) > 1e-18)


def _row_parts(rows: int, size: int) -> list[tuple[int, int]]:
    count = threads() if size >= _SPLIT else 1
    return [(rows * p // count, rows * (p + 1) // count) for p in range(count)]


def _matrices(x: Tensor) -> Tensor:
    """[N, m, n]; a view where there is one."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _dense(array: np.ndarray) -> np.ndarray:
    """The matrix itself, or a row-major copy of this one matrix."""
    array = array.astype(np.float32) if array.dtype == np.float16 else array
    return np.ascontiguousarray(array)


def _views(x: Tensor) -> np.ndarray:
    import torch

    return x.numpy() if x.dtype == torch.float16 else as_array(x)


def run(x: Tensor, sweeps: list[int], compat: str, directions: bool) -> SinkhornResult:
    """See `sr_sinkhorn.sr_sinkhorn_run`; `sweeps` ascending. Cosines only where there are no directions."""
    import torch

    m, n = x.shape[-2:]
    flat = _matrices(x)
    experts, count, wanted = len(flat), len(sweeps), np.array(sweeps, np.int64)
    bad = np.zeros(experts, bool)
    rows, columns = np.zeros((count, experts, m)), np.zeros((count, experts, n))
    cosine = np.full((count, experts), np.nan)
    scale = output_scale(compat, m)
    outs = [torch.empty_like(flat, memory_format=torch.contiguous_format) for _ in sweeps] if directions else []
    half = x.dtype == torch.float16
    arrays = [_views(out) for out in outs]
    source = _views(flat)

    def work(first: int, last: int, parts: int = 1) -> None:
        scratch = _Scratch(m, n, count)
        for e in range(first, last):
            matrix = _dense(source[e])
            bad[e] = not _solve(matrix, wanted, scratch, parts)
            if bad[e]:
                scratch.w_out[:], scratch.v_out[:] = np.nan, np.nan
            for k in range(count):
                w, v = scratch.w_out[k], scratch.v_out[k]
                rows[k, e], columns[k, e] = w, v * scale
                if directions and bad[e]:
                    outs[k][e].fill_(math.nan)
                elif directions and half:
                    wide = np.empty((m, n), np.float32)
                    _write(matrix, w, v, scale, wide)
                    arrays[k][e] = wide
                elif directions:
                    ranges = _row_parts(m, m * n) if parts > 1 else [(0, m)]
                    in_threads([partial(_write, matrix[a:b], w[a:b], v, scale, arrays[k][e, a:b]) for a, b in ranges])
                elif not bad[e]:
                    cosine[k, e] = _cosine(matrix, w, v)

    _over(work, experts, m * n)
    result = SinkhornResult("cpu", torch.from_numpy(bad))
    for k, sweep in enumerate(sweeps):
        if directions:
            result.directions[sweep] = outs[k]
        result.row_factor[sweep] = torch.from_numpy(rows[k])
        result.column_factor[sweep] = torch.from_numpy(columns[k])
        result.cosine[sweep] = torch.from_numpy(cosine[k])
    return reshape_result(result, tuple(x.shape[:-2]), x)


class _Target:
    """A weight that a direction is subtracted from."""

    def __init__(self, weight: Tensor, rounding: str, rng: Any) -> None:
        m, n = weight.shape[-2:]
        self.weight, self.flat = weight, weight.view(-1, m, n) if _viewable(weight) else weight.reshape(-1, m, n)
        self.array = as_array(self.flat)
        self.noise = RowNoise(rounding, rng, str(weight.dtype) == "torch.bfloat16", n)

    def put_back(self) -> None:
        if self.flat.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(self.flat.view(self.weight.shape))


def apply(
    weights: Mapping[int, Tensor],
    x: Tensor,
    lr: float,
    decay: float,
    compat: str,
    *,
    rounding: str = "nearest",
    rng: Any = None,
    row_scale: np.ndarray | None = None,
) -> None:
    """W <- round((1 - decay) W - lr * direction), in place, for the weight of every number of sweeps; one run for all.

    float32 or bfloat16 weights of any layout. `row_scale` [N, m] multiplies the rows of the direction.
    """
    m, n = x.shape[-2:]
    flat_x = _matrices(x)
    source, wanted = _views(flat_x), np.array(sorted(weights), np.int64)
    targets = [_Target(weights[sweep], rounding, rng) for sweep in sorted(weights)]
    scale, kept = lr * output_scale(compat, m), 1.0 - decay

    def work(first: int, last: int, parts: int = 1) -> None:
        scratch, words = _Scratch(m, n, len(wanted)), targets[0].noise.words()
        for e in range(first, last):
            matrix = _dense(source[e])
            if not _solve(matrix, wanted, scratch, parts):
                scratch.w_out[:] = np.nan
            for target, w, v in zip(targets, scratch.w_out, scratch.v_out, strict=True):
                if row_scale is not None:
                    w *= row_scale[e]
                _descend(matrix, w, v, scale, kept, target, e, words, parts)

    _over(work, len(flat_x), m * n)
    for target in targets:
        target.put_back()


def _descend(
    x: np.ndarray, w: np.ndarray, v: np.ndarray, scale: float, kept: float, target: _Target, e: int, words: np.ndarray,
    parts: int,
) -> None:  # fmt: skip
    """Subtract from matrix `e` of the target."""
    goal, noise, (m, n) = target.array[e], target.noise, x.shape
    own = goal if goal.flags.c_contiguous else np.ascontiguousarray(goal)
    if noise.mode:
        base = e * m * n
        _subtract_noisy(
            x, w, v, scale, kept, own, noise.mode, noise.key[0], noise.key[1], noise.step, base, words,
            noise.uniforms((m, n), base), np.empty(0, np.float32), np.empty(n, np.float32),
        )  # fmt: skip
    else:
        ranges = _row_parts(m, m * n) if parts > 1 else [(0, m)]
        if _ordinary(w, scale) and _ordinary(v, 1.0):
            w32, v32, kept32 = (w * scale).astype(np.float32), v.astype(np.float32), np.float32(kept)
            in_threads([partial(_subtract_narrow, x[a:b], w32[a:b], v32, kept32, own[a:b]) for a, b in ranges])
        else:
            in_threads([partial(_subtract, x[a:b], w[a:b], v, scale, kept, own[a:b]) for a, b in ranges])
    if own is not goal:
        goal[...] = own


def _viewable(x: Tensor) -> bool:
    try:
        x.view(-1, *x.shape[-2:])
    except RuntimeError:
        return False
    return True


def _over(work, experts: int, elements: int) -> None:  # type: ignore[no-untyped-def]
    # Whole experts per thread where there are enough of them, otherwise all threads in each expert.
    if elements == 0:
        return
    if experts < threads() and elements >= _SPLIT:
        work(0, experts, threads())
    else:
        over_experts(work, experts, elements)
