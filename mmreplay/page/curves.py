"""Curves of a field: lowest, highest and mean value of each bucket of steps.

numpy's ``reduceat`` reduces all buckets of a block at once; no Python loop runs over
rows, and only one block of rows is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.page.requests import NOT_IN_RING, TOO_LARGE, Refusal
from mmreplay.schema.convert import widen

MAX_BUCKETS, MAX_COMPONENTS = 4096, 64
MAX_NBYTES = 256 << 20
"""Of rows that one curve reads."""
BLOCK_NBYTES = 8 << 20
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
    """

    first: int
    stop: int
    components: int
    num_nonfinite: int
    lowest: Floats
    highest: Floats
    mean: Floats


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
    field = buffer.schema[path]
    span = buffer.span
    first, stop = max(first, int(span.first[env_id])), min(stop, int(span.stop[env_id]))
    if stop <= first:
        raise Refusal(
            NOT_IN_RING, f"These steps of environment {env_id} were overwritten."
        )
    count, row_nbytes = stop - first, max(1, field.nbytes)
    if count * row_nbytes > MAX_NBYTES:
        raise Refusal(
            TOO_LARGE,
            f"{count:,} rows of {path} take more than {MAX_NBYTES >> 20} MiB. Zoom in "
            "to fewer steps.",
        )
    size = int(np.prod(field.shape, dtype=np.int64))
    low, high = components[0], min(components[1], size)
    edges = bucket_edges(count, buckets)
    shape = (high - low, len(edges))
    lowest, highest, mean = (np.empty(shape, np.float32) for _ in range(3))
    num_nonfinite = 0
    # Blocks of whole buckets; a bucket that is larger than a block is read at once,
    # which the bound on all rows allows.
    rows_per_block = max(1, BLOCK_NBYTES // row_nbytes)
    begin = 0
    while begin < len(edges):
        end = int(np.searchsorted(edges, edges[begin] + rows_per_block, "right")) - 1
        end = max(begin + 1, end)
        if count - edges[begin] <= rows_per_block:
            end = len(edges)
        row = int(edges[begin])
        until = int(edges[end]) if end < len(edges) else count
        positions = np.arange(first + row, first + until)
        values = widen(buffer.get_field(path, env_id, positions), field)
        values = values.reshape(len(positions), -1)[:, low:high]
        num_nonfinite += _reduce(
            values, edges[begin:end] - row,
            (lowest[:, begin:end], highest[:, begin:end], mean[:, begin:end]),
        )  # fmt: skip
        begin = end
    return Curve(first, stop, size, num_nonfinite, lowest, highest, mean)


def _reduce(
    values: NDArray[Any],
    edges: NDArray[np.int64],
    out: tuple[Floats, Floats, Floats],
) -> int:
    """Reduce rows ``[N, C]`` to buckets; return how many values are not finite."""
    lowest, highest, mean = out
    if values.dtype == bool:
        values = values.view(np.uint8)
    sizes = np.diff(edges, append=len(values))[:, None]
    low, high = values, values
    num_nonfinite = 0
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            num_nonfinite = int(finite.size - np.count_nonzero(finite))
            low = np.where(finite, values, np.inf)
            high = np.where(finite, values, -np.inf)
            values = np.where(finite, values, 0)
            sizes = np.add.reduceat(finite, edges, axis=0, dtype=np.int64)
    sums = np.add.reduceat(values, edges, axis=0, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean[:] = _narrow(sums / sizes).T
    lowest[:] = _narrow(np.minimum.reduceat(low, edges, axis=0)).T
    highest[:] = _narrow(np.maximum.reduceat(high, edges, axis=0)).T
    if num_nonfinite:
        empty = (sizes == 0).T
        for array in out:
            array[empty] = np.nan
    return num_nonfinite


def _narrow(values: NDArray[Any]) -> Floats:
    """Values as float32; those beyond its range become its limits."""
    if values.dtype == np.float64:
        values = np.clip(values, -FLOAT32_MAX, FLOAT32_MAX)
    narrow: Floats = values.astype(np.float32)
    return narrow


def read_values(
    buffer: ReplayBuffer, env_id: int, first: int, count: int
) -> dict[str, Any]:
    """Read small fields of neighbouring rows, as JSON values.

    Args:
        buffer: Open in any mode.
        env_id: The environment.
        first: Position of the first row.
        count: Rows; those that the buffer does not hold are left out.

    Returns:
        ``first``, ``values`` by path (rows of at most 8 components) and ``flags``.

    Raises:
        Refusal: No row is in the buffer.
    """
    span = buffer.span
    stop = min(first + count, int(span.stop[env_id]))
    first = max(first, int(span.first[env_id]))
    if stop <= first:
        raise Refusal(
            NOT_IN_RING, f"These steps of environment {env_id} were overwritten."
        )
    positions = np.arange(first, stop)
    fields = buffer.schema.fields
    paths = [path for path in fields if fields[path].nbytes <= MAX_VALUES_NBYTES]
    columns = buffer.get_fields(paths, env_id, positions) if paths else {}
    values = {
        path: widen(columns[path], fields[path]).reshape(len(positions), -1)[
            :, :MAX_VALUES_COMPONENTS
        ]
        for path in paths
    }
    return {
        "first": first,
        "values": values,
        "flags": buffer.flags(env_id, positions),
    }
