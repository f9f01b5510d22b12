"""Checks and conversions that several transforms share."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import SchemaError, shown
from mmreplay.schema import Field


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, numpy's and NaN included."""
    real = isinstance(value, int | float | np.integer | np.floating)
    return real and not isinstance(value, bool)


def whole(name: str, value: object, least: int) -> int:
    """An integer argument.

    Raises:
        SchemaError: It is none, or less than the least.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise SchemaError(f"{name}: got {shown(value)}, expected an integer; give one")
    if value < least:
        raise SchemaError(f"{name}: got {value}, expected at least {least}; give more")
    return int(value)


def fraction(name: str, value: object) -> float:
    """A number in [0, 1].

    Raises:
        SchemaError: It is none.
    """
    if not is_number(value) or not 0 <= value <= 1:
        raise SchemaError(
            f"{name}: got {shown(value)}, expected a number in [0, 1]; give another"
        )
    return float(value)


def number(name: str, value: object) -> None:
    """Refuse what is no number; NaN is one.

    Raises:
        SchemaError: It is none.
    """
    if not is_number(value):
        raise SchemaError(f"{name}: got {shown(value)}, expected a number; such as 0.0")


def label(name: str, value: object) -> None:
    """Refuse what cannot name a field.

    Raises:
        SchemaError: It is no text, or empty.
    """
    if not isinstance(value, str) or not value:
        raise SchemaError(
            f"{name}: got {shown(value)}, expected the name of a field; leave it "
            "out for the default"
        )


def numbers(values: NDArray[np.generic], field: Field) -> NDArray[np.generic]:
    """Values that numpy can reckon with: bfloat16 is stored as its bits."""
    if field.dtype != "bfloat16":
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)


def real(field: Field) -> Field:
    """A field for real numbers as exact as another's: at least float32."""
    wide = field.dtype in ("float64", "int32", "int64", "uint32", "uint64")
    return Field(field.shape, "float64" if wide else "float32")
