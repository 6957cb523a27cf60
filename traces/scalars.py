"""Which scalars a trace can hold: told when they are logged, so that a strange one never costs its step."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from traces._json import MAX_NAME, clip, encode_value, text
from traces.errors import TraceError

#: Elements of one logged tensor or array; what is larger belongs into a file of its own.
MAX_ELEMENTS = 4096


def why_not_kept(name: str, value: Any) -> str | None:
    """Why a trace cannot hold `value` under `name`, as one sentence; None where it can. Never waits for a device."""
    where = f"scalar {clip(name)}"
    try:
        text(name, where, MAX_NAME)
        _check(value, where)
    except TraceError as error:
        return str(error)
    return None


def _check(value: Any, where: str, depth: int = 0) -> int:
    """Refuse what cannot be kept; return about how many numbers and characters it takes."""
    if isinstance(value, (Tensor, np.ndarray)):
        count = value.numel() if isinstance(value, Tensor) else value.size
        if "complex" in str(value.dtype) or value.dtype == object:
            raise TraceError(f"{where} is {value.dtype}; log its parts as real numbers")
    elif isinstance(value, (list, tuple)) and depth < 16:
        count = sum(_check(item, where, depth + 1) for item in value)
    else:
        encoded = encode_value(value, where, depth)
        count = len(repr(encoded)) // 16 if isinstance(encoded, (dict, list)) else 1
    if count > MAX_ELEMENTS:
        raise TraceError(f"{where} has about {count} elements, at most {MAX_ELEMENTS} are kept of one scalar")
    return count
