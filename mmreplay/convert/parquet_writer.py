"""Rows into a parquet file, or into part files, a row group at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.description import FLAGS, KEY, Description
from mmreplay.convert.parquet_columns import column_of, decode, encode
from mmreplay.convert.parquet_file import Compression, PartWriter
from mmreplay.convert.staging import Staging
from mmreplay.convert.steps import EPISODE, STEP, Steps
from mmreplay.errors import FormatError
from mmreplay.files import File
from mmreplay.schema.dtypes import storage_dtype
from mmreplay.sums import crc32c

SUMS = "mmreplay.crc32c"
FIRST_ROW = "mmreplay.first_row"
"""Row of the whole dataset that a part of several begins with."""


def part_name(number: int) -> str:
    """What the files of a folder are called, from 0 on."""
    return f"part-{number:05d}.parquet"


def owns(folder: Path) -> bool:
    """Whether a folder holds such files, from the first on, and nothing else."""
    names = {each.name for each in folder.iterdir()}
    return names == {part_name(number) for number in range(len(names))}


class ParquetWriter(Writer):
    """Writes rows in row groups; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, packed: Compression,
        vectors: str, group_nbytes: int, file_nbytes: int | None, overwrite: bool,
    ) -> None:  # fmt: skip
        self.nbytes = 0
        self.notes = Notes()
        self._description, self._packed = description, packed
        # A row group lies in one file.
        group_nbytes = min(group_nbytes, file_nbytes or group_nbytes)
        self._room = max(1, group_nbytes // description.row_nbytes)
        self._file_nbytes = file_nbytes
        self._steps = Steps(description.num_envs)
        self._derived = self._names()
        self._schema = pa.schema(list(self._fields(vectors)))
        # Made now, so that what takes too much room is refused before it is written.
        self._told = description.to_bytes()
        self._held: list[Any] = []
        self._done = self._held_rows = self._number = 0
        self._part: PartWriter | None = None
        self._staging = Staging(
            target, overwrite=overwrite, folder=file_nbytes is not None, owns=owns
        )

    def _names(self) -> dict[str, str]:
        """What the two derived columns are called: a field may have their names."""
        found = {}
        for name in (EPISODE, STEP):
            free = name
            while free in self._description.columns:
                free = f"_{free}"
            if free != name:
                self.notes.note(
                    f"the derived column {name!r} is called {free!r}, as a field has "
                    "its name"
                )
            found[name] = free
        return found

    def _fields(self, vectors: str) -> Iterator[Any]:
        for name, (dtype, shape) in self._description.columns.items():
            yield column_of(name, dtype, shape, vectors)
            if name == FLAGS:
                for derived in self._derived.values():
                    yield column_of(derived, "int64", (), vectors)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        if self._done + self._held_rows + len(block) > self._description.rows:
            raise FormatError(
                f"got more than the {self._description.rows} rows described, expected "
                "no more; the source changed meanwhile"
            )
        episodes, steps = self._steps.number(block)
        derived = {self._derived[EPISODE]: episodes, self._derived[STEP]: steps}
        first = 0
        while first < len(block):
            stop = min(first + self._room - self._held_rows, len(block))
            self._held.append(self._batch(block, derived, slice(first, stop)))
            self._held_rows += stop - first
            first = stop
            if self._held_rows == self._room:
                self._flush()

    def _batch(
        self, block: Block, derived: dict[str, NDArray[np.int64]], rows: slice
    ) -> Any:
        arrays = []
        for field in self._schema:
            name = field.name
            column = derived[name] if name in derived else block.column(name)
            arrays.append(encode(column[rows], field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _flush(self) -> None:
        """Write what is held as a row group, into a new part where one is full."""
        if self._part is None:
            self._begin()
        assert self._part is not None
        batches, self._held = self._held, []
        if batches:
            self._part.write(batches)
            for name in self._description.columns:
                for batch in batches:
                    self._add(name, batch.column(name))
        self._done += self._held_rows
        self._held_rows = 0
        size = self._part.rows * self._description.row_nbytes
        if self._file_nbytes is not None and size >= self._file_nbytes:
            self._end()

    def _add(self, name: str, array: Any) -> None:
        dtype, shape = self._description.columns[name]
        self._sums[name] = sum_of(decode(array, dtype, shape), self._sums[name])

    def _begin(self) -> None:
        path = self._staging.path
        if self._file_nbytes is None:
            file = self._staging.open(0)
        else:
            file = File.create(path / part_name(self._number), 0)
            self._number += 1
        self._sums = dict.fromkeys(self._description.columns, 0)
        self._first = self._done
        columns = self._description.columns.values()
        widest = max(8, *(_nbytes(dtype, shape) for dtype, shape in columns))
        self._part = PartWriter(file, self._schema, self._packed, widest)

    def _end(self) -> None:
        assert self._part is not None
        sums = {name: f"{crc:08x}" for name, crc in self._sums.items()}
        sums[KEY] = f"{crc32c(memoryview(self._told)):08x}"
        metadata: dict[str, str | bytes] = {KEY: self._told, SUMS: json.dumps(sums)}
        if self._file_nbytes is not None:
            metadata[FIRST_ROW] = str(self._first)
        part, self._part = self._part, None
        part.close(metadata)

    def finish(self) -> None:
        """See `Writer.finish`."""
        # An empty dataset is a file too, with a schema and no rows.
        if self._held or not (self._part or self._done):
            self._flush()
        if self._part is not None:
            self._end()
        if self._done != self._description.rows:
            raise FormatError(
                f"got {self._done} rows, expected the {self._description.rows} "
                "described; the source was cut"
            )
        self.nbytes = self._staging.publish()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._held = []
        if self._part is not None:
            part, self._part = self._part, None
            part.close(None)
        self._staging.abort()


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    itemsize = storage_dtype(dtype).itemsize
    return itemsize * int(np.prod(shape, dtype=object))


def sum_of(column: NDArray[np.generic], before: int) -> int:
    """CRC32C of a column's bytes in C order, going on from one of earlier rows."""
    whole = np.ascontiguousarray(column)
    return crc32c(whole.reshape(-1).view(np.uint8).data, before)
