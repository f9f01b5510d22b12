"""Curves of a field: lowest, highest and mean value of each bucket of steps.

numpy's ``reduceat`` reduces all buckets of a block at once; no Python loop runs over
rows, and only one block of rows is in memory: a bucket may be larger than a block.

Curves are float32. Of large whole numbers and float64 values that lie close together,
such as time stamps, the distances from an offset are returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import StaleError
from mmreplay.page.requests import NOT_FOUND, NOT_IN_RING, TOO_LARGE, Refusal
from mmreplay.page.rows import MAX_TRIES
from mmreplay.page.varying import numbers_of, read_numbers, read_texts
from mmreplay.ring import Span
from mmreplay.schema.convert import widen

MAX_BUCKETS, MAX_COMPONENTS = 4096, 64
MAX_NBYTES = 256 << 20
"""Of rows that one curve reads."""
BLOCK_NBYTES, BLOCK_ROWS = 2 << 20, 1 << 17
"""Of the rows that are in memory at a time."""
FAR = 16
"""Values this many times as large as the distance between the lowest and the highest
are returned as distances from the lowest."""
FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_VALUES_ROWS, MAX_VALUES_NBYTES, MAX_VALUES_COMPONENTS = 256, 512, 8
"""Of the values at the playhead: rows, bytes of a field, components of it."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Curve:
    """Curves of some components of a field.

    Attributes:
        first: Position of the first step.
        stop: One past the last step.
        components: How many the field has.
        num_nonfinite: NaN and infinite values, which are gaps.
        lowest: float32 ``[C, buckets]``; NaN where no value of a bucket is finite.
        highest: float32 ``[C, buckets]``; likewise.
        mean: float32 ``[C, buckets]``; likewise.
        offsets: What is to be added to the values of each of the C components, if
            they are distances; empty if no component needs it.
    """

    first: int
    stop: int
    components: int
    num_nonfinite: int
    lowest: Floats
    highest: Floats
    mean: Floats
    offsets: tuple[int | float, ...] = ()


def bucket_edges(count: int, buckets: int) -> NDArray[np.int64]:
    """First row of each bucket, int64 ``[min(count, buckets)]``, in ``[0, count)``."""
    number = min(buckets, count)
    return (np.arange(number, dtype=np.int64) * count) // number


def read_curve(
    buffer: ReplayBuffer,
    path: str,
    env_id: int,
    first: int,
    stop: int,
    buckets: int,
    components: tuple[int, int],
) -> Curve:
    """Read a range of steps of one environment, and reduce it to buckets.

    Args:
        buffer: Open in any mode.
        path: The field.
        env_id: The environment.
        first: Position; rows that left the ring are left out.
        stop: One past the last position; rows that are not written are left out.
        buckets: At most so many.
        components: First component and one past the last.

    Raises:
        Refusal: No row is in the buffer, or the rows take more than 256 MiB.
    """
    margin = 0
    for _ in range(MAX_TRIES):
        span = buffer.span
        oldest = int(span.first[env_id])
        low, high = max(first, oldest + margin), min(stop, int(span.stop[env_id]))
        if high <= low:
            raise nothing_there(span, env_id, first)
        try:
            return _read_curve(buffer, path, env_id, low, high, buckets, components)
        except StaleError:
            # A writer overwrites the oldest rows: newer ones are left.
            margin = 2 * (margin + int(buffer.span.first[env_id]) - oldest)
    raise nothing_there(span, env_id, first)


def _read_curve(
    buffer: ReplayBuffer,
    path: str,
    env_id: int,
    first: int,
    stop: int,
    buckets: int,
    components: tuple[int, int],
) -> Curve:
    field = numbers_of(buffer.schema.drawn[path])
    count, row_nbytes = stop - first, max(1, field.nbytes)
    if count * row_nbytes > MAX_NBYTES:
        raise Refusal(
            TOO_LARGE,
            f"{count:,} rows of {path} take more than {MAX_NBYTES >> 20} MiB. Zoom in "
            "to fewer steps.",
        )
    size = int(np.prod(field.shape, dtype=np.int64))
    low, high = components[0], min(components[1], size)
    reduction: _Reduction | None = None
    rows_per_block = max(1, min(BLOCK_ROWS, BLOCK_NBYTES // row_nbytes))
    for row in range(0, count, rows_per_block):
        until = min(row + rows_per_block, count)
        positions = np.arange(first + row, first + until)
        values = widen(read_numbers(buffer, path, env_id, positions), field)
        values = values.reshape(len(positions), -1)[:, low:high]
        if values.dtype == bool:
            values = values.view(np.uint8)
        if reduction is None:
            edges = bucket_edges(count, buckets)
            reduction = _Reduction(edges, high - low, values.dtype)
        reduction.add(row, values)
    assert reduction is not None
    lowest, highest, mean, offsets = reduction.curves()
    return Curve(first, stop, size, reduction.num_nonfinite, lowest, highest, mean, offsets)


def nothing_there(span: Span, env_id: int, first: int) -> Refusal:
    """Return the refusal of steps that the buffer does not hold.

    Args:
        span: What the buffer holds.
        env_id: The environment.
        first: The first position that was asked for.
    """
    num_envs = len(span.stop)
    if env_id >= num_envs:
        return Refusal(NOT_FOUND, f"There is no environment {env_id}: the buffer has {num_envs}.")
    later = first >= int(span.stop[env_id])
    why = "are not written yet" if later else "were overwritten"
    return Refusal(NOT_IN_RING, f"These steps of environment {env_id} {why}.")


class _Reduction:
    """Reduces blocks of rows to buckets, one block after the other.

    Attributes:
        num_nonfinite: NaN and infinite values so far.
    """

    def __init__(self, edges: NDArray[np.int64], num_components: int, dtype: np.dtype[Any]) -> None:
        """Begin without a row.

        Args:
            edges: See `bucket_edges`.
            num_components: Values of each row.
            dtype: Of the values; bool counts as uint8.
        """
        self.num_nonfinite = 0
        self._edges = edges
        shape = (len(edges), num_components)
        self._sums, self._counts = np.zeros(shape), np.zeros(shape, np.int64)
        self._floats = dtype.kind == "f"
        most, least = np.inf, -np.inf
        if not self._floats:
            most, least = np.iinfo(dtype).max, np.iinfo(dtype).min
        self._lowest = np.full(shape, most, dtype)
        self._highest = np.full(shape, least, dtype)
        # float32 holds values of narrower types well enough.
        self._wide = dtype.itemsize >= 4 and dtype != np.float32
        self._base: NDArray[Any] | None = None

    def add(self, row: int, values: NDArray[Any]) -> None:
        """Take in the rows ``[N, C]`` that begin at a row."""
        begin = int(np.searchsorted(self._edges, row, "right")) - 1
        end = int(np.searchsorted(self._edges, row + len(values), "left"))
        some = slice(begin, end)
        starts = np.maximum(self._edges[some] - row, 0)
        counts: NDArray[Any] = np.diff(starts, append=len(values))[:, None]
        low, high, finite = values, values, None
        if self._floats:
            finite = np.isfinite(values)
            if finite.all():
                finite = None
        if finite is not None:
            self.num_nonfinite += int(finite.size - np.count_nonzero(finite))
            counts = np.add.reduceat(finite, starts, axis=0, dtype=np.int64)
            low = np.where(finite, values, np.inf)
        lowest, highest = self._lowest[some], self._highest[some]
        np.minimum(lowest, np.minimum.reduceat(low, starts, axis=0), out=lowest)
        if finite is not None:
            low = high = np.where(finite, values, -np.inf)
        np.maximum(highest, np.maximum.reduceat(high, starts, axis=0), out=highest)
        del low, high
        if self._wide:
            # Sums of time stamps would lose what distinguishes them: distances from
            # the first finite value are added up.
            if self._base is None:
                rows = 0 if finite is None else finite.argmax(axis=0)
                first = values[rows, np.arange(values.shape[1])]
                self._base = np.where(np.isfinite(first), first, 0).astype(first.dtype)
            values = _distances(values, self._base)
        if finite is not None:
            values = np.where(finite, values, 0)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = np.add.reduceat(values, starts, axis=0, dtype=np.float64)
            self._sums[some] += sums
        self._counts[some] += counts

    def curves(self) -> tuple[Floats, Floats, Floats, tuple[int | float, ...]]:
        """Return lowest, highest and mean ``[C, buckets]``, and the offsets."""
        lowest, highest = self._lowest, self._highest
        offsets: list[int | float] = [0] * lowest.shape[1]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            means = self._sums / self._counts
            if self._base is not None:
                for number, base in enumerate(self._base.tolist()):
                    low, high = lowest[:, number].min(), highest[:, number].max()
                    if _needs_offset(low.item(), high.item()):
                        offsets[number] = low.item()
                        lowest[:, number] -= low
                        highest[:, number] -= low
                    # Of whole numbers the difference is exact.
                    means[:, number] += float(base - offsets[number])
            narrow = _narrow(lowest).T, _narrow(highest).T, _narrow(means).T
        empty = (self._counts == 0).T
        for curve in narrow:
            curve[empty] = np.nan
        return *narrow, tuple(offsets) if any(offsets) else ()


def _distances(values: NDArray[Any], base: NDArray[Any]) -> NDArray[np.float64]:
    """Return values less a base: of whole numbers exactly, as far as float64 goes."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values.astype(np.float64) - base.astype(np.float64)
    if values.dtype.kind == "f" or values.dtype.itemsize < 8:
        return wide
    # Modulo 2^64, which is exact where the distance is less than 2^63.
    exact = (values.view(np.uint64) - base.view(np.uint64)).view(np.int64)
    near: NDArray[np.float64] = np.where(abs(wide) < 1 << 62, exact, wide)
    return near


def _needs_offset(low: float, high: float) -> bool:
    """Return whether float32 does not hold what distinguishes values of a range."""
    if low > high:
        return False  # None of them is finite.
    exact = float(np.float32(low)) == low and float(np.float32(high)) == high
    return not exact and max(abs(low), abs(high)) > FAR * (high - low)


def _narrow(values: NDArray[Any]) -> Floats:
    """Values as float32; those beyond its range become its limits."""
    if values.dtype == np.float64:
        values = np.clip(values, -FLOAT32_MAX, FLOAT32_MAX)
    narrow: Floats = values.astype(np.float32)
    return narrow


def read_values(buffer: ReplayBuffer, env_id: int, first: int, count: int) -> dict[str, Any]:
    """Read small fields of neighbouring rows, as JSON values.

    Args:
        buffer: Open in any mode.
        env_id: The environment.
        first: Position of the first row.
        count: Rows; those that the buffer does not hold are left out.

    Returns:
        ``first``, ``values`` by path (rows of at most 8 components; a text of each
        value that varies) and ``flags``.

    Raises:
        Refusal: No row is in the buffer.
    """
    span, asked = buffer.span, first
    stop = min(first + count, int(span.stop[env_id]))
    first = max(first, int(span.first[env_id]))
    if stop <= first:
        raise nothing_there(span, env_id, asked)
    positions = np.arange(first, stop)
    fields = buffer.schema.drawn.fields
    small = [path for path in fields if fields[path].nbytes <= MAX_VALUES_NBYTES]
    paths = [path for path in small if not fields[path].rules.by_length]
    columns = buffer.get_fields(paths, env_id, positions) if paths else {}
    values: dict[str, Any] = {}
    for path in small:
        rules = fields[path].rules
        if rules.by_length:
            values[path] = read_texts(buffer, path, env_id, positions)
        elif rules.as_text:
            values[path] = [rules.show(fields[path], value) for value in columns[path]]
        else:
            numbers = widen(columns[path], fields[path]).reshape(len(positions), -1)
            values[path] = numbers[:, :MAX_VALUES_COMPONENTS]
    return {"first": first, "values": values, "flags": buffer.flags(env_id, positions)}
