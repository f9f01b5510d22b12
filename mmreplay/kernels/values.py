"""Values that vary: summed, measured and joined; the twin of ``_rows_values.h``."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.kernels.crc import crc32c

Ids = NDArray[np.int64]
ALIGNMENT = 8
_REFERENCE = struct.Struct("<qII")


def sum_spans(
    data: NDArray[np.uint8], begins: Ids, nbytes: Ids, out: NDArray[np.uint32], /
) -> None:
    """Compute the CRC-32C of each of some spans; 0 of empty ones.

    Args:
        data: Contiguous bytes.
        begins: int64 ``[N]``, the first byte of each span.
        nbytes: int64 ``[N]``, its bytes.
        out: uint32 ``[N]``, written.

    Raises:
        ValueError: There are no such spans.
    """
    there, fits = data.nbytes, len(begins) == len(nbytes) == len(out)
    if fits:
        fits = bool(((nbytes >= 0) & (begins >= 0) & (begins <= there)).all())
        fits = fits and bool((nbytes <= there - begins).all())
    if not fits:
        raise ValueError("sum_spans: spans must lie inside of data, and out must hold their sums")
    view = data.data.cast("B")
    for at, (begin, size) in enumerate(zip(begins.tolist(), nbytes.tolist(), strict=True)):
        out[at] = crc32c(view[begin : begin + size]) if size else 0


def measure_values(
    cells: tuple[Any, ...],
    array: Any,
    dtype: Any,
    inner: tuple[int, ...],
    maximum: int,
    kind: int,
    lengths: Ids,
    addresses: Ids,
    /,
) -> bool:
    """Count the items of values, if each is stored as it is.

    Args:
        cells: N values.
        array: The type of arrays.
        dtype: Of the field.
        inner: Shape of an item.
        maximum: Items of the longest value.
        kind: ``ord`` of the first letter of the field's kind; 0 where every value must
            be looked at.
        lengths: int64 ``[N]``, written.
        addresses: int64 ``[N]``, written: where the bytes of each lie while it is held.

    Returns:
        Whether all are: contiguous arrays, `str` of text, and `bytes` or arrays of
        bytes. If not, lengths and addresses mean nothing.

    Raises:
        ValueError: Lengths or addresses are of another number of values.
    """
    if len(lengths) != len(cells) or len(addresses) != len(cells):
        raise ValueError(f"measure_values: lengths and addresses must be int64 [{len(cells)}]")
    for at, cell in enumerate(cells):
        items = _items_of(cell, array, dtype, inner, maximum, kind)
        if items < 0:
            return False
        lengths[at] = items
    return True


def _items_of(
    value: Any, array: Any, dtype: Any, inner: tuple[int, ...], maximum: int, kind: int
) -> int:
    """Items of a value that is stored as it is; -1 of any other."""
    letter = chr(kind)
    if letter == "t" and value.__class__ is str:
        try:
            items = len(value.encode())
        except UnicodeEncodeError:
            return -1
    elif (letter == "b" and value.__class__ is bytes) or (
        letter in "ab"
        and value.__class__ is array
        and value.dtype == dtype
        and value.ndim == 1 + len(inner)
        and value.shape[1:] == inner
        and value.flags.c_contiguous
    ):
        items = len(value)
    else:
        return -1
    return items if items <= maximum else -1


def bytes_of(value: Any) -> memoryview:
    """The bytes of a value that was measured."""
    if value.__class__ is str:
        return memoryview(value.encode())
    # No view of an empty array can be cast.
    return memoryview(value).cast("B") if len(value) else memoryview(b"")


def join_values(cells: Sequence[Any], out: NDArray[np.uint8], /) -> None:
    """Copy the bytes of values that were measured one after another.

    Args:
        cells: A list or tuple of them.
        out: As many bytes, written.

    Raises:
        ValueError: They are more, or fewer.
        TypeError: The values are in something else.
    """
    if cells.__class__ not in (list, tuple):
        raise TypeError("values must be in a list or tuple")
    every = [bytes_of(cell) for cell in cells]
    if sum(map(len, every)) != out.nbytes:
        raise ValueError("join_values: out must have the bytes of all values")
    done = 0
    for data in every:
        out[done : done + len(data)] = np.frombuffer(data, np.uint8)
        done += len(data)


def store_value(
    value: Any,
    array: Any,
    dtype: Any,
    inner: tuple[int, ...],
    maximum: int,
    kind: int,
    head: int,
    size: int,
    free_until: int,
    mapping: Any,
    near: int,
    far: int,
    reference: Any,
    /,
) -> int:
    """Store a value of the only environment into a heap's mapping.

    Args:
        value: Of one step.
        array: The type of arrays.
        dtype: Of the field.
        inner: Shape of an item.
        maximum: Items of the longest value.
        kind: ``ord`` of the first letter of the field's kind; 0 where every value must
            be looked at.
        head: The heap head, where the value may begin.
        size: Bytes of the heap.
        free_until: Heap positions below may be written.
        mapping: Of the heap's file.
        near: The first byte of it that may be stored into.
        far: The byte after the last one.
        reference: 16 bytes, written.

    Returns:
        The heap head after the value; -1, and nothing was stored, where the value needs
        a look, or does not go there.

    Raises:
        ValueError: The mapping has no such bytes, or there is no such heap.
    """
    if head < 0 or size < 1 or not isinstance(inner, tuple):
        raise ValueError("store_value: the place must be in a heap")
    items = _items_of(value, array, dtype, inner, maximum, kind)
    if items < 0:
        return -1
    data = bytes_of(value)
    if len(reference) != _REFERENCE.size or far > len(mapping) or far > size:
        raise ValueError("store_value: the place must be in a heap")
    nbytes = len(data)
    if not nbytes:
        reference[:] = bytes(_REFERENCE.size)
        return head
    if nbytes > size:
        return -1
    if head % size > size - nbytes:
        head += size - head % size
    offset, stop = head % size, head + nbytes + -nbytes % ALIGNMENT
    if stop > free_until or not near <= offset <= far - nbytes:
        return -1
    mapping[offset : offset + nbytes] = data
    _REFERENCE.pack_into(reference, 0, head, items, crc32c(data))
    return stop
