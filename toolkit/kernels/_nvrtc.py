"""CUDA C++ to machine code through NVRTC, which needs no CUDA toolkit, no headers, no driver and no GPU.

NVRTC comes with CUDA builds of torch, or alone with `pip install nvidia-cuda-nvrtc`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from traces.errors import GradreelError

FOLDER = Path(__file__).parent
HEADERS = ("device_maths.h",)


@cache
def library() -> Any:
    """NVRTC as ctypes loads it; None where there is none."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(
        str(f) for folder in folders for f in Path(folder).glob("*/lib/libnvrtc.so.*") if "alt" not in f.name
    )
    for name in (*reversed(found), ctypes.util.find_library("nvrtc") or "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compile_cubin(file: str, target: int, defines: dict[str, int]) -> tuple[bytes, dict[str, int]]:
    """(cubin, {registers, spill_bytes, stack_bytes}) of a `.cu` file beside this one for sm_<target>.

    Errors: `GradreelError` where NVRTC is missing or the source does not compile.
    """
    nvrtc = library()
    if nvrtc is None:
        raise GradreelError("NVRTC is not installed; pip install nvidia-cuda-nvrtc, or a CUDA build of torch")
    source = (FOLDER / file).read_bytes()
    texts = (ctypes.c_char_p * len(HEADERS))(*((FOLDER / name).read_bytes() for name in HEADERS))
    names = (ctypes.c_char_p * len(HEADERS))(*(name.encode() for name in HEADERS))
    program = ctypes.c_void_p()
    _good(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), len(HEADERS), texts, names))
    try:
        options = [f"--gpu-architecture=sm_{target}", "--std=c++17", "--ptxas-options=-v"]
        options += [f"-D{name}={value}" for name, value in defines.items()]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
        log = _read(nvrtc, program, "ProgramLog").decode(errors="replace").rstrip("\0")
        if failed:
            raise GradreelError(f"{file} does not compile for sm_{target}: {' '.join(log.split())[:800]}")
        return _read(nvrtc, program, "CUBIN"), usage(log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def usage(log: str) -> dict[str, int]:
    """What the assembler says a kernel uses."""
    registers, stack = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes stack frame", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    if registers is None or stack is None or not spills:
        raise GradreelError(f"the assembler's log says nothing of registers: {log[:200]!r}")
    return {"registers": int(registers[1]), "spill_bytes": sum(map(int, spills)), "stack_bytes": int(stack[1])}


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    size = ctypes.c_size_t()
    _good(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _good(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _good(nvrtc: Any, code: int) -> None:
    if code:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise GradreelError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(code).decode()}")
