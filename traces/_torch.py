"""Between raw bits and torch tensors. The only module of the format that imports torch."""

from __future__ import annotations

import numpy as np
import torch

from traces.errors import TraceError
from traces.schema import DTYPES, RawTensor

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_torch(raw: RawTensor) -> torch.Tensor:
    """A CPU tensor of the recorded dtype that shares the memory of `raw`."""
    dtype = getattr(torch, raw.dtype)
    width = raw.data.dtype.itemsize
    bits = raw.data.view(np.dtype(f"i{width}") if width > 1 else np.uint8)
    return torch.from_numpy(bits.reshape(raw.shape)).view(dtype)


def from_torch(tensor: torch.Tensor) -> RawTensor:
    """The bits of a tensor, on the CPU; memory is shared where it is contiguous there already."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout != torch.strided:
        raise TraceError(
            f"a {tensor.layout} tensor of {name} cannot be stored; allowed are strided ones of {', '.join(DTYPES)}"
        )
    host = tensor.detach().cpu().contiguous()
    bits = host.view(_SIGNED[host.element_size()]).numpy()
    return RawTensor(name, tuple(tensor.shape), bits.view(DTYPES[name][1]))
