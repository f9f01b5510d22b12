"""The heap of a store: bytes of values that vary, and when they may be overwritten.

`FileHeap` stores values in heap.bin and copies them out, `MemoryHeap` does in RAM.
`HeapSpace` knows how far a heap may be written, and which rows must be given up to
write on: values of one environment rise with its rows, so those are always its oldest.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.disk.files import File
from mmreplay.format.heap import MAX_HEAD, Array, References
from mmreplay.format.metadata import heap_reserve_nbytes
from mmreplay.ring import Ring
from mmreplay.schema import Schema
from mmreplay.storage.commit_state import WritableCommitState, heap_bounds
from mmreplay.storage.read_ahead import Pages
from mmreplay.storage.write_path import SHORT_NBYTES, MappedWriter

if TYPE_CHECKING:
    from mmreplay.storage.store import Advise


_copies = kernels.load("copies")

HALF_PAGE = mmap.PAGESIZE // 2
"""Of missing pages the disk is asked as if values were rows of so many bytes: shorter
than a page, as most values are."""
LONG_NBYTES = 1 << 20
"""Other threads run while so many bytes are copied."""
NEW_PAGES_NBYTES = 64 << 10
"""The kernel allocates new pages as large as the write, and those of a heap are written
again in every lap: 680 KB take 45 us over these, and 60 over chunks of 16 KiB. Freed
memory returns to a virtual machine's host in chunks of 128 KiB; smaller ones stay with
the kernel."""
SCANNED_ROWS = 4096
"""Rows whose references are looked at together, for where their values begin."""


class Heap(Protocol):
    """Values of all environments.

    Attributes:
        nbytes: Bytes of each environment's heap.
    """

    nbytes: int

    def write(self, env_id: int, position: int, data: memoryview) -> None:
        """Store bytes that do not cross the ring's end.

        Args:
            env_id: The environment.
            position: Heap position of the first byte.
            data: Contiguous bytes.

        Raises:
            FullError: No space is left; nothing that may be read was changed.
            FailedError: The device refuses; likewise.
        """

    def take(self, offsets: Array, nbytes: Array, out: NDArray[np.uint8]) -> None:
        """Copy values out, one after another.

        Args:
            offsets: int64 ``[N]``, their first bytes in the whole heap.
            nbytes: int64 ``[N]``, their bytes, all inside of it.
            out: uint8, as many as they are together.
        """

    def window(self) -> tuple[mmap.mmap, int, int] | None:
        """Return the file's mapping, and which bytes may be stored into now.

        Those of pages that were made ready, for the values to come; None where there
        are none.
        """


class FileHeap:
    """In heap.bin; see `Heap`."""

    def __init__(self, file: File, num_envs: int, *, maps: bool, advise: Advise) -> None:
        """Use an open file.

        Args:
            file: heap.bin.
            num_envs: Environments that share it.
            maps: Values are copied out of a mapping, else read.
            advise: Whether the disk is asked for them; see `ReadPolicy`.
        """
        self._file = file
        self.nbytes = file.nbytes // num_envs
        self._mapping: mmap.mmap | None = None
        self._bytes: NDArray[np.uint8] | None = None
        if maps:
            self._mapping = file.map_readonly()
            if advise != "kernel":
                # The kernel's own read-ahead reads 128 KiB for every missing value.
                self._mapping.madvise(mmap.MADV_RANDOM)
            self._bytes = np.frombuffer(self._mapping, np.uint8)
        self._pages = Pages(file, HALF_PAGE, advise, self._mapping)
        self._writer = MappedWriter(file, new_pages_nbytes=NEW_PAGES_NBYTES)
        if num_envs > 1:
            # Values to come do not follow: those of other environments lie between.
            self._writer.only_write()

    def write(self, env_id: int, position: int, data: memoryview) -> None:
        """See `Heap.write`."""
        offset = env_id * self.nbytes + position % self.nbytes
        if len(data) <= SHORT_NBYTES:
            self._writer.put(data, offset, len(data))
        else:
            self._writer.write(data, offset)

    def take(self, offsets: Array, nbytes: Array, out: NDArray[np.uint8]) -> None:
        """See `Heap.take`."""
        pages, mapped = self._pages, self._bytes
        # Of values in memory a look at the first bytes of a few is enough.
        missing = not pages.warm() and pages.wanted(offsets // HALF_PAGE)
        if mapped is None or missing:
            if self._read(offsets, nbytes, out, missing):
                return
            # A mapping outlives its file, which another thread closed; any other
            # failure is raised by the read that fails.
            if mapped is None or self._file.fd >= 0:
                self._read_each(offsets, nbytes, out)
                return
        waits = out.nbytes >= LONG_NBYTES
        _copies.copy_spans(mapped, offsets, nbytes, out, None, waits)

    def _read_each(self, offsets: Array, nbytes: Array, out: NDArray[np.uint8]) -> None:
        """Read values one by one, where they were not all to be had at once.

        Raises:
            CorruptError: The file ends before.
            FailedError: The device refuses, or another thread closed the file.
        """
        stops = np.cumsum(nbytes).tolist()
        for offset, size, stop in zip(offsets.tolist(), nbytes.tolist(), stops, strict=True):
            self._file.pread_into(out[stop - size : stop].data, offset)

    def _read(self, offsets: Array, nbytes: Array, out: NDArray[np.uint8], missing: bool) -> bool:
        """Read values in the order of the file, while other threads run Python.

        Of missing pages the disk is asked for all at once, in a thread beside the
        reads: to look at each through the mapping would be a fault for each page, and
        wait for them in the order of the batch.

        Returns:
            Whether all were read.
        """
        fd = self._file.fd
        done: bool = _copies.read_spans(fd, offsets, nbytes, out, missing)
        # A number that another thread gave back may be another file's by now.
        return done and self._file.fd == fd

    def unmap(self) -> None:
        """Let the mappings go; a value that is being copied is copied to its end."""
        self._writer.unmap()
        mapping, self._mapping, self._bytes = self._mapping, None, None
        if mapping is not None:
            with suppress(BufferError):
                mapping.close()

    def window(self) -> tuple[mmap.mmap, int, int] | None:
        """See `Heap.window`."""
        writer = self._writer
        if writer.mapping is None or monotonic() >= writer.until:
            return None
        return writer.mapping, writer.near, writer.far


class MemoryHeap:
    """In RAM; see `Heap`."""

    def __init__(self, num_envs: int, nbytes: int) -> None:
        """Begin with zeros, whose pages take memory when first written."""
        self.nbytes = nbytes
        try:
            self._bytes = np.zeros(num_envs * nbytes, np.uint8)
        except MemoryError as error:
            heaps = "a heap" if num_envs == 1 else f"{num_envs} heaps"
            raise MemoryError(
                f"heap_bytes: {heaps} of {nbytes:,} bytes cannot be had of the memory. Pass less."
            ) from error

    def write(self, env_id: int, position: int, data: memoryview) -> None:
        """See `Heap.write`."""
        offset = env_id * self.nbytes + position % self.nbytes
        self._bytes[offset : offset + len(data)] = data

    def take(self, offsets: Array, nbytes: Array, out: NDArray[np.uint8]) -> None:
        """See `Heap.take`."""
        waits = out.nbytes >= LONG_NBYTES
        _copies.copy_spans(self._bytes, offsets, nbytes, out, None, waits)

    def window(self) -> None:
        """None: nothing is mapped."""


class HeapRows(Protocol):
    """Rows with references; see `Store`."""

    ring: Ring
    schema: Schema

    def stored(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out as they are stored."""


class HeapSpace:
    """How far the heap of each environment may be written.

    A byte may be written where both the last synced durable record and the last
    published one say that it is read no more: a power cut leaves the former, a kill and
    readers see the latter.

    Attributes:
        ends_rows: A row ends when its values are overwritten.
    """

    ends_rows = True

    def __init__(self, store: HeapRows, heap: Heap, commit_state: WritableCommitState) -> None:
        """Look at one store.

        Args:
            store: Its rows, with the references.
            heap: Their values.
            commit_state: What is published and, on a disk, durable.
        """
        self._store, self._commit_state = store, commit_state
        self.nbytes = heap.nbytes
        self.reserve = heap_reserve_nbytes(store.schema, heap.nbytes)
        self._paths = store.schema.varying

    @property
    def free_until(self) -> Array:
        """int64 ``[E]``: heap positions below may be written."""
        heap_tails, durable = self._commit_state.heap_tails, self._commit_state.committed.heap_tails
        assert heap_tails is not None
        assert durable is not None
        free_until: Array = np.minimum(np.minimum(heap_tails, durable) + self.nbytes, MAX_HEAD)
        return free_until

    @property
    def ahead(self) -> Array:
        """int64 ``[E]``, heap heads a reserve ahead, for which a raise makes room."""
        heap_heads, _ = heap_bounds(self._commit_state)
        return heap_heads + self.reserve

    @property
    def raise_due(self) -> bool:
        """Whether half of the reserve that durable tails leave is used somewhere."""
        _, durable = heap_bounds(self._commit_state.committed)
        used = self.ahead - self.reserve // 2 > durable + self.nbytes
        return bool(used.any())

    @property
    def commit_due(self) -> bool:
        """Whether half of the heap is not committed somewhere.

        A power cut leaves the values below the committed heap heads that were not
        overwritten since: none, where a whole heap was written since.
        """
        heap_heads, _ = heap_bounds(self._commit_state)
        durable, _ = heap_bounds(self._commit_state.committed)
        return bool((heap_heads - durable > self.nbytes // 2).any())

    def raised(
        self, wanted: Array, limits: Array, highest: Array | None = None
    ) -> tuple[Array, Array]:
        """Tails with which the heap may be written so far; published ones at least.

        Args:
            wanted: int64 ``[E]``, heap heads to be reached.
            limits: int64 ``[E]``: no row above them less the slots is overwritten
                while this looks at rows.
            highest: int64 ``[E]``, rows from these on must stay, whatever is wanted;
                by default none must.

        Returns:
            Two int64 ``[E]``, tails and heap tails.
        """
        state, slots = self._commit_state, self._store.ring.slots
        # Of one publication: heap heads that are newer than the heads would give up
        # values of rows that are not looked at.
        heads, tails, heap_heads = state.published
        assert heap_heads is not None
        (_, heap_tails), durable = heap_bounds(state), state.committed
        tails = np.maximum(tails, durable.tails)
        heap_tails = np.maximum(heap_tails, heap_bounds(durable)[1])
        targets = wanted - self.nbytes
        short = np.flatnonzero(heap_tails < targets)
        if len(short):
            tails, heap_tails = tails.copy(), heap_tails.copy()
        for env_id in short.tolist():
            head = int(heads[env_id])
            first = max(int(tails[env_id]), int(limits[env_id]) - slots)
            target = int(targets[env_id])
            if highest is not None:
                # Values of one environment rise with its rows.
                stay = min(max(first, int(highest[env_id])), head)
                begin = self._first_begin(env_id, stay, head)
                target = target if begin is None else min(target, begin)
            tail, begin = self._first_row(env_id, min(first, head), head, target)
            tails[env_id] = max(tails[env_id], tail)
            begin = int(heap_heads[env_id]) if begin is None else begin
            heap_tails[env_id] = max(heap_tails[env_id], begin)
        return tails, heap_tails

    def await_shards(self, needed: Array, commit: Callable[[], object] | None) -> None:
        """Wait until values lie elsewhere too, so that the heap may be written so far.

        Nothing is waited for where rows end with their values.

        Args:
            needed: int64 ``[E]``, heap heads to be reached.
            commit: Makes what is published durable; None where nothing is.

        Raises:
            FullError: No space is left for what must be written.
            FailedError: The device refuses, or memory or threads are short.
        """

    def _first_row(self, env_id: int, first: int, head: int, target: int) -> tuple[int, int | None]:
        """The oldest row to stay if the heap is given up below a position.

        Returns:
            The row, and where the first value from it on begins; None if there is none.
        """
        tail = first
        for at in range(first, head, SCANNED_ROWS):
            stop = min(at + SCANNED_ROWS, head)
            begins = self._begins(env_id, at, stop)
            with_values = np.flatnonzero(begins >= 0)
            later = with_values[begins[with_values] >= target]
            if len(later):
                # Rows before it without a value stay with it.
                given_up = with_values[begins[with_values] < target]
                if len(given_up):
                    tail = at + int(given_up[-1]) + 1
                return tail, int(begins[later[0]])
            if len(with_values):
                tail = at + int(with_values[-1]) + 1
        return tail, None

    def _first_begin(self, env_id: int, first: int, head: int) -> int | None:
        """Where the first value of rows ``[first, head)`` begins, if there is any."""
        for at in range(first, head, SCANNED_ROWS):
            begins = self._begins(env_id, at, min(at + SCANNED_ROWS, head))
            with_values = begins[begins >= 0]
            if len(with_values):
                return int(with_values[0])
        return None

    def _begins(self, env_id: int, first: int, stop: int) -> Array:
        """Where the values of rows begin, int64 ``[N]``; -1 for rows without any."""
        positions = np.arange(first, stop)
        rows = self._store.ring.rows(np.full(len(positions), env_id), positions)
        columns = self._store.stored(rows, self._paths)
        begins = np.full(len(positions), -1)
        heap_heads, _ = heap_bounds(self._commit_state)
        for path in reversed(self._paths):
            # The first field with a value begins first.
            references: References = columns[path]  # type: ignore[assignment]  # of the record
            # One beyond what was written is damage: it would raise heap tails to there.
            there = references["length"] > 0
            there &= references["position"] < heap_heads[env_id]
            begins[there] = references["position"][there]
        return begins
