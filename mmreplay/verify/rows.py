"""Block checksums against the data, by plain reads of a few MiB at a time.

Not through the store's mapping: that is advised for random rows, and reads page by
page. Computing the sum in another way than the writer is also the better check.

Checksums of a Zarr buffer: its blocks are in shards, or still in the tail.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32c
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError, raise_if_out_of_files
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Ring
from mmreplay.storage.layout import FLAGS, RECORDS, SUM_DTYPE, SUMS, record_layout
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.verify.group import GroupFlags
from mmreplay.verify.report import Notebook
from mmreplay.verify.slots import Claim, CommitFile
from mmreplay.verify.values import SealedValueCheck, ValueCheck

CHUNK_NBYTES = 4 << 20

Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stripe:
    """Rows that lie together on disk and are checked in one pass.

    Attributes:
        row: The first row.
        width: Rows of one slot: 1, or all environments of a time-major ring.
        blocks: (column, environment, block) of each checksum that covers them.
    """

    row: int
    width: int
    blocks: tuple[tuple[int, int, int], ...]


class SumCheck:
    """Compares the checksums of one generation with its data."""

    def __init__(
        self, opened: dict[str, File], metadata: Metadata, commit_file: CommitFile
    ) -> None:
        self._opened, self._metadata = opened, metadata
        self._sums = opened[SUMS]
        self._folder = metadata.folder
        self._ring = metadata.ring
        self._commit = commit_file
        self._covered = _covered(opened, metadata)

    def _blocks(self, claim: Claim) -> tuple[Array, Array]:
        """First and stop, int64 ``[E]``, of the whole blocks that hold a row alive."""
        size = self._ring.block_rows
        # A block that was overwritten in part has rows alive and a sum no longer.
        given_up = -(-(claim.limits - self._ring.slots) // size)
        firsts = np.maximum(claim.firsts // size, given_up)
        return firsts, np.maximum(claim.heads // size, firsts)

    def nbytes(self, claim: Claim) -> int:
        """Bytes that `run` will read."""
        firsts, stops = self._blocks(claim)
        row_nbytes = sum(nbytes for _, nbytes in self._covered)
        return int((stops - firsts).sum()) * self._ring.block_rows * row_nbytes

    def run(self, claim: Claim, notes: Notebook) -> None:
        """Check all committed whole blocks that hold a row alive."""
        ring = self._ring
        size = ring.block_rows
        firsts, stops = self._blocks(claim)
        oldest = np.maximum(claim.firsts, firsts * size)
        summed = np.maximum(stops * size - oldest, 0)
        notes.unsummed_rows += int((claim.heads - claim.firsts - summed).sum())
        for stripe in stripes(ring, firsts, stops):
            try:
                sums = self.compute(stripe, notes)
                for (_, env_id, block), computed in zip(stripe.blocks, sums, strict=True):
                    self._compare(stripe, env_id, block, computed, notes)
            except (CorruptError, FailedError) as error:
                notes.fail("file", self._folder, error)

    def compute(self, stripe: Stripe, notes: Notebook | None) -> list[int]:
        """CRC32C of each block of a stripe: position, flags, records, large fields."""
        size, width = self._ring.block_rows, stripe.width
        crcs = [crc32c(struct.pack("<Q", block * size)) for _, _, block in stripe.blocks]
        for file, row_nbytes in self._covered:
            if width == 1:
                begin = stripe.row * row_nbytes
                crcs[0] = _extended(crcs[0], file, begin, size * row_nbytes, notes)
            elif width * row_nbytes > CHUNK_NBYTES:
                for first in range(stripe.row, stripe.row + size * width, width):
                    for index, (column, _, _) in enumerate(stripe.blocks):
                        begin = (first + column) * row_nbytes
                        crcs[index] = _extended(crcs[index], file, begin, row_nbytes, notes)
            else:
                self._extend(crcs, stripe, file, row_nbytes, notes)
        return crcs

    def _extend(
        self, crcs: list[int], stripe: Stripe, file: File, row_nbytes: int, notes: Notebook | None
    ) -> None:
        """Go on with the checksums of a stripe of many environments, in one file."""
        size, width = self._ring.block_rows, stripe.width
        step = CHUNK_NBYTES // (row_nbytes * width)
        for slot in range(0, size, step):
            count = min(step, size - slot)
            first = stripe.row + slot * width
            data = file.pread(count * width * row_nbytes, first * row_nbytes)
            rows = np.frombuffer(data, np.uint8).reshape(count, width, row_nbytes)
            for index, (column, _, _) in enumerate(stripe.blocks):
                part = rows[:, column].tobytes()
                crcs[index] = crc32c(part, crcs[index])
            if notes is not None:
                notes.read(count * len(stripe.blocks) * row_nbytes)

    def stripe_nbytes(self, stripe: Stripe) -> int:
        """Bytes that a stripe's checksums cover."""
        row_nbytes = sum(nbytes for _, nbytes in self._covered)
        return self._ring.block_rows * len(stripe.blocks) * row_nbytes

    def apart(self, stripe: Stripe) -> list[Stripe]:
        """A stripe in parts that are read each by itself, where one may be damaged."""
        return [stripe]

    def value_check(self) -> ValueCheck:
        """Return the check of values that vary."""
        return ValueCheck(self._opened, self._metadata, self._commit)

    def close(self) -> None:
        """Close the files that the check opened: none here."""

    def entry(self, env_id: int, block: int) -> tuple[int, int, int]:
        """Offset, checksum and lap of a block's entry."""
        ring = self._ring
        index = env_id * ring.num_blocks + block % ring.num_blocks
        offset = index * SUM_DTYPE.itemsize
        crc, lap = struct.unpack("<II", self._sums.pread(SUM_DTYPE.itemsize, offset))
        return offset, crc, lap

    def _compare(
        self, stripe: Stripe, env_id: int, block: int, computed: int, notes: Notebook
    ) -> None:
        ring = self._ring
        offset, crc, lap = self.entry(env_id, block)
        expected_lap = (block // ring.num_blocks) & 0xFFFFFFFF
        if (crc, lap) != (computed, expected_lap):
            first = block * ring.block_rows
            if first < self._commit.limits()[env_id] - ring.slots:
                notes.skipped_blocks += 1
                return
            name = f"{self._folder}/{SUMS}"
            where = f"environment {env_id}, positions [{first}, {first + ring.block_rows})"
            if lost(crc, lap, expected_lap):
                got = f"a checksum of lap {lap}" if crc or lap else "no checksum"
                notes.note(
                    "lap",
                    name,
                    offset,
                    f"{where}: the checksum must be of lap {expected_lap}, got {got}; "
                    "it is lost, so the block is unproven",
                )
            else:
                notes.note(
                    "sum",
                    name,
                    offset,
                    f"{where}: the checksum of the data must be {crc:08x}, got "
                    f"{computed:08x}; a byte was changed in {self._bytes(stripe)}, or "
                    "in the checksum",
                )
        notes.blocks += 1

    def _bytes(self, stripe: Stripe) -> str:
        """Name the byte ranges that a stripe's checksums cover."""
        rows = self._ring.block_rows * stripe.width
        return ", ".join(
            f"{file.path.name} [{stripe.row * n}, {(stripe.row + rows) * n})"
            for file, n in self._covered
        )


def lost(crc: int, lap: int, expected_lap: int) -> bool:
    """Return whether a checksum entry that does not fit was not written for its block.

    A file that was never written holds zeros. One block in 2^32 has a checksum of 0 in
    lap 0; a change of its data is not found.
    """
    return lap != expected_lap or not (crc or lap)


def _extended(crc: int, file: File, offset: int, nbytes: int, notes: Notebook | None) -> int:
    """Extend a checksum over contiguous bytes, a chunk at a time."""
    stop = offset + nbytes
    for first in range(offset, stop, CHUNK_NBYTES):
        count = min(CHUNK_NBYTES, stop - first)
        crc = crc32c(file.pread(count, first), crc)
        if notes is not None:
            notes.read(count)
    return crc


def _covered(opened: dict[str, File], metadata: Metadata) -> list[tuple[File, int]]:
    """Files under the checksums and their bytes a row, in the sums' order."""
    schema = metadata.schema
    placement = record_layout(schema)
    found = [(opened[FLAGS], 1)]
    if placement.record is not None:
        found.append((opened[RECORDS], placement.stride))
    for path, name in placement.large.items():
        if not schema.fields[path].mutable:
            found.append((opened[name], schema.fields[path].nbytes))
    return found


def stripes(ring: Ring, firsts: Array, stops: Array, reach: int | None = None) -> Iterator[Stripe]:
    """Lay blocks out in the order of the disk.

    Args:
        ring: Where rows live.
        firsts: int64 ``[E]``, each environment's first block to check.
        stops: int64 ``[E]``, one past its last; at most one lap later.
        reach: Leave out the blocks that begin at this row or a later one, and take
            no time for them.
    """
    size = ring.block_rows
    reach = ring.num_rows if reach is None else reach
    if ring.layout == "env_major":
        for env_id in range(ring.num_envs):
            num_present = max(0, -(-(reach - env_id * ring.slots) // size))
            span = range(int(firsts[env_id]), int(stops[env_id]))
            for block in _present_blocks(span, ring.num_blocks, num_present):
                yield Stripe(ring.row(env_id, block * size), 1, ((0, env_id, block),))
        return
    for place_ in range(min(ring.num_blocks, -(-reach // (size * ring.num_envs)))):
        here = firsts + (place_ - firsts) % ring.num_blocks
        alive = np.flatnonzero(here < stops).tolist()
        if alive:
            blocks = tuple((env_id, env_id, int(here[env_id])) for env_id in alive)
            yield Stripe(ring.row(0, place_ * size), ring.num_envs, blocks)


def _present_blocks(blocks: range, num_blocks: int, num_present: int) -> Iterator[int]:
    """Return the blocks of at most a lap that lie first on disk."""
    lap = blocks.start // num_blocks * num_blocks
    for base in (lap, lap + num_blocks):
        low, high = max(blocks.start, base), min(blocks.stop, base + num_blocks)
        yield from range(low, min(high, base + num_present))


class SealedSumCheck(SumCheck):
    """Through the store, which unpacks what is sealed."""

    def __init__(
        self, opened: dict[str, File], metadata: Metadata, commit_file: CommitFile, store: ZarrStore
    ) -> None:
        """Check what a store serves, which is closed with this; see `SumCheck`."""
        super().__init__(opened, metadata, commit_file)
        self._store = store
        self._group_flags = GroupFlags(opened[FLAGS], metadata)

    def run(self, claim: Claim, notes: Notebook) -> None:
        """See `SumCheck.run`; then unpack what is served and has no checksum.

        A shard may hold rows of the newest block, and rows that are published and
        not yet committed. Shards that do not unpack are reported; their values are not
        known. Then compare the flags that the group has for other readers.
        """
        super().run(claim, notes)
        size = self._ring.block_rows
        firsts, stops = self._blocks(claim)
        for env_id in range(self._ring.num_envs):
            first, head = int(claim.firsts[env_id]), int(claim.published[env_id])
            low, high = int(firsts[env_id]) * size, int(stops[env_id]) * size
            for begin, stop in ((first, min(low, head)), (max(first, high), head)):
                for _, _, error in unreadable(self._store, env_id, begin, stop):
                    notes.note("file", self._folder, None, str(error))
        self._group_flags.run(claim, notes)

    def compute(self, stripe: Stripe, notes: Notebook | None) -> list[int]:
        """See `SumCheck.compute`."""
        found = [self._store.checksum(env, block) for _, env, block in stripe.blocks]
        if notes is not None:
            notes.read(self.stripe_nbytes(stripe))
        return found

    def apart(self, stripe: Stripe) -> list[Stripe]:
        """Each block, which is unpacked by itself; see `SumCheck.apart`."""
        return [replace(stripe, blocks=(block,)) for block in stripe.blocks]

    def value_check(self) -> ValueCheck:
        """Return the check of values in shards and in the heap."""
        return SealedValueCheck(self._opened, self._metadata, self._commit, self._store)

    def close(self) -> None:
        """Close the files."""
        self._store.close()


def unreadable(
    store: ZarrStore, env_id: int, first: int, stop: int
) -> Iterator[tuple[int, int, CorruptError | FailedError]]:
    """Stretches of at most a block with rows in a shard that does not unpack, and why.

    What is not sealed is bytes of files, which can always be read.

    Args:
        store: Opened for reading.
        env_id: The environment.
        first: The first position to look at.
        stop: The one after the last.
    """
    ring, schema = store.ring, store.schema
    paths = [path for path, each in schema.fields.items() if not each.mutable]
    step = max(1, CHUNK_NBYTES // max(1, schema.row_nbytes))
    while first < stop:
        end = min(stop, (first // ring.block_rows + 1) * ring.block_rows)
        positions = np.arange(first, end)
        rows = ring.rows(np.full(len(positions), env_id), positions)
        rows = rows[store.sealed(rows)]
        try:
            for at in range(0, len(rows), step):
                store.prefetch(rows[at : at + step], paths)
                store.gather(rows[at : at + step], paths)
        except (CorruptError, FailedError) as error:
            raise_if_out_of_files(error)
            yield first, end, error
        first = end
