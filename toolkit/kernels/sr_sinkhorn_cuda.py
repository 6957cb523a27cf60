"""sr_sinkhorn in `sr_sinkhorn.cu`: matrices that fit in the shared memory of a cluster of up to 8 thread blocks.

Compiled by NVRTC when first used, once per device kind and form, and launched through the driver on torch's stream.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import TYPE_CHECKING, Any

from toolkit.kernels._nvrtc import compile_cubin
from toolkit.kernels.sr_sinkhorn import SinkhornResult, output_scale, reshape_result
from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 512
#: Shared memory that one block may have, by compute capability; clusters exist from 9.0 on.
SHARED_BYTES = {(8, 0): 163 * 1024, (9, 0): 227 * 1024}
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def plan(m: int, n: int, bytes_per_element: int, capability: tuple[int, int]) -> tuple[int, int, int, int] | None:
    """(cluster, rows a block, row groups, shared bytes) for one matrix; None where no cluster can hold it."""
    limit = SHARED_BYTES.get(capability, 99 * 1024)
    groups = max(1, min(8, THREADS // max(1, n)))
    for cluster in (1, 2, 4, 8) if capability >= (9, 0) else (1,):
        rows = -(-m // cluster)
        head = (n + rows + groups * n) * 8
        shared = (head + 15) // 16 * 16 + rows * n * bytes_per_element
        if shared <= limit:
            return cluster, rows, groups, shared
    return None


def run(x: Tensor, sweeps: list[int], compat: str, directions: bool) -> SinkhornResult:
    """See `sr_sinkhorn.sr_sinkhorn_run`; every number of sweeps is a run of its own here."""
    import torch

    flat, (m, n) = _stack(x), x.shape[-2:]
    scale, f64 = output_scale(compat, m), {"dtype": torch.float64, "device": x.device}
    result = SinkhornResult("cuda", torch.zeros(len(flat), dtype=torch.bool, device=x.device))
    for sweep in sweeps:
        w, v = torch.zeros((len(flat), m), **f64), torch.zeros((len(flat), n), **f64)  # type: ignore[call-overload]
        out = torch.empty_like(flat)
        _launch(flat, out, w, v, scale, 1.0, sweep, False)
        result.row_factor[sweep], result.column_factor[sweep] = w, v * scale
        result.nonfinite |= v.isnan().any(-1)
        result.cosine[sweep] = torch.full((len(flat),), math.nan, **f64)  # type: ignore[call-overload]
        if directions:
            result.directions[sweep] = out.to(x.dtype)
        else:
            wide, own = flat.double(), out.double()
            norms = wide.square().sum((1, 2)) * own.square().sum((1, 2))
            result.cosine[sweep] = (wide * own).sum((1, 2)) / norms.sqrt()
    return reshape_result(result, tuple(x.shape[:-2]), x)


def apply(weight: Tensor, x: Tensor, lr: float, decay: float, sweeps: int, compat: str) -> None:
    """W <- (1 - decay) W - lr * direction, to nearest, in place; contiguous `weight` [E, m, n]."""
    flat = _stack(x)
    if flat.dtype != weight.dtype:
        raise GradreelError(f"sr_sinkhorn: backend 'cuda' needs one dtype; weight {weight.dtype}, gradient {x.dtype}")
    _launch(flat, weight, None, None, lr * output_scale(compat, x.shape[-2]), 1.0 - decay, sweeps, True)


def _stack(x: Tensor) -> Tensor:
    import torch

    flat = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]).contiguous()
    flat = flat.float() if flat.dtype == torch.float16 else flat
    return flat if flat.data_ptr() % 16 == 0 else flat.clone()


def _launch(
    x: Tensor, target: Tensor, w: Tensor | None, v: Tensor | None, scale: float, kept: float, sweeps: int, step: bool
) -> None:
    import torch

    experts, m, n = x.shape
    if not x.numel():
        return
    capability = torch.cuda.get_device_capability(x.device)
    form = plan(m, n, x.element_size(), capability)
    if form is None:
        raise GradreelError(
            f"sr_sinkhorn: backend 'cuda' cannot hold {m}x{n} {x.dtype} in the shared memory of a cluster; use 'triton'"
        )
    cluster, rows, groups, shared = form
    with torch.cuda.device(x.device):
        function = _function(capability, cluster, x.dtype == torch.bfloat16, step, x.device.index or 0)
        _driver_call("cuFuncSetAttribute", function, _MAX_SHARED, shared)
        pointers = [ctypes.c_void_p(t.data_ptr() if t is not None else None) for t in (x, target, w, v)]
        numbers = [ctypes.c_double(scale), ctypes.c_double(kept)]
        numbers += [ctypes.c_int(value) for value in (m, n, rows, groups, sweeps)]  # type: ignore[misc]
        values = [*pointers, *numbers]
        array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        _driver_call("cuLaunchKernel", function, experts * cluster, 1, 1, THREADS, 1, 1, shared, stream, array, None)


@cache
def _function(capability: tuple[int, int], cluster: int, bits: bool, step: bool, device: int) -> Any:
    """The kernel's handle in the current context; modules stay loaded for the life of the process."""
    target = 10 * capability[0] + capability[1]
    cubin, _ = compile_cubin("sr_sinkhorn.cu", target, {"CLUSTER": cluster, "BITS": int(bits), "APPLY": int(step)})
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _driver_call("cuModuleLoadData", ctypes.byref(module), cubin)
    _driver_call("cuModuleGetFunction", ctypes.byref(function), module, b"sinkhorn_cluster")
    return function


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _driver_call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise GradreelError(f"the CUDA driver failed in {name} with code {code}")
