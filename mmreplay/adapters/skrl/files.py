"""Files of skrl's and rofunc's memories in npz, pt and csv; see `registry.FileLayout`.

Each tensor is ``[memory_size, num_envs, *size]``. The files have no cursor and do not
say which rows were written; floats of rows that were not are NaN. The files that are
written here are chronological: each environment starts at row 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmreplay.adapters.skrl.tensor_file import LAYOUT, SkrlReader, SkrlWriter, refuse_dtypes
from mmreplay.convert import npz, pt
from mmreplay.convert.base import Notes, Reader, Writer, refuse_empty
from mmreplay.convert.description import Description
from mmreplay.disk.files import File
from mmreplay.errors import undone_by
from mmreplay.schema.source_names import own_names_of

FILE_NAME = re.compile(r"\d\d-\d\d-\d\d_\d\d-\d\d-\d\d-\d+_memory_0x[0-9a-f]+\.\w+")


def open_reader(
    format: str,
    path: Path,
    *,
    size: int | None = None,
    cursor: int | None = None,
    num_envs: int = 1,
    dtypes: Mapping[str, str] | None = None,
    allow_expansion: bool = False,
    fields: Sequence[str] | None = None,
) -> Reader:
    """Open a memory's file as a source.

    Args:
        format: Name of the file's format.
        path: The file.
        size: Steps that were written, in npz and pt where NaNs do not tell.
        cursor: The oldest step, of a memory that is full.
        num_envs: Environments, whose rows stand in turns in csv.
        dtypes: Dtype name by field, in csv.
        allow_expansion: Unpack what holds more than 1,000 times what it takes.
        fields: See `name_fields`.
    """
    if format == "csv":
        from mmreplay.adapters.skrl.csv_file import interleave
        from mmreplay.convert import csv

        return interleave(csv.open_plain(path, dtypes or {}, allow_expansion), num_envs, cursor)
    file = File.open(path, None)
    with undone_by(file.close):
        notes = Notes()
        own_names: dict[str, str] = {}
        if format == "npz":
            columns, _ = npz.read_columns(file, notes, allow_expansion)
        else:
            columns = pt.read_columns(file, notes, fields=fields, own_names=own_names)
        names = own_names_of(own_names)
        return SkrlReader(file, columns, notes, size, cursor, names)


def recognizes(path: Path) -> bool:
    """Return whether skrl or rofunc named a file."""
    return FILE_NAME.fullmatch(path.name) is not None


def open_writer(
    format: str,
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    force: bool = False,
) -> Writer:
    """Make a memory's file as a target.

    Args:
        format: Name of the file's format.
        target: The file.
        description: What will come.
        overwrite: Replace an existing file.
        force: Write rows of more than 4,096 columns in csv.
    """
    if format == "csv":
        from mmreplay.adapters.skrl.csv_file import SkrlCsvWriter

        return SkrlCsvWriter(target, description, overwrite, force)
    if format == "npz":
        refuse_dtypes(description, "npz", "bfloat16")
    plan = npz.NpzPlan if format == "npz" else pt.PtPlan
    return SkrlWriter(target, description, plan, overwrite)


def planned(
    format: str, description: Description, *, target: Path | None = None, force: bool = False
) -> None:
    """Refuse what cannot be written.

    Raises:
        SchemaError: There are no steps, or the layout cannot hold a field.
    """
    if format == "npz":
        refuse_dtypes(description, "npz", "bfloat16")
    refuse_empty(description.rows, LAYOUT)
    if format == "csv":
        from mmreplay.adapters.skrl.csv_file import cells_of_layout

        cells_of_layout(target, description, force)
