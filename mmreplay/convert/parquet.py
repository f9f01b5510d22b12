"""Fields as Arrow columns that others read, and Arrow columns as fields.

Single values are columns of their own type. Vectors of floats, of wide integers and of
bools are lists of one length, row-major. Everything else, images above all, is bytes of
one length: parquet has no integers below 32 bits, so that lists of them would take four
times the room and twenty times the time.

One parquet file written or read, through our own door to the disk.

Parquet files that mmreplay did not write: numbers, lists of one length, bytes.

Rows into a parquet file, or into part files, a row group at a time.

parquet: a table that pandas, polars, duckdb and Hugging Face ``datasets`` read.

One file, or a folder of part files. Beside the columns of every file of ours it has
``episode_index`` and ``step_index``, to group and sort by. The description and a
CRC32C of every column stand in the footer.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.checksums import crc32c
from mmreplay.convert import parquet_checks
from mmreplay.convert.array_file import refuse_wide
from mmreplay.convert.base import (
    BLOCK_NBYTES,
    Block,
    Columns,
    Notes,
    Reader,
    Writer,
    default_rows,
    doubt_sums,
    undescribed,
)
from mmreplay.convert.description import (
    ENV_ID,
    FLAGS,
    KEY,
    POSITION,
    RESERVED,
    Description,
)
from mmreplay.convert.episode_ends import EPISODE, STEP, Steps
from mmreplay.convert.staging import Staging
from mmreplay.convert.undescribed import Kinds, TableReader, refuse_expansion
from mmreplay.disk.files import File
from mmreplay.disk.seekable import Positioned
from mmreplay.errors import (
    CorruptError,
    FormatError,
    ReplayError,
    SchemaError,
    SourceError,
)
from mmreplay.schema.dtypes import DTYPES, storage_dtype
from mmreplay.schema.naming import left_out

Vectors = Literal["auto", "list", "binary"]
MAX_LIST_VALUES = 1024
NARROW = {"int8", "int16", "uint8", "uint16", "bfloat16"}
TYPES = {
    name: pa.from_numpy_dtype(storage_dtype(name))
    for name in DTYPES
    if name != "bfloat16"
}
ITEM = "element"
"""What parquet calls the values of a list."""


def check_vectors(vectors: str) -> None:
    """Refuse what is no way to write vectors.

    Raises:
        SchemaError: It is none.
    """
    if vectors not in get_args(Vectors):
        raise SchemaError(
            f"vectors: got {vectors!r}, expected one of {', '.join(get_args(Vectors))};"
            " leave it out for auto"
        )


def column_of(name: str, dtype: str, shape: tuple[int, ...], vectors: str) -> Any:
    """The Arrow field that holds a field.

    Args:
        name: The column's.
        dtype: The field's; bfloat16 becomes uint16 of the same bits.
        shape: The field's.
        vectors: ``"list"`` or ``"binary"`` for all that have a shape; ``"auto"`` takes
            lists for short ones of types that parquet has.
    """
    count = int(np.prod(shape, dtype=object))
    if not count:
        # Arrow divides by the number of values of a list.
        raise SchemaError(
            f"field {name!r}: got the shape {list(shape)}, expected at least one value "
            "a row, as parquet keeps no empty ones; leave it out with fields=, or "
            "export to npz"
        )
    item = TYPES["uint16" if dtype == "bfloat16" else dtype]
    told = {"dtype": dtype, "shape": json.dumps(list(shape))}
    if not shape:
        kind = item
    elif vectors == "list" or (
        vectors == "auto" and dtype not in NARROW and count <= MAX_LIST_VALUES
    ):
        kind = pa.list_(pa.field(ITEM, item, nullable=False), count)
    else:
        kind = pa.binary(count * storage_dtype(dtype).itemsize)
    return pa.field(name, kind, nullable=False, metadata=told)


def encode(column: NDArray[np.generic], kind: Any) -> Any:
    """A column ``[N, *shape]`` as an Arrow array that shares nothing with it."""
    whole = np.array(column, order="C")
    if pa.types.is_fixed_size_binary(kind):
        held = [None, pa.py_buffer(whole)]
        return pa.FixedSizeBinaryArray.from_buffers(kind, len(whole), held)
    if pa.types.is_fixed_size_list(kind):
        values = pa.array(whole.reshape(-1), kind.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    return pa.array(whole, kind)


def decode(array: Any, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """An Arrow array without nulls as a column ``[N, *shape]``; may be read-only.

    The array's type must hold shape, as `fits` and `kind_of` say.
    """
    stored = storage_dtype(dtype)
    count = len(array)
    array = _storage(array)
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        begin = array.offset * width
        raw = np.frombuffer(array.buffers()[1], np.uint8, count * width, begin)
        # Any byte but 0 and 1 is no bool.
        values = raw != 0 if stored.kind == "b" else raw.view(stored)
        return values.reshape(count, *shape)
    while _is_list(array.type):
        # Unlike `values`, it knows where a slice of a longer array begins.
        array = _storage(array.flatten())
    found: NDArray[np.generic] = array.to_numpy(zero_copy_only=False)
    return found.reshape(count, *shape)


def fits(kind: Any, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether arrays of an Arrow type hold a field, one value a row."""
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
    item = TYPES["uint16" if dtype == "bfloat16" else dtype]
    return bool(kind == item and size == count and lists == bool(shape))


def kind_of(array: Any) -> tuple[str, tuple[int, ...]] | None:
    """Dtype name and row shape that an array's rows have, or None for no field.

    Args:
        array: The first rows of a column. Lists of any length are taken to have that
            of the first row everywhere, which `lengths_differ` checks.
    """
    kind, shape = array.type, []
    if isinstance(kind, pa.FixedShapeTensorType):
        named = _name_of(kind.value_type)
        turned = kind.permutation not in (None, list(range(len(kind.shape))))
        return None if named is None or turned else (named, tuple(kind.shape))
    array = _storage(array)
    if pa.types.is_fixed_size_binary(array.type):
        return "uint8", (array.type.byte_width,)
    while _is_list(array.type):
        shape.append(_first_length(array))
        array = _storage(array.flatten())
    named = _name_of(array.type)
    return None if named is None or 0 in shape else (named, tuple(shape))


def lengths_differ(array: Any, shape: tuple[int, ...]) -> int | None:
    """The first row whose lists are not of the lengths that shape says, if any."""
    rows = len(array)
    if not _is_list(array.type):
        # Tensors too, whose type says how long they are.
        return None
    share = 1
    for axis in shape:
        found = _lengths(array)
        if (found != axis).any():
            return min(int(np.argmax(found != axis)) // share, rows - 1)
        share *= axis
        array = _storage(array.flatten())
    return None


def has_nulls(array: Any) -> bool:
    """Whether a row, or a value in one, is missing."""
    array = _storage(array)
    while _is_list(array.type):
        if array.null_count:
            return True
        array = _storage(array.flatten())
    return bool(array.null_count)


def filled(array: Any) -> Any:
    """Single floats with NaN where they are missing; anything else as it is."""
    if pa.types.is_floating(array.type) and array.null_count:
        return array.fill_null(pa.scalar(float("nan"), array.type))
    return array


def is_variable(kind: Any) -> bool:
    """Whether rows of a type may differ in length."""
    kind = _stored_type(kind)
    while _is_list(kind):
        if not pa.types.is_fixed_size_list(kind):
            return True
        kind = kind.value_type
    return False


def holds_numbers(kind: Any) -> bool:
    """Whether a type is numbers, lists of them, or bytes of one length."""
    kind = _stored_type(kind)
    while _is_list(kind):
        kind = _stored_type(kind.value_type)
    return pa.types.is_fixed_size_binary(kind) or _name_of(kind) is not None


def no_rows(kind: Any) -> Any:
    """An array of a type without rows: enough where the type says all there is."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(pa.array([], kind.storage_type))
    return pa.array([], kind)


def _stored_type(kind: Any) -> Any:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(array: Any) -> Any:
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_fixed_size_list(kind)
        or pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
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


CODECS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")
PAGE_NBYTES = 1 << 20
SCALARS_ONCE = ("_env_id", "_flags", "episode_index")
"""Columns of long runs of one value, for which a dictionary pays."""
COUNTED = ("_position", "step_index")
"""Columns that rise by one, of which the differences are stored."""
READ_NBYTES = 1 << 20
MAX_STRING_NBYTES = 24 << 20
# A value of 8 bytes and its two levels.
LEVELED_NBYTES = 12


@dataclass(frozen=True, slots=True)
class Compression:
    """How pages are packed.

    Attributes:
        codec: One of `CODECS`.
        level: The codec's own; None for its default.
    """

    codec: str = "zstd"
    level: int | None = None

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise SchemaError(
                f"compression: got {self.codec!r}, expected one of {', '.join(CODECS)};"
                " leave it out for zstd"
            )
        if self.level is None:
            return
        least, most = _levels(self.codec)
        if type(self.level) is not int or not least <= self.level <= most:
            raise SchemaError(
                f"compression_level: got {self.level!r} for {self.codec!r}, expected "
                f"{f'{least} to {most}' if least <= most else 'none'}; leave it out "
                "for the codec's default"
            )


def _levels(codec: str) -> tuple[int, int]:
    try:
        least = pa.Codec.minimum_compression_level(codec)
        return least, pa.Codec.maximum_compression_level(codec)
    except (ValueError, TypeError):
        return 1, 0


class Sink(io.RawIOBase):
    """A file that pyarrow appends to."""

    def __init__(self, file: File) -> None:
        self._file, self._end = file, 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Append bytes, all of them."""
        view = memoryview(data).cast("B")
        self._file.pwrite(view, self._end)
        self._end += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written."""
        return self._end


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn what pyarrow finds wrong with a file into our error."""
    try:
        yield
    except ReplayError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        text = " ".join(str(error).split())[:200]
        raise CorruptError(
            f"{path} is not what its headers say ({text}), expected a parquet file; it "
            "was damaged: restore it from a copy"
        ) from error


class PartWriter:
    """Writes the row groups of one file.

    Attributes:
        rows: Rows so far.
    """

    def __init__(
        self, file: File, schema: Any, compression: Compression, widest: int
    ) -> None:
        """Begin a file.

        Args:
            file: Empty, open for writing; closed by `close`.
            schema: Of Arrow.
            compression: Of all pages.
            widest: Bytes of the widest column's row: pages are cut between values.
        """
        self.rows = 0
        self._file = file
        dictionaries = [
            field.name
            for field in schema
            if field.name in SCALARS_ONCE and pa.types.is_integer(field.type)
        ]
        self._writer = pq.ParquetWriter(
            pa.PythonFile(Sink(file), mode="w"),
            schema,
            compression=compression.codec,
            compression_level=compression.level,
            use_dictionary=dictionaries,
            column_encoding=_encodings(schema),
            data_page_size=PAGE_NBYTES,
            write_batch_size=max(1, min(1024, PAGE_NBYTES // widest)),
            # Least and greatest bytes of an image tell nobody anything.
            write_statistics=[f.name for f in schema if _is_single(f.type)],
        )

    def write(self, batches: Sequence[Any]) -> None:
        """Write record batches as one row group."""
        table = pa.Table.from_batches(batches)
        self._writer.write_table(table, row_group_size=len(table))
        self.rows += len(table)

    def close(self, metadata: Mapping[str, str | bytes] | None) -> None:
        """Write the footer, with metadata; without any the file is given up."""
        try:
            if metadata is not None:
                self._writer.add_key_value_metadata(dict(metadata))
                self._writer.close()
        finally:
            # A writer that is collected writes a footer: let it find no file.
            self._writer.is_open = False
            self._file.close()


def _is_single(kind: Any) -> bool:
    return not pa.types.is_nested(kind) and not pa.types.is_fixed_size_binary(kind)


def _encodings(schema: Any) -> dict[str, str]:
    """How values are laid out, by the path of a leaf, where that is not plainly."""
    found = {}
    for field in schema:
        kind, leaf = field.type, field.name
        # A field may have the name of a column of ours, and any type.
        counts = leaf in COUNTED and pa.types.is_int64(kind)
        if pa.types.is_fixed_size_list(kind):
            kind, leaf = kind.value_type, f"{field.name}.list.{ITEM}"
        if counts:
            found[leaf] = "DELTA_BINARY_PACKED"
        elif pa.types.is_floating(kind):
            # Bytes of equal weight beside each other pack better, and faster.
            found[leaf] = "BYTE_STREAM_SPLIT"
    return found


class Part:
    """One file that is read; checked when it is opened.

    Attributes:
        path: Of the file.
        rows: In all.
        nbytes: Of the file.
        schema: Of Arrow.
        metadata: Key-value metadata.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = File.open(path, None)
        try:
            footer = parquet_checks.check(self._file)
            self.rows, self.nbytes = footer.rows, self._file.nbytes
            # Not asked of pyarrow, which ends the process over some footers.
            self._values = footer.values
            with told(path):
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._parquet = pq.ParquetFile(
            pa.PythonFile(Positioned(self._file), mode="r"),
            pre_buffer=False,
            # Columns are read a piece at a time, not whole row groups.
            buffer_size=READ_NBYTES,
            thrift_string_size_limit=MAX_STRING_NBYTES,
            thrift_container_size_limit=parquet_checks.MAX_STRUCTS,
        )
        self.schema = self._parquet.schema_arrow
        self.metadata = dict(self._parquet.metadata.metadata or {})

    def refuse_long(self, name: str) -> None:
        """Refuse a column of lists that one row group could make endless.

        How long a row's list is stands between its values, so that nothing before
        them bounds it.

        Raises:
            FormatError: Its values in one row group take more than 512 MiB.
        """
        most = max(
            (n for path, n in self._values.items() if path.startswith(f"{name}.")),
            default=0,
        )
        if LEVELED_NBYTES * most > parquet_checks.MAX_PAGES_NBYTES:
            raise FormatError(
                f"{self.path}: column {name!r} has {most} values in one row group, "
                f"expected lists of at most {parquet_checks.MAX_PAGES_NBYTES} bytes; "
                "write it with smaller row groups"
            )

    def batches(self, rows: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Arrow arrays by column, at most rows at a time."""
        with told(self.path):
            batches = self._parquet.iter_batches(rows, columns=list(names))
        done = 0
        while True:
            with told(self.path):
                batch = next(batches, None)
                if batch is None:
                    break
                found = {name: batch.column(name) for name in names}
            done += batch.num_rows
            yield found
        if done != self.rows:
            raise CorruptError(
                f"{self.path} gives {done} rows, expected the {self.rows} that its "
                "footer says; it was damaged"
            )

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def open_plain(path: Path, paths: list[Path], allow_expansion: bool) -> TableReader:
    """Open files of the same columns as one table, one after the other.

    Args:
        path: What the user named.
        paths: The files, in order.
        allow_expansion: Read rows that take far more than the files do.

    Raises:
        FormatError: Columns differ between files, or take too much memory.
    """
    notes = Notes()
    with closing(Part(paths[0])) as part:
        names, kinds = _find(part, notes)
        schema = part.schema
    rows = taken = 0
    for each in paths:
        with closing(Part(each)) as part:
            _check_alike(part, schema, paths[0])
            for name in names:
                part.refuse_long(name)
            rows, taken = rows + part.rows, taken + part.nbytes
    if len(paths) > 1:
        notes.note(f"{len(paths)} files were read, in the order of their names")
    _refuse_bombs(path, kinds, rows, taken, allow_expansion)

    def batches(rows: int, names: tuple[str, ...]) -> Iterator[Columns]:
        done = 0
        for each in paths:
            with closing(Part(each)) as part:
                _check_alike(part, schema, paths[0])
                for batch in part.batches(rows, names):
                    yield _columns(part, batch, kinds, done, notes)
                    done += len(next(iter(batch.values())))

    return TableReader(path, kinds, rows, batches, notes)


def _refuse_bombs(
    path: Path, kinds: Kinds, rows: int, taken: int, allowed: bool
) -> None:
    row_nbytes = sum(
        storage_dtype(dtype).itemsize * int(np.prod(shape, dtype=object))
        for dtype, shape in kinds.values()
    )
    refuse_expansion(path, rows * row_nbytes, taken, allowed)


def _find(part: Part, notes: Notes) -> tuple[list[str], Kinds]:
    """Columns that can be fields, by what their types and first rows say."""
    names = []
    for name in part.schema.names:
        if part.schema.names.count(name) > 1:
            raise FormatError(
                f"{part.path} has column {name!r} twice, expected names that differ; "
                "rename one"
            )
        part.refuse_long(name)
        names.append(name)
    numeric = [n for n in names if holds_numbers(part.schema.field(n).type)]
    first = next(part.batches(1, numeric), {}) if numeric else {}
    kinds = {}
    for name in names:
        kind = part.schema.field(name).type
        found = None
        if name in first:
            found = kind_of(first[name])
        elif name in numeric and not is_variable(kind):
            found = kind_of(no_rows(kind))
        if found is None:
            told = f"column {name!r} of {kind} can be no field, and was left out"
            left_out(notes, name, told)
        else:
            kinds[name] = found
    return list(kinds), kinds


def _check_alike(part: Part, schema: Any, first: Path) -> None:
    if not part.schema.equals(schema):
        raise FormatError(
            f"{part.path} has other columns than {first}, expected files of one "
            "table; load them one by one"
        )


def _columns(
    part: Part, batch: dict[str, Any], kinds: Kinds, done: int, notes: Notes
) -> Columns:
    """Arrays as fields hold them.

    Raises:
        SourceError: A value is missing, or a row is longer than the first.
    """
    found = {}
    for name, array in batch.items():
        whole = filled(array)
        if whole is not array:
            notes.note(f"missing values of column {name!r} became NaN")
        dtype, shape = kinds[name]
        where = f"{part.path}: column {name!r}"
        if has_nulls(whole):
            raise SourceError(
                f"{where} lacks a value in rows [{done}, {done + len(whole)}), "
                "expected one a row; fill them in, or leave the column out"
            )
        row = lengths_differ(whole, shape)
        if row is not None:
            raise SourceError(
                f"{where} has a list of another length in row {done + row}, expected "
                f"{list(shape)} as in the first; pad them, or leave the column out"
            )
        found[name] = decode(whole, dtype, shape)
    return found


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
    check_vectors(vectors)
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
            if kind is None or not fits(kind, dtype, shape):
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
        if has_nulls(array):
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
