"""Plain steps taken, stored and published by one call, where their pages are ready.

What a step costs are the calls between its values and the files: of 5 us that a ring
took for one, 3 were those to store and to publish it (tools/bench/bench_adapters.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.disk import files
from mmreplay.disk.calls import Disk
from mmreplay.storage.commit_state import BOTH_LIVE, Book, CommitWriter
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.store import Store
from mmreplay.storage.write_path import MappedWriter

if TYPE_CHECKING:
    from mmreplay.kernels.rows import RowsKernel

Array = NDArray[np.int64]
COMING = 64
"""Heads made at a time."""
NOTHING = np.empty(0, np.int64)
"""Limits that no book has."""
rows: RowsKernel = cast("RowsKernel", kernels.load("rows"))


class FastAppend:
    """The short way into one store and its book, for whoever writes both.

    Rows are leased to it for as long as the ways to their files are near (`Inlet`).
    """

    def __init__(
        self,
        store: MemmapStore,
        inlets: tuple[MappedWriter, MappedWriter],
        book: CommitWriter,
    ) -> None:
        """Make one that takes nothing yet.

        Args:
            store: Without large fields, its environments' rows side by side.
            inlets: The ways to its records and their flags.
            book: What publishes its rows.
        """
        self._book, self._inlets = book, inlets
        self._kernel = rows.Lane(store.packer, book.slot)
        self._add = self._kernel.add
        book.lane = self._kernel
        self._stride = len(store.packer.record)
        self._envs, self._slots = store.ring.num_envs, store.ring.slots
        self._limits = self._tails = NOTHING
        self._low = self._high = 0
        self._first, self._coming = -COMING, [NOTHING] * COMING
        self._until = 0.0

    def add(self, given: Mapping[str, object], head: int) -> Array | None:
        """Write and publish a step that ends nowhere and needs no conversion.

        Args:
            given: Per path one value, checked by nobody yet.
            head: Its position, in every environment.

        Returns:
            int64 ``[E]``, the heads published; None where nothing was written.
        """
        book = self._book
        if (
            book.closed
            or self._limits is not book.limits
            or self._tails is not book.tails
            or files.disk.__class__ is not Disk  # which others look at, call by call
        ):
            return None
        at, live = head - self._first, book.next_live
        heads = self._coming[at] if 0 <= at < COMING else self._after(head)
        row, place = head % self._slots * self._envs, book.size * live
        try:
            added = self._add(given, row, place, next(book.numbers), heads)
            if not added and self._goes_on(row, head):
                added = self._add(given, row, place, next(book.numbers), heads)
            if not added:
                return None
            book.next_live = BOTH_LIVE - live
            book.heads, book.published = heads, (heads, book.tails)
        except BaseException:
            # All of this is what `CommitWriter.publish` does, around one call.
            book.recall()
            raise
        return heads

    def _after(self, head: int) -> Array:
        """The heads after a position, with those to come: many at once take as long."""
        every = np.arange(head + 1, head + 1 + COMING, dtype=np.int64)
        self._coming = list(every.repeat(self._envs).reshape(COMING, -1))
        self._first = head
        return self._coming[0]

    def _goes_on(self, row: int, head: int) -> bool:
        """Lease the rows behind those that were leased, once they are used up."""
        if not row <= self._high < row + self._envs:
            return False
        (records, flags), stop = self._inlets, row + self._envs
        ready = flags.ready(row, stop)
        if not records.ready(row * self._stride, stop * self._stride) or not ready:
            return False
        self.lease(head)
        return self._allows(row)

    def _allows(self, row: int) -> bool:
        book = self._book
        good = self._limits is book.limits and self._tails is book.tails
        return good and self._low <= row <= self._high - self._envs

    def lease(self, head: int) -> None:
        """Take the rows from a position on whose pages are ready, if any are."""
        book, (records, flags) = self._book, self._inlets
        row, until = head % self._slots * self._envs, min(records.until, flags.until)
        if row >= flags.far or (until == self._until and self._allows(row)):
            return
        low = max(-(-records.near // self._stride), flags.near)
        high = min(records.far // self._stride, flags.far)
        if not low <= row <= high - self._envs or book.closed:
            return
        # What says that the lease is good comes last: Ctrl-C may come in between.
        self._limits, self._until = NOTHING, 0.0
        limits, tails = book.limits, book.tails
        self._kernel.lease(
            records.mapping, flags.mapping, book.mapping, limits, tails,
            low, high, until,
        )  # fmt: skip
        self._low, self._high, self._until = low, high, until
        self._limits, self._tails = limits, tails


def lane_of(store: Store, book: Book) -> FastAppend | None:
    """Make a lane where there can be one."""
    if not isinstance(store, MemmapStore) or not isinstance(book, CommitWriter):
        return None
    records, flags = store.inlets
    packer, ring, placement = store.packer, store.ring, store.placement
    wide = ring.num_envs > 1
    if records is None or placement.large or (wide and not len(packer.rows)):
        return None
    if wide and ring.layout == "env_major":
        return None
    return FastAppend(store, (records, flags), book)
