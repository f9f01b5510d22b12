"""DQN Replay's checkpoints: one gzipped npy array for each field, single frames.

Dopamine writes ``$store$_observation_ckpt.<n>.gz`` and so on. The arrays are circular;
``add_count_ckpt.<n>.gz`` gives the next slot. Episodes end at terminal rows, and begin
with rows of zeros for the frames before the first one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from mmreplay.convert import npz
from mmreplay.convert.array_file import native
from mmreplay.convert.base import BLOCK_NBYTES, MAX_ROW_NBYTES, Notes, refuse_wide
from mmreplay.convert.episode_ends import Bools
from mmreplay.convert.zip_file import MAX_EXPANSION
from mmreplay.datasets.common.fields import Flags, ends_of, make_schema
from mmreplay.datasets.common.fragments import ENDS, Fragment, FragmentReader
from mmreplay.datasets.common.rows import (
    Array,
    ColumnRows,
    RotatedRows,
    ShiftedRows,
    is_scalar,
    nbytes_of,
    scalar,
)
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, SchemaError, undone_by
from mmreplay.schema.dtypes import canonical_name
from mmreplay.schema.source_names import name_fields, own_names_of

STORED = re.compile(r"\$store\$_([\w-]+)_ckpt\.(\d+)\.gz")
STORE = "$store$_{}_ckpt.{}.gz"
COUNT = "add_count_ckpt.{}.gz"
NEEDED = ("observation", "action", "reward", "terminal")
PADDING = 3
READ_NBYTES = 1 << 18
SKIP_NBYTES = 1 << 20


def open_reader(
    path: Path,
    *,
    checkpoint: int | None = None,
    padding: int = PADDING,
    allow_expansion: bool = False,
    fields: Sequence[str] | None = None,
) -> DqnReplayReader:
    """Open a folder of checkpoints as a source.

    Args:
        path: The folder of ``$store$_*`` files.
        checkpoint: Read that of this number; all in order by default.
        padding: Most rows of zeros that are left out before each episode: the frame
            stack of the agent less one.
        allow_expansion: Read arrays that expand to more than 1,000 times the file.
        fields: See `name_fields`.
    """
    if type(padding) is not int or padding < 0:
        raise SchemaError(
            f"padding must be an integer of at least 0, got {padding!r}. Leave it out "
            f"for {PADDING}."
        )
    numbers = _numbers(path) if path.is_dir() else []
    if checkpoint is not None and checkpoint in numbers:
        numbers = [checkpoint]
    elif checkpoint is not None or not numbers:
        raise SchemaError(
            f"checkpoint must be one of {numbers} in {path}, got {checkpoint!r}. Leave "
            "it out for all."
        )
    checkpoints = Checkpoints(path, allow_expansion, fields)
    with undone_by(checkpoints.close):
        return DqnReplayReader(checkpoints, numbers, padding)


def recognizes(path: Path) -> bool:
    """Return whether a folder holds such files."""
    return path.is_dir() and bool(_numbers(path))


class DqnReplayReader(FragmentReader):
    """Reads checkpoints one after another as one environment."""

    def __init__(self, checkpoints: Checkpoints, numbers: list[int], padding: int) -> None:
        self._checkpoints, self._padding = checkpoints, padding
        self._dropped = 0
        self._bounds = {n: self._find(checkpoints.columns(n)) for n in numbers}
        columns = checkpoints.columns(numbers[0])
        columns.pop("terminal")
        notes = checkpoints.notes
        schema = make_schema(columns, notes, checkpoints.folder)
        notes.note(
            f"{len(numbers)} checkpoints were read; episodes end at terminal rows, and "
            "time limits are not distinguished; frames are single: stack them when "
            "they are drawn"
        )
        if self._dropped:
            notes.note(
                f"{self._dropped:,} rows were left out: frames of zeros that stand "
                "before an episode's first"
            )
        super().__init__(
            self._fragments_of, schema, notes, checkpoints.close, own_names=checkpoints.own_names
        )

    def _find(self, columns: Mapping[str, ColumnRows]) -> list[tuple[int, int]]:
        """Return first row and stop of each episode, without leading rows of zeros."""
        count = columns["terminal"].count
        rows = max(1, BLOCK_NBYTES // nbytes_of(columns["observation"]))
        found: list[tuple[int, int]] = []
        begin, leading = 0, 0
        for first in range(0, count, rows):
            stop = min(first + rows, count)
            over = columns["terminal"].read(first, stop).reshape(-1) != 0
            for row in _events(_zeros(columns, first, stop), over):
                place = first + row
                # A row of zeros counts where only such rows stand before it.
                if not over[row]:
                    if place == begin + leading and leading < self._padding:
                        leading += 1
                    continue
                found.append((begin + leading, place + 1))
                self._dropped += leading
                begin, leading = place + 1, 0
        if begin + leading < count:
            found.append((begin + leading, count))
        self._dropped += leading
        return found

    def _fragments_of(self) -> Iterator[Fragment]:
        for number, bounds in self._bounds.items():
            columns = self._checkpoints.columns(number)
            terminal = columns.pop("terminal")
            name = f"{self._checkpoints.folder}, checkpoint {number}"
            for first, stop in bounds:
                steps = stop - first
                kept = {p: ShiftedRows(rows, first, steps) for p, rows in columns.items()}
                here = f"{name}, row {first}"
                over = Flags(f"{here}: 'terminal'", ShiftedRows(terminal, first, steps), steps)
                yield Fragment(here, steps, kept, {}, ends_of(over, None))


class Checkpoints:
    """The files of a folder, those of one checkpoint open at a time.

    Attributes:
        folder: The folder.
        notes: The report.
        own_names: See `Reader.own_names`; the names of files, of all checkpoints.
    """

    def __init__(
        self, folder: Path, allow_expansion: bool, fields: Sequence[str] | None = None
    ) -> None:
        self.folder, self.notes, self._fields = folder, Notes(), fields
        self.own_names: dict[str, tuple[str, ...]] = {}
        self._allow_expansion = allow_expansion
        self._open: list[Gzip] = []

    def columns(self, number: int) -> dict[str, ColumnRows]:
        """Return the columns of a checkpoint, oldest row first; close other files."""
        self.close()
        names: dict[str, str] = {}
        for path in sorted(self.folder.iterdir()):
            match = STORED.fullmatch(path.name)
            if match and int(match[2]) == number:
                names[path.name] = match[1]
        ends = {end: STORE.format("terminal", number) for end in ENDS}
        names = name_fields(names, self.folder, self.notes, self._fields, ends)
        self.own_names |= own_names_of(names, ends)
        found = {name: self._gzip(self.folder / own) for own, name in names.items()}
        missing = [name for name in NEEDED if name not in found]
        if missing:
            raise FormatError(
                f"{self.folder} lacks $store$_{missing[0]}_ckpt.{number}.gz. Download it again."
            )
        slots = found["terminal"].count
        for rows in found.values():
            if rows.count != slots:
                raise FormatError(
                    f"{rows.file.path} has {rows.count} rows, but the terminals have "
                    f"{slots}. The checkpoint mixes files of several runs."
                )
            refuse_wide(nbytes_of(rows), rows.file.path)
        if not is_scalar(found["terminal"].shape):
            raise FormatError(
                f"{found['terminal'].file.path} must hold one flag per row, got rows "
                f"of shape {list(found['terminal'].shape)}."
            )
        first, count = self._oldest_row(number, slots)
        ordered: dict[str, ColumnRows] = {
            name: RotatedRows(rows, first, count) for name, rows in found.items()
        }
        ordered["reward"] = scalar(ordered["reward"])
        return ordered

    def _gzip(self, path: Path) -> Gzip:
        self._open.append(Gzip(path, self._allow_expansion))
        return self._open[-1]

    def _oldest_row(self, number: int, slots: int) -> tuple[int, int]:
        """Return the slot of the oldest row, and the number of rows."""
        path = self.folder / COUNT.format(number)
        if not path.exists():
            self.notes.doubt(
                f"{path.name} is missing, which says which row is the oldest: all were "
                "read, in the file's order"
            )
            return 0, slots
        added = self._gzip(path).number()
        return (0, added) if added <= slots else (added % slots, slots)

    def close(self) -> None:
        """Close the open files."""
        for each in self._open:
            each.close()
        self._open = []


class Gzip:
    """An npy array in a gzip file, read forward; see `common.rows.Rows`.

    A step back starts at the first byte again.
    """

    def __init__(self, path: Path, allow_expansion: bool) -> None:
        """Open a file.

        Raises:
            FormatError: It holds no array of numbers, or claims to hold too many.
            CorruptError: It is damaged.
        """
        self.file = File.open(path, None)
        with undone_by(self.file.close):
            self._begin()
            self._check(allow_expansion)

    def _begin(self) -> None:
        self._inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._at, self._got, self._rest = 0, 0, b""
        what = f"{self.file.path}: its content"
        head = self._take(12)
        total = npz.prefix_nbytes(head, what)
        self._header = npz.parse(head + self._take(max(0, total - 12)), what)
        self._row = 0

    def _check(self, allow_expansion: bool) -> None:
        header, path = self._header, self.file.path
        if header.columns_first and len(header.shape) > 1:
            raise FormatError(f"{path} lies in Fortran order. Save numpy.ascontiguousarray of it.")
        try:
            self.dtype = canonical_name(header.dtype)
        except SchemaError as error:
            raise FormatError(f"{path}: {error}") from error
        self.shape: tuple[int, ...] = header.shape[1:]
        self.count = header.shape[0] if header.shape else 0
        nbytes = header.data_nbytes
        if nbytes > MAX_EXPANSION * max(self.file.nbytes, 1 << 10) and (not allow_expansion):
            raise FormatError(
                f"{path} says that {self.file.nbytes} bytes hold {nbytes}, more than "
                f"{MAX_EXPANSION} times as many. Pass allow_expansion=True if you "
                "trust the file."
            )
        if nbytes > MAX_ROW_NBYTES * max(1, self.count):
            raise FormatError(
                f"{path} must have rows of at most {MAX_ROW_NBYTES} bytes, got "
                f"{nbytes // max(1, self.count)}."
            )

    def _take(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            if not self._rest and self._at < self.file.nbytes:
                size = min(READ_NBYTES, self.file.nbytes - self._at)
                self._rest = self.file.pread(size, self._at)
                self._at += size
            try:
                data = self._inflate.decompress(self._rest, len(view) - done)
            except zlib.error as error:
                raise self._damaged(f"cannot be unpacked ({error})") from error
            self._rest = self._inflate.unconsumed_tail
            if not data and not self._rest and (self._inflate.eof or self._at == self.file.nbytes):
                raise self._damaged("ends before its gzipped data is complete")
            view[done : done + len(data)] = data
            done += len(data)
        self._got += done

    def _damaged(self, problem: str) -> CorruptError:
        return CorruptError(
            f"{self.file.path} {problem} near byte {self._at}, after {self._got} "
            "unpacked bytes. The file is truncated or damaged: restore it from a copy."
        )

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        if first < self._row:
            self._begin()
        found = np.empty((stop - first, *self.shape), self._header.dtype)
        row_nbytes = found.nbytes // max(1, len(found))
        self._skip((first - self._row) * row_nbytes)
        if found.size:
            self._fill(found.reshape(-1).view(np.uint8).data)
        self._row = stop
        if stop == self.count:
            self._finish()
        return native(found, self.dtype)

    def number(self) -> int:
        """Return the single number of the file, at least 0.

        Raises:
            FormatError: The file holds something else.
        """
        header = self._header
        if header.shape or header.dtype.kind not in "iu":
            raise FormatError(
                f"{self.file.path} must hold one integer, got "
                f"{header.dtype}{list(header.shape)}. The file is damaged."
            )
        found = int(np.frombuffer(self._take(header.data_nbytes), header.dtype)[0])
        if found < 0:
            raise FormatError(
                f"{self.file.path} must hold a number of at least 0, got {found}. The "
                "file is damaged."
            )
        return found

    def _skip(self, nbytes: int) -> None:
        while nbytes > 0:
            nbytes -= len(self._take(min(SKIP_NBYTES, nbytes)))

    def _finish(self) -> None:
        """Read the checksum after the last byte."""
        while not self._inflate.eof:
            if not self._rest and self._at == self.file.nbytes:
                raise self._damaged("has no checksum")
            size = min(READ_NBYTES, self.file.nbytes - self._at)
            self._rest += self.file.pread(size, self._at)
            self._at += size
            try:
                more = self._inflate.decompress(self._rest, 1)
            except zlib.error as error:
                raise self._damaged(f"cannot be unpacked ({error})") from error
            if more:
                raise self._damaged("has more bytes than its header says")
            self._rest = self._inflate.unconsumed_tail

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _zeros(columns: Mapping[str, ColumnRows], first: int, stop: int) -> Bools:
    """Rows of zeros as Dopamine puts before an episode, bool ``[N]``."""
    zero = np.ones(stop - first, bool)
    for name in ("observation", "action", "reward"):
        values = columns[name].read(first, stop)
        zero &= ~values.reshape(stop - first, -1).any(axis=1)
    return zero


def _events(zeros: Bools, over: Bools) -> list[int]:
    """Return the rows that are examined one by one."""
    rows: list[int] = np.flatnonzero(zeros | over).tolist()
    return rows


def _numbers(folder: Path) -> list[int]:
    found = {
        int(match[2])
        for match in map(STORED.fullmatch, (each.name for each in folder.iterdir()))
        if match
    }
    return sorted(found)
