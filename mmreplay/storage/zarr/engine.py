"""The Zarr engine: rows in compressed shards, in staging files until sealed.

New rows are staged in the memmap engine's files, sparse over the whole ring. `sealing`
packs the rows of full shard ranges into the Zarr group, and copies them back before
they are written again. A number per range says where its rows are: odd in a shard, even
in the staging files. Readers look at it before and after they copy.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError, StarvedError
from mmreplay.format.heap import References, legal, nbytes_of, offsets
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Run
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.commit_state import WritableCommitState
from mmreplay.storage.gather import BufferPool
from mmreplay.storage.heap import HeapSpace
from mmreplay.storage.layout import HEAP
from mmreplay.storage.memmap import POLICY, MemmapStore
from mmreplay.storage.store import Columns, NewBytes, ReadPolicy, ValuesRead
from mmreplay.storage.zarr import group
from mmreplay.storage.zarr.group import ShardedArray, references_of
from mmreplay.storage.zarr.heap_space import SealedHeapSpace
from mmreplay.storage.zarr.sealing import COPIED, Sealing, checksum
from mmreplay.storage.zarr.shards import ShardReader, ShardStates

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]
TRIES = 1000

_copies = kernels.load("copies")


class ZarrStore:
    """One data folder, its group at `path`; see `Store` for what each method owes.

    Attributes:
        path: The group's folder.
        sealing: What moves rows to shards and back.
    """

    def __init__(
        self,
        folder: Path,
        metadata: Metadata,
        staging: MemmapStore,
        states: ShardStates,
        policy: ReadPolicy = POLICY,
    ) -> None:
        self.ring, self.schema = metadata.ring, metadata.schema
        self.packed = frozenset[str]()
        self._staging = staging
        staging.recycle_pages()
        self._arrays = group.arrays_of(metadata)
        self._served = group.served(metadata)
        self._states = states
        self.sealing = Sealing(folder, metadata, staging, states)
        self.path = self.sealing.path
        self._reader = ShardReader(self.path, metadata.ring, staging.maps, policy.advise)
        self._range_rows = self.sealing.range_rows
        self._buffers = BufferPool()
        self.heap = staging.heap
        # Rows may lie in a shard, wherever the staged ones are mapped.
        self.records = self.placement = self.step_writers = None
        self._varying = frozenset(metadata.schema.varying)
        # Full ranges whose newest rows are not published yet: their values are not
        # read before they are.
        self._filled: list[int] = []
        self.limit_step = self.sealing.limit_step

    @classmethod
    def create(cls, folder: Path, metadata: Metadata) -> ZarrStore:
        """Create the files of a new generation; see `DiskStore.create`."""
        group.create(folder, metadata)
        staging = MemmapStore.create_rows(
            folder, metadata.ring, metadata.schema, metadata.heap_nbytes
        )
        try:
            return cls(folder, metadata, staging, ShardStates.create(folder, _count(metadata)))
        except BaseException:
            staging.close()
            raise

    @classmethod
    def open(
        cls, folder: Path, metadata: Metadata, *, writable: bool, policy: ReadPolicy = POLICY
    ) -> ZarrStore:
        """Open the files of a generation; see `DiskStore.open`."""
        staging = MemmapStore.open_rows(
            folder,
            metadata.ring,
            metadata.schema,
            metadata.heap_nbytes,
            writable=writable,
            policy=policy,
        )
        try:
            states = ShardStates.open(
                folder, _count(metadata), writable=writable, mapped=staging.maps
            )
            if writable:
                group.sweep(folder)
            return cls(folder, metadata, staging, states, policy)
        except BaseException:
            staging.close()
            raise

    def write(self, runs: Sequence[Run], columns: Columns, flags: NDArray[np.uint8]) -> None:
        """Write a batch of rows; see `Store.write`."""
        sealing = self.sealing
        self._seal_published()
        with sealing.lock:
            sealing.unseal(runs, self._fetched)
            self._staging.write(runs, columns, flags)
            full = sealing.filled(runs)
        self._seal_soon(full)

    def _seal_published(self) -> None:
        """Have ranges sealed that were full before, and are published by now."""
        if self._filled:
            full, self._filled = self._filled, []
            self.sealing.seal_soon(full)

    def _seal_soon(self, full: list[int]) -> None:
        """Have full ranges sealed, those with values that vary at the next write."""
        if self._varying:
            self._filled += full
        else:
            self.sealing.seal_soon(full)

    @property
    def ends(self) -> NDArray[np.uint8]:
        """End bits of the step prepared last; see `Store.ends`."""
        return self._staging.ends

    def prepare(self, data: Mapping[str, object]) -> int:
        """Check and pack one step; see `Store.prepare`."""
        return self._staging.prepare(data)

    def write_prepared(self, runs: Sequence[Run], flags: NDArray[np.uint8]) -> None:
        """Write the step prepared last; see `Store.write_prepared`."""
        sealing = self.sealing
        self._seal_published()
        with sealing.lock:
            sealing.unseal(runs, self._fetched)
            self._staging.write_prepared(runs, flags)
            full = sealing.filled(runs)
        if full:
            self._seal_soon(full)

    def allocate(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> None:
        """Reserve space for positions; see `Store.allocate`."""
        self.sealing.give_up(stop)
        self._staging.allocate(first, stop)

    def give_up(self, limits: NDArray[np.int64]) -> None:
        """Let rows be overwritten; see `Store.give_up`."""
        self._staging.give_up(limits)

    def gather(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out; see `Store.gather`.

        Of a field that varies they name the rows, whatever was stored there: in place
        of a reference comes one whose position is the row, for `take_values`.
        """
        if not self._varying:
            return self.stored(rows, paths)
        plain = [path for path in paths if path not in self._varying]
        result = self.stored(rows, plain) if plain else {}
        for path in paths:
            if path in self._varying:
                tokens = np.zeros(len(rows), REFERENCE)
                tokens["position"], tokens["length"] = rows, 1
                result[path] = tokens
        return {path: result[path] for path in paths if path in result}

    def stored(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out as they are stored, with references; see `Store.gather`."""
        range_ids, within = np.divmod(rows, self._range_rows)
        for _ in range(TRIES):
            numbers = self._states.take(range_ids)
            try:
                result = self._copied(rows, range_ids, numbers, within, paths)
            except (CorruptError, FailedError):
                # A shard that was removed is missing, or stale on a file server.
                if (self._states.take(range_ids) == numbers).all():
                    raise
                continue
            if (self._states.take(range_ids) == numbers).all():
                return result
        raise self._starved()

    def _starved(self) -> StarvedError:
        return StarvedError(
            f"{self.path}: shards changed {TRIES} times while rows were copied. Run "
            "mmreplay verify to look for damage."
        )

    def _fetched(self, rows: Ids, paths: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Ask the disk for rows, then copy them out as they are stored."""
        self.prefetch(rows, paths)
        return self.stored(rows, paths)

    def take_values(
        self,
        path: str,
        references: References,
        env_ids: Ids,
        heap_tails: Ids,
        heap_heads: Ids,
        buffer: NewBytes,
    ) -> ValuesRead:
        """Copy values of the rows out that `gather` named; see `Store.take_values`."""
        bounds = heap_tails[env_ids], heap_heads[env_ids]
        references, data, illegal = self.take_values_of(
            path, references["position"], *bounds, buffer
        )
        items = np.zeros(len(references) + 1, np.int64)
        np.cumsum(references["length"], out=items[1:])
        return references, data, items, illegal if illegal.any() else None

    def take_values_of(
        self, path: str, rows: Ids, heap_tails: Ids, heap_heads: Ids, buffer: NewBytes
    ) -> tuple[References, Bytes, NDArray[np.bool_]]:
        """Copy values that vary out, of rows in shards and others.

        Args:
            path: The field.
            rows: int64 ``[N]``.
            heap_tails: int64 ``[N]``, of each row's environment in one record.
            heap_heads: int64 ``[N]``, likewise.
            buffer: Returns memory of so many bytes.

        Returns:
            `REFERENCE` ``[N]``; uint8, the values one after another; and bool ``[N]``,
            the rows whose reference is illegal, or whose shard holds a value of another
            length: those have no value and a reference of zeros.

        Raises:
            MemoryError: There are more bytes of values than memory.
        """
        range_ids, within = np.divmod(rows, self._range_rows)
        for _ in range(TRIES):
            # After the record: a heap tail rises only when the numbers of the ranges
            # below it say that shards hold them. And before the references and values,
            # as well as after: as long as the number is even, no byte is overwritten.
            numbers = self._states.take(range_ids)
            try:
                taken = self._values_copied(
                    path, rows, (range_ids, numbers, within), heap_tails, heap_heads, buffer
                )
            except (CorruptError, FailedError):
                if (self._states.take(range_ids) == numbers).all():
                    raise
                continue
            if (self._states.take(range_ids) == numbers).all():
                return taken
        raise self._starved()

    def _values_copied(
        self,
        path: str,
        rows: Ids,
        ranges: tuple[Ids, Ids, Ids],
        heap_tails: Ids,
        heap_heads: Ids,
        buffer: NewBytes,
    ) -> tuple[References, Bytes, NDArray[np.bool_]]:
        heap, field, slots = self.heap, self.schema.fields[path], self.ring.slots
        assert heap is not None
        assert field.max_length is not None
        columns = self._copied(rows, *ranges, [path])
        references: References = columns[path]  # type: ignore[assignment]  # of a field that varies
        range_ids, numbers, within = ranges
        sealed = (numbers & 1) == 1
        fits = legal(references, field, heap.nbytes, heap_tails, heap_heads)
        # The heap may have given up the values of rows in shards.
        fits |= sealed & (references["length"] <= field.max_length)
        packed = np.flatnonzero(sealed)
        where = self._arrays[path], range_ids[packed], numbers[packed], within[packed]
        while True:
            references[~fits] = np.zeros((), REFERENCE)
            nbytes = nbytes_of(references, field)
            try:
                data = buffer(int(nbytes.sum()))
            except MemoryError:
                # References may be forged, and say more than their chunks hold.
                differs = self._reader.differing(*where, nbytes[packed])
                if not (differs & fits[packed]).any():
                    raise
            else:
                raw = np.flatnonzero(~sealed)
                begins = offsets(references[raw], rows[raw] // slots, heap.nbytes)
                if not len(packed):
                    heap.take(begins, nbytes, data)
                    return references, data, ~fits
                targets = np.cumsum(nbytes) - nbytes
                if len(raw):
                    some = np.empty(int(nbytes[raw].sum()), np.uint8)
                    heap.take(begins, nbytes[raw], some)
                    starts = np.cumsum(nbytes[raw]) - nbytes[raw]
                    _copies.copy_spans(some, starts, nbytes[raw], data, targets[raw], False)
                differs = self._reader.take_values(*where, nbytes[packed], targets[packed], data)
                if not (differs & fits[packed]).any():
                    return references, data, ~fits
            # Once more without these: values lie one after another.
            fits[packed] &= ~differs

    def _copied(
        self, rows: Ids, range_ids: Ids, numbers: Ids, within: Ids, paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        sealed = (numbers & 1) == 1
        if not sealed.any():
            staged = self._staging.gather(rows, paths)
            for path in self._varying.intersection(paths):
                # Of the packed rows, which are not to be changed.
                staged[path] = staged[path].copy()
            return staged
        fields = self.schema.fields
        others = [path for path in paths if path not in self._arrays]
        result = self._staging.gather(rows, [p for p in others if fields[p].nbytes])
        for path in others:
            if not fields[path].nbytes:
                empty = np.empty((len(rows), *fields[path].shape), fields[path].numpy)
                result[path] = empty
        raw = np.flatnonzero(~sealed)
        packed = np.flatnonzero(sealed)
        stored = [p for p in paths if p in self._arrays and p not in self._served]
        staged = self._staging.gather(rows[raw], stored) if len(raw) else {}
        for path in stored:
            array = self._array_of(path)
            out = self._buffers.empty((len(rows), *array.shape), array.dtype)
            into = out if not len(raw) else np.empty_like(out[: len(packed)])
            some = (array, range_ids[packed], numbers[packed], within[packed])
            self._reader.take(*some, into)
            varies = path in self._varying
            if len(raw):
                column = staged[path]
                if varies:
                    references = np.ascontiguousarray(column)
                    column = references.view(np.uint8).reshape(len(raw), -1)
                out[packed], out[raw] = into, column
            result[path] = out.view(REFERENCE).reshape(-1) if varies else out
        return {path: result[path] for path in paths if path in result}

    def _array_of(self, path: str) -> ShardedArray:
        """The array of what rows store of a field."""
        return self._arrays[references_of(path) if path in self._varying else path]

    def heap_references(self, rows: Ids, columns: Columns) -> Columns:
        """References of rows that are staged; see `Store.heap_references`.

        Of values in shards the chunks say how long they are.
        """
        stored = self.stored(rows, tuple(columns))
        sealed = self.sealed(rows)
        for references in stored.values():
            references[sealed] = np.zeros((), REFERENCE)
        return stored

    def sealed(self, rows: Ids) -> NDArray[np.bool_]:
        """Which rows are in shards now; see `Store.sealed`."""
        numbers = self._states.take(rows // self._range_rows)
        sealed: NDArray[np.bool_] = numbers & 1 == 1
        return sealed

    def file_with(self, path: str, row: int) -> str:
        """Name the file that holds a row's value; see `Store.file_with`."""
        range_id = row // self._range_rows
        if not self._states.get(range_id) & 1:
            return HEAP
        return f"the shard {self._reader.path_of(self._arrays[path], range_id)}"

    def map_field(self, path: str) -> None:
        """None: shards are compressed."""

    def begin_writing(
        self, commit: WritableCommitState, refuse_removed: Callable[[], object]
    ) -> None:
        """Seal by what is published; see `Store.begin_writing`."""
        self.sealing.give_up(commit.limits)
        self.sealing.refuse_removed = refuse_removed
        self.sealing.read_values_by(commit)

    def heap_space(self, commit: WritableCommitState) -> HeapSpace | None:
        """By the values that shards hold; see `Store.heap_space`."""
        return None if self.heap is None else SealedHeapSpace(self, self.heap, commit)

    def settle(self, first: Ids, stop: Ids, *, seal: bool = True) -> None:
        """Say in the group of a new buffer what is alive; see `Sealing.settle`."""
        self.sealing.settle(first, stop, seal=seal, fresh=True)
        self.sealing.raise_if_unsealed(COPIED)

    def settle_last(self, tails: Ids, heads: Ids, *, seal: bool) -> None:
        """The same before all is closed; see `Store.settle_last`.

        What could not be sealed is reported later, by `Sealing.raise_if_unsealed`.
        """
        oldest = np.maximum(tails, heads - self.ring.capacity)
        self.sealing.settle_last(oldest, heads, seal=seal)

    def prefetch(self, rows: NDArray[np.int64], paths: Sequence[str], now: bool = False) -> int:
        """Ask the disk for missing rows; see `Store.prefetch`."""
        range_ids, within = np.divmod(rows, self._range_rows)
        numbers = self._states.take(range_ids)
        sealed = (numbers & 1) == 1
        asked = 0
        if not sealed.all():
            asked = self._staging.prefetch(rows[~sealed], paths, now)
        if not sealed.any():
            return asked
        wanted = [p for p in paths if p in self._arrays and p not in self._served]
        wanted += [references_of(p) for p in self._varying.intersection(paths)]
        for path in wanted:
            # A shard may be retired between the look and this: then its rows
            # are read where they are, and waited for.
            with suppress(CorruptError):
                asked += self._reader.prefetch(
                    self._arrays[path], range_ids[sealed], numbers[sealed], within[sealed]
                )
        return asked

    @property
    def all_flags(self) -> NDArray[np.uint8]:
        """Flags of every row; see `Store.all_flags`."""
        return self._staging.all_flags

    def flags(self, rows: NDArray[np.int64], new: bool = False) -> NDArray[np.uint8]:
        """Flags of rows; see `Store.flags`."""
        return self._staging.flags(rows, new)

    def flags_between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
        """Flags of a span; see `Store.flags_between`."""
        return self._staging.flags_between(env_id, first, stop)

    def set(self, path: str, rows: NDArray[np.int64], values: NDArray[np.generic]) -> None:
        """Overwrite a mutable field's values, which no shard holds; see `Store.set`."""
        self._staging.set(path, rows, values)

    def checksum(self, env_id: int, block: int) -> int:
        """CRC32C of a block; see `CheckedStore.checksum`."""
        ring = self.ring
        size = ring.block_rows
        (row, step, count), *_ = ring.split_at_wrap(env_id, block * size, (block + 1) * size)
        rows = np.arange(row, row + step * count, step)
        return checksum(self, self.stored, block * size, rows)

    def write_sums(self, env_id: int, first: int, sums: NDArray[np.uint32]) -> None:
        """Store checksums; see `CheckedStore.write_sums`."""
        self._staging.write_sums(env_id, first, sums)

    def read_sum(self, env_id: int, block: int) -> tuple[int, int]:
        """Return a block's stored (checksum, lap)."""
        return self._staging.read_sum(env_id, block)

    def sync(self) -> None:
        """Make every row survive a power cut; see `Store.sync`.

        Raises:
            ShardError: A shard could not be written before; its rows stay in the
                staging files.
            FailedError: It cannot.
        """
        self._staging.sync()
        self._states.file.sync()
        self.sealing.check()

    def sync_sums(self) -> None:
        """Make the checksums survive a power cut."""
        self._staging.sync_sums()

    @property
    def files(self) -> list[File]:
        """The staging files; see `Store.files`."""
        return self._staging.files

    def shard_paths(self) -> list[Path]:
        """Paths of the shards; see `Store.shard_paths`."""
        return group.shards_in(self.path)

    def disk_nbytes(self) -> tuple[int, int]:
        """Return (apparent, allocated) bytes."""
        apparent, allocated = self._staging.disk_nbytes()
        for path in self.shard_paths():
            # The writer removes shards while others look.
            with suppress(FileNotFoundError):
                status = path.lstat()
                # A link is no shard, and leads anywhere.
                if stat.S_ISREG(status.st_mode):
                    apparent += status.st_size
                    allocated += status.st_blocks * 512
        return apparent, allocated

    def unmap(self) -> None:
        """Let the mappings go; see `Store.unmap`."""
        self._staging.unmap()
        self.heap = self._staging.heap
        self._reader.forget()
        self._states.unmap()

    def close(self) -> None:
        """Seal what is due, end the thread, and give files back."""
        try:
            self.sealing.stop()
        finally:
            self._staging.close()
            self._states.file.close()


def _count(metadata: Metadata) -> int:
    """Shard ranges of a ring."""
    ring, sharding = metadata.ring, metadata.sharding
    assert sharding is not None
    return ring.num_rows // (sharding.shard_rows * ring.wide)
