"""Values of image fields: arrays are encoded, files checked, and both decoded."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from mmreplay.errors import LossWarning, SchemaError, frames_to_caller, shown
from mmreplay.ragged import Ragged, ragged_of_bytes
from mmreplay.schema.convert import as_numpy
from mmreplay.schema.images import in_threads
from mmreplay.schema.varying import BYTES, location_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mmreplay.schema.field import Field
    from mmreplay.schema.images import ImageEncoding


def convert_images(field: Field, value: object, path: str, lead: tuple[int, ...]) -> Ragged:
    """Validate incoming images, and return the files that are stored.

    Args:
        field: Of images.
        value: One image for each place of the leading axes, nested as they are: an
            array or tensor uint8 ``[height, width, channels]``, which is encoded; or a
            JPEG or PNG file as bytes, or uint8 ``[bytes]``, which is stored as it is.
            Of arrays alone, one array ``[*lead, height, width, channels]``.
        path: The field's path, as messages name it.
        lead: Leading axes, such as environments, or steps and environments.

    Returns:
        Values uint8 of shape `lead`.

    Raises:
        SchemaError: An image has another shape or dtype, a file is no image of this
            field or needs more than its bytes, or there are more or fewer of them.
        FailedError: The extra ``images`` is not installed.

    Warns:
        LossWarning: An array becomes a JPEG whose quality was not chosen, the first
            time.
    """
    encoding = encoding_of(field)
    cells = _cells(encoding, value, path, lead)
    arrays = [n for n, cell in enumerate(cells) if getattr(cell, "ndim", 1) == 3]
    if arrays and not encoding.stated and encoding.codec == "jpeg":
        _warn_of_loss(encoding, path)
    made = in_threads(encoding.encode, [cells[n] for n in arrays], encoding.nbytes * len(arrays))
    for n, file in zip(arrays, made, strict=True):
        cells[n] = file
    encoded = set(arrays)
    for n, cell in enumerate(cells):
        problem = None if n in encoded else encoding.problem(cell)
        way_out = f"Pass an array, or a {encoding.codec} file of this shape."
        if problem is None and len(cell) > (field.max_length or 0):
            problem = f"it has {len(cell)} bytes, more than max_bytes={field.max_length}"
            if n in encoded:
                way_out = "Declare a larger max_bytes, or a lower quality."
        if problem is not None:
            raise SchemaError(
                f"field {path!r}{location_of(lead, n)} must be {field.description}, but {problem}. "
                f"{way_out}"
            )
    return ragged_of_bytes(cells, lead)


def decode_images(
    field: Field, column: Ragged, same: NDArray[np.int64] | None
) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Decode N stored files, each that is the same one once.

    Args:
        field: Of images.
        column: Files uint8 of shape ``(N,)``; an empty one becomes zeros, as rows of
            final observations have in other fields.
        same: int64 ``[N]``, of each the first that is the same file; None if they are
            all their own.

    Returns:
        uint8 ``[N, height, width, channels]``, zeros where a file is damaged; and the
        numbers of those, with what is wrong.
    """
    encoding = encoding_of(field)
    count, offsets = len(column), column.offsets
    out = np.empty((count, *encoding.shape), np.uint8)
    empty = offsets[1:] == offsets[:-1]
    out[empty] = 0
    own = ~empty if same is None else ~empty & (same == np.arange(count))
    damaged: dict[int, str] = {}

    files, bounds = memoryview(column.values), offsets.tolist()

    def decode(number: int) -> None:
        try:
            encoding.decode(files[bounds[number] : bounds[number + 1]], out[number])
        except ValueError as error:
            out[number] = 0
            damaged[number] = str(error)[:200]

    decoded = np.flatnonzero(own).tolist()
    in_threads(decode, decoded, encoding.nbytes * len(decoded))
    if same is not None:
        (copies,) = np.nonzero(~own & ~empty)
        out[copies] = out[same[copies]]
        for number in copies.tolist() if damaged else ():
            if int(same[number]) in damaged:
                damaged[number] = damaged[int(same[number])]
    return out, damaged


_warned: set[tuple[str, ImageEncoding]] = set()
"""Fields whose loss was said."""


def _warn_of_loss(encoding: ImageEncoding, path: str) -> None:
    if (path, encoding) in _warned:
        return
    warnings.warn(
        f"field {path!r} stores arrays as JPEG of quality {encoding.quality}, which changes them. "
        "Pass quality= to Field.image to choose, or codec='png', which loses nothing.",
        LossWarning,
        stacklevel=frames_to_caller(),
    )
    # Not where the warning is an error, which the next array raises again.
    _warned.add((path, encoding))


def _cells(encoding: ImageEncoding, value: object, path: str, lead: tuple[int, ...]) -> list[Any]:
    """The images one by one: arrays of three axes, or the bytes of a file."""
    if isinstance(value, Ragged):
        if value.shape != lead:
            raise SchemaError(
                f"field {path!r} must have images of shape {list(lead)}, got {list(value.shape)}. "
                "Use Ragged.reshape, or an index."
            )
        flat = value.reshape(math.prod(lead))
        return [_cell(encoding, one, path, location_of(lead, n)) for n, one in enumerate(flat)]
    if not lead:
        return [_cell(encoding, value, path, "")]
    if not isinstance(value, list | tuple | str | bytes | bytearray | memoryview):
        array, _ = as_numpy(value, path)
        if array.dtype != object:
            return _of_array(encoding, array, path, lead)
        value = list(array)
    if not isinstance(value, list | tuple) or len(value) != lead[0]:
        got = len(value) if isinstance(value, list | tuple) else shown(value)
        raise SchemaError(
            f"field {path!r} must have {lead[0]} image{'s'[: lead[0] != 1]}, got {got}. Give one "
            "for each, in a list."
        )
    if len(lead) == 1:
        return [_cell(encoding, one, path, location_of(lead, n)) for n, one in enumerate(value)]
    return [
        _cell(encoding, one, path, f", step {step}, value {n}")
        for step, each_step in enumerate(value)
        for n, one in enumerate(_of_step(each_step, path, step, lead[1]))
    ]


def _of_array(
    encoding: ImageEncoding, array: NDArray[np.generic], path: str, lead: tuple[int, ...]
) -> list[Any]:
    """The images of one array ``[*lead, height, width, channels]``."""
    if array.shape != (*lead, *encoding.shape) or array.dtype != np.uint8:
        raise SchemaError(
            f"field {path!r} must be images uint8{[*lead, *encoding.shape]}, got "
            f"{array.dtype}{list(array.shape)}. Give one for each "
            f"{'step' if len(lead) == 2 else 'environment'}; files come in a list."
        )
    return list(array.reshape(math.prod(lead), *encoding.shape))


def _of_step(value: Any, path: str, step: int, count: int) -> Sequence[Any]:
    """The images of one step of several environments."""
    if not hasattr(value, "__len__") or isinstance(value, str | bytes) or len(value) != count:
        raise SchemaError(
            f"field {path!r}, step {step} must have {count} image{'s'[: count != 1]}, got "
            f"{shown(value)}. Give one for each environment, in a list."
        )
    images: Sequence[Any] = value
    return images


def _cell(encoding: ImageEncoding, value: object, path: str, where: str) -> Any:
    """One image: an array of three axes, or bytes."""
    if type(value) is bytes:
        return value
    if isinstance(value, BYTES):
        return bytes(value)
    if isinstance(value, str | None):
        array = None
    else:
        array, _ = as_numpy(value, path)
    if array is not None and array.dtype == np.uint8:
        if array.shape == encoding.shape:
            return array
        # A file as an array of bytes, as readers of other formats hand it out.
        if array.ndim == 1:
            return array.tobytes()
    got = shown(value) if array is None else f"{array.dtype}{list(array.shape)}"
    raise SchemaError(
        f"field {path!r}{where} must be an image uint8{list(encoding.shape)} or a "
        f"{encoding.codec} file, got {got}. Check shape and dtype; floats are multiplied by 255 "
        "first."
    )


def leading_axes_of_images(value: object) -> int:
    """Axes in front of images: arrays, or files as bytes or uint8 ``[bytes]``."""
    if isinstance(value, Ragged):
        return len(value.shape)
    if isinstance(value, list | tuple):
        return 1 + max(map(leading_axes_of_images, value)) if value else 0
    axes = getattr(value, "ndim", 0)
    if isinstance(value, memoryview) or not isinstance(axes, int):
        return 0
    return max(0, axes - 3)


def encoding_of(field: Field) -> ImageEncoding:
    """How a field of images stores them."""
    assert field.encoding is not None
    return field.encoding
