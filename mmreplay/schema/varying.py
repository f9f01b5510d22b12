"""What values a field that varies accepts, and how they are put together.

An array field takes arrays, tensors and lists, by the rules of `convert`; text takes
`str`, and bytes that are UTF-8; bytes take anything that holds bytes. Several values
come as a list or tuple of them, as `Ragged`, as a jagged tensor, or as one array where
all have one length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay import kernels
from mmreplay.errors import SchemaError, shown
from mmreplay.ragged import Ragged
from mmreplay.schema.convert import as_numpy, convert
from mmreplay.schema.dtypes import from_bfloat16_bits

if TYPE_CHECKING:
    from mmreplay.kernels.rows import RowsKernel
    from mmreplay.schema.field import Field

_rows = cast("RowsKernel", kernels.load("rows"))
BYTES = (bytes, bytearray, memoryview)
KIND_WAYS_OUT = {"text": "Pass a str.", "bytes": "Pass bytes."}
"""What to do by the kind of field."""


def convert_varying(field: Field, value: object, path: str, lead: tuple[int, ...]) -> Ragged:
    """Validate incoming values of a field that varies, and put them together.

    Args:
        field: One that varies.
        value: One value for each place of the leading axes, nested as they are; of
            none, the value.
        path: The field's path, as messages name it.
        lead: Leading axes, such as environments, or steps and environments.

    Returns:
        Values of the field's `numpy` dtype, C-contiguous, of shape `lead`; their memory
        may be that of the argument.

    Raises:
        SchemaError: A value is too long, has another shape, holds what the dtype does
            not, or is no UTF-8; or there are more or fewer of them.
    """
    if getattr(value, "is_nested", False):
        value = _jagged(value)
    if isinstance(value, Ragged):
        return _of_ragged(field, value, path, lead)
    if not lead:
        items = _items(field, value, path, "")
        offsets = np.array([0, len(items)], np.int64)
        return Ragged(np.ascontiguousarray(items), offsets, ())
    if _axes(value) == len(lead) + 1 + len(field.inner):
        # One array, or what makes one: its values have one length.
        array, brain = as_numpy(value, path)
        if array.dtype != object:
            return _of_array(field, array, brain, path, lead)
    cells = _cells(value, path, lead)
    values: NDArray[Any]
    if field.kind == "text" and all(type(cell) is str for cell in cells):
        try:
            encoded = [cell.encode() for cell in cells]
        except UnicodeEncodeError:
            encoded = [_encoded(cell, path, location_of(lead, n)) for n, cell in enumerate(cells)]
        lengths = list(map(len, encoded))
        values = np.frombuffer(b"".join(encoded), np.uint8)
    else:
        if field.kind == "text" or not all(_plain(field, cell) for cell in cells):
            cells = [
                _items(field, cell, path, location_of(lead, n)) for n, cell in enumerate(cells)
            ]
        lengths = list(map(len, cells))
        empty = np.empty((0, *field.inner), field.numpy)
        values = np.concatenate([empty, *cells])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    _check_lengths(field, offsets, path, lead)
    return Ragged(values, offsets, lead)


@dataclass(frozen=True, slots=True, eq=False)
class ValueList:
    """Values of a field that varies as they were given, where each is stored so.

    Attributes:
        values: N contiguous arrays, `str` of text, or `bytes`.
        offsets: int64 ``[N + 1]``, the items before each, and of all.
        addresses: int64 ``[N]``, where the bytes of each lie: they stay there while
            `values` holds it.
        shape: ``(T, E)``.
    """

    values: tuple[Any, ...]
    offsets: NDArray[np.int64]
    addresses: NDArray[np.int64]
    shape: tuple[int, ...]

    def __len__(self) -> int:
        """Length of the first axis."""
        return self.shape[0]

    def joined(self, field: Field) -> Ragged:
        """Put them together, one after another in memory of their own."""
        items = np.empty((int(self.offsets[-1]), *field.inner), field.numpy)
        _rows.join_values(self.values, items.reshape(-1).view(np.uint8))
        return Ragged(items, self.offsets, self.shape)


def list_plain(field: Field, values: object, num_envs: int) -> ValueList | None:
    """Return values that are stored as they are; None where one needs a look.

    Args:
        field: What they are of.
        values: One for each of T steps, or a list for each step, if they are in a list
            or tuple.
        num_envs: Values of a step, in a list or tuple of their own where they are more
            than one.
    """
    if type(values) is not list and type(values) is not tuple:
        return None
    if num_envs > 1:
        if not all(type(step) in (list, tuple) and len(step) == num_envs for step in values):
            return None
        held = tuple(chain.from_iterable(values))
    else:
        held = tuple(values)
    offsets = np.zeros(len(held) + 1, np.int64)
    addresses = np.empty(len(held), np.int64)
    if not _rows.measure_values(
        held,
        np.ndarray,
        field.numpy,
        field.inner,
        cast("int", field.max_length),
        ord(field.kind[0]),
        offsets[1:],
        addresses,
    ):
        return None
    np.cumsum(offsets, out=offsets)
    shape = len(held) // num_envs, num_envs
    return ValueList(held, offsets, addresses, shape)


def leading_axes(field: Field, value: object) -> int:
    """Axes in front of the values of a field that varies; 0 of a single value.

    A list without an item counts as a value.
    """
    if isinstance(value, Ragged):
        return len(value.shape)
    if getattr(value, "is_nested", False):
        return 1
    return max(0, _leading(value, 1 + len(field.inner)))


def _leading(value: Any, own: int) -> int:
    """Axes in front, where a value has so many of its own; text and bytes have none."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return 0
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUST":
        below = [_leading(each, own) for each in value.reshape(-1).tolist()]
        return value.ndim + max(below, default=-own)
    if (axes := _axes(value)) >= 0:
        return axes - own
    if isinstance(value, list | tuple):
        if not value:
            # No item is empty: the list is a value without items, or holds none.
            return 0
        # Without a call for each, as most lists are.
        if all(type(each) is str for each in value):
            return 1
        if all(type(each) is np.ndarray for each in value):
            return 1 + max(int(each.ndim) for each in value) - own
        return 1 + max(_leading(each, own) for each in value)
    return -own


def _axes(value: object) -> int:
    """Axes of an array or tensor, also of one number; -1 of anything else."""
    if isinstance(value, BYTES):
        return -1  # a memoryview has axes, too
    axes = getattr(value, "ndim", -1)
    return axes if isinstance(axes, int) else -1


def location_of(lead: tuple[int, ...], number: int) -> str:
    """The place of a value, as messages name it."""
    if len(lead) < 2:
        return f", value {number}" if lead else ""
    step, env = divmod(number, lead[1])
    return f", step {step}, value {env}" if lead[1] > 1 else f", step {step}"


def _cells(value: Any, path: str, lead: tuple[int, ...], where: str = "") -> list[Any]:
    """The values one by one, of nested lists, tuples or arrays."""
    what, owner = ("step", "step") if len(lead) == 2 else ("value", "environment")
    countable = isinstance(value, list | tuple) or _axes(value) > 0
    if not countable or len(value) != lead[0]:
        got = f"{len(value)}" if countable else shown(value)
        raise SchemaError(
            f"field {path!r}{where} must have {lead[0]} {what}"
            f"{'' if lead[0] == 1 else 's'}, got {got}. Give one for each {owner}, in "
            "a list."
        )
    if len(lead) == 1:
        return list(value)
    return [
        cell
        for step, each in enumerate(value)
        for cell in _cells(each, path, lead[1:], f", step {step}")
    ]


def _plain(field: Field, value: Any) -> bool:
    """Whether a value is the array that is stored, unless it is too long."""
    return (
        type(value) is np.ndarray
        and value.dtype == field.numpy
        and value.ndim == 1 + len(field.inner)
        and value.shape[1:] == field.inner
    )


def _items(field: Field, value: Any, path: str, where: str) -> NDArray[np.generic]:
    """The items of one value, ``[length, *inner]``."""
    if field.kind == "text" and isinstance(value, str):
        value = _encoded(value, path, where)
    if _plain(field, value):
        items: NDArray[np.generic] = value
    elif field.kind != "array" and isinstance(value, BYTES):
        data = value.tobytes() if isinstance(value, memoryview) else value
        items = np.frombuffer(data, np.uint8)
    elif field.kind != "array" and isinstance(value, str | None):
        way_out = KIND_WAYS_OUT[field.kind]
        if isinstance(value, str):
            way_out = "Pass bytes, such as text.encode()."
        raise SchemaError(
            f"field {path!r}{where} must be {field.description}, got {shown(value)}. {way_out}"
        )
    else:
        array, brain = as_numpy(value, path)
        if array.dtype.kind not in "biuf":
            way_out = KIND_WAYS_OUT.get(field.kind, "Pass an array of numbers.")
            raise SchemaError(
                f"field {path!r}{where} must be {field.description}, got {shown(value)}. {way_out}"
            )
        if not array.size and isinstance(value, list | tuple):
            # Lists without a number do not say how many axes they have.
            array = array.reshape(0, *field.inner)
        _check_shape(field, array, path, where)
        items = _cast(field, value, array, brain, path, where)
    _check_shape(field, items, path, where)
    _check_length(field, len(items), path, where)
    if field.kind == "text":
        _check_text(items.tobytes(), path, where)
    return items


def _of_array(
    field: Field, array: NDArray[np.generic], brain: bool, path: str, lead: tuple[int, ...]
) -> Ragged:
    """Values of one length, ``[*lead, length, *inner]``."""
    if array.shape[: len(lead)] != lead:
        raise SchemaError(
            f"field {path!r} must be {list(lead)} values of {field.description}, got "
            f"{array.dtype}{list(array.shape)}. Give one for each "
            f"{'step' if len(lead) == 2 else 'environment'}."
        )
    length = array.shape[len(lead)]
    flat = array.reshape(-1, *array.shape[len(lead) + 1 :])
    _check_shape(field, flat, path, "")
    _check_length(field, length, path, "")
    values = _cast(field, flat, flat, brain, path, "")
    offsets = np.arange(math.prod(lead) + 1) * length
    return _checked(field, Ragged(values, offsets, lead), path)


def _of_ragged(field: Field, value: Ragged, path: str, lead: tuple[int, ...]) -> Ragged:
    offsets = np.asarray(as_numpy(value.offsets, path)[0])
    values, brain = as_numpy(value.values, path)
    if value.shape != lead:
        raise SchemaError(
            f"field {path!r} must have values of shape {list(lead)}, got "
            f"{list(value.shape)}. Use Ragged.reshape, or an index."
        )
    rising = offsets.dtype == np.int64 and bool((np.diff(offsets) >= 0).all())
    if not rising or offsets[0] != 0 or offsets[-1] != len(values):
        raise SchemaError(
            f"field {path!r}: offsets must be int64 and rise from 0 to "
            f"{len(values)}, the number of items. Pass where each value begins, and "
            "the end of the last."
        )
    _check_shape(field, values, path, "")
    values = _cast(field, values, values, brain, path, "")
    _check_lengths(field, offsets, path, lead)
    return _checked(field, Ragged(values, offsets, lead), path)


def _jagged(tensor: Any) -> Ragged:
    """The values of a nested tensor of torch."""
    if str(tensor.layout) == "torch.jagged" and tensor.lengths() is None:
        values = tensor.values()
        if int(tensor.offsets()[-1]) == len(values):
            return Ragged(values, tensor.offsets())
    each = tensor.unbind()
    offsets = np.cumsum([0, *map(len, each)])
    values = np.concatenate([as_numpy(one, "values")[0] for one in each])
    return Ragged(values, offsets)


def _cast(
    field: Field, value: object, array: NDArray[np.generic], brain: bool, path: str, where: str
) -> NDArray[np.generic]:
    """Cast items to the field's dtype; see `convert`."""
    if brain and field.dtype != "bfloat16":
        value, array, brain = (wide := from_bfloat16_bits(array)), wide, False
    if array.dtype == field.numpy and brain == (field.dtype == "bfloat16"):
        return np.ascontiguousarray(array)
    # As given: numbers of lists are rounded where those of arrays must fit.
    given = value if array.size else array
    try:
        items = convert(_item(field), given, path, (len(array),))
    except SchemaError as error:
        name = f"field {path!r}"
        text = str(error).replace(name, name + where, 1)
        if field.kind != "array":
            # Bytes have no wider dtype.
            way_out = KIND_WAYS_OUT[field.kind]
            text = text.replace("Declare a wider dtype.", way_out)
        raise SchemaError(text) from None
    return np.ascontiguousarray(items)


@lru_cache(maxsize=1024)
def _item(field: Field) -> Field:
    """The field of one item."""
    return type(field)(field.inner, field.dtype, exact=field.exact)


def _encoded(text: str, path: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _no_text(path, where, text, error) from None


def _check_text(data: bytes, path: str, where: str) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise _no_text(path, where, data, error) from None


def _no_text(
    path: str, where: str, got: str | bytes, error: UnicodeEncodeError | UnicodeDecodeError
) -> SchemaError:
    unit = "byte" if isinstance(got, bytes) else "character"
    return SchemaError(
        f"field {path!r}{where} must be UTF-8, got {shown(got)}: {error.reason} at "
        f"{unit} {error.start}. Fix it, or declare the field by Field.bytes."
    )


def _check_shape(field: Field, items: NDArray[np.generic], path: str, where: str) -> None:
    if items.ndim == 0 or items.shape[1:] != field.inner:
        got = f"{items.dtype}{list(items.shape)}"
        way_out = "Only the first axis varies."
        if items.ndim == 0:
            got = shown(items.item())
            if not field.inner:
                way_out = (
                    f"Pass its items in a list, such as [{got}]; several values are a "
                    "list of such lists."
                )
        way_out = KIND_WAYS_OUT.get(field.kind, way_out)
        raise SchemaError(
            f"field {path!r}{where} must be {field.description}, got {got}. {way_out}"
        )


def _check_length(field: Field, length: int, path: str, where: str) -> None:
    limit = cast("int", field.max_length)
    if length > limit:
        unit, option = "items", "max_length"
        if field.kind != "array":
            unit, option = "bytes", "max_bytes"
        raise SchemaError(
            f"field {path!r}{where} must have at most {limit} {unit}, got {length}. "
            f"Shorten the value, or declare a larger {option}."
        )


def _check_lengths(
    field: Field, offsets: NDArray[np.int64], path: str, lead: tuple[int, ...]
) -> None:
    lengths = np.diff(offsets)
    for number in np.flatnonzero(lengths > cast("int", field.max_length))[:1].tolist():
        _check_length(field, int(lengths[number]), path, location_of(lead, number))


def _checked(field: Field, ragged: Ragged, path: str) -> Ragged:
    """Refuse text that is no UTF-8, value by value."""
    if field.kind == "text":
        data = ragged.values.tobytes()
        if not data.isascii():
            for number, (first, stop) in enumerate(pairwise(ragged.offsets.tolist())):
                _check_text(data[first:stop], path, location_of(ragged.shape, number))
    return ragged
