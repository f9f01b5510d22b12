"""What every format speaks: a description, then blocks of rows, oldest first.

A `Reader` describes what it will give and gives it block by block; a `Writer` is made
for a description and takes the blocks. Nobody holds more than a block, so memory does
not grow with the dataset. A buffer is one format among the others.

What is said of what files have lost, and of what targets cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.description import ENV_ID, FLAGS, KEY, POSITION, Description
from mmreplay.errors import CorruptError, SchemaError
from mmreplay.ring import Span
from mmreplay.schema.notes import Notes as Notes

BLOCK_NBYTES = 16 << 20
# One row is held whole, whatever a file says of its size.
MAX_ROW_NBYTES = 256 << 20

Columns = Mapping[str, NDArray[np.generic]]
Progress = Callable[[int, int], object]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that follow each other in each environment they are of.

    Attributes:
        columns: Per path ``[N, *shape]`` of the field's own dtype, ``terminated`` and
            ``truncated`` as they are served; `PRIORITY` too where the description
            names priorities. May be read-only, and lasts until the next block is
            asked for.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``; those of one environment rise by one.
        flags: uint8 ``[N]``, as docs/format.md defines them; the truth of boundaries.
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

    def between(self, first: int, stop: int) -> Block:
        """Rows from first up to stop, or to the end."""
        part = slice(first, stop)
        columns = {path: column[part] for path, column in self.columns.items()}
        return Block(
            columns, self.env_ids[part], self.positions[part], self.flags[part]
        )

    def taken(self, rows: NDArray[np.bool_]) -> Block:
        """Some of the rows, bool ``[N]``; the block itself where that is all."""
        if rows.all():
            return self
        columns = {path: column[rows] for path, column in self.columns.items()}
        return Block(
            columns, self.env_ids[rows], self.positions[rows], self.flags[rows]
        )


class Reader(Protocol):
    """A source of rows; an implementation inherits the context manager.

    Order: the rows of one environment come oldest first, without a gap, from
    ``first`` to ``stop`` of the description; environments one by one or mixed.
    Memory: a block, whatever the source. Errors: `FormatError`, `CorruptError` or
    `SourceError` with file and offset; nothing that is read is executed.
    """

    report: Notes

    def describe(self) -> Description:
        """What will come; the same whenever it is asked."""

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """All rows, in blocks of at most rows_per_block (`default_rows` if None).

        May be called again, for another pass.
        """

    def marks(self) -> Iterator[Block]:
        """All rows without their columns: where they are, and their flags.

        Asked for before some episodes are chosen; worth a way of its own where that
        reads less.
        """
        for block in self.blocks():
            yield Block({}, block.env_ids, block.positions, block.flags)

    def narrow(self, span: Span) -> None:
        """Hear that rows outside of a span will be left out: they need not be read."""
        return

    def only(self, paths: tuple[str, ...]) -> None:
        """Hear that other fields will be left out: they need not be in blocks."""
        return

    def close(self) -> None:
        """Give files back; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer(Protocol):
    """A target of rows; an implementation inherits the context manager.

    The target appears whole, at `finish`, or not at all: until then everything lies
    under a ``tmp-`` name beside it (`staging`), which the next run replaces.

    Attributes:
        nbytes: Bytes of the target, known at `finish`.
        notes: What it left out and why.
    """

    nbytes: int
    notes: Notes

    def write(self, block: Block) -> None:
        """Take the next rows; the block's arrays are not kept."""

    def finish(self) -> None:
        """Make the target durable and let it appear."""

    def abort(self) -> None:
        """Remove what was written; nothing to do after `finish`."""

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
class Report:
    """What a conversion did.

    Attributes:
        rows: Rows taken from the source, final rows included; of those that a smaller
            capacity left out the notes tell.
        episodes: Episodes among them, the running and the headless included.
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
    """Rows of a block of about nbytes, at least one."""
    return max(1, nbytes // description.row_nbytes)


def doubt_sums(notes: Notes, name: str, what: str) -> None:
    """Doubt values that nothing vouches for, although mmreplay described them.

    Args:
        notes: Of the reader.
        name: Of the file.
        what: It lacks.
    """
    notes.doubt(
        f"{name} has no {what} beside its description, so that its values are taken as "
        "they are"
    )


def undescribed(where: object) -> CorruptError:
    """The error of a file that has our checksums, and no description."""
    return CorruptError(
        f"{where} has checksums of mmreplay's in its metadata, expected {KEY!r} beside "
        "them; the file was damaged: restore it from a copy"
    )


def doubt_priorities(notes: Notes, description: Description, target: str) -> None:
    """Doubt a target that has no place for the priorities that come along."""
    if description.priorities:
        notes.doubt(
            f"priorities {description.priorities!r} were left out: {target} has no "
            "place for them"
        )


def refuse_empty(steps: int, target: str) -> None:
    """Refuse to write no steps where nobody would read what that makes.

    Raises:
        SchemaError: There are none.
    """
    if not steps:
        raise SchemaError(
            f"got no steps to write, expected at least one for {target}, which says "
            "nothing without; choose others, or a format of mmreplay's own"
        )
