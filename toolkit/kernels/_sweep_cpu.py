"""One sweep of sr_sinkhorn on the CPU: both sums of one matrix from one read of it.

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

import numpy as np

from toolkit.kernels._numba import jit, typed, widen

LOW, HIGH = 2.0**-90, 2.0**90
_BLOCKS_PER_FLUSH = 16


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
def sweep_rows(x, lo, hi, up, w, v, c, c_wide, low, high):  # type: ignore[no-untyped-def]
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
def columns_from(x, first, c_wide, v, v_wide, low, high):  # type: ignore[no-untyped-def]
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
def solve_here(x, wanted, wide, w, v, c, w_wide, v_wide, t_wide, c_wide, w_out, v_out):  # type: ignore[no-untyped-def]
    """Factors at each number of sweeps in `wanted`, ascending. False: out of range, or not finite where `wide`."""
    m = x.shape[0]
    c[:], t_wide[:], c_wide[:], v[:], v_wide[:] = 0, 0, 0, 1, 1
    low, high = (0.0, np.inf) if wide else (LOW, HIGH)
    at = 0
    for sweep in range(1, wanted[-1] + 1):
        up, first = sweep % 2 == 0, sweep == 1
        if wide or sweep == wanted[at]:
            good = sweep_rows(x, 0, m, up, w_wide, v_wide, t_wide, c_wide, low, high)
        else:
            good = sweep_rows(x, 0, m, up, w, v, c, c_wide, low, high)
        if not good or not columns_from(x, first, c_wide, v, v_wide, low, high):
            return False
        if sweep == wanted[at]:
            w_out[at, :] = w_wide
            v_out[at, :] = v_wide
            at += 1
    return True
