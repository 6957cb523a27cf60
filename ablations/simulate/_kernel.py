"""The closed loop of one expert, for many lanes at once, compiled by numba. float64 throughout.

Legend: m rows (outputs), n columns (inputs), K tokens drawn in a step, L lanes, S slots a lane.
X [K, n] inputs, noise [K, m], W [L, m, n] weights, T [m, n] target, root [n, n] with root root^T = Sigma.

A lane is one arm at one lr. All lanes of an expert see the same tokens, which are drawn once; a lane reads nothing of
another, so its result does not depend on which others run.
"""

from __future__ import annotations

import math

import numpy as np

from toolkit.kernels._numba import jit
from toolkit.kernels._store_cpu import philox_row

TOKENS, MATCHED, QUADRATIC = 0, 1, 2
SKIP, DECAY, AS_ZERO = 0, 1, 2
HIDDEN_EMA, EMA, HEAVY_BALL, SINKHORN, SIGN, RMS, SECOND, UNBIAS, DIVIDE, SNR, LION, APPLY, NEWTON = range(1, 14)
_POWER_STEPS = 30


@jit
def normals(key0, key1, step, first, words, out):  # type: ignore[no-untyped-def]
    """Fill flat `out` with standard normal numbers `first`.. of this step, by Box and Muller; `first` % 4 == 0."""
    need = (out.size + 3) // 4 * 4
    philox_row(key0, key1, step, first, words[:need])
    for i in range((out.size + 1) // 2):
        radius = math.sqrt(-2.0 * math.log((words[2 * i] + 0.5) * 2.0**-32))
        angle = (words[2 * i + 1] + 0.5) * (2.0**-32 * 2.0 * math.pi)
        out[2 * i] = radius * math.cos(angle)
        if 2 * i + 1 < out.size:
            out[2 * i + 1] = radius * math.sin(angle)


@jit
def _times_root(z, root, diagonal, out):  # type: ignore[no-untyped-def]
    """Each row of z, times root^T: rows with covariance Sigma."""
    n = root.shape[0]
    for t in range(z.shape[0]):
        if diagonal:
            for j in range(n):
                out[t, j] = z[t, j] * root[j, j]
        else:
            for j in range(n):
                total = 0.0
                for q in range(n):
                    total += root[j, q] * z[t, q]
                out[t, j] = total


@jit
def _moments(left, inputs, noise, curvature, cross):  # type: ignore[no-untyped-def]
    """curvature <- mean of left x^T, cross <- mean of noise x^T, over the tokens."""
    count = inputs.shape[0]
    curvature[:], cross[:] = 0.0, 0.0
    for t in range(count):
        x = inputs[t]
        for i in range(x.size):
            a = left[t, i] / count
            row = curvature[i]
            for j in range(x.size):
                row[j] += a * x[j]
        for i in range(noise.shape[1]):
            a = noise[t, i] / count
            row = cross[i]
            for j in range(x.size):
                row[j] += a * x[j]


@jit
def _from_moments(w, target, curvature, cross, g):  # type: ignore[no-untyped-def]
    """g <- (W - T) curvature - cross."""
    m, n = w.shape
    for i in range(m):
        row = g[i]
        for j in range(n):
            row[j] = -cross[i, j]
        for q in range(n):
            a = w[i, q] - target[i, q]
            line = curvature[q]
            for j in range(n):
                row[j] += a * line[j]


@jit
def _from_tokens(w, target, inputs, noise, g):  # type: ignore[no-untyped-def]
    """g <- mean over tokens of ((W - T) x - noise) x^T."""
    m, n = w.shape
    g[:] = 0.0
    scale = 1.0 / inputs.shape[0]
    for t in range(inputs.shape[0]):
        x = inputs[t]
        for i in range(m):
            line, goal, row = w[i], target[i], g[i]
            total = 0.0
            for j in range(n):
                total += (line[j] - goal[j]) * x[j]
            a = (total - noise[t, i]) * scale
            for j in range(n):
                row[j] += a * x[j]


@jit
def excess_risk(w, target, sigma, diagonal):  # type: ignore[no-untyped-def]
    """tr((W - T) Sigma (W - T)^T)."""
    m, n = w.shape
    total = 0.0
    for i in range(m):
        for j in range(n):
            d = w[i, j] - target[i, j]
            if diagonal:
                total += d * d * sigma[j, j]
            else:
                part = 0.0
                for q in range(n):
                    part += (w[i, q] - target[i, q]) * sigma[q, j]
                total += d * part
    return total


@jit
def stable_rank(x, u, v):  # type: ignore[no-untyped-def]
    """Squared Frobenius norm over squared spectral norm, the latter by power iteration; NaN for a zero matrix."""
    m, n = x.shape
    total = 0.0
    for i in range(m):
        for j in range(n):
            total += x[i, j] * x[i, j]
    if not 0 < total < np.inf:
        return np.nan
    # The largest row is a start that the leading direction is seldom orthogonal to.
    best, largest = 0, -1.0
    for i in range(m):
        size = 0.0
        for j in range(n):
            size += x[i, j] * x[i, j]
        if size > largest:
            best, largest = i, size
    for j in range(n):
        v[j] = x[best, j] / math.sqrt(largest)
    square = 0.0
    for _ in range(_POWER_STEPS):
        for i in range(m):
            part = 0.0
            for j in range(n):
                part += x[i, j] * v[j]
            u[i] = part
        v[:] = 0.0
        for i in range(m):
            for j in range(n):
                v[j] += u[i] * x[i, j]
        square = 0.0
        for j in range(n):
            square += v[j] * v[j]
        square = math.sqrt(square)
        for j in range(n):
            v[j] /= square
    return total / square


@jit
def _rms(x):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            total += x[i, j] * x[i, j]
    return math.sqrt(total / x.size)


@jit
def _snr(x, slot, beta, w, v):  # type: ignore[no-untyped-def]
    m, n = x.shape
    w[:], v[:] = 0.0, 0.0
    for i in range(m):
        for j in range(n):
            square = slot[i, j] * slot[i, j]
            w[i] += square / n
            v[j] += square / m
    for i in range(m):
        for j in range(n):
            noise = math.sqrt(max(1.0 - w[i], 0.0) * max(1.0 - v[j], 0.0))
            slot[i, j] += (1 - beta) * (x[i, j] - slot[i, j])
            x[i, j] = math.atan2(slot[i, j], noise) * 4 / math.pi


@jit
def _product(a, b, out):  # type: ignore[no-untyped-def]
    out[:] = 0.0
    for i in range(a.shape[0]):
        row = out[i]
        for q in range(a.shape[1]):
            factor, line = a[i, q], b[q]
            for j in range(b.shape[1]):
                row[j] += factor * line[j]


@jit
def _newton_schulz(x, sweeps, eps, scale, work, gram, mix):  # type: ignore[no-untyped-def]
    """Stage newton_schulz on one matrix with m <= n, in place."""
    size = _rms(x) * math.sqrt(x.size) + eps
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] /= size
    for _ in range(sweeps):
        _product(x, x.T.copy(), gram)
        _product(gram, gram, mix)
        for i in range(gram.shape[0]):
            for j in range(gram.shape[0]):
                mix[i, j] = -4.7750 * gram[i, j] + 2.0315 * mix[i, j]
        _product(mix, x, work)
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                x[i, j] = 3.4445 * x[i, j] + work[i, j]
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] *= scale


@jit
def _sinkhorn(x, sweeps, scale, squares, w, v):  # type: ignore[no-untyped-def]
    """Stage sr_sinkhorn on one matrix, in place, as Sinkhorn and Knopp on its squares; w [m] and v [n] are squared."""
    m, n = x.shape
    for i in range(m):
        for j in range(n):
            squares[i, j] = x[i, j] * x[i, j]
    v[:] = 1.0
    for _ in range(sweeps):
        for i in range(m):
            total = 0.0
            for j in range(n):
                total += squares[i, j] * v[j]
            w[i] = 0.0 if total == 0 else n / total
        v[:] = 0.0
        for i in range(m):
            for j in range(n):
                v[j] += squares[i, j] * w[i]
        for j in range(n):
            v[j] = 0.0 if v[j] == 0 else m / v[j]
    for j in range(n):
        v[j] = math.sqrt(v[j])
    for i in range(m):
        factor = math.sqrt(w[i]) * scale
        for j in range(n):
            x[i, j] *= factor * v[j]


@jit
def step_lane(w, x, slots, ops, numbers, rate, step, moves, match, look, scratch):  # type: ignore[no-untyped-def]
    """One step of one lane: x [m, n] is the gradient and becomes the direction, W -= rate direction.

    `step` counts from 1. Where `look`, returns (stable rank of what a normalising stage got, or of the gradient, RMS of
    the direction), else zeros.
    """
    denominator, wide, work, gram, mix = scratch
    m, n = x.shape
    divisor, is_ratio, used, rank = 1.0, False, 0, 0.0
    if look:
        rank = stable_rank(x, wide[0, :m], wide[1, :n])
    for at in range(ops.size):
        op, a, b, c = ops[at], numbers[at, 0], numbers[at, 1], numbers[at, 2]
        if op == 0:
            break
        slot = slots[used]
        if look and op in (SINKHORN, SIGN, RMS, NEWTON):
            rank = stable_rank(x, wide[0, :m], wide[1, :n])
        if op == HIDDEN_EMA:
            for i in range(m):
                for j in range(n):
                    x[i, j] += slot[i, j]
                    slot[i, j] = a * x[i, j]
            used += 1
        elif op == EMA:
            for i in range(m):
                for j in range(n):
                    slot[i, j] += (1 - a) * (x[i, j] - slot[i, j])
                    x[i, j] = slot[i, j]
            used += 1
        elif op == HEAVY_BALL:
            for i in range(m):
                for j in range(n):
                    slot[i, j] = a * slot[i, j] + x[i, j]
                    x[i, j] = x[i, j] + a * slot[i, j] if b > 0 else slot[i, j]
            used += 1
        elif op == SINKHORN:
            _sinkhorn(x, int(a), b, work, wide[0, :m], wide[1, :n])
        elif op == SIGN:
            for i in range(m):
                for j in range(n):
                    x[i, j] = np.sign(x[i, j])
        elif op == RMS:
            size = _rms(x)
            if size != 0:
                for i in range(m):
                    for j in range(n):
                        x[i, j] /= size
        elif op == SECOND:
            root = math.sqrt(1.0 - a**step)
            is_ratio = True
            for i in range(m):
                for j in range(n):
                    slot[i, j] = a * slot[i, j] + (1 - a) * x[i, j] * x[i, j]
                    denominator[i, j] = math.sqrt(slot[i, j]) / root + b
            used += 1
        elif op == UNBIAS and is_ratio:
            divisor *= 1.0 - a**step
        elif op == UNBIAS:
            for i in range(m):
                for j in range(n):
                    x[i, j] /= 1.0 - a**step
        elif op == SNR:
            _snr(x, slot, a, wide[0, :m], wide[1, :n])
            used += 1
        elif op == LION:
            for i in range(m):
                for j in range(n):
                    g = x[i, j]
                    x[i, j] = np.sign(slot[i, j] + (1 - a) * (g - slot[i, j]))
                    slot[i, j] += (1 - b) * (g - slot[i, j])
            used += 1
        elif op == NEWTON:
            _newton_schulz(x, int(a), b, c, work, gram, mix)
        if op in (DIVIDE, APPLY) and is_ratio:
            for i in range(m):
                for j in range(n):
                    x[i, j] = x[i, j] / denominator[i, j] / divisor
            divisor, is_ratio = 1.0, False
        if op == APPLY and moves:
            size = _rms(x) if match else 1.0
            if size != 0:
                kept = 1.0 - rate * a
                for i in range(m):
                    for j in range(n):
                        w[i, j] = w[i, j] * kept - rate / size * x[i, j]
    return rank, (_rms(x) if look else 0.0)


@jit
def run_expert(  # type: ignore[no-untyped-def]
    kind, counts, drawn, root, sigma, diagonal, target, noise_std, drift, rates, evaluate, key0, key1, expert,
    weights, slots, ops, numbers, idle, arm_of, lr, match, out,
):  # fmt: skip
    """All steps of one expert. out [L, evaluations, 3]: excess risk, stable rank, update RMS; target drifts in place.

    `counts` [steps] tokens a step, `rates` [steps] the schedule, `evaluate` [steps] bool, `idle`, `ops`, `numbers` per
    arm; `drawn` > 0 is how many outer products stand for the tokens (MATCHED).
    """
    steps, (lanes, m, n) = counts.size, weights.shape
    most = max(1, counts.max(), drawn)
    z, inputs, noise = np.empty((most, n)), np.empty((most, n)), np.empty((most, m))
    others = np.empty((most if kind == MATCHED else 1, n))
    words = np.empty((max(most * max(m, n), m * n) + 7) // 4 * 4, np.uint32)
    walk, full, curvature, cross = np.empty((m, n)), np.empty((m, n)), np.empty((n, n)), np.empty((m, n))
    x = np.empty((m, n))
    scratch = (np.empty((m, n)), np.empty((2, max(m, n))), np.empty((m, n)), np.empty((m, m)), np.empty((m, m)))
    taken = np.zeros(lanes, np.int64)
    base, place = expert << 40, 0
    for t in range(steps):
        if drift > 0:
            normals(key0, key1, t, base + (2 << 36), words, walk.reshape(-1))
            for i in range(m):
                for j in range(n):
                    target[i, j] += drift * walk[i, j]
        tokens = counts[t]
        few = False
        if tokens > 0 and kind == QUADRATIC:
            normals(key0, key1, t, base, words, full.reshape(-1))
            _times_root(full, root, diagonal, cross)
            for i in range(m):
                for j in range(n):
                    cross[i, j] *= noise_std / math.sqrt(tokens)
            curvature[:] = sigma
        elif tokens > 0:
            number = drawn if kind == MATCHED else tokens
            normals(key0, key1, t, base, words, z[:number].reshape(-1))
            normals(key0, key1, t, base + (1 << 36), words, noise[:number].reshape(-1))
            _times_root(z[:number], root, diagonal, inputs)
            for q in range(number):
                for i in range(m):
                    noise[q, i] *= noise_std
            few = kind == TOKENS and 2 * number <= n
            if kind == MATCHED:
                normals(key0, key1, t, base + (3 << 36), words, z[:number].reshape(-1))
                _times_root(z[:number], root, diagonal, others)
                _moments(others[:number], inputs[:number], noise[:number], curvature, cross)
                c = math.sqrt(number / tokens)
                for i in range(n):
                    for j in range(n):
                        curvature[i, j] = sigma[i, j] + c * curvature[i, j]
                for i in range(m):
                    for j in range(n):
                        cross[i, j] *= c
            elif not few:
                _moments(inputs[:number], inputs[:number], noise[:number], curvature, cross)
        for lane in range(lanes):
            arm = arm_of[lane]
            w = weights[lane]
            rank, size = np.nan, np.nan
            if tokens > 0 or idle[arm] != SKIP:
                if tokens == 0:
                    x[:] = 0.0
                elif few:
                    _from_tokens(w, target, inputs[:tokens], noise[:tokens], x)
                else:
                    _from_moments(w, target, curvature, cross, x)
                taken[lane] += 1
                moves = tokens > 0 or idle[arm] == AS_ZERO
                rank, size = step_lane(
                    w, x, slots[lane], ops[arm], numbers[arm], lr[lane] * rates[t], taken[lane], moves, match[lane],
                    evaluate[t], scratch,
                )  # fmt: skip
            if evaluate[t]:
                out[lane, place, 0] = excess_risk(w, target, sigma, diagonal)
                out[lane, place, 1] = rank
                out[lane, place, 2] = size
        if evaluate[t]:
            place += 1
