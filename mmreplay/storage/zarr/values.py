"""The chunks of values that vary: Zarr's codecs ``vlen-utf8`` and ``vlen-bytes``.

Both have one layout: the number of rows, and for each row the number of its bytes and
the bytes. Numbers are little-endian uint32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.schema import Field

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]

NUMBER_NBYTES = 4
MAX_NBYTES = (1 << 31) - (1 << 16)
"""The longest value, whose chunk Blosc can still pack."""
DATA_TYPES = {"text": "string", "bytes": "variable_length_bytes", "array": "variable_length_bytes"}
"""Zarr's data type of a field's array, by the field's kind."""

_copies = kernels.load("copies")


@dataclass(frozen=True, slots=True)
class ValueChunk:
    """The values of a chunk's rows.

    Attributes:
        data: uint8, one value after another.
        offsets: int64 ``[N + 1]``, where each begins in it, and where the last ends.
    """

    data: Bytes
    offsets: Ids

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        return self.data.nbytes + self.offsets.nbytes


def max_nbytes(field: Field) -> int:
    """Bytes of the longest value of a field that varies."""
    assert field.max_length is not None
    return field.max_length * field.inner_nbytes


def max_chunk_nbytes(field: Field, rows: int) -> int:
    """Bytes of the longest chunk of so many rows."""
    return NUMBER_NBYTES + rows * (NUMBER_NBYTES + max_nbytes(field))


def encode(data: Bytes, begins: Ids, nbytes: Ids) -> Bytes:
    """Lay out the chunk of some rows.

    Args:
        data: uint8, which holds their values.
        begins: int64 ``[N]``, the first byte of each in it.
        nbytes: int64 ``[N]``, the bytes of each.
    """
    ends = np.cumsum(nbytes + NUMBER_NBYTES) + NUMBER_NBYTES
    targets = ends - nbytes
    chunk = np.zeros(int(ends[-1]), np.uint8)
    chunk[:NUMBER_NBYTES] = _numbers([len(nbytes)])[0]
    places = (targets - NUMBER_NBYTES)[:, None] + np.arange(NUMBER_NBYTES)
    chunk[places] = _numbers(nbytes)
    _copies.copy_spans(data, begins, nbytes, chunk, targets, False)
    return chunk


def _numbers(values: Ids | list[int]) -> Bytes:
    """The bytes of numbers, uint8 ``[N, 4]``."""
    return np.array(values, "<u4").view(np.uint8).reshape(-1, NUMBER_NBYTES)


def text_nbytes(data: Bytes, begins: Ids, nbytes: Ids) -> Ids:
    """Bytes of each text to be stored, int64 ``[N]``: 0 of one that is no UTF-8.

    Its chunk could not be read by anyone. With another length than its reference says
    it is damage by itself, and the texts beside it are whole.

    Args:
        data: uint8, which holds the texts, as they lie on a disk.
        begins: int64 ``[N]``, the first byte of each in it.
        nbytes: int64 ``[N]``, the bytes of each.
    """
    stored, view = nbytes.copy(), data.data
    for at, begin in enumerate(begins.tolist()):
        try:
            str(view[begin : begin + int(nbytes[at])], "utf-8")
        except UnicodeDecodeError:
            stored[at] = 0
    return stored


def decode(chunk: Bytes, rows: int, field: Field) -> ValueChunk:
    """Take a chunk apart, from a file of unknown origin.

    Args:
        chunk: Its bytes, unpacked.
        rows: How many it must hold.
        field: What the values are of.

    Raises:
        ValueError: It is no such chunk.
    """
    view, size = chunk.data, len(chunk)
    count = int.from_bytes(view[:NUMBER_NBYTES], "little")
    if size < NUMBER_NBYTES or count != rows:
        raise ValueError(f"it says {count} values, not {rows}")
    begins = []
    at, longest, item = NUMBER_NBYTES, max_nbytes(field), field.inner_nbytes
    sizes = []
    for row in range(rows):
        begin = at + NUMBER_NBYTES
        nbytes = int.from_bytes(view[at:begin], "little")
        if begin + nbytes > size:
            raise ValueError(f"value {row} of {nbytes} bytes ends behind the chunk")
        if nbytes > longest or nbytes % item:
            raise ValueError(
                f"value {row} has {nbytes} bytes, which is no number of items of "
                f"{item} bytes up to {longest}"
            )
        begins.append(begin)
        sizes.append(nbytes)
        at = begin + nbytes
    if at != size:
        raise ValueError(f"{size - at} bytes follow the last value")
    lengths = np.array(sizes, np.int64)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data = np.empty(int(offsets[-1]), np.uint8)
    _copies.copy_spans(chunk, np.array(begins, np.int64), lengths, data, offsets[:-1], False)
    if field.kind == "text":
        _check_text(data, offsets)
    return ValueChunk(data, offsets)


def _check_text(data: Bytes, offsets: Ids) -> None:
    """Refuse values that are not UTF-8, each by itself.

    Raises:
        ValueError: One is not.
    """
    # UTF-8 as a whole, and no value begins inside of a character.
    data.tobytes().decode("utf-8")
    begins = offsets[:-1][offsets[:-1] < len(data)]
    if ((data[begins] & 0xC0) == 0x80).any():
        raise ValueError("a value begins inside of a character of UTF-8")
