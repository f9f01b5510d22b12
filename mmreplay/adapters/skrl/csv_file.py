"""Memories of skrl and rofunc in csv: a line for each step and environment."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.csv as arrow

from mmreplay.adapters.skrl.tensor_file import InterleavedReader, SkrlWriter, rows_per_environment
from mmreplay.convert import csv
from mmreplay.convert.array_file import ArrayColumn, Scan, Stored
from mmreplay.convert.base import Block, Columns, Notes, Reader, Writer, default_rows
from mmreplay.convert.csv import Cells, cells_of
from mmreplay.convert.description import Description
from mmreplay.convert.npz import NpzPlan
from mmreplay.convert.staging import STAGED, Staging
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import SchemaError, undone_by
from mmreplay.schema.dtypes import storage_dtype


class SkrlCsvWriter(Writer):
    """Writes such a file; see `Writer`.

    Rows come environment by environment and go step by step: in between they lie as
    arrays in a file beside the target.
    """

    def __init__(
        self, target: Path, description: Description, overwrite: bool, force: bool
    ) -> None:
        self.nbytes = 0
        self._cells = cells_of_layout(target, description, force)
        self._num_envs = description.num_envs
        self._rows = default_rows(description)
        self._file: File | None = None
        self._spool: SkrlWriter | None = None
        self._spool_path = target.with_name(f"{STAGED}rows-{target.name}")
        self._staging = Staging(target, overwrite=overwrite)
        with undone_by(self.abort):
            self._spool = SkrlWriter(self._spool_path, description, NpzPlan, True)
            self._file = self._staging.open(0)
        self.notes: Notes = self._spool.notes

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        assert self._spool is not None
        self._spool.write(block)

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._spool is not None
        assert self._file is not None
        end = self._put(self._cells.header(), 0)
        steps, cells = self._spool.steps, self._spool.cells
        self._spool.finish()
        with closing(File.open(self._spool_path, None)) as spool:
            columns = self._spooled(spool, steps)
            for found in Scan(columns, self._rows, cells).blocks():
                end = self._put(self._text(found), end)
        self._file.close()
        files.remove_tree(self._spool_path)
        self.nbytes = self._staging.publish()
        csv.remove_stale(self._staging.target)

    def _spooled(self, spool: File, steps: int) -> dict[str, ArrayColumn]:
        """The arrays between, a row a cell: as they were written, whatever their names.

        They are ours, so that nothing of them is to be found out or checked.
        """
        num_envs = self._num_envs
        kinds = self._cells.kinds
        plan = NpzPlan({n: (d, (steps, num_envs, *s)) for n, (d, s) in kinds.items()})
        return {
            name: ArrayColumn(
                dtype,
                storage_dtype(dtype),
                (steps * num_envs, *shape),
                partial(Stored, spool, plan.spans[name].offset, name),
            )
            for name, (dtype, shape) in kinds.items()
        }

    def _text(self, columns: Columns) -> memoryview:
        batch = self._cells.encode(columns, slice(None))
        cells = [
            compute.if_else(cell, "True", "False") if cell.type == pa.bool_() else cell
            for cell in batch.columns
        ]
        batch = pa.RecordBatch.from_arrays(cells, batch.schema.names)
        sink = pa.BufferOutputStream()
        options = arrow.WriteOptions(include_header=False, quoting_style="none")
        arrow.write_csv(batch, sink, options)
        return memoryview(sink.getvalue())

    def _put(self, data: bytes | memoryview, end: int) -> int:
        assert self._file is not None
        self._file.pwrite(data, end)
        return end + len(data)

    def abort(self) -> None:
        """See `Writer.abort`."""
        if self._spool is not None:
            self._spool.abort()
        if self._file is not None:
            self._file.close()
            files.remove_tree(self._spool_path)
        self._staging.abort()


def interleave(reader: Reader, num_envs: int, cursor: int | None = None) -> Reader:
    """The rows of a table as steps that environments took in turns.

    Args:
        reader: Of one environment; closed with what is returned.
        num_envs: Environments.
        cursor: The oldest step, of a memory that was full.

    Raises:
        SchemaError: A number is not legal.
    """
    rows = reader.describe().rows
    if type(num_envs) is not int or not 1 <= num_envs <= max(1, rows):
        raise SchemaError(
            f"num_envs must be an integer in [1, {max(1, rows)}] for {rows} rows, got "
            f"{num_envs!r}. Pass the number of environments of the memory."
        )
    steps = rows // num_envs
    if cursor is not None and (
        type(cursor) is not int or not 0 <= cursor < steps or rows % num_envs
    ):
        raise SchemaError(
            f"cursor must be an integer in [0, {steps}) for {rows} rows of {num_envs} "
            f"environments, and every step complete, got {cursor!r}. Leave it out."
        )
    if cursor is None:
        reader.report.doubt(
            "rows were read as chronological: if the memory was full, its oldest step "
            "is elsewhere; pass cursor="
        )
    return InterleavedReader(reader, rows_per_environment(rows, num_envs), cursor or 0)


def cells_of_layout(target: Path | None, description: Description, force: bool) -> Cells:
    """The columns of such a file.

    Raises:
        SchemaError: It cannot hold the fields, or is to be gzipped.
    """
    if target is not None and target.name.lower().endswith(".gz"):
        raise SchemaError(
            f"{target}: skrl's layout is not gzipped. Use a name that ends in .csv, "
            "and compress the file afterwards."
        )
    fields = description.schema.fields
    kinds = {
        path: (fields[path].dtype, (int(np.prod(fields[path].shape)),)) for path in sorted(fields)
    }
    return cells_of(kinds, force)
