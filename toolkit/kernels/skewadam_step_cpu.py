"""skewadam_step on the CPU: two or three reads of a gradient that stay in cache, and no tensor for D or u.

Legend: as in `skewadam_step.py`; r [m] and c [n] are the roots of the two factors, so that D_ij = r_i c_j + added.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.kernels._numba import as_array, jit, narrow, over_experts, typed, widen
from toolkit.kernels._store_cpu import RowNoise, philox_row, store_row

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.kernels.skewadam_step import SkewAdamRule, SkewAdamState

_MODES = {"v_floor": 0, "add_to_sqrt": 1, "adafactor": 2}


@jit
def _factors(g, row, column, beta, eps, eps_row, mode, before, sums, c, r):  # type: ignore[no-untyped-def]
    """Move row [m] and column [n] on by g^2, and write the roots of both factors."""
    m, n = g.shape
    extra = eps if mode == 2 else 0.0
    sums[:] = 0.0
    c[:] = 0  # column sums of a run of rows, then the root
    mean = 0.0
    for i in range(m):
        line = g[i]
        total = np.float32(0)
        for j in range(n):
            a = typed(line[j], c)
            total += a * a
            c[j] += a * a
        if i % 16 == 15 or i == m - 1:
            for j in range(n):
                sums[j] += c[j]
                c[j] = 0
        row[i] = np.float32(beta * row[i] + (1 - beta) * (np.float64(total) / n + extra))
        mean += row[i]
    mean /= m
    if mode == 0:
        mean = max(mean, 1e-15)
    elif mean == 0:
        mean = 1.0
    for i in range(m):
        ratio = row[i] / mean
        r[i] = np.float32(math.sqrt(max(ratio, eps_row) if mode == 0 else ratio))
    for j in range(n):
        column[j] = np.float32(beta * column[j] + (1 - beta) * (sums[j] / m + extra))
        level = column[j] / before
        c[j] = np.float32(math.sqrt(max(level, eps) if mode == 0 else level))


@jit
def _factored_row(line, r, c, added, u):  # type: ignore[no-untyped-def]
    for j in range(u.size):
        u[j] = typed(line[j], u) / (r * c[j] + added)


@jit
def _full_row(line, v, eps, mode, before, added, u):  # type: ignore[no-untyped-def]
    for j in range(u.size):
        level = v[j] / before
        root = np.float32(math.sqrt(max(level, eps) if mode == 0 else level))
        u[j] = typed(line[j], u) / (root + added)


@jit
def _second_row(line, v, beta, extra):  # type: ignore[no-untyped-def]
    fresh = np.float32(1 - beta)
    for j in range(v.size):
        a = typed(line[j], v)
        v[j] = np.float32(beta) * v[j] + fresh * (a * a + extra)


@jit
def _momentum_row(line, momentum, beta):  # type: ignore[no-untyped-def]
    fresh = np.float32(1 - beta)
    for j in range(momentum.size):
        momentum[j] += fresh * (typed(line[j], momentum) - momentum[j])


@jit
def _measure(g, full, v, momentum, smooth, betas, eps, mode, before, added, r, c, u):  # type: ignore[no-untyped-def]
    """Move V and M on, and return the sum of (g / D)^2 or (M / D)^2."""
    total = np.float64(0)
    extra = np.float32(eps if mode == 2 else 0.0)
    m = g.shape[0]
    for k in range(m):
        i = m - 1 - k  # upwards: the last rows are still in cache
        part = np.float32(0)
        if not full and not smooth:
            line, root = g[i], r[i]
            for j in range(u.size):
                a = typed(line[j], u) / (root * c[j] + added)
                part += a * a
            total += np.float64(part)
            continue
        if full:
            _second_row(g[i], v[i], betas[1], extra)
        if smooth:
            _momentum_row(g[i], momentum[i], betas[0])
            if full:
                _full_row(momentum[i], v[i], np.float32(eps), mode, np.float32(before), added, u)
            else:
                _factored_row(momentum[i], r[i], c, added, u)
        else:
            _full_row(g[i], v[i], np.float32(eps), mode, np.float32(before), added, u)
        for j in range(u.size):
            part += u[j] * u[j]
        total += np.float64(part)
    return total


@jit
def _finish(  # type: ignore[no-untyped-def]
    w,
    g,
    full,
    v,
    momentum,
    smooth,
    eps,
    mode,
    before,
    added,
    r,
    c,
    u,
    k,
    keep,
    own,
    noise,
    key0,
    key1,
    step,
    base,
    words,
    uniforms,
    none,
):
    plain = noise == 0 and not own and not full and not smooth
    for i in range(g.shape[0]):
        if plain:
            line, goal, root = g[i], w[i], r[i]
            rate, kept = np.float32(k), np.float32(keep)
            for j in range(u.size):
                step_j = typed(line[j], u) / (root * c[j] + added)
                goal[j] = narrow(widen(goal[j]) * kept - rate * step_j, goal)
            continue
        if smooth:
            if full:
                _full_row(momentum[i], v[i], np.float32(eps), mode, np.float32(before), added, u)
            else:
                _factored_row(momentum[i], r[i], c, added, u)
        elif full:
            _full_row(g[i], v[i], np.float32(eps), mode, np.float32(before), added, u)
        else:
            _factored_row(g[i], r[i], c, added, u)
        first = base + i * u.size
        if noise != 0 and uniforms.size == 0:
            philox_row(key0, key1, step, first, words)
        store_row(w[i], u, k, keep, own, noise, words, first % 4, uniforms[i] if uniforms.size > 0 else none)


def run(w: Tensor, g: Tensor, state: SkewAdamState, step: int, lr: float, rule: SkewAdamRule, rng: Any) -> None:
    """`w`, `g` [E, m, n]; see `skewadam_step.skewadam_step`."""
    import torch

    from toolkit.kernels.skewadam_step import corrections

    experts, m, n = g.shape
    noise = RowNoise(rule.rounding, rng, w.dtype == torch.bfloat16, n)
    weights, gradients = as_array(w), as_array(g)
    full, smooth = state.second_moment is not None, state.momentum is not None
    nothing = np.empty((experts, 1, 1), np.float32)
    v = as_array(state.second_moment) if state.second_moment is not None else nothing
    momentum = as_array(state.momentum) if state.momentum is not None else nothing
    before, divisor = corrections(rule, step, smooth)
    mode, eps = _MODES[rule.eps_mode], float(rule.eps)
    added = np.float32(rule.eps if rule.eps_mode == "add_to_sqrt" else 0.0)
    keep, own = 1 - lr * rule.weight_decay, rule.decay == "own_dtype"
    squares = np.zeros(experts)
    roots: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    per_matrix = rule.clip_scope == "matrix"

    def measure(e: int) -> None:
        line = np.ascontiguousarray(gradients[e])
        r, c = np.empty(m, np.float32), np.empty(n, np.float32)
        if state.row_moment is not None and state.column_moment is not None:
            row, column = as_array(state.row_moment)[e], as_array(state.column_moment)[e]
            _factors(line, row, column, rule.betas[1], eps, rule.eps_row, mode, before, np.empty(n), c, r)
        u = np.empty(n, np.float32)
        squares[e] = _measure(line, full, v[e], momentum[e], smooth, rule.betas, eps, mode, before, added, r, c, u)
        roots[e] = (r, c)

    def finish(e: int, mean_square: float) -> None:
        line = np.ascontiguousarray(gradients[e])
        target = weights[e]
        goal = np.ascontiguousarray(target)  # target itself where its rows lie one after the other
        rms = math.sqrt(mean_square) / divisor
        k = lr / divisor / max(1.0, rms / rule.threshold) if rms == rms else math.nan
        r, c = roots.pop(e)
        base = e * m * n
        _finish(
            goal, line, full, v[e], momentum[e], smooth, eps, mode, before, added, r, c, np.empty(n, np.float32),
            k, keep, own, noise.mode, noise.key[0], noise.key[1], noise.step, base, noise.words(),
            noise.uniforms((m, n), base), np.empty(0, np.float32),
        )  # fmt: skip
        if goal.ctypes.data != target.ctypes.data:
            target[...] = goal

    def both(first: int, last: int) -> None:
        for e in range(first, last):
            measure(e)
            finish(e, squares[e] / (m * n))

    def only(first: int, last: int) -> None:
        for e in range(first, last):
            measure(e)

    if per_matrix:
        over_experts(both, experts, m * n)
        return
    over_experts(only, experts, m * n)
    mean_square = float(squares.sum()) / (experts * m * n)

    def rest(first: int, last: int) -> None:
        for e in range(first, last):
            finish(e, mean_square)

    over_experts(rest, experts, m * n)
