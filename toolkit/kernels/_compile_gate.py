"""Compile every Triton kernel for a GPU that is not there, and read off its registers, spills and shared memory.

Run as `python -m toolkit.kernels._compile_gate`: one JSON line per kernel and target. Needs triton, whose wheel brings
ptxas and cuobjdump; no driver and no GPU. Must not run under TRITON_INTERPRET, which replaces the compiler.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGETS = (80, 90)
#: More than this and fewer than half of a processor's warps fit.
MAX_REGISTERS = 128


def compile_all() -> Iterator[dict[str, Any]]:
    """Yield {kernel, target, registers, spill_bytes, shared_bytes} for every kernel, element width and target."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, kernel, signature, constants in (*_kernels(), *_elementwise()):
        for target in TARGETS:
            named = dict.fromkeys(constants, "constexpr")
            order = kernel.arg_names
            types = {argument: {**signature, **named}[argument] for argument in order}
            source = ASTSource(
                fn=kernel, signature=types, constexprs={(order.index(k),): v for k, v in constants.items()}
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", target, 32))
            registers, spilled = _usage(compiled.asm["cubin"])
            yield {
                "kernel": name,
                "target": f"sm_{target}",
                "registers": registers,
                "spill_bytes": spilled,
                "shared_bytes": int(compiled.metadata.shared),
            }


def _kernels() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    from toolkit.kernels import sr_sinkhorn_triton as sinkhorn

    sizes = {"BM": sinkhorn.ROW_BLOCK, "BN": sinkhorn.COLUMN_BLOCK}
    for bits in (False, True):
        element = "*i16" if bits else "*fp32"
        label = "bf16" if bits else "fp32"
        shapes = {"m": "i32", "n": "i32"}
        for first in (False, True):
            yield (
                f"sr_sinkhorn.sweep {label}{' first' if first else ''}",
                sinkhorn.sweep_kernel,
                {"x": element, "w": "*fp64", "v": "*fp64", "partial": "*fp64", **shapes},
                {"FIRST": first, "BITS": bits, **sizes, "TILES": sinkhorn.TILES},
            )
            yield (
                f"sr_sinkhorn.write {label}{' step' if first else ''}",
                sinkhorn.write_kernel,
                {
                    "x": element,
                    "w": "*fp64",
                    "v": "*fp64",
                    "target": element,
                    "scale": "fp64",
                    "kept": "fp64",
                    **shapes,
                },
                {"STEP": first, "BITS": bits, "TARGET_BITS": bits, **sizes},
            )
    yield (
        "sr_sinkhorn.columns",
        sinkhorn.columns_kernel,
        {"partial": "*fp64", "v": "*fp64", "m": "i32", "n": "i32", "blocks": "i32"},
        {"BN": sinkhorn.COLUMN_BLOCK},
    )


def _elementwise() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    from toolkit.kernels import adamw_step_triton, sign_step_triton
    from toolkit.kernels._store_triton import BLOCK

    counters = dict.fromkeys(("key0", "key1", "step", "count"), "i64")
    for bits in (False, True):
        element, label = ("*i16", "bf16") if bits else ("*fp32", "fp32")
        own = {"BITS": bits, "NOISE": bits, "BLOCK": BLOCK}
        numbers = dict.fromkeys(("lr", "keep"), "fp32")
        yield (
            f"sign_step {label}",
            sign_step_triton.sign_kernel,
            {"w": element, "x": element, **numbers, **counters},
            {**own, "X_BITS": bits},
        )
        numbers = dict.fromkeys(("rate", "root2", "rest1", "beta2", "rest2", "eps", "keep"), "fp32")
        yield (
            f"adamw_step {label}",
            adamw_step_triton.adamw_kernel,
            {"w": element, "g": element, "m": "*fp32", "v": "*fp32", **numbers, **counters},
            {**own, "G_BITS": bits},
        )


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a compiled kernel, as cuobjdump reports them."""
    import triton

    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"LOCAL:(\d+)", text)
    frame = re.search(r"STACK:(\d+)", text)
    if registers is None or stack is None or frame is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text[:200]!r}")
    return int(registers[1]), int(stack[1]) + int(frame[1])


if __name__ == "__main__":
    for row in compile_all():
        print(json.dumps(row))
