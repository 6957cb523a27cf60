"""Which implementation of an op runs, and why another one does not."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "eager", "cpu", "triton", "cuda")
_FUSED_DTYPES = ("float32", "bfloat16", "float16")


def refusal(op: str, backend: str, x: Tensor, built: tuple[str, ...]) -> str | None:
    """Why `backend` cannot run `op` on `x`, as a clause; None if it can."""
    if backend not in built:
        return f"{op} has no {backend} implementation; it has {', '.join(built)}"
    dtype = str(x.dtype).removeprefix("torch.")
    if x.is_sparse or x.is_complex() or not x.is_floating_point():
        return f"the tensor is {'sparse' if x.is_sparse else dtype}; give a dense real floating-point tensor"
    if backend == "cpu":
        if x.device.type != "cpu":
            return f"the tensor is on {x.device}; the cpu backend reads CPU memory"
        if hasattr(x, "fake_mode"):
            return "the tensor is a fake one, as memory plans use; the cpu backend reads CPU memory"
        if dtype not in _FUSED_DTYPES:
            return f"the tensor is {dtype}; the cpu backend takes {', '.join(_FUSED_DTYPES)}"
        if importlib.util.find_spec("numba") is None:
            return "numba is not installed; pip install numba"
    if backend in ("triton", "cuda") and dtype not in _FUSED_DTYPES:
        return f"the tensor is {dtype}; the {backend} backend takes {', '.join(_FUSED_DTYPES)}"
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if backend in ("triton", "cuda") and x.device.type != "cuda" and not interpreted:
        return f"the tensor is on {x.device}; the {backend} backend needs a CUDA tensor"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    return None


def choose(op: str, x: Tensor, backend: str | None, built: tuple[str, ...]) -> str:
    """The backend that runs: the one named, or the fastest that can. Raises when the one named cannot."""
    if backend is None:
        # triton only by name, as long as no GPU has checked it: the interpreter cannot show a race.
        for candidate in ("cpu", "eager"):
            if candidate in built and refusal(op, candidate, x, built) is None:
                return candidate
        raise GradreelError(f"{op}: {refusal(op, 'eager', x, built)}")
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    why = refusal(op, backend, x, built)
    if why is not None:
        raise GradreelError(f"{op}: backend {backend!r} cannot run: {why}; or leave backend=None")
    return backend
