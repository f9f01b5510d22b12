"""Files of one array a column, written: where all lies is known before the first row.

Every block goes straight to its place; what stands around the arrays, checksums
included, is written last. Checksums are taken, and the device is kept busy, by threads
beside the one that writes, as both let go of the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.ahead import Threads
from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.staging import Staging
from mmreplay.errors import FormatError
from mmreplay.files import File
from mmreplay.sums import Sum

# The device is given what was written so far after so many bytes, so that the sync at
# the end finds little left.
SYNC_NBYTES = 64 << 20


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


class Syncs:
    """Gives what is being written to the device, in a thread."""

    def __init__(self, sync: Callable[[], None], pool: Threads) -> None:
        self._sync, self._pool = sync, pool
        self._written = 0
        self._job: Future[None] | None = None

    def count(self, nbytes: int) -> None:
        """Tell how much was written since.

        Raises:
            FailedError: The device refused what was written before.
        """
        self._written += nbytes
        if self._written < SYNC_NBYTES:
            return
        if self._job is not None:
            if not self._job.done():
                return
            self._job.result()
        self._written = 0
        self._job = self._pool.submit(self._sync)

    def wait(self) -> None:
        """Wait for the device; raises as `count` does."""
        if self._job is not None:
            job, self._job = self._job, None
            job.result()


class ArrayFile:
    """The columns of one file, each written to its place, row after row."""

    def __init__(self, file: File, plan: Plan, rows: int) -> None:
        """Write so many rows into an open file, which is closed with this."""
        self._file = file
        self._plan = plan
        self._rows = rows
        self._done = 0
        self._sums = {name: piece.start for name, piece in plan.pieces.items()}
        self._pool = Threads(2, "mmreplay-export")
        self._syncs = Syncs(file.sync, self._pool)

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
                self._file.pwrite_pieces(data, offset)
                self._syncs.count(len(data))
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
        for offset, data in self._plan.around(self._sums):
            self._file.pwrite(data, offset)
        self._syncs.wait()
        self.close()

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        # The file must not be closed under a thread that syncs it.
        self._pool.shutdown()
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
