"""Columns of Arrow tables in parquet and IPC files, read through a window of rows."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mmreplay.convert import parquet
from mmreplay.convert.parquet import ParquetFile, parquet_errors
from mmreplay.convert.values import check_lengths
from mmreplay.datasets.common.rows import Array, TextRows
from mmreplay.datasets.images import ImageRows
from mmreplay.disk.files import File
from mmreplay.disk.seekable import SeekableFile
from mmreplay.errors import CorruptError, FormatError, SourceError, undone_by
from mmreplay.ragged import Ragged
from mmreplay.schema import Field
from mmreplay.schema.dtypes import storage_dtype

Batches = Callable[[], Iterator[Mapping[str, Any]]]
"""Yields Arrow arrays by column, oldest rows first; called again to start again."""
ROWS = 1024


class Window:
    """A window of a table's rows around the last read.

    Reading goes forward; a step back starts at the first row again.
    """

    def __init__(self, batches: Batches, count: int, name: str) -> None:
        """Open a window.

        Args:
            batches: Yields the columns.
            count: Number of rows.
            name: Name for errors.
        """
        self.count, self.name = count, name
        self._batches = batches
        self._restart()

    def _restart(self) -> None:
        self._source = self._batches()
        self._batches_read: list[Mapping[str, Any]] = []
        self._first = self._stop = 0

    def read(self, column: str, first: int, stop: int) -> Any:
        """Return rows ``[first, stop)`` of a column as an Arrow array."""
        if first < self._first:
            self._restart()
        while self._stop < stop:
            batch = next(self._source, None)
            if batch is None:
                raise CorruptError(
                    f"{self.name} must have {self.count} rows, got {self._stop}. The "
                    "file is truncated: restore it from a copy."
                )
            self._batches_read.append(batch)
            self._stop += len(next(iter(batch.values())))
            self._drop(first)
        parts, at = [], self._first
        for batch in self._batches_read:
            array = batch[column]
            low, high = max(first - at, 0), min(stop - at, len(array))
            if low < high:
                parts.append(array[low:high])
            at += len(array)
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    def _drop(self, first: int) -> None:
        """Drop batches before a row."""
        while len(self._batches_read) > 1:
            size = len(next(iter(self._batches_read[0].values())))
            if self._first + size > first:
                return
            del self._batches_read[0]
            self._first += size


class ArrowRows:
    """A column of numbers, or of lists of one length; see `common.rows.Rows`."""

    def __init__(
        self,
        window: Window,
        column: str,
        kind: tuple[str, tuple[int, ...]],
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Read a column.

        Args:
            window: Window of the table.
            column: Name of the column.
            kind: Dtype and row shape in the table.
            shape: Another row shape with as many values.
        """
        self.dtype, self._stored = kind
        self.shape = self._stored if shape is None else shape
        self.count = window.count
        self._window, self._column = window, column

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        if first == stop:
            return np.empty((0, *self.shape), storage_dtype(self.dtype))
        array = self._window.read(self._column, first, stop)
        where = f"{self._window.name}: column {self._column!r}"
        if parquet.has_nulls(array):
            raise SourceError(
                f"{where} lacks a value in row {first + parquet.first_null(array)}. "
                "Fill missing values, or leave the column out."
            )
        row = parquet.lengths_differ(array, self._stored)
        if row is not None:
            raise SourceError(
                f"{where}: row {first + row} must have shape {list(self._stored)} like "
                "the first row. The file is damaged."
            )
        result = parquet.decode(array, self.dtype, self._stored)
        return result.reshape(stop - first, *self.shape)


def number_rows(window: Window, column: str, array: Any, shape: object) -> ArrowRows | None:
    """Return a column of numbers as rows, or None if it holds others.

    Args:
        window: Window of the table.
        column: Name of the column.
        array: Some of its values, at least one.
        shape: Row shape that the dataset's metadata gives, a JSON list. Used if it has
            as many values as the table's own.
    """
    kind = parquet.kind_of(array[:1])
    if kind is None:
        return None
    wanted = None
    if isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape):
        wanted = tuple(shape) if kind[1] == (math.prod(shape),) else None
    return ArrowRows(window, column, kind, wanted)


def text_rows(window: Window, column: str, field: Field) -> TextRows:
    """Return a column of strings as rows of a text field."""
    name = f"{window.name}: column {column!r}"

    def texts(first: int, stop: int) -> Ragged:
        if first == stop:
            return Ragged(np.zeros(0, np.uint8), np.zeros(1, np.int64), (0,))
        array = window.read(column, first, stop)
        if parquet.has_nulls(array):
            raise SourceError(
                f"{name} lacks a value in row {first + parquet.first_null(array)}. "
                "Fill missing values, or leave the column out."
            )
        with parquet_errors(Path(window.name)):
            check_lengths(parquet.row_nbytes_of(array), field, name, first)
            if pa.types.is_dictionary(array.type):
                array = array.dictionary_decode()
        return parquet.decode_values(array, field)

    return TextRows(texts, window.count, field, name)


def image_rows(window: Window, column: str) -> ImageRows:
    """Return a column of compressed images as rows."""

    def packed(first: int, stop: int) -> list[bytes]:
        result = window.read(column, first, stop).to_pylist()
        return [each or b"" for each in result]

    return ImageRows(packed, window.count, f"{window.name}: {column!r}")


def leaves(array: Any, name: str) -> dict[str, Any]:
    """Return the leaves of a column of structs by path, or the column itself."""
    if not pa.types.is_struct(array.type):
        return {name: array}
    result: dict[str, Any] = {}
    # Unlike `field`, it knows where a slice of a longer array begins.
    for field, child in zip(array.type, array.flatten(), strict=True):
        _add(result, leaves(child, f"{name}/{field.name}"), name)
    return result


def _add(result: dict[str, Any], below: Mapping[str, Any], column: str) -> None:
    """Add the leaves below a column.

    Raises:
        SourceError: Two leaves have one path.
    """
    twice = result.keys() & below.keys()
    if twice:
        raise SourceError(
            f"column {column!r} and a column before it both hold {min(twice)!r}, by "
            "its name or by a struct's. Rename one of them."
        )
    result |= below


def parquet_batches(file: ParquetFile, names: list[str], texts: Sequence[str] = ()) -> Batches:
    """Return the columns of a parquet file; structs by their leaves.

    Args:
        file: The file.
        names: Columns.
        texts: Columns of text, and their paths in structs with dots between them.
    """
    # Texts of a dictionary are in memory once, however often rows name them.
    entries = [name for name in texts if any(leaf.dictionaries for leaf in file.leaves(name))]

    def batches() -> Iterator[Mapping[str, Any]]:
        for batch in file.batches(ROWS, names, entries):
            yield flat(batch)

    return batches


def flat(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with structs by their leaves."""
    result: dict[str, Any] = {}
    for name, array in batch.items():
        _add(result, leaves(array, name), name)
    return result


class IpcFile:
    """An Arrow IPC file with uncompressed batches.

    Attributes:
        count: Number of rows.
        names: Names of the columns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = File.open(path, None)
        with undone_by(self.file.close), parquet_errors(path):
            _refuse_packed(self.file)
            self._reader = pa.ipc.open_file(pa.PythonFile(SeekableFile(self.file)))
            self.names = list(self._reader.schema.names)
            number = self._reader.num_record_batches
            self.count = sum(self._batch(n).num_rows for n in range(number))

    def _batch(self, number: int) -> Any:
        batch = self._reader.get_batch(number)
        # Wrong offsets would lead out of the buffer.
        batch.validate(full=True)
        return batch

    def batches(self, names: list[str]) -> Batches:
        """Return columns; structs by their leaves."""

        def batches() -> Iterator[Mapping[str, Any]]:
            for number in range(self._reader.num_record_batches):
                with parquet_errors(self.path):
                    batch = self._batch(number)
                    yield flat({name: batch.column(name) for name in names})

        return batches

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _refuse_packed(file: File) -> None:
    """Refuse compressed batches, whose size is not known before.

    Raises:
        FormatError: A batch is compressed.
    """
    reader = pa.ipc.MessageReader.open_stream(pa.PythonFile(_messages(file)))
    for message in reader:
        if message.type == "record batch" and _packed(message.metadata.to_pybytes()):
            raise FormatError(
                f"{file.path} has compressed record batches. Write it without "
                "compression, or as parquet."
            )


def _messages(file: File) -> SeekableFile:
    """Return the messages of an IPC file, which start after its magic bytes."""
    if file.nbytes < 16 or file.pread(6, 0) != b"ARROW1":
        raise FormatError(
            f"{file.path} does not begin with b'ARROW1'. The file is truncated, or is "
            "not an Arrow file."
        )
    return SeekableFile(file, 8)


def _packed(metadata: bytes) -> bool:
    """Return whether a message has a BodyCompression (Arrow's Message.fbs)."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        header = _field(metadata, root, 2)
        assert header is not None
        (below,) = struct.unpack_from("<I", metadata, header)
        return _field(metadata, header + below, 3) is not None
    except (struct.error, AssertionError):
        return True


def _field(data: bytes, table: int, number: int) -> int | None:
    """Return the offset of a field in a flatbuffer's table, or None."""
    (back,) = struct.unpack_from("<i", data, table)
    begin = table - back
    (size,) = struct.unpack_from("<H", data, begin)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, begin + 4 + 2 * number)
    return table + offset if offset else None
