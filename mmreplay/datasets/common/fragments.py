"""Rows of a buffer from the consecutive steps that a source holds.

A *fragment* is a run of consecutive steps in a source: an episode, or a whole flat
file. Where an episode ends and the source has the next observation, a final row holds
it. Where the next observation of a step is not the observation of the following step,
one episode stops and another starts, whether the source says so or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Notes, Reader, default_rows
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import Bools, Marks
from mmreplay.convert.values import VALUES_NBYTES
from mmreplay.datasets.common.rows import Array, ColumnRows, ShiftedRows, field_of, files_of
from mmreplay.errors import CorruptError, FormatError
from mmreplay.ragged import Ragged
from mmreplay.ring import Span
from mmreplay.schema import Field, Schema
from mmreplay.schema.source_names import OwnNames
from mmreplay.strict_json import Json

TERMINATED_FIELD, TRUNCATED_FIELD = "terminated", "truncated"
ENDS = (TERMINATED_FIELD, TRUNCATED_FIELD)
NO_TEXT = Ragged(np.zeros(0, np.uint8), np.zeros(2, np.int64))
CHUNKS_PER_BLOCK = 4
"""Chunks of a block; a chunk is held several times while its rows are made."""
NOTE = (
    "rewards and ends stand with the observation that they led to, and were moved to "
    "the one before it; the last row of an episode is its final observation"
)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive steps of one environment.

    Attributes:
        name: Name for errors, such as a file and a group.
        steps: Number of steps.
        columns: Columns by path, without the ends; at least ``steps`` rows each.
        next_obs: Next observations by path, ``steps`` rows each; empty if unknown.
        ends: Returns terminated and truncated of steps ``[first, stop)``, bool each.
        env_id: The environment.
        is_episode: The row after a step is its next row unless the step ends
            something. If False, observations are compared to find that out.
    """

    name: str
    steps: int
    columns: Mapping[str, ColumnRows]
    next_obs: Mapping[str, ColumnRows]
    ends: Callable[[int, int], tuple[Bools, Bools]]
    env_id: int = 0
    is_episode: bool = True


Fragments = Callable[[], Iterator[Fragment]]
"""Makes the fragments, those of one environment one after another."""


class FragmentReader(Reader):
    """Reads fragments as rows of a buffer, environment by environment.

    Attributes:
        tally: Counts of rows and episode ends.
    """

    def __init__(
        self,
        fragments: Fragments,
        schema: Schema,
        notes: Notes,
        close: Callable[[], None],
        *,
        num_envs: int = 1,
        user_metadata: Json | None = None,
        own_names: OwnNames | None = None,
    ) -> None:
        """Read fragments.

        Args:
            fragments: Makes the fragments; called twice, first to count rows.
            schema: The fields, including ``terminated`` and ``truncated``.
            notes: The report so far.
            close: Closes the files.
            num_envs: Number of environments.
            user_metadata: The user's own JSON.
            own_names: See `Reader.own_names`.
        """
        self.report = notes
        self._own_names = own_names or {}
        self._paths = schema.paths
        self._span: Span | None = None
        self._close = close
        self._fragments = fragments
        self._schema = schema
        self._files: dict[str, str] = {}
        empty = np.zeros(num_envs, np.int64)
        self.tally = Tally(empty.copy())
        self._count(default_rows(Description(schema, empty, empty, 1)) // CHUNKS_PER_BLOCK or 1)
        self.tally.add_notes(notes)
        self._description = Description(
            schema=schema,
            first=empty,
            stop=self.tally.rows,
            capacity=max(1, int(self.tally.rows.max())),
            user=user_metadata or {},
        )

    def _count(self, rows: int) -> None:
        for fragment in self._fragments():
            self._check(fragment)
            for chunk in self._chunks(fragment, rows, ()):
                last = chunk.first + len(chunk.stated) == fragment.steps
                self.tally.add(
                    fragment.env_id,
                    chunk.stated,
                    chunk.split,
                    chunk.final,
                    last=last,
                    is_episode=fragment.is_episode,
                )

    def _check(self, fragment: Fragment) -> None:
        """Refuse a fragment whose columns differ from those of the first one."""
        for path, each in self._schema.fields.items():
            if path in ENDS:
                continue
            rows = fragment.columns.get(path)
            if not _is_of(rows, each) or rows.count < fragment.steps:
                raise _differs(fragment, repr(path), rows, each, "what came before")
            if not fragment.next_obs or path.split("/")[0] != "observation":
                continue
            rows = fragment.next_obs.get(path)
            if not _is_of(rows, each) or rows.count != fragment.steps:
                what = f"what followed {path!r}"
                raise _differs(fragment, what, rows, each, "the observations")

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def own_names(self) -> OwnNames:
        """See `Reader.own_names`."""
        return self._own_names

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        return self._blocks_of(self._paths, rows_per_block)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        for block in self._blocks_of(()):
            yield Block({}, block.env_ids, block.positions, block.flags)

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`: no other columns are read."""
        varying = tuple(p for p in self._schema.varying if p in self._paths)
        for block in self._blocks_of(varying):
            lengths = {path: block.values(path).lengths for path in varying}
            yield Block(lengths, block.env_ids, block.positions, block.flags)

    def _blocks_of(
        self, paths: tuple[str, ...], rows_per_block: int | None = None
    ) -> Iterator[Block]:
        """Yield the rows with some of their columns, and both ends."""
        rows = rows_per_block or default_rows(self._description)
        # Texts are read as if each were as long as it may be.
        fields = self._schema.fields
        longest = sum(fields[path].max_heap_nbytes for path in self._schema.varying)
        if longest:
            rows = max(1, min(rows, VALUES_NBYTES // longest))
        yield from regroup(self._blocks(rows, paths), rows)

    def as_files(self, path: str, codec: str) -> bool:
        """See `Reader.as_files`."""
        first = next(self._fragments(), None)
        if first is None or path in self._files:
            return False
        columns = [held.get(path) for held in (first.columns, first.next_obs)]
        files = [files_of(rows, codec) for rows in columns if rows is not None]
        if not files or files[0] is None or None in files:
            return False
        self._files[path] = codec
        fields = {**self._schema.fields, path: field_of(files[0])}
        self._schema = Schema.from_flat(fields, self._schema.roles)
        self._description = replace(self._description, schema=self._schema)
        return True

    def _files_or_rows(self, columns: Mapping[str, ColumnRows], path: str) -> ColumnRows:
        """A column of a fragment, perhaps of files."""
        rows, codec = columns[path], self._files.get(path)
        found = rows if codec is None else files_of(rows, codec)
        if found is None:
            raise CorruptError(
                f"{path!r} has files of several formats, which one field cannot hold. Cast it with "
                "a quality, such as jpeg:90:420, which encodes them again."
            )
        return found

    def narrow(self, span: Span) -> None:
        """See `Reader.narrow`: episodes outside are not read."""
        self._span = span

    def only(self, paths: tuple[str, ...]) -> None:
        """See `Reader.only`."""
        self._paths = paths

    def _is_outside(self, fragment: Fragment, head: int, size: int) -> bool:
        """Return whether no row of a fragment is wanted, without reading its columns.

        Args:
            fragment: The fragment.
            head: Position of its first row.
            size: Steps at a time.
        """
        if self._span is None or (fragment.next_obs and not fragment.is_episode):
            return False
        env_id, stop = fragment.env_id, head + fragment.steps
        if head >= self._span.stop[env_id]:
            return True
        if stop <= self._span.first[env_id] and fragment.next_obs:
            chunks = self._chunks(fragment, size, ())
            stop += sum(int(chunk.final.sum()) for chunk in chunks)
        return stop <= int(self._span.first[env_id])

    def _blocks(self, rows: int, paths: tuple[str, ...]) -> Iterator[Block]:
        num_envs = self._description.num_envs
        marks, heads = Marks(num_envs), np.zeros(num_envs, np.int64)
        # A chunk is held several times: the rows that are read, the rows that they
        # are compared with, and both with final rows between them.
        size = max(1, rows // CHUNKS_PER_BLOCK)
        for fragment in self._fragments():
            env_id = fragment.env_id
            outside = self._is_outside(fragment, int(heads[env_id]), size)
            wanted = () if outside else paths
            for chunk in self._chunks(fragment, size, wanted):
                block = self._block(chunk, env_id, int(heads[env_id]), marks)
                heads[env_id] += len(block)
                if not outside:
                    yield block

    def _block(self, chunk: _Chunk, env_id: int, head: int, marks: Marks) -> Block:
        """Return the rows of steps, each followed by its final row if it has one."""
        steps = len(chunk.final)
        count = steps + int(chunk.final.sum())
        at_rows = np.arange(steps) + np.cumsum(chunk.final) - chunk.final
        final = np.ones(count, bool)
        final[at_rows] = False
        columns = {
            path: _with_finals(values, chunk.next_obs.get(path), final)
            for path, values in chunk.columns.items()
        }
        terminated = np.zeros(count, bool)
        terminated[at_rows] = chunk.terminated
        truncated = np.zeros(count, bool)
        truncated[at_rows] = chunk.truncated | chunk.split
        # A fragment after one that did not end is a break in the record.
        breaks = np.zeros(count, bool)
        breaks[0] = chunk.first == 0
        flags = marks.mark(env_id, terminated, truncated, final, breaks)
        columns |= {TERMINATED_FIELD: terminated, TRUNCATED_FIELD: truncated}
        positions = np.arange(head, head + count)
        return Block(columns, np.full(count, env_id), positions, flags)

    def _chunks(self, fragment: Fragment, rows: int, paths: tuple[str, ...]) -> Iterator[_Chunk]:
        """Yield the steps of a fragment with some of its columns, and ends."""
        wanted = [path for path in paths if path not in ENDS]
        for first in range(0, fragment.steps, rows):
            stop = min(first + rows, fragment.steps)
            columns = {
                p: self._files_or_rows(fragment.columns, p).read(first, stop) for p in wanted
            }
            terminated, truncated = fragment.ends(first, stop)
            stated = terminated | truncated
            decoded = {p: column for p, column in columns.items() if p not in self._files}
            split = _disconnected(fragment, first, stop, decoded) & ~stated
            final = (stated | split) & bool(fragment.next_obs)
            next_obs: dict[str, Array] = {}
            if wanted and final.any():
                at_rows = first + np.flatnonzero(final)
                next_obs = {
                    p: _at(self._files_or_rows(fragment.next_obs, p), at_rows)
                    for p in fragment.next_obs
                    if p in columns
                }
            yield _Chunk(first, stated, split, terminated, truncated, final, columns, next_obs)

    def close(self) -> None:
        """See `Reader.close`."""
        self._close()


def episodes(
    name: str,
    columns: Mapping[str, ColumnRows],
    shifted: Collection[str],
    terminated: Bools,
    truncated: Bools,
    env_id: int = 0,
    begins: Bools | None = None,
) -> Iterator[Fragment]:
    """Yield the episodes of an environment whose rows are shifted.

    A row of such a source holds an observation and what came with it: the reward, the
    ends and perhaps the action of the step before. A step takes those from the next
    row. The last row of an episode is no step, only its final observation.

    Args:
        name: Name for errors.
        columns: Columns by path, ``N`` rows each, oldest first.
        shifted: Paths of the columns that belong to the step before their row.
        terminated: bool ``[N]``, rows whose step before terminated.
        truncated: bool ``[N]``, rows whose step before was truncated.
        env_id: The environment.
        begins: bool ``[N]``, rows that begin an episode, whether the one before ended
            or not. If None, the rows after an end.
    """
    count = len(terminated)
    over = (terminated | truncated)[:-1]
    if begins is not None:
        over |= begins[1:]
    behind = np.flatnonzero(over) + 1
    for first, stop in pairwise([0, *behind.tolist(), count]):
        steps = stop - first - 1

        def ends(low: int, high: int, shift: int = first + 1) -> tuple[Bools, Bools]:
            return (terminated[low + shift : high + shift], truncated[low + shift : high + shift])

        yield Fragment(
            f"{name}, row {first}",
            steps,
            {
                path: ShiftedRows(rows, first + (path in shifted), steps)
                for path, rows in columns.items()
            },
            {
                path: ShiftedRows(rows, first + 1, steps)
                for path, rows in columns.items()
                if path.split("/")[0] == "observation"
            },
            ends,
            env_id=env_id,
        )


@dataclass(slots=True)
class Tally:
    """Counts of rows and episode ends.

    Attributes:
        rows: int64 ``[E]``, rows including final rows.
        finals: Episodes with a final observation.
        split: Episodes that only their observations tell from the next one.
        unfinished: Fragments whose last step does not end, but has a next observation.
        unended: Fragments whose last step has neither an end nor a next observation.
        inner: Ends that the source states within one of its episodes.
    """

    rows: NDArray[np.int64]
    finals: int = 0
    split: int = 0
    unfinished: int = 0
    unended: int = 0
    inner: int = 0

    def add(
        self,
        env_id: int,
        stated: Bools,
        split: Bools,
        final: Bools,
        *,
        last: bool,
        is_episode: bool,
    ) -> None:
        """Count steps.

        Args:
            env_id: The environment.
            stated: bool ``[N]``, steps that end an episode according to the source.
            split: bool ``[N]``, other steps that end an episode.
            final: bool ``[N]``, steps that a final row follows.
            last: The last of these steps is the last of its fragment.
            is_episode: The fragment is one episode according to the source.
        """
        self.rows[env_id] += len(stated) + int(final.sum())
        self.finals += int(final.sum())
        unfinished = last and bool(split[-1])
        self.unfinished += unfinished
        self.split += int(split.sum()) - unfinished
        self.unended += last and not (stated[-1] or split[-1])
        if is_episode:
            self.inner += int(stated.sum()) - (last and bool(stated[-1]))

    def add_notes(self, report: Notes) -> None:
        """Add the counts to a report."""
        if self.finals:
            report.note(
                f"{self.finals:,} episodes end with the observation that was seen "
                "next, kept as a final row"
            )
        if self.split:
            report.note(
                f"{self.split:,} episodes without a marked end were truncated where "
                "the stored next observation differs from the next row"
            )
        if self.unfinished:
            report.note(
                f"{self.unfinished:,} episodes were cut off without an end, and have a "
                "next observation: truncated"
            )
        if self.unended:
            report.note(
                f"{self.unended:,} episodes were cut off without an end or a next "
                "observation: their last step is not drawn where one is needed"
            )
        if self.inner:
            report.doubt(
                f"{self.inner:,} steps end inside an episode of the source, and each "
                "was read as an end"
            )


def regroup(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """Yield the same rows in blocks of ``rows`` rows; the last may have fewer.

    Args:
        blocks: Blocks whose arrays stay valid, unlike those of a reader.
        rows: Rows of a block, at least 1.
    """
    pending: list[Block] = []
    count = 0
    for block in blocks:
        first = 0
        while first < len(block):
            stop = min(first + rows - count, len(block))
            pending.append(block.rows(first, stop))
            count += stop - first
            first = stop
            if count == rows:
                yield joined(pending)
                pending, count = [], 0
    if pending:
        yield joined(pending)


def _together(several: list[Any]) -> Any:
    """Return arrays, or values of a kind that knows how, one after another."""
    join = getattr(type(several[0]), "concatenate", np.concatenate)
    return join(several)


def joined(blocks: list[Block]) -> Block:
    """Return blocks of the same columns as one block."""
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        {path: _together([each.columns[path] for each in blocks]) for path in blocks[0].columns},
        np.concatenate([each.env_ids for each in blocks]),
        np.concatenate([each.positions for each in blocks]),
        np.concatenate([each.flags for each in blocks]),
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Steps of a fragment: their ends, bool ``[N]``, and their values if read."""

    first: int
    stated: Bools
    split: Bools
    terminated: Bools
    truncated: Bools
    final: Bools
    columns: Mapping[str, Array]
    next_obs: Mapping[str, Array]


def _is_of(rows: ColumnRows | None, field: Field) -> TypeGuard[ColumnRows]:
    """Return whether a column exists and has a field's dtype and shape."""
    return rows is not None and (rows.dtype, rows.shape) == (field.dtype, field.shape)


def _differs(
    fragment: Fragment, what: str, rows: ColumnRows | None, field: Field, like: str
) -> FormatError:
    """Return the error for a column that lacks the rows of its fragment."""
    got = "nothing"
    if rows is not None:
        got = f"{rows.count} rows of {rows.dtype}{list(rows.shape)}"
    return FormatError(
        f"{fragment.name}: {what} must have {fragment.steps} rows of "
        f"{field.dtype}{list(field.shape)} as in {like}, got {got}. The file is "
        "damaged, or mixes data of several kinds."
    )


def _disconnected(fragment: Fragment, first: int, stop: int, columns: Mapping[str, Array]) -> Bools:
    """Steps whose known next observation is not in the next row, bool ``[N]``."""
    apart = np.zeros(stop - first, bool)
    if not fragment.next_obs:
        return apart
    apart[-1] = stop == fragment.steps
    if fragment.is_episode:
        return apart
    for path, rows in fragment.next_obs.items():
        here = columns.get(path)
        if here is None:
            here = fragment.columns[path].read(first, stop)
        following = here[1:]
        if stop < fragment.steps:
            edge = fragment.columns[path].read(stop, stop + 1)
            following = np.concatenate([following, edge])
        seen = rows.read(first, stop)[: len(following)]
        apart[: len(following)] |= _differ(seen, following)
    return apart


def _with_finals(values: Any, next_obs: Any, final: Bools) -> Any:
    """Return the values of steps and of the final rows among them.

    Args:
        values: Of the steps.
        next_obs: Of the final rows; None for zeros, or empty text.
        final: bool ``[N]``, rows that are final rows.
    """
    if len(final) == len(values):
        return values
    if isinstance(values, Ragged):
        # One of those behind the steps for each final row.
        behind = NO_TEXT if next_obs is None else next_obs
        numbers = np.empty(len(final), np.int64)
        numbers[~final] = np.arange(len(values))
        numbers[final] = len(values)
        if next_obs is not None:
            numbers[final] += np.arange(len(next_obs))
        return Ragged.concatenate([values, behind])[numbers]
    found = np.zeros((len(final), *values.shape[1:]), values.dtype)
    found[~final] = values
    if next_obs is not None:
        found[final] = next_obs
    return found


def _at(rows: ColumnRows, at_rows: NDArray[np.int64]) -> Any:
    """Return single rows; rows near each other are read in one call."""
    first, stop = int(at_rows[0]), int(at_rows[-1]) + 1
    if stop - first <= 8 * len(at_rows):
        return rows.read(first, stop)[at_rows - first]
    return _together([rows.read(p, p + 1) for p in at_rows.tolist()])


def _differ(one: Array, other: Array) -> Bools:
    """Rows that differ in any value, bool ``[N]``; NaN equals NaN."""
    size = int(np.prod(one.shape[1:]))
    left, right = (each.reshape(len(each), size) for each in (one, other))
    unlike: Bools = np.asarray(left != right)
    if left.dtype.kind == "f":
        unlike = np.asarray(unlike & ~(np.isnan(left) & np.isnan(right)))
    differ: Bools = np.asarray(unlike.any(axis=1))
    return differ
