"""Thrift's compact protocol, read with bounds: parquet's footer and page headers.

Only what is asked for is kept; everything else is stepped over. Lists cost what their
elements take in the file, so a short file cannot claim a long list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Wanted = Mapping[int, "Wanted"]
"""Fields of a struct by number; of those that are structs, or lists of them, theirs."""
LEAF: Wanted = {}
"""What is wanted of a field that is no struct: its value."""

MAX_DEPTH = 24
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


class Malformed(ValueError):
    """The bytes are no thrift, or more of it than is taken."""


class Compact:
    """Steps through bytes that hold one struct.

    Attributes:
        at: Bytes read so far.
        structs: Structs met so far.
    """

    def __init__(self, data: bytes, max_structs: int) -> None:
        self.at = 0
        self.structs = 0
        self._data = data
        self._max_structs = max_structs

    def struct(self, wanted: Wanted, depth: int = 0) -> dict[int, Any]:
        """Fields that are wanted and there, by number.

        Raises:
            Malformed: The bytes end too soon, or nest or hold too much.
        """
        self.structs += 1
        if depth > MAX_DEPTH or self.structs > self._max_structs:
            raise Malformed(
                f"more than {self._max_structs} structs, or {MAX_DEPTH} in each other"
            )
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            number = number + step if step else self._zigzag()
            value = self._value(kind, wanted.get(number), depth)
            if number in wanted:
                found[number] = value
        return found

    def _value(self, kind: int, wanted: Wanted | None, depth: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind in (I16, I32, I64):
            return self._zigzag()
        if kind == STRUCT:
            return self.struct(wanted or {}, depth + 1)
        if kind in (LIST, SET):
            return self._list(wanted, depth)
        if kind == MAP:
            return self._map(depth)
        sizes = {BYTE: 1, DOUBLE: 8}
        if kind in sizes:
            return self._step(sizes[kind])
        if kind == BINARY:
            begin = self._step(self._varint())
            return self._data[begin : self.at] if wanted is not None else b""
        raise Malformed(f"a value of kind {kind} at byte {self.at}")

    def _list(self, wanted: Wanted | None, depth: int) -> list[Any]:
        head = self._byte()
        kind, size = head & 15, head >> 4
        if size == 15:
            size = self._varint()
        self._refuse_long(size)
        found = []
        for _ in range(size):
            # Within a list a bool takes a byte of its own.
            value = (
                self._step(1)
                if kind in (TRUE, FALSE)
                else self._value(kind, wanted, depth + 1)
            )
            if wanted is not None:
                found.append(value)
        return found

    def _map(self, depth: int) -> None:
        size = self._varint()
        self._refuse_long(size)
        kinds = self._byte() if size else 0
        for _ in range(size):
            self._value(kinds >> 4, None, depth + 1)
            self._value(kinds & 15, None, depth + 1)

    def _refuse_long(self, size: int) -> None:
        if size > len(self._data) - self.at:
            raise Malformed(f"a list of {size} at byte {self.at}, past the end")

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise Malformed(f"its end at byte {self.at}")
        self.at += 1
        return self._data[self.at - 1]

    def _step(self, nbytes: int) -> int:
        """Step over bytes, and return where they begin."""
        begin = self.at
        if nbytes > len(self._data) - begin:
            raise Malformed(f"{nbytes} bytes at byte {begin}, past the end")
        self.at += nbytes
        return begin

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise Malformed(f"a number of more than 64 bits at byte {self.at}")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
