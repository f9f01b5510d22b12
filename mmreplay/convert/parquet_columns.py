"""Fields as Arrow columns that others read, and Arrow columns as fields.

Single values are columns of their own type. Vectors of floats, of wide integers and of
bools are lists of one length, row-major. Everything else, images above all, is bytes of
one length: parquet has no integers below 32 bits, so that lists of them would take four
times the room and twenty times the time.
"""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmreplay.errors import SchemaError
from mmreplay.schema.dtypes import DTYPES, storage_dtype

Vectors = Literal["auto", "list", "binary"]
MAX_LIST_VALUES = 1024
NARROW = {"int8", "int16", "uint8", "uint16", "bfloat16"}
TYPES = {
    name: pa.from_numpy_dtype(storage_dtype(name))
    for name in DTYPES
    if name != "bfloat16"
}
ITEM = "element"
"""What parquet calls the values of a list."""


def check_vectors(vectors: str) -> None:
    """Refuse what is no way to write vectors.

    Raises:
        SchemaError: It is none.
    """
    if vectors not in get_args(Vectors):
        raise SchemaError(
            f"vectors: got {vectors!r}, expected one of {', '.join(get_args(Vectors))};"
            " leave it out for auto"
        )


def column_of(name: str, dtype: str, shape: tuple[int, ...], vectors: str) -> Any:
    """The Arrow field that holds a field.

    Args:
        name: The column's.
        dtype: The field's; bfloat16 becomes uint16 of the same bits.
        shape: The field's.
        vectors: ``"list"`` or ``"binary"`` for all that have a shape; ``"auto"`` takes
            lists for short ones of types that parquet has.
    """
    count = int(np.prod(shape, dtype=object))
    if not count:
        # Arrow divides by the number of values of a list.
        raise SchemaError(
            f"field {name!r}: got the shape {list(shape)}, expected at least one value "
            "a row, as parquet keeps no empty ones; leave it out with fields=, or "
            "export to npz"
        )
    item = TYPES["uint16" if dtype == "bfloat16" else dtype]
    told = {"dtype": dtype, "shape": json.dumps(list(shape))}
    if not shape:
        kind = item
    elif vectors == "list" or (
        vectors == "auto" and dtype not in NARROW and count <= MAX_LIST_VALUES
    ):
        kind = pa.list_(pa.field(ITEM, item, nullable=False), count)
    else:
        kind = pa.binary(count * storage_dtype(dtype).itemsize)
    return pa.field(name, kind, nullable=False, metadata=told)


def encode(column: NDArray[np.generic], kind: Any) -> Any:
    """A column ``[N, *shape]`` as an Arrow array that shares nothing with it."""
    whole = np.array(column, order="C")
    if pa.types.is_fixed_size_binary(kind):
        held = [None, pa.py_buffer(whole)]
        return pa.FixedSizeBinaryArray.from_buffers(kind, len(whole), held)
    if pa.types.is_fixed_size_list(kind):
        values = pa.array(whole.reshape(-1), kind.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    return pa.array(whole, kind)


def decode(array: Any, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """An Arrow array without nulls as a column ``[N, *shape]``; may be read-only.

    The array's type must hold shape, as `fits` and `kind_of` say.
    """
    stored = storage_dtype(dtype)
    count = len(array)
    array = _storage(array)
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        begin = array.offset * width
        raw = np.frombuffer(array.buffers()[1], np.uint8, count * width, begin)
        # Any byte but 0 and 1 is no bool.
        values = raw != 0 if stored.kind == "b" else raw.view(stored)
        return values.reshape(count, *shape)
    while _is_list(array.type):
        # Unlike `values`, it knows where a slice of a longer array begins.
        array = _storage(array.flatten())
    found: NDArray[np.generic] = array.to_numpy(zero_copy_only=False)
    return found.reshape(count, *shape)


def fits(kind: Any, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether arrays of an Arrow type hold a field, one value a row."""
    count = int(np.prod(shape, dtype=object))
    kind = _stored_type(kind)
    if pa.types.is_fixed_size_binary(kind):
        nbytes = count * storage_dtype(dtype).itemsize
        return bool(shape) and bool(kind.byte_width == nbytes)
    size = 1
    lists = False
    while pa.types.is_fixed_size_list(kind):
        size *= kind.list_size
        kind, lists = kind.value_type, True
    item = TYPES["uint16" if dtype == "bfloat16" else dtype]
    return bool(kind == item and size == count and lists == bool(shape))


def kind_of(array: Any) -> tuple[str, tuple[int, ...]] | None:
    """Dtype name and row shape that an array's rows have, or None for no field.

    Args:
        array: The first rows of a column. Lists of any length are taken to have that
            of the first row everywhere, which `lengths_differ` checks.
    """
    kind, shape = array.type, []
    if isinstance(kind, pa.FixedShapeTensorType):
        named = _name_of(kind.value_type)
        turned = kind.permutation not in (None, list(range(len(kind.shape))))
        return None if named is None or turned else (named, tuple(kind.shape))
    array = _storage(array)
    if pa.types.is_fixed_size_binary(array.type):
        return "uint8", (array.type.byte_width,)
    while _is_list(array.type):
        shape.append(_first_length(array))
        array = _storage(array.flatten())
    named = _name_of(array.type)
    return None if named is None or 0 in shape else (named, tuple(shape))


def lengths_differ(array: Any, shape: tuple[int, ...]) -> int | None:
    """The first row whose lists are not of the lengths that shape says, if any."""
    rows = len(array)
    if not _is_list(array.type):
        # Tensors too, whose type says how long they are.
        return None
    share = 1
    for axis in shape:
        found = _lengths(array)
        if (found != axis).any():
            return min(int(np.argmax(found != axis)) // share, rows - 1)
        share *= axis
        array = _storage(array.flatten())
    return None


def has_nulls(array: Any) -> bool:
    """Whether a row, or a value in one, is missing."""
    array = _storage(array)
    while _is_list(array.type):
        if array.null_count:
            return True
        array = _storage(array.flatten())
    return bool(array.null_count)


def filled(array: Any) -> Any:
    """Single floats with NaN where they are missing; anything else as it is."""
    if pa.types.is_floating(array.type) and array.null_count:
        return array.fill_null(pa.scalar(float("nan"), array.type))
    return array


def is_variable(kind: Any) -> bool:
    """Whether rows of a type may differ in length."""
    kind = _stored_type(kind)
    while _is_list(kind):
        if not pa.types.is_fixed_size_list(kind):
            return True
        kind = kind.value_type
    return False


def holds_numbers(kind: Any) -> bool:
    """Whether a type is numbers, lists of them, or bytes of one length."""
    kind = _stored_type(kind)
    while _is_list(kind):
        kind = _stored_type(kind.value_type)
    return pa.types.is_fixed_size_binary(kind) or _name_of(kind) is not None


def no_rows(kind: Any) -> Any:
    """An array of a type without rows: enough where the type says all there is."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(pa.array([], kind.storage_type))
    return pa.array([], kind)


def _stored_type(kind: Any) -> Any:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(array: Any) -> Any:
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_fixed_size_list(kind)
        or pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
    )


def _lengths(array: Any) -> NDArray[np.int64]:
    if pa.types.is_fixed_size_list(array.type):
        return np.full(len(array), array.type.list_size)
    found: NDArray[np.int64] = array.value_lengths().to_numpy(zero_copy_only=False)
    return found


def _first_length(array: Any) -> int:
    found = _lengths(array[:1])
    return int(found[0]) if len(found) and found[0] == found[0] else 0


def _name_of(kind: Any) -> str | None:
    for name, each in TYPES.items():
        if kind == each:
            return name
    return None
