"""parquet: a table that pandas, polars, duckdb and Hugging Face ``datasets`` read.

One file, or a folder of part files. Beside the columns of every file of ours it has
``episode_index`` and ``step_index``, to group and sort by. The description and a
CRC32C of every column stand in the footer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert import parquet_columns
from mmreplay.convert.arrays import refuse_wide
from mmreplay.convert.base import (
    BLOCK_NBYTES,
    Block,
    Notes,
    Reader,
    default_rows,
)
from mmreplay.convert.description import (
    ENV_ID,
    FLAGS,
    KEY,
    POSITION,
    RESERVED,
    Description,
)
from mmreplay.convert.losses import doubt_sums, undescribed
from mmreplay.convert.parquet_columns import decode
from mmreplay.convert.parquet_file import Compression, Part
from mmreplay.convert.parquet_plain import open_plain
from mmreplay.convert.parquet_writer import FIRST_ROW, SUMS, ParquetWriter, sum_of
from mmreplay.convert.tables import refuse_expansion
from mmreplay.errors import CorruptError, FormatError, SchemaError
from mmreplay.format import strict_json
from mmreplay.sums import crc32c

SUFFIXES = (".parquet", ".pq")
MAX_PARTS = 100_000
GROUP_NBYTES = 32 << 20


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    compression: str = "zstd",
    compression_level: int | None = None,
    vectors: str = "auto",
    row_group_nbytes: int = GROUP_NBYTES,
    file_nbytes: int | None = None,
) -> ParquetWriter:
    """Make a parquet file, or a folder of part files, as a target.

    Args:
        target: The file; the folder, with file_nbytes.
        description: What will come.
        overwrite: Replace a file that is there.
        compression: ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"lz4"``, ``"brotli"`` or
            ``"none"``.
        compression_level: The codec's own.
        vectors: ``"list"`` or ``"binary"`` for all fields that have a shape; ``"auto"``
            takes lists for short ones of 4-byte and 8-byte numbers, float16 and bool.
        row_group_nbytes: Bytes of unpacked rows in a row group, all held until it is
            written.
        file_nbytes: Bytes of unpacked rows in a part file; without it there is one
            file.
    """
    planned(
        description, compression=compression, compression_level=compression_level,
        vectors=vectors, row_group_nbytes=row_group_nbytes, file_nbytes=file_nbytes,
    )  # fmt: skip
    packed = Compression(compression, compression_level)
    return ParquetWriter(
        target, description, packed, vectors, row_group_nbytes, file_nbytes, overwrite
    )


def planned(
    description: Description,
    *,
    compression: str = "zstd",
    compression_level: int | None = None,
    vectors: str = "auto",
    row_group_nbytes: int = GROUP_NBYTES,
    file_nbytes: int | None = None,
) -> None:
    """Refuse what cannot be written; see `registry.planned`."""
    parquet_columns.check_vectors(vectors)
    Compression(compression, compression_level)
    for name, value in (
        ("row_group_nbytes", row_group_nbytes), ("file_nbytes", file_nbytes),
    ):  # fmt: skip
        if value is not None and (type(value) is not int or value < 1):
            raise SchemaError(
                f"{name}: got {value!r}, expected a number of bytes, at least 1; leave "
                "it out for the default"
            )
    description.to_bytes()


def recognizes(path: Path) -> bool:
    """Whether a folder holds parquet files."""
    return path.is_dir() and any(map(_is_part, path.iterdir()))


def _is_part(path: Path) -> bool:
    """Whether a file is one of a dataset: what begins so is hidden, or a log."""
    return path.suffix in SUFFIXES and not path.name.startswith((".", "_"))


def open_reader(path: Path, *, allow_expansion: bool = False) -> Reader:
    """Open a parquet file, or a folder of them, as a source, ours or anybody's.

    Args:
        path: The file, or the folder; of a folder the files come in the order of
            their names, numbers by value.
        allow_expansion: Read rows that take more than 1,000 times what the files do,
            where that is above 1 GiB.
    """
    paths = _parts(path)
    with closing(Part(paths[0])) as part:
        told = part.metadata.get(KEY.encode())
    if told is None and {SUMS.encode(), FIRST_ROW.encode()} & part.metadata.keys():
        raise undescribed(paths[0])
    if told is None:
        return open_plain(path, paths, allow_expansion)
    description = Description.from_bytes(told, f"{paths[0]}: {KEY!r} in its metadata")
    return ParquetReader(path, paths, description, allow_expansion)


def _parts(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [each for each in path.iterdir() if _is_part(each)]
    if not found or len(found) > MAX_PARTS:
        raise FormatError(
            f"{path} holds {len(found)} parquet files, expected 1 to {MAX_PARTS}; name "
            "the folder that they are in"
        )
    return sorted(found, key=lambda each: _natural(each.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """Names as people order them: numbers in them count by value."""
    parts = re.split(r"(\d+)", name)
    return [(int(p[:18]), p) if p[:1].isdigit() else (-1, p) for p in parts]


class ParquetReader(Reader):
    """Reads files of ours; see `Reader`. Others' files: `parquet_plain`."""

    def __init__(
        self, path: Path, paths: list[Path], description: Description, allowed: bool
    ) -> None:
        self.report = Notes()
        self._paths, self._description = paths, description
        rows = taken = 0
        for each in paths:
            with closing(Part(each)) as part:
                self._check(part, rows)
                rows, taken = rows + part.rows, taken + part.nbytes
        if rows != description.rows:
            raise CorruptError(
                f"{path} holds {rows} rows, expected the {description.rows} that its "
                "description names; a part is missing, or was put there: restore it"
            )
        refuse_wide(description.row_nbytes, path)
        refuse_expansion(path, rows * description.row_nbytes, taken, allowed)

    def _check(self, part: Part, first: int) -> None:
        """Check that a part is of this dataset, and goes on where the last ended.

        Raises:
            FormatError: It does not, or a column is missing or of another type.
        """
        raw = part.metadata.get(KEY.encode(), b"{}")
        if SUMS.encode() not in part.metadata:
            doubt_sums(self.report, part.path.name, repr(SUMS))
        _compare(part, {KEY: crc32c(memoryview(raw))})
        told = Description.from_bytes(raw, f"{part.path}: {KEY!r} in its metadata")
        if told.to_bytes() != self._description.to_bytes():
            raise FormatError(
                f"{part.path} is described differently than {self._paths[0]}, expected "
                "parts of one dataset; load them one by one"
            )
        begin = part.metadata.get(FIRST_ROW.encode(), b"0")
        if begin != str(first).encode():
            raise FormatError(
                f"{part.path} begins with row {begin[:20]!r}, expected {first}; a part "
                "is missing or was renamed: load the folder that holds all of them"
            )
        for name, (dtype, shape) in self._description.columns.items():
            number = part.schema.get_field_index(name)
            kind = part.schema.field(number).type if number >= 0 else None
            if kind is None or not parquet_columns.fits(kind, dtype, shape):
                raise FormatError(
                    f"{part.path}: column {name!r} is {kind or 'missing'}, expected "
                    f"one of {dtype}{list(shape)} as the description says; the file "
                    "was edited"
                )
            part.refuse_long(name)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        # Arrow takes some ten times a block's bytes while it reads one of lists.
        rows = rows_per_block or default_rows(self._description, BLOCK_NBYTES // 2)
        return self._read(tuple(self._description.columns), rows)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`: three columns are read, and checked."""
        return self._read(tuple(RESERVED), BLOCK_NBYTES // 32)

    def _read(self, names: tuple[str, ...], rows: int) -> Iterator[Block]:
        row = 0
        for path in self._paths:
            with closing(Part(path)) as part:
                self._check(part, row)
                row += part.rows
                sums = dict.fromkeys(names, 0)
                for batch in part.batches(rows, names):
                    found = {}
                    for name, array in batch.items():
                        found[name] = self._decoded(part, name, array)
                        sums[name] = sum_of(found[name], sums[name])
                    yield _block(found)
                _compare(part, sums)

    def _decoded(self, part: Part, name: str, array: Any) -> NDArray[np.generic]:
        if parquet_columns.has_nulls(array):
            raise CorruptError(
                f"{part.path}: column {name!r} lacks values, expected one a row; the "
                "file was edited or damaged"
            )
        return decode(array, *self._description.columns[name])

    def close(self) -> None:
        """See `Reader.close`: no file is open between blocks."""


def _block(found: dict[str, NDArray[np.generic]]) -> Block:
    env_ids = found.pop(ENV_ID).view(np.int64)
    positions = found.pop(POSITION).view(np.int64)
    return Block(found, env_ids, positions, found.pop(FLAGS).view(np.uint8))


def _compare(part: Part, sums: dict[str, int]) -> None:
    """Compare what was read of a part with the checksums in it, where it has some."""
    told = part.metadata.get(SUMS.encode())
    if told is None:
        return
    expected = strict_json.parse(told, f"{part.path}: {SUMS!r} in its metadata")
    for name, crc in sums.items():
        if expected.get(name) != f"{crc:08x}":
            raise CorruptError(
                f"{part.path}: {name!r} has checksum {crc:08x}, expected "
                f"{str(expected.get(name))[:8]}; the file was damaged: restore it from "
                "a copy"
            )
