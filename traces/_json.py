"""Strict, bounded JSON with its own hash at the end.

A signed file is one JSON object in UTF-8 whose last 78 bytes are `,"sha256":"<64 hex digits>"}` and a newline; the
hash covers every byte before them. So a reader in any language checks a file without re-encoding it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traces._files import read_small, short
from traces.errors import TraceError

_TAIL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\n')
_TAIL_BYTES = 78
IGNORABLE_PREFIX = "x_"
MAX_TEXT = 4096
MAX_NAME = 512
MAX_VALUE_TEXT = 16 * MAX_TEXT
_INT64 = 1 << 63
_MISSING = object()


def parse_json(raw: bytes, where: str) -> Any:
    """Parse UTF-8 JSON; duplicate keys, NaN literals, bad UTF-8 and runaway nesting raise `TraceError`."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise TraceError(f"{where}: key {clip(twice)} appears twice in one object")
        return found

    def no_constant(text: str) -> Any:
        raise TraceError(f"{where}: {text} is not JSON")

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except TraceError:
        raise
    except UnicodeDecodeError as error:
        raise TraceError(f"{where}: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise TraceError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise TraceError(f"{where}: not JSON ({str(error).splitlines()[0]})") from None


def clip(value: object, width: int = 60) -> str:
    """`value` as a short printable literal for a message."""
    text = ascii(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def dump_signed(payload: dict[str, Any]) -> tuple[bytes, str]:
    """Encode an object as a signed file; return its bytes and its hash. One line per field and per listed record."""

    def encode(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    fields = []
    for key, value in payload.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            body = "[\n" + ",\n".join(encode(item) for item in value) + "]"
        else:
            body = encode(value)
        fields.append(f"{encode(key)}:{body}")
    try:
        text = ("{" + ",\n".join(fields)).encode("utf-8")
    except UnicodeEncodeError:
        raise TraceError("a name or text holds a lone surrogate, which UTF-8 cannot store; rename it") from None
    digest = hashlib.sha256(text).hexdigest()
    return text + f',"sha256":"{digest}"}}\n'.encode(), digest


def load_signed(path: Path, limit: int) -> tuple[dict[str, Any], str]:
    """Read and check a signed file of at most `limit` bytes; return the object without its hash, and the hash."""
    raw, where = read_small(path, limit), short(path)
    if not raw:
        raise TraceError(f"{where} is empty; it was cut, run `gradreel verify` on the trace")
    tail = _TAIL.fullmatch(raw[-_TAIL_BYTES:])
    if tail is None:
        raise TraceError(f"{where} does not end in its own hash; it was cut, changed or is no file of a trace")
    digest = hashlib.sha256(memoryview(raw)[:-_TAIL_BYTES]).hexdigest()
    if digest.encode() != tail[1]:
        raise TraceError(f"{where} is damaged: its sha256 is {digest[:12]}..., it says {tail[1][:12].decode()}...")
    value = parse_json(raw, where)
    if not isinstance(value, dict):
        raise TraceError(f"{where} must hold a JSON object")
    value.pop("sha256", None)
    return value, digest


def encode_value(value: Any, where: str, depth: int = 0) -> Any:
    """Turn metadata into JSON values; a float that is not finite becomes `{"nonfinite": "nan" | "inf" | "-inf"}`.

    What `decode_value` would refuse raises `TraceError` here, before it is sealed where nobody can read it.
    """
    if depth > 16:
        raise TraceError(f"{where} is nested more than 16 deep; flatten it")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value, where, MAX_VALUE_TEXT)
    if isinstance(value, dict):
        if set(value) == {"nonfinite"}:
            raise TraceError(f"{where}: the lone key 'nonfinite' is reserved; rename it")
        if not all(isinstance(key, str) for key in value):
            raise TraceError(
                f"{where}: keys must be text, got {clip(next(k for k in value if not isinstance(k, str)))}"
            )
        return {text(k, f"{where}: key"): encode_value(item, f"{where}.{k}", depth + 1) for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_value(item, where, depth + 1) for item in value]
    if not isinstance(value, int | float) and hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()  # a numpy scalar
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -_INT64 <= value < _INT64:
            raise TraceError(f"{where} is {clip(value)}; integers must fit in 64 bits, store it as text")
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"nonfinite": repr(float(value))}  # numpy's float64 is a float
    raise TraceError(f"{where} is a {type(value).__name__}; use numbers, text, booleans, None, lists and dicts of them")


def decode_value(value: Any, where: str, depth: int = 0) -> Any:
    """Undo `encode_value`, refusing what it would not have written."""
    if depth > 16:
        raise TraceError(f"{where} is nested more than 16 deep")
    if isinstance(value, str):
        return text(value, where, MAX_VALUE_TEXT)
    if isinstance(value, dict):
        if set(value) == {"nonfinite"}:
            if value["nonfinite"] not in ("nan", "inf", "-inf"):
                raise TraceError(f"{where}: {clip(value['nonfinite'])} is none of nan, inf, -inf")
            return float(value["nonfinite"])
        return {text(k, where): decode_value(item, f"{where}.{k}", depth + 1) for k, item in value.items()}
    if isinstance(value, list):
        return [decode_value(item, where, depth + 1) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and not -_INT64 <= value < _INT64:
        raise TraceError(f"{where} does not fit in 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise TraceError(f"{where} overflows a double")
    return value


def text(value: Any, where: str, limit: int = MAX_TEXT) -> str:
    """Check a string: length, no lone surrogates, printable enough for a one-line message."""
    if not isinstance(value, str) or len(value) > limit:
        raise TraceError(f"{where} must be text of at most {limit} characters, got {clip(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise TraceError(f"{where} holds a lone surrogate") from None
    return value


class Fields:
    """One JSON object read strictly: `take` each field, then `done` refuses what is left unless it is ignorable."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise TraceError(f"{where} must be a JSON object, got {clip(value)}")
        self._left, self.where = dict(value), where

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """Remove and return a field; a missing one is an error unless a default is given."""
        if name in self._left:
            return self._left.pop(name)
        if default is _MISSING:
            raise TraceError(f"{self.where}: field {name!r} is missing")
        return default

    def text(self, name: str, pattern: str | None = None, limit: int = MAX_TEXT) -> str:
        """A string field, matched in full against `pattern` if one is given."""
        value = text(self.take(name), f"{self.where}: {name}", limit)
        if pattern is not None and not re.fullmatch(pattern, value):
            raise TraceError(f"{self.where}: {name} is {clip(value)}, it must match {pattern}")
        return value

    def integer(self, name: str, low: int = 0, high: int = 1 << 53, default: Any = _MISSING) -> int:
        """An integer field within [low, high]."""
        return integer(self.take(name, default), f"{self.where}: {name}", low, high)

    def optional_integer(self, name: str, low: int = 0, high: int = 1 << 53) -> int | None:
        """An integer field that may be null or absent."""
        value = self.take(name, None)
        return None if value is None else integer(value, f"{self.where}: {name}", low, high)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean field."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise TraceError(f"{self.where}: {name} must be true or false, got {clip(value)}")
        return value

    def items(self, name: str, limit: int, read: Callable[[Any, str], Any], default: Any = _MISSING) -> tuple[Any, ...]:
        """A list field of at most `limit` elements, each passed through `read(element, where)`."""
        value = self.take(name, default)
        if not isinstance(value, list) or len(value) > limit:
            raise TraceError(f"{self.where}: {name} must be a list of at most {limit} elements, got {clip(value)}")
        return tuple(read(item, f"{self.where}: {name}[{i}]") for i, item in enumerate(value))

    def table(self, name: str, default: Any = _MISSING) -> dict[str, Any]:
        """An object field."""
        value = self.take(name, default)
        if not isinstance(value, dict):
            raise TraceError(f"{self.where}: {name} must be a JSON object, got {clip(value)}")
        return value

    def done(self) -> None:
        """Refuse unknown fields; those that begin with `x_` are ignorable."""
        unknown = [name for name in self._left if not name.startswith(IGNORABLE_PREFIX)]
        if unknown:
            raise TraceError(
                f"{self.where}: unknown field {clip(unknown[0])}; a newer gradreel wrote it, upgrade to read it"
            )


def integer(value: Any, where: str, low: int = 0, high: int = 1 << 53) -> int:
    """Check that `value` is an integer within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise TraceError(f"{where} must be an integer from {low} to {high}, got {clip(value)}")
    return value
