"""The protocol of every engine: rows in, rows out, by row number.

An engine knows rows, not positions or episodes; the commit state knows heads, not data;
the buffer brings both together. `ReadPolicy` says how rows are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, get_args

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.arguments import flag, one_of
from mmreplay.disk.files import NETWORK, File, file_system
from mmreplay.errors import FailedError
from mmreplay.format.heap import References, legal
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Ring, Run
from mmreplay.schema import Schema
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.heap import Heap, HeapSpace
from mmreplay.storage.layout import HEAP, RecordLayout

if TYPE_CHECKING:
    from mmreplay.storage.commit_state import WritableCommitState
    from mmreplay.storage.gather import Records
    from mmreplay.storage.write_path import StepWriters
    from mmreplay.storage.zarr.sealing import Sealing

_copies = kernels.load("copies")

ReadMode = Literal["auto", "mmap", "pread"]
Advise = Literal["auto", "always", "never", "kernel"]


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """What a user says of reading.

    Attributes:
        read_mode: ``"mmap"`` copies rows out of a mapping; ``"pread"`` reads them,
            which a network file system answers with what is there now and with an
            error where a mapping would kill the process; ``"auto"`` is pread on those
            and mmap elsewhere.
        advise: ``"auto"`` asks the disk for a batch's rows at once where a sample of
            their pages is missing; ``"always"`` without looking; ``"never"`` not at
            all; ``"kernel"`` neither, and leaves the kernel its own read-ahead of 128
            KiB around each row, which scans like and random rows do not.
        check_values: Values that vary are compared with their checksums at each read.
    """

    read_mode: ReadMode = "auto"
    advise: Advise = "auto"
    check_values: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name, kinds in (("read_mode", ReadMode), ("advise", Advise)):
            one_of(name, getattr(self, name), get_args(kinds))
        flag("check_values", self.check_values)

    def maps(self, folder: Path) -> bool:
        """Whether files of a folder are mapped."""
        if self.read_mode == "auto":
            return file_system(folder) not in NETWORK
        return self.read_mode == "mmap"


Columns = Mapping[str, NDArray[np.generic]]
NewBytes = Callable[[int], NDArray[np.uint8]]
"""Returns memory of so many bytes."""
ValuesRead = tuple[References, NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_] | None]
"""What `Store.take_values` returns."""


def flags_between(
    flags: NDArray[np.uint8], ring: Ring, env_id: int, first: int, stop: int
) -> NDArray[np.uint8]:
    """Copy flags of a span out of those of all rows; see `Store.flags_between`."""
    spans = [
        flags[row : row + step * count : step]
        for row, step, count in ring.split_at_wrap(env_id, first, stop)
    ]
    return np.concatenate(spans) if spans else np.empty(0, np.uint8)


def rounded_up(limits: NDArray[np.int64], limit_step: int) -> NDArray[np.int64]:
    """Limits rounded up to multiples of a store's limit_step, int64 ``[E]``."""
    return limits if limit_step == 1 else -(-limits // limit_step) * limit_step


class ShardError(FailedError):
    """Sealing failed; every row survives a power cut all the same."""


class Store(Protocol):
    """Rows of one generation of a buffer's files.

    Durability: what `write` and `set` stored may be lost, or half there, after a
    power cut, until `sync` returns; a killed process loses nothing of it. Order:
    a sync covers every write before it. Threads: one may write while others read;
    a reader may see part of a row that is being overwritten, and must find out
    from the published limit whether that can have happened.
    """

    ring: Ring
    schema: Schema
    packed: frozenset[str]
    """Paths whose values lie together, so that to read one is to read all."""
    limit_step: int
    """Rows of an environment to overwrite at once: limits are multiples of it."""

    @property
    def heap(self) -> Heap | None:
        """The values that vary; None where no field does. Rows have the references."""

    @property
    def placement(self) -> RecordLayout | None:
        """Where `files` have each row; None where they do not have all rows as such."""

    @property
    def sealing(self) -> Sealing | None:
        """What moves rows to shards and back; None where they stay where they are.

        Its shards take the values that vary from the heap, which bounds no row's life.
        """

    @property
    def records(self) -> Records | None:
        """Records of all rows, of the fields that lie together; None unless mapped."""

    @property
    def all_flags(self) -> NDArray[np.uint8]:
        """uint8 ``[num_rows]``, flags of every row, as they are and will be.

        Where they are read, not mapped: of those that `flags_between` gave, or `flags`
        as new.
        """

    def write(self, runs: Sequence[Run], columns: Columns, flags: NDArray[np.uint8]) -> None:
        """Write a batch of rows; nothing is visible until the heads are published.

        Args:
            runs: Which items of the batch go to which consecutive rows.
            columns: Per path ``[N, *shape]``, of the field's own dtype; the first axis
                may be two, such as steps and environments.
            flags: uint8 ``[N]``.

        Raises:
            FullError: No space is left; some of the rows may be written.
            FailedError: The device refuses; likewise.
        """

    @property
    def ends(self) -> NDArray[np.uint8]:
        """uint8 ``[E]``, TERMINATED and TRUNCATED bits of the step prepared last."""

    def prepare(self, data: Mapping[str, object]) -> int:
        """Check and pack one step of all environments, if it needs no conversion.

        What is packed, and references to large values, stay until `write_prepared`.

        Args:
            data: A nested or flat mapping of values that were not checked.

        Returns:
            The bits TERMINATED and TRUNCATED that it says of some environment, or -1:
            it must be checked and cast first.
        """

    def write_prepared(self, runs: Sequence[Run], flags: NDArray[np.uint8]) -> None:
        """Write the step that `prepare` checked last, as `write` would.

        Args:
            runs: Which environments go to which consecutive rows.
            flags: uint8 ``[E]``.
        """

    def allocate(self, first: NDArray[np.int64], stop: NDArray[np.int64]) -> None:
        """Reserve space for each environment's positions ``[first, stop)``.

        Space that holds rows stays as it is, so a repeated call changes nothing. Rows a
        lap before stop and earlier are gone for good: no reader will ask for them, nor
        will the next open after a power cut.

        Args:
            first: int64 ``[E]``.
            stop: int64 ``[E]``; at most a ring's slots after first.
        """

    def give_up(self, limits: NDArray[np.int64]) -> None:
        """Note that readers know which rows may be overwritten, at any time from now.

        Args:
            limits: int64 ``[E]``, published: those of positions below, of this lap.
        """

    def gather(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out.

        Args:
            rows: int64 ``[B]``, in ``[0, num_rows)``; checked by the caller.
            paths: Fields to read.

        Returns:
            Per path ``[B, *shape]``; small fields are views of one packed array.
        """

    def stored(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out as they are stored, with references of values that vary.

        `gather` may return anything in place of those that `take_values` understands.
        """

    def take_values(
        self,
        path: str,
        references: References,
        env_ids: NDArray[np.int64],
        heap_tails: NDArray[np.int64],
        heap_heads: NDArray[np.int64],
        buffer: NewBytes,
    ) -> ValuesRead:
        """Copy values that vary out.

        Args:
            path: The field.
            references: `REFERENCE` ``[N]``, as `gather` returned them.
            env_ids: int64 ``[N]``, their environments.
            heap_tails: int64 ``[E]``, of one record.
            heap_heads: int64 ``[E]``, likewise.
            buffer: Returns memory of so many bytes.

        Returns:
            The references that rows store; uint8, their values one after another; int64
            ``[N + 1]``, the items before each value and those of all; and bool ``[N]``,
            which references are illegal, or None if none is. Those have no value and a
            reference of zeros.
        """

    def heap_references(self, rows: NDArray[np.int64], columns: Columns) -> Columns:
        """References of values that lie in the heap; zeros of those that do not.

        Args:
            rows: int64 ``[N]``.
            columns: Per path of fields that vary, what `gather` returned of them.
        """

    def sealed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows lie in shards now, values and all, bool of their shape."""

    def file_with(self, path: str, row: int) -> str:
        """Name the file that holds a row's value of a field that varies."""

    def map_field(self, path: str) -> NDArray[Any] | None:
        """Map a field of all rows; what is written there does not reach the file.

        Returns:
            ``[slots, num_envs, *shape]``; None where no file holds it as it is.
        """

    def prefetch(self, rows: NDArray[np.int64], paths: Sequence[str], now: bool = False) -> int:
        """Ask the disk for rows ahead of a gather where pages are missing.

        Args:
            rows: int64 ``[B]``.
            paths: Of the fields.
            now: The gather comes next; what it reads it asks for then.

        Returns:
            Bytes asked for; 0 where all seem to be in memory.
        """

    def flags(self, rows: NDArray[np.int64], new: bool = False) -> NDArray[np.uint8]:
        """Flags of rows, uint8 of the shape of rows.

        Args:
            rows: int64, of any shape.
            new: `all_flags` has them from here on, as after `flags_between`.
        """

    def flags_between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
        """Flags of positions ``[first, stop)`` of one environment."""

    def set(self, path: str, rows: NDArray[np.int64], values: NDArray[np.generic]) -> None:
        """Overwrite a mutable field's values in rows."""

    def begin_writing(
        self, commit: WritableCommitState, refuse_removed: Callable[[], object]
    ) -> None:
        """Learn, before the first write of a writer, what it publishes.

        Args:
            commit: What is published.
            refuse_removed: Called before files are read or changed by their path;
                raises `RemovedError` where it leads to another buffer.
        """

    def heap_space(self, commit: WritableCommitState) -> HeapSpace | None:
        """How far the heap may be written; None where no field varies.

        Args:
            commit: What is published.
        """

    def settle(
        self, first: NDArray[np.int64], stop: NDArray[np.int64], *, seal: bool = True
    ) -> None:
        """Note in a new buffer which rows are alive, for programs that read its files.

        Args:
            first: int64 ``[E]``, oldest positions.
            stop: int64 ``[E]``, the next positions.
            seal: Move the rows alive to where they stay.

        Raises:
            FullError: No space is left for that.
            FailedError: Files or memory were short.
        """

    def settle_last(
        self, tails: NDArray[np.int64], heads: NDArray[np.int64], *, seal: bool
    ) -> None:
        """The same before all is committed and closed, which a failure never keeps.

        Args:
            tails: int64 ``[E]``; a row that the capacity does not hold may be above.
            heads: int64 ``[E]``.
            seal: See `settle`.
        """

    def sync(self) -> None:
        """Make every row written so far survive a power cut.

        Raises:
            ShardError: They do; sealing some of them failed.
            FailedError: The device refuses.
        """

    @property
    def files(self) -> list[File]:
        """Open files that hold the rows; none in RAM."""

    def shard_paths(self) -> list[Path]:
        """Paths of the other files that hold rows now, which are not kept open."""

    def disk_nbytes(self) -> tuple[int, int]:
        """Return (apparent, allocated) bytes."""

    def unmap(self) -> None:
        """Let mapped memory go after `close`; reading is refused from then on.

        What is being copied out at the moment is copied to its end.
        """

    def close(self) -> None:
        """Give files and mappings back."""


class UnsealedStore:
    """A base of stores whose rows and values stay where they were written.

    It answers what only shards answer otherwise.
    """

    ring: Ring
    schema: Schema
    heap: Heap | None
    placement: RecordLayout | None = None
    sealing = None

    @property
    def all_flags(self) -> NDArray[np.uint8]:
        """Flags of every row; see `Store.all_flags`."""
        raise NotImplementedError

    def gather(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out; see `Store.gather`."""
        raise NotImplementedError

    def stored(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out as they are stored: as `gather` does."""
        return self.gather(rows, paths)

    def heap_references(self, rows: NDArray[np.int64], columns: Columns) -> Columns:
        """Those that `gather` returned; see `Store.heap_references`."""
        return columns

    @cached_property
    def _lengths(self) -> dict[str, tuple[int, int]]:
        """Of each field that varies: its `max_length`, and bytes of an item.

        Found once: to find them took a tenth of a draw.
        """
        fields = self.schema.fields
        lengths = ((path, fields[path].max_length) for path in self.schema.varying)
        return {path: (length or 0, fields[path].inner_nbytes) for path, length in lengths}

    def take_values(
        self,
        path: str,
        references: References,
        env_ids: NDArray[np.int64],
        heap_tails: NDArray[np.int64],
        heap_heads: NDArray[np.int64],
        buffer: NewBytes,
    ) -> ValuesRead:
        """Copy values out of the heap; see `Store.take_values`."""
        heap, count = self.heap, len(references)
        assert heap is not None
        max_length, item_nbytes = self._lengths[path]
        begins, nbytes = np.empty(count, np.int64), np.empty(count, np.int64)
        offsets, illegal = np.empty(count + 1, np.int64), None
        found = begins, nbytes, offsets
        bounds = heap_tails, heap_heads, heap.nbytes, max_length, item_nbytes
        # Checked before the heap is touched: it may lead anywhere.
        if _copies.find_values(references, env_ids, *bounds, *found):
            illegal = ~legal(
                references,
                self.schema.fields[path],
                heap.nbytes,
                heap_tails[env_ids],
                heap_heads[env_ids],
            )
            references = np.where(illegal, np.zeros((), REFERENCE), references)
        data = buffer(offsets.item(count) * item_nbytes)
        heap.take(begins, nbytes, data)
        return references, data, offsets, illegal

    def flags_between(self, env_id: int, first: int, stop: int) -> NDArray[np.uint8]:
        """Flags of a span; see `Store.flags_between`."""
        return flags_between(self.all_flags, self.ring, env_id, first, stop)

    def sealed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """No row; see `Store.sealed`."""
        return np.zeros(rows.shape, np.bool_)

    def file_with(self, path: str, row: int) -> str:
        """heap.bin; see `Store.file_with`."""
        return HEAP

    def shard_paths(self) -> list[Path]:
        """None; see `Store.shard_paths`."""
        return []

    def map_field(self, path: str) -> NDArray[Any] | None:
        """None; see `Store.map_field`."""
        return None

    def begin_writing(
        self, commit: WritableCommitState, refuse_removed: Callable[[], object]
    ) -> None:
        """Do nothing: no file is opened by its path later."""

    def heap_space(self, commit: WritableCommitState) -> HeapSpace | None:
        """By the rows whose values the heap has; see `Store.heap_space`."""
        return None if self.heap is None else HeapSpace(self, self.heap, commit)

    def settle(
        self, first: NDArray[np.int64], stop: NDArray[np.int64], *, seal: bool = True
    ) -> None:
        """Do nothing: rows stay where they are."""

    def settle_last(
        self, tails: NDArray[np.int64], heads: NDArray[np.int64], *, seal: bool
    ) -> None:
        """Do nothing: rows stay where they are."""


class CheckedStore(Store, Protocol):
    """A store on a disk, which can be damaged: checksums of blocks of rows."""

    def checksum(self, env_id: int, block: int) -> int:
        """CRC32C of one block, block numbered over all laps."""

    def write_sums(self, env_id: int, first: int, sums: NDArray[np.uint32]) -> None:
        """Store the checksums of blocks from first on, with their laps."""

    def read_sum(self, env_id: int, block: int) -> tuple[int, int]:
        """Return the stored (checksum, lap) of a block's entry."""

    def sync_sums(self) -> None:
        """Make the checksums survive a power cut."""


class DiskStore(CheckedStore, Protocol):
    """A store that makes and opens its files: an entry of `storage.engines`."""

    @classmethod
    def create(cls, folder: Path, metadata: Metadata) -> Self:
        """Create the files of a new generation.

        Args:
            folder: The generation's, which exists.
            metadata: What the generation will be.
        """

    @classmethod
    def open(cls, folder: Path, metadata: Metadata, *, writable: bool, policy: ReadPolicy) -> Self:
        """Open the files of a generation, after checking type and size of each.

        Args:
            folder: The generation's.
            metadata: What the generation is.
            writable: Open them for writing, too.
            policy: How rows are read.
        """

    @property
    def step_writers(self) -> StepWriters | None:
        """What stores a step by one call; None where it is no single record."""
