"""Fields as columns of text: one a value, ``field.i`` for those of vectors."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmreplay.convert.tables import Kinds
from mmreplay.errors import SchemaError
from mmreplay.schema.dtypes import storage_dtype

MAX_COLUMNS = 4096
"""More are hardly a table any more, and are refused unless the user insists."""
MOST_COLUMNS = 200_000
CELL_NBYTES = 26
"""Of the longest number, ``-2.2250738585072014e-308``, and what stands around it."""
NAN_BITS = {
    dtype: np.array([np.nan], dtype).view(f"u{np.dtype(dtype).itemsize}")[0]
    for dtype in ("float16", "float32", "float64")
}


class Cells:
    """Which columns of text hold which fields.

    Attributes:
        kinds: Dtype name and row shape by field.
        names: Every column, in order.
    """

    def __init__(self, kinds: Kinds) -> None:
        """Name the columns.

        Raises:
            SchemaError: Two of them have one name, or a name has several lines.
        """
        self.kinds = dict(kinds)
        self._of = {field: _names(field, shape) for field, (_, shape) in kinds.items()}
        self.names = [name for names in self._of.values() for name in names]
        for name in self.names:
            if "\n" in name or "\r" in name:
                raise SchemaError(
                    f"column {name!r}: got a name of several lines, expected a header "
                    "of one; leave the field out with fields=, or choose another format"
                )
        if len(set(self.names)) != len(self.names):
            twice = next(n for n in self.names if self.names.count(n) > 1)
            raise SchemaError(
                f"column {twice!r}: two fields need it, expected one column a value; "
                "leave one of them out with fields=, or rename it"
            )

    def types(self) -> dict[str, Any]:
        """Arrow type by column; float16 passes through float32, without loss."""
        return {
            name: _type(dtype)
            for field, (dtype, _) in self.kinds.items()
            for name in self._of[field]
        }

    def header(self) -> bytes:
        """The first line."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(self.names)
        return text.getvalue().encode()

    def encode(self, columns: Mapping[str, NDArray[np.generic]], rows: slice) -> Any:
        """A record batch of some rows of all fields."""
        arrays = []
        for field, (dtype, _) in self.kinds.items():
            part = columns[field][rows]
            # A column's values lie beside each other for Arrow: the transpose, copied.
            flat = part.reshape(len(part), -1).T
            kind = _type(dtype)
            if dtype == "float16":
                flat = flat.astype(np.float32)
            whole = np.ascontiguousarray(flat)
            arrays += [pa.array(column, kind) for column in whole]
        return pa.RecordBatch.from_arrays(arrays, self.names)

    def decode(
        self, batch: Any, fields: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Some fields of a record batch, ``[N, *shape]`` each; missing is NaN."""
        found = {}
        for field in fields:
            dtype, shape = self.kinds[field]
            names = self._of[field]
            made = np.empty((batch.num_rows, len(names)), storage_dtype(dtype))
            for number, name in enumerate(names):
                array = batch.column(name)
                if array.null_count:
                    array = array.fill_null(pa.scalar(float("nan"), array.type))
                made[:, number] = array.to_numpy(zero_copy_only=False)
            found[field] = made.reshape(batch.num_rows, *shape)
        return found

    def columns_of(self, fields: Sequence[str]) -> list[str]:
        """Columns of some fields."""
        return [name for field in fields for name in self._of[field]]


def cells_of(kinds: Kinds, force: bool) -> Cells:
    """The columns of a file that is to be written.

    Raises:
        SchemaError: A field is bfloat16, there are very many columns, or a name is none
            of a column.
    """
    _refuse_unfit(kinds, force)
    return Cells(kinds)


def _refuse_unfit(kinds: Kinds, force: bool) -> None:
    columns = 0
    for field, (dtype, shape) in kinds.items():
        if dtype == "bfloat16":
            raise SchemaError(
                f"field {field!r}: got bfloat16, expected a dtype that has a text of "
                "its own in csv; leave it out with fields=, or choose parquet or npz"
            )
        columns += int(np.prod(shape, dtype=object))
    most = MOST_COLUMNS if force else MAX_COLUMNS
    if columns > most:
        way_out = "" if force else ", or insist by force=True (--option force=true)"
        raise SchemaError(
            f"csv: got rows of {columns} values, expected at most {most} columns; "
            f"leave images out with fields=, choose parquet or npz{way_out}"
        )


def lost_nans(column: NDArray[np.generic]) -> int:
    """How many NaNs of a column are not the one that text can say."""
    if column.dtype.kind != "f":
        return 0
    nan = np.isnan(column)
    if not nan.any():
        return 0
    bits = column[nan].view(f"u{column.dtype.itemsize}")
    return int((bits != NAN_BITS[column.dtype.name]).sum())


def _names(field: str, shape: tuple[int, ...]) -> list[str]:
    if not shape:
        return [field]
    return [f"{field}.{i}" for i in range(int(np.prod(shape, dtype=object)))]


def _type(dtype: str) -> Any:
    if dtype == "float16":
        return pa.float32()
    return pa.from_numpy_dtype(storage_dtype(dtype))
