"""A field: one array per step, and its entry in metadata.json.

The first axis of a field may *vary* from step to step. Its values then lie in a heap
beside the rows, and a row holds a reference to them. Entries are read strictly, since
the file may come from anywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast, get_args

import numpy as np

from mmreplay.arguments import flag, integer, one_of
from mmreplay.errors import SchemaError, shown
from mmreplay.schema.dtypes import array_nbytes, canonical_name, storage_dtype
from mmreplay.schema.images import ImageEncoding
from mmreplay.schema.kinds import rules_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import DTypeLike, NDArray

    from mmreplay.schema.kinds import Kind


from mmreplay.nesting import CONTROLS
from mmreplay.schema.dtypes import DTYPES

MAX_AXES = 32
MAX_NBYTES = 2**48
MAX_LENGTH = 2**32 - 1

Word = Literal["array", "text", "bytes", "image"]
WORDS: tuple[Word, ...] = get_args(Word)

REFERENCE = np.dtype([("position", "<i8"), ("length", "<u4"), ("crc", "<u4")])
"""What a row stores of a value that varies: the heap position of its first byte, its
items along the first axis, and the CRC32C of its bytes. All zero for no items."""
HEAP_ALIGNMENT = 8
"""Values begin at multiples of so many bytes in the heap."""


@dataclass(frozen=True, slots=True, init=False)
class Field:
    """One array per step.

    Attributes:
        shape: Shape of one step's value, without step or environment axes. The first
            axis is None where it varies from step to step.
        dtype: One of `DTYPES`. Given as a numpy dtype, class or string of any
            byte order, it is kept by that name; little-endian on disk.
        exact: Whether casts that could lose anything are refused.
        mutable: Whether `ReplayBuffer.write_field` may rewrite its values.
        numpy: The numpy dtype it is stored in (uint16 for bfloat16).
        nbytes: Bytes per step in the row: 16 for the reference of a value that varies.
        max_length: The longest first axis where it varies, else None.
        kind: ``"array"``; or ``"text"`` and ``"bytes"``, whose values vary and are
            given and read as `str` and `bytes`; or ``"image"``, whose values are stored
            as files, which vary, and are drawn as arrays.
        encoding: How images are stored; None of other kinds.
        rules: What its values mean: how they are taken, counted and shown.

    Example:
        >>> mr.Field((84, 84), "uint8").nbytes
        7056
        >>> mr.Field((None, 3), "float32", max_length=4096)  # a point cloud
        Field(shape=(None, 3), dtype='float32', max_length=4096)
    """

    # Of integers for nearly all code: a field that varies is asked for `varies` first,
    # and then for `inner`.
    shape: tuple[int, ...]
    dtype: str
    exact: bool = field(default=False, kw_only=True)
    mutable: bool = field(default=False, kw_only=True)
    numpy: np.dtype[np.generic] = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    max_length: int | None = field(default=None, kw_only=True)
    kind: Word = field(default="array", kw_only=True)
    encoding: ImageEncoding | None = field(default=None, kw_only=True)
    rules: Kind = field(init=False, repr=False, compare=False)

    # Written out rather than generated, so that a caller may give any dtype and
    # shape that numpy would take, and a reader still finds a name and a tuple.
    def __init__(
        self,
        shape: Sequence[int | None],
        dtype: DTypeLike,
        *,
        exact: bool = False,
        mutable: bool = False,
        max_length: int | None = None,
        kind: Word = "array",
        encoding: ImageEncoding | None = None,
    ) -> None:
        """Declare a field.

        Args:
            shape: At most 32 axes; ``()`` for a scalar. With an axis of 0 the values
                are empty, as those of a zero-size Box, and take no space. None as the
                first axis lets it vary from step to step, from 0 to `max_length`.
            dtype: bool, (u)int8 to 64, float16 to 64, or ``"bfloat16"``.
            exact: Refuse casts that could lose anything.
            mutable: Let `ReplayBuffer.write_field` rewrite values.
            max_length: The longest first axis, where it varies. It costs no space:
                a row takes what its value has.
            kind: ``"text"``, ``"bytes"`` and ``"image"`` are made by the methods of
                these names.
            encoding: Of images, which `image` makes.

        Raises:
            SchemaError: An axis, the dtype, the size or an option is not storable.
        """
        axes, name = _checked_shape(shape), canonical_name(dtype)
        for option, value in (("exact", exact), ("mutable", mutable)):
            flag(f"field option {option}", value)
        one_of("field kind", kind, WORDS, "Use Field.text, Field.bytes or Field.image.")
        if (kind == "image") != isinstance(encoding, ImageEncoding):
            raise SchemaError(
                f"field kind {kind!r} must not have encoding={shown(encoding)}. Use Field.image."
            )
        if mutable and 0 in axes:
            raise SchemaError(
                f"field option mutable must be False for the shape {list(axes)}, "
                "which has no values to rewrite. Leave it out."
            )
        stored = storage_dtype(name)
        varies = bool(axes) and axes[0] is None
        if varies:
            max_length = _checked_length(axes, name, max_length, kind, exact, mutable)
            _checked_nbytes((max_length, *axes[1:]), stored.itemsize)
        elif max_length is not None or kind != "array":
            option = "max_length" if max_length is not None else "kind"
            raise SchemaError(
                f"field option {option} needs a shape that begins with None, got "
                f"{list(axes)}. Leave it out, or let the first axis vary."
            )
        set_ = object.__setattr__
        set_(self, "shape", axes)
        set_(self, "dtype", name)
        set_(self, "exact", bool(exact))
        set_(self, "mutable", bool(mutable))
        set_(self, "numpy", stored)
        set_(self, "max_length", max_length)
        set_(self, "kind", str(kind))
        set_(self, "encoding", encoding)
        nbytes = REFERENCE.itemsize if varies else _checked_nbytes(axes, stored.itemsize)
        set_(self, "nbytes", nbytes)

    @classmethod
    def text(cls, max_bytes: int) -> Field:
        """Declare a field of `str`, which varies from step to step.

        Args:
            max_bytes: The most bytes that one text takes in UTF-8.

        Raises:
            SchemaError: `max_bytes` is not storable.

        Example:
            >>> mr.Field.text(max_bytes=200)
            Field.text(max_bytes=200)
        """
        return cls((None,), "uint8", max_length=max_bytes, kind="text")

    @classmethod
    def bytes(cls, max_bytes: int) -> Field:
        """Declare a field of `bytes`, which vary from step to step.

        Args:
            max_bytes: The most bytes of one value.

        Raises:
            SchemaError: `max_bytes` is not storable.

        Example:
            >>> mr.Field.bytes(max_bytes=65_536)  # compressed frames
            Field.bytes(max_bytes=65536)
        """
        return cls((None,), "uint8", max_length=max_bytes, kind="bytes")

    @classmethod
    def image(
        cls,
        shape: Sequence[int],
        codec: Literal["jpeg", "png"] = "jpeg",
        quality: int | None = None,
        subsampling: Literal["444", "422", "420"] | None = None,
        *,
        max_bytes: int | None = None,
    ) -> Field:
        """Declare a field of images that are stored as JPEG or PNG files.

        `add` takes arrays, which it encodes, or the files of a camera, which are
        stored as they are. Draws hold arrays; see `mr.Encoded` for the files. It needs
        the extra ``images``.

        Args:
            shape: ``(height, width, channels)``, of uint8; 1 channel or 3.
            codec: ``"jpeg"``, which takes a twelfth of the space of a camera's frame
                and changes it; or ``"png"``, which loses nothing.
            quality: Of JPEG, from 1 to 100; 90 by default.
            subsampling: Of JPEG's colors: ``"420"`` by default, ``"422"``, or
                ``"444"``, which keeps them all.
            max_bytes: The most bytes of one file; by default those of the array, and
                64 KiB more. Noise at a quality of 95 and above may need more.

        Raises:
            SchemaError: One is not possible.

        Example:
            >>> mr.Field.image((480, 640, 3)).encoding.options
            'jpeg:90:420'
        """
        encoding = ImageEncoding.declared(shape, codec, quality, subsampling)
        longest = encoding.max_nbytes if max_bytes is None else max_bytes
        return cls((None,), "uint8", max_length=longest, kind="image", encoding=encoding)

    @property
    def varies(self) -> bool:
        """Whether the first axis varies from step to step."""
        return self.max_length is not None

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of one item of the first axis where it varies, else the shape."""
        return self.shape if self.max_length is None else self.shape[1:]

    @property
    def inner_nbytes(self) -> int:
        """Bytes of one item of the first axis where it varies, else of the value."""
        return array_nbytes(self.dtype, self.inner)

    @property
    def max_heap_nbytes(self) -> int:
        """The most bytes that one value takes in the heap; 0 where none varies."""
        if self.max_length is None:
            return 0
        return -(-self.max_length * self.inner_nbytes // HEAP_ALIGNMENT) * HEAP_ALIGNMENT

    @property
    def drawn(self) -> Field:
        """What draws hold of it: of images a field of their arrays, else this one."""
        return self.rules.drawn(self)

    @property
    def description(self) -> str:
        """Dtype and shape as messages show them, such as ``float32[up to 9, 3]``."""
        return self.rules.describe(self)

    def __repr__(self) -> str:
        if (image := self.encoding) is not None:
            stated = f"Field.image({image.shape}, {image.codec!r}"
            if image.codec == "jpeg":
                stated += f", quality={image.quality}, subsampling={image.subsampling!r}"
            longest = self.max_length != image.max_nbytes
            return f"{stated}{f', max_bytes={self.max_length}' if longest else ''})"
        if self.kind != "array":
            return f"Field.{self.kind}(max_bytes={self.max_length})"
        stated = f"Field(shape={self.shape!r}, dtype={self.dtype!r}"
        if self.max_length is None:
            return f"{stated}, exact={self.exact!r}, mutable={self.mutable!r})"
        exact = ", exact=True" if self.exact else ""
        return f"{stated}, max_length={self.max_length}{exact})"

    # Pickles of earlier versions have the first six; fields of one shape still do.
    def __getstate__(self) -> list[object]:
        state = [self.shape, self.dtype, self.exact, self.mutable, self.numpy, self.nbytes]
        state += [self.max_length, self.kind] if self.varies else []
        return state if self.encoding is None else [*state, self.encoding]

    def __setstate__(self, state: list[object]) -> None:
        defaults = [None, "array", None][len(state) - 6 :]
        names = ("shape", "dtype", "exact", "mutable", "numpy", "nbytes", "max_length", "kind")
        for name, value in zip((*names, "encoding"), [*state, *defaults], strict=True):
            object.__setattr__(self, name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Kind:
            """Choose the kind when it is first asked for; later it is found without."""
            if name != "rules":
                raise AttributeError(
                    f"'Field' object has no attribute {name!r}", name=name, obj=self
                )
            rules = rules_of(self)
            object.__setattr__(self, "rules", rules)
            return rules

    def convert(self, value: object, path: str, lead: tuple[int, ...]) -> NDArray[np.generic]:
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
                meant to be lost; or the field varies.
        """
        if self.varies:
            raise SchemaError(
                f"field {path!r} varies from step to step, so its values make no array "
                "of one shape. Pass them to add or extend."
            )
        # Most values come as they are stored, whatever they mean.
        if (
            type(value) is np.ndarray
            and value.dtype == self.numpy
            and value.shape == lead + self.shape
        ):
            return value
        column: NDArray[np.generic] = self.rules.convert(self, value, path, lead)
        return column


def _checked_shape(shape: Iterable[object]) -> tuple[int, ...]:
    try:
        parts: tuple[object, ...] = tuple(shape)
        varies = bool(parts) and parts[0] is None
        if any(isinstance(part, bool | np.bool_) for part in parts):
            raise TypeError
        axes = tuple(operator.index(cast("SupportsIndex", part)) for part in parts[varies:])
    except TypeError:
        way_out = "Write (3,) for a vector of 3 and () for a scalar."
        if isinstance(shape, list | tuple) and None in shape[1:]:
            way_out = "Only the first axis may be None, and vary from step to step."
        raise SchemaError(
            f"field shape must be a tuple of integers, got {shown(shape)}. {way_out}"
        ) from None
    if len(parts) > MAX_AXES:
        raise SchemaError(
            f"field shape must have at most {MAX_AXES} axes, got {len(parts)}. Merge some of them."
        )
    if any(axis < 0 for axis in axes):
        raise SchemaError(
            f"field shape must have axes of at least 0, got {list(axes)}. Check the shape."
        )
    # Values without bytes would have a length and no place in the heap.
    if varies and 0 in axes:
        raise SchemaError(
            "field shape must have axes of at least 1 behind one that varies, got "
            f"{[None, *axes]}. Check the shape."
        )
    return cast("tuple[int, ...]", (None, *axes)) if varies else axes


def _checked_length(
    axes: tuple[int, ...],
    dtype: str,
    max_length: int | None,
    kind: Word,
    exact: bool,
    mutable: bool,
) -> int:
    """Check the options of a field that varies; return its max_length."""
    name, way_out = "max_bytes", "Give the most bytes that one value takes."
    if kind == "array":
        name = "max_length"
        way_out = "Give the longest first axis: None in the shape lets it vary up to that."
    length = integer(f"field option {name}", max_length, 1, way_out, maximum=MAX_LENGTH)
    if mutable:
        raise SchemaError(
            f"field option mutable must be False for the shape {list(axes)}, whose "
            "values vary. Leave it out, or declare a fixed shape."
        )
    if kind != "array" and (axes[1:] or dtype != "uint8" or exact):
        raise SchemaError(
            f"field kind {kind!r} must have shape [None], dtype uint8 and exact=False, "
            f"got {list(axes)}, {dtype} and exact={exact}. Use Field.{kind}(max_bytes)."
        )
    return length


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
_VARYING_KEYS = (*_KEYS, "max_length", "kind")


def field_to_json(path: str, field: Field) -> dict[str, object]:
    """Return one field as a JSON object; see `Schema.to_json`."""
    entry: dict[str, object] = {
        "name": path,
        "dtype": field.dtype,
        "shape": list(field.shape),
        "exact": field.exact,
        "mutable": field.mutable,
    }
    if field.varies:
        entry |= {"max_length": field.max_length, "kind": field.kind}
    if (image := field.encoding) is not None:
        entry["image"] = {
            "shape": list(image.shape),
            "codec": image.codec,
            "quality": image.quality,
            "subsampling": image.subsampling,
        }
    return entry


def field_from_json(entry: object) -> tuple[str, Field]:
    """Return path and field of an object that `field_to_json` made.

    Raises:
        SchemaError: A key is missing or unknown, or a value of the wrong type.
    """
    if not isinstance(entry, dict):
        raise _refused("entry", entry, "an object")
    shape = entry.get("shape")
    varies = type(shape) is list and shape[:1] == [None]
    keys = _VARYING_KEYS if varies else _KEYS
    image = entry.get("kind") == "image"
    if set(entry) != {*keys, *(("image",) if image else ())}:
        raise _refused("keys", sorted(map(str, entry)), f"exactly {sorted(keys)}")
    name = entry["name"]
    if type(name) is not str:
        raise _refused("name", name, "a string")
    if CONTROLS.search(name):
        raise _refused("name", name, "one without control characters")
    for key in keys[1:]:
        legal, expected = _LEGAL[key]
        if not legal(entry[key]):
            raise _refused(f"{key} of {name!r}", entry[key], expected)
    options = {option: entry[option] for option in keys[3:]}
    if image:
        options["encoding"] = _encoding(name, entry["image"])
    return name, Field(entry["shape"], entry["dtype"], **options)


def _encoding(name: str, value: object) -> ImageEncoding:
    """How images are stored, of the object in a field's entry."""
    expected = "an object of shape, codec, quality and subsampling"
    what = f"image of {name!r}"
    if not isinstance(value, dict) or set(value) != {"shape", "codec", "quality", "subsampling"}:
        raise _refused(what, value, expected)
    try:
        encoding = ImageEncoding.declared(**value)
    except SchemaError:
        raise _refused(what, value, expected) from None
    if encoding.codec == "jpeg" and (value["quality"] is None or value["subsampling"] is None):
        raise _refused(what, value, expected)
    return encoding


def _is_shape(value: object) -> bool:
    """Whether it is a list of integers, the first of which may be None."""
    if type(value) is not list or len(value) > MAX_AXES:
        return False
    return all(type(axis) is int for axis in value[value[:1] == [None] :])


_LEGAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "dtype": (lambda d: type(d) is str and d in DTYPES, f"one of {', '.join(DTYPES)}"),
    "shape": (_is_shape, "a list of at most 32 integers"),
    "exact": (lambda flag: type(flag) is bool, "true or false"),
    "mutable": (lambda flag: type(flag) is bool, "true or false"),
    "max_length": (
        lambda length: type(length) is int and 1 <= length <= MAX_LENGTH,
        f"an integer in [1, {MAX_LENGTH}]",
    ),
    "kind": (lambda kind: kind in WORDS, f"one of {', '.join(WORDS)}"),
}
"""By key of a stored field, whether a value is legal, and what an error expects."""


def _refused(what: str, got: object, expected: str) -> SchemaError:
    text = repr(got)
    text = text if len(text) <= 80 else text[:80] + "…"
    return SchemaError(
        f"schema field {what} must be {expected}, got {text}. This version of "
        "mmreplay did not write the file."
    )
