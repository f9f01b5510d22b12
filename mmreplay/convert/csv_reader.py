"""Csv files of ours, described by their sidecar, and how pyarrow is asked for rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow
from numpy.typing import NDArray

from mmreplay.convert.ahead import THREADS, in_order
from mmreplay.convert.arrays import refuse_wide
from mmreplay.convert.base import Block, Notes, Reader, default_rows
from mmreplay.convert.csv_columns import Cells
from mmreplay.convert.csv_sidecar import Sidecar, differs
from mmreplay.convert.csv_text import Check, Text, block_nbytes, explain, read_header
from mmreplay.convert.description import (
    ENV_ID,
    FLAGS,
    POSITION,
    RESERVED,
    Description,
)
from mmreplay.errors import CorruptError, FormatError, ReplayError
from mmreplay.files import File

TRUE = ["true", "True", "TRUE", "1"]
FALSE = ["false", "False", "FALSE", "0"]
AHEAD_NBYTES = 32 << 20
"""Text that waits to be parsed, or was; of rows so long one piece at a time."""


def parsed(
    text: Text, types: dict[str, Any], wanted: Sequence[str], ours: bool,
    take: Callable[[Any], Any],
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """The rows that follow the header, piece by piece: how many, and what they became.

    Args:
        text: Where the header ended.
        types: Arrow type by column, of all columns in order.
        wanted: Columns to convert.
        ours: Whether every cell has a value and stands in one line.
        take: Makes something of a record batch, in the thread that parsed it.
    """
    # Not `open_csv`, which reads ahead in a thread of its own: that ended the process
    # when it was given up, over a file of Python's. And a piece to a thread: pyarrow's
    # own threads wait for each other at the end of each piece.
    size = block_nbytes(len(types))
    options = {
        "read_options": arrow.ReadOptions(
            column_names=list(types), block_size=2 * size, use_threads=False
        ),
        "parse_options": arrow.ParseOptions(newlines_in_values=not ours),
        "convert_options": arrow.ConvertOptions(
            column_types=types,
            include_columns=list(wanted),
            null_values=[] if ours else [""],
            true_values=TRUE,
            false_values=FALSE,
        ),
    }

    def parse(lines: bytes) -> list[tuple[int, Any]]:
        table = arrow.read_csv(pa.BufferReader(lines), **options)
        return [(batch.num_rows, take(batch)) for batch in table.to_batches()]

    pieces = (lines for lines in text.lines(size // 2) if not lines.isspace())
    for found in in_order(parse, pieces, min(THREADS, AHEAD_NBYTES // size)):
        yield from found


def check_of(kind: Any) -> tuple[str, Check]:
    """What a cell of an Arrow type should be, and whether it is."""
    if pa.types.is_boolean(kind):
        return "true or false", lambda cell: cell in TRUE or cell in FALSE
    if pa.types.is_integer(kind):
        info = np.iinfo(kind.to_pandas_dtype())
        least, most = int(info.min), int(info.max)
        what = f"an integer in [{least}, {most}]"
        return what, lambda cell: _whole(cell, least, most)
    if pa.types.is_floating(kind):
        return "a number", is_number
    return "text", lambda cell: True


def _whole(cell: str, least: int, most: int) -> bool:
    try:
        return "_" not in cell and least <= int(cell) <= most
    except ValueError:
        return False


def is_number(cell: str) -> bool:
    """Whether a cell is text of a float, NaN and infinities included."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


class CsvReader(Reader):
    """Reads a file of ours; see `Reader`. Without a sidecar: `csv_plain`."""

    def __init__(self, path: Path, sidecar: Sidecar, allow_expansion: bool) -> None:
        self.report = Notes()
        self._path, self._sidecar = path, sidecar
        self._allowed = allow_expansion
        self._description = sidecar.description
        self._cells = Cells(self._description.columns)
        refuse_wide(self._description.row_nbytes, path)
        with closing(File.open(path, None)) as file:
            self._begin(file)

    def _begin(self, file: File) -> Text:
        """The text of the rows, after a header that is as it should be."""
        text = Text(file, self._allowed)
        names = read_header(text, file).names
        expected = self._cells.names
        for number in range(max(len(names), len(expected))):
            got = names[number] if number < len(names) else "nothing"
            want = expected[number] if number < len(expected) else "nothing"
            if got != want:
                raise FormatError(
                    f"{file.path}, line 1, column {number + 1}: got {got!r}, expected "
                    f"{want!r} as the sidecar says; read it without by sidecar=False"
                )
        return text

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        return self._read(tuple(self._description.columns), rows)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`: all text is read, and three columns converted."""
        return self._read(tuple(RESERVED), default_rows(self._description))

    def _read(self, fields: tuple[str, ...], rows: int) -> Iterator[Block]:
        done = 0
        with closing(File.open(self._path, self._sidecar.nbytes)) as file:
            text = self._begin(file)
            for count, found in self._parsed(file, text, fields):
                done += count
                for first in range(0, count, rows):
                    part = slice(first, first + rows)
                    yield _block({name: found[name][part] for name in fields})
            text.drain()
            if text.crc != self._sidecar.crc:
                raise differs(
                    file, f"checksum {text.crc:08x}", f"{self._sidecar.crc:08x}"
                )
        if done != self._description.rows:
            raise CorruptError(
                f"{self._path} has {done} rows, expected the {self._description.rows} "
                "that its sidecar names; the two are not of one run"
            )

    def _parsed(
        self, file: File, text: Text, fields: Sequence[str]
    ) -> Iterator[tuple[int, Any]]:
        if self._description.rows == 0:
            return
        cells = self._cells
        yield from told(
            file, text, cells.types(), cells.columns_of(fields), self._allowed,
            lambda batch: cells.decode(batch, fields), ours=True,
        )  # fmt: skip

    def close(self) -> None:
        """See `Reader.close`: the file is open while it is read only."""
        return


def told(
    file: File, text: Text, types: dict[str, Any], wanted: Sequence[str],
    allowed: bool, take: Callable[[Any], Any], *, ours: bool,
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """`parsed`, with an error that tells of the first row that cannot be read."""
    done = 0
    found = parsed(text, types, wanted, ours, take)
    while True:
        try:
            piece = next(found, None)
        except ReplayError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise unreadable(file, types, done, error, allowed) from error
        if piece is None:
            return
        done += piece[0]
        yield piece


def unreadable(
    file: File, types: dict[str, Any], done: int, error: Exception, allowed: bool
) -> CorruptError:
    """The error of a row that pyarrow cannot read, with its line and column."""
    checks = {name: check_of(kind) for name, kind in types.items()}
    found = explain(Text(file, allowed), file, done, checks)
    if found is None:
        told = " ".join(str(error).split())[:200]
        found = f"{file.path}, after {done} rows: got {told}, expected more rows"
    return CorruptError(f"{found}; the file was edited or damaged: correct it there")


def _block(found: dict[str, NDArray[np.generic]]) -> Block:
    env_ids = found.pop(ENV_ID).view(np.int64)
    positions = found.pop(POSITION).view(np.int64)
    return Block(found, env_ids, positions, found.pop(FLAGS).view(np.uint8))
