"""The rows of a reply in blocks, each small enough to travel with the reply itself.

Ray sends a result of less than 100 KiB to its caller together with the reply. A larger
one goes through the object stores of both nodes: that takes milliseconds more, and
memory there. So rows travel as many results of one call, which all come with its reply.
Where a block is larger than was thought Ray stores it all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from numpy.typing import NDArray

from mmreplay.ray.draws import Reply, RingDraw, Wanted

Array = NDArray[Any]
BLOCK_NBYTES = 99 << 10
"""Of a block; Ray's bound is 100 KiB."""
FIELD_NBYTES = 512
"""What Ray adds to each array, at most."""
LEAST_NBYTES = 64 << 10
"""Fewer rows are in the reply; it has 24 bytes a row beside them."""
MOST_NBYTES = 8 << 20
"""More rows are one result: Ray sends at most 10 MiB with a reply."""


class BlockSizes:
    """How many rows a block has, as replies teach it.

    Threads: any may call.
    """

    def __init__(self) -> None:
        """Know no row yet: the first reply is one result."""
        self._row_nbytes = self._num_fields = 0

    def learn(self, reply: Reply) -> None:
        """Look at the rows of a reply, unless rows are known."""
        if self._row_nbytes:
            return
        for drawn in reply["draws"].values():
            if drawn is None or "fields" not in drawn or not len(drawn["positions"]):
                continue
            fields = drawn["fields"].values()
            nbytes = sum(array.nbytes for array in fields)
            self._num_fields = len(fields)
            self._row_nbytes = -(-nbytes // len(drawn["positions"]))

    def rows(self, count: int) -> int:
        """Rows of each block of so many; 0 for one result."""
        if not LEAST_NBYTES < count * self._row_nbytes <= MOST_NBYTES:
            return 0
        left = BLOCK_NBYTES - FIELD_NBYTES * self._num_fields
        return max(0, left // self._row_nbytes)


def num_blocks(wanted: Wanted) -> int:
    """Blocks of the reply to a request; 0 where it is one result."""
    if "block_rows" not in wanted:
        return 0
    return sum(len(firsts) for _, firsts in _firsts(wanted))


def _firsts(wanted: Wanted) -> Iterator[tuple[str, range]]:
    """By ring where its blocks begin, whatever it has left of an epoch."""
    for name in wanted["rows"]:
        yield name, range(0, len(wanted["shares"][name]), wanted["block_rows"])


def in_blocks(reply: Reply, wanted: Wanted) -> list[object]:
    """Take the rows out of a reply; return it, and the blocks."""
    results: list[object] = [reply]
    for name, firsts in _firsts(wanted):
        drawn = reply["draws"][name]
        fields = {} if drawn is None else drawn.pop("fields")
        results += [
            {path: array[first : first + wanted["block_rows"]] for path, array in fields.items()}
            for first in firsts
        ]
    return results


def from_blocks(results: Sequence[Any], wanted: Wanted) -> Reply:
    """Put the blocks into the reply that they were taken out of."""
    reply, blocks = cast(Reply, results[0]), iter(results[1:])
    for name, firsts in _firsts(wanted):
        own = [next(blocks) for _ in firsts]
        drawn = reply["draws"][name]
        if drawn is not None:
            drawn["blocks"] = own
    return reply


def has_rows(drawn: RingDraw) -> bool:
    """Whether the draw of a ring brought its rows."""
    return "fields" in drawn or "blocks" in drawn


def rows_of(drawn: RingDraw, own: slice, wanted: Wanted) -> list[dict[str, Array]]:
    """Fields of some rows by path, in blocks of rows that follow each other.

    Args:
        drawn: That brought its rows.
        own: Which of them.
        wanted: What was asked for.
    """
    if "blocks" not in drawn:
        return [{path: array[own] for path, array in drawn["fields"].items()}]
    size, blocks = wanted["block_rows"], drawn["blocks"]
    first, stop, _ = own.indices(len(drawn["positions"]))
    numbers = range(first // size, max(-(-stop // size), first // size + 1))
    return [
        {
            path: array[max(first - size * number, 0) : stop - size * number]
            for path, array in blocks[number].items()
        }
        for number in numbers
    ]
