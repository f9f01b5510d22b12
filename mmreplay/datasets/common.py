"""Columns of a source, read a stretch of rows at a time, wherever they lie.

Blocks of any size made into blocks of one size.

What was found of episodes while a source's rows were counted.

Rows of a buffer from steps whose next observations are known, or are not.

A *stretch* is what a source holds together: an episode, or a whole flat file. Where
an episode ends and the source knows what was seen next, a final row holds that; where
the next observation of a step is not the observation of the step behind it, one
episode stops and another starts, whether the source says so or not.

A schema from the columns of a source, and ends from those that tell them.

Rows that hold an observation and what led to it: action or reward, and the end.

A step takes what led to the next row; the last row of an episode is no step, only the
observation that was seen at its end.

Rows of others' rings: arrays whose oldest row is in the middle.

Rows turned into steps with their next observations, for targets that keep those.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.array_file import refuse_wide
from mmreplay.convert.base import Block, Notes, Reader, default_rows, doubt_priorities
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import Bools, Marks, NamedEnds
from mmreplay.episodes import CUT, END, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import FormatError, SchemaError, SourceError
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import canonical_name, storage_dtype
from mmreplay.schema.naming import left_out, refuse_nan
from mmreplay.strict_json import Json

Array = NDArray[np.generic]


class Rows(Protocol):
    """One column.

    Attributes:
        dtype: Name of a field's dtype.
        shape: Of one row.
        count: Rows.
    """

    @property
    def dtype(self) -> str:
        """See the class."""

    @property
    def shape(self) -> tuple[int, ...]:
        """See the class."""

    @property
    def count(self) -> int:
        """See the class."""

    def read(self, first: int, stop: int) -> Array:
        """Rows ``[stop - first, *shape]``, little-endian; those of others may stay."""


class ArrayRows:
    """Rows of an array in memory, or mapped.

    Raises:
        SchemaError: It can be no field.
    """

    def __init__(self, array: Array) -> None:
        self.dtype = canonical_name(array.dtype)
        self.shape = array.shape[1:]
        self.count = len(array)
        self._array = array

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        part = self._array[first:stop]
        return np.ascontiguousarray(part, storage_dtype(self.dtype)).reshape(
            len(part), *self.shape
        )


class Later:
    """The rows of another column from some row on.

    Observations of T + 1 rows hold their own next observations one row later.
    """

    def __init__(self, rows: Rows, by: int, count: int) -> None:
        self.dtype, self.shape, self.count = rows.dtype, rows.shape, count
        self._rows, self._by = rows, by

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        return self._rows.read(first + self._by, stop + self._by)


class Flat:
    """Rows of one value each, whether the source gives them an axis of 1 or not."""

    def __init__(self, rows: Rows) -> None:
        self.dtype, self.shape, self.count = rows.dtype, (), rows.count
        self._rows = rows

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        return self._rows.read(first, stop).reshape(stop - first)


def single(shape: tuple[int, ...]) -> bool:
    """Whether rows of a shape hold one value each."""
    return shape in ((), (1,))


def nbytes_of(rows: Rows) -> int:
    """Bytes of one row."""
    return storage_dtype(rows.dtype).itemsize * int(np.prod(rows.shape, dtype=object))


def regroup(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """The same rows in blocks of exactly rows each, but for the last.

    Args:
        blocks: Whose arrays last, unlike a reader's, until the rows are given on.
        rows: At least 1.
    """
    held: list[Block] = []
    count = 0
    for block in blocks:
        first = 0
        while first < len(block):
            stop = min(first + rows - count, len(block))
            held.append(sliced(block, first, stop))
            count += stop - first
            first = stop
            if count == rows:
                yield joined(held)
                held, count = [], 0
    if held:
        yield joined(held)


def quartered(block: Block) -> Iterator[Block]:
    """A block in four, for those who hold what they make of it several times."""
    size = max(1, -(-len(block) // 4))
    for first in range(0, len(block), size):
        yield sliced(block, first, min(first + size, len(block)))


def sliced(block: Block, first: int, stop: int) -> Block:
    """Rows ``[first, stop)`` of a block."""
    if first == 0 and stop == len(block):
        return block
    return Block(
        {path: column[first:stop] for path, column in block.columns.items()},
        block.env_ids[first:stop],
        block.positions[first:stop],
        block.flags[first:stop],
    )


def joined(blocks: list[Block]) -> Block:
    """Blocks of the same columns as one."""
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        {
            path: np.concatenate([each.columns[path] for each in blocks])
            for path in blocks[0].columns
        },
        np.concatenate([each.env_ids for each in blocks]),
        np.concatenate([each.positions for each in blocks]),
        np.concatenate([each.flags for each in blocks]),
    )


@dataclass(slots=True)
class Tally:
    """Rows and episodes.

    Attributes:
        rows: int64 ``[E]``, final rows included.
        finals: Episodes whose last observation is known.
        split: Episodes that were told apart by their observations only.
        cut: Stretches whose last step ends nothing, but has a next observation.
        open: Stretches that stop without an end or a next observation.
        inner: Ends that a source says within what it calls one episode.
    """

    rows: NDArray[np.int64]
    finals: int = 0
    split: int = 0
    cut: int = 0
    open: int = 0
    inner: int = 0

    def add(
        self, env_id: int, given: Bools, split: Bools, final: Bools, *,
        last: bool, whole: bool,
    ) -> None:  # fmt: skip
        """Count steps.

        Args:
            env_id: Of what environment.
            given: bool ``[N]``, steps that end something as the source says.
            split: bool ``[N]``, those that end something nevertheless.
            final: bool ``[N]``, those that a final row follows.
            last: The last of them is its stretch's last.
            whole: The stretch is one episode, as the source says.
        """
        self.rows[env_id] += len(given) + int(final.sum())
        self.finals += int(final.sum())
        cut = last and bool(split[-1])
        self.cut += cut
        self.split += int(split.sum()) - cut
        self.open += last and not (given[-1] or split[-1])
        if whole:
            self.inner += int(given.sum()) - (last and bool(given[-1]))

    def tell(self, report: Notes) -> None:
        """Say it in the report."""
        if self.finals:
            report.note(
                f"{self.finals:,} episodes end with the observation that was seen "
                "next, kept as a final row"
            )
        if self.split:
            report.note(
                f"{self.split:,} episodes without an end of their own were told apart "
                "where the next observation is not the one that follows: truncated"
            )
        if self.cut:
            report.note(
                f"{self.cut:,} episodes were cut off without an end, and have a next "
                "observation: truncated"
            )
        if self.open:
            report.note(
                f"{self.open:,} episodes were cut off without an end or a next "
                "observation: their last step is not drawn where one is needed"
            )
        if self.inner:
            report.doubt(
                f"{self.inner:,} steps end within what the source calls one episode, "
                "and each was taken as an end"
            )


TERMINATED_FIELD, TRUNCATED_FIELD = "terminated", "truncated"
ENDS = (TERMINATED_FIELD, TRUNCATED_FIELD)
PIECES = 4
"""Pieces that are read for a block."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Steps that follow each other in one environment.

    Attributes:
        name: What to call it in errors, such as a file and a group.
        steps: How many.
        columns: By path, but for the ends'; at least ``steps`` rows each.
        nexts: By path of an observation, what it was after each step, ``steps`` rows
            each; none if that is unknown.
        ends: Terminated and truncated of steps ``[first, stop)``, bool each.
        env_id: The environment.
        whole: The rows behind a step are known to be the next ones unless it ends
            (an episode); otherwise observations are compared.
    """

    name: str
    steps: int
    columns: Mapping[str, Rows]
    nexts: Mapping[str, Rows]
    ends: Callable[[int, int], tuple[Bools, Bools]]
    env_id: int = 0
    whole: bool = True


Stretches = Callable[[], Iterator[Fragment]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Steps of a stretch, how they end (bool ``[N]``), and their values if wanted."""

    first: int
    given: Bools
    split: Bools
    terminated: Bools
    truncated: Bools
    final: Bools
    columns: Mapping[str, Array]
    nexts: Mapping[str, Array]


class FragmentReader(Reader):
    """Gives the rows of stretches, environment by environment.

    Attributes:
        tally: What was found of episodes.
    """

    def __init__(
        self,
        stretches: Stretches,
        schema: Schema,
        notes: Notes,
        close: Callable[[], None],
        *,
        num_envs: int = 1,
        user: Json | None = None,
    ) -> None:
        """Read stretches.

        Args:
            stretches: Makes them, those of one environment one after another; it is
                called twice, first to count.
            schema: The fields, ``terminated`` and ``truncated`` among them.
            notes: Of what was found so far.
            close: Gives the files back.
            num_envs: Environments.
            user: The user's own JSON.
        """
        self.report = notes
        self._close = close
        self._stretches = stretches
        self._schema = schema
        empty = np.zeros(num_envs, np.int64)
        self.tally = Tally(empty.copy())
        self._count(default_rows(Description(schema, empty, empty, 1)) // PIECES or 1)
        self.tally.tell(notes)
        self._description = Description(
            schema=schema,
            first=empty,
            stop=self.tally.rows,
            capacity=max(1, int(self.tally.rows.max())),
            user=user or {},
        )

    def _count(self, rows: int) -> None:
        for stretch in self._stretches():
            self._check(stretch)
            for piece in self._pieces(stretch, rows, values=False):
                last = piece.first + len(piece.given) == stretch.steps
                self.tally.add(
                    stretch.env_id, piece.given, piece.split, piece.final,
                    last=last, whole=stretch.whole,
                )  # fmt: skip

    def _check(self, stretch: Fragment) -> None:
        """Refuse a stretch whose columns differ from the first one's."""
        for path, each in self._schema.fields.items():
            if path in ENDS:
                continue
            rows = stretch.columns.get(path)
            if not _is_of(rows, each) or rows.count < stretch.steps:
                raise _differs(stretch, repr(path), rows, each, "what came before")
            if not stretch.nexts or path.split("/")[0] != "observation":
                continue
            rows = stretch.nexts.get(path)
            if not _is_of(rows, each) or rows.count != stretch.steps:
                told = f"what followed {path!r}"
                raise _differs(stretch, told, rows, each, "the observations")

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        rows = rows_per_block or default_rows(self._description)
        yield from regroup(self._blocks(rows), rows)

    def _blocks(self, rows: int) -> Iterator[Block]:
        num_envs = self._description.num_envs
        marks, heads = Marks(num_envs), np.zeros(num_envs, np.int64)
        # A piece is held several times: what is read, what it is compared with, and
        # both with final rows between them.
        size = max(1, rows // PIECES)
        for stretch in self._stretches():
            env_id = stretch.env_id
            for piece in self._pieces(stretch, size, values=True):
                block = self._block(piece, env_id, int(heads[env_id]), marks)
                heads[env_id] += len(block)
                yield block

    def _block(self, piece: _Piece, env_id: int, head: int, marks: Marks) -> Block:
        """The rows of steps, with a final row behind each that has one."""
        steps = len(piece.final)
        count = steps + int(piece.final.sum())
        places = np.arange(steps) + np.cumsum(piece.final) - piece.final
        final = np.ones(count, bool)
        final[places] = False
        columns = {
            path: _spread(piece.columns[path], places, count)
            for path in self._schema.paths
            if path not in ENDS
        }
        for path, seen in piece.nexts.items():
            if path in columns:
                columns[path][final] = seen
        terminated = np.zeros(count, bool)
        terminated[places] = piece.terminated
        truncated = np.zeros(count, bool)
        truncated[places] = piece.truncated | piece.split
        # A stretch behind one that was not ended is a break in the record.
        breaks = np.zeros(count, bool)
        breaks[0] = piece.first == 0
        flags = marks.mark(env_id, terminated, truncated, final, breaks)
        columns |= {TERMINATED_FIELD: terminated, TRUNCATED_FIELD: truncated}
        positions = np.arange(head, head + count)
        return Block(columns, np.full(count, env_id), positions, flags)

    def _pieces(
        self, stretch: Fragment, rows: int, *, values: bool
    ) -> Iterator[_Piece]:
        """The steps of a stretch; without values only what tells ends is read."""
        for first in range(0, stretch.steps, rows):
            stop = min(first + rows, stretch.steps)
            columns: dict[str, Array] = {}
            if values:
                columns = {p: c.read(first, stop) for p, c in stretch.columns.items()}
            terminated, truncated = stretch.ends(first, stop)
            given = terminated | truncated
            split = _parted(stretch, first, stop, columns) & ~given
            final = (given | split) & bool(stretch.nexts)
            nexts: dict[str, Array] = {}
            if values and final.any():
                places = first + np.flatnonzero(final)
                nexts = {p: _at(c, places) for p, c in stretch.nexts.items()}
            yield _Piece(
                first, given, split, terminated, truncated, final, columns, nexts
            )

    def close(self) -> None:
        """See `Reader.close`."""
        self._close()


def _is_of(rows: Rows | None, field: Field) -> TypeGuard[Rows]:
    """Whether a column is there, and of a field's dtype and shape."""
    return rows is not None and (rows.dtype, rows.shape) == (field.dtype, field.shape)


def _differs(
    stretch: Fragment, what: str, rows: Rows | None, field: Field, like: str
) -> FormatError:
    """The error of a column that has not the rows that its stretch needs."""
    got = "nothing"
    if rows is not None:
        got = f"{rows.count} rows of {rows.dtype}{list(rows.shape)}"
    return FormatError(
        f"{stretch.name}: got {got} for {what}, expected {stretch.steps} rows of "
        f"{field.dtype}{list(field.shape)} as in {like}; the file is damaged, or mixes "
        "data of several kinds"
    )


def _parted(
    stretch: Fragment, first: int, stop: int, columns: Mapping[str, Array]
) -> Bools:
    """Steps whose next observation is known, and not the row behind; bool ``[N]``."""
    apart = np.zeros(stop - first, bool)
    if not stretch.nexts:
        return apart
    apart[-1] = stop == stretch.steps
    if stretch.whole:
        return apart
    for path, rows in stretch.nexts.items():
        here = columns.get(path)
        if here is None:
            here = stretch.columns[path].read(first, stop)
        following = here[1:]
        if stop < stretch.steps:
            edge = stretch.columns[path].read(stop, stop + 1)
            following = np.concatenate([following, edge])
        seen = rows.read(first, stop)[: len(following)]
        apart[: len(following)] |= _differ(seen, following)
    return apart


def _spread(values: Array, places: NDArray[np.int64], count: int) -> Array:
    """Values at their places, zero in between."""
    if count == len(values):
        return values
    found = np.zeros((count, *values.shape[1:]), values.dtype)
    found[places] = values
    return found


def _at(rows: Rows, places: NDArray[np.int64]) -> Array:
    """Single rows, those near each other read at once."""
    first, stop = int(places[0]), int(places[-1]) + 1
    if stop - first <= 8 * len(places):
        return rows.read(first, stop)[places - first]
    return np.concatenate([rows.read(p, p + 1) for p in places.tolist()])


def _differ(one: Array, other: Array) -> Bools:
    """Which rows differ in any value, bool ``[N]``; NaN is like NaN."""
    size = int(np.prod(one.shape[1:]))
    left, right = (each.reshape(len(each), size) for each in (one, other))
    unlike: Bools = np.asarray(left != right)
    if left.dtype.kind == "f":
        unlike = np.asarray(unlike & ~(np.isnan(left) & np.isnan(right)))
    differ: Bools = np.asarray(unlike.any(axis=1))
    return differ


FLAG = Field((), "bool")
MAX_KEPT_NBYTES = 64 << 10
Ends = Callable[[int, int], tuple[Bools, Bools]]


def kept_of(metadata: Json, keys: Iterable[str], notes: Notes) -> Json:
    """What of a source's metadata goes along with a buffer: values of at most 64 KiB.

    The spaces of large images alone would fill a buffer's metadata.
    """
    found = {}
    for key in keys:
        if key in metadata:
            size = len(json.dumps(metadata[key]))
            if size <= MAX_KEPT_NBYTES:
                found[key] = metadata[key]
            else:
                notes.note(f"metadata {key!r} of {size:,} bytes was left out")
    return found


def make_schema(columns: Mapping[str, Rows], notes: Notes, path: Path) -> Schema:
    """The fields that columns make, and both ends; what can be none is left out.

    Args:
        columns: By path, in order.
        notes: Where what is left out is told.
        path: Of the source.

    Raises:
        SourceError: There is no observation, or names clash.
        FormatError: A row is too large to hold.
    """
    fields: dict[str, Field] = {}
    for name, rows in columns.items():
        try:
            Schema.from_flat({name: Field(rows.shape, rows.dtype)}, {})
            fields[name] = Field(rows.shape, rows.dtype)
        except SchemaError as error:
            left_out(notes, name, f"{name!r} was left out: {error}")
    try:
        schema = Schema.from_flat({**fields, "terminated": FLAG, "truncated": FLAG})
    except SchemaError as error:
        raise SourceError(f"{path}: its columns make no schema: {error}") from error
    if not schema.role("observation"):
        raise SourceError(
            f"{path}: got columns {list(columns)[:20]}, expected observations among "
            "them; name its format with format= (--from)"
        )
    refuse_wide(schema.row_nbytes, path)
    return schema


def check_meaning(done: str | None) -> None:
    """Refuse what a flag of both ends cannot mean.

    Raises:
        SchemaError: It is neither end.
    """
    if done not in (None, *ENDS):
        raise SchemaError(
            f"done: got {done!r}, expected one of {', '.join(ENDS)}; leave it out if "
            "you do not know"
        )


def mixed(name: str) -> str:
    """The doubt about a flag of both ends."""
    return (
        f"{name!r} may mix time limits with terminations, and nothing tells them "
        "apart: all are taken as terminations, unless done='truncated' says otherwise"
    )


def scalar(rows: Rows) -> Rows:
    """Rewards and the like as one value a row, where they are."""
    return Flat(rows) if rows.shape == (1,) else rows


class Flags:
    """A column that tells ends, any value but 0 being one; see `columns.Rows`.

    Raises:
        FormatError: It has not one flag a step.
    """

    dtype, shape = "bool", ()

    def __init__(self, what: str, rows: Rows, steps: int) -> None:
        """Take a column.

        Args:
            what: To call it by in errors.
            rows: It.
            steps: Of which it tells.
        """
        if rows.count != steps or not single(rows.shape) or rows.dtype == "bfloat16":
            raise FormatError(
                f"{what} has {rows.count} rows of {rows.dtype}{list(rows.shape)}, "
                f"expected one flag for each of {steps} steps; the file is damaged"
            )
        self.count = steps
        self._what, self._rows = what, rows

    def read(self, first: int, stop: int) -> Bools:
        """See `Rows.read`.

        Raises:
            SourceError: A value is NaN: nobody knows whether something ended.
        """
        values = self._rows.read(first, stop).reshape(stop - first)
        refuse_nan(self._what, values, first)
        flags: Bools = values.astype(bool)
        return flags


def ends_of(terminated: Flags | None, truncated: Flags | None) -> Ends:
    """Both ends of steps, from the columns that tell them."""

    def ends(first: int, stop: int) -> tuple[Bools, Bools]:
        return _read(terminated, first, stop), _read(truncated, first, stop)

    return ends


def _read(flags: Flags | None, first: int, stop: int) -> Bools:
    return np.zeros(stop - first, bool) if flags is None else flags.read(first, stop)


NOTE = (
    "rewards and ends stand with the observation that they led to, and were moved to "
    "the one before it; the last row of an episode is its final observation"
)


def episodes(
    name: str,
    columns: Mapping[str, Rows],
    led: Collection[str],
    terminated: Bools,
    truncated: Bools,
    env_id: int = 0,
    begins: Bools | None = None,
) -> Iterator[Fragment]:
    """The episodes of an environment's rows.

    Args:
        name: What to call them in errors.
        columns: By path, ``N`` rows each, oldest first.
        led: Paths of what led to its row's observation.
        terminated: bool ``[N]``, rows that a terminated step led to.
        truncated: bool ``[N]``, likewise.
        env_id: The environment.
        begins: bool ``[N]``, rows that begin an episode, whether the one before them
            ended or not; those behind an end, if None.
    """
    count = len(terminated)
    over = (terminated | truncated)[:-1]
    if begins is not None:
        over |= begins[1:]
    behind = np.flatnonzero(over) + 1
    for first, stop in pairwise([0, *behind.tolist(), count]):
        steps = stop - first - 1

        def ends(low: int, high: int, by: int = first + 1) -> tuple[Bools, Bools]:
            return terminated[low + by : high + by], truncated[low + by : high + by]

        yield Fragment(
            f"{name}, row {first}",
            steps,
            {
                path: Later(rows, first + (path in led), steps)
                for path, rows in columns.items()
            },
            {
                path: Later(rows, first + 1, steps)
                for path, rows in columns.items()
                if path.split("/")[0] == "observation"
            },
            ends,
            env_id=env_id,
        )


class RingRows:
    """Rows of an array ``[slots, *shape]``, oldest first; see `columns.Rows`.

    Raises:
        SchemaError: It can be no field.
    """

    def __init__(self, array: Array, first: int, count: int) -> None:
        """Read a ring.

        Args:
            array: ``[slots, *shape]``, in memory or mapped, of any strides.
            first: Slot of the oldest row.
            count: Rows, at most the slots.
        """
        self.dtype = canonical_name(array.dtype)
        self.shape: tuple[int, ...] = array.shape[1:]
        self.count = count
        self._array, self._first = array, first

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        slots: NDArray[np.int64] = np.arange(first, stop) + self._first
        part = self._array[slots % len(self._array)]
        return np.ascontiguousarray(part, storage_dtype(self.dtype)).reshape(
            stop - first, *self.shape
        )


class Turned:
    """Rows of a column that is a ring, oldest first, read in long runs."""

    def __init__(self, rows: Rows, first: int, count: int) -> None:
        """Read a ring, of which the oldest row is at slot first."""
        self.dtype, self.shape, self.count = rows.dtype, rows.shape, count
        self._rows, self._first = rows, first

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`."""
        slots = self._rows.count
        first, stop = first + self._first, stop + self._first
        if first >= slots:
            return self._rows.read(first - slots, stop - slots)
        if stop <= slots:
            return self._rows.read(first, stop)
        parts = [self._rows.read(first, slots), self._rows.read(0, stop - slots)]
        return np.concatenate(parts)


def ring_rows(
    arrays: Mapping[str, Array], env_id: int, axis: int, first: int, count: int
) -> dict[str, RingRows]:
    """Rows of one environment by path.

    Args:
        arrays: By path, with axes of slots and environments first, in either order.
        env_id: The environment.
        axis: Which of the two is that of environments.
        first: Slot of the oldest row.
        count: Rows.
    """
    return {
        path: RingRows(np.moveaxis(array, axis, 0)[env_id], first, count)
        for path, array in arrays.items()
    }


@dataclass(frozen=True, slots=True)
class Transitions:
    """Steps that follow each other.

    Attributes:
        columns: By path, all but ends and next observations ``[N, *shape]``.
        nexts: By path of an observation, what was seen after each step; its own where
            that is not known.
        terminated: bool ``[N]``.
        truncated: bool ``[N]``.
        last: bool ``[N]``, the last of their episodes.
        parted: bool ``[N]``, those within one whose stored next observation is not
            the row behind, in some bit.
        known: bool ``[N]``, those whose next observation is known.
    """

    columns: Mapping[str, Array]
    nexts: Mapping[str, Array]
    terminated: Bools
    truncated: Bools
    last: Bools
    parted: Bools
    known: Bools

    def __len__(self) -> int:
        return len(self.last)


class TransitionMaker:
    """Makes steps of blocks, one environment after another.

    Raises:
        SchemaError: The schema lacks what an offline dataset is made of.
    """

    def __init__(self, description: Description, target: str) -> None:
        schema = description.schema
        for role in ("observation", "action", "reward"):
            if not schema.role(role):
                raise SchemaError(
                    f"role {role!r}: got a dataset without one, expected it for "
                    f"{target}; name it in the schema's roles"
                )
        if schema.role_paths("reward") != (schema.role("reward"),):
            raise SchemaError(
                f"role 'reward': got the subtree {schema.role('reward')!r}, expected "
                f"one field for {target}; leave the others out with fields="
            )
        self.observations = schema.role_paths("observation")
        stored = schema.role("next_observation")
        top = schema.role("observation") or ""
        self._stored = {
            path: stored + path.removeprefix(top) for path in self.observations
        } if stored else {}  # fmt: skip
        left = {*self._stored.values(), schema.role("terminated")}
        left.add(schema.role("truncated"))
        self.paths = tuple(path for path in schema.paths if path not in left)
        self._description = description
        self._target = target
        self._ends = NamedEnds(description)
        self._left = description.rows
        self._held: Block | None = None
        self._done: set[int] = set()

    def tell(self, notes: Notes) -> None:
        """Say what of the source is left out or guessed, as is known before any row."""
        doubt_priorities(notes, self._description, self._target)
        self._ends.tell(notes, both=False)

    def feed(self, block: Block) -> Transitions | None:
        """Steps that are known now: the newest row waits for the one behind it.

        None waits once all rows that were described are here: what is lost is to be
        told before the target is finished.
        """
        self._check_order(block)
        block = self._ends.marked(block)
        held, self._held = self._held, None
        rows = joined([block] if held is None else [held, block])
        self._left -= len(block)
        if not self._left:
            return self._steps(rows, len(rows))
        last = sliced(rows, len(rows) - 1, len(rows))
        # A block's arrays last until the next one is asked for.
        self._held = Block(
            {path: column.copy() for path, column in last.columns.items()},
            last.env_ids.copy(), last.positions.copy(), last.flags.copy(),
        )  # fmt: skip
        return self._steps(rows, len(rows) - 1)

    def _check_order(self, block: Block) -> None:
        ids = block.env_ids
        if self._held is not None:
            ids = np.concatenate([self._held.env_ids, ids])
        for env_id in ids[np.flatnonzero(np.diff(ids)) + 1].tolist():
            if env_id in self._done:
                raise SourceError(
                    f"environment {env_id}: got rows of it after those of another, "
                    f"expected one environment after another for {self._target}; "
                    "load them into a buffer first, and export that"
                )
        self._done.update(ids.tolist())

    def _steps(self, rows: Block, count: int) -> Transitions | None:
        """Steps among the first count rows."""
        flags, behind = rows.flags[:count], rows.flags[1 : count + 1]
        same = rows.env_ids[1 : count + 1] == rows.env_ids[: len(behind)]
        follows = np.zeros(count, bool)
        follows[: len(behind)] = same & ((behind & START) == 0)
        cut = np.zeros(count, bool)
        cut[: len(behind)] = same & ((behind & CUT) != 0)
        is_step = (flags & FINAL) == 0
        if not is_step.any():
            return None
        nexts = {}
        parted = np.zeros(count, bool)
        for path in self.observations:
            if self._stored:
                stored = rows.columns[self._stored[path]][:count]
                nexts[path] = stored[is_step]
                following = rows.columns[path][1 : count + 1]
                parted[: len(behind)] |= _unlike(stored[: len(behind)], following)
                continue
            seen = rows.columns[path][:count].copy()
            seen[: len(behind)][follows[: len(behind)]] = rows.columns[path][
                1 : count + 1
            ][follows[: len(behind)]]
            nexts[path] = seen[is_step]
        last = ((flags & END) != 0) | ~follows
        return Transitions(
            {path: rows.columns[path][:count][is_step] for path in self.paths},
            nexts,
            ((flags & TERMINATED) != 0)[is_step],
            (((flags & TRUNCATED) != 0) | cut)[is_step],
            last[is_step],
            (parted & ~last)[is_step],
            (follows | bool(self._stored))[is_step],
        )


def refuse_clashes(names: Mapping[str, str], target: str) -> None:
    """Refuse fields that would be one dataset, or one within another.

    Args:
        names: Of the datasets, by path.
        target: What they are written to.

    Raises:
        SchemaError: There are some.
    """
    owners: dict[str, str] = {}
    for path, name in names.items():
        if name in owners:
            raise SchemaError(
                f"fields {owners[name]!r} and {path!r}: got two that {target} calls "
                f"{name!r}, expected one; leave one out with fields=, or rename it"
            )
        owners[name] = path
    for name, path in owners.items():
        for place, slash in enumerate(name):
            above = owners.get(name[:place]) if slash == "/" else None
            if above is not None:
                raise SchemaError(
                    f"fields {above!r} and {path!r}: got {name!r} within "
                    f"{name[:place]!r} for {target}, expected no field within another; "
                    "leave one out with fields=, or rename it"
                )


def _unlike(one: Array, other: Array) -> Bools:
    """Which rows differ in some bit, bool ``[N]``."""
    size = one.itemsize * int(np.prod(one.shape[1:]))
    left, right = (
        np.ascontiguousarray(each).view(np.uint8).reshape(len(each), size)
        for each in (one, other)
    )
    unlike: Bools = (left != right).any(axis=1)
    return unlike
