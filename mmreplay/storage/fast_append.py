"""Adds plain steps and blocks, and publishes them, by one call of C: `FastAppend`."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.disk import files
from mmreplay.disk.calls import Disk
from mmreplay.ring import Ring
from mmreplay.storage.commit_state import BOTH_LIVE, CommitWriter
from mmreplay.storage.store import Columns
from mmreplay.storage.write_path import MappedWriter

if TYPE_CHECKING:
    from mmreplay.kernels.rows import PackerKernel, RowsKernel

Array = NDArray[np.int64]

NUM_HEADS = 64
"""Arrays of heads made at a time, which takes as long as to make one."""
NONE = np.empty(0, np.int64)
"""Limits that no commit state has."""
rows: RowsKernel = cast("RowsKernel", kernels.load("rows"))


class FastAppend:
    """Adds plain steps and blocks to one store and publishes them, in one call of C.

    It stores through mappings, into rows that were reserved for it: rows below the
    limits, whose pages `MappedWriter` made ready. The reservation holds for the limits
    and tails that were published when it was made, and for a second at most. Without it
    3 of the 5 us of a step were the calls that store and publish it
    (tools/bench/bench_adapters.py).
    """

    def __init__(
        self,
        ring: Ring,
        packer: PackerKernel,
        stride: int,
        writers: tuple[MappedWriter, MappedWriter],
        commit: CommitWriter,
    ) -> None:
        """Begin without a reservation.

        Args:
            ring: With the rows of its environments side by side.
            packer: Packs all of a row into its record.
            stride: Bytes of a record.
            writers: Of the records and of the rows' flags.
            commit: Publishes the rows.
        """
        self._commit, self._writers = commit, writers
        self._kernel = rows.Append(packer, commit.slot)
        self._add, self._extend = self._kernel.add, self._kernel.extend
        commit.fast_append = self._kernel
        self._stride = stride
        self._envs, self._slots = ring.num_envs, ring.slots
        self._limits = self._tails = NONE
        self._heap_tails: Array | None = None
        self._low, self._high, self._until = 0, 0, 0.0
        self._fresh_of, self._fresh = NONE, 0
        self._first, self._next_heads = -NUM_HEADS, [NONE] * NUM_HEADS

    @property
    def stores(self) -> bool:
        """Whether steps may be stored at all."""
        return not self._commit.closed and files.disk.__class__ is Disk

    def add(
        self, data: Mapping[str, object], head: int, heap_heads: Array | None = None
    ) -> Array | None:
        """Store and publish a step that ends no episode and needs no conversion.

        Args:
            data: A nested or flat mapping of values, not validated yet.
            head: The step's position, in every environment.
            heap_heads: int64 ``[E]``, published with it where there is a heap.

        Returns:
            int64 ``[E]``, the heads published; None where nothing was stored.
        """
        commit = self._commit
        if (
            commit.closed
            # A test that replaces the disk counts, fails and cuts its calls, and C
            # makes none of them: such a step goes through `Store.write_prepared`.
            or files.disk.__class__ is not Disk
        ):
            return None
        # By identity: arrays are replaced and never changed, so that the same objects
        # say that limits and tails are those of the reservation, whose copies C
        # publishes with each step.
        row = head % self._slots * self._envs
        reserved = (
            self._limits is commit.limits
            and self._tails is commit.tails
            and (heap_heads is None or self._heap_tails is commit.heap_tails)
            and self._low <= row <= self._high - self._envs
        )
        if not reserved and not self._reserve(row):
            return None
        at, live = head - self._first, commit.next_live
        heads = self._next_heads[at] if 0 <= at < NUM_HEADS else self._heads_after(head)
        offset = commit.size * live
        # A call for each: a step without a heap makes no tuple of its arguments.
        try:
            # C looks at the clock itself: the pages stay ready for a second, and a step
            # takes 2 us. A number that was drawn for nothing leaves a gap, which
            # readers accept: they compare, and count nothing.
            if heap_heads is None:
                added = self._add(data, row, offset, next(commit.numbers), heads)
                if not added and monotonic() >= self._until and self._reserve(row):
                    added = self._add(data, row, offset, next(commit.numbers), heads)
            else:
                bounds = heads, heap_heads
                added = self._add(data, row, offset, next(commit.numbers), *bounds)
                if not added and monotonic() >= self._until and self._reserve(row):
                    added = self._add(data, row, offset, next(commit.numbers), *bounds)
            if not added:
                return None
            # The slot first: if Ctrl-C comes before the heads are noted, `recall` finds
            # the publication in the file, and the next one goes to the other slot.
            commit.next_live = BOTH_LIVE - live
            if heap_heads is not None:
                # Heap heads before heads; see `CommitState`.
                commit.heap_heads = heap_heads
            commit.heads, commit.published = heads, (heads, commit.tails, heap_heads)
        except BaseException:
            # Ctrl-C may come between the publication and its note: as in
            # `CommitWriter.publish`, the file says what was published.
            commit.recall()
            raise
        return heads

    def extend(
        self, columns: Columns, skipped: int, flags: NDArray[np.uint8], row: int, heads: Array
    ) -> bool:
        """Store and publish a block below the limits.

        Args:
            columns: Per path C-contiguous rows in the order of the ring's.
            skipped: Rows of the columns before the block's.
            flags: uint8 ``[T, E]`` of the block, C-contiguous.
            row: The block's first row.
            heads: int64 ``[E]``, published with it.

        Returns:
            Whether the block was added; if not, nothing was stored.
        """
        commit, stride, stop = self._commit, self._stride, row + flags.size
        if not self.stores or commit.heap_tails is not None or stop > self._slots * self._envs:
            return False
        records, marks = self._writers
        fresh = self._fresh_rows()
        offset, nbytes = row * stride, flags.size * stride
        if not marks.ready(row, stop, fresh) or not records.ready_to_fill(
            offset, nbytes, fresh=stop <= fresh
        ):
            return False
        live = commit.next_live
        try:
            self._extend(
                columns,
                skipped,
                flags,
                records.mapping,
                row,
                marks.mapping,
                commit.mapping,
                commit.size * live,
                next(commit.numbers),
                heads,
                commit.limits,
                commit.tails,
            )
            commit.next_live = BOTH_LIVE - live
            commit.heads, commit.published = heads, (heads, commit.tails, None)
        except BaseException:
            # As in `add`.
            commit.recall()
            raise
        return True

    def _fresh_rows(self) -> int:
        """Rows below this one hold nothing yet, where the head has not passed them.

        In the first lap those are rows below the limits: `Store.allocate` reserved
        their space before the limits were published.
        """
        limits = self._commit.limits
        if self._fresh_of is not limits:
            first_lap = int(limits.max()) <= self._slots
            self._fresh = int(limits.min()) * self._envs if first_lap else 0
            self._fresh_of = limits
        return self._fresh

    def _heads_after(self, head: int) -> Array:
        """Heads after a position; those of the next steps are made with them."""
        every = np.arange(head + 1, head + 1 + NUM_HEADS, dtype=np.int64)
        self._next_heads = list(every.repeat(self._envs).reshape(NUM_HEADS, -1))
        self._first = head
        return self._next_heads[0]

    def _reserve(self, row: int) -> bool:
        """Reserve rows from one on, as far as their pages are ready."""
        commit, stride, stop = self._commit, self._stride, row + self._envs
        limits, tails, heap_tails = commit.limits, commit.tails, commit.heap_tails
        fresh = self._fresh_rows()
        # Both files or none: a step is two stores, and a row without its flags would be
        # published with those of the last lap.
        records, flags = self._writers
        if not records.ready(row * stride, stop * stride, fresh * stride):
            return False
        if not flags.ready(row, stop, fresh):
            return False
        # Whole rows within the ready pages of both files. C checks a row against these
        # two numbers alone.
        low = max(-(-records.near // stride), flags.near)
        high = min(records.far // stride, flags.far)
        if not low <= row <= high - self._envs:
            return False
        # The mark of a good reservation comes last: Ctrl-C may come in between.
        self._limits = NONE
        until = min(records.until, flags.until)
        self._kernel.reserve(
            records.mapping,
            flags.mapping,
            commit.mapping,
            limits,
            tails,
            low,
            high,
            until,
            *(() if heap_tails is None else (heap_tails,)),
        )
        self._low, self._high, self._until = low, high, until
        self._heap_tails = heap_tails
        self._limits, self._tails = limits, tails
        return True
