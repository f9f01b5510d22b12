"""Fields as JSON values, read strictly, since the file may be anyone's."""

from __future__ import annotations

from mmreplay.errors import SchemaError
from mmreplay.schema.dtypes import DTYPES
from mmreplay.schema.field import MAX_AXES, Field
from mmreplay.schema.names import CONTROLS

_KEYS = ("name", "dtype", "shape", "exact", "mutable")


def field_to_json(path: str, field: Field) -> dict[str, object]:
    """One field as a JSON object; see `Schema.to_json`."""
    return {
        "name": path,
        "dtype": field.dtype,
        "shape": list(field.shape),
        "exact": field.exact,
        "mutable": field.mutable,
    }


def field_from_json(entry: object) -> tuple[str, Field]:
    """Path and field of what `field_to_json` gave.

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
        f"schema field {what}: got {text}, expected {expected}; the file is not one "
        "that this version of mmreplay wrote"
    )
