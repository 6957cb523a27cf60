"""Text files of strangers, block by block: a line that never ends costs one block and an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from traces._files import opened, read_into
from traces._json import clip
from traces.errors import TraceError

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, for messages."""

    file: Path
    line: int

    def error(self, what: str) -> TraceError:
        """An error that begins with the file and its line."""
        return TraceError(f"{clip(self.file.name, 80)[1:-1]} line {self.line}: {what}")


def lines(path: Path, limit: int, first: int = 1, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(number, line without its end) of each line from byte `start` on, which is line `first`.

    A line of more than `limit` bytes raises `TraceError` before more of it is read.
    """
    number = first
    for block, count in blocks(path, limit, first, start):
        for line in block.split(b"\n")[:count]:
            yield number, line.removesuffix(b"\r")
            number += 1


def blocks(path: Path, limit: int, first: int = 1, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Whole lines together, about a block at a time, each ended by a line feed, and how many they are."""
    number, rest = first, b""
    with opened(path) as (descriptor, status):
        place, size = start, status.st_size
        while place < size:
            piece = bytearray(min(BLOCK_BYTES, size - place))
            read_into(descriptor, place, memoryview(piece), path)
            place += len(piece)
            end = piece.rfind(b"\n") + 1
            if len(rest) + (end or len(piece)) > limit + BLOCK_BYTES or (not end and len(rest) + len(piece) > limit):
                raise Place(path, number).error(f"is longer than {limit} bytes; this is no such log")
            if not end:
                rest += piece
                continue
            whole = rest + bytes(piece[:end])
            rest = bytes(piece[end:])
            count = whole.count(b"\n")
            yield whole, count
            number += count
    if rest:
        yield rest + b"\n", 1
