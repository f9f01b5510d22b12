"""Rows in compressed Zarr shards, behind a tail of memory-mapped files.

New rows go to the tail, which is the memmap engine's files over the whole ring, sparse.
A place whose last row was written is packed into one shard a field by a thread,
written whole under another name, synced and renamed; then the place's number says so,
durably; then the tail's space is given back. Whoever writes into a sealed place again
first has it put back into the tail.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import CorruptError, StarvedError, system_failure
from mmreplay.files import File
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Run
from mmreplay.storage import zarr_group
from mmreplay.storage.base import Columns
from mmreplay.storage.memmap import POLICY, MemmapStore
from mmreplay.storage.places import Places
from mmreplay.storage.policy import ReadPolicy
from mmreplay.storage.sealer import Sealer
from mmreplay.storage.shard_maker import ShardMaker
from mmreplay.storage.shards import ShardReader
from mmreplay.storage.tail import checksum, free

Ids = NDArray[np.int64]
TAIL_NBYTES = 256 << 20
"""Raw rows that may wait to be sealed before who writes waits too."""
UNPACK_ROWS = 1024
TRIES = 1000


class ZarrStore:
    """One data folder, its group at `path`; see `Store` for what each method owes.

    Threads: `_lock` is held while rows are written and while a place changes hands.
    Readers take no lock: they look at the places' numbers before and after.
    """

    def __init__(
        self, folder: Path, metadata: Metadata, tail: MemmapStore, places: Places
    ) -> None:
        assert metadata.sharding is not None
        self.ring, self.schema = metadata.ring, metadata.schema
        self.packed = frozenset[str]()
        self._metadata = metadata
        self._folder = folder
        self.path = folder / zarr_group.FOLDER
        self._tail = tail
        self._places = places
        ring = self.ring
        self._wide = ring.num_envs if ring.layout == "time_major" else 1
        self._place_rows = metadata.sharding.shard_rows * self._wide
        self._arrays = zarr_group.arrays_of(metadata)
        self._served = zarr_group.served(metadata)
        self._maker = ShardMaker(self.path, metadata, tail)
        self._reader = ShardReader(self.path, ring, tail.maps)
        self._sealer = Sealer()
        self._lock = threading.Lock()
        self._versions: dict[int, int] = {}
        self._full: dict[int, NDArray[np.bool_]] = {}
        place_nbytes = max(1, self._place_rows * self.schema.row_nbytes)
        # Every environment may fill a place in the same step.
        self._most_waiting = max(TAIL_NBYTES // place_nbytes, 2 * ring.num_envs + 2)

    @classmethod
    def create(cls, folder: Path, metadata: Metadata) -> ZarrStore:
        """Create the files of a new generation in an existing folder."""
        zarr_group.create(folder, metadata)
        tail = MemmapStore.create(folder, metadata.ring, metadata.schema)
        try:
            return cls(folder, metadata, tail, Places.create(folder, _count(metadata)))
        except BaseException:
            tail.close()
            raise

    @classmethod
    def open(
        cls,
        folder: Path,
        metadata: Metadata,
        *,
        writable: bool,
        policy: ReadPolicy = POLICY,
    ) -> ZarrStore:
        """Open the files of a generation."""
        tail = MemmapStore.open(
            folder, metadata.ring, metadata.schema, writable=writable, policy=policy
        )
        try:
            places = Places.open(
                folder, _count(metadata), writable=writable, mapped=tail.maps
            )
            if writable:
                zarr_group.sweep(folder)
            return cls(folder, metadata, tail, places)
        except BaseException:
            tail.close()
            raise

    def write(
        self, runs: Sequence[Run], columns: Columns, flags: NDArray[np.uint8]
    ) -> None:
        """Write a batch of rows; see `Store.write`."""
        size = self._place_rows
        touched = {
            place
            for row, first, stop in runs
            for place in range(row // size, (row + stop - first - 1) // size + 1)
        }
        with self._lock:
            self._take_over(touched)
            self._tail.write(runs, columns, flags)
            full = self._filled(runs)
        self._seal_soon(full)

    def _take_over(self, touched: set[int]) -> None:
        """Have places in the tail, and void what is being made of them."""
        for place in touched:
            if self._places.get(place) & 1:
                self._unseal(place)
            self._versions[place] = self._versions.get(place, 0) + 1

    def _filled(self, runs: Sequence[Run]) -> list[int]:
        """Places whose last step, of each environment, was written now."""
        size, wide = self._place_rows, self._wide
        found = []
        for row, first, stop in runs:
            last = row + stop - first
            for place in range(row // size, (last - 1) // size + 1):
                end = (place + 1) * size
                low = max(row, end - wide)
                if last <= end - wide:
                    continue
                ends = self._full.setdefault(place, np.zeros(wide, bool))
                ends[low - (end - wide) : min(last, end) - (end - wide)] = True
                if ends.all():
                    del self._full[place]
                    found.append(place)
        return found

    def _seal_soon(self, places: list[int]) -> None:
        for place in places:
            self._sealer.give(partial(self._seal, place))
        if self._sealer.waiting > self._most_waiting:
            self._sealer.drain()

    def step(self, given: Mapping[str, object]) -> int:
        """Take one step; see `Store.step`."""
        return self._tail.step(given)

    def write_step(self, row: int, given: Columns, flags: int) -> None:
        """Write the step taken; see `Store.write_step`."""
        place, within = divmod(row, self._place_rows)
        with self._lock:
            self._take_over({place})
            self._tail.write_step(row, given, flags)
        if within == self._place_rows - 1:
            self._seal_soon([place])

    def block(self, given: Mapping[str, object]) -> int:
        """Count the steps of a block; see `Store.block`."""
        return self._tail.block(given)

    def allocate(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> None:
        """Reserve space for positions; see `Store.allocate`."""
        self._tail.allocate(first, stop)

    def gather(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out; see `Store.gather`."""
        places, within = np.divmod(rows, self._place_rows)
        for _ in range(TRIES):
            numbers = self._places.take(places)
            try:
                found = self._copied(rows, places, numbers, within, paths)
            except CorruptError:
                if (self._places.take(places) == numbers).all():
                    raise
                continue
            if (self._places.take(places) == numbers).all():
                return found
        raise StarvedError(
            f"{self.path}: got shards that changed {TRIES} times while rows were "
            "copied, expected them to last; the files are damaged: run mmreplay verify"
        )

    def _copied(
        self, rows: Ids, places: Ids, numbers: Ids, within: Ids, paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        sealed = (numbers & 1) == 1
        if not sealed.any():
            return self._tail.gather(rows, paths)
        mutable = [path for path in paths if path not in self._arrays]
        found = self._tail.gather(rows, mutable)
        raw = np.flatnonzero(~sealed)
        packed = np.flatnonzero(sealed)
        kept = [p for p in paths if p in self._arrays and p not in self._served]
        part = self._tail.gather(rows[raw], kept) if len(raw) else {}
        for path in kept:
            array = self._arrays[path]
            out: NDArray[Any] = np.empty((len(rows), *array.shape), array.dtype)
            into = out if not len(raw) else np.empty_like(out[: len(packed)])
            self._reader.take(
                array, places[packed], numbers[packed], within[packed], into
            )
            if len(raw):
                out[packed], out[raw] = into, part[path]
            found[path] = out
        return {path: found[path] for path in paths if path in found}

    def _unseal(self, place: int) -> None:
        """Put a sealed place back into the tail."""
        number = self._places.get(place)
        size = self._place_rows
        for first in range(0, size, UNPACK_ROWS):
            rows = np.arange(first, min(first + UNPACK_ROWS, size)) + place * size
            columns = self.gather(rows, self.schema.paths)
            flags = self._tail.flags(rows)
            self._tail.write([(int(rows[0]), 0, len(rows))], columns, flags)
        # What says where the rows are may reach the disk before anything else.
        self._tail.sync()
        self._places.put(place, number + 1)
        self._sealer.give(partial(self._retire, place))

    def _retire(self, place: int) -> None:
        """Remove the shards of a place that is not sealed any more."""
        self._places.file.sync()
        if not self._places.get(place) & 1:
            self._maker.remove(place)

    def _seal(self, place: int) -> None:
        """Make shards of a place, and publish them unless it is written meanwhile."""
        with self._lock:
            number, version = self._places.get(place), self._versions.get(place, 0)
        if number & 1:
            return
        with self._maker.made(place) as made:
            if self._versions.get(place, 0) != version:
                return
            self._maker.publish(made)
        with self._lock:
            if self._versions.get(place, 0) != version:
                return
            self._places.put(place, number + 1)
        # Only what survives a power cut takes the tail's place.
        self._places.file.sync()
        with self._lock:
            if self._places.get(place) == number + 1:
                free(self._tail, place * self._place_rows, self._place_rows)

    def seal_all(self, first: Ids, stop: Ids) -> None:
        """Seal every place that holds a row alive, and say in the group what is alive.

        Args:
            first: int64 ``[E]``, oldest positions.
            stop: int64 ``[E]``, the next positions.
        """
        size = self._place_rows
        spans = [np.empty(0, np.int64)]
        for env_id, oldest in enumerate(first.tolist()):
            stretch = self.ring.stretch(env_id, oldest, int(stop[env_id]))
            for row, step, count in stretch:
                last = row + step * (count - 1)
                spans.append(np.arange(row // size, last // size + 1))
        for place in np.unique(np.concatenate(spans)).tolist():
            self._sealer.give(partial(self._seal, place))
        self._sealer.drain()
        if self._sealer.failure is None:
            state = {"first": first.tolist(), "stop": stop.tolist()}
            zarr_group.write_group(self._folder, self._metadata, state)

    def prefetch(self, rows: NDArray[np.int64], paths: Sequence[str]) -> int:
        """Ask the disk for missing rows of the tail; see `Store.prefetch`."""
        raw = (self._places.take(rows // self._place_rows) & 1) == 0
        return self._tail.prefetch(rows[raw], paths) if raw.any() else 0

    @property
    def all_flags(self) -> NDArray[np.uint8]:
        """Flags of every row; see `Store.all_flags`."""
        return self._tail.all_flags

    def flags(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Flags of rows; see `Store.flags`."""
        return self._tail.flags(rows)

    def flags_between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
        """Flags of a stretch; see `Store.flags_between`."""
        return self._tail.flags_between(env_id, first, stop)

    def set(
        self, path: str, rows: NDArray[np.int64], values: NDArray[np.generic]
    ) -> None:
        """Overwrite a mutable field's values, which no shard holds; see `Store.set`."""
        self._tail.set(path, rows, values)

    def checksum(self, env_id: int, block: int) -> int:
        """CRC32C of a block; see `CheckedStore.checksum`."""
        ring = self.ring
        size = ring.block_rows
        (row, step, count), *_ = ring.stretch(env_id, block * size, (block + 1) * size)
        rows = np.arange(row, row + step * count, step)
        return checksum(self, block * size, rows)

    def write_sums(self, env_id: int, first: int, sums: NDArray[np.uint32]) -> None:
        """Keep checksums; see `CheckedStore.write_sums`."""
        self._tail.write_sums(env_id, first, sums)

    def read_sum(self, env_id: int, block: int) -> tuple[int, int]:
        """Return a block's kept (checksum, lap)."""
        return self._tail.read_sum(env_id, block)

    def sync(self) -> None:
        """Make every row survive a power cut; see `Store.sync`.

        Raises:
            FailedError: It cannot, or a shard could not be written before.
        """
        failure = self._sealer.failure
        if isinstance(failure, OSError):
            raise system_failure("seal", self.path, failure) from failure
        if failure is not None:
            raise failure
        self._tail.sync()
        self._places.file.sync()

    def sync_sums(self) -> None:
        """Make the checksums survive a power cut."""
        self._tail.sync_sums()

    @property
    def files(self) -> list[File]:
        """The tail's; see `Store.files`."""
        return self._tail.files

    def disk_nbytes(self) -> tuple[int, int]:
        """Return (apparent, allocated) bytes."""
        apparent, allocated = self._tail.disk_nbytes()
        for path in self.path.rglob("c.*"):
            status = path.stat()
            apparent += status.st_size
            allocated += status.st_blocks * 512
        return apparent, allocated

    def compression(self) -> dict[str, tuple[int, int]]:
        """Per path, (bytes of its shards, bytes of the rows in them)."""
        return self._maker.compression(self._places.sealed())

    def unmap(self) -> None:
        """Let the mappings go; see `Store.unmap`."""
        self._tail.unmap()
        self._reader.forget()

    def close(self) -> None:
        """Seal what is due, end the thread, and give files back."""
        try:
            self._sealer.stop()
        finally:
            self._tail.close()
            self._places.file.close()


def _count(metadata: Metadata) -> int:
    """Places of a ring."""
    ring, sharding = metadata.ring, metadata.sharding
    assert sharding is not None
    wide = ring.num_envs if ring.layout == "time_major" else 1
    return ring.num_rows // (sharding.shard_rows * wide)
