"""Plain steps prepared, stored and published by one call, where their pages are ready.

What a step costs are the calls between its values and the files: of 5 us that a ring
took for one, 3 were those to store and to publish it (tools/bench/bench_adapters.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.disk import files
from mmreplay.disk.calls import Disk
from mmreplay.storage.commit_state import BOTH_LIVE, CommitWriter, WritableCommitState
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.store import Store
from mmreplay.storage.write_path import MappedWriter

if TYPE_CHECKING:
    from mmreplay.kernels.rows import RowsKernel

Array = NDArray[np.int64]
NUM_HEADS = 64
"""Arrays of heads made at a time, which takes as long as to make one."""
NONE = np.empty(0, np.int64)
"""Limits that no commit state has."""
rows: RowsKernel = cast("RowsKernel", kernels.load("rows"))


class FastAppend:
    """Adds plain steps to one store and publishes them, both in one call of C.

    It stores through mappings, into rows that were reserved for it: rows below the
    limits, whose pages `MappedWriter` made ready. The reservation holds for the limits
    and tails that were published when it was made, and for a second at most.
    """

    def __init__(
        self,
        store: MemmapStore,
        writers: tuple[MappedWriter, MappedWriter],
        commit: CommitWriter,
    ) -> None:
        """Begin without a reservation.

        Args:
            store: Without large fields, its environments' rows side by side.
            writers: Of its records and of their flags.
            commit: Publishes its rows.
        """
        self._commit, self._writers = commit, writers
        self._kernel = rows.Append(store.packer, commit.slot)
        self._add = self._kernel.add
        commit.fast_append = self._kernel
        self._stride = store.placement.stride
        self._envs, self._slots = store.ring.num_envs, store.ring.slots
        self._limits = self._tails = NONE
        self._low, self._high, self._until = 0, 0, 0.0
        self._fresh_of, self._fresh = NONE, 0
        self._first, self._next_heads = -NUM_HEADS, [NONE] * NUM_HEADS

    def add(self, data: Mapping[str, object], head: int) -> Array | None:
        """Store and publish a step that ends no episode and needs no conversion.

        Args:
            data: A nested or flat mapping of values that nobody checked yet.
            head: The step's position, in every environment.

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
        row = head % self._slots * self._envs
        reserved = (
            self._limits is commit.limits
            and self._tails is commit.tails
            and self._low <= row <= self._high - self._envs
        )
        if not reserved and not self._reserve(row):
            return None
        at, live = head - self._first, commit.next_live
        heads = self._next_heads[at] if 0 <= at < NUM_HEADS else self._heads_after(head)
        offset = commit.size * live
        try:
            added = self._add(data, row, offset, next(commit.numbers), heads)
            if not added and monotonic() >= self._until and self._reserve(row):
                added = self._add(data, row, offset, next(commit.numbers), heads)
            if not added:
                return None
            commit.next_live = BOTH_LIVE - live
            commit.heads, commit.published = heads, (heads, commit.tails)
        except BaseException:
            # Ctrl-C may come between the publication and its note: as in
            # `CommitWriter.publish`, the file says what was published.
            commit.recall()
            raise
        return heads

    def _heads_after(self, head: int) -> Array:
        """Heads after a position; those of the next steps are made with them."""
        every = np.arange(head + 1, head + 1 + NUM_HEADS, dtype=np.int64)
        self._next_heads = list(every.repeat(self._envs).reshape(NUM_HEADS, -1))
        self._first = head
        return self._next_heads[0]

    def _reserve(self, row: int) -> bool:
        """Reserve rows from one on, as far as their pages are ready."""
        commit, stride, stop = self._commit, self._stride, row + self._envs
        limits, tails = commit.limits, commit.tails
        if self._fresh_of is not limits:
            # In the first lap rows below the limits hold nothing yet, and
            # `Store.allocate` reserved their space before the limits were published.
            first_lap = int(limits.max()) <= self._slots
            self._fresh = int(limits.min()) * self._envs if first_lap else 0
            self._fresh_of = limits
        records, flags = self._writers
        if not records.ready(row * stride, stop * stride, self._fresh * stride):
            return False
        if not flags.ready(row, stop, self._fresh):
            return False
        low = max(-(-records.near // stride), flags.near)
        high = min(records.far // stride, flags.far)
        if not low <= row <= high - self._envs:
            return False
        # The mark of a good reservation comes last: Ctrl-C may come in between.
        self._limits = NONE
        until = min(records.until, flags.until)
        self._kernel.reserve(
            records.mapping, flags.mapping, commit.mapping, limits, tails,
            low, high, until,
        )  # fmt: skip
        self._low, self._high, self._until = low, high, until
        self._limits, self._tails = limits, tails
        return True


def fast_append_of(store: Store, commit: WritableCommitState) -> FastAppend | None:
    """Make a fast append, where a store and its commit state have one."""
    if not isinstance(store, MemmapStore) or not isinstance(commit, CommitWriter):
        return None
    records, flags = store.writers
    ring = store.ring
    if records is None or store.placement.large or not len(store.packer.rows):
        return None
    if ring.num_envs > 1 and ring.layout == "env_major":
        return None
    return FastAppend(store, (records, flags), commit)
