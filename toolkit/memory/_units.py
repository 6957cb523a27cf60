"""Bytes as people write and read them. GiB (2^30) and GB (10^9) stand side by side, each under its own name."""

from __future__ import annotations

import re

from traces.errors import GradreelError

GIB, GB = 1 << 30, 10**9
_SIZES = {"B": 1, "MB": 10**6, "MIB": 1 << 20, "GB": GB, "GIB": GIB, "TB": 10**12, "TIB": 1 << 40}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str) -> int:
    """`"40GB"` -> 40 x 10^9, `"40GiB"` -> 40 x 2^30. Errors: GradreelError with what is allowed."""
    match = _AMOUNT.fullmatch(text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _SIZES or float(match.group(1)) == 0:
        raise GradreelError(f"memory {text!r} is not understood; allowed: a number and a unit, such as 40GB or 40GiB")
    return round(float(match.group(1)) * _SIZES[unit])


def parse_gpus(text: str) -> tuple[int, int]:
    """`"8x80GB"` -> (8, 80 x 10^9)."""
    count, cross, amount = text.partition("x")
    if not cross or not count.strip().isdigit() or not 1 <= int(count) <= 1 << 20:
        raise GradreelError(f"GPUs {text!r} are not understood; allowed: a number, x and a memory, such as 8x80GB")
    return int(count), parse_bytes(amount)


def both(count: int) -> str:
    """`31.328 GiB (33.638 GB)`."""
    return f"{count / GIB:,.3f} GiB ({count / GB:,.3f} GB)"
