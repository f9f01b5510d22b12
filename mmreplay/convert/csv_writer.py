"""Rows into a csv file and its sidecar."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow
from numpy.typing import NDArray

from mmreplay.convert.ahead import in_order
from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.csv_columns import cells_of, lost_nans
from mmreplay.convert.csv_sidecar import Publication, Sidecar, refuse_foreign
from mmreplay.convert.description import Description
from mmreplay.convert.staging import Staging
from mmreplay.errors import FormatError
from mmreplay.files import File
from mmreplay.sums import crc32c

PIECE_NBYTES = 1 << 20
"""Rows that one thread makes text of at a time; they become about three times that."""
GZ = ".gz"
LEVEL = 1
"""Of gzip, where none is given."""


class CsvWriter(Writer):
    """Writes rows as text; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, overwrite: bool, force: bool,
        level: int,
    ) -> None:  # fmt: skip
        self.nbytes = 0
        self.notes = Notes()
        self._description = description
        self._cells = cells_of(description.columns, force)
        # Made now, so that what takes too much room is refused before it is written.
        Sidecar(description, 0, 0).to_json()
        self._done = self._end = self._crc = self._lost = 0
        gzipped = target.name.lower().endswith(GZ)
        # Without a time in its header, equal buffers give equal files.
        self._deflate = zlib.compressobj(level, wbits=31) if gzipped else None
        refuse_foreign(target, overwrite)
        self._publication = Publication(target)
        self._staging = Staging(target, overwrite=overwrite)
        self._file: File | None = None
        try:
            self._file = self._staging.open(0)
            self._put(memoryview(self._cells.header()))
        except BaseException:
            self.abort()
            raise

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        self._done += len(block)
        if self._done > self._description.rows:
            raise FormatError(
                f"got {self._done} rows, expected the {self._description.rows} "
                "described; the source changed meanwhile"
            )
        columns = {name: block.column(name) for name in self._cells.kinds}
        self._count_nans(columns)
        for text in self._texts(columns, len(block)):
            self._put(text)

    def _count_nans(self, columns: dict[str, NDArray[np.generic]]) -> None:
        self._lost += sum(lost_nans(column) for column in columns.values())
        if self._lost:
            self.notes.doubts[:] = [
                f"{self._lost} NaNs lose their sign or payload: text has one NaN only"
            ]

    def _texts(
        self, columns: dict[str, NDArray[np.generic]], count: int
    ) -> Iterator[memoryview]:
        """Text of all rows, in order; a few pieces are made at a time."""
        rows = max(1, PIECE_NBYTES // self._description.row_nbytes)
        parts = (slice(at, min(at + rows, count)) for at in range(0, count, rows))
        return in_order(partial(self._text, columns), parts)

    def _text(self, columns: dict[str, NDArray[np.generic]], rows: slice) -> memoryview:
        sink = pa.BufferOutputStream()
        batch = self._cells.encode(columns, rows)
        arrow.write_csv(batch, sink, arrow.WriteOptions(include_header=False))
        return memoryview(sink.getvalue())

    def _put(self, text: memoryview) -> None:
        data = text if self._deflate is None else self._deflate.compress(text)
        self._append(memoryview(data))

    def _append(self, data: memoryview) -> None:
        assert self._file is not None
        if len(data):
            self._crc = crc32c(data, self._crc)
            self._file.pwrite(data, self._end)
            self._end += len(data)

    def finish(self) -> None:
        """See `Writer.finish`."""
        if self._done != self._description.rows:
            raise FormatError(
                f"got {self._done} rows, expected the {self._description.rows} "
                "described; the source was cut"
            )
        if self._deflate is not None:
            self._append(memoryview(self._deflate.flush()))
        self._close()
        sidecar = Sidecar(self._description, self._end, self._crc)
        self._publication.announce(sidecar)
        nbytes = self._staging.publish()
        self._publication.settle()
        self.nbytes = nbytes + len(sidecar.to_json())

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._publication.take_back()
        self._staging.abort()
