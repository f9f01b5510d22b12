"""A field: one array per step, and its entry in metadata.json.

Entries are read strictly, since the file may come from anywhere.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, SupportsIndex, cast

import numpy as np

from mmreplay.arguments import flag
from mmreplay.errors import SchemaError, shown
from mmreplay.schema.convert import convert
from mmreplay.schema.dtypes import canonical_name, storage_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import DTypeLike, NDArray


from mmreplay.nesting import CONTROLS
from mmreplay.schema.dtypes import DTYPES

MAX_AXES = 32
MAX_NBYTES = 2**48


@dataclass(frozen=True, slots=True, init=False)
class Field:
    """One array per step.

    Attributes:
        shape: Shape of one step's value, without step or environment axes.
        dtype: One of `DTYPES`. Given as a numpy dtype, class or string of any
            byte order, it is kept by that name; little-endian on disk.
        exact: Whether casts that could lose anything are refused.
        mutable: Whether `ReplayBuffer.write_field` may rewrite its values.
        numpy: The numpy dtype it is stored in (uint16 for bfloat16).
        nbytes: Bytes per step.

    Example:
        >>> mr.Field((84, 84), "uint8").nbytes
        7056
    """

    shape: tuple[int, ...]
    dtype: str
    exact: bool = field(default=False, kw_only=True)
    mutable: bool = field(default=False, kw_only=True)
    numpy: np.dtype[np.generic] = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    # Written out rather than generated, so that a caller may give any dtype and
    # shape that numpy would take, and a reader still finds a name and a tuple.
    def __init__(
        self,
        shape: Sequence[int],
        dtype: DTypeLike,
        *,
        exact: bool = False,
        mutable: bool = False,
    ) -> None:
        """Declare a field.

        Args:
            shape: At most 32 axes; ``()`` for a scalar. With an axis of 0 the values
                are empty, as those of a zero-size Box, and take no space.
            dtype: bool, (u)int8 to 64, float16 to 64, or ``"bfloat16"``.
            exact: Refuse casts that could lose anything.
            mutable: Let `ReplayBuffer.write_field` rewrite values.

        Raises:
            SchemaError: An axis, the dtype or the size is not storable.
        """
        axes, name = _checked_shape(shape), canonical_name(dtype)
        for option, value in (("exact", exact), ("mutable", mutable)):
            flag(f"field option {option}", value)
        if mutable and 0 in axes:
            raise SchemaError(
                f"field option mutable must be False for the shape {list(axes)}, "
                "which has no values to rewrite. Leave it out."
            )
        stored = storage_dtype(name)
        set_ = object.__setattr__
        set_(self, "shape", axes)
        set_(self, "dtype", name)
        set_(self, "exact", bool(exact))
        set_(self, "mutable", bool(mutable))
        set_(self, "numpy", stored)
        set_(self, "nbytes", _checked_nbytes(axes, stored.itemsize))

    def convert(
        self, value: object, path: str, lead: tuple[int, ...]
    ) -> NDArray[np.generic]:
        """Validate one incoming value and cast it to this field.

        Args:
            value: Array, scalar, list or torch tensor ``[*lead, *shape]``. For a
                bfloat16 field uint16 arrays are its bits.
            path: The field's path, as messages name it.
            lead: Leading axes, such as environments.

        Returns:
            Array of dtype `numpy` ``[*lead, *shape]``; the argument or its memory
            where nothing is to be cast.

        Raises:
            SchemaError: Its shape differs, or the cast could lose what was not
                meant to be lost.
        """
        if (
            type(value) is np.ndarray
            and value.dtype == self.numpy
            and value.shape == lead + self.shape
        ):
            return value
        return convert(self, value, path, lead)


def _checked_shape(shape: Iterable[object]) -> tuple[int, ...]:
    try:
        parts: tuple[object, ...] = tuple(shape)
        if any(isinstance(part, bool | np.bool_) for part in parts):
            raise TypeError
        axes = tuple(operator.index(cast("SupportsIndex", part)) for part in parts)
    except TypeError:
        raise SchemaError(
            f"field shape must be a tuple of integers, got {shown(shape)}. Write (3,) "
            "for a vector of 3 and () for a scalar."
        ) from None
    if len(axes) > MAX_AXES:
        raise SchemaError(
            f"field shape must have at most {MAX_AXES} axes, got {len(axes)}. Merge "
            "some of them."
        )
    if any(axis < 0 for axis in axes):
        raise SchemaError(
            f"field shape must have axes of at least 0, got {list(axes)}. Check the "
            "shape."
        )
    return axes


def _checked_nbytes(shape: tuple[int, ...], itemsize: int) -> int:
    # In Python integers: numpy's product wraps around.
    nbytes = itemsize
    for axis in shape:
        nbytes *= axis
    if nbytes >= MAX_NBYTES:
        raise SchemaError(
            f"field shape must take fewer than {MAX_NBYTES} bytes per step, got "
            f"{list(shape)}, which takes {nbytes}. Check the shape."
        )
    return nbytes


_KEYS = ("name", "dtype", "shape", "exact", "mutable")


def field_to_json(path: str, field: Field) -> dict[str, object]:
    """Return one field as a JSON object; see `Schema.to_json`."""
    return {
        "name": path,
        "dtype": field.dtype,
        "shape": list(field.shape),
        "exact": field.exact,
        "mutable": field.mutable,
    }


def field_from_json(entry: object) -> tuple[str, Field]:
    """Return path and field of an object that `field_to_json` made.

    Raises:
        SchemaError: A key is missing or unknown, or a value of the wrong type.
    """
    if not isinstance(entry, dict):
        raise _refused("entry", entry, "an object")
    if set(entry) != set(_KEYS):
        raise _refused("keys", sorted(map(str, entry)), f"exactly {sorted(_KEYS)}")
    name, dtype, shape = entry["name"], entry["dtype"], entry["shape"]
    if type(name) is not str:
        raise _refused("name", name, "a string")
    if CONTROLS.search(name):
        raise _refused("name", name, "one without control characters")
    if type(dtype) is not str or dtype not in DTYPES:
        raise _refused(f"dtype of {name!r}", dtype, f"one of {', '.join(DTYPES)}")
    if (
        type(shape) is not list
        or len(shape) > MAX_AXES
        or any(type(axis) is not int for axis in shape)
    ):
        raise _refused(f"shape of {name!r}", shape, "a list of at most 32 integers")
    for option in ("exact", "mutable"):
        if type(entry[option]) is not bool:
            raise _refused(f"{option} of {name!r}", entry[option], "true or false")
    return name, Field(shape, dtype, exact=entry["exact"], mutable=entry["mutable"])


def _refused(what: str, got: object, expected: str) -> SchemaError:
    text = repr(got)
    text = text if len(text) <= 80 else text[:80] + "…"
    return SchemaError(
        f"schema field {what} must be {expected}, got {text}. This version of "
        "mmreplay did not write the file."
    )
