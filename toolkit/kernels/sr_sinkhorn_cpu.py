"""sr_sinkhorn on the CPU: one expert at a time, one read of it per sweep, no copy of it.

Legend: x [m, n], w [m] row factors, v [n] column factors, so that the direction is w_i x_ij v_j.

A sweep takes four rows: their sums against v give w, and while they are still in the first-level cache their squares
go into the column sums, beside the row sums of the next four. Sweeps run down and up alternately, so that each begins
with what the last one left in cache.

float32 arithmetic, with column sums flushed to float64, for all but the last sweep, which is float64 and so leaves no
rounding of its own. All sweeps are float64 for small matrices, and wherever a float32 sum leaves [2^-90, 2^90]; within
that range its squares lose nothing that matters. float64 covers every float32, so nothing is scaled by powers of two.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.kernels._numba import as_array, in_threads, jit, narrow, over_experts, threads, typed, widen
from toolkit.kernels._store_cpu import RowNoise, philox_row, store_row
from toolkit.kernels.sr_sinkhorn import SinkhornResult, output_scale, reshape_result

if TYPE_CHECKING:
    from torch import Tensor

_LOW, _HIGH = 2.0**-90, 2.0**90
_BLOCKS_PER_FLUSH = 16
#: Up to here float64 throughout: a few microseconds, and single large elements round less.
_SMALL = 1 << 13
#: From here one matrix is split over threads.
_SPLIT = 1 << 21


@jit
def _row_factor(row, total, low, high):  # type: ignore[no-untyped-def]
    """sqrt(n / total); 0 for a row of zeros; -1 where the sum is out of range."""
    if low < total < high:
        return math.sqrt(row.size / total)
    for j in range(row.size):
        if widen(row[j]) != 0:
            return -1.0
    return 0.0


@jit
def _row_sums(x, i, w, v):  # type: ignore[no-untyped-def]
    """Sums of squares of rows i..i+3 against v, into w."""
    r0 = r1 = r2 = r3 = typed(np.float32(0), v)
    for j in range(x.shape[1]):
        q = v[j]
        t0, t1 = typed(x[i, j], v) * q, typed(x[i + 1, j], v) * q
        t2, t3 = typed(x[i + 2, j], v) * q, typed(x[i + 3, j], v) * q
        r0 += t0 * t0
        r1 += t1 * t1
        r2 += t2 * t2
        r3 += t3 * t3
    w[i], w[i + 1], w[i + 2], w[i + 3] = r0, r1, r2, r3


@jit
def _factors(x, i, w, low, high):  # type: ignore[no-untyped-def]
    """Turn the sums of rows i..i+3 in w into factors. False: one is out of range."""
    t0, t1, t2, t3 = w[i], w[i + 1], w[i + 2], w[i + 3]
    if low < t0 < high and low < t1 < high and low < t2 < high and low < t3 < high:
        size = typed(np.float32(x.shape[1]), w)
        w[i], w[i + 1] = np.sqrt(size / t0), np.sqrt(size / t1)
        w[i + 2], w[i + 3] = np.sqrt(size / t2), np.sqrt(size / t3)
        return True
    for q in range(i, i + 4):
        w[q] = _row_factor(x[q], w[q], low, high)
        if not w[q] >= 0:
            return False
    return True


@jit
def _column_sums(x, i, w, c):  # type: ignore[no-untyped-def]
    """Add the squares of rows i..i+3, times their factors, to c."""
    w0, w1, w2, w3 = w[i], w[i + 1], w[i + 2], w[i + 3]
    for j in range(x.shape[1]):
        y0, y1 = typed(x[i, j], w) * w0, typed(x[i + 1, j], w) * w1
        y2, y3 = typed(x[i + 2, j], w) * w2, typed(x[i + 3, j], w) * w3
        c[j] += (y0 * y0 + y1 * y1) + (y2 * y2 + y3 * y3)


@jit
def _both_sums(x, i, b, w, v, c):  # type: ignore[no-untyped-def]
    """`_row_sums` of rows i..i+3 and `_column_sums` of rows b..b+3: the first waits for memory, the second does not."""
    r0 = r1 = r2 = r3 = typed(np.float32(0), v)
    w0, w1, w2, w3 = w[b], w[b + 1], w[b + 2], w[b + 3]
    for j in range(x.shape[1]):
        q = v[j]
        t0, t1 = typed(x[i, j], v) * q, typed(x[i + 1, j], v) * q
        t2, t3 = typed(x[i + 2, j], v) * q, typed(x[i + 3, j], v) * q
        y0, y1 = typed(x[b, j], w) * w0, typed(x[b + 1, j], w) * w1
        y2, y3 = typed(x[b + 2, j], w) * w2, typed(x[b + 3, j], w) * w3
        c[j] += (y0 * y0 + y1 * y1) + (y2 * y2 + y3 * y3)
        r0 += t0 * t0
        r1 += t1 * t1
        r2 += t2 * t2
        r3 += t3 * t3
    w[i], w[i + 1], w[i + 2], w[i + 3] = r0, r1, r2, r3


@jit
def _sweep_rows(x, lo, hi, up, w, v, c, c_wide, low, high):  # type: ignore[no-untyped-def]
    """One sweep over rows lo..hi-1, in the precision of v: writes w, adds to c_wide; c is scratch [n], all zeros.

    The column sums of four rows are formed beside the row sums of the next four. False: a sum is out of [low, high].
    """
    n = x.shape[1]
    blocks = (hi - lo) // 4
    before = lo
    for k in range(blocks + 1):
        i = hi - 4 * (k + 1) if up else lo + 4 * k
        if k == blocks:
            if k > 0:
                _column_sums(x, before, w, c)
        elif k == 0:
            _row_sums(x, i, w, v)
        else:
            _both_sums(x, i, before, w, v, c)
        if k < blocks and not _factors(x, i, w, low, high):
            return False
        if k > 0 and (k % _BLOCKS_PER_FLUSH == 0 or k == blocks):
            for j in range(n):
                c_wide[j] += c[j]
                c[j] = 0
        before = i
    for k in range(hi - 4 * blocks - lo):
        i = lo + k if up else hi - 1 - k
        total = 0.0
        for j in range(n):
            t = np.float64(widen(x[i, j])) * np.float64(v[j])
            total += t * t
        w[i] = _row_factor(x[i], total, low, high)
        factor = np.float64(w[i])
        if not factor >= 0:
            return False
        for j in range(n):
            y = np.float64(widen(x[i, j])) * factor
            c_wide[j] += y * y
    return True


@jit
def _columns(x, first, c_wide, v, v_wide, low, high):  # type: ignore[no-untyped-def]
    """Column factors in both precisions from column sums, which are cleared. False: a sum is out of range."""
    m = x.shape[0]
    for j in range(c_wide.size):
        total = c_wide[j]
        c_wide[j] = 0.0
        if low < total < high:
            v_wide[j] = math.sqrt(m / total)
        elif total == 0 and (first or v_wide[j] == 0):
            if first:
                for i in range(m):
                    if widen(x[i, j]) != 0:
                        return False
            v_wide[j] = 0.0
        else:
            return False
        v[j] = np.float32(v_wide[j])
    return True


@jit
def _solve_here(x, wanted, wide, w, v, c, w_wide, v_wide, t_wide, c_wide, w_out, v_out):  # type: ignore[no-untyped-def]
    """Factors at each number of sweeps in `wanted`, ascending. False: out of range, or not finite where `wide`."""
    m = x.shape[0]
    c[:], t_wide[:], c_wide[:], v[:], v_wide[:] = 0, 0, 0, 1, 1
    low, high = (0.0, np.inf) if wide else (_LOW, _HIGH)
    at = 0
    for sweep in range(1, wanted[-1] + 1):
        up, first = sweep % 2 == 0, sweep == 1
        if wide or sweep == wanted[at]:
            good = _sweep_rows(x, 0, m, up, w_wide, v_wide, t_wide, c_wide, low, high)
        else:
            good = _sweep_rows(x, 0, m, up, w, v, c, c_wide, low, high)
        if not good or not _columns(x, first, c_wide, v, v_wide, low, high):
            return False
        if sweep == wanted[at]:
            w_out[at, :] = w_wide
            v_out[at, :] = v_wide
            at += 1
    return True


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
    return bool(_solve_here(x, wanted, wide, s.w, s.v, s.c, s.w_wide, s.v_wide, s.t_wide, s.c_wide, s.w_out, s.v_out))


def _solve_split(x: np.ndarray, wanted: np.ndarray, s: _Scratch, parts: int) -> bool:
    """`_solve_here` with the rows of one matrix shared among threads."""
    m, n = x.shape
    edges = [m * p // parts // 4 * 4 for p in range(parts)] + [m]
    c, c_wide, sums = np.zeros((parts, n), np.float32), np.zeros((parts, n)), np.zeros((parts, n))
    s.v[:], s.v_wide[:] = 1, 1
    good = [True] * parts

    def part(p: int, up: bool, wide: bool) -> None:
        w, v, scratch = (s.w_wide, s.v_wide, c_wide[p]) if wide else (s.w, s.v, c[p])
        good[p] = _sweep_rows(x, edges[p], edges[p + 1], up, w, v, scratch, sums[p], _LOW, _HIGH)

    at = 0
    for sweep in range(1, int(wanted[-1]) + 1):
        up, first, wide = sweep % 2 == 0, sweep == 1, sweep == wanted[at]
        in_threads([partial(part, p, up, wide) for p in range(parts)])
        s.c_wide[:] = sums.sum(0)
        sums[:] = 0
        if not all(good) or not _columns(x, first, s.c_wide, s.v, s.v_wide, _LOW, _HIGH):
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


def apply(
    weight: Tensor,
    x: Tensor,
    lr: float,
    decay: float,
    sweeps: int,
    compat: str,
    *,
    rounding: str = "nearest",
    rng: Any = None,
    row_scale: np.ndarray | None = None,
) -> None:
    """W <- round((1 - decay) W - lr * direction), in place; float32 or bfloat16 weights of any layout.

    `row_scale` [N, m] multiplies the rows of the direction.
    """
    import torch

    m, n = x.shape[-2:]
    flat_x, flat_w = _matrices(x), weight.view(-1, m, n) if _viewable(weight) else weight.reshape(-1, m, n)
    source, target = _views(flat_x), as_array(flat_w)
    wanted, scale = np.array([sweeps], np.int64), lr * output_scale(compat, m)

    noise = RowNoise(rounding, rng, weight.dtype == torch.bfloat16, n)
    none = np.empty(0, np.float32)

    def work(first: int, last: int, parts: int = 1) -> None:
        scratch, words = _Scratch(m, n, 1), noise.words()
        for e in range(first, last):
            matrix, goal = _dense(source[e]), target[e]
            if not _solve(matrix, wanted, scratch, parts):
                scratch.w_out[:] = np.nan
            own = goal if goal.flags.c_contiguous else np.ascontiguousarray(goal)
            w, v = scratch.w_out[0], scratch.v_out[0]
            if row_scale is not None:
                w *= row_scale[e]
            kept, base = 1.0 - decay, e * m * n
            if noise.mode:
                _subtract_noisy(
                    matrix, w, v, scale, kept, own, noise.mode, noise.key[0], noise.key[1], noise.step, base, words,
                    noise.uniforms((m, n), base), none, scratch.c,
                )  # fmt: skip
                ranges = []
            else:
                ranges = _row_parts(m, m * n) if parts > 1 else [(0, m)]
            if _ordinary(w, scale) and _ordinary(v, 1.0):
                w32, v32, kept32 = (w * scale).astype(np.float32), v.astype(np.float32), np.float32(kept)
                in_threads([partial(_subtract_narrow, matrix[a:b], w32[a:b], v32, kept32, own[a:b]) for a, b in ranges])
            else:
                in_threads([partial(_subtract, matrix[a:b], w[a:b], v, scale, kept, own[a:b]) for a, b in ranges])
            if own is not goal:
                goal[...] = own

    _over(work, len(flat_x), m * n)
    if flat_w.data_ptr() != weight.data_ptr():
        weight.copy_(flat_w.view(weight.shape))


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
