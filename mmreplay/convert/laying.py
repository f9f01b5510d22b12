"""Rows put into the files of a new buffer, and their blocks summed.

Nobody reads the files before the buffer is whole, and every row comes once. So large
files go past the page cache where they can, and blocks are summed while their bytes
are at hand.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert import device
from mmreplay.convert.ahead import Threads
from mmreplay.convert.base import Block
from mmreplay.convert.count import alone, firsts
from mmreplay.convert.device import Direct, Syncs
from mmreplay.ring import Ring, Run, Span, runs
from mmreplay.storage import packing
from mmreplay.storage.base import CheckedStore
from mmreplay.storage.memmap import STAGE_NBYTES, MemmapStore
from mmreplay.storage.passing import Passing
from mmreplay.storage.placement import FLAGS, RECORDS, SUMS, place
from mmreplay.storage.zarr import ZarrStore


class Laying(Protocol):
    """Takes rows that were checked.

    Attributes:
        past: Names of files that are not left in memory.
    """

    @property
    def past(self) -> list[str]: ...  # noqa: D102  said above

    def write(self, block: Block) -> None:
        """Take rows of which each environment's follow those that came before.

        Raises:
            FullError: No space is left, for these or for earlier ones.
            FailedError: The device refuses, likewise.
        """

    def finish(self) -> None:
        """Have all in the files, sums included, not yet synced; raises as `write`."""

    def close(self) -> None:
        """Give threads back, before the store is closed; a second call does nothing."""


def laying(store: CheckedStore, paths: list[str], span: Span) -> Laying:
    """How rows go into a new store.

    Args:
        store: Empty.
        paths: Fields that are stored.
        span: What will come.
    """
    ring = store.ring
    straight = ring.layout == "env_major" or ring.num_envs == 1
    if isinstance(store, MemmapStore) and straight:
        return Passed(store, paths, span)
    return Stored(store, paths, span)


class Stored:
    """By way of the store, whose blocks are summed as it holds them; see `Laying`."""

    past: list[str] = []  # noqa: RUF012  nobody adds to it

    def __init__(self, store: CheckedStore, paths: list[str], span: Span) -> None:
        """Write into a store; see `laying`."""
        self._store, self._paths = store, paths
        self._ring = store.ring
        self._row_nbytes = store.schema.row_nbytes
        self._summed = span.first // store.ring.block_rows
        self._next = span.first.copy()
        # One waits for the device, the other sums what was written last.
        self._pool = Threads(2, "mmreplay-load")
        self._syncs = Syncs(store.sync, self._pool)
        self._summing: Future[None] | None = None

    def write(self, block: Block) -> None:
        """See `Laying.write`."""
        columns = {path: block.columns[path] for path in self._paths}
        self._store.write(self._runs(block), columns, block.flags)
        if not isinstance(self._store, ZarrStore):  # which syncs what it seals
            self._syncs.count(len(block) * self._row_nbytes)
        # Of an environment's rows the last is the newest, and the one that stays.
        self._next[block.env_ids] = block.positions + 1
        touched, _ = firsts(block.env_ids)
        self._wait_for_sums()
        self._summing = self._pool.submit(self._sum, touched, self._next.copy())

    def _runs(self, block: Block) -> list[Run]:
        if self._ring.num_envs > 1 and self._ring.layout == "time_major":
            return runs(self._ring.rows(block.env_ids, block.positions))
        return runs_of(self._ring, block)

    def _wait_for_sums(self) -> None:
        if self._summing is not None:
            job, self._summing = self._summing, None
            job.result()

    def _sum(self, env_ids: NDArray[np.int64], reached: NDArray[np.int64]) -> None:
        """Write the checksums of blocks that are whole now, while they are cached."""
        size = self._ring.block_rows
        for env_id in env_ids.tolist():
            first, stop = int(self._summed[env_id]), int(reached[env_id]) // size
            if stop > first:
                sums = [self._store.checksum(env_id, b) for b in range(first, stop)]
                self._store.write_sums(env_id, first, np.array(sums, np.uint32))
                self._summed[env_id] = stop

    def finish(self) -> None:
        """See `Laying.finish`."""
        self._wait_for_sums()
        self._syncs.wait()

    def close(self) -> None:
        """See `Laying.close`."""
        # Files must not be closed under a thread that syncs them.
        self._pool.shutdown()


def runs_of(ring: Ring, block: Block) -> list[Run]:
    """Where rows of one layout go, that were found to follow each other."""
    env_ids, positions = block.env_ids, block.positions
    if not alone(env_ids):
        return runs(ring.rows(env_ids, positions))
    found, item = [], 0
    first, stop = int(positions[0]), int(positions[-1]) + 1
    for row, _, count in ring.stretch(int(env_ids[0]), first, stop):
        found.append((row, item, item + count))
        item += count
    return found


class Passed:
    """Straight into the files, large ones past the page cache; see `Laying`.

    What is written is summed on its way, and not looked at again.
    """

    def __init__(self, store: MemmapStore, paths: list[str], span: Span) -> None:
        """Write into a store; see `laying`."""
        ring, schema = store.ring, store.schema
        self._store, self._ring, self._paths = store, ring, paths
        placement = place(schema)
        self._large = placement.large
        self._files = {file.path.name: file for file in store.files}
        self._row_nbytes = {
            name: file.nbytes // ring.num_rows
            for name, file in self._files.items()
            if name != SUMS
        }
        self._packer = packing.packer(schema, placement, ring.num_envs)
        room = max(1, STAGE_NBYTES // max(1, placement.stride))
        # Padding between fields is never packed, and must be zeros.
        self._stage = np.zeros((room, placement.stride), np.uint8)
        summed = [FLAGS, *([RECORDS] if placement.stride else [])]
        for path, name in placement.large.items():
            if not schema.fields[path].mutable:
                summed.append(name)
        self._parts = {name: part for part, name in enumerate(summed)}
        each = [self._row_nbytes[name] for name in summed]
        self._passing = Passing(ring, span, each)
        self._pool = Threads(1, "mmreplay-load")
        self._syncs = Syncs(store.sync, self._pool)
        self._ways: dict[str, Direct] = {}
        try:
            self._find_ways(span)
        except BaseException:
            self.close()
            raise

    def _find_ways(self, span: Span) -> None:
        """Open the ways past the cache, which share the memory for them."""
        ring, rows = self._ring, int(span.lengths.sum())
        streams = sum(
            len(ring.stretch(env_id, first, stop))
            for env_id, (first, stop) in enumerate(
                zip(span.first.tolist(), span.stop.tolist(), strict=True)
            )
        )
        nbytes = {name: rows * each for name, each in self._row_nbytes.items()}
        large = [n for n, each in nbytes.items() if each >= device.DIRECT_NBYTES]
        for name in large:
            way = device.past(self._files[name], nbytes[name], streams, len(large))
            if way is not None:
                self._ways[name] = way

    @property
    def past(self) -> list[str]:
        """See `Laying`."""
        return list(self._ways)

    def write(self, block: Block) -> None:
        """See `Laying.write`."""
        if not alone(block.env_ids):
            # Environment by environment: each has its place in a file.
            block = self._sorted(block)
        columns = {path: block.columns[path] for path in self._paths}
        for run in runs_of(self._ring, block):
            row, first, stop = run
            self._put(FLAGS, row, block.flags[first:stop])
            if RECORDS in self._parts:
                self._put_records(run, columns)
            for path, name in self._large.items():
                self._put(name, row, columns[path][first:stop])
        for env_id, first, sums in self._passing.taken():
            self._store.write_sums(env_id, first, sums)

    def _sorted(self, block: Block) -> Block:
        order = np.argsort(block.env_ids, kind="stable")
        columns = {path: block.columns[path][order] for path in self._paths}
        places = block.env_ids[order], block.positions[order]
        return Block(columns, *places, block.flags[order])

    def _put_records(self, run: Run, columns: dict[str, NDArray[np.generic]]) -> None:
        row, first, stop = run
        room = len(self._stage)
        for at in range(first, stop, room):
            until = min(at + room, stop)
            self._packer.pack(self._stage, columns, at, until)
            self._put(RECORDS, row + at - first, self._stage[: until - at])

    def _put(self, name: str, row: int, rows: NDArray[np.generic]) -> None:
        """Sum and write the bytes of rows, in pieces that a cache holds."""
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        begin, file = row * self._row_nbytes[name], self._files[name]
        part, way = self._parts.get(name), self._ways.get(name)
        for first in range(0, len(data), STAGE_NBYTES):
            piece, offset = data[first : first + STAGE_NBYTES], begin + first
            if part is not None:
                self._passing.add(part, offset, piece)
            if way is not None:
                way.write(piece, offset)
            else:
                file.pwrite_pieces(piece, offset)
                self._syncs.count(len(piece))

    def finish(self) -> None:
        """See `Laying.finish`."""
        for way in self._ways.values():
            way.finish()
        self._syncs.wait()

    def close(self) -> None:
        """See `Laying.close`."""
        for way in self._ways.values():
            way.close()
        self._pool.shutdown()
