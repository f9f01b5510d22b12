"""Copies rows out of files, through a mapping or by reading, into reused arrays.

`MappedRows` and `ReadRows` copy rows of one file, `Records` copies steps with their
flags, or rows as columns. `BufferPool` hands out the arrays of batches, and hands them
out again once no batch refers to them. A batch of new memory costs a page fault for
every 4 KiB and the zeroing of it: for large rows as much as the copy itself.
"""

from __future__ import annotations

import errno
import mmap
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, NoReturn, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.disk.files import File
from mmreplay.errors import system_failure
from mmreplay.ring import Ring, runs
from mmreplay.storage import read_ahead
from mmreplay.storage.layout import RecordLayout
from mmreplay.storage.read_ahead import SMALL_ROW_NBYTES, Pages
from mmreplay.storage.store import Advise

Array = NDArray[np.generic]
_copies = kernels.load("copies")

PAST_NBYTES = 1 << 20
"""Batches of large rows from here on are copied past the caches where that is sooner: a
fifth on one processor, and later by as much on another whose caches hold them."""
TRIES = 4
"""Of either way to copy, the best of which counts. Steps and those after are copied in
turns, and the latter are partly in the caches by then: either way is tried on both."""
EVERY = 512
"""Batches after which both are tried again: a virtual machine's host changes, too."""
READ_NBYTES = 1 << 20
"""Read at once of rows that lie together. Between two reads who adds or draws has the
lock of Python, for 5 ms each time."""


class RowReader(Protocol):
    """Rows of one file.

    Attributes:
        dtype: Of a row's values.
        shape: Of one row.
        pages: Asks the disk for rows ahead.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    pages: Pages

    def take(self, rows: NDArray[np.int64], out: Array) -> Array:
        """Copy rows into ``out``, ``[B, *shape]`` and contiguous; return it."""

    def iter_bytes(self, row: int, step: int, count: int) -> Iterator[bytes | memoryview]:
        """Bytes of count rows from one on, every step-th, in several buffers.

        Each is good until the next. Large ones are read: of rows that are no longer in
        memory a mapping fetches a page at a time, and who looks has the lock of Python
        meanwhile, which took adds and draws beyond memory to a fifth of their rates.
        """


class CopyTuner:
    """Whether to copy past the caches, found by trying both.

    Threads: any may ask; a try that gets lost is made again in the next round.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._calls = 0
        self._best = {True: inf, False: inf}

    def past(self) -> bool:
        """Whether the next batch goes past them."""
        call = self._calls
        self._calls = (call + 1) % EVERY
        # Forgotten now and then: a virtual machine may move to another host.
        if call == 0:
            self._best = {True: inf, False: inf}
        # In the order A B B A: batches of steps and of those after alternate, and each
        # way is tried on both.
        if call < 2 * TRIES:
            return call % 4 in (0, 3)
        return self._best[True] <= self._best[False]

    def note(self, past: bool, seconds: float) -> None:
        """Take note of what a byte of a batch took."""
        # The least of them: what delays a copy, such as another process, only adds.
        self._best[past] = min(self._best[past], seconds)


class MappedRows:
    """Rows through a read-only mapping.

    Attributes:
        mapping: The mapping.
        array: All rows, ``[num_rows, *shape]``.
    """

    def __init__(
        self, file: File, dtype: np.dtype[np.generic], shape: tuple[int, ...], advise: Advise
    ) -> None:
        """Map the file; see `RowReader`."""
        self.dtype, self.shape = dtype, shape
        self.mapping = file.map_readonly()
        if advise != "kernel":
            # The kernel's own read-ahead reads 128 KiB for every missing row.
            self.mapping.madvise(mmap.MADV_RANDOM)
        self._file = file
        # A view keeps the mapping alive: a thread that copies while another closes the
        # buffer ends its copy, and a mapping taken away under it would be a SIGSEGV.
        flat: Array = np.frombuffer(self.mapping, dtype)
        self.array = flat.reshape(-1, *shape)
        self._nbytes = _row_nbytes(dtype, shape)
        self.pages = Pages(file, self._nbytes, advise, self.mapping)
        self._tuner = CopyTuner()

    def take(self, rows: NDArray[np.int64], out: Array) -> Array:
        """See `RowReader.take`."""
        # Pages were missing lately and the batch is large: read it. A fault for each
        # page, one after the other, took 9 ms for what the disk reads in 9 by itself.
        if self.pages.reads(len(rows)):
            if _read_rows(self._file, self._nbytes, rows, out, ask=True):
                return out
            # A mapping outlives its file, which another thread closed; any other
            # failure is raised.
            if self._file.fd >= 0:
                return _read_each(self._file, self._nbytes, rows, out)
        if out.nbytes < PAST_NBYTES or self._nbytes < SMALL_ROW_NBYTES:
            return self._copy(rows, out)
        # Past the caches 7 MB take 0.9 ms, after 1.26, and the next read of them is no
        # slower; on a host whose caches hold four such batches that way was a fifth
        # slower. So both are timed, and the faster one is used.
        past, began = self._tuner.past(), perf_counter()
        if past:
            wanted = np.ascontiguousarray(rows)
            # After a close no array of numpy, which says so.
            _copies.copy_rows(self.array.view(), self._nbytes, wanted, out)
        else:
            self._copy(rows, out)
        self._tuner.note(past, (perf_counter() - began) / out.nbytes)
        return out

    def unmap(self, closed: Any) -> None:
        """Let the mapping go; a thread that is copying ends its copy.

        Args:
            closed: A `ClosedStore`, which later copies ask.
        """
        # First the name, never a view of memory that is not mapped any more: a SIGSEGV.
        mapping, self.mapping, self.array = self.mapping, closed, closed
        with suppress(BufferError):
            mapping.close()

    def _copy(self, rows: NDArray[np.int64], out: Array) -> Array:
        # Without clip, take goes through a buffer; rows are in range.
        return self.array.take(rows, 0, out, "clip")

    def iter_bytes(self, row: int, step: int, count: int) -> Iterator[bytes | memoryview]:
        """See `RowReader.iter_bytes`."""
        nbytes = self._nbytes
        if step == 1 or nbytes >= mmap.PAGESIZE:
            yield from _read(self._file, nbytes, row, step, count)
        else:
            # Reading those between as well would take as long for each environment as
            # for all.
            rows = range(row, row + step * count, step)
            self.pages.prefetch(np.array(rows, np.int64))
            yield self.array[rows.start : rows.stop : step].tobytes()


class ReadRows:
    """Rows by one read each, those that lie one after another by one for all."""

    def __init__(
        self, file: File, dtype: np.dtype[np.generic], shape: tuple[int, ...], advise: Advise
    ) -> None:
        """Read an open file; see `RowReader`."""
        self.dtype, self.shape = dtype, shape
        self._file = file
        self._nbytes = _row_nbytes(dtype, shape)
        self.pages = Pages(file, self._nbytes, advise)

    def take(self, rows: NDArray[np.int64], out: Array) -> Array:
        """See `RowReader.take`."""
        ask = self.pages.reads(len(rows))
        if _read_rows(self._file, self._nbytes, rows, out, ask=ask):
            return out
        return _read_each(self._file, self._nbytes, rows, out)

    def iter_bytes(self, row: int, step: int, count: int) -> Iterator[bytes | memoryview]:
        """See `RowReader.iter_bytes`."""
        return _read(self._file, self._nbytes, row, step, count)


def _read_rows(file: File, nbytes: int, rows: NDArray[np.int64], out: Array, *, ask: bool) -> bool:
    """Read rows in the order of the file, while other threads run Python.

    Returns:
        Whether all were read; if not, `_read_each` raises the reason.
    """
    # C copies the descriptor (dup) before it lets other threads run: a number that is
    # closed and given to another file meanwhile is not read in its place.
    fd = file.fd
    done: bool = _copies.read_rows(fd, nbytes, np.ascontiguousarray(rows), out, ask)
    # A number that another thread gave back may be another file's by now.
    return done and file.fd == fd


def _read_each(file: File, nbytes: int, rows: NDArray[np.int64], out: Array) -> Array:
    """Read rows one run after the other, where they were not all to be had at once.

    Raises:
        CorruptError: The file ends before.
        FailedError: The device refuses, or another thread closed the file.
    """
    target = out.reshape(-1).view(np.uint8).data
    spans = runs(rows) if len(rows) else []
    # All asked for first, then read: the requests wait together, not one by one.
    for row, first, stop in spans:
        file.will_need(row * nbytes, (stop - first) * nbytes)
    for row, first, stop in spans:
        file.pread_into(target[first * nbytes : stop * nbytes], row * nbytes)
    return out


def _read(file: File, row_nbytes: int, row: int, step: int, count: int) -> Iterator[memoryview]:
    """Read every step-th of rows, those that lie together at most a MiB at once."""
    span_nbytes = row_nbytes * (count if step == 1 else 1)
    buffer = memoryview(bytearray(min(READ_NBYTES, span_nbytes)))
    for first in range(row, row + step * count, step if step > 1 else count):
        for at in range(0, span_nbytes, READ_NBYTES):
            view = buffer[: span_nbytes - at]
            file.pread_into(view, first * row_nbytes + at)
            yield view


def _row_nbytes(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


class ClosedStore:
    """Stands in for readers after a close; every use of it raises."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> NoReturn:
        raise system_failure("read", self._folder, OSError(errno.EBADF, name))

    def __getitem__(self, key: object) -> NoReturn:
        self.__getattr__("[]")


_steps = kernels.load("steps")

BOOL, UINT8 = np.dtype(np.bool_), np.dtype(np.uint8)
"""Given as what they are, they need not be looked up."""

SPLIT_ROWS = 1024
"""Fewer are copied whole; their fields are looked at where they are."""
LINE = 64
MAX_COUNTS = 16
"""Lengths of batches whose layout is cached."""

Ids = NDArray[np.int64]
Ends = NDArray[np.bool_]


class Records:
    """The records of every row, where they are mapped.

    Attributes:
        record: What a row holds.
    """

    def __init__(self, ring: Ring, rows: MappedRows, record: np.dtype[np.void]) -> None:
        """Copy out of a mapping.

        Args:
            ring: Where rows lie.
            rows: The mapping.
            record: What a row of it holds.
        """
        self._ring, self._shape = ring, ring.shape
        self._rows = rows
        self.record = record
        self._stride = record.itemsize
        self._dtypes = {1: record, 2: twice(record)}
        self._buffers = BufferPool()

    def unmap(self, closed: Any) -> None:
        """Let the mapping go; see `MappedRows.unmap`."""
        self._rows = closed

    def take(
        self,
        flags: NDArray[np.uint8],
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        bits: bytes,
        bare: bool,
        wide: int,
    ) -> tuple[NDArray[np.void], Ends]:
        """Copy the records of steps, after asking the disk for pages that are missing.

        Args:
            flags: Of every row; see `kernels.steps.take`, as the next five.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
            heads: int64 ``[E]``.
            bits: Flags to look for, K of them.
            bare: The last step of an episode without a final row is its own successor.
            wide: 1, or 2 for the records of the steps after as well.

        Returns:
            Records ``[N]``, with those after in fields that are called `after`, and
            bool ``[K, N]``, which flags each step has.
        """
        waits = self._waits(env_ids, positions, wide)
        count = len(positions)
        out: NDArray[Any] = self._buffers.empty((count,), self._dtypes[wide])
        ends = np.empty((len(bits), count), BOOL)
        _steps.take(
            self._rows.array,
            self._stride,
            flags,
            env_ids,
            positions,
            heads,
            *self._shape,
            bits,
            bare,
            out,
            ends,
            waits,
        )
        return out, ends

    def take_fields(
        self,
        flags: NDArray[np.uint8],
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        bits: bytes,
        bare: bool,
        wide: int,
        layout: ColumnLayouts,
    ) -> tuple[NDArray[np.void], Ends]:
        """Copy fields of steps, and of those after, each into a column; see `take`.

        Args:
            flags: See `take`, as the next six.
            env_ids: See `take`.
            positions: See `take`.
            heads: See `take`.
            bits: See `take`.
            bare: See `take`.
            wide: See `take`.
            layout: Which fields, of row 0 for the step's own, 1 for the one after.

        Returns:
            All columns in one array without axes, named as `ColumnLayouts` says; and
            bool ``[K, N]``, which flags each step has.
        """
        waits = self._waits(env_ids, positions, wide)
        count = len(positions)
        dtype, copied, _, _ = layout.of(count)
        out = self._buffers.empty((dtype.itemsize,), UINT8)
        ends = np.empty((len(bits), count), BOOL)
        _steps.take_fields(
            self._rows.array,
            self._stride,
            flags,
            env_ids,
            positions,
            heads,
            *self._shape,
            bits,
            bare,
            wide,
            copied,
            out,
            ends,
            waits,
        )
        return np.ndarray((), dtype, out), ends  # a fifth of the time of `view`

    def _waits(self, env_ids: Ids, positions: Ids, wide: int) -> bool:
        """Ask the disk for pages that are missing; whether to wait for some."""
        pages = self._rows.pages
        if pages.warm():
            return False
        # To get Python's lock back may take 5 ms where others compute, a hundred times
        # as long as a short batch: it is kept unless pages are missing now, or were
        # when a loader drew. Kept while pages were missing, it held up adds: 54,000 to
        # 58,000 a second beside a loader beyond memory, now 93,000 to 100,000.
        return self._prefetch(env_ids, positions, wide) > 0 or read_ahead.gathers()

    def columns(self, rows: Ids, count: int, layout: ColumnLayouts) -> NDArray[np.void]:
        """Copy fields of rows, each into a column; see `take`.

        Args:
            rows: int64 ``[C, N]``, rows of the ring.
            count: N.
            layout: Which fields.

        Returns:
            All columns in one array without axes, named as `ColumnLayouts` says.
        """
        pages, waits = self._rows.pages, False
        if not pages.warm():
            waits = pages.prefetch(rows.reshape(-1)) > 0 or read_ahead.gathers()
        dtype, copied, _, _ = layout.of(count)
        out = self._buffers.empty((dtype.itemsize,), UINT8)
        _steps.columns(self._rows.array, self._stride, rows, count, copied, out, waits)
        return np.ndarray((), dtype, out)

    def fold_fields(
        self,
        flags: NDArray[np.uint8],
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        fixed: tuple[Any, ...],
        num_packed: int,
        located: Ids,
        ends: Ends,
        layout: ColumnLayouts,
        powers: NDArray[np.float64],
    ) -> NDArray[np.void]:
        """Fold steps, and copy and sum fields of the rows around them, in one pass.

        Args:
            flags: Of every row; see `kernels.steps.fold_steps`, as the next three.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
            heads: int64 ``[E]``.
            fixed: Slots to marks, as `kernels.steps.fold_steps` takes them.
            num_packed: Columns whose rows are read here; they come first.
            located: int64 ``[3 + C, N]``, written.
            ends: bool ``[1 + S, N]``, written.
            layout: Which fields, and which sums.
            powers: float64 ``[steps + 1]``, what to sum and to discount with.

        Returns:
            All columns in one array without axes, named as `ColumnLayouts` says.
        """
        pages, waits = self._rows.pages, False
        if not pages.warm():
            # The disk is asked for rows, which are found by this.
            _steps.fold_steps(flags, env_ids, positions, heads, *fixed, located, ends)
            rows = located[3 : 3 + num_packed].reshape(-1)
            waits = pages.prefetch(rows) > 0 or read_ahead.gathers()
        dtype, copied, summed, discount = layout.of(len(positions))
        out = self._buffers.empty((dtype.itemsize,), UINT8)
        _steps.fold_fields(
            self._rows.array,
            self._stride,
            flags,
            env_ids,
            positions,
            heads,
            *fixed,
            located,
            ends,
            copied,
            summed,
            powers,
            discount,
            out,
            waits,
        )
        return np.ndarray((), dtype, out)

    def _prefetch(self, env_ids: Ids, positions: Ids, wide: int) -> int:
        rows = [self._ring.rows(env_ids, positions + ahead) for ahead in range(wide)]
        # However long they are: they are copied out of the mapping, not read.
        return self._rows.pages.prefetch(np.concatenate(rows))


class ColumnLayout(NamedTuple):
    """Where columns lie for so many steps; see `ColumnLayouts`.

    Attributes:
        dtype: Of the array that holds all of them.
        copied: int64 ``[P, 5]``, what is copied, as `kernels.steps.columns` takes it.
        summed: int64 ``[S, 6]``, what is summed, as `kernels.steps.fold_fields` does.
        discount: Where discounts begin; -1 for none.
    """

    dtype: np.dtype[np.void]
    copied: Ids
    summed: Ids
    discount: int


class ColumnLayouts:
    """Where columns of fields lie in one array, for as many steps as there are.

    The columns are fields of its dtype, called by their number: ``[N, K, *shape]``, or
    ``[N, *shape]``. After them come sums, ``[N, *shape]``, then discounts, ``[N]``.
    """

    def __init__(
        self,
        record: np.dtype[np.void] | None,
        wanted: Sequence[tuple[str, int, int | None]],
        summed: Sequence[tuple[str, int, np.dtype[np.generic]]] = (),
        discounted: bool = False,
    ) -> None:
        """Lay out columns.

        Args:
            record: What a row holds; see `RecordLayout`. To lay that out takes as
                long as there are fields, and these columns may be one of them.
            wanted: Of each column its path, and which rows of C it is read from: the
                first, and K, or None for that one alone.
            summed: Of each field that is summed its path, the first of the rows that
                are added up, and the dtype of the sums.
            discounted: Whether there are discounts.
        """
        fields: Mapping[str, Any] = {} if record is None else record.fields or {}
        self._members = [(*fields[path][:2], start, width) for path, start, width in wanted]
        self._summed = [(*fields[path][:2], *rest) for path, *rest in summed]
        self._discounted = discounted
        self._known: dict[int, ColumnLayout] = {}

    def of(self, count: int) -> ColumnLayout:
        """The dtype for N steps, and the numbers that describe it to the kernel."""
        # Looked up by the number of steps: batches of a loader have one length, and
        # a dtype of ten fields takes 4 us to make, a fifth of a small batch.
        layout = self._known.get(count)
        if layout is not None:
            return layout
        # No array of nothing can be looked at as one of fields.
        copies, formats, end = [], [], LINE
        for dtype, offset, start, width in self._members:
            lead = (count,) if width is None else (count, width)
            formats.append((dtype.base, (*lead, *dtype.shape)))
            copies.append((offset, dtype.itemsize, start, width or 1, end))
            end += -(-count * (width or 1) * dtype.itemsize // LINE) * LINE
        sums, discount = [], -1
        for dtype, offset, start, total in self._summed:
            formats.append((total, (count, *dtype.shape)))
            wide = dtype.base.itemsize
            numbers = dtype.itemsize // wide
            sums.append((offset, numbers, wide, total.itemsize, start, end))
            end += -(-count * numbers * total.itemsize // LINE) * LINE
        offsets = [item[-1] for item in (*copies, *sums)]
        if self._discounted:
            discount = end
            formats.append((np.dtype(np.float32), (count,)))
            offsets.append(discount)
            end += -(-count * 4 // LINE) * LINE
        dtype = np.dtype(
            {
                "names": [str(at) for at in range(len(offsets))],
                "formats": formats,
                "offsets": offsets,
                "itemsize": end,
            }
        )
        if len(self._known) >= MAX_COUNTS:
            # Another one: other threads may be looking at this one.
            self._known = {}
        # Of empty fields nothing is copied.
        copied = np.array([item for item in copies if item[1]], np.int64).reshape(-1)
        added = np.array(sums, np.int64).reshape(-1)
        layout = self._known[count] = ColumnLayout(dtype, copied, added, discount)
        return layout


def after(path: str) -> str:
    """Name of a field of the record after, which no path can be."""
    return f"{path}/"


def twice(record: np.dtype[np.void]) -> np.dtype[np.void]:
    """Dtype of two records, one after the other."""
    members = [(name, *member[:2]) for name, member in (record.fields or {}).items()]
    names, formats, offsets = zip(*members, strict=True)
    return np.dtype(
        {
            "names": [*names, *map(after, names)],
            "formats": [*formats, *formats],
            "offsets": [*offsets, *(record.itemsize + offset for offset in offsets)],
            "itemsize": 2 * record.itemsize,
        }
    )


def records_of(ring: Ring, rows: RowReader, placement: RecordLayout) -> Records | None:
    """Records, or None where rows are read rather than mapped."""
    if placement.record is None or not isinstance(rows, MappedRows):
        return None
    return Records(ring, rows, placement.record)


def gathered(
    reader: RowReader, placement: RecordLayout, pool: BufferPool, rows: Ids, paths: Sequence[str]
) -> Mapping[str, NDArray[np.generic]] | NDArray[np.void]:
    """Copy records out; their fields by path.

    Of many that lie one after another, and are mapped, each field is an array of its
    own: to write them elsewhere would copy them again.
    """
    count, record = len(rows), placement.record
    assert record is not None
    # A scan: many rows that lie together, in memory. Random rows stay packed, as one
    # copy moves all their fields: 20 us for 256 rows of six fields, 43 field by field.
    if (
        count >= SPLIT_ROWS
        and isinstance(reader, MappedRows)
        and rows.ndim == 1
        and rows[-1] - rows[0] == count - 1
        and (rows[1:] > rows[:-1]).all()
        and not reader.pages.reads(count)
    ):
        return _columns(reader, record, pool, int(rows[0]), count, paths)
    raw = pool.empty(rows.shape, reader.dtype)
    return cast("NDArray[np.void]", reader.take(rows, raw).view(record))


def _columns(
    reader: MappedRows,
    record: np.dtype[np.void],
    pool: BufferPool,
    first: int,
    count: int,
    paths: Sequence[str],
) -> dict[str, NDArray[np.generic]]:
    assert record.fields is not None
    copied, kinds, end = [], {}, 0
    for path in paths:
        if path in record.fields:
            dtype, offset = record.fields[path][:2]
            kinds[path] = dtype, end
            copied.append((offset, dtype.itemsize, end))
            end += -(-count * dtype.itemsize // LINE) * LINE
    raw = pool.empty((end,), np.dtype(np.uint8))
    _steps.split(reader.array, record.itemsize, first, count, np.array(copied, np.int64), raw)
    return {
        path: raw[start : start + count * dtype.itemsize]
        .view(dtype.base)
        .reshape(count, *dtype.shape)
        for path, (dtype, start) in kinds.items()
    }


MAX_ARRAYS = 4
"""Arrays of each shape: one being filled, and a few with the learner."""
MAX_SHAPES = 8
MAX_NBYTES = 64 << 20
SPARE = 2
"""Times as much as ever was in use at a time is kept in all: shapes that never come
again, as of whole episodes, would else add up."""
LITTLE_NBYTES = 64 << 20
"""Bytes that may stay in any case."""
LEAST_STEP_NBYTES = 4096
"""Sizes of bytes are rounded up to a multiple of this, and larger ones of an eighth."""

T = TypeVar("T")


def _next(pool: list[T], at: int) -> tuple[T, int]:
    """Move one of a pool's items to its front; return it and its references meanwhile.

    Raises:
        IndexError: Other threads have taken all of them out.
    """
    item = pool.pop(at)
    references = sys.getrefcount(item)
    pool.insert(0, item)
    return item, references


# Measured: up to Python 3.13 the argument of getrefcount counts beside the name,
# later it may not. Never more than two: a debugger that holds the object as well
# would let arrays be handed out that are still read.
UNSHARED = min(2, _next([object()], 0)[1])

Make = Callable[[tuple[int, ...], np.dtype[np.generic]], NDArray[Any]]
"""Makes an array of a shape and dtype whose content means nothing."""


class _Serving(threading.local):
    """The pool that serves this thread, whichever pool it asks.

    A default of the class: to miss an attribute of a thread's own costs as much as all
    else that `BufferPool.empty` does.
    """

    pool: BufferPool | SharedArrays | None = None


_serving = _Serving()


class BufferPool:
    """Hands out uninitialised arrays of a few recurring shapes.

    Holds at most MAX_SHAPES * MAX_ARRAYS arrays of at most 64 MiB, and where that is
    more than 64 MiB, twice what was in use at a time. Any thread may call: an array is
    out of its pool while it is looked at.
    """

    def __init__(
        self,
        max_arrays: int = MAX_ARRAYS,
        max_shapes: int = MAX_SHAPES,
        max_nbytes: int = MAX_NBYTES,
        make: Make = np.empty,
    ) -> None:
        """Make one that holds nothing yet.

        Args:
            max_arrays: Arrays of each shape, at most.
            max_shapes: Shapes, at most.
            max_nbytes: Bytes of the largest array that stays in the pool.
            make: Where the arrays come from.
        """
        self._max_arrays, self._max_shapes = max_arrays, max_shapes
        self._max_nbytes = max_nbytes
        self._make = make
        self._pools: dict[Hashable, list[NDArray[np.generic]]] = {}
        self._pooled_nbytes = self._most_used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """Return an array whose content means nothing.

        Args:
            shape: Its shape.
            dtype: Its dtype.
        """
        # A thread of a loader gathers into the loader's own memory, pinned where it is
        # copied to a device, whichever engine is asked.
        other = _serving.pool
        if other is not None and other is not self:
            return other.empty(shape, dtype)
        pool = self._pools.get((shape, dtype))
        if pool is None:
            pool = self._new_pool((shape, dtype))
        # The latest first: what was given back last is still in the processor's
        # caches, and 4,096 records are gathered 28 us faster into it.
        for at in range(len(pool)):
            try:
                array, references = _next(pool, at)
            except IndexError:
                break
            # No other reference exists, and none can be made: the array is out of its
            # pool while it is counted, so that two threads never get the same one.
            if references == UNSHARED:
                return array
        # New memory costs a page fault for every 4 KiB and the zeroing of each: for
        # large rows as much as the copy itself.
        fresh: NDArray[np.generic] = self._make(shape, dtype)
        if len(pool) < self._max_arrays and fresh.nbytes <= self._max_nbytes:
            pool.insert(0, fresh)
            self._pooled_nbytes += fresh.nbytes
            if self._pooled_nbytes > LITTLE_NBYTES:
                self._let_go()
        return fresh

    def empty_bytes(self, nbytes: int) -> NDArray[Any]:
        """Return bytes whose content means nothing, for data of changing size.

        They are the first bytes of an array of a rounded size: each size would else be
        a shape of its own, and new memory for almost every batch.

        Args:
            nbytes: Their number.

        Returns:
            uint8 ``[nbytes]``.
        """
        step = max(LEAST_STEP_NBYTES, 1 << max(0, nbytes.bit_length() - 4))
        return self.empty((-(-nbytes // step) * step,), UINT8)[:nbytes]

    def _let_go(self) -> None:
        """Drop unused arrays above twice what was in use, oldest shapes first."""
        # Twice what was ever in use: whole episodes come in ever new shapes, and arrays
        # of shapes that never come again would add up to all memory.
        used, unused = 0, []
        for key, pool in list(self._pools.items()):
            for at in range(len(pool)):
                with suppress(IndexError):
                    array, references = _next(pool, at)
                    if references == UNSHARED:
                        unused.append((key, array))
                    else:
                        used += array.nbytes
        self._most_used = max(self._most_used, used)
        retained = used + sum([array.nbytes for _, array in unused])
        for key, array in unused:
            if retained <= SPARE * self._most_used:
                break
            retained -= array.nbytes
            left = [other for other in self._pools.pop(key, []) if other is not array]
            if left:
                self._pools.setdefault(key, left)
        self._pooled_nbytes = retained

    def __enter__(self) -> None:
        """Serve this thread, whichever pool it asks, until the exit.

        So a loader's thread gathers into memory of its own kind and number.
        """
        _serving.pool = self

    def __exit__(self, *_: object) -> None:
        """Let each pool serve this thread again."""
        _serving.pool = None

    def clear(self) -> None:
        """Drop all arrays; those that were handed out stay valid."""
        self._pools.clear()
        self._pooled_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's arrays, in use or not."""
        pools = list(self._pools.values())
        return sum(array.nbytes for pool in pools for array in list(pool))

    def _new_pool(self, key: Hashable) -> list[NDArray[np.generic]]:
        if len(self._pools) >= self._max_shapes:
            self.clear()
        return self._pools.setdefault(key, [])


Offsets = dict[str, tuple[object, int]]
"""By name of a field: the kind of array that holds it, and its first byte there."""


class SharedArrays:
    """Has several gathers of a thread fill the same arrays, each its own rows of them.

    What follows each other then need not be joined: that would copy a batch once more.
    And arrays of all rows have the same shapes in each batch, so that a pool has them,
    however many rows each gather has. Entered, it serves this thread, whichever pool it
    asks.

    Example:
        >>> from mmreplay.storage.gather import BufferPool, SharedArrays
        >>> pool = BufferPool()
        >>> with SharedArrays(pool, [2, 5]) as shared:
        ...     shared.begin(0)
        ...     one = pool.empty((2, 84, 84), np.dtype(np.uint8))
        ...     shared.begin(1)
        ...     two = pool.empty((3, 84, 84), np.dtype(np.uint8))
        >>> shared.joined([one, two], "pixels").shape
        (5, 84, 84)
    """

    def __init__(
        self, pool: BufferPool, stops: Sequence[int], offsets: Offsets | None = None
    ) -> None:
        """Take the arrays from a pool.

        Args:
            pool: The pool.
            stops: Of each gather, where its rows end among those of all.
            offsets: What was found of fields by gathers before; they are where they
                were. None to look at each array, as transforms may return any view.
        """
        self._pool, self._stops = pool, stops
        self._offsets = {} if offsets is None else offsets
        self._looks = offsets is None
        self._own = slice(0, 0)
        self._number = 0
        self._arrays: list[Array] = []
        self._arranged: dict[int, Array] = {}
        self._outer: BufferPool | SharedArrays | None = None

    def __enter__(self) -> Self:
        """Serve this thread until the exit."""
        self._outer, _serving.pool = _serving.pool, self
        return self

    def __exit__(self, *_: object) -> None:
        """Let what served this thread before serve it again."""
        _serving.pool = self._outer

    def begin(self, number: int) -> None:
        """Have the next arrays be the rows of a gather.

        Args:
            number: The gather's.
        """
        first = self._stops[number - 1] if number else 0
        self._own, self._number = slice(first, self._stops[number]), 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return the gather's rows of an array; see `BufferPool.empty`.

        Gathers of one kind ask for the same arrays in the same order. One that asks for
        another one, or for another number of rows, gets an array of its own; so does
        one that asks for bytes, which are the values of rows and not rows.
        """
        own = self._own
        count = own.stop - own.start
        is_bytes = len(shape) == 1 and dtype == UINT8
        if is_bytes or not shape or not count or shape[0] % count:
            return self._new(shape, dtype)
        # Of windows every row of each, and of pairs both.
        each = shape[0] // count
        number, self._number = self._number, self._number + 1
        whole = each * self._stops[-1], *shape[1:]
        if number == len(self._arrays):
            self._arrays.append(self._new(whole, dtype))
        array = self._arrays[number]
        if array.shape != whole or array.dtype != dtype:
            return self._new(shape, dtype)
        return array[each * own.start : each * own.stop]

    def _new(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        _serving.pool = self._outer
        try:
            return self._pool.empty(shape, dtype)
        finally:
            _serving.pool = self

    def joined(
        self,
        columns: Sequence[Array],
        name: str,
        order: Sequence[tuple[int, int, int]] | None = None,
    ) -> Array | None:
        """Return one array of rows that follow each other in one that was shared.

        Args:
            columns: Of every gather that has rows, or a field of theirs.
            name: Of the field.
            order: Rows in the order that is wanted: of which gather, the first of them,
                and one past the last; None as they are. Their bytes are copied once,
                whatever fields they hold.

        Returns:
            None where they do not follow each other.
        """
        first, count = columns[0], self._stops[-1]
        whole, strides = first.base, first.strides
        for array in self._arrays:
            # Some pools hand out the first rows of a larger array.
            if whole is array or (whole is array.base and whole is not None):
                break
        else:
            return None
        rows = 0
        for column in columns:
            if column.base is not whole or column.strides != strides:
                return None
            rows += len(column)
        if rows != count:
            return None
        kind, offset = self._offsets.get(name, (None, 0))
        if self._looks or kind != (array.dtype, strides, first.dtype):
            offset, at = first.ctypes.data - array.ctypes.data, first.ctypes.data
            for column in columns:
                if column.ctypes.data != at:
                    return None
                at += len(column) * strides[0]
            self._offsets[name] = (array.dtype, strides, first.dtype), offset
        if order is not None:
            array = self._in_order(array, columns, order)
        return np.ndarray((count, *first.shape[1:]), first.dtype, array, offset, strides)

    def _in_order(
        self, array: Array, columns: Sequence[Array], order: Sequence[tuple[int, int, int]]
    ) -> Array:
        """Return an array, copied in the order that is wanted; see `joined`."""
        arranged = self._arranged.get(id(array))
        if arranged is None:
            rows = array.view(UINT8).reshape(self._stops[-1], -1)
            arranged = self._pool.empty(rows.shape, UINT8)
            begins = [0, *accumulate([len(rows) for rows in columns])]
            np.concatenate(
                [
                    rows[begins[number] + first : begins[number] + stop]
                    for number, first, stop in order
                ],
                out=arranged,
            )
            self._arranged[id(array)] = arranged
        return arranged
