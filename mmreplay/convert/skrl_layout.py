"""The layout of skrl and rofunc in npz, pt and csv files; see `registry.Layout`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmreplay.convert import npz, pt
from mmreplay.convert.base import Notes, Reader, Writer, refuse_empty
from mmreplay.convert.description import Description
from mmreplay.convert.skrl import LAYOUT, SkrlWriter, refuse_dtypes
from mmreplay.convert.skrl_read import SkrlReader
from mmreplay.convert.skrl_read import recognizes as recognizes
from mmreplay.disk.files import File


def open_reader(
    format: str,
    path: Path,
    *,
    size: int | None = None,
    cursor: int | None = None,
    num_envs: int = 1,
    dtypes: Mapping[str, str] | None = None,
    allow_expansion: bool = False,
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
    """
    if format == "csv":
        from mmreplay.convert import csv
        from mmreplay.convert.skrl_csv import deal

        return deal(
            csv.open_plain(path, dtypes or {}, allow_expansion), num_envs, cursor
        )
    file = File.open(path, None)
    try:
        notes = Notes()
        if format == "npz":
            columns, _ = npz.read_columns(file, notes, allow_expansion)
        else:
            columns = pt.read_columns(file, notes)
        return SkrlReader(file, columns, notes, size, cursor)
    except BaseException:
        file.close()
        raise


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
        overwrite: Replace what is there.
        force: Write rows of more than 4,096 columns in csv.
    """
    if format == "csv":
        from mmreplay.convert.skrl_csv import SkrlCsvWriter

        return SkrlCsvWriter(target, description, overwrite, force)
    if format == "npz":
        refuse_dtypes(description, "npz", "bfloat16")
    plan = npz.NpzPlan if format == "npz" else pt.PtPlan
    return SkrlWriter(target, description, plan, overwrite)


def planned(
    format: str,
    description: Description,
    *,
    target: Path | None = None,
    force: bool = False,
) -> None:
    """Refuse what cannot be written.

    Raises:
        SchemaError: There are no steps, or the layout cannot hold a field.
    """
    if format == "npz":
        refuse_dtypes(description, "npz", "bfloat16")
    refuse_empty(description.rows, LAYOUT)
    if format == "csv":
        from mmreplay.convert.skrl_csv import skrl_cells

        skrl_cells(target, description, force)
