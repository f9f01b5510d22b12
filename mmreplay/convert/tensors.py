"""Named tensors in one safetensors file, written and read a block of rows at a time.

For files whose tensors another library names and lays out; a buffer of our own goes
through `safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert import safetensors_file
from mmreplay.convert.array_file import ArrayFile
from mmreplay.convert.arrays import Column
from mmreplay.convert.base import BLOCK_NBYTES, Block
from mmreplay.convert.safetensors_file import Columns, SafetensorsPlan
from mmreplay.convert.staging import Staging
from mmreplay.errors import FormatError
from mmreplay.files import File
from mmreplay.schema.dtypes import storage_dtype

Arrays = Mapping[str, NDArray[np.generic]]


def block_rows(columns: Columns) -> int:
    """Rows of all columns that make a block, at least 1.

    Args:
        columns: Dtype name and shape of a row by name.
    """
    nbytes = sum(
        storage_dtype(dtype).itemsize * int(np.prod(shape, dtype=object))
        for dtype, shape in columns.values()
    )
    return max(1, BLOCK_NBYTES // max(1, nbytes))


def write_tensors(
    target: Path,
    columns: Columns,
    rows: int,
    read: Callable[[int, int], Arrays],
    told: Mapping[str, str],
) -> None:
    """Write a file, which replaces what is there whole, or not at all.

    Args:
        target: The file.
        columns: Dtype name and shape of a row by name.
        rows: Of every tensor.
        read: Gives rows ``[first, stop)`` of all of them, ``[stop - first, *shape]``.
        told: Texts for the file's metadata.
    """
    plan = SafetensorsPlan(columns, rows, told)
    staging = Staging(target, overwrite=True)
    try:
        file = ArrayFile(staging.open(plan.nbytes), plan, rows)
        try:
            step = block_rows(columns)
            for first in range(0, rows, step):
                stop = min(rows, first + step)
                none = np.zeros(stop - first, np.int64)
                flags = none.astype(np.uint8)
                file.write(Block(read(first, stop), none, none, flags))
            file.finish()
        finally:
            file.close()
        staging.publish()
    finally:
        staging.abort()


class TensorFile:
    """A safetensors file that is open for reading; use ``with``.

    Attributes:
        told: The file's metadata.
        shapes: Shape of each tensor, rows first.
    """

    def __init__(self, path: Path) -> None:
        """Open it and check its header.

        Raises:
            FormatError: It is no safetensors file, or one that is damaged.
        """
        self._file = File.open(path, None)
        try:
            told, columns = safetensors_file.parse(self._file)
        except BaseException:
            self._file.close()
            raise
        self.told: Mapping[str, Any] = told
        self.shapes = {name: column.shape for name, column in columns.items()}
        self._columns: dict[str, Column] = columns

    def read(self, name: str, first: int, stop: int) -> NDArray[np.generic]:
        """Rows ``[first, stop)`` of a tensor."""
        column = self._columns[name]
        assert column.offset is not None
        out = np.empty((stop - first, *column.shape[1:]), column.stored)
        if out.nbytes:
            place = column.offset + first * column.row_nbytes
            self._file.pread_into(out.reshape(-1).view(np.uint8).data, place)
        return out

    def expect(self, columns: Columns, rows: int) -> None:
        """Refuse a file that does not hold exactly these tensors.

        Raises:
            FormatError: A tensor is missing, unknown, or of another dtype or shape.
        """
        got = {name: (c.dtype, c.shape) for name, c in self._columns.items()}
        wanted = {n: (dtype, (rows, *shape)) for n, (dtype, shape) in columns.items()}
        for name in sorted(got.keys() | wanted.keys()):
            if got.get(name) != wanted.get(name):
                raise FormatError(
                    f"{self._file.path}: tensor {name!r}: got "
                    f"{_told(got.get(name))}, expected {_told(wanted.get(name))}; give "
                    "the metadata that was saved with the file"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _told(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if tensor is None else f"{tensor[0]}{list(tensor[1])}"
