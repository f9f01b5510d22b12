"""Rows of a buffer from steps whose next observations are known, or are not.

A *stretch* is what a source holds together: an episode, or a whole flat file. Where
an episode ends and the source knows what was seen next, a final row holds that; where
the next observation of a step is not the observation of the step behind it, one
episode stops and another starts, whether the source says so or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Notes, Reader, default_rows
from mmreplay.convert.description import Description
from mmreplay.convert.ends import Bools, Marks
from mmreplay.convert.foreign.columns import Array, Rows
from mmreplay.convert.foreign.regroup import regroup
from mmreplay.convert.foreign.tally import Tally
from mmreplay.errors import FormatError
from mmreplay.format.strict_json import Json
from mmreplay.schema import Field, Schema

TERMINATED, TRUNCATED = "terminated", "truncated"
ENDS = (TERMINATED, TRUNCATED)
PIECES = 4
"""Pieces that are read for a block."""


@dataclass(frozen=True, slots=True)
class Stretch:
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


Stretches = Callable[[], Iterator[Stretch]]


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


class StretchReader(Reader):
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

    def _check(self, stretch: Stretch) -> None:
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
        columns |= {TERMINATED: terminated, TRUNCATED: truncated}
        positions = np.arange(head, head + count)
        return Block(columns, np.full(count, env_id), positions, flags)

    def _pieces(self, stretch: Stretch, rows: int, *, values: bool) -> Iterator[_Piece]:
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
    stretch: Stretch, what: str, rows: Rows | None, field: Field, like: str
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
    stretch: Stretch, first: int, stop: int, columns: Mapping[str, Array]
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
