"""sr_sinkhorn on a GPU: row blocks that are read twice in a row, the second time from cache, and no copy of x.

Legend: x [E, m, n], w [E, m] row factors, v [E, n] column factors, P row blocks.

A program takes tiles of BM rows of one expert. It sums a tile against v for w, reads it again, which the cache answers,
for its column sums, and adds those to its own line of [E, P, n]; a second kernel adds the P lines in order. So there
are no atomics and the result does not depend on timing. Sums and factors are float64, which covers every float32
without scaling; the kernels wait for memory long before they wait for float64 units.

bfloat16 travels as int16 bits, since the interpreter's own bfloat16 arithmetic is wrong. Programs' indices become int64
before they are multiplied, since 2^31 elements are ordinary for stacked experts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from toolkit.kernels.sr_sinkhorn import SinkhornResult, output_scale, reshape_result

if TYPE_CHECKING:
    from torch import Tensor

ROW_BLOCK, COLUMN_BLOCK, TILES = 8, 128, 16


@triton.jit
def _widen(value, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    if BITS:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float64)


@triton.jit
def _narrow(value, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    out = value.to(tl.float32)
    if BITS:
        pattern = out.to(tl.int32, bitcast=True)
        nearest = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        out = tl.where(out == out, nearest, 0x7FC0).to(tl.int16)
    return out


@triton.jit
def sweep_kernel(  # type: ignore[no-untyped-def]
    x, w, v, partial, m, n, FIRST: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Row factors of TILES tiles of rows, and their column sums. x, w, v, partial: contiguous."""
    block, e = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = partial + (e * tl.num_programs(0) + block) * n
    for tile in range(TILES):
        rows = (block * TILES + tile) * BM + tl.arange(0, BM).to(tl.int64)
        live = rows < m
        base = x + (e * m + rows[:, None]) * n
        total = tl.zeros((BM,), tl.float64)
        for start in range(0, n, BN):
            columns = start + tl.arange(0, BN)
            inside = columns < n
            t = _widen(tl.load(base + columns[None, :], mask=live[:, None] & inside[None, :], other=0), BITS)
            if not FIRST:
                t = t * tl.load(v + e * n + columns, mask=inside, other=0.0)[None, :]
            total += tl.sum(t * t, axis=1)
        # A zero row gets 0; a row with a NaN or an infinity gets NaN, and with it the whole expert, but no other.
        good = (total > 0) & (total < float("inf"))
        factor = tl.where(good, tl.sqrt(n / tl.where(good, total, 1.0)), tl.where(total == 0, 0.0, float("nan")))
        tl.store(w + e * m + rows, factor, mask=live)
        for start in range(0, n, BN):
            columns = start + tl.arange(0, BN)
            inside = columns < n
            y = _widen(tl.load(base + columns[None, :], mask=live[:, None] & inside[None, :], other=0), BITS)
            y = y * tl.where(live, factor, 0.0)[:, None]
            sums = tl.sum(y * y, axis=0)
            if tile > 0:
                sums += tl.load(line + columns, mask=inside, other=0.0)
            tl.store(line + columns, sums, mask=inside)
        tl.debug_barrier()  # the next tile reads the line that other threads may have written


@triton.jit
def columns_kernel(partial, v, m, n, blocks, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Column factors from the blocks' sums, added in order."""
    columns, e = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1).to(tl.int64)
    inside = columns < n
    total = tl.zeros((BN,), tl.float64)
    for block in range(blocks):
        total += tl.load(partial + (e * blocks + block) * n + columns, mask=inside, other=0.0)
    good = total > 0
    factor = tl.where(good, tl.sqrt(m / tl.where(good, total, 1.0)), tl.where(total == 0, 0.0, float("nan")))
    tl.store(v + e * n + columns, factor, mask=inside)


@triton.jit
def write_kernel(  # type: ignore[no-untyped-def]
    x, w, v, target, scale, kept, m, n,
    STEP: tl.constexpr, BITS: tl.constexpr, TARGET_BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """target <- scale w x v, or with STEP target <- kept target - scale w x v."""
    block, e = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows = block * BM + tl.arange(0, BM).to(tl.int64)
    columns = tl.program_id(2) * BN + tl.arange(0, BN)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    at = (e * m + rows[:, None]) * n + columns[None, :]
    factor = tl.load(w + e * m + rows, mask=rows < m, other=0.0) * scale
    value = _widen(tl.load(x + at, mask=mask, other=0), BITS) * factor[:, None]
    value = value * tl.load(v + e * n + columns, mask=columns < n, other=0.0)[None, :]
    if STEP:
        value = _widen(tl.load(target + at, mask=mask, other=0), TARGET_BITS) * kept - value
    tl.store(target + at, _narrow(value, TARGET_BITS), mask=mask)


def _bits(x: Tensor) -> tuple[Tensor, bool]:
    import torch

    return (x.view(torch.int16), True) if x.dtype == torch.bfloat16 else (x, False)


class _Solver:
    """The sweeps of one stack [E, m, n]; memory beside x: factors, and one float64 line per row block."""

    def __init__(self, x: Tensor) -> None:
        import torch

        self.source, self.bits = _bits(x)
        self.experts, self.m, self.n = x.shape
        self.blocks = triton.cdiv(self.m, ROW_BLOCK * TILES)
        options: dict[str, Any] = {"dtype": torch.float64, "device": x.device}
        self.w, self.v = torch.empty((self.experts, self.m), **options), torch.empty((self.experts, self.n), **options)
        self.partial = torch.empty((self.experts, self.blocks, self.n), **options)

    def sweep(self, first: bool) -> None:
        sweep_kernel[(self.blocks, self.experts)](
            self.source, self.w, self.v, self.partial, self.m, self.n, FIRST=first, BITS=self.bits, BM=ROW_BLOCK,
            BN=COLUMN_BLOCK, TILES=TILES,
        )  # fmt: skip
        columns_kernel[(triton.cdiv(self.n, COLUMN_BLOCK), self.experts)](
            self.partial, self.v, self.m, self.n, self.blocks, BN=COLUMN_BLOCK
        )

    def write(self, target: Tensor, scale: float, kept: float, step: bool) -> None:
        goal, bits = _bits(target)
        write_kernel[(triton.cdiv(self.m, ROW_BLOCK), self.experts, triton.cdiv(self.n, COLUMN_BLOCK))](
            self.source, self.w, self.v, goal, scale, kept, self.m, self.n, STEP=step, BITS=self.bits, TARGET_BITS=bits,
            BM=ROW_BLOCK, BN=COLUMN_BLOCK,
        )  # fmt: skip


def _stack(x: Tensor) -> Tensor:
    import torch

    flat = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]).contiguous()
    return flat.float() if flat.dtype == torch.float16 else flat


def run(x: Tensor, sweeps: list[int], compat: str, directions: bool) -> SinkhornResult:
    """See `sr_sinkhorn.sr_sinkhorn_run`; `sweeps` ascending. Cosines only where there are no directions."""
    import torch

    flat, m = _stack(x), x.shape[-2]
    solver = _Solver(flat)
    scale = output_scale(compat, m)
    result = SinkhornResult("triton", torch.zeros(len(flat), dtype=torch.bool, device=x.device))
    for sweep in range(1, sweeps[-1] + 1):
        if flat.numel():
            solver.sweep(sweep == 1)
        if sweep not in sweeps:
            continue
        result.row_factor[sweep], result.column_factor[sweep] = solver.w.clone(), solver.v * scale
        result.cosine[sweep] = torch.full((len(flat),), math.nan, dtype=torch.float64, device=x.device)
        if directions:
            out = torch.empty_like(flat)
            if flat.numel():
                solver.write(out, scale, 1.0, False)
            result.directions[sweep] = out.to(x.dtype)
        else:
            squares = flat.double().square_()
            dot = torch.einsum("emn,em,en->e", squares, solver.w, solver.v)
            own = torch.einsum("emn,em,en->e", squares, solver.w.square(), solver.v.square())
            result.cosine[sweep] = dot / (squares.sum((1, 2)) * own).sqrt()
    if flat.numel():
        result.nonfinite = solver.v.isnan().any(-1)
    return reshape_result(result, tuple(x.shape[:-2]), x)


def apply(weight: Tensor, x: Tensor, lr: float, decay: float, sweeps: int, compat: str) -> None:
    """W <- (1 - decay) W - lr * direction, to nearest, in place; contiguous float32 or bfloat16 `weight` [E, m, n]."""
    flat = _stack(x)
    if not flat.numel():
        return
    solver = _Solver(flat)
    for sweep in range(sweeps):
        solver.sweep(sweep == 0)
    solver.write(weight, lr * output_scale(compat, x.shape[-2]), 1.0 - decay, True)
