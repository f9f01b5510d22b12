"""The protocol of all formats: a description, then blocks of rows, oldest first.

A `Reader` describes its rows and gives them block by block; a `Writer` is made for a
description and takes the blocks. Only one block or two are in memory, so memory does
not grow with the dataset. A buffer is one format among the others.

Below the protocol: the limits that protect memory from a file's claims, notes that
several formats share, and the threads that work ahead.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.description import ENV_ID, FLAGS, KEY, POSITION, Description
from mmreplay.convert.values import MAX_ROW_NBYTES as MAX_ROW_NBYTES
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from mmreplay.format.metadata import Engine
from mmreplay.process import thread_pool
from mmreplay.ragged import Ragged
from mmreplay.ring import Span
from mmreplay.schema.notes import Notes as Notes
from mmreplay.schema.source_names import OwnNames

BLOCK_NBYTES = 16 << 20
HARMLESS_NBYTES = 1 << 30
"""Rows of so many bytes may come from a file of any size."""

Columns = Mapping[str, NDArray[np.generic]]
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype name and row shape by column."""
Progress = Callable[[int, int], object]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that follow each other in each of their environments.

    Attributes:
        columns: Per path ``[N, *shape]`` of the field's own dtype, ``terminated`` and
            ``truncated`` as they are served; `PRIORITY` too where the description
            names priorities. Of a field that varies a `Ragged` of shape ``(N,)``. May
            be read-only, and is valid until the next block is requested.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``; those of one environment rise by one.
        flags: uint8 ``[N]``, as docs/format.md defines them. Where fields contradict
            them, the flags decide.
    """

    columns: Columns
    env_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    flags: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.flags)

    def column(self, name: str) -> NDArray[np.generic]:
        """Any column that `Description.columns` names, ``[N, *shape]``."""
        if name == ENV_ID:
            return self.env_ids
        if name == POSITION:
            return self.positions
        return self.flags if name == FLAGS else self.columns[name]

    def values(self, path: str) -> Ragged:
        """The values of a field that varies, one for each row."""
        return cast("Ragged", self.columns[path])

    def rows(self, first: int, stop: int) -> Block:
        """Rows ``[first, stop)`` of the block, as views; fewer if it ends before."""
        within = slice(first, stop)
        columns = {path: column[within] for path, column in self.columns.items()}
        return Block(columns, self.env_ids[within], self.positions[within], self.flags[within])

    def select(self, mask: NDArray[np.bool_]) -> Block:
        """Rows of a mask, bool ``[N]``; the block itself if the mask is true."""
        if mask.all():
            return self
        columns = {path: column[mask] for path, column in self.columns.items()}
        return Block(columns, self.env_ids[mask], self.positions[mask], self.flags[mask])

    def arrays(self) -> Block:
        """The same rows, with what is read when it is needed as arrays."""
        lazy = [p for p, c in self.columns.items() if not isinstance(c, np.ndarray | Ragged)]
        if not lazy:
            return self
        columns = {**self.columns, **{path: np.asarray(self.columns[path]) for path in lazy}}
        return Block(columns, self.env_ids, self.positions, self.flags)

    def take(self, rows: NDArray[np.int64]) -> Block:
        """Rows by their numbers in the block, int64 ``[N]``."""
        columns = {path: column[rows] for path, column in self.columns.items()}
        return Block(columns, self.env_ids[rows], self.positions[rows], self.flags[rows])


class Reader(Protocol):
    """A source of rows; an implementation inherits the context manager.

    Order: the rows of one environment come oldest first, without a gap, from
    ``first`` to ``stop`` of the description; environments one by one or mixed.
    Memory: a block, whatever the source. Errors: `FormatError`, `CorruptError` or
    `SourceError` with file and offset; nothing that is read is executed. Files are
    opened with `mmreplay.disk.files.File.open`, which refuses links and pipes.
    """

    report: Notes
    engine: Engine | None = None
    """Of a buffer on disk; of several sources the first one decides by it."""
    videos: Collection[str] = ()
    """Own names of the columns that are decoded from video."""

    def describe(self) -> Description:
        """Describe the rows; the same at each call."""

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """All rows, in blocks of at most rows_per_block (`default_rows` if None).

        May be called again, for another pass.
        """

    def marks(self) -> Iterator[Block]:
        """All rows without their columns: environments, positions and flags.

        Called before some episodes are selected. Override it where that reads less.
        """
        for block in self.blocks():
            yield Block({}, block.env_ids, block.positions, block.flags)

    def measures(self) -> Iterator[Block]:
        """All rows in the order of `blocks`, with lengths in place of values.

        Columns are those of fields that vary, int64 ``[N]`` each. Called, perhaps more
        than once, before values are written where their size must be known. Override
        it where that reads less.
        """
        varying = self.describe().schema.varying
        for block in self.blocks():
            lengths = {path: block.values(path).lengths for path in varying}
            yield Block(lengths, block.env_ids, block.positions, block.flags)

    def as_files(self, path: str, codec: str) -> bool:
        """Ask for the images of a field as the files that they are in the source.

        Called before the first block. The field becomes one of images, whose values are
        not decoded.

        Args:
            path: Of the field.
            codec: ``"jpeg"`` or ``"png"``.

        Returns:
            Whether the source has such files; if not, nothing changes.
        """
        return False

    def bounds(self) -> Callable[[], Iterator[Block]] | None:
        """What reads upper bounds of lengths, where values are still to be made.

        None where `measures` knows the lengths without that.
        """
        return None

    def narrow(self, span: Span) -> None:
        """Allow the reader to skip rows outside of a span: they will be left out."""
        return

    def only(self, paths: tuple[str, ...]) -> None:
        """Allow the reader to skip other fields: they will be left out."""
        return

    def identity(self) -> object:
        """What another reader of the same rows says as well; None where not known."""
        return None

    def path_of(self, env_id: int, position: int) -> Path | None:
        """Which of several sources a row is of; None of the only one."""
        return None

    def oldest(self) -> NDArray[np.int64]:
        """The oldest rows there now, int64 ``[E]``: of a live ring they rise."""
        return self.describe().first

    def own_names(self) -> OwnNames:
        """Paths of fields by the names of their columns in the source.

        The user may select a field by either. Override it where the two differ.
        """
        return {}

    def close(self) -> None:
        """Close the files; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReaderOf(Reader):
    """A reader of what another one reads, which is closed with it; a base class."""

    _description: Description

    def __init__(self, reader: Reader) -> None:
        self.report, self._reader = reader.report, reader

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        return self._reader.marks()

    def narrow(self, span: Span) -> None:
        """See `Reader.narrow`."""
        self._reader.narrow(span)

    def path_of(self, env_id: int, position: int) -> Path | None:
        """See `Reader.path_of`."""
        return self._reader.path_of(env_id, position)

    def own_names(self) -> OwnNames:
        """See `Reader.own_names`."""
        return self._reader.own_names()

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()


class Writer(Protocol):
    """A target of rows; an implementation inherits the context manager.

    The target appears complete, at `finish`, or not at all: until then everything lies
    under a ``tmp-`` name next to it (`staging`), which the next run replaces. A
    constructor that fails must remove what it made: `abort` is not called then.

    Attributes:
        nbytes: Bytes of the target, known at `finish`.
        notes: What the target leaves out, and why.
        env_by_env: The rows of an environment must come without those of others between
            them, and `transfer` sees to it.
    """

    nbytes: int
    notes: Notes
    env_by_env: bool = False

    def write(self, block: Block) -> None:
        """Write the next rows; the block's arrays may change after this call."""

    def finish(self) -> None:
        """Make the target durable and let it appear."""

    def abort(self) -> None:
        """Remove everything written so far; after `finish` it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


@dataclass(frozen=True, slots=True)
class Appended:
    """Which rows of a ring a target has.

    Attributes:
        next: int64 ``[E]``, from here on it has none.
        continued: bool ``[E]``, the row there continues an episode whose first steps
            the target has.
    """

    next: NDArray[np.int64]
    continued: NDArray[np.bool_]


class Appender(Protocol):
    """A target to which episodes are appended.

    Attributes:
        target: Its path.
        appended: Which rows it has.
    """

    target: Path

    @property
    def appended(self) -> Appended:
        """See the class."""

    def append(self, reader: Reader, appended: Appended) -> tuple[int, Notes]:
        """Append all episodes of a reader; they appear together, or not at all.

        Args:
            reader: Of complete episodes.
            appended: Which rows the target has then.

        Returns:
            Bytes of the target, and what it leaves out.
        """

    def skip(self, appended: Appended) -> None:
        """Note that rows are left out: no episode of them is to be appended.

        Args:
            appended: Which rows the target has, or leaves out.
        """

    def close(self) -> None:
        """Let others append; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a conversion.

    Attributes:
        rows: Rows read from the source, final rows included. The notes say how many
            of them a smaller capacity left out.
        episodes: Episodes among them, unfinished ones and those without their
            beginning included.
        nbytes: Bytes of the target, without holes.
        seconds: Time it took.
        notes: How ends were found, what was left out and why.
        doubts: What was guessed and may be wrong.

    Example:
        >>> report = mr.export("runs/cartpole", "cartpole.npz")
        >>> report.rows > 0, report.doubts
        (True, ())
    """

    rows: int
    episodes: int
    nbytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def default_rows(description: Description, nbytes: int = BLOCK_NBYTES) -> int:
    """Rows of a block of about nbytes, at least one.

    Where a field varies half of the bytes are for values, by which readers cut blocks
    further.
    """
    share = 2 if description.schema.varying else 1
    return max(1, nbytes // share // description.row_nbytes)


@contextmanager
def name_source(source: Path) -> Iterator[None]:
    """Add the source's path to errors about its rows."""
    try:
        yield
    except SourceError as error:
        note = f"while reading {source}"
        # Those who open a source and those who move its rows may both name it.
        if str(source) not in str(error) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def refuse_wide(row_nbytes: int, path: Path) -> None:
    """Refuse rows that would not fit in memory.

    Raises:
        FormatError: A row takes more than 256 MiB.
    """
    if row_nbytes > MAX_ROW_NBYTES:
        raise FormatError(
            f"{path} must have at most {MAX_ROW_NBYTES} bytes per row, got "
            f"{row_nbytes}. Split the field, since a row is read at once."
        )


def refuse_expansion(path: Path, nbytes: int, stored: int, allowed: bool) -> None:
    """Refuse files that claim far more rows than their size suggests.

    Args:
        path: Of the file or folder.
        nbytes: Bytes of its rows in memory.
        stored: Bytes of its files.
        allowed: The user allows any ratio.

    Raises:
        FormatError: Rows take more than 1 GiB and 1,000 times the files.
    """
    if nbytes > max(HARMLESS_NBYTES, 1000 * stored) and not allowed:
        raise FormatError(
            f"{path} says that {stored} bytes hold {nbytes}, more than 1,000 times as "
            "many. Pass allow_expansion=True if you trust the file."
        )


def refuse_empty(steps: int, target: str) -> None:
    """Refuse to write no steps into a file that says nothing without them.

    Raises:
        SchemaError: There are none.
    """
    if not steps:
        raise SchemaError(
            f"got no steps to write, but {target} needs at least one. Select other "
            "rows, or use a format of mmreplay."
        )


def doubt_sums(notes: Notes, name: str, missing: str) -> None:
    """Doubt values without a checksum, in a file that mmreplay described.

    Args:
        notes: Of the reader.
        name: Of the file.
        missing: The part of the file that would hold checksums.
    """
    notes.doubt(f"{name} has no {missing} next to its description, so its values were not checked")


def doubt_undescribed(notes: Notes, name: str) -> None:
    """Doubt a column or array that a description does not name."""
    notes.doubt(f"{name!r} is not in the description, and was left out")


def doubt_priorities(notes: Notes, description: Description, target: str) -> None:
    """Doubt a target that cannot hold the source's priorities."""
    if description.priorities:
        notes.doubt(
            f"priorities {description.priorities!r} were left out: {target} cannot store them"
        )


def description_lost(where: object) -> CorruptError:
    """The error of a file that has mmreplay's checksums, but no description."""
    return CorruptError(
        f"{where} has mmreplay's checksums in its metadata, but no {KEY!r}. The file "
        "is damaged: restore it from a copy."
    )


MAX_THREADS = min(4, os.cpu_count() or 1)
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], ahead: int = MAX_THREADS
) -> Iterator[Result]:
    """Results of work on each item, in the order of the items.

    Args:
        work: Called in threads, on several items at a time.
        items: Iterated in the caller's thread, as results are requested.
        ahead: Items that are worked on, or done, before their result is requested.
    """
    jobs: deque[Future[Result]] = deque()
    pool = thread_pool(min(MAX_THREADS, max(1, ahead)), "mmreplay-convert")
    try:
        for item in items:
            jobs.append(pool.submit(work, item))
            if len(jobs) > ahead:
                yield jobs.popleft().result()
        while jobs:
            yield jobs.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The items of a generator; a thread makes the next one while one is used."""
    end = object()
    pool = thread_pool(1, "mmreplay-convert")
    try:
        job = pool.submit(next, items, end)
        while (item := job.result()) is not end:
            job = pool.submit(next, items, end)
            yield item  # type: ignore[misc]  # an item, as it is not end
    finally:
        pool.shutdown()
