"""Values of conditions on episodes: exact integers, truths that may be unknown, texts.

Integers stay integers: no comparison rounds them, and a result beyond int64 is refused.
NaN is unknown, as NULL is in SQL: a comparison with it is neither true nor false, and
``and``, ``or`` and ``not`` are unknown only where it could change their answer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.ragged import Ragged

Number = Any
"""An array, or a Python number that was written out."""
Bools = NDArray[np.bool_]
Operation = Callable[[Any, Any], Any]

INT64 = np.iinfo(np.int64)
EXACT = 1 << 53
"""Integers up to here are exact in float64."""


class BeyondInt64(Exception):
    """A result does not fit int64; ``where`` is the index of the first such row."""

    def __init__(self, where: int | None = None) -> None:
        """Note where."""
        super().__init__()
        self.where = where


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true, and what is not known.

    Attributes:
        true: bool, of any shape.
        unknown: bool of the same shape; never where it is true. None: nothing is.
    """

    true: Bools
    unknown: Bools | None = None

    @classmethod
    def of(cls, true: Any, unknown: Any = None) -> Truth:
        """A truth of arrays that broadcast; what is unknown is not true."""
        true = np.asarray(true, bool)
        if unknown is None or not np.any(unknown):
            return cls(true)
        true, unknown = np.broadcast_arrays(true, np.asarray(unknown, bool))
        return cls(true & ~unknown, unknown)

    @property
    def false(self) -> Bools:
        """What is known not to be true."""
        return ~self.true if self.unknown is None else ~(self.true | self.unknown)

    def __invert__(self) -> Truth:
        return Truth(self.false, self.unknown)

    def __and__(self, other: Truth) -> Truth:
        true = self.true & other.true
        if self.unknown is None and other.unknown is None:
            return Truth(true)
        return Truth.of(true, ~(true | self.false | other.false))

    def __or__(self, other: Truth) -> Truth:
        return ~(~self & ~other)


def as_int64(value: Number) -> Number:
    """An integer or bool as int64, for arithmetic.

    Raises:
        BeyondInt64: One is larger.
    """
    if isinstance(value, bool | int):
        if not INT64.min <= value <= INT64.max:
            raise BeyondInt64
        return np.int64(value)
    if value.dtype == np.uint64:
        _refuse(value > INT64.max)
    return value.astype(np.int64)


def as_float64(value: Number) -> Any:
    """A number as float64, rounded where it is an integer above 2^53."""
    return np.asarray(value, np.float64)


def computed(operation: Operation, left: Number, right: Number) -> Any:
    """An operation of two integers, exact.

    Args:
        operation: ``add``, ``sub``, ``mul``, ``floordiv`` or ``mod`` of `operator`.
        left: Integers.
        right: Integers; above 0 for the last two.

    Raises:
        BeyondInt64: A result, or a number, does not fit int64.
    """
    left, right = as_int64(left), as_int64(right)
    with np.errstate(over="ignore"):
        result = operation(left, right)
    if operation is operator.add:
        _refuse(((left ^ result) & (right ^ result)) < 0)
    elif operation is operator.sub:
        _refuse(((left ^ right) & (left ^ result)) < 0)
    elif operation is operator.mul:
        large = np.abs(as_float64(left) * as_float64(right)) >= 2.0**62
        if np.any(large):
            # Python's integers decide where float64 may have rounded.
            product = np.frompyfunc(operator.mul, 2, 1)
            exact = product(*(np.asarray(each).astype(object) for each in (left, right)))
            _refuse(np.asarray((exact > INT64.max) | (exact < INT64.min), bool))
    return result


def _refuse(beyond: Any) -> None:
    """Raise where a result is beyond int64.

    Args:
        beyond: bool ``[N, ...]``, or a scalar.
    """
    if np.any(beyond):
        array = np.asarray(beyond)
        raise BeyondInt64(int(np.argwhere(array)[0][0]) if array.ndim else None)


def compared(operation: Operation, left: Number, right: Number) -> Truth:
    """Compare numbers, exactly: an integer beside a float too, as Python does.

    Args:
        operation: One of the six comparisons of `operator`.
        left: Integers, or floats.
        right: Likewise.
    """
    floats = [_is_float(left), _is_float(right)]
    if not any(floats):
        return Truth.of(operation(left, right))
    unknown: Any = False
    for number, is_float in zip((left, right), floats, strict=True):
        if is_float:
            unknown = unknown | np.isnan(number)
    integers = [number for number, real in zip((left, right), floats, strict=True) if not real]
    with np.errstate(invalid="ignore"):
        if all(np.all(_magnitude(number) <= EXACT) for number in integers):
            return Truth.of(operation(as_float64(left), as_float64(right)), unknown)
        exact = np.frompyfunc(operation, 2, 1)
        both = (np.asarray(number).astype(object) for number in (left, right))
        return Truth.of(exact(*both), unknown)


def _is_float(value: Number) -> bool:
    return isinstance(value, float) or getattr(value, "dtype", np.dtype(bool)).kind == "f"


def _magnitude(value: Number) -> Any:
    """Absolute values; of the least int64 a float."""
    if isinstance(value, int):
        return abs(value)
    return np.abs(value.astype(np.float64)) if value.dtype == np.int64 else value


def listed(value: Number, items: Iterable[float]) -> Truth:
    """Which numbers are among some, by value.

    Args:
        value: Integers, or floats.
        items: Python numbers.
    """
    if isinstance(value, int | float):
        return Truth.of(any(value == item for item in items))
    value = np.asarray(value)
    if value.dtype.kind == "f":
        # What float64 does not hold exactly equals none of its values.
        exact = {float(item) for item in items if item == float(item)}
        among = np.isin(value.astype(np.float64), np.array(sorted(exact)))
        return Truth.of(among, np.isnan(value))
    if value.dtype == bool:
        value = value.astype(np.int64)
    limits = np.iinfo(value.dtype)
    whole = {int(item) for item in items if item == int(item)}
    known = sorted(item for item in whole if limits.min <= item <= limits.max)
    return Truth.of(np.isin(value, np.array(known, value.dtype)))


def same_text(one: Ragged | bytes, other: Ragged | bytes) -> Bools:
    """Which texts are equal, byte by byte, bool ``[N]`` or a scalar."""
    if isinstance(one, bytes) and isinstance(other, bytes):
        return np.asarray(one == other)
    texts = cast("Ragged", other if isinstance(one, bytes) else one)
    beside = one if isinstance(one, bytes) else other
    literal = np.frombuffer(beside, np.uint8) if isinstance(beside, bytes) else None
    nbytes = texts.lengths
    same: Bools = nbytes == (cast("Ragged", beside).lengths if literal is None else len(literal))
    rows = np.flatnonzero(same & (nbytes > 0))
    if not len(rows):
        return same
    some: Ragged = texts[rows]
    if literal is None:
        differs = some.values != cast("Ragged", beside)[rows].values
    else:
        differs = some.values != np.tile(literal, len(rows))
    same[rows] = ~np.logical_or.reduceat(differs, some.offsets[:-1])
    return same


def rounded(number: float, dtype: str) -> float:
    """A number that was written, as a field of a narrow dtype holds it.

    Beyond the dtype's range it stays as it was written.

    Args:
        number: Finite.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    """
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            narrow = float(np.dtype(dtype).type(number))
            return narrow if np.isfinite(narrow) else number
        # To the nearest of 8 bits, ties to even, straight from float64: by way of
        # float32 it would be rounded twice.
        mantissa, exponent = np.frexp(number)
        step = max(int(exponent) - 8, -133)
        narrow = float(np.ldexp(np.round(np.ldexp(number, -step)), step))
        return narrow if mantissa and abs(narrow) < 2.0**128 else number
