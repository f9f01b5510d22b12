"""parquet: a table that pandas, polars, duckdb and Hugging Face ``datasets`` read.

One file, or a folder of part files, written and read a row group at a time. Next to the
columns of every file of ours it has ``episode_index`` and ``step_index``, to group and
sort by. The description and a CRC32C of every column stand in the footer.

Single values are columns of their own type. Vectors of floats, of wide integers and of
bools are lists of one length, row-major. All other fields, images above all, are bytes
of one length: parquet has no integers below 32 bits, so that lists of them would take
four times the space and twenty times the time.

Fields that vary are strings, binary values, or lists of any length, of lists of one
length where an item has axes. Of each such column the reader bounds the bytes of a row
group, and cuts what it reads by the bytes of the values.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.checksums import crc32c
from mmreplay.convert import parquet_checks
from mmreplay.convert.base import (
    BLOCK_NBYTES,
    MAX_ROW_NBYTES,
    Block,
    Columns,
    Kinds,
    Notes,
    Reader,
    Writer,
    default_rows,
    description_lost,
    doubt_sums,
    doubt_undescribed,
    refuse_expansion,
    refuse_wide,
)
from mmreplay.convert.description import ENV_ID, FLAGS, KEY, POSITION, RESERVED, Description
from mmreplay.convert.episode_ends import EPISODE, STEP, EpisodeNumbers
from mmreplay.convert.staging import Staging
from mmreplay.convert.undescribed import (
    POSITION_COLUMNS,
    TableReader,
    in_place,
    needless_autoreset,
    no_position,
)
from mmreplay.convert.values import VALUES_NBYTES, check_values, refuse_large, split_by_bytes
from mmreplay.disk.files import File
from mmreplay.disk.seekable import SeekableFile
from mmreplay.errors import (
    CorruptError,
    FormatError,
    ReplayError,
    SchemaError,
    SourceError,
    undone_by,
)
from mmreplay.format.metadata import Autoreset
from mmreplay.ragged import Ragged
from mmreplay.schema import Field
from mmreplay.schema.dtypes import DTYPES, array_nbytes, storage_dtype
from mmreplay.schema.naming import left_out

Vectors = Literal["auto", "list", "binary"]
MAX_LIST_VALUES = 1024
"""Of the longest vector that is a list by default."""
NARROW = {"int8", "int16", "uint8", "uint16", "bfloat16"}
TYPES = {name: pa.from_numpy_dtype(storage_dtype(name)) for name in DTYPES}
"""Arrow type of the values of each dtype as they are stored: of bfloat16 its bits."""
ITEM = "element"
"""Parquet's name of the values of a list."""
CODECS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")
PAGE_NBYTES = 1 << 20
SCALARS_ONCE = ("_env_id", "_flags", "episode_index")
"""Columns of long runs of one value, which a dictionary makes smaller."""
COUNTED = ("_position", "step_index")
"""Columns that rise by one: their differences are stored."""
READ_NBYTES = 1 << 20
READ_ROWS = 1 << 16
MAX_STRING_NBYTES = 24 << 20
VALUE_NBYTES = 12
"""Of a list's value in memory: 8 bytes and its two levels."""
SUMS = "mmreplay.crc32c"
FIRST_ROW = "mmreplay.first_row"
"""The row of the dataset that a part file begins with."""
ROW_LABELS = re.compile(r"__index_level_\d+__")
"""Name that pandas gives to the column of an index without a name."""
SUFFIXES = (".parquet", ".pq")
MAX_FILES = 100_000
GROUP_NBYTES = 32 << 20


def open_reader(
    path: Path, *, allow_expansion: bool = False, autoreset: Autoreset | None = None
) -> Reader:
    """Open a parquet file, or a folder of them, as a source, by mmreplay or others.

    Args:
        path: The file, or the folder; files of a folder are read in the order of their
            names, numbers by value.
        allow_expansion: Read rows that take more than 1,000 times the bytes of the
            files, and more than 1 GiB.
        autoreset: Of rows with positions and without a description, which may not say
            it: ``"next_step"``, ``"same_step"`` or ``"disabled"``.

    Raises:
        FormatError: It is no parquet file, or takes too much memory.
        CorruptError: It is damaged.
    """
    paths = _data_files(path)
    with closing(ParquetFile(paths[0])) as file:
        described = file.metadata.get(KEY.encode())
    if described is None and {SUMS.encode(), FIRST_ROW.encode()} & file.metadata.keys():
        raise description_lost(paths[0])
    if described is None:
        return open_plain(path, paths, allow_expansion, autoreset)
    if autoreset is not None:
        raise needless_autoreset(path, autoreset)
    where = f"{paths[0]}: {KEY!r} in its metadata"
    description = Description.from_bytes(described, where)
    return ParquetReader(path, paths, description, allow_expansion)


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
        description: Of the rows.
        overwrite: Replace an existing file.
        compression: ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"lz4"``, ``"brotli"`` or
            ``"none"``.
        compression_level: The codec's own.
        vectors: ``"list"`` or ``"binary"`` for all fields that have a shape; ``"auto"``
            takes lists for short ones of 4-byte and 8-byte numbers, float16 and bool.
        row_group_nbytes: Bytes of unpacked rows in a row group, which stays in memory
            until it is written.
        file_nbytes: Bytes of unpacked rows in a part file; without it there is one
            file.

    Raises:
        SchemaError: An option is not legal, or a field cannot be a column.
    """
    planned(
        description,
        compression=compression,
        compression_level=compression_level,
        vectors=vectors,
        row_group_nbytes=row_group_nbytes,
        file_nbytes=file_nbytes,
    )
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
    """Refuse options that are not legal; see `registry.planned`."""
    if vectors not in get_args(Vectors):
        raise SchemaError(
            f"vectors must be one of {', '.join(get_args(Vectors))}, got {vectors!r}. "
            "Leave it out for auto."
        )
    Compression(compression, compression_level)
    for name, value in (("row_group_nbytes", row_group_nbytes), ("file_nbytes", file_nbytes)):
        if value is not None and (type(value) is not int or value < 1):
            raise SchemaError(
                f"{name} must be a number of bytes, at least 1, got {value!r}. Leave "
                "it out for the default."
            )
    description.to_bytes()


def recognizes(path: Path) -> bool:
    """Return whether a folder holds parquet files."""
    return path.is_dir() and any(map(_is_data_file, path.iterdir()))


class ParquetReader(Reader):
    """Reads files with a description; see `Reader`. Others: `open_plain`."""

    def __init__(
        self, path: Path, paths: list[Path], description: Description, allowed: bool
    ) -> None:
        self.report = Notes()
        self._paths, self._description = paths, description
        self._allowed = allowed
        self._varying = {
            name: description.schema.fields[name] for name in description.schema.varying
        }
        rows = stored = 0
        for path in paths:
            with closing(ParquetFile(path)) as file:
                self._check(file, rows)
                rows, stored = rows + file.rows, stored + file.nbytes
        self._stored = stored
        if rows != description.rows:
            raise CorruptError(
                f"{path} holds {rows} rows, but its description says "
                f"{description.rows}. Restore the missing file, or remove the added "
                "file; if rows were filtered, write them without the metadata "
                f"{KEY!r} and {SUMS!r}."
            )
        refuse_wide(description.row_nbytes, path)
        refuse_expansion(path, rows * description.row_nbytes, stored, allowed)

    def _check(self, file: ParquetFile, first: int) -> None:
        """Check that a part is of this dataset, and continues at a row of it.

        Raises:
            FormatError: It does not, or a column is missing or of another type.
        """
        raw = file.metadata.get(KEY.encode(), b"{}")
        if SUMS.encode() not in file.metadata:
            doubt_sums(self.report, file.path.name, repr(SUMS))
        _compare(file, {KEY: f"{crc32c(memoryview(raw)):08x}"})
        own = Description.from_bytes(raw, f"{file.path}: {KEY!r} in its metadata")
        if own.to_bytes() != self._description.to_bytes():
            raise FormatError(
                f"{file.path} has another description than {self._paths[0]}. Load "
                "files of different datasets one by one."
            )
        begin = file.metadata.get(FIRST_ROW.encode(), b"0")
        if begin != str(first).encode():
            raise FormatError(
                f"{file.path} must begin with row {first}, got {begin[:20]!r}. A file "
                "is missing or was renamed: load the folder that holds all of them."
            )
        for name, (dtype, shape) in self._description.columns.items():
            number = file.schema.get_field_index(name)
            kind = file.schema.field(number).type if number >= 0 else None
            varying = self._varying.get(name)
            if varying is None:
                fitting = kind is not None and fits(kind, dtype, shape)
                wanted = f"{dtype}{list(shape)}"
            else:
                fitting = kind is not None and fits_varying(kind, varying)
                wanted = varying.description
            if not fitting:
                raise FormatError(
                    f"{file.path}: column {name!r} must be {wanted} as the "
                    f"description says, got {kind or 'none'}. The file was edited "
                    "after it was written."
                )
            file.refuse_long(name)
            if varying is not None:
                file.refuse_expanding(name, self._allowed)
        for name in file.schema.names:
            derived = name.lstrip("_") in (EPISODE, STEP)
            if name not in self._description.columns and not derived:
                doubt_undescribed(self.report, name)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        # Arrow needs about ten times a block's bytes while it reads one of lists.
        rows = rows_per_block or default_rows(self._description, BLOCK_NBYTES // 2)
        return self._read(tuple(self._description.columns), rows)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`: only three columns are read, and checked."""
        return self._read(tuple(RESERVED), BLOCK_NBYTES // 32)

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`: other columns than those of values are not read."""
        rows = default_rows(self._description, BLOCK_NBYTES // 2)
        for block in self._read((*RESERVED, *self._varying), rows):
            lengths = {path: block.values(path).lengths for path in self._varying}
            yield Block(lengths, block.env_ids, block.positions, block.flags)

    def _read(self, names: tuple[str, ...], rows: int) -> Iterator[Block]:
        row = nbytes = 0
        for path in self._paths:
            with closing(ParquetFile(path)) as file:
                self._check(file, row)
                first = row
                row += file.rows
                sums = ColumnSums(names)
                varying = [name for name in names if name in self._varying]
                for batch in file.split_batches(rows, names, varying):
                    found = {}
                    for name, array in batch.items():
                        if has_nulls(array):
                            raise CorruptError(
                                f"{file.path}: column {name!r} must have a value in "
                                f"each row, got none in row {first_null(array) + first}"
                                ". The file was edited or damaged."
                            )
                        column = self._decode(file, name, array, first)
                        sums.add(name, column)
                        found[name] = column
                    env_ids = found.pop(ENV_ID).view(np.int64)
                    positions = found.pop(POSITION).view(np.int64)
                    flags = found.pop(FLAGS).view(np.uint8)
                    first += len(flags)
                    rows_ = Block(found, env_ids, positions, flags)
                    nbytes += sum(rows_.values(name).nbytes for name in varying)
                    refuse_expansion(path, nbytes, self._stored, self._allowed)
                    yield rows_
                _compare(file, sums.texts())

    def _decode(self, file: ParquetFile, name: str, array: Any, first: int) -> NDArray[np.generic]:
        field = self._varying.get(name)
        if field is None:
            return decode(array, *self._description.columns[name])
        values: Any = decode_values(array, field)
        check_values(values, field, f"{file.path}: column {name!r}", first)
        found: NDArray[np.generic] = values
        return found

    def close(self) -> None:
        """See `Reader.close`: files are open only while blocks are read."""


def _compare(file: ParquetFile, sums: Mapping[str, str]) -> None:
    """Compare checksums of what was read with those in the part, if it has some."""
    stored = file.metadata.get(SUMS.encode())
    if stored is None:
        return
    expected = strict_json.parse(stored, f"{file.path}: {SUMS!r} in its metadata")
    for name, text in sums.items():
        if expected.get(name) != text:
            raise CorruptError(
                f"{file.path}: {name!r} must have checksum "
                f"{str(expected.get(name))[:16]}, got {text}. The file is damaged: "
                "restore it from a copy."
            )


def open_plain(
    path: Path, paths: list[Path], allow_expansion: bool, autoreset: Autoreset | None = None
) -> Reader:
    """Open files without a description as one table, one after the other.

    Args:
        path: The file or folder, as the user named it.
        paths: The files, in order.
        allow_expansion: See `open_reader`, as for the next one.
        autoreset: Of rows with positions.

    Raises:
        FormatError: Columns differ between files, or take too much memory.
    """
    notes = Notes()
    files = _TableFiles(paths, allow_expansion)
    types, expanding = files.common.types, files.expanding
    files.common.note(notes)
    with closing(ParquetFile(files.begin, types)) as file:
        kinds = _find(file, types, expanding)
    candidates = [name for name, kind in types.items() if may_vary(kind) and name not in expanding]
    lists = _survey_values(paths, candidates, kinds, types)
    uneven = {name: each.field(types[name]) for name, each in lists.items() if not each.fixed}
    varying = {name: field for name, field in uneven.items() if field is not None}
    kinds = {name: kind for name, kind in kinds.items() if name not in uneven}
    _note_left_out(notes, types, {*kinds, *varying}, uneven, expanding)
    for name, field in varying.items():
        notes.note(f"column {name!r} varies from row to row: {field.description}")
    if len(paths) > 1:
        notes.note(f"{len(paths)} files were read, in the order of their names")
    row_nbytes = sum(array_nbytes(dtype, shape) for dtype, shape in kinds.values())
    nbytes = files.rows * row_nbytes + sum(lists[name].nbytes for name in uneven)
    refuse_expansion(path, nbytes, files.nbytes, allow_expansion)

    batches = partial(files.batches, kinds, varying, notes)
    shown = {name: str(kind) for name, kind in types.items()}
    return in_place(TableReader(path, kinds, files.rows, batches, notes, shown, varying, autoreset))


def _note_left_out(
    notes: Notes,
    types: Mapping[str, Any],
    fields: set[str],
    uneven: Container[str],
    expanding: Mapping[str, str],
) -> None:
    """Note which columns can be no fields, and why."""
    for name, kind in types.items():
        if name in fields:
            continue
        note = f"column {name!r} of {kind} cannot be a field"
        if name in uneven:
            note += ", as it has empty values (null) or differs in several axes"
        note = expanding.get(name, f"{note}, and was left out")
        if pa.types.is_null(kind):
            # It has no values to lose.
            left_out(notes, name, note)
        else:
            notes.doubt(note)


class _TableFiles:
    """The files of a table, and what their footers say.

    Attributes:
        common: Their columns.
        rows: Of all files.
        nbytes: Of all files.
        begin: The first file that has rows, the first one if none has: of lists, only
            rows tell the length.
        expanding: By name, why a column of values that vary is not read.
    """

    def __init__(self, paths: list[Path], allow_expansion: bool) -> None:
        self._paths = paths
        self.common = CommonColumns()
        self.rows = self.nbytes = 0
        self.begin = paths[0]
        self.expanding: dict[str, str] = {}
        for path in paths:
            with closing(ParquetFile(path)) as file:
                self.common.add(file)
                if not self.rows:
                    self.begin = path
                for name in file.schema.names:
                    file.refuse_long(name)
                    if may_vary(file.schema.field(name).type):
                        try:
                            file.refuse_expanding(name, allow_expansion)
                        except FormatError as error:
                            self.expanding[name] = str(error)
                self.rows, self.nbytes = self.rows + file.rows, self.nbytes + file.nbytes

    def batches(
        self,
        kinds: Kinds,
        varying: Mapping[str, Field],
        notes: Notes,
        rows: int,
        names: tuple[str, ...],
    ) -> Iterator[Columns]:
        """Rows of one file after the other; see `undescribed.Batches`.

        Args:
            kinds: Dtype name and row shape, of the columns of one length.
            varying: The fields of the others.
            notes: Receives what was filled in.
            rows: Of a batch, at most.
            names: Columns.
        """
        done = 0
        for path in self._paths:
            with closing(ParquetFile(path, self.common.types)) as file:
                self.common.check(file)
                long = [name for name in names if name in varying]
                for batch in file.split_batches(rows, names, long):
                    values = {
                        name: _values_of(file, name, batch[name], varying[name], done)
                        for name in long
                    }
                    fixed = {n: array for n, array in batch.items() if n not in varying}
                    found = {**_columns(file, fixed, kinds, done, notes), **values}
                    yield {name: found[name] for name in names}
                    done += len(next(iter(batch.values())))


def _values_of(file: ParquetFile, name: str, array: Any, field: Field, done: int) -> Any:
    """Values of a field that varies in a batch, checked."""
    what = f"{file.path}: column {name!r}"
    if has_nulls(array):
        raise SourceError(
            f"{what} lacks a value in row {done + first_null(array)}. Fill missing "
            "values, or leave the column out."
        )
    values = decode_values(array, field)
    check_values(values, field, what, done)
    return values


def _survey_values(
    paths: list[Path], names: list[str], even: Kinds, types: Mapping[str, Any]
) -> dict[str, _Values]:
    """What the values of columns are like, after one pass over them.

    Args:
        paths: The files.
        names: Columns of strings, bytes or lists.
        even: By the first rows those that may be lists of one length.
        types: Of the columns, see `CommonColumns`.
    """
    found = {name: _Values(even[name][1] if name in even else None) for name in names}
    for path in paths if names else []:
        with closing(ParquetFile(path, types)) as file:
            for batch in file.split_batches(READ_ROWS, names, names):
                for name in names:
                    found[name].add(_storage(batch[name]))
    return found


class _Values:
    """What is known of the values of a column of strings, bytes or lists.

    Attributes:
        nbytes: Of all of them.
    """

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        """Nothing is known yet but the shape of the first row.

        Args:
            shape: Of a list of numbers; None where it is none, or has no shape.
        """
        self.nbytes = self._longest = 0
        self._shape, self._uneven = shape, shape is None
        self._kind: tuple[str, tuple[int, ...]] | None = None
        self._missing = self._unfit = False

    def add(self, array: Any) -> None:
        """Look at the values of some rows."""
        self.nbytes += int(row_nbytes_of(array).sum())
        # A missing list has no length. How many values a file holds does not tell: it
        # counts an empty list as one.
        self._uneven = self._uneven or bool(
            array.null_count or lengths_differ(array, self._shape or ()) is not None
        )
        if has_nulls(array):
            self._missing = True
            return
        lengths = np.diff(_offsets(array))
        self._longest = max(self._longest, int(lengths.max(initial=0)))
        if is_bytes(array.type) or not lengths.any():
            return
        items = array.flatten()
        kind = self._kind or kind_of(items[:1])
        if kind is None or lengths_differ(items, kind[1]) is not None:
            self._unfit = True
        else:
            self._kind = kind

    @property
    def fixed(self) -> bool:
        """Whether they are lists of one length, or refused as they are read.

        That is where lists in lists differ from the first row's.
        """
        even_outside = self._unfit and self._shape is not None and not self._missing
        return not self._uneven or even_outside

    def field(self, column: Any) -> Field | None:
        """The field that holds them where they vary, by the type of the column.

        None where a value is missing, or where more than one axis varies.
        """
        if self._missing or self._unfit:
            return None
        kind = _stored_type(column)
        # The next rows may be a little longer.
        limit = 1 << max(0, self._longest - 1).bit_length()
        if is_bytes(kind):
            return Field.text(limit) if is_text(kind) else Field.bytes(limit)
        dtype, inner = self._kind or (_name_of(_leaf_type(kind)) or "", ())
        return Field((None, *inner), dtype, max_length=limit)


def _find(file: ParquetFile, types: Mapping[str, Any], left_out: Container[str]) -> Kinds:
    """The columns that can be fields by their types and first rows, but for some."""
    numeric = [name for name, kind in types.items() if holds_numbers(kind)]
    first = next(file.batches(1, numeric), {}) if numeric else {}
    kinds = {}
    for name in numeric:
        found = None
        if name in first:
            found = kind_of(first[name])
        elif not is_variable(types[name]):
            found = kind_of(no_rows(types[name]))
        if found is not None and name not in left_out:
            kinds[name] = found
    return kinds


class CommonColumns:
    """The columns that all files of a table have, in any order.

    The labels that pandas gives to rows, as a filter leaves them, are none.

    Attributes:
        types: By column the Arrow type that holds the values of all files exactly.
    """

    def __init__(self) -> None:
        self.types: dict[str, Any] = {}
        self._first: Path | None = None
        self._unlike: dict[str, None] = {}
        self._labels: dict[str, bool] = {}
        self._has_rows = False

    def add(self, file: ParquetFile) -> None:
        """Look at another file.

        Raises:
            FormatError: A column is not in all files, or no type holds its values.
        """
        own = dict(zip(file.schema.names, file.schema.types, strict=True))
        if len(own) < len(file.schema):
            twice = next(n for n in own if file.schema.names.count(n) > 1)
            raise FormatError(f"{file.path} has two columns {twice!r}. Rename one.")
        for name in file.row_labels:
            numbers = pa.types.is_integer(own.pop(name))
            self._labels[name] = self._labels.get(name, True) and numbers
        if self._first is None:
            self._first, self.types = file.path, own
        self.check(file)
        if not file.rows:
            # Of no rows, other programs often write other types.
            return
        if not self._has_rows:
            self._has_rows = True
            self.types = {name: own[name] for name in self.types}
        for name, kind in own.items():
            before = self.types[name]
            common = _common_type(before, kind)
            if common is None:
                raise FormatError(
                    f"{file.path}: column {name!r} is {kind}, but {before} before, and "
                    "no field holds both. Write all files with one type, or load them "
                    "one by one."
                )
            if before != kind:
                self._unlike[name] = None
            self.types[name] = common

    def check(self, file: ParquetFile) -> None:
        """Refuse a file that has other columns than the first one.

        Raises:
            FormatError: A column is only in one of them.
        """
        own = [name for name in file.schema.names if name not in file.row_labels]
        lacking = [name for name in self.types if name not in own]
        extra = [name for name in own if name not in self.types]
        if lacking or extra:
            odd = f"lacks column {lacking[0]!r}" if lacking else f"has column {extra[0]!r}"
            raise FormatError(
                f"{file.path} {odd}, unlike {self._first}. Write all files with the "
                "same columns, or load files of different tables one by one."
            )

    def note(self, notes: Notes) -> None:
        """Note the columns that are of several types, and those that are left out."""
        for name, numbers in self._labels.items():
            note = f"column {name!r} is the index of a pandas table, and was left out"
            (notes.note if numbers else notes.doubt)(note)
        for name in self._unlike:
            notes.note(f"column {name!r} is of several types, and was read as {self.types[name]}")


def _row_labels(about: bytes) -> set[str]:
    """Columns of an index without a name, by the metadata of pandas."""
    try:
        names = json.loads(about)["index_columns"]
        return {n for n in names if isinstance(n, str) and ROW_LABELS.fullmatch(n)}
    except (ValueError, TypeError, KeyError, RecursionError):
        # None, or the metadata of another program.
        return set()


def _common_type(one: Any, other: Any) -> Any:
    """The type that holds the values of two, None if none does.

    Of integers and floats float64, which holds integers up to 2^53: others are refused
    as they are read.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if is_bytes(one) and is_bytes(other):
        return one if is_text(one) == is_text(other) else None
    if _is_list(one) and _is_list(other):
        item = _common_type(one.value_type, other.value_type)
        if item is None:
            return None
        fixed = pa.types.is_fixed_size_list(one) and pa.types.is_fixed_size_list(other)
        if fixed and one.list_size == other.list_size:
            return pa.list_(item, one.list_size)
        return pa.list_(item)
    return _common_number(_name_of(one), _name_of(other))


def _common_number(*names: str | None) -> Any:
    """The type that holds the numbers of two dtypes, as in `_common_type`."""
    known = [name for name in names if name is not None and name != "bool"]
    if len(known) < 2:
        return None
    wider = np.promote_types(known[0], known[1]).name
    integers = all("int" in name for name in known)
    return None if integers and "int" not in wider else TYPES[wider]


def _columns(
    file: ParquetFile, batch: dict[str, Any], kinds: Kinds, done: int, notes: Notes
) -> Columns:
    """Values of fields in a batch.

    Raises:
        SourceError: A value is missing, or a list is longer than the first.
    """
    found = {}
    for name, array in batch.items():
        filled = fill_missing(array)
        if filled is not array:
            notes.note(f"missing values of column {name!r} became NaN")
        dtype, shape = kinds[name]
        where = f"{file.path}: column {name!r}"
        if has_nulls(filled):
            lacking = done + first_null(filled)
            if name in POSITION_COLUMNS:
                raise no_position(name, lacking)
            raise SourceError(
                f"{where} lacks a value in row {lacking}. Fill missing values, or "
                "leave the column out."
            )
        row = lengths_differ(filled, shape)
        if row is not None:
            raise SourceError(
                f"{where}: row {done + row} must have shape {list(shape)} like the "
                "first row. Pad the lists, or leave the column out."
            )
        found[name] = decode(filled, dtype, shape)
    return found


def _data_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [file for file in path.iterdir() if _is_data_file(file)]
    if not found or len(found) > MAX_FILES:
        raise FormatError(
            f"{path} must hold 1 to {MAX_FILES} parquet files, got {len(found)}. Name "
            "the folder that holds them."
        )
    return sorted(found, key=lambda file: _natural(file.name))


def _is_data_file(path: Path) -> bool:
    """Return whether a file is data; ``.`` and ``_`` begin hidden files and logs."""
    return path.suffix in SUFFIXES and not path.name.startswith((".", "_"))


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names by value."""
    tokens = re.split(r"(\d+)", name)
    return [(int(p[:18]), p) if p[:1].isdigit() else (-1, p) for p in tokens]


class ParquetFile:
    """One file that is open for reading; checked when it is opened.

    Attributes:
        path: Of the file.
        rows: Number of rows.
        nbytes: Of the file.
        schema: Of Arrow; strings and bytes that are entries of a dictionary, or views,
            by their plain types.
        metadata: Key-value metadata.
        row_labels: Names of the columns of an index of pandas that has no name.
    """

    def __init__(self, path: Path, types: Mapping[str, Any] | None = None) -> None:
        """Open a file.

        Args:
            path: Of the file.
            types: Types that columns are read as, by name; see `CommonColumns`.
        """
        self.path = path
        self._types = types or {}
        self._file = File.open(path, None)
        with undone_by(self.close):
            footer = parquet_checks.check(self._file)
            self.rows, self.nbytes = footer.rows, self._file.nbytes
            # Not from pyarrow, which ends the process over some footers.
            self._leaves = footer.leaves
            with parquet_errors(path):
                self._open()

    def _open(self) -> None:
        self._views: list[str] = []
        stored = self._opened([]).schema_arrow
        self._views = [field.name for field in stored if _is_view(field.type)]
        self._parquet = self._opened([])
        self._coded = {field.name for field in stored if plain_type(field.type) != field.type}
        fields = [field.with_type(plain_type(field.type)) for field in stored]
        self.schema = pa.schema(fields, stored.metadata)
        self.metadata = dict(self._parquet.metadata.metadata or {})
        labels = _row_labels(self.metadata.get(b"pandas", b""))
        self.row_labels = [name for name in self.schema.names if name in labels]

    def _opened(self, dictionaries: Sequence[str]) -> Any:
        """The file as pyarrow reads it.

        Args:
            dictionaries: Columns of strings that are read as the entries of their
                dictionaries, once each, and the number of the entry of each row.
        """
        return pq.ParquetFile(
            pa.PythonFile(SeekableFile(self._file), mode="r"),
            pre_buffer=False,
            # Columns are read a buffer at a time, not a row group at a time.
            buffer_size=READ_NBYTES,
            thrift_string_size_limit=MAX_STRING_NBYTES,
            thrift_container_size_limit=parquet_checks.MAX_STRUCTS,
            # Views may share their bytes, so that only a dictionary says how many.
            read_dictionary=[*dictionaries, *self._views],
        )

    def leaf_names(self) -> list[str]:
        """Paths of all columns of values, with dots between the names of structs."""
        return list(self._leaves)

    def leaves(self, name: str) -> list[parquet_checks.Leaf]:
        """Columns of values below a column, or the column itself."""
        return [
            leaf
            for path, leaf in self._leaves.items()
            if path == name or path.startswith(f"{name}.")
        ]

    def refuse_expanding(self, name: str, allowed: bool) -> None:
        """Refuse a column of values that vary whose bytes do not bound what it holds.

        Raises:
            FormatError: A row group takes more than 512 MiB, or repeats values by a few
                bytes each.
        """
        for leaf in self.leaves(name):
            if leaf.group_nbytes > parquet_checks.MAX_PAGES_NBYTES:
                raise FormatError(
                    f"{self.path}: a row group of column {name!r} must take at most "
                    f"{parquet_checks.MAX_PAGES_NBYTES} bytes, got "
                    f"{leaf.group_nbytes}. Write it with smaller row groups."
                )
            if leaf.repeats and not allowed:
                raise FormatError(
                    f"{self.path}: column {name!r} is encoded as DELTA_BYTE_ARRAY, by "
                    "which a few bytes make long values. Pass allow_expansion=True if "
                    "you trust the file."
                )

    def refuse_long(self, name: str) -> None:
        """Refuse a column of lists with too many values in one row group.

        Lengths of lists are stored among their values, so that only the number of
        values bounds the memory of one row.

        Raises:
            FormatError: Its values in one row group take more than 512 MiB.
        """
        num_values = max(
            (leaf.values for path, leaf in self._leaves.items() if path.startswith(f"{name}.")),
            default=0,
        )
        if VALUE_NBYTES * num_values > parquet_checks.MAX_PAGES_NBYTES:
            raise FormatError(
                f"{self.path}: a row group of column {name!r} must take at most "
                f"{parquet_checks.MAX_PAGES_NBYTES} bytes, got {num_values} values of "
                f"{VALUE_NBYTES}. Write it with smaller row groups."
            )

    def batches(
        self, rows: int, names: Sequence[str], dictionaries: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """Arrow arrays by column, of at most so many rows each.

        Strings and bytes that the file has as entries of a dictionary, or as views,
        come as entries of a dictionary.

        Args:
            rows: Of a batch, at most.
            names: Columns.
            dictionaries: Columns of strings that come as entries of their dictionaries.

        Raises:
            CorruptError: The file is damaged.
        """
        with parquet_errors(self.path):
            parquet = self._opened(dictionaries) if dictionaries else self._parquet
            batches = parquet.iter_batches(rows, columns=list(names))
        yield from self._counted(batches, names)

    def split_batches(
        self, rows: int, names: Sequence[str], varying: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Batches as `batches`, cut by the bytes of columns that vary.

        Args:
            rows: Of a batch, at most.
            names: Columns.
            varying: Those of them whose values vary.

        Raises:
            CorruptError: The file is damaged.
            FormatError: The values of a row take too much memory.
        """
        if not varying:
            yield from self.batches(rows, names)
            return
        # The average row tells how many are asked for; what comes is cut again.
        row_nbytes = sum(leaf.row_nbytes for name in varying for leaf in self.leaves(name))
        rows = max(1, min(rows, int(VALUES_NBYTES / max(1.0, row_nbytes))))
        dictionaries = [name for name in varying if self._has_dictionaries(name)]
        with parquet_errors(self.path):
            parquet = self._opened(dictionaries) if dictionaries else self._parquet
            batches = parquet.iter_batches(rows, columns=list(names))
        done = 0
        for batch in self._counted(batches, names):
            with parquet_errors(self.path):
                sizes = [row_nbytes_of(batch[name]) for name in varying]
            nbytes: NDArray[np.int64] = np.sum(sizes, axis=0)
            for first, stop in split_by_bytes(nbytes):
                refuse_large(int(nbytes[first]), f"{self.path}: row {done + first}")
                cut = {}
                with parquet_errors(self.path):
                    for name, array in batch.items():
                        array = array.slice(first, stop - first)
                        if name in dictionaries and pa.types.is_dictionary(array.type):
                            array = array.dictionary_decode()
                        cut[name] = array
                yield cut
            done += len(nbytes)

    def _has_dictionaries(self, name: str) -> bool:
        """Whether a column is of strings or bytes that may come as entries of some."""
        return is_bytes(self.schema.field(name).type) and (
            name in self._coded or any(leaf.dictionaries for leaf in self.leaves(name))
        )

    def _counted(self, batches: Iterator[Any], names: Sequence[str]) -> Iterator[dict[str, Any]]:
        done = 0
        while True:
            with parquet_errors(self.path):
                batch = next(batches, None)
                if batch is None:
                    break
                found = {name: batch.column(name) for name in names}
            for name, array in found.items():
                found[name] = self._as_common(name, array)
            done += batch.num_rows
            yield found
        if done != self.rows:
            raise CorruptError(
                f"{self.path} has {done} rows, but its footer says {self.rows}. The "
                "file is damaged."
            )

    def _as_common(self, name: str, array: Any) -> Any:
        """An array of the type that its column has in all files."""
        wanted = self._types.get(name)
        if pa.types.is_dictionary(array.type) and wanted is not None:
            wanted = pa.dictionary(array.type.index_type, wanted)
        if wanted is None or array.type == wanted:
            return array
        try:
            return array.cast(wanted)
        except pa.ArrowException as error:
            raise SourceError(
                f"{self.path}: column {name!r} is {array.type}, and {wanted} of "
                f"another file cannot hold it ({' '.join(str(error).split())[:80]}). "
                "Write all files with one type."
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Turn pyarrow's errors about a file into CorruptError."""
    try:
        yield
    except ReplayError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        text = " ".join(str(error).split())[:200]
        raise CorruptError(
            f"{path} does not match its headers ({text}). The file is damaged: restore "
            "it from a copy."
        ) from error


class ParquetWriter(Writer):
    """Writes rows in row groups; see `Writer`."""

    def __init__(
        self,
        target: Path,
        description: Description,
        packed: Compression,
        vectors: str,
        group_nbytes: int,
        file_nbytes: int | None,
        overwrite: bool,
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._description, self._packed = description, packed
        # A row group lies in one file.
        group_nbytes = min(group_nbytes, file_nbytes or group_nbytes)
        self._group_rows = max(1, group_nbytes // description.row_nbytes)
        self._varying = {
            name: description.schema.fields[name] for name in description.schema.varying
        }
        # Larger groups of values that vary are refused when they are read.
        self._group_nbytes = min(group_nbytes, GROUP_NBYTES)
        self._batched_nbytes = self._file_size = self._widest = 0
        self._file_nbytes = file_nbytes
        self._steps = EpisodeNumbers(description.num_envs)
        self._derived = self._names()
        self._schema = pa.schema(list(self._fields(vectors)))
        # Encoded now, so that a description that is too large is refused at once.
        self._described = description.to_bytes()
        # The next row group, and its rows.
        self._batches: list[Any] = []
        self._batched = 0
        self._done = self._number = 0
        self._open_file: ParquetFileWriter | None = None
        self._staging = Staging(
            target, overwrite=overwrite, folder=file_nbytes is not None, owns=owns
        )

    def _names(self) -> dict[str, str]:
        """Names of the two derived columns, which fields may have as well."""
        found = {}
        for name in (EPISODE, STEP):
            free = name
            while free in self._description.columns:
                free = f"_{free}"
            if free != name:
                self.notes.note(
                    f"the derived column {name!r} is stored as {free!r}, because a "
                    "field has its name"
                )
            found[name] = free
        return found

    def _fields(self, vectors: str) -> Iterator[Any]:
        for name, (dtype, shape) in self._description.columns.items():
            if name in self._varying:
                yield varying_column_of(name, self._varying[name])
            else:
                yield column_of(name, dtype, shape, vectors)
            if name == FLAGS:
                for derived in self._derived.values():
                    yield column_of(derived, "int64", (), vectors)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        if self._done + self._batched + len(block) > self._description.rows:
            raise FormatError(
                f"got more than the {self._description.rows} rows that the source "
                "describes. The source changed during the conversion."
            )
        episodes, steps = self._steps.number(block)
        derived = {self._derived[EPISODE]: episodes, self._derived[STEP]: steps}
        nbytes = self._row_nbytes(block)
        first = 0
        while first < len(block):
            stop = min(first + self._group_rows - self._batched, len(block))
            if self._varying:
                left = self._group_nbytes - self._batched_nbytes
                fitting = np.searchsorted(np.cumsum(nbytes[first:stop]), left, "right")
                if not fitting and self._batched:
                    self._flush()
                    continue
                stop = first + max(1, int(fitting))
            arrays = []
            for field in self._schema:
                name = field.name
                if name in self._varying:
                    values = block.values(name)[first:stop]
                    arrays.append(encode_values(values, field.type))
                    continue
                column = derived[name] if name in derived else block.column(name)
                arrays.append(encode(column[first:stop], field.type))
            batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
            self._batches.append(batch)
            self._batched += stop - first
            self._batched_nbytes += int(nbytes[first:stop].sum())
            first = stop
            if self._batched == self._group_rows:
                self._flush()

    def _row_nbytes(self, block: Block) -> NDArray[np.int64]:
        """Bytes of each row, int64 ``[N]``.

        Raises:
            SchemaError: A row's values are too many to be read again.
        """
        nbytes = np.full(len(block), self._description.row_nbytes)
        for name, field in self._varying.items():
            lengths = block.values(name).lengths
            nbytes += lengths * field.inner_nbytes
            self._widest = max(self._widest, int(lengths.max(initial=0)) * field.inner_nbytes)
            limit = MAX_ROW_NBYTES
            if field.rules.form == "array":
                count = VALUE_NBYTES * int(np.prod(field.inner, dtype=object))
                limit = parquet_checks.MAX_PAGES_NBYTES // count * field.inner_nbytes
            wide = np.flatnonzero(lengths * field.inner_nbytes > limit)
            if len(wide):
                raise SchemaError(
                    f"field {name!r}, environment {block.env_ids[wide[0]]}, position "
                    f"{block.positions[wide[0]]}: parquet files have values of at most "
                    f"{limit} bytes, got "
                    f"{int(lengths[wide[0]]) * field.inner_nbytes}. Leave the field "
                    "out with fields=, or choose npz."
                )
        return nbytes

    def _flush(self) -> None:
        """Write the next row group, into a new part if the last one is full."""
        if self._open_file is None:
            self._begin()
        assert self._open_file is not None
        batches, self._batches = self._batches, []
        if batches:
            self._open_file.write(batches)
            for name, (dtype, shape) in self._description.columns.items():
                for batch in batches:
                    array = batch.column(name)
                    column: Any
                    if name in self._varying:
                        column = decode_values(array, self._varying[name])
                    else:
                        column = decode(array, dtype, shape)
                    self._sums.add(name, column)
        self._done += self._batched
        self._file_size += self._batched_nbytes
        self._batched = self._batched_nbytes = 0
        full = self._file_size
        if self._file_nbytes is not None and full >= self._file_nbytes:
            self._end()

    def _begin(self) -> None:
        path = self._staging.path
        if self._file_nbytes is None:
            file = self._staging.open(0)
        else:
            file = File.create(path / file_name(self._number), 0)
            self._number += 1
        self._sums = ColumnSums(tuple(self._description.columns))
        self._first = self._done
        self._file_size = 0
        columns = self._description.fixed_columns.values()
        widest = max(8, *(array_nbytes(dtype, shape) for dtype, shape in columns))
        # The longest value so far; a row group bounds the pages in any case.
        widest = max(widest, self._widest)
        self._open_file = ParquetFileWriter(file, self._schema, self._packed, widest)

    def _end(self) -> None:
        assert self._open_file is not None
        sums = self._sums.texts()
        sums[KEY] = f"{crc32c(memoryview(self._described)):08x}"
        metadata: dict[str, str | bytes] = {KEY: self._described, SUMS: json.dumps(sums)}
        if self._file_nbytes is not None:
            metadata[FIRST_ROW] = str(self._first)
        file, self._open_file = self._open_file, None
        file.close(metadata)

    def finish(self) -> None:
        """See `Writer.finish`."""
        # An empty dataset is a file too, with a schema and no rows.
        if self._batches or not (self._open_file or self._done):
            self._flush()
        if self._open_file is not None:
            self._end()
        if self._done != self._description.rows:
            raise FormatError(
                f"got {self._done} rows, but the source describes "
                f"{self._description.rows}. The source is truncated."
            )
        self.nbytes = self._staging.publish()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._batches = []
        if self._open_file is not None:
            file, self._open_file = self._open_file, None
            file.close(None)
        self._staging.abort()


def file_name(number: int) -> str:
    """The name of a folder's part file, by its number from 0 on."""
    return f"part-{number:05d}.parquet"


def owns(folder: Path) -> bool:
    """Return whether a folder holds part files, from the first on, and nothing else."""
    names = {each.name for each in folder.iterdir()}
    return names == {file_name(number) for number in range(len(names))}


class ColumnSums:
    """CRC32C of columns whose rows come batch by batch.

    Of a field that varies one of all values, and one of their lengths.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._sums = dict.fromkeys(names, 0)
        self._lengths: dict[str, int] = {}

    def add(self, name: str, column: NDArray[np.generic] | Ragged) -> None:
        """Sum the next rows of a column."""
        values: NDArray[np.generic]
        if isinstance(column, Ragged):
            before = self._lengths.get(name, 0)
            self._lengths[name] = sum_of(column.lengths, before)
            values = column.values
        else:
            values = column
        self._sums[name] = sum_of(values, self._sums[name])

    def texts(self) -> dict[str, str]:
        """Hex digits by column: 8, and 8 more for lengths."""
        found = {name: f"{crc:08x}" for name, crc in self._sums.items()}
        return found | {name: f"{found[name]}{crc:08x}" for name, crc in self._lengths.items()}


def sum_of(column: NDArray[np.generic], before: int) -> int:
    """CRC32C of a column's bytes in C order, continued from that of earlier rows."""
    contiguous = np.ascontiguousarray(column)
    return crc32c(contiguous.reshape(-1).view(np.uint8).data, before)


class ParquetFileWriter:
    """Writes the row groups of one file.

    Attributes:
        rows: Rows written so far.
    """

    def __init__(self, file: File, schema: Any, compression: Compression, widest: int) -> None:
        """Begin a file.

        Args:
            file: Empty, open for writing; closed by `close`.
            schema: Of Arrow.
            compression: Of all pages.
            widest: Bytes of the widest column's row; a page holds complete values.
        """
        self.rows = 0
        self._file, self._sink = file, Sink(file)
        dictionaries = [
            field.name
            for field in schema
            if field.name in SCALARS_ONCE and pa.types.is_integer(field.type)
        ]
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, mode="w"),
            schema,
            compression=compression.codec,
            compression_level=compression.level,
            use_dictionary=dictionaries,
            column_encoding=_encodings(schema),
            data_page_size=PAGE_NBYTES,
            write_batch_size=max(1, min(1024, PAGE_NBYTES // widest)),
            # Lowest and highest bytes of an image are of no use.
            write_statistics=[f.name for f in schema if _is_single(f.type)],
        )

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._sink.tell()

    def write(self, batches: Sequence[Any]) -> None:
        """Write record batches as one row group."""
        table = pa.Table.from_batches(batches)
        self._writer.write_table(table, row_group_size=len(table))
        self.rows += len(table)

    def close(self, metadata: Mapping[str, str | bytes] | None) -> None:
        """Write the footer, with metadata; None abandons the file."""
        try:
            if metadata is not None:
                self._writer.add_key_value_metadata(dict(metadata))
                self._writer.close()
        finally:
            # pyarrow's finaliser would write a footer into the closed file.
            self._writer.is_open = False
            self._file.close()


def _encodings(schema: Any) -> dict[str, str]:
    """Encodings by the path of a leaf, for all that are not plain."""
    found = {}
    for field in schema:
        kind, leaf = field.type, field.name
        # A field may have the name of a column of ours, and any type.
        counts = leaf in COUNTED and pa.types.is_int64(kind)
        while _is_list(kind):
            kind, leaf = kind.value_type, f"{leaf}.list.{ITEM}"
        if counts:
            found[leaf] = "DELTA_BINARY_PACKED"
        elif pa.types.is_floating(kind):
            # Bytes of equal weight next to each other pack better, and faster.
            found[leaf] = "BYTE_STREAM_SPLIT"
    return found


def _is_single(kind: Any) -> bool:
    sized = pa.types.is_fixed_size_binary(kind) or is_bytes(kind)
    return not pa.types.is_nested(kind) and not sized


class Sink(io.RawIOBase):
    """A file for pyarrow to append to."""

    def __init__(self, file: File) -> None:
        self._file, self._end = file, 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Append all bytes."""
        view = memoryview(data).cast("B")
        self._file.pwrite(view, self._end)
        self._end += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written."""
        return self._end


@dataclass(frozen=True, slots=True)
class Compression:
    """Compression of pages.

    Attributes:
        codec: One of `CODECS`.
        level: The codec's own; None for its default.
    """

    codec: str = "zstd"
    level: int | None = None

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise SchemaError(
                f"compression must be one of {', '.join(CODECS)}, got {self.codec!r}. "
                "Leave it out for zstd."
            )
        if self.level is None:
            return
        try:
            low = pa.Codec.minimum_compression_level(self.codec)
            high = pa.Codec.maximum_compression_level(self.codec)
        except (ValueError, TypeError):
            # The codec has no levels.
            low, high = 1, 0
        if type(self.level) is not int or not low <= self.level <= high:
            raise SchemaError(
                "compression_level must be "
                f"{f'{low} to {high}' if low <= high else 'none'}, got {self.level!r} "
                f"for {self.codec!r}. Leave it out for the codec's default."
            )


def column_of(name: str, dtype: str, shape: tuple[int, ...], vectors: str) -> Any:
    """The Arrow field that holds a field.

    Args:
        name: The column's.
        dtype: The field's; bfloat16 becomes uint16 of the same bits.
        shape: The field's.
        vectors: See `open_writer`.

    Raises:
        SchemaError: The field has no values.
    """
    count = int(np.prod(shape, dtype=object))
    if not count:
        # Arrow divides by the length of a list.
        raise SchemaError(
            f"field {name!r} of shape {list(shape)} has no values, and parquet cannot "
            "store empty arrays. Leave it out with fields=, or export to npz."
        )
    item = TYPES[dtype]
    metadata = {"dtype": dtype, "shape": json.dumps(list(shape))}
    if not shape:
        kind = item
    elif vectors == "list" or (
        vectors == "auto" and dtype not in NARROW and count <= MAX_LIST_VALUES
    ):
        kind = pa.list_(pa.field(ITEM, item, nullable=False), count)
    else:
        kind = pa.binary(count * storage_dtype(dtype).itemsize)
    return pa.field(name, kind, nullable=False, metadata=metadata)


def varying_column_of(name: str, field: Field) -> Any:
    """The Arrow field that holds a field that varies; see `column_of`."""
    metadata = {
        "dtype": field.dtype,
        "shape": json.dumps(list(field.shape)),
        "kind": field.kind,
        "max_length": str(field.max_length),
    }
    return pa.field(name, _varying_type(field), nullable=False, metadata=metadata)


def _varying_type(field: Field) -> Any:
    if field.rules.form != "array":
        return pa.string() if field.kind == "text" else pa.binary()
    kind = TYPES[field.dtype]
    for axis in reversed(field.inner):
        kind = pa.list_(pa.field(ITEM, kind, nullable=False), axis)
    return pa.list_(pa.field(ITEM, kind, nullable=False))


def fits_varying(kind: Any, field: Field) -> bool:
    """Return whether arrays of an Arrow type hold a field that varies."""
    kind = _stored_type(kind)
    if field.rules.form != "array":
        return is_text(kind) if field.kind == "text" else is_bytes(kind)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    kind, axes = kind.value_type, []
    while pa.types.is_fixed_size_list(kind):
        axes.append(kind.list_size)
        kind = kind.value_type
    item = TYPES[field.dtype]
    return bool(kind == item and tuple(axes) == field.inner)


def is_text(kind: Any) -> bool:
    """Return whether a type is text of any length."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_view(kind: Any) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def plain_type(kind: Any) -> Any:
    """The type of the strings or bytes that an Arrow type has in another form."""
    if pa.types.is_dictionary(kind) and is_bytes(kind.value_type):
        return kind.value_type
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def is_bytes(kind: Any) -> bool:
    """Return whether a type is text or bytes of any length."""
    return bool(is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def encode_field(values: Ragged, field: Field) -> Any:
    """Values of a field that varies as an Arrow array of the type that files have."""
    return encode_values(values, _varying_type(field))


def encode_values(values: Ragged, kind: Any) -> Any:
    """Values as an Arrow array of its own memory; see `encode`."""
    offsets = values.offsets.astype(np.int32)
    if is_bytes(kind):
        data = np.array(values.values, order="C").reshape(-1).view(np.uint8)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(kind, len(values), buffers)
    items = encode(values.values.reshape(-1), _leaf_type(kind))
    inner = kind.value_type
    for each in reversed(_fixed_types(inner)):
        items = pa.FixedSizeListArray.from_arrays(items, type=each)
    return pa.ListArray.from_arrays(pa.array(offsets), items, type=kind)


def _leaf_type(kind: Any) -> Any:
    while _is_list(kind):
        kind = kind.value_type
    return kind


def _fixed_types(kind: Any) -> list[Any]:
    """The type, if it is a list of one length, and those inside of it."""
    found = []
    while pa.types.is_fixed_size_list(kind):
        found.append(kind)
        kind = kind.value_type
    return found


def decode_values(array: Any, field: Field) -> Ragged:
    """An Arrow array without nulls as values; may be read-only.

    The array's type must fit the field; see `fits_varying`.
    """
    array = _storage(array)
    offsets = _offsets(array)
    first, stop = int(offsets[0]), int(offsets[-1])
    if is_bytes(array.type):
        data = array.buffers()[2]
        # Without any bytes there may be no buffer.
        empty = np.zeros(0, np.uint8)
        raw = empty if data is None else np.frombuffer(data, np.uint8)[first:stop]
        return Ragged(raw, offsets - first)
    items = array.values.slice(first, stop - first)
    while _is_list(items.type):
        items = items.flatten()
    values: NDArray[np.generic] = items.to_numpy(zero_copy_only=False)
    return Ragged(values.reshape(-1, *field.inner), offsets - first)


def _offsets(array: Any) -> NDArray[np.int64]:
    """Where each value of strings, bytes or lists begins, int64 ``[N + 1]``."""
    kind = array.type
    wide = (
        pa.types.is_large_list(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    dtype = np.dtype(np.int64 if wide else np.int32)
    begin = array.offset * dtype.itemsize
    found = np.frombuffer(buffer, dtype, len(array) + 1, begin)
    return found.astype(np.int64)


def row_nbytes_of(array: Any) -> NDArray[np.int64]:
    """Bytes of each value of strings, bytes or lists, int64 ``[N]``.

    Raises:
        ValueError: A value is an entry that its dictionary does not have.
    """
    if pa.types.is_dictionary(array.type):
        entries = np.diff(_offsets(array.dictionary))
        nbytes = np.zeros(len(array), np.int64)
        there = array.indices.is_valid().to_numpy(zero_copy_only=False)
        numbers = array.indices.drop_null().to_numpy(zero_copy_only=False)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(entries):
            # Arrow reads them unchecked, and would follow them anywhere.
            raise ValueError(f"an entry beyond the {len(entries)} of its dictionary")
        nbytes[there] = entries[numbers]
        return nbytes
    lengths = np.diff(_offsets(_storage(array)))
    if is_bytes(array.type):
        return lengths
    kind, size = array.type.value_type, 1
    while pa.types.is_fixed_size_list(kind):
        size *= kind.list_size
        kind = kind.value_type
    width = kind.bit_width if _name_of(kind) else 64
    found: NDArray[np.int64] = lengths * size * max(1, width // 8)
    return found


def encode(column: NDArray[np.generic], kind: Any) -> Any:
    """A column ``[N, *shape]`` as an Arrow array of its own memory."""
    copy = np.array(column, order="C")
    if pa.types.is_fixed_size_binary(kind):
        buffers = [None, pa.py_buffer(copy)]
        return pa.FixedSizeBinaryArray.from_buffers(kind, len(copy), buffers)
    if pa.types.is_fixed_size_list(kind):
        values = pa.array(copy.reshape(-1), kind.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    return pa.array(copy, kind)


def decode(array: Any, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """An Arrow array without nulls as a column ``[N, *shape]``; may be read-only.

    The array's type must fit the field; see `fits` and `kind_of`.
    """
    stored = storage_dtype(dtype)
    count = len(array)
    array = _storage(array)
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        begin = array.offset * width
        raw = np.frombuffer(array.buffers()[1], np.uint8, count * width, begin)
        # Bytes other than 0 and 1 are no bools in numpy.
        values = raw != 0 if stored.kind == "b" else raw.view(stored)
        return values.reshape(count, *shape)
    while _is_list(array.type):
        # Unlike `values`, `flatten` respects the offset of a slice.
        array = _storage(array.flatten())
    found: NDArray[np.generic] = array.to_numpy(zero_copy_only=False)
    return found.reshape(count, *shape)


def fits(kind: Any, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether arrays of an Arrow type hold a field, one value a row."""
    count = int(np.prod(shape, dtype=object))
    kind = _stored_type(kind)
    if pa.types.is_fixed_size_binary(kind):
        nbytes = count * storage_dtype(dtype).itemsize
        return bool(shape) and bool(kind.byte_width == nbytes)
    size = 1
    lists = False
    while pa.types.is_fixed_size_list(kind):
        size *= kind.list_size
        kind, lists = kind.value_type, True
    item = TYPES[dtype]
    return bool(kind == item and size == count and lists == bool(shape))


def kind_of(array: Any) -> tuple[str, tuple[int, ...]] | None:
    """Dtype name and row shape of an array, or None if it can be no field.

    Args:
        array: The first rows of a column. Lists of variable length are assumed to have
            the first row's length, which `lengths_differ` checks.
    """
    kind, shape = array.type, []
    if isinstance(kind, pa.FixedShapeTensorType):
        named = _name_of(kind.value_type)
        permuted = kind.permutation not in (None, list(range(len(kind.shape))))
        return None if named is None or permuted else (named, tuple(kind.shape))
    array = _storage(array)
    if pa.types.is_fixed_size_binary(array.type):
        return "uint8", (array.type.byte_width,)
    while _is_list(array.type):
        shape.append(_first_length(array))
        array = _storage(array.flatten())
    named = _name_of(array.type)
    return None if named is None or 0 in shape else (named, tuple(shape))


def lengths_differ(array: Any, shape: tuple[int, ...]) -> int | None:
    """The first row whose lists have other lengths than a shape, if any."""
    rows = len(array)
    if not _is_list(array.type):
        # Tensors too, whose type has their shape.
        return None
    lists_per_row = 1
    for axis in shape:
        lengths = _lengths(array)
        if (lengths != axis).any():
            return min(int(np.argmax(lengths != axis)) // lists_per_row, rows - 1)
        lists_per_row *= axis
        array = _storage(array.flatten())
    return None


def has_nulls(array: Any) -> bool:
    """Return whether a row, or a value in one, is missing."""
    array = _storage(array)
    while _is_list(array.type):
        if array.null_count:
            return True
        array = _storage(array.flatten())
    return bool(array.null_count)


def first_null(array: Any) -> int:
    """The first row that lacks a value; the array has one, see `has_nulls`."""
    first, stop = 0, len(array)
    while stop - first > 1:
        middle = (first + stop) // 2
        if has_nulls(array.slice(first, middle - first)):
            stop = middle
        else:
            first = middle
    return first


def fill_missing(array: Any) -> Any:
    """Single floats with NaN for missing values; other arrays unchanged."""
    if pa.types.is_floating(array.type) and array.null_count:
        return array.fill_null(pa.scalar(float("nan"), array.type))
    return array


def is_variable(kind: Any) -> bool:
    """Return whether rows of a type may differ in length."""
    kind = _stored_type(kind)
    while _is_list(kind):
        if not pa.types.is_fixed_size_list(kind):
            return True
        kind = kind.value_type
    return False


def may_vary(kind: Any) -> bool:
    """Return whether a field that varies may hold a type: strings, or lists."""
    kind = _stored_type(kind)
    if is_bytes(kind):
        return True
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(lists and holds_numbers(kind) and _name_of(_leaf_type(kind)))


def holds_numbers(kind: Any) -> bool:
    """Return whether a type is numbers, lists of them, or bytes of one length."""
    kind = _stored_type(kind)
    while _is_list(kind):
        kind = _stored_type(kind.value_type)
    return pa.types.is_fixed_size_binary(kind) or _name_of(kind) is not None


def no_rows(kind: Any) -> Any:
    """An array of a type, without rows."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(pa.array([], kind.storage_type))
    return pa.array([], kind)


def _stored_type(kind: Any) -> Any:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(array: Any) -> Any:
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    )


def _lengths(array: Any) -> NDArray[np.int64]:
    if pa.types.is_fixed_size_list(array.type):
        return np.full(len(array), array.type.list_size)
    found: NDArray[np.int64] = array.value_lengths().to_numpy(zero_copy_only=False)
    return found


def _first_length(array: Any) -> int:
    found = _lengths(array[:1])
    return int(found[0]) if len(found) and found[0] == found[0] else 0


def _name_of(kind: Any) -> str | None:
    for name, each in TYPES.items():
        if kind == each:
            return name
    return None
