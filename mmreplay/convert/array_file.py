"""Files of one array a column, written: where all lies is known before the first row.

Every block goes straight to its place; what stands around the arrays, checksums
included, is written last. Checksums are taken, and the device is kept busy, by threads
beside the one that makes rows, and let go of the interpreter meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.ahead import Threads
from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.device import way_to
from mmreplay.convert.staging import Staging
from mmreplay.errors import FormatError
from mmreplay.files import File
from mmreplay.sums import Sum


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a column lies in a file that is being written.

    Attributes:
        offset: Of its first byte.
        row_nbytes: Bytes of one row.
        start: Checksum of what stands before it under the same checksum.
    """

    offset: int
    row_nbytes: int
    start: int = 0


class Plan(Protocol):
    """Where everything of a file that is to be written lies.

    Attributes:
        nbytes: Of the file.
    """

    nbytes: int

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """Where each column lies."""

    @property
    def sum(self) -> Sum:
        """What checks a column."""

    def around(self, sums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """What stands around the columns, as (offset, bytes), once sums are known."""


class ArrayFile:
    """The columns of one file, each written to its place, row after row."""

    def __init__(self, file: File, plan: Plan, rows: int) -> None:
        """Write so many rows into an open file, which is closed with this.

        Raises:
            FullError: No space is left for so large a file, which is closed then.
        """
        try:
            self._way = way_to(file, len(plan.pieces))
        except BaseException:
            file.close()
            raise
        self._file = file
        self._plan = plan
        self._rows = rows
        self._done = 0
        self._sums = {name: piece.start for name, piece in plan.pieces.items()}
        self._pool = Threads(2, "mmreplay-export")

    @property
    def room(self) -> int:
        """Rows that are still to come."""
        return self._rows - self._done

    def write(self, block: Block) -> None:
        """Take the next rows; the block's arrays are not kept."""
        if len(block) > self.room:
            raise FormatError(
                f"got {self._done + len(block)} rows, expected the {self._rows} "
                "described; the source changed meanwhile"
            )
        columns = {name: block.column(name) for name in self._plan.pieces}
        laid = {
            name: self._pool.submit(bytes_of, column)
            for name, column in columns.items()
            if not column.flags.c_contiguous
        }
        jobs = {}
        try:
            for name, piece in self._plan.pieces.items():
                job = laid.get(name)
                data = job.result() if job is not None else bytes_of(columns[name])
                jobs[name] = self._pool.submit(self._plan.sum, data, self._sums[name])
                offset = piece.offset + self._done * piece.row_nbytes
                self._way.write(data, offset)
        finally:
            # Whatever happens, nobody looks at the block after this call.
            wait(laid.values())
            wait(jobs.values())
        self._sums |= {name: job.result() for name, job in jobs.items()}
        self._done += len(block)

    def finish(self) -> None:
        """Write what stands around the columns, and close the file, not yet synced."""
        if self.room:
            raise FormatError(
                f"got {self._done} rows, expected the {self._rows} described; the "
                "source was cut"
            )
        self._way.finish()
        for offset, data in self._plan.around(self._sums):
            self._file.pwrite(data, offset)
        self.close()

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        self._pool.shutdown()
        self._way.close()
        self._file.close()


def bytes_of(column: NDArray[np.generic]) -> memoryview:
    """The bytes of a column; packed fields come as strided views, and are copied."""
    return np.ascontiguousarray(column).reshape(-1).view(np.uint8).data


class ArrayWriter(Writer):
    """Writes one such file; see `Writer`."""

    def __init__(
        self, target: Path, description: Description, plan: Plan, overwrite: bool
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._file: ArrayFile | None = None
        self._staging = Staging(target, overwrite=overwrite)
        try:
            file = self._staging.open(plan.nbytes)
            self._file = ArrayFile(file, plan, description.rows)
        except BaseException:
            self.abort()
            raise

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        assert self._file is not None
        self._file.write(block)

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._file is not None
        self._file.finish()
        self.nbytes = self._staging.publish()

    def abort(self) -> None:
        """See `Writer.abort`."""
        if self._file is not None:
            self._file.close()
        self._staging.abort()
