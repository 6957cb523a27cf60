"""The CUDA kernel without a GPU: compiled for GPUs that are not there, and built for the host with one thread."""

import ctypes
import math
import shutil
import subprocess

import numpy as np
import pytest
import torch

from toolkit.kernels import sr_sinkhorn
from toolkit.kernels._nvrtc import FOLDER, compile_cubin, library, usage
from toolkit.kernels._philox import philox_block, philox_words
from toolkit.kernels._rounding import stochastic_bf16
from toolkit.kernels.sr_sinkhorn_cuda import SHARED_BYTES, THREADS, plan
from traces.errors import GradreelError

compiler = shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(compiler is None, reason="no C++ compiler on this machine")
needs_nvrtc = pytest.mark.skipif(
    library() is None, reason="NVRTC is not installed; it comes with the dev extra on Linux"
)

#: What CUDA's compiler knows and a host's does not; one thread of one lane makes every loop serial.
SHIM = """
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(a, b)
#define __align__(a)
#define __shared__
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } blockIdx, threadIdx;
static void __syncthreads() {}
static double __shfl_xor_sync(unsigned, double value, int) { return value; }
static double __longlong_as_double(long long bits) { double d; memcpy(&d, &bits, 8); return d; }
using std::sqrt;
#define THREADS 1
#define LANES 1
#define CLUSTER 1
alignas(16) unsigned char memory[1 << 20];
#include "sr_sinkhorn.cu"
extern "C" void solve(const element *x, element *target, double *w, double *v, double scale, double kept, int experts,
                      int m, int n, int groups, int sweeps) {
  for (blockIdx.x = 0; blockIdx.x < (unsigned)experts; ++blockIdx.x)
    sinkhorn_cluster(x, target, w, v, scale, kept, m, n, m, groups, sweeps);
}
"""
MATHS = """
#include "device_maths.h"
extern "C" void words(gr_u32 a, gr_u32 b, gr_u64 step, gr_u64 offset, int count, gr_u32 *out) {
  for (int i = 0; i < count; ++i) out[i] = gr_philox(a, b, step, offset + i);
}
extern "C" void stochastic(const float *x, const gr_u32 *bits, int count, gr_u16 *out) {
  for (int i = 0; i < count; ++i) out[i] = gr_stochastic(x[i], bits[i]);
}
extern "C" void nearest(const float *x, int count, gr_u16 *out) {
  for (int i = 0; i < count; ++i) out[i] = gr_nearest(x[i]);
}
"""


def build(folder, text, **defines):
    source, built = folder / "a.cpp", folder / f"a{'_'.join(map(str, defines.values()))}.so"
    source.write_text(text)
    flags = [f"-D{name}={value}" for name, value in defines.items()]
    command = [compiler, "-O1", "-shared", "-fPIC", "-w", f"-I{FOLDER}", *flags, str(source), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return ctypes.CDLL(str(built))


def pointer(array):
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)


@pytest.fixture(scope="module")
def maths(tmp_path_factory):
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    return build(tmp_path_factory.mktemp("maths"), MATHS)


@pytest.mark.parametrize("offset", [0, 3, 2**31 - 2, 2**32 - 1, 2**34 - 2, 2**62 + 1])
@pytest.mark.parametrize("step", [1, 2**32 + 5])
def test_philox_of_the_device_is_that_of_torch(maths, offset, step):
    out = np.zeros(9, np.uint32)
    maths.words(0xA4093822, 0x299F31D0, ctypes.c_uint64(step), ctypes.c_uint64(offset), 9, pointer(out))
    assert out.tolist() == philox_words((0xA4093822, 0x299F31D0), step, offset, 9).tolist()


def test_philox_known_answer(maths):
    # The reference implementation's known-answer file: counter and key zero.
    out = np.zeros(4, np.uint32)
    maths.words(0, 0, ctypes.c_uint64(0), ctypes.c_uint64(0), 4, pointer(out))
    assert [hex(word) for word in out] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    assert tuple(out.tolist()) == philox_block((0, 0, 0, 0), (0, 0))


def test_roundings_of_the_device_are_exact(maths):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    x[:6] = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1.5)
    bits = generator.integers(0, 2**32, x.size, dtype=np.uint32)
    out = np.zeros(x.size, np.uint16)
    maths.nearest(pointer(x), x.size, pointer(out))
    finite = ~np.isnan(x)
    truth = torch.from_numpy(x).bfloat16()
    assert np.array_equal(out[finite], truth.view(torch.uint16).numpy()[finite])
    assert (out[~finite] == 0x7FC0).all()
    maths.stochastic(pointer(x), pointer(bits), x.size, pointer(out))
    truth = stochastic_bf16(torch.from_numpy(x), torch.from_numpy((bits >> 16).astype(np.int32)))
    assert np.array_equal(out[finite], truth.view(torch.uint16).numpy()[finite])
    exact = torch.from_numpy(generator.standard_normal(1000)).bfloat16()
    maths.stochastic(pointer(exact.float().numpy()), pointer(bits), 1000, pointer(out))
    assert np.array_equal(out[:1000], exact.view(torch.uint16).numpy())


@needs_compiler
@pytest.mark.parametrize("shape", [(2, 30, 45), (3, 16, 32), (1, 1, 7), (1, 9, 1)])
def test_the_kernel_as_serial_code_agrees_with_float64(tmp_path, shape):
    direction, step = (build(tmp_path, SHIM, BITS=0, APPLY=apply) for apply in (0, 1))
    experts, m, n = shape
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x *= 10.0 ** np.linspace(-15, 15, m, dtype=np.float32)[:, None]
    if min(m, n) > 5:
        x[0, 3], x[0, :, 2] = 0, 0
    truth = sr_sinkhorn(torch.from_numpy(x), 5, "reference").double().numpy()
    w, v, out = np.zeros((experts, m)), np.zeros((experts, n)), np.zeros_like(x)
    tail = (experts, m, n, 3, 5)
    number = ctypes.c_double
    direction.solve(pointer(x), pointer(out), pointer(w), pointer(v), number(1.0), number(1.0), *tail)
    assert (np.abs(out - truth) <= 3e-7 * np.abs(truth)).all()
    assert np.allclose(w[..., None] * x * v[:, None], truth, rtol=3e-7)
    weight = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    mine = weight.copy()
    step.solve(pointer(x), pointer(mine), None, None, number(0.1), number(0.99), *tail)
    assert np.allclose(mine, weight * 0.99 - 0.1 * truth, rtol=2e-7, atol=1e-7)
    x[0, 0, 0] = math.nan
    direction.solve(pointer(x), pointer(out), pointer(w), pointer(v), number(1.0), number(1.0), *tail)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()


@needs_compiler
def test_the_kernel_on_bfloat16_as_serial_code(tmp_path):
    kernel = build(tmp_path, SHIM, BITS=1, APPLY=0)
    x = torch.randn(2, 21, 24, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = torch.empty_like(x)
    one = ctypes.c_double(1.0)
    source, target = x.view(torch.uint16).numpy(), out.view(torch.uint16).numpy()
    kernel.solve(pointer(source), pointer(target), None, None, one, one, 2, 21, 24, 2, 5)
    assert torch.equal(out, sr_sinkhorn(x, 5, "reference"))


@needs_nvrtc
@pytest.mark.parametrize(("target", "cluster"), [(80, 1), (90, 1), (90, 2), (90, 4), (90, 8)])
def test_it_compiles_without_spills_and_two_blocks_fit(target, cluster):
    for bits, apply in ((0, 1), (1, 0)):
        code, used = compile_cubin("sr_sinkhorn.cu", target, {"CLUSTER": cluster, "BITS": bits, "APPLY": apply})
        assert code[:4] == b"\x7fELF"
        assert used["spill_bytes"] == used["stack_bytes"] == 0, used
        assert used["registers"] * THREADS * 2 <= 65536, used


@needs_nvrtc
def test_a_source_that_does_not_compile_is_one_line():
    with pytest.raises(GradreelError, match=r"does not compile for sm_90") as caught:
        compile_cubin("sr_sinkhorn.cu", 90, {"CLUSTER": 2, "BITS": 0, "APPLY": 0, "element": 7})
    assert "\n" not in str(caught.value)


def test_the_assemblers_log_is_read():
    log = (
        "ptxas info : 24 bytes stack frame, 40 bytes spill stores, 8 bytes spill loads\nptxas info : Used 62 registers"
    )
    assert usage(log) == {"registers": 62, "spill_bytes": 48, "stack_bytes": 24}


@pytest.mark.parametrize(
    ("shape", "size", "capability", "cluster"),
    [
        ((640, 320), 4, (9, 0), 4),
        ((640, 320), 2, (9, 0), 2),
        ((1024, 512), 2, (9, 0), 8),
        ((1024, 512), 4, (9, 0), None),
        ((200, 100), 4, (8, 0), 1),
        ((640, 320), 4, (8, 0), None),
        ((1, 1), 4, (9, 0), 1),
    ],
)
def test_the_smallest_cluster_that_holds_a_matrix_is_taken(shape, size, capability, cluster):
    form = plan(*shape, size, capability)
    if cluster is None:
        assert form is None
        return
    assert form is not None
    assert form[0] == cluster
    assert form[0] * form[1] >= shape[0]
    assert form[1] * shape[1] * size < form[3] <= SHARED_BYTES[capability]
