"""Checksums of blocks of rows, taken of the bytes while they pass by.

What `MemmapStore.checksum` reads out of the files is summed here before it is written:
nothing is looked at twice, nor is it needed in the page cache. Parts of a block (its
flags, records and large fields) come side by side; each is summed by itself, and the
sums are put together as if the parts had followed each other.

Rows put into the files of a new buffer, and their blocks summed.

Nobody reads the files before the buffer is whole, and every row comes once. So large
files go past the page cache where they can, and blocks are summed while their bytes
are at hand.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32c
from mmreplay.convert import direct_file
from mmreplay.convert.ahead import Threads
from mmreplay.convert.base import Block
from mmreplay.convert.direct_file import Direct, Syncs
from mmreplay.convert.episode_ends import alone, firsts
from mmreplay.ring import Ring, Run, Span, runs
from mmreplay.storage.layout import FLAGS, RECORDS, SUMS, packer, record_layout
from mmreplay.storage.memmap import STAGE_NBYTES, MemmapStore
from mmreplay.storage.store import CheckedStore
from mmreplay.storage.zarr.engine import ZarrStore

Sums = NDArray[np.uint32]
POLYNOMIAL = 0x82F63B78
ZEROS = bytes(64 << 10)


class BlockChecksums:
    """Sums the blocks of a new generation, whose rows come once, oldest first."""

    def __init__(self, ring: Ring, span: Span, row_nbytes: Sequence[int]) -> None:
        """Begin with nothing.

        Args:
            ring: Env-major, or of one environment.
            span: What will come. Rows before it in its first block are zeros.
            row_nbytes: Bytes of a row in each part, in the order of the format.
        """
        self._ring = ring
        size = ring.block_rows
        self._begins = span.first // size
        self._nbytes = [size * each for each in row_nbytes]
        self._over = [over(each) for each in self._nbytes]
        # Of blocks that are not whole yet: bytes still to come, and sums of the parts.
        self._left: dict[int, int] = {}
        self._crcs: dict[int, list[int]] = {}
        self._whole: list[int] = []
        begun = (span.first % size > 0) & ((self._begins + 1) * size <= span.stop)
        for env_id in np.flatnonzero(begun).tolist():
            self._skip(ring.row(env_id, int(span.first[env_id])))

    def _skip(self, row: int) -> None:
        """Sum the zeros before a row that is the first of its block to come."""
        place, rows = divmod(row, self._ring.block_rows)
        crcs, total = self._open(place), 0
        for part, nbytes in enumerate(self._nbytes):
            count = nbytes // self._ring.block_rows * rows
            total += count
            for first in range(0, count, len(ZEROS)):
                crcs[part] = crc32c(ZEROS[: count - first], crcs[part])
        self._left[place] -= total

    def _open(self, place: int) -> list[int]:
        self._left[place] = sum(self._nbytes)
        return self._crcs.setdefault(place, [0] * len(self._nbytes))

    def add(self, part: int, offset: int, data: memoryview) -> None:
        """Sum bytes that go to an offset in the file of a part."""
        nbytes, first = self._nbytes[part], 0
        while first < len(data):
            place, at = divmod(offset + first, nbytes)
            piece = data[first : first + nbytes - at]
            first += len(piece)
            crcs = self._crcs.get(place)
            if crcs is None:
                crcs = self._open(place)
            crcs[part] = crc32c(piece, crcs[part])
            self._left[place] -= len(piece)
            if not self._left[place]:
                del self._left[place]
                self._whole.append(place)

    def taken(self) -> list[tuple[int, int, Sums]]:
        """Sums of blocks that are whole now, each told once.

        Returns:
            (environment, block, sums of blocks from that one on), blocks numbered over
            all laps.
        """
        places, self._whole = self._whole, []
        if not places:
            return []
        parts = np.array([self._crcs.pop(place) for place in places], np.uint32)
        ids, slots = np.divmod(np.array(places), self._ring.num_blocks)
        begins = self._begins[ids]
        blocks = begins + (slots - begins) % self._ring.num_blocks
        size = self._ring.block_rows
        told = [crc32c(struct.pack("<Q", each * size)) for each in blocks.tolist()]
        sums = np.array(told, np.uint32)
        for part, table in enumerate(self._over):
            sums = gone_over(sums, table) ^ parts[:, part]
        found = []
        for env_id in np.unique(ids).tolist():
            # Rows of one environment come in order, and so do its blocks.
            own = ids == env_id
            found.append((env_id, int(blocks[own][0]), sums[own]))
        return found


def over(nbytes: int) -> Sums:
    """What zeros after summed bytes do to the sum, as a table for `gone_over`.

    The sum of bytes and others after them is that of the first, gone over as many
    zeros as there are others, xor that of the others (as in zlib's crc32_combine).

    Args:
        nbytes: How many zeros, at least one.

    Returns:
        uint32 ``[4, 256]``.
    """
    columns: Sums = np.array([1 << bit for bit in range(32)], np.uint32)
    each: Sums = columns >> np.uint32(1)
    each[0] = POLYNOMIAL
    # Of one bit; doubled, it is that of two, four and so on.
    left = 8 * nbytes
    while left:
        if left & 1:
            columns = _through(each, columns)
        each = _through(each, each)
        left >>= 1
    values = np.arange(256, dtype=np.uint32)
    shifts = np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    return _through(columns, values << shifts)


def _through(columns: Sums, values: Sums) -> Sums:
    """Values under a linear law, given by what becomes of each bit."""
    found = np.zeros_like(values)
    for bit, column in enumerate(columns):
        found ^= np.where(values >> np.uint32(bit) & np.uint32(1), column, np.uint32(0))
    return found


def gone_over(sums: Sums, table: Sums) -> Sums:
    """Sums after as many zeros as a table is for, uint32 ``[N]``."""
    found: Sums = np.zeros_like(sums)
    for k in range(4):
        found ^= table[k, sums >> np.uint32(8 * k) & np.uint32(255)]
    return found


class DirectWriter(Protocol):
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


def laying(store: CheckedStore, paths: list[str], span: Span) -> DirectWriter:
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
        placement = record_layout(schema)
        self._large = placement.large
        self._files = {file.path.name: file for file in store.files}
        self._row_nbytes = {
            name: file.nbytes // ring.num_rows
            for name, file in self._files.items()
            if name != SUMS
        }
        self._packer = packer(schema, placement, ring.num_envs)
        room = max(1, STAGE_NBYTES // max(1, placement.stride))
        # Padding between fields is never packed, and must be zeros.
        self._stage = np.zeros((room, placement.stride), np.uint8)
        summed = [FLAGS, *([RECORDS] if placement.stride else [])]
        for path, name in placement.large.items():
            if not schema.fields[path].mutable:
                summed.append(name)
        self._parts = {name: part for part, name in enumerate(summed)}
        each = [self._row_nbytes[name] for name in summed]
        self._passing = BlockChecksums(ring, span, each)
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
        large = [n for n, each in nbytes.items() if each >= direct_file.DIRECT_NBYTES]
        for name in large:
            way = direct_file.past(self._files[name], nbytes[name], streams, len(large))
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
