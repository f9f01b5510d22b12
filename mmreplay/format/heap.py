"""The heap of a ring: where values that vary begin, and which references are legal.

Each environment has a ring of bytes for the values of its fields that vary. A *heap
position* counts the bytes of one environment and never wraps; position q is byte
``env_id * heap_nbytes + q % heap_nbytes`` of heap.bin. docs/format.md has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.schema.field import HEAP_ALIGNMENT, REFERENCE, Field

if TYPE_CHECKING:
    from mmreplay.kernels.rows import RowsKernel

_rows = cast("RowsKernel", kernels.load("rows"))

FILE_NAME = "heap.bin"
MAX_HEAD = (1 << 61) - HEAP_ALIGNMENT
"""No heap is written beyond: kernels add positions and bytes of values within int64. At
10 GB/s it is reached after seven years."""
Array = NDArray[np.int64]
References = NDArray[np.void]
"""Of dtype `REFERENCE`."""


def aligned(nbytes: Array) -> Array:
    """Bytes rounded up to the next multiple at which a value may begin."""
    return (nbytes + (HEAP_ALIGNMENT - 1)) & -HEAP_ALIGNMENT


def lay_out(heap_head: int, nbytes: Array, heap_nbytes: int) -> tuple[Array, Array]:
    """Decide where values begin that follow each other in one environment's heap.

    Args:
        heap_head: Where the first one may begin, a multiple of 8.
        nbytes: int64 ``[N]``, their bytes; values of 0 bytes take no space.
        heap_nbytes: Bytes of the heap.

    Returns:
        Two int64 ``[N]``: the heap position of each value, and the heap head after it.
    """
    space = aligned(nbytes)
    stops = heap_head + np.cumsum(space)
    starts = stops - space
    first = 0
    while True:
        # A value is contiguous: one that would cross the ring's end begins behind it,
        # and so moves those after it.
        crossing = starts[first:] % heap_nbytes + nbytes[first:] > heap_nbytes
        if not crossing.any():
            return starts, stops
        first += int(crossing.argmax())
        skipped = -starts[first] % heap_nbytes
        starts[first:] += skipped
        stops[first:] += skipped


def legal(
    references: References, field: Field, heap_nbytes: int, heap_tails: Array, heap_heads: Array
) -> NDArray[np.bool_]:
    """Tell which references name bytes that a record lets be read.

    Args:
        references: `REFERENCE` ``[N]``, from anywhere.
        field: What they are of.
        heap_nbytes: Bytes of each environment's heap.
        heap_tails: int64 ``[N]``, of each one's environment in the record that it was
            read under, in ``[0, 2**62)``.
        heap_heads: int64 ``[N]``, likewise, at least the tails.

    Returns:
        bool ``[N]``.
    """
    assert field.max_length is not None
    positions = references["position"].astype(np.int64)
    lengths = references["length"].astype(np.int64)
    # No sum wraps around: values take less than 2**48 bytes, as lengths are below 2**32
    # and an item of the longest value's takes less than 2**48 / max_length. Products
    # of longer ones may wrap, and count for nothing.
    fits = lengths <= field.max_length
    nbytes = np.where(fits, lengths, 0) * field.inner_nbytes
    inside = (heap_tails <= positions) & (positions <= heap_heads - nbytes)
    whole = positions % heap_nbytes <= heap_nbytes - nbytes
    there = fits & (lengths >= 1) & inside & whole & (positions % HEAP_ALIGNMENT == 0)
    empty = (positions == 0) & (lengths == 0) & (references["crc"] == 0)
    result: NDArray[np.bool_] = there | empty
    return result


def nbytes_of(references: References, field: Field) -> Array:
    """Bytes of the values of legal references, int64 ``[N]``."""
    return references["length"].astype(np.int64) * field.inner_nbytes


def comparable(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Columns of rows to be compared, without a look at values that vary.

    Args:
        columns: Per path ``[N, *shape]``, or `REFERENCE` ``[N]``.

    Returns:
        The same, with uint64 ``[N]`` of references: length and checksum of the value,
        which are the same for equal values.
    """
    return {
        path: (column["length"].astype(np.uint64) << np.uint64(32)) | column["crc"]
        if column.dtype == REFERENCE
        else column
        for path, column in columns.items()
    }


def offsets(references: References, env_ids: Array, heap_nbytes: int) -> Array:
    """Where the values of legal references begin in heap.bin, int64 ``[N]``."""
    begins: Array = env_ids * heap_nbytes + references["position"] % heap_nbytes
    return begins


def checksums(data: NDArray[np.uint8], begins: Array, nbytes: Array) -> NDArray[np.uint32]:
    """CRC32C of each of some values, uint32 ``[N]``; 0 of empty ones.

    Args:
        data: uint8, contiguous, which holds them.
        begins: int64 ``[N]``, their first bytes in it.
        nbytes: int64 ``[N]``, their bytes.
    """
    sums = np.empty(len(begins), np.uint32)
    _rows.sum_spans(data, np.ascontiguousarray(begins), np.ascontiguousarray(nbytes), sums)
    return sums
