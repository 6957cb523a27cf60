"""CSV with one line per activation: layer and expert, perhaps step and token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from traces._files import opened, read_into
from traces._json import clip
from traces.interchange._lines import Place, blocks

MAX_LINE_BYTES = 4096
_NAMES = {"layer_id": "layer", "expert_id": "expert", "token_id": "token", "step_id": "step"}
_WANTED = ("step", "layer", "token", "expert")
_NUMBER = re.compile(rb'(")?(-?[0-9]{1,18})(?(1)")')
_TOP = {"step": 1 << 53, "layer": 1 << 20, "token": (1 << 31) - 1, "expert": (1 << 20) - 1}
_LOW = {"expert": -1}


@dataclass(frozen=True, slots=True)
class Activations:
    """Lines of one step: int64 [N] each; `token` None where the file has no such column."""

    place: Place
    step: int
    layer: np.ndarray
    token: np.ndarray | None
    expert: np.ndarray


def activations(path: Path) -> Iterator[Activations]:
    """The lines of a file in pieces of one step each; `TraceError` with file and line at the first bad one."""
    columns, start = _columns(path)
    position = {name: columns.index(name) for name in _WANTED if name in columns}
    last_step, last_layer = (-1 if "step" in position else 0), 0
    for table, numbers in _tables(path, columns, position, start):
        if "step" in position:
            step = table["step"]
            before = np.concatenate([[last_step], step[:-1]])
            if (bad := np.flatnonzero(step < before)).size:
                where = int(bad[0])
                raise Place(path, int(numbers[where])).error(
                    f"step {step[where]} comes after step {before[where]}; lines must be in order of steps"
                )
        else:  # a forward pass goes from the first layer to the last
            layer = table["layer"]
            step = last_step + np.cumsum(np.diff(layer, prepend=last_layer) < 0)
            last_layer = int(layer[-1])
        last_step = int(step[-1])
        cuts = np.flatnonzero(np.diff(step)) + 1
        for first, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(step)], strict=True):
            piece = slice(first, stop)
            token = table["token"][piece] if "token" in position else None
            place = Place(path, int(numbers[first]))
            yield Activations(place, int(step[first]), table["layer"][piece], token, table["expert"][piece])


def _columns(path: Path) -> tuple[list[str], int]:
    """Names in the first line, and the byte where the second begins."""
    with opened(path) as (descriptor, status):
        head = bytearray(min(status.st_size, MAX_LINE_BYTES))
        read_into(descriptor, 0, memoryview(head), path)
    place, end = Place(path, 1), head.find(b"\n")
    if end < 0 and len(head) == MAX_LINE_BYTES:
        raise place.error(f"is longer than {MAX_LINE_BYTES} bytes; this is no such log")
    start = end + 1 if end >= 0 else len(head)
    text = bytes(head[:start]).decode("utf-8", "replace").lstrip("\ufeff").strip()
    names = [_NAMES.get(n, n) for n in (cell.strip().strip('"').lower() for cell in text.split(","))]
    for name in ("layer", "expert"):
        if name not in names:
            raise place.error(f"names no column {name!r}; it must name layer and expert, got {clip(text)}")
    if twice := [n for n in _WANTED if names.count(n) > 1]:
        raise place.error(f"names the column {twice[0]!r} twice")
    return names, start


def _tables(
    path: Path, columns: list[str], position: dict[str, int], start: int
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Blocks of lines as columns int64 [N], with the numbers of their lines. Empty lines are passed over."""
    number = rb"-?[0-9]{1,18}"
    fast = re.compile(rb"(?:" + number + rb"(?:," + number + rb"){%d}\n)*+" % (len(columns) - 1))
    plain = set(columns) == set(position)  # all columns are numbers that are wanted
    line = 2
    for block, count in blocks(path, MAX_LINE_BYTES, line, start):
        packed = block.replace(b"\r\n", b"\n")
        if plain and fast.fullmatch(packed):
            rows = np.fromstring(packed.replace(b"\n", b","), dtype=np.int64, sep=",").reshape(count, len(columns))
            found = {name: rows[:, at] for name, at in position.items()}
            numbers = np.arange(line, line + count)
        else:
            texts = [(line + i, text) for i, text in enumerate(packed.split(b"\n")[:count]) if text.strip()]
            parsed = [_cells(text, columns, position, Place(path, at)) for at, text in texts]
            rows = np.array(parsed, np.int64).reshape(-1, len(position))
            found = {name: rows[:, i] for i, name in enumerate(position)}
            numbers = np.array([at for at, _ in texts], np.int64)
        for name, values in found.items():
            low, top = _LOW.get(name, 0), _TOP[name]
            if (bad := np.flatnonzero((values < low) | (values > top))).size:
                where = int(bad[0])
                raise Place(path, int(numbers[where])).error(
                    f"{name} is {values[where]}; it must be a whole number from {low} to {top}"
                )
        if len(numbers):
            yield found, numbers
        line += count


def _cells(text: bytes, columns: list[str], position: dict[str, int], place: Place) -> list[int]:
    cells = text.split(b",")
    if len(cells) != len(columns):
        raise place.error(f"has {len(cells)} columns, the first line names {len(columns)}")
    found = []
    for name, at in position.items():
        match = _NUMBER.fullmatch(cells[at].strip())
        if match is None:
            raise place.error(f"{name} is {clip(cells[at].decode('utf-8', 'replace'))}, not a whole number")
        found.append(int(match[2]))
    return found
