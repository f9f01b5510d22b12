"""csv: numbers as text that reads back to the same bits, with the description beside.

One column a value, ``field.i`` for vectors; exact but for what NaNs carry. The sidecar
``<file>.mmreplay.json`` makes the same buffer again; without it the file is a table.
Names that end in ``.gz`` are gzipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from mmreplay.convert import csv_sidecar
from mmreplay.convert.base import Reader, Writer
from mmreplay.convert.csv_columns import cells_of
from mmreplay.convert.csv_plain import open_plain
from mmreplay.convert.csv_reader import CsvReader
from mmreplay.convert.csv_writer import GZ, LEVEL, CsvWriter
from mmreplay.convert.description import Description
from mmreplay.convert.losses import refuse_empty
from mmreplay.convert.skrl import LAYOUT, check_layout
from mmreplay.convert.skrl_csv import SkrlCsvWriter, deal, skrl_cells
from mmreplay.convert.skrl_read import meant
from mmreplay.errors import SchemaError
from mmreplay.files import File


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    force: bool = False,
    compression_level: int | None = None,
    layout: str | None = None,
) -> Writer:
    """Make a csv file and its sidecar as a target.

    Args:
        target: The file; gzipped if its name ends in ``.gz``.
        description: What will come.
        overwrite: Replace a file that is there.
        force: Write rows of more than 4,096 columns, as images make.
        compression_level: Of gzip, 0 to 9; 1 by default.
        layout: ``"skrl"`` for a memory of skrl or rofunc, without a sidecar.

    Raises:
        SchemaError: A field is bfloat16, or there are too many columns.
    """
    _check(target, compression_level, layout)
    if layout is not None:
        return SkrlCsvWriter(target, description, overwrite, force)
    level = LEVEL if compression_level is None else compression_level
    return CsvWriter(target, description, overwrite, force, level)


def planned(
    description: Description,
    *,
    target: Path | None = None,
    force: bool = False,
    compression_level: int | None = None,
    layout: str | None = None,
) -> None:
    """Refuse what cannot be written; see `registry.planned`."""
    _check(target, compression_level, layout)
    if layout is None:
        cells_of(description.columns, force)
    else:
        refuse_empty(description.rows, LAYOUT)
        skrl_cells(target, description, force)


def _check(target: Path | None, level: int | None, layout: str | None) -> None:
    check_layout(layout)
    if level is None:
        return
    if type(level) is not int or level not in range(10):
        raise SchemaError(
            f"compression_level: got {level!r}, expected 0 to 9; leave it out for "
            f"{LEVEL}"
        )
    if target is not None and not target.name.lower().endswith(GZ):
        raise SchemaError(
            f"compression_level: got {level!r} for {target}, which is not gzipped, "
            f"expected it for a name that ends in {GZ} only; call the file so, or "
            "leave it out"
        )


def open_reader(
    path: Path,
    *,
    sidecar: bool = True,
    dtypes: Mapping[str, str] | None = None,
    allow_expansion: bool = False,
    layout: str | None = None,
    num_envs: int = 1,
    cursor: int | None = None,
) -> Reader:
    """Open a csv file as a source, with its sidecar if it has one.

    Args:
        path: The file.
        sidecar: False reads the file as a table, whatever lies beside it.
        dtypes: Dtype name by field, of tables: otherwise numbers with a point are
            float64, and others int64.
        allow_expansion: Unpack a gzipped file of more than 1,000 times its size.
        layout: ``"skrl"`` for a memory of skrl or rofunc; those named as they name
            them are known.
        num_envs: Environments of such a memory, whose rows stand in turns.
        cursor: The oldest step of such a memory that is full.
    """
    if not isinstance(dtypes, Mapping | None):
        raise SchemaError(
            f"dtypes: got {dtypes!r}, expected a dtype by field, such as "
            """{"obs": "float32"}; leave it out to have them found"""
        )
    if meant(path, layout, cursor, num_envs if num_envs != 1 else None):
        plain = open_plain(path, dtypes or {}, allow_expansion)
        return deal(plain, num_envs, cursor)
    with closing(File.open(path, None)) as file:
        found = csv_sidecar.find(file) if sidecar else None
    if found is None:
        return open_plain(path, dtypes or {}, allow_expansion)
    if dtypes:
        raise SchemaError(
            f"dtypes: got {dtypes!r} for {path}, which has a sidecar that says them, "
            "expected none; leave it out, or pass sidecar=False"
        )
    return CsvReader(path, found, allow_expansion)
