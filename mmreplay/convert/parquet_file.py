"""One parquet file written or read, through our own door to the disk."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mmreplay.convert import parquet_checks
from mmreplay.convert.parquet_columns import ITEM
from mmreplay.errors import CorruptError, FormatError, ReplayError, SchemaError
from mmreplay.files import File
from mmreplay.positioned import Positioned

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
