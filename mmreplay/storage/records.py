"""Records copied out: steps with what their flags say of them, or rows, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.ring import Ring
from mmreplay.schema import Schema
from mmreplay.storage import early
from mmreplay.storage.placement import Placement, place
from mmreplay.storage.readers import MappedRows, RowReader
from mmreplay.storage.recycler import Recycler

_steps = kernels.load("steps")

BOOL, UINT8 = np.dtype(np.bool_), np.dtype(np.uint8)
"""Given as what they are, they need not be looked up."""

SPLIT_ROWS = 1024
"""Fewer are copied whole; their fields are looked at where they are."""
LINE = 64
MAX_COUNTS = 16
"""Lengths of batches whose layout is kept."""

Ids = NDArray[np.int64]
Ends = NDArray[np.bool_]


class Records:
    """The records of every row, where they are mapped."""

    def __init__(self, ring: Ring, rows: MappedRows, record: np.dtype[np.void]) -> None:
        """Copy out of a mapping.

        Args:
            ring: Where rows lie.
            rows: The mapping.
            record: What a row of it holds.
        """
        self._ring, self._shape = ring, ring.shape
        self._rows = rows
        self._stride = record.itemsize
        self._dtypes = {1: record, 2: twice(record)}
        self._recycler = Recycler()

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
            bare: A terminated step without a final row is its own successor.
            wide: 1, or 2 for the records of the steps after as well.

        Returns:
            Records ``[N]``, with those after in fields that are called `after`, and
            bool ``[K, N]``, which flags each step has.
        """
        waits = self._waits(env_ids, positions, wide)
        count = len(positions)
        out: NDArray[Any] = self._recycler.empty((count,), self._dtypes[wide])
        ends = np.empty((len(bits), count), BOOL)
        _steps.take(
            self._rows.array, self._stride, flags, env_ids, positions, heads,
            *self._shape, bits, bare, out, ends, waits,
        )  # fmt: skip
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
        layout: Layout,
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
            All columns in one array without axes, named as `Layout` says; and bool
            ``[K, N]``, which flags each step has.
        """
        waits = self._waits(env_ids, positions, wide)
        count = len(positions)
        dtype, parts, _, _ = layout.of(count)
        out = self._recycler.empty((dtype.itemsize,), UINT8)
        ends = np.empty((len(bits), count), BOOL)
        _steps.take_fields(
            self._rows.array, self._stride, flags, env_ids, positions, heads,
            *self._shape, bits, bare, wide, parts, out, ends, waits,
        )  # fmt: skip
        return np.ndarray((), dtype, out), ends  # a fifth of the time of `view`

    def _waits(self, env_ids: Ids, positions: Ids, wide: int) -> bool:
        """Ask the disk for pages that are missing; whether to wait for some."""
        pages = self._rows.pages
        if pages.warm():
            return False
        # To get Python's lock back may take milliseconds, where others compute: it is
        # kept unless pages are missing now, or were when a loader drew.
        return self._prefetch(env_ids, positions, wide) > 0 or early.gathers()

    def columns(self, rows: Ids, count: int, layout: Layout) -> NDArray[np.void]:
        """Copy fields of rows, each into a column; see `take`.

        Args:
            rows: int64 ``[C, N]``, rows of the ring.
            count: N.
            layout: Which fields.

        Returns:
            All columns in one array without axes, named as `Layout` says.
        """
        pages, waits = self._rows.pages, False
        if not pages.warm():
            waits = pages.prefetch(rows.reshape(-1)) > 0 or early.gathers()
        dtype, parts, _, _ = layout.of(count)
        out = self._recycler.empty((dtype.itemsize,), UINT8)
        _steps.columns(self._rows.array, self._stride, rows, count, parts, out, waits)
        return np.ndarray((), dtype, out)

    def fold(
        self,
        flags: NDArray[np.uint8],
        env_ids: Ids,
        positions: Ids,
        heads: Ids,
        fixed: tuple[Any, ...],
        num_packed: int,
        places: Ids,
        ends: Ends,
        layout: Layout,
        powers: NDArray[np.float64],
    ) -> NDArray[np.void]:
        """Fold steps, and copy and sum fields of the rows around them, in one pass.

        Args:
            flags: Of every row; see `kernels.steps.fold`, as the next three.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
            heads: int64 ``[E]``.
            fixed: Slots to marks, as `kernels.steps.fold` takes them.
            num_packed: Columns whose rows are read here; they come first.
            places: int64 ``[3 + C, N]``, written.
            ends: bool ``[1 + S, N]``, written.
            layout: Which fields, and which sums.
            powers: float64 ``[steps + 1]``, what to sum and to discount with.

        Returns:
            All columns in one array without axes, named as `Layout` says.
        """
        pages, waits = self._rows.pages, False
        if not pages.warm():
            # The disk is asked for rows, which are found by this.
            _steps.fold(flags, env_ids, positions, heads, *fixed, places, ends)
            rows = places[3 : 3 + num_packed].reshape(-1)
            waits = pages.prefetch(rows) > 0 or early.gathers()
        dtype, parts, summed, discount = layout.of(len(positions))
        out = self._recycler.empty((dtype.itemsize,), UINT8)
        _steps.fold_fields(
            self._rows.array, self._stride, flags, env_ids, positions, heads, *fixed,
            places, ends, parts, summed, powers, discount, out, waits,
        )  # fmt: skip
        return np.ndarray((), dtype, out)

    def _prefetch(self, env_ids: Ids, positions: Ids, wide: int) -> int:
        rows = [self._ring.rows(env_ids, positions + ahead) for ahead in range(wide)]
        # However long they are: they are copied out of the mapping, not read.
        return self._rows.pages.prefetch(np.concatenate(rows))


class Laid(NamedTuple):
    """Where columns lie for so many steps; see `Layout`.

    Attributes:
        dtype: Of the array that holds all of them.
        parts: int64 ``[P, 5]``, what is copied, as `kernels.steps.columns` takes it.
        summed: int64 ``[S, 6]``, what is summed, as `kernels.steps.fold_fields` does.
        discount: Where discounts begin; -1 for none.
    """

    dtype: np.dtype[np.void]
    parts: Ids
    summed: Ids
    discount: int


class Layout:
    """Where columns of fields lie in one array, for as many steps as there are.

    The columns are fields of its dtype, called by their number: ``[N, K, *shape]``, or
    ``[N, *shape]``. After them come sums, ``[N, *shape]``, then discounts, ``[N]``.
    """

    def __init__(
        self,
        schema: Schema,
        wanted: Sequence[tuple[str, int, int | None]],
        summed: Sequence[tuple[str, int, np.dtype[np.generic]]] = (),
        discounted: bool = False,
    ) -> None:
        """Lay out columns.

        Args:
            schema: The fields of the rows.
            wanted: Of each column its path, and which rows of C it is read from: the
                first, and K, or None for that one alone.
            summed: Of each field that is summed its path, the first of the rows that
                are added up, and the dtype of the sums.
            discounted: Whether there are discounts.
        """
        record = place(schema).record
        fields: Mapping[str, Any] = {} if record is None else record.fields or {}
        self._members = [
            (*fields[path][:2], start, width) for path, start, width in wanted
        ]
        self._summed = [(*fields[path][:2], *rest) for path, *rest in summed]
        self._discounted = discounted
        self._known: dict[int, Laid] = {}

    def of(self, count: int) -> Laid:
        """The dtype for N steps, and the numbers that describe it to the kernel."""
        found = self._known.get(count)
        if found is not None:
            return found
        # No array of nothing can be looked at as one of fields.
        parts, formats, end = [], [], LINE
        for dtype, offset, start, width in self._members:
            lead = (count,) if width is None else (count, width)
            formats.append((dtype.base, (*lead, *dtype.shape)))
            parts.append((offset, dtype.itemsize, start, width or 1, end))
            end += -(-count * (width or 1) * dtype.itemsize // LINE) * LINE
        sums, discount = [], -1
        for dtype, offset, start, total in self._summed:
            formats.append((total, (count, *dtype.shape)))
            wide = dtype.base.itemsize
            numbers = dtype.itemsize // wide
            sums.append((offset, numbers, wide, total.itemsize, start, end))
            end += -(-count * numbers * total.itemsize // LINE) * LINE
        places = [part[-1] for part in (*parts, *sums)]
        if self._discounted:
            discount = end
            formats.append((np.dtype(np.float32), (count,)))
            places.append(discount)
            end += -(-count * 4 // LINE) * LINE
        dtype = np.dtype(
            {
                "names": [str(at) for at in range(len(places))],
                "formats": formats,
                "offsets": places,
                "itemsize": end,
            }
        )
        if len(self._known) >= MAX_COUNTS:
            # Another one: other threads may be looking at this one.
            self._known = {}
        # Of empty fields nothing is copied.
        copied = np.array([part for part in parts if part[1]], np.int64).reshape(-1)
        added = np.array(sums, np.int64).reshape(-1)
        found = self._known[count] = Laid(dtype, copied, added, discount)
        return found


def after(path: str) -> str:
    """Name of a field of the record after, which no path can be."""
    return f"{path}/"


def twice(record: np.dtype[np.void]) -> np.dtype[np.void]:
    """Dtype of two records, one after the other."""
    members = [(name, *found[:2]) for name, found in (record.fields or {}).items()]
    names, formats, offsets = zip(*members, strict=True)
    return np.dtype(
        {
            "names": [*names, *map(after, names)],
            "formats": [*formats, *formats],
            "offsets": [*offsets, *(record.itemsize + each for each in offsets)],
            "itemsize": 2 * record.itemsize,
        }
    )


def records_of(ring: Ring, rows: RowReader, placement: Placement) -> Records | None:
    """Records, or None where rows are read rather than mapped."""
    if placement.record is None or not isinstance(rows, MappedRows):
        return None
    return Records(ring, rows, placement.record)


def gathered(
    reader: RowReader,
    placement: Placement,
    recycler: Recycler,
    rows: Ids,
    paths: Sequence[str],
) -> Mapping[str, NDArray[np.generic]] | NDArray[np.void]:
    """Copy records out; their fields by path.

    Of many that lie one after another, and are mapped, each field is an array of its
    own: whoever writes them elsewhere would copy them again.
    """
    count, record = len(rows), placement.record
    assert record is not None
    if (
        count >= SPLIT_ROWS
        and isinstance(reader, MappedRows)
        and rows.ndim == 1
        and rows[-1] - rows[0] == count - 1
        and (rows[1:] > rows[:-1]).all()
        and not reader.pages.reads(count)
    ):
        return _columns(reader, record, recycler, int(rows[0]), count, paths)
    raw = recycler.empty(rows.shape, reader.dtype)
    return cast("NDArray[np.void]", reader.take(rows, raw).view(record))


def _columns(
    reader: MappedRows,
    record: np.dtype[np.void],
    recycler: Recycler,
    first: int,
    count: int,
    paths: Sequence[str],
) -> dict[str, NDArray[np.generic]]:
    assert record.fields is not None
    parts, kinds, end = [], {}, 0
    for path in paths:
        if path in record.fields:
            dtype, offset = record.fields[path][:2]
            kinds[path] = dtype, end
            parts.append((offset, dtype.itemsize, end))
            end += -(-count * dtype.itemsize // LINE) * LINE
    raw = recycler.empty((end,), np.dtype(np.uint8))
    _steps.split(
        reader.array, record.itemsize, first, count, np.array(parts, np.int64), raw
    )
    return {
        path: raw[place : place + count * dtype.itemsize]
        .view(dtype.base)
        .reshape(count, *dtype.shape)
        for path, (dtype, place) in kinds.items()
    }
