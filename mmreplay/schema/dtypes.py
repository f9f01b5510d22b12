"""Names of the dtypes a field may have, and how each is kept in bytes.

bfloat16 is the one that numpy lacks: its name stands in the schema, its bits
(the upper half of a float32) in uint16.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mmreplay.errors import SchemaError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_STORED = {
    "bool": "|b1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "bfloat16": "<u2",
}

DTYPES = tuple(_STORED)
"""Every name a field's dtype may have."""

# Why a dtype that numpy knows cannot be a field's, by its kind, as a way out.
WAYS_OUT = {
    "c": "Store the real and imaginary parts along a trailing axis of 2",
    "O": "Store numbers, or text and bytes by Field.text and Field.bytes",
    "U": "Store text in a field declared by Field.text",
    "T": "Store text in a field declared by Field.text",
    "S": "Store bytes in a field declared by Field.bytes",
    "V": "Store each member as a field of its own",
    "M": "Store it as int64 by .astype('int64')",
    "m": "Store it as int64 by .astype('int64')",
}


def storage_dtype(name: str) -> np.dtype[np.generic]:
    """Little-endian numpy dtype that a field of this dtype is kept in.

    Args:
        name: One of `DTYPES`; bfloat16 is kept in uint16.

    Raises:
        SchemaError: It is none of them.
    """
    try:
        return np.dtype(_STORED[name])
    except (KeyError, TypeError):
        raise SchemaError(f"field dtype must be one of {', '.join(DTYPES)}, got {name!r}") from None


def canonical_name(dtype: object) -> str:
    """Name in `DTYPES` of a dtype of numpy or torch, a Python type or a string.

    The byte order does not count. Python's bool, int and float are bool, int64 and
    float64, as for numpy; ``torch.float32`` is float32.

    Raises:
        SchemaError: It is no dtype, or one that a field cannot have.
    """
    if isinstance(dtype, str) and dtype in _STORED:
        return dtype
    # By its name: torch is not imported for it.
    own = type(dtype)
    if own.__module__ == "torch" and own.__qualname__ == "dtype":
        name = str(dtype).removeprefix("torch.")
        if name in _STORED:
            return name
        kind = "c" if "complex" in name else ""
        raise SchemaError(
            f"field dtype must be one of {', '.join(DTYPES)}, got {dtype}. "
            f"{WAYS_OUT.get(kind, 'Use one of them')}."
        )
    try:
        # numpy reads None as float64.
        known = None if dtype is None else np.dtype(dtype)  # type: ignore[call-overload]  # any object may come; numpy refuses what is none
    except (TypeError, ValueError):
        known = None
    if known is not None and known.name in _STORED:
        return str(known.name)
    is_text = known is not None and known.kind in "US" and isinstance(dtype, str)
    got = shown(dtype) if known is None or is_text else known
    way_out = WAYS_OUT.get(known.kind if known is not None else "", "Use one of them")
    if isinstance(dtype, str) and dtype.lower() in ("jpeg", "jpg", "png"):
        way_out = "Declare images by Field.image (of plan: NAME:jpeg:480x640x3)"
    raise SchemaError(f"field dtype must be one of {', '.join(DTYPES)}, got {got}. {way_out}.")


def describe(dtype: str, shape: tuple[int, ...]) -> str:
    """A dtype and shape as messages show them: ``uint8[84, 84]``."""
    return f"{dtype}{list(shape)}"


def array_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of an array of a dtype in `DTYPES`, as Python's integer: any size fits."""
    return math.prod(shape, start=storage_dtype(dtype).itemsize)


def bfloat16_bits(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16 of each value, ties to even.

    Args:
        values: float16, float32 or float64 ``[*shape]``.

    Returns:
        uint16 ``[*shape]``. NaN stays NaN with its sign; what is too large is
        infinity.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.asarray(values).astype(np.float32)
    bits = np.atleast_1d(single).view(np.uint32)
    if values.dtype.itemsize > 4:
        bits = _to_odd(bits, np.atleast_1d(values))
    # Half of the lower 16 bits' unit, less one where the upper half is even.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 0x40
    nan = np.isnan(np.atleast_1d(values))
    return np.where(nan, quiet, rounded).astype(np.uint16).reshape(values.shape)


def from_bfloat16_bits(bits: NDArray[np.generic]) -> NDArray[np.float32]:
    """Values of bits of bfloat16, exactly; float32 of the same shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_odd(bits: NDArray[np.uint32], values: NDArray[np.floating]) -> NDArray[np.uint32]:
    # Rounding float64 to float32 and that to bfloat16, each to nearest, can miss
    # the nearest by one. Rounded to odd first (towards zero, the last bit set
    # where anything was lost), the second rounding sees on which side it stood.
    wide = bits.view(np.float32).astype(values.dtype)
    beyond = (np.abs(wide) > np.abs(values)).astype(np.uint32)
    lost = ((wide != values) & ~np.isnan(values)).astype(np.uint32)
    odd: NDArray[np.uint32] = (bits - beyond) | lost
    return odd
