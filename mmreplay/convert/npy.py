"""Headers of npy arrays, written as numpy writes them and parsed without it.

numpy's own parser evaluates a Python literal, and lets its errors through.
"""

from __future__ import annotations

import ast
import struct
from dataclasses import dataclass

import numpy as np

from mmreplay.convert.zip_layout import ALIGNMENT
from mmreplay.errors import FormatError

MAGIC = b"\x93NUMPY"
MAX_NBYTES = 16 << 10
MAX_AXES = 64
MAX_AXIS = 1 << 48


@dataclass(frozen=True, slots=True)
class Header:
    """What an npy header says.

    Attributes:
        dtype: Of any byte order.
        shape: Of the array.
        columns_first: The array lies in Fortran order.
        nbytes: Bytes of the header itself.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    columns_first: bool
    nbytes: int

    @property
    def data_nbytes(self) -> int:
        """Bytes of the array, in Python's integers, which do not wrap."""
        nbytes = self.dtype.itemsize
        for axis in self.shape:
            nbytes *= axis
        return nbytes


def encode(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    """The header of a C-order array, a multiple of 64 bytes."""
    axes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({axes}), }}"
    bare = len(MAGIC) + 4 + len(text) + 1
    text += " " * (-bare % ALIGNMENT) + "\n"
    return MAGIC + struct.pack("<2BH", 1, 0, len(text)) + text.encode("ascii")


def prefix_nbytes(data: bytes, what: str) -> int:
    """Bytes of a whole header, from its first 12.

    Raises:
        FormatError: It is none, or too large.
    """
    if len(data) < 12 or data[:6] != MAGIC or data[6] not in (1, 2, 3):
        raise FormatError(
            f"{what} begins with {data[:8]!r}, expected an npy header of version 1 to 3"
        )
    short = data[6] == 1
    (size,) = struct.unpack_from("<H" if short else "<I", data, 8)
    total = int(size) + (10 if short else 12)
    if total > MAX_NBYTES:
        raise FormatError(
            f"{what} has an npy header of {total} bytes, expected at most {MAX_NBYTES}"
        )
    return total


def parse(data: bytes, what: str) -> Header:
    """What a whole header says.

    Args:
        data: Exactly its bytes.
        what: What to call it in errors: file, member and offset.

    Raises:
        FormatError: It is no npy header, or one of Python objects.
    """
    start = 10 if data[6] == 1 else 12
    try:
        value = ast.literal_eval(data[start:].decode("latin-1").strip())
        descr, order, shape = (
            value[key] for key in ("descr", "fortran_order", "shape")
        )
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        raise FormatError(
            f"{what} has an npy header that is no description of an array: "
            f"{data[start : start + 60]!r}"
        ) from None
    if type(order) is not bool or not _is_shape(shape):
        raise FormatError(
            f"{what} says shape {str(shape)[:80]} and fortran_order {str(order)[:20]}, "
            "expected a tuple of sizes, and True or False"
        )
    return Header(_dtype(descr, what), shape, order, len(data))


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, tuple)
        and len(shape) <= MAX_AXES
        and all(type(axis) is int and 0 <= axis < MAX_AXIS for axis in shape)
    )


def _dtype(descr: object, what: str) -> np.dtype[np.generic]:
    try:
        # A list is a record's, which no field can be; "object" would be pickled.
        dtype = np.dtype(descr) if isinstance(descr, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.hasobject or dtype.itemsize == 0:
        raise FormatError(
            f"{what} holds {str(descr)[:60]!r}, expected numbers; objects, records and "
            "pickles are refused: save plain arrays"
        )
    return dtype
