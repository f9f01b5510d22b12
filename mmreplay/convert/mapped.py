"""Casts, renames and drops fields of a reader, in this order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Reader
from mmreplay.convert.description import PRIORITY, Description
from mmreplay.convert.select import paths_of
from mmreplay.errors import SchemaError, SourceError, shown, undone_by
from mmreplay.nesting import SEPARATOR, under
from mmreplay.ring import Span
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import bfloat16_bits, canonical_name, from_bfloat16_bits

Numbers = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Changes:
    """What becomes of fields; none changes by default.

    Attributes:
        cast: Dtype by path.
        rename: New path by path of a field or subtree.
        drop: Paths or subtrees, by the names of the source.
    """

    cast: Mapping[str, str] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    drop: Sequence[str] = ()


def change(reader: Reader, changes: Changes) -> Reader:
    """A reader of the changed fields, which closes the other one with itself.

    Raises:
        SchemaError: A field is unknown, two get one name, none is left, or a field
            cannot be cast; the reader is closed.
    """
    if not (changes.cast or changes.rename or changes.drop):
        return reader
    with undone_by(reader.close):
        return ChangedReader(reader, changes)


class ChangedReader(Reader):
    """Reads the rows of another reader with other fields.

    Statistics go with a cast or a new name, as they are of the fields before.
    """

    def __init__(self, reader: Reader, changes: Changes) -> None:
        """Wrap a reader, which is closed with this one."""
        self.report, self._reader = reader.report, reader
        description, own_names = reader.describe(), reader.own_names()
        schema = description.schema
        dropped: set[str] = set()
        if changes.drop:
            dropped.update(paths_of(schema.paths, _listed("drop", changes.drop), own_names))
        self._paths = tuple(path for path in schema.paths if path not in dropped)
        if not self._paths:
            raise SchemaError(
                f"drop leaves no field of {', '.join(schema.paths[:20])}. Drop fewer."
            )
        self._casts: dict[str, Cast] = {}
        for name, dtype in changes.cast.items():
            (path, *more) = paths_of(schema.paths, [name], own_names)
            if more:
                raise SchemaError(f"cast: {shown(name)} is several fields. Cast each by its path.")
            self._casts[path] = Cast(path, schema.fields[path], dtype)
        self._names = {path: path for path in self._paths}
        for name, new in changes.rename.items():
            for path in paths_of(schema.paths, [name], own_names):
                top = name if path in under(schema.paths, name) else path
                self._names[path] = _joined(new, path[len(top) :])
        fields: dict[str, Field] = {}
        for path in self._paths:
            new = self._names[path]
            if new in fields:
                raise SchemaError(f"two fields would be named {new!r}. Rename or drop one of them.")
            cast = self._casts.get(path)
            fields[new] = schema.fields[path] if cast is None else cast.field
        roles = {
            role: self._names.get(path, changes.rename.get(path, path))
            for role, path in schema.roles.items()
            if any(each in self._paths for each in under(schema.paths, path))
        }
        changed = bool(changes.cast or changes.rename)
        self._description = replace(
            description,
            schema=Schema.from_flat(fields, roles),
            statistics={} if changed else description.statistics,
            heap_nbytes=description.heap_nbytes if any(f.varies for f in fields.values()) else 0,
            values=None,
        )
        reader.only(self._paths)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for block in self._reader.blocks(rows_per_block):
            columns = {}
            for path in self._paths:
                column, cast = block.columns[path], self._casts.get(path)
                columns[self._names[path]] = column if cast is None else cast(column)
            if PRIORITY in block.columns:
                columns[PRIORITY] = block.columns[PRIORITY]
            yield replace(block, columns=columns)
        for cast in self._casts.values():
            if cast.error:
                self.report.note(
                    f"field {cast.path!r} was rounded to {cast.field.dtype}, by at most "
                    f"{cast.error:.2g} of a value"
                )

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        return self._reader.marks()

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`."""
        for block in self._reader.measures():
            known = (path for path in self._paths if path in block.columns)
            yield replace(block, columns={self._names[p]: block.columns[p] for p in known})

    def narrow(self, span: Span) -> None:
        """See `Reader.narrow`."""
        self._reader.narrow(span)

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()


class Cast:
    """Values of a field in another dtype.

    Attributes:
        path: Of the field.
        field: As it becomes.
        error: The largest relative error of a float so far.
    """

    def __init__(self, path: str, field: Field, dtype: str) -> None:
        """Check that the field can become one of the dtype.

        Raises:
            SchemaError: It cannot.
        """
        name = canonical_name(dtype)
        if field.varies:
            raise SchemaError(
                f"cast: values of field {path!r} have any length, and stay as they are. Cast "
                "fields of one shape."
            )
        self.path, self._from, self.error = path, field, 0.0
        self.field = Field(field.shape, name, exact=field.exact, mutable=field.mutable)

    def __call__(self, column: Numbers) -> Numbers:
        """Values ``[N, *shape]`` in the new dtype.

        Raises:
            SourceError: One does not fit.
        """
        column = np.asarray(column)
        numbers = self._from.rules.numbers(self._from, column)
        assert numbers is not None
        dtype = self.field.dtype
        if dtype == self._from.dtype:
            return column
        with np.errstate(all="ignore"):
            if dtype == "bfloat16":
                cast = bfloat16_bits(np.asarray(numbers, np.float64)).astype("<u2")
                back = from_bfloat16_bits(cast).astype(np.float64)
            else:
                cast = numbers.astype(self.field.numpy)
                back = cast
            if "float" in dtype:
                before = np.asarray(numbers, np.float64)
                wrong = np.isfinite(before) & ~np.isfinite(back)
                relative = np.abs(before - back) / np.abs(before)
                rounded = np.isfinite(before) & (before != 0) & ~wrong
                if rounded.any():
                    self.error = max(self.error, float(relative[rounded].max()))
            else:
                # By value: an integer that wraps, a fraction, NaN.
                wrong = np.asarray(cast != numbers, bool)
        if wrong.any():
            value = numbers[wrong][0]
            raise SourceError(
                f"cast: field {self.path!r} has the value {value}, which {dtype} does not hold. "
                "Cast it to another dtype."
            )
        return cast


def _listed(name: str, value: Sequence[str]) -> Sequence[str]:
    if isinstance(value, str):
        raise SchemaError(f"{name} must be a list of paths, got {value!r}. Pass [{value!r}].")
    return value


def _joined(new: str, rest: str) -> str:
    """A new path, and what stands below the one that it replaces."""
    if not isinstance(new, str) or not new:
        raise SchemaError(f"rename: a path must be a text, got {shown(new)}. Pass such as 'a/b'.")
    return new + rest if not rest or rest.startswith(SEPARATOR) else rest
