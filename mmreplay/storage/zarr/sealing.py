"""Seals full shard ranges, and copies sealed ones back before they are written again.

`Sealer` is the thread. It packs a range whose last row was written into one shard a
field, writes each under a temporary name, syncs and renames it. Then the range's number
says so, durably, and only then the space of its staging rows is freed. A sealed range
that is written again is first copied back to the staging files; where none of its rows
is alive it is retired as a whole, and nothing is unpacked. `Sealing` decides which of
this is done, and when.
"""

from __future__ import annotations

import errno
import queue
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32c
from mmreplay.disk.files import RECYCLED_PAGES_NBYTES
from mmreplay.errors import FailedError, FullError, shortage
from mmreplay.format.metadata import Metadata
from mmreplay.process import Worker
from mmreplay.ring import Ring, Run, runs
from mmreplay.storage.commit_state import WritableCommitState, heap_bounds
from mmreplay.storage.layout import RECORDS, record_layout
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.store import Columns, ShardError, Store
from mmreplay.storage.zarr import group
from mmreplay.storage.zarr.shards import Bounds, ShardMaker, ShardStates

Work = Callable[[], None]
Ids = NDArray[np.int64]
Gather = Callable[[Ids, Sequence[str]], Columns]


class Sealer:
    """Does work in the order given, on a thread of its own.

    A full disk leaves a range unsealed, which loses nothing; so does a lack of memory,
    threads or descriptors. Any other failure ends the work; see `failure`.

    Attributes:
        failure: What the device refused, if it did.
        short: The number of what was short last, or 0.
    """

    def __init__(self) -> None:
        self._worker: Worker[Work] | None = None
        self.failure: BaseException | None = None
        self.short = 0
        self._submitted = self._done = 0

    def submit(self, work: Work) -> None:
        """Have work done; starts the thread at the first."""
        if self.failure is not None:
            return
        if self._worker is None:
            self._worker = Worker("mmreplay-seal", self._run)
        self._submitted += 1
        self._worker.put(work)
        if not self._worker.running:
            try:
                self._worker.start()
            except RuntimeError:
                # What was given waits until there is one: nothing waits for it.
                self.short = errno.EAGAIN

    @property
    def _running(self) -> bool:
        return self._worker is not None and self._worker.running

    @property
    def waiting(self) -> int:
        """Pieces of work given and not done."""
        return self._submitted - self._done

    def drain(self) -> None:
        """Wait until everything given is done, or refused."""
        if not self._running or self.failure is not None:
            return
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.submit(lambda: done.put(None))
        while self.failure is None:
            try:
                done.get(timeout=0.2)
            except queue.Empty:
                continue
            return

    def stop(self) -> None:
        """End the thread once all is done, and wait for it."""
        worker = self._worker
        if worker is not None and worker.running:
            worker.stop()
            self._worker = None

    def _run(self, worker: Worker[Work]) -> None:
        while (work := worker.get()) is not None:
            try:
                if self.failure is None:
                    work()
            except BaseException as error:
                # Where something is short nothing is lost: the range stays in the
                # staging files, and is tried again when the buffer is closed.
                short = shortage(error)
                self.short = short or self.short
                if not short:
                    self.failure = error
            self._done += 1


def free(staging: MemmapStore, row: int, count: int) -> None:
    """Give back the space of rows, but for flags and mutable fields."""
    placement = record_layout(staging.schema)
    names = {
        name for path, name in placement.large.items() if not staging.schema.fields[path].mutable
    }
    for name in staging.space.names:
        if name in names | {RECORDS}:
            staging.space.free(name, row, count)


def put_back(staging: MemmapStore, row: int, columns: Columns, count: int) -> None:
    """Write rows back that were sealed, without flags and mutable fields.

    Unlike `MemmapStore.write`, it is not said of the rows after them that they are to
    come: those may be alive.

    Args:
        staging: Where they go.
        row: The first one.
        columns: Per path ``[count, *shape]``.
        count: How many.
    """
    placement, schema = record_layout(staging.schema), staging.schema
    if placement.record is not None:
        # Padding between fields is zeros.
        packed = np.zeros((count, placement.stride), np.uint8)
        staging.packer.pack(packed, columns, 0, count)
        offset = row * placement.stride
        staging.file(RECORDS).pwrite_new_pages(
            packed.reshape(-1).data, offset, RECYCLED_PAGES_NBYTES
        )
    for path, name in placement.large.items():
        if not schema.fields[path].mutable:
            data = np.ascontiguousarray(columns[path]).reshape(-1).view(np.uint8)
            staging.file(name).pwrite_new_pages(
                data.data, row * schema.fields[path].nbytes, RECYCLED_PAGES_NBYTES
            )


def checksum(store: Store, gather: Gather, position: int, rows: NDArray[np.int64]) -> int:
    """CRC32C of a block's rows, as the memmap engine makes it of its files.

    Args:
        store: Where the rows are.
        gather: Copies them as they are stored.
        position: The block's first.
        rows: int64 ``[block_rows]``.
    """
    placement, schema = record_layout(store.schema), store.schema
    paths = [path for path, field in schema.fields.items() if not field.mutable]
    # Missing pages are else waited for one by one, by who holds the lock of Python.
    store.prefetch(rows, paths)
    crc = crc32c(struct.pack("<Q", position))
    crc = crc32c(store.flags(rows).tobytes(), crc)
    if placement.record is not None:
        names = placement.record.names or ()
        # Padding between fields is zeros.
        raw = np.zeros((len(rows), placement.stride), np.uint8)
        packed = raw.reshape(-1).view(placement.record)
        for path, column in gather(rows, names).items():
            packed[path] = column
        crc = crc32c(raw.data, crc)
    for path in placement.large:
        if not schema.fields[path].mutable:
            column = gather(rows, [path])[path]
            crc = crc32c(np.ascontiguousarray(column).tobytes(), crc)
    return crc


def _bounds(commit: WritableCommitState, ring: Ring) -> Bounds:
    """What is published, for shards that are made of it."""
    heads, tails = commit.heads, commit.tails
    # A power cut brings rows back that were removed and not committed since.
    tails = np.minimum(tails, commit.committed.tails)
    tails = np.maximum(tails, commit.limits - ring.slots)
    return Bounds(heads, tails, *heap_bounds(commit))


MAX_WAITING_NBYTES = 256 << 20
"""Raw rows that may wait to be sealed before an add waits for the thread."""
UNPACK_ROWS = 1024
SHORT = {
    errno.EMFILE: ("too many open files", "Close some files"),
    errno.ENFILE: ("too many open files", "Close some files"),
    errno.ENOMEM: ("not enough memory", "Free some memory"),
    errno.EAGAIN: ("no thread left", "End other threads or processes"),
}
"""What the system ran out of, other than disk space, and what to do about it."""
CLOSED = (
    "no row is lost, but other readers of Zarr do not see them. {}, open the buffer "
    "with mode='r+', and close it."
)
STAGED = (
    "this call added no row, as the heap is full of values that no shard holds yet. "
    "{}, and call again."
)
COPIED = "the new buffer was not made. {}, and call again."


class Sealing:
    """The shard ranges of one store, and where the rows of each are.

    Threads: `lock` is held while rows are written and while a range's number changes.

    Attributes:
        path: The group's folder.
        states: The numbers that say where the rows of each are.
        steps: Rows of an environment in a range.
        unsealed: The group misses rows that it was to hold: something was short.
        lock: Held while staging rows are written.
        range_rows: Rows of a range.
        refuse_removed: Called before files of the group are read or changed by their
            path; raises `RemovedError` where it leads to another buffer.
    """

    def __init__(
        self, folder: Path, metadata: Metadata, staging: MemmapStore, states: ShardStates
    ) -> None:
        """Seal into the group of a data folder."""
        sharding = metadata.sharding
        assert sharding is not None
        self._folder, self._metadata = folder, metadata
        self.path = folder / group.FOLDER
        self._ring, self.steps = metadata.ring, sharding.shard_rows
        self._wide = metadata.ring.wide
        self.range_rows = self.steps * self._wide
        self.states = states
        self._staging = staging
        self._maker = ShardMaker(self.path, metadata, staging)
        self._sealer = Sealer()
        self.refuse_removed: Callable[[], object] = lambda: None
        self.lock = threading.Lock()
        self._versions: dict[int, int] = {}
        self._full: dict[int, NDArray[np.bool_]] = {}
        self._limits: Ids | None = None
        # What an earlier writer said of the group's rows holds until one is replaced.
        self._described, self.unsealed = True, False
        range_nbytes = max(1, self.range_rows * metadata.schema.row_nbytes)
        # Every environment may fill a range in the same step.
        self._most_waiting = max(MAX_WAITING_NBYTES // range_nbytes, 2 * metadata.ring.num_envs + 2)

    @property
    def _time_major(self) -> bool:
        return self._metadata.ring.layout == "time_major"

    @property
    def limit_step(self) -> int:
        """See `Store.limit_step`: whole shards, where there is one to spare."""
        ring, size = self._ring, self.steps
        needed = ring.capacity + ring.reserve + ring.block_rows
        return size if ring.slots - size >= needed else 1

    def read_values_by(self, commit: WritableCommitState) -> None:
        """Read values that vary by what is published."""
        self._maker.bounds = partial(_bounds, commit, self._ring)

    def give_up(self, limits: Ids) -> None:
        """Note that no reader asks for rows a lap before these positions any more."""
        self._limits = limits.copy()

    def ranges_of(self, runs: Sequence[Run]) -> set[int]:
        """Ranges that hold rows of a write."""
        size = self.range_rows
        return {
            range_id
            for row, first, stop in runs
            for range_id in range(row // size, (row + stop - first - 1) // size + 1)
        }

    def unseal(self, runs: Sequence[Run], gather: Gather) -> None:
        """Copy sealed ranges that a write touches back to the staging files.

        Args:
            runs: Of the write; the lock is held.
            gather: Reads rows of sealed ranges.
        """
        for range_id in self.ranges_of(runs):
            number = self.states.get(range_id)
            if number & 1:
                self.refuse_removed()
                self._clear_group_state()
                if not self._nothing_alive(range_id, runs):
                    self._unpack(range_id, gather)
                self.states.put(range_id, number + 1)
                self._sealer.submit(partial(self._retire, range_id))
            self._versions[range_id] = self._versions.get(range_id, 0) + 1

    def _clear_group_state(self) -> None:
        """Remove what the group says of its rows, before one is replaced."""
        if self._described:
            group.write_group(self._folder, self._metadata, {})
            self._described = False

    def _nothing_alive(self, range_id: int, runs: Sequence[Run]) -> bool:
        """Whether no row of a range is alive, nor would be after a power cut.

        Rows are written in order, so what a write begins with its first step holds
        none of this lap; and none of the lap before, if the limits, which are durable
        before they are published, have passed all of it.
        """
        if self._limits is None:
            return False
        first, slots = range_id * self.range_rows, self._ring.slots
        if not any(
            row <= first and first + self._wide <= row + stop - start for row, start, stop in runs
        ):
            return False
        if self._time_major:
            over = (self._limits - first // self._wide) % slots
        else:
            over = (self._limits[first // slots, None] - first % slots) % slots
        return bool(((over == 0) | (over >= self.steps)).all())

    def _unpack(self, range_id: int, gather: Gather) -> None:
        """Put what shards hold of a range's rows back into the staging files.

        Flags and mutable fields are there. Of a range that was sealed before it was
        full they have holes, and to look at one is a SIGBUS where tmpfs is full.
        """
        size, fields = self.range_rows, self._metadata.schema.fields
        paths = [path for path, field in fields.items() if not field.mutable]
        for first in range(0, size, UNPACK_ROWS):
            rows = np.arange(first, min(first + UNPACK_ROWS, size)) + range_id * size
            columns = gather(rows, paths)
            put_back(self._staging, int(rows[0]), columns, len(rows))
        # What says where the rows are may reach the disk before anything else.
        self._staging.sync()

    def _retire(self, range_id: int) -> None:
        """Remove the shards of a range that is not sealed any more."""
        self.states.file.sync()
        self.refuse_removed()
        if not self.states.get(range_id) & 1:
            self._maker.remove(range_id)

    def filled(self, runs: Sequence[Run]) -> list[int]:
        """Ranges whose last step, of each environment, was written now."""
        size, wide = self.range_rows, self._wide
        full = []
        for row, first, stop in runs:
            last = row + stop - first
            for range_id in range(row // size, (last - 1) // size + 1):
                end = (range_id + 1) * size
                low = max(row, end - wide)
                if last <= end - wide:
                    continue
                ends = self._full.setdefault(range_id, np.zeros(wide, bool))
                ends[low - (end - wide) : min(last, end) - (end - wide)] = True
                if ends.all():
                    del self._full[range_id]
                    full.append(range_id)
        return full

    def seal_soon(self, range_ids: list[int]) -> None:
        """Have ranges sealed by the thread; waits where too many wait already."""
        for range_id in range_ids:
            self._sealer.submit(partial(self._seal, range_id))
        if self._sealer.waiting > self._most_waiting:
            self._sealer.drain()

    def seal_now(self, range_ids: list[int]) -> None:
        """Have ranges sealed, and wait until they are."""
        self.seal_soon(range_ids)
        self._sealer.drain()

    def _seal(self, range_id: int) -> None:
        """Make shards of a range, and publish them unless a row of it was written."""
        with self.lock:
            number, version = self.states.get(range_id), self._versions.get(range_id, 0)
        if number & 1:
            return
        self.refuse_removed()
        with self._maker.made(range_id) as made:
            if self._versions.get(range_id, 0) != version:
                return
            self.refuse_removed()
            self._maker.publish(made)
        with self.lock:
            if self._versions.get(range_id, 0) != version:
                return
            self.states.put(range_id, number + 1)
        # Only what survives a power cut replaces the staging rows.
        self.states.file.sync()
        with self.lock:
            if self.states.get(range_id) == number + 1:
                free(self._staging, range_id * self.range_rows, self.range_rows)

    def settle(self, first: Ids, stop: Ids, *, seal: bool, fresh: bool = False) -> None:
        """Say in the group what is alive, and how far of it shards hold.

        Args:
            first: int64 ``[E]``, oldest positions.
            stop: int64 ``[E]``, the next positions.
            seal: Seal every range that holds a row alive before.
            fresh: Rows that are not alive were never in a buffer.
        """
        alive = self._alive(first, stop) if seal else []
        if seal:
            self.seal_now(alive)
        self._sealer.drain()
        if self._sealer.failure is None:
            state = {
                "first": first.tolist(),
                "stop": stop.tolist(),
                "sealed": self._sealed(first, stop).tolist(),
            }
            self.unsealed = True
            self.refuse_removed()
            group.write_group(self._folder, self._metadata, state)
            self._described = True
            self.unsealed = seal and state["sealed"] != state["stop"]
            if seal:
                # Rows before the first in its block have space: they are summed.
                block = self._ring.block_rows
                alive_before = self._alive(first // block * block, stop) if fresh else None
                # The group is complete now; if a sync fails, the commit raises it.
                with suppress(OSError):
                    self._give_back(stop, alive_before)

    def _give_back(self, stop: Ids, alive: list[int] | None) -> None:
        """Give back the space of ranges that are sealed, or were never written.

        It is reserved by the MiB, which may be longer than a range, so that of other
        ranges was reserved again with it. What the ring may overwrite stays: if the
        power fails now, the last commit may still have it.
        """
        size, ring = self.range_rows, self._ring
        firsts = np.arange(0, ring.num_rows, size)
        # What is given back is lost, and what says that shards hold it may not have
        # reached the disk: a writer may have been killed between the two.
        self.states.file.sync()
        if alive is not None:
            unwritten = ~np.isin(firsts // size, alive)
        elif self._time_major:
            unwritten = firsts // self._wide >= stop.max()
        else:
            unwritten = firsts % ring.slots >= stop[firsts // ring.slots]
        with self.lock:
            sealed = self.states.take(firsts // size) & 1 == 1
            freed = np.flatnonzero(sealed | unwritten)
            for range_id, first, last in runs(freed) if len(freed) else []:
                free(self._staging, range_id * size, (last - first) * size)

    def settle_last(self, first: Ids, stop: Ids, *, seal: bool) -> None:
        """The same; what fails keeps no row from a commit.

        `check` raises it and, for a lack of space or memory, `raise_if_unsealed`.
        """
        try:
            self.settle(first, stop, seal=seal)
        except (OSError, MemoryError) as error:
            self.unsealed = True
            self._sealer.short = shortage(error)
            if not self._sealer.short:
                self._sealer.failure = error

    def _alive(self, first: Ids, stop: Ids) -> list[int]:
        """Ranges that hold a row alive."""
        size = self.range_rows
        spans = [np.empty(0, np.int64)]
        for env_id, oldest in enumerate(first.tolist()):
            runs_alive = self._ring.split_at_wrap(env_id, oldest, int(stop[env_id]))
            for row, step, count in runs_alive:
                last = row + step * (count - 1)
                spans.append(np.arange(row // size, last // size + 1))
        range_ids: list[int] = np.unique(np.concatenate(spans)).tolist()
        return range_ids

    def _sealed(self, first: Ids, stop: Ids) -> Ids:
        """The first position of each environment, from its oldest on, in no shard."""
        reached, every = first.copy(), np.arange(len(first))
        while True:
            range_ids = self._ring.rows(every, reached) // self.range_rows
            in_shard = (reached < stop) & (self.states.take(range_ids) & 1 == 1)
            if not in_shard.any():
                return np.minimum(reached, stop)
            after = (reached // self.steps + 1) * self.steps
            reached = np.where(in_shard, after, reached)

    def raise_if_unsealed(self, consequence: str = CLOSED) -> None:
        """Raise where rows that were to be sealed at last were not.

        Args:
            consequence: Second half of the message; ``{}`` is what to do.

        Raises:
            FullError: No space is left.
            FailedError: Files, memory or threads were short.
        """
        if self.unsealed:
            raise self._short("the newest rows", consequence)

    def raise_if_staged(self, range_ids: list[int]) -> None:
        """Raise where ranges were to be sealed and were not.

        Raises:
            FullError: No space is left.
            FailedError: Files, memory or threads were short.
        """
        if any(not self.states.get(range_id) & 1 for range_id in range_ids):
            raise self._short("the oldest rows of the heap", STAGED)

    def _short(self, rows: str, consequence: str) -> FailedError | FullError:
        number = self._sealer.short
        reason, way_out = SHORT.get(number, ("no space left", "Free some space"))
        kind = FailedError if number in SHORT else FullError
        return kind(
            f"{self.path}: cannot seal {rows} ({reason}); {consequence.format(way_out)}",
            errno_=number or None,
        )

    def check(self) -> None:
        """Raise what sealing failed with.

        Raises:
            ShardError: A shard could not be written.
        """
        failure, path = self._sealer.failure, self.path
        if failure is not None:
            reason = str(failure).rstrip(".") or type(failure).__name__
            number = failure.errno if isinstance(failure, OSError) else None
            raise ShardError(f"cannot seal {path}: {reason}", errno_=number) from failure

    def compression(self, heads: Ids) -> dict[str, tuple[int, int]]:
        """Per path, (bytes of its shards, bytes of the rows in them).

        Args:
            heads: int64 ``[E]``; slots that no row was written to count for nothing.
        """
        range_ids, steps = self.states.sealed(), self.steps
        per_env = self._ring.slots // steps
        if self._time_major:
            written = heads[None] - range_ids[:, None] * steps
        else:
            written = heads[range_ids // per_env] - range_ids % per_env * steps
        rows = int(np.clip(written, 0, steps).sum())
        return self._maker.compression(range_ids, rows)

    def stop(self) -> None:
        """Seal what is due, and end the thread."""
        self._sealer.stop()
