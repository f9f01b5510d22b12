"""What a field's values mean: how they are taken, counted, compared and shown.

Each field has a *kind*, ``field.rules``. Whoever reads, shows or converts values asks
it, and needs no list of the kinds that there are. A new one is a class here, or a
subclass of one of these that stands in `KINDS` before the others before fields are
asked; how its values are stored stays what the field's dtype and shape say, so that
files do not know of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmreplay.arguments import printable
from mmreplay.ragged import Ragged
from mmreplay.schema.convert import convert
from mmreplay.schema.dtypes import from_bfloat16_bits
from mmreplay.schema.image_values import (
    convert_images,
    decode_images,
    encoding_of,
    leading_axes_of_images,
)
from mmreplay.schema.varying import convert_varying, leading_axes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmreplay.schema.field import Field

Column = Any
"""Array ``[N, *shape]``, or `Ragged` of N values where the field varies."""

INLINE_ELEMENTS = 4
"""The most numbers of a value that stand in a summary one by one."""
TEXT_CHARACTERS, HEX_BYTES, ITEMS = 400, 32, 8
"""The most that is shown of a value."""


class Kind(Protocol):
    """The rules of one kind of field.

    Attributes:
        by_length: Curves and histograms are drawn of the lengths of its values, which
            are read without them.
        as_text: Values are shown by `show`, and not as numbers.
        numeric: `numbers` returns numbers.
        computes: Transforms may compute with its values as with arrays of one shape.
        form: What its values are in files: ``"array"``, ``"text"`` or ``"bytes"``.
        travels: Its values may be sent as rows of one size, as writers without a disk
            and formats without values of any length do.
    """

    by_length: bool
    as_text: bool
    numeric: bool
    computes: bool
    form: str
    travels: bool

    def claims(self, field: Field) -> bool:
        """Whether a field is of this kind."""

    def name(self, field: Field) -> str:
        """What tables call it, such as ``"float32"``."""

    def axes(self, field: Field) -> str:
        """The shape as tables show it, such as ``[up to 9, 3]``."""

    def describe(self, field: Field) -> str:
        """Name and shape as messages show them, such as ``float32[up to 9, 3]``."""

    def convert(self, field: Field, value: object, path: str, lead: tuple[int, ...]) -> Column:
        """Validate incoming values, and return them as they are stored.

        Not asked for an array that is of the stored dtype and shape already.

        Args:
            field: Of this kind.
            value: One value for each place of the leading axes.
            path: The field's path, as messages name it.
            lead: Leading axes, such as environments.

        Raises:
            SchemaError: A value is none of the field.
        """

    def leading(self, field: Field, value: object) -> int:
        """Axes in front of the values of a field that varies; 0 of a single value.

        A list without an item counts as a value.
        """

    def drawn(self, field: Field) -> Field:
        """The field of what draws hold, where values are stored in another form."""

    def decode(
        self, field: Field, column: Column, same: NDArray[np.int64] | None
    ) -> tuple[Column, dict[int, str]]:
        """Make what draws hold of stored values.

        Args:
            field: Of this kind, whose `drawn` is another one.
            column: N values as they are stored.
            same: int64 ``[N]``, the first of equal values, of each; None where none
                is known.

        Returns:
            N values of the drawn field, zeros where there is none; and of values that
            are damaged their numbers, with what is wrong with each.
        """

    def numbers(self, field: Field, column: Column) -> NDArray[Any] | None:
        """Numbers that the values consist of, as numpy knows them; None of others."""

    def integers(self, field: Field) -> bool:
        """Whether these are integers or bools, whatever is stored."""

    def summary(self, field: Field, value: Any) -> Any:
        """One value as JSON: a short one as it is, of a long one what it is like."""

    def show(self, field: Field, value: Any) -> str:
        """What one value begins with and how long it is, in one line."""

    def label(self, field: Field, number: float) -> str | None:
        """How one of its numbers is written; None as every number is."""

    def length(self, field: Field, count: int) -> str:
        """A length of a value with its unit."""


class Fixed:
    """Arrays of one shape."""

    by_length = False
    as_text = False
    numeric = True
    computes = True
    form = "array"
    travels = True

    def claims(self, field: Field) -> bool:
        """Every field that no other kind claims."""
        return True

    def name(self, field: Field) -> str:
        """The dtype."""
        return field.dtype

    def axes(self, field: Field) -> str:
        """Such as ``[84, 84]``."""
        return str(list(field.shape))

    def describe(self, field: Field) -> str:
        """Such as ``uint8[84, 84]``."""
        return f"{self.name(field)}{self.axes(field)}"

    def convert(self, field: Field, value: object, path: str, lead: tuple[int, ...]) -> Column:
        """See `Field.convert`."""
        return convert(field, value, path, lead)

    def leading(self, field: Field, value: object) -> int:
        """By lists, arrays and tensors."""
        return leading_axes(field, value)

    def drawn(self, field: Field) -> Field:
        """The same: draws hold what is stored."""
        return field

    def decode(
        self, field: Field, column: Column, same: NDArray[np.int64] | None
    ) -> tuple[Column, dict[int, str]]:
        """The same values."""
        return column, {}

    def numbers(self, field: Field, column: Column) -> NDArray[Any] | None:
        """The values themselves."""
        numbers: NDArray[Any] = column
        return numbers

    def integers(self, field: Field) -> bool:
        """By the dtype."""
        return field.numpy.kind in "iub"

    def summary(self, field: Field, value: Any) -> Any:
        """Up to 4 numbers; of more their range and mean."""
        numbers = self.numbers(field, value)
        assert numbers is not None
        if numbers.size <= INLINE_ELEMENTS:
            return numbers.tolist()
        return {
            "dtype": field.dtype,
            "shape": list(numbers.shape),
            "min": numbers.min().item(),
            "mean": float(numbers.astype(np.float64).mean()),
            "max": numbers.max().item(),
        }

    def show(self, field: Field, value: Any) -> str:
        """Up to 8 numbers."""
        items = value[:ITEMS] if np.ndim(value) else value
        numbers = self.numbers(field, items)
        assert numbers is not None
        few = numbers.reshape(-1)[:ITEMS].tolist()
        shown = [f"{item:.6g}" if isinstance(item, float) else str(item) for item in few]
        if np.size(value) > len(few):
            shown.append("…")
        return f"[{', '.join(shown)}]" if np.ndim(value) else shown[0]

    def label(self, field: Field, number: float) -> str | None:
        """As every number is."""
        return None

    def length(self, field: Field, count: int) -> str:
        """Such as ``3 items of [2]``."""
        each = f" of {list(field.inner)}" if field.inner else ""
        return f"{count:,} item{'' if count == 1 else 's'}{each}"


class BFloat16(Fixed):
    """Arrays of one shape, whose numbers numpy does not know: bits are stored."""

    def claims(self, field: Field) -> bool:
        """By the dtype."""
        return field.dtype == "bfloat16"

    def numbers(self, field: Field, column: Column) -> NDArray[Any] | None:
        """As float32, exactly."""
        return from_bfloat16_bits(np.asarray(column))

    def integers(self, field: Field) -> bool:
        """They are not: their bits are."""
        return False


class Varying(Fixed):
    """Arrays whose first axis varies from step to step, of any dtype."""

    by_length = True
    as_text = True
    computes = False
    travels = False

    def claims(self, field: Field) -> bool:
        """By the shape, which begins with None."""
        return field.varies

    def axes(self, field: Field) -> str:
        """Such as ``[up to 9, 3]``."""
        return f"[{', '.join([f'up to {field.max_length}', *map(str, field.inner)])}]"

    def convert(self, field: Field, value: object, path: str, lead: tuple[int, ...]) -> Column:
        """Put values together; see `convert_varying`."""
        return convert_varying(field, value, path, lead)

    def numbers(self, field: Field, column: Column) -> NDArray[Any] | None:
        """The items of all values."""
        items = np.asarray(column.values if isinstance(column, Ragged) else column)
        return from_bfloat16_bits(items) if field.dtype == "bfloat16" else items

    def integers(self, field: Field) -> bool:
        """By the dtype of the items."""
        return field.numpy.kind in "iub" and field.dtype != "bfloat16"

    def summary(self, field: Field, value: Any) -> Any:
        """Likewise, and how many items it has."""
        found = super().summary(field, value)
        return {"items": len(value), **found} if isinstance(found, dict) else found

    def show(self, field: Field, value: Any) -> str:
        """Likewise, and how many items it has."""
        return f"{self.length(field, len(value))}: {super().show(field, value)}"


class Bytes(Varying):
    """`bytes` of any length."""

    numeric = False
    form = unit = "bytes"

    def claims(self, field: Field) -> bool:
        """By `Field.bytes`."""
        return field.kind == self.unit

    def name(self, field: Field) -> str:
        """The word of the declaration."""
        return self.unit

    def describe(self, field: Field) -> str:
        """Such as ``text of at most 200 bytes``."""
        plural = "byte" if field.max_length == 1 else "bytes"
        return f"{self.unit} of at most {field.max_length} {plural}"

    def numbers(self, field: Field, column: Column) -> NDArray[Any] | None:
        """None: a byte is no number here."""
        return None

    def summary(self, field: Field, value: Any) -> Any:
        """How many they are."""
        return {"bytes": int(np.asarray(value).size)}

    def show(self, field: Field, value: Any) -> str:
        """The first in hexadecimal digits."""
        more = "…" if len(value) > HEX_BYTES else ""
        count = self.length(field, len(value))
        return f"{value[:HEX_BYTES].tobytes().hex(' ')}{more} ({count})".lstrip()

    def length(self, field: Field, count: int) -> str:
        """Such as ``3 bytes``."""
        return f"{count:,} byte{'' if count == 1 else 's'}"


class Text(Bytes):
    """`str`, as UTF-8."""

    form = unit = "text"

    def summary(self, field: Field, value: Any) -> Any:
        """The text; a damaged one is shown, too."""
        return np.asarray(value).tobytes().decode(errors="replace")

    def show(self, field: Field, value: Any) -> str:
        """Its beginning, with control characters spelled out."""
        text = self.summary(field, value)
        more = f"… ({self.length(field, len(value))})" if len(text) > TEXT_CHARACTERS else ""
        return printable(text[:TEXT_CHARACTERS]) + more


class Images(Bytes):
    """Arrays uint8 ``[height, width, channels]``, stored as JPEG or PNG files."""

    unit = "image"

    def name(self, field: Field) -> str:
        """The codec, such as ``jpeg``."""
        return encoding_of(field).codec

    def axes(self, field: Field) -> str:
        """The shape of the array."""
        return str(list(encoding_of(field).shape))

    def describe(self, field: Field) -> str:
        """Such as ``jpeg image [480, 640, 3]``."""
        return f"{self.name(field)} image {self.axes(field)}"

    def convert(self, field: Field, value: object, path: str, lead: tuple[int, ...]) -> Column:
        """Encode arrays, and look at files; see `convert_images`."""
        return convert_images(field, value, path, lead)

    def leading(self, field: Field, value: object) -> int:
        """Of an array three less than it has, of files those of the lists."""
        return leading_axes_of_images(value)

    def drawn(self, field: Field) -> Field:
        """A field of arrays."""
        return type(field)(encoding_of(field).shape, "uint8")

    def decode(
        self, field: Field, column: Column, same: NDArray[np.int64] | None
    ) -> tuple[Column, dict[int, str]]:
        """Decode each file once."""
        return decode_images(field, column, same)


KINDS: list[Kind] = [Images(), Text(), Bytes(), Varying(), BFloat16(), Fixed()]
"""All kinds. The first that claims a field is the field's."""


def rules_of(field: Field) -> Kind:
    """Return the kind that claims a field."""
    for kind in KINDS:
        if kind.claims(field):
            return kind
    raise AssertionError("the last kind claims every field")
