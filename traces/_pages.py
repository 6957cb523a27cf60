"""Parquet page headers, read before anything is decoded.

A page says how large it is once decompressed, and a decoder believes it. This module walks the page headers of a column
(thrift, compact protocol) and adds up what they promise, so that a small file cannot ask for gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_HEADER_BYTES = 512  # ours take about 30; statistics of integers could make it 100
_MAX_PAGES = 1 << 16


class BadPageError(ValueError):
    """A page header that is malformed or promises too much."""


def decoded_bytes(read: Callable[[int, int], bytes], start: int, length: int) -> int:
    """Sum of the decompressed sizes that the pages in [start, start + length) promise.

    `read(offset, count)` gives bytes of the file.
    """
    place, end, total, pages = start, start + length, 0, 0
    while place < end:
        pages += 1
        if pages > _MAX_PAGES:
            raise BadPageError(f"more than {_MAX_PAGES} pages in one column")
        header = _Compact(read(place, min(_HEADER_BYTES, end - place)))
        sizes = header.page_sizes()
        if sizes[0] < 0 or sizes[1] < 0:
            raise BadPageError(f"page at byte {place} has a negative size")
        total += sizes[0]
        place += header.place + sizes[1]
    if place != end:
        raise BadPageError(f"pages end at byte {place}, the column at {end}")
    return total


class _Compact:
    """As much of the compact protocol as it takes to step over a PageHeader."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.place = raw, 0

    def page_sizes(self) -> tuple[int, int]:
        """(decompressed, compressed) size of the page; the header ends at `place` afterwards."""
        found: dict[int, int] = {}
        field = 0
        while True:
            kind, field = self._field(field)
            if kind == _STOP:
                break
            if field in (2, 3) and kind == _I32:
                found[field] = self._signed()
            else:
                self._skip(kind, 0)
        if 2 not in found or 3 not in found:
            raise BadPageError("a page header states no size")
        return found[2], found[3]

    def _byte(self) -> int:
        if self.place >= len(self.raw):
            raise BadPageError("a page header is cut or too long")
        self.place += 1
        return self.raw[self.place - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise BadPageError("a number in a page header is too long")

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _field(self, last: int) -> tuple[int, int]:
        byte = self._byte()
        kind, delta = byte & 0x0F, byte >> 4
        if kind == _STOP:
            return _STOP, last
        return kind, last + delta if delta else self._signed()

    def _skip(self, kind: int, depth: int) -> None:
        if depth > 8 or kind > _STRUCT or kind == _STOP:  # a list of 2^60 elements of no size would never end
            raise BadPageError("a page header is malformed")
        if kind == _BYTE:
            self._byte()
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _DOUBLE:
            self._jump(8)
        elif kind == _BINARY:
            self._jump(self._varint())
        elif kind in (_LIST, _SET):
            byte = self._byte()
            for _ in range(byte >> 4 if byte >> 4 < 15 else self._varint()):
                self._element(byte & 0x0F, depth)
        elif kind == _MAP:
            raise BadPageError("a page header holds a map")
        elif kind == _STRUCT:
            field = 0
            while True:
                inner, field = self._field(field)
                if inner == _STOP:
                    return
                self._skip(inner, depth + 1)

    def _element(self, kind: int, depth: int) -> None:
        """An element of a list; unlike a field, a boolean takes a byte there."""
        if kind in (_TRUE, _FALSE):
            self._byte()
        else:
            self._skip(kind, depth + 1)

    def _jump(self, count: int) -> None:
        self.place += count
        if self.place > len(self.raw):
            raise BadPageError("a page header is cut or too long")
