"""Names and dtypes of the fields that transforms make."""

from __future__ import annotations

from mmreplay.arguments import DEFAULT
from mmreplay.errors import SchemaError, shown
from mmreplay.schema import Field


def label(name: str, value: object) -> None:
    """Refuse what cannot name a field.

    Raises:
        SchemaError: It is no text, or empty.
    """
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{name} must be the name of a field, got {shown(value)}. {DEFAULT}")


def real(field: Field) -> Field:
    """A field for real numbers as exact as another's: at least float32."""
    wide = field.dtype in ("float64", "int32", "int64", "uint32", "uint64")
    return Field(field.shape, "float64" if wide else "float32")
