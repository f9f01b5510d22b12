"""Readers that change the steps of episodes: fewer ones, or by a function.

Rows come in blocks that cut episodes anywhere. `groups` puts them together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import format_size, integer, is_number, one_of
from mmreplay.convert.base import Block, Reader, ReaderOf, default_rows
from mmreplay.convert.description import PRIORITY, refuse_new_ends
from mmreplay.convert.provenance import function_name
from mmreplay.episodes import END, FINAL, START
from mmreplay.errors import ReplayError, SchemaError, SourceError, shown
from mmreplay.nesting import under
from mmreplay.ragged import Ragged
from mmreplay.ring import Span
from mmreplay.schema import Field, Schema
from mmreplay.schema.source_names import OwnNames
from mmreplay.strict_json import Json

Ids = NDArray[np.int64]
SkipReward = Literal["sum", "last", "first"]
SKIP_REWARDS: tuple[SkipReward, ...] = ("sum", "last", "first")
Function = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Changes the columns of an episode; see `MappedReader`."""
MAX_EPISODE_NBYTES = 256 << 20
MAX_FRAME_SKIP = 1 << 31


def groups(
    blocks: Iterator[Block], stop: Ids, size: int | None = None, max_nbytes: int | None = None
) -> Iterator[tuple[Block, Ids]]:
    """Rows by episode, or by so many steps of one.

    The newest rows of each environment wait until the next ones say that their group is
    complete.

    Args:
        blocks: Rows of a source.
        stop: int64 ``[E]``, one past the last position of each environment.
        size: Steps of a group, of which the last of an episode may have fewer; a final
            row is a group by itself. None for groups of an episode and its final row.
        max_nbytes: Of the fields of a group; None for any.

    Yields:
        Rows, environment by environment, and int64 ``[G]``, the first of each group.

    Raises:
        SourceError: A group takes more bytes.
    """
    waiting: dict[int, Block] = {}
    for block in blocks:
        here = [env_id for env_id in np.unique(block.env_ids).tolist() if env_id in waiting]
        rows = _sorted(joined_blocks([*(waiting.pop(env_id) for env_id in here), block]))
        firsts = _firsts(rows, size)
        stops = np.append(firsts[1:], len(rows))
        env_ids = rows.env_ids[firsts]
        newest = np.diff(env_ids, append=-1) != 0
        newest &= rows.positions[stops - 1] + 1 < stop[env_ids]
        for number in np.flatnonzero(newest).tolist():
            # A copy: the block is valid until the next one is read.
            group = rows.take(np.arange(firsts[number], stops[number]))
            waiting[int(env_ids[number])] = group
            if max_nbytes is not None:
                _refuse_large(group, max_nbytes)
        if not newest.all():
            ready = rows.select(~np.repeat(newest, stops - firsts))
            yield ready, _firsts(ready, size)
    for rows in waiting.values():
        yield rows, _firsts(rows, size)


def joined_blocks(blocks: Sequence[Block]) -> Block:
    """The rows of blocks of the same columns, one after another."""
    if len(blocks) == 1:
        return blocks[0]
    columns: dict[str, Any] = {}
    for path in blocks[0].columns:
        every: list[Any] = [block.columns[path] for block in blocks]
        join: Any = Ragged.concatenate if isinstance(every[0], Ragged) else np.concatenate
        columns[path] = join(every)
    return Block(
        columns,
        np.concatenate([block.env_ids for block in blocks]),
        np.concatenate([block.positions for block in blocks]),
        np.concatenate([block.flags for block in blocks]),
    )


def _sorted(block: Block) -> Block:
    """The same rows, environment by environment."""
    if (np.diff(block.env_ids) >= 0).all():
        return block
    return block.take(np.argsort(block.env_ids, kind="stable"))


def _firsts(rows: Block, size: int | None) -> Ids:
    begins = ((rows.flags & START) != 0) | (np.diff(rows.env_ids, prepend=-1) != 0)
    if size is None:
        return np.flatnonzero(begins)
    at = np.arange(len(rows))
    step = at - np.maximum.accumulate(np.where(begins, at, 0))
    return np.flatnonzero(begins | ((rows.flags & FINAL) != 0) | (step % size == 0))


def _refuse_large(group: Block, max_nbytes: int) -> None:
    if sum(column.nbytes for column in group.columns.values()) > max_nbytes:
        raise SourceError(
            f"the episode at position {group.positions[0]} of environment {group.env_ids[0]} takes "
            f"more than {format_size(max_nbytes)}, too much for a function at once. Leave it out "
            "with where, or drop fields with fields."
        )


class EachNth(ReaderOf):
    """Makes one step of several: of an agent that acts less often.

    Observation, action and all other fields are those of the first one, ends and a
    stored next observation of the last one. An episode's last steps may be fewer. Final
    rows stay. Positions count the steps that are left; priorities, statistics and the
    name of the buffer are left out.
    """

    def __init__(self, reader: Reader, size: int, reward: SkipReward = "sum") -> None:
        """Wrap a reader, whose flags are read once.

        Args:
            reader: Is closed with this one.
            size: Steps that become one, from 2 to 2^31.
            reward: The ``"sum"`` of their rewards, or that of the ``"last"`` or
                ``"first"`` one.

        Raises:
            SchemaError: An argument is not legal.
        """
        super().__init__(reader)
        self._size = integer(
            "frame_skip", size, 2, "Pass such as 3, for every third frame.", maximum=MAX_FRAME_SKIP
        )
        one_of("skip_reward", reward, SKIP_REWARDS)
        description = reader.describe()
        schema = description.schema
        self._of_sum = schema.role_paths("reward") if reward == "sum" else ()
        last = ["terminated", "truncated", "next_observation"]
        last += ["reward"] if reward == "last" else []
        self._of_last = {path for role in last for path in schema.role_paths(role)}
        counts = np.zeros(description.num_envs, np.int64)
        for rows, firsts in groups(reader.marks(), description.stop, self._size):
            counts += np.bincount(rows.env_ids[firsts], minlength=len(counts))
        user = _slower(description.user, self._size)
        if isinstance(imported := user.get("lerobot"), dict):
            # Where a dataset's own frames a second are.
            user = {**user, "lerobot": _slower(imported, self._size)}
        self._description = replace(
            description,
            stop=description.first + counts,
            uuid="",
            statistics={},
            user=user,
            priorities="",
            values=None,
        )
        if schema.role_paths("action"):
            self.report.doubt(
                f"frame_skip={self._size} leaves out the actions of all but the first of "
                f"{self._size} steps"
            )
        if description.priorities:
            self.report.doubt("priorities were left out, as several steps became one")
        self.report.steps.append(f"frame_skip leaves {int(counts.sum()):,} rows")

    def narrow(self, span: Span) -> None:
        """See `Reader.narrow`: the span is of other positions."""

    def path_of(self, env_id: int, position: int) -> Path | None:
        """See `Reader.path_of`: the rows have other positions."""
        return None

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        return self._fewer(self._reader.marks())

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`."""
        return self._fewer(self._reader.measures())

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for block in self._fewer(self._reader.blocks(rows_per_block)):
            for first in range(0, len(block), rows_per_block or len(block)):
                yield block.rows(first, first + (rows_per_block or len(block)))

    def _fewer(self, blocks: Iterator[Block]) -> Iterator[Block]:
        following = self._description.first.copy()
        for rows, firsts in groups(blocks, self._reader.describe().stop, self._size):
            lasts = np.append(firsts[1:], len(rows)) - 1
            columns: dict[str, Any] = {}
            for path, column in rows.columns.items():
                if path in self._of_sum and len(column):
                    columns[path] = self._sum(path, column, firsts)
                elif path != PRIORITY:
                    columns[path] = column[lasts if path in self._of_last else firsts]
            env_ids = rows.env_ids[firsts]
            starts = np.flatnonzero(np.diff(env_ids, prepend=-1))
            counts = np.diff(starts, append=len(env_ids))
            begins = following[env_ids[starts]] - starts
            following[env_ids[starts]] += counts
            positions = np.arange(len(env_ids)) + np.repeat(begins, counts)
            flags = rows.flags[firsts] | (rows.flags[lasts] & END)
            yield Block(columns, env_ids, positions, flags)

    def _sum(self, path: str, column: Any, firsts: Ids) -> NDArray[Any]:
        """Sums of the rewards of each group, in the field's own dtype."""
        field = self._description.schema.fields[path]
        numbers = field.rules.numbers(field, column)
        assert numbers is not None
        exact = numbers.dtype.kind != "f"
        wide = numbers.astype(object if exact else np.float64)
        with np.errstate(all="ignore"):
            sums = np.add.reduceat(wide, firsts, axis=0)
        if not exact:
            return field.convert(sums, path, (len(firsts),))
        largest: int = 1 if field.dtype == "bool" else np.iinfo(field.dtype).max
        beyond = (sums < -largest - 1) | (sums > largest)
        if beyond.any():
            raise SourceError(
                f"frame_skip: a sum of field {path!r} is {sums[beyond][0]}, which {field.dtype} "
                "does not hold. Cast the field in a conversion before, or pass skip_reward='last'."
            )
        return np.asarray(sums.astype(field.numpy))


def _slower(metadata: Json, size: int) -> Json:
    """User metadata whose ``fps``, if it is a number, is of steps made of several."""
    fps = metadata.get("fps")
    if not is_number(fps):
        return metadata
    slower = fps / size
    return {**metadata, "fps": int(slower) if slower.is_integer() else slower}


class MappedReader(ReaderOf):
    """Changes episodes by a function of the user.

    The function is called with the columns of an episode's steps by their paths, arrays
    ``[T, *shape]`` that it may write into, texts as lists of str and other values of
    any length as `Ragged`, and returns the columns that it changed, or all of them, of
    as many steps. Its attribute ``schema`` declares columns that it adds: fields by
    path. Final rows are no steps: they stay as they are, with zeros in added columns.
    Ends stay too: it must not change fields of the roles terminated and truncated, as
    flags say the same.

    Statistics and the name of the buffer are left out. Where a field varies the
    function is called a second time, to measure its values.
    """

    def __init__(self, reader: Reader, function: Function) -> None:
        """Wrap a reader, which is closed with this one.

        Raises:
            SchemaError: It is no function, or declares fields that there are already.
        """
        super().__init__(reader)
        if not callable(function):
            raise SchemaError(
                f"map must be a function of an episode's columns, got {shown(function)}. Pass one."
            )
        self._function, self._name = function, function_name(function)
        description = reader.describe()
        declared: Any = getattr(function, "schema", {})
        added = declared if isinstance(declared, Schema) else Schema(declared) if declared else None
        self._added = {} if added is None else dict(added.fields)
        for path in self._added:
            if path in description.schema.fields:
                raise SchemaError(
                    f"map {self._name}: schema declares field {path!r}, which the source has. "
                    "Declare new fields only; return values of others as they are."
                )
        every = {**description.schema.fields, **self._added}
        schema = Schema.from_flat(every, description.schema.roles)
        refuse_new_ends(description.schema.roles, schema, f"map {self._name}")
        self._description = replace(
            description, schema=schema, uuid="", statistics={}, heap_nbytes=0, values=None
        )
        self.report.steps.append(f"map calls {self._name}")

    def own_names(self) -> OwnNames:
        """See `Reader.own_names`; a field that is added goes before a column's name."""
        names = self._reader.own_names()
        return {own: paths for own, paths in names.items() if not under(self._added, own)}

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        # Blocks of the source's own size: each copies the episode that waits. What is
        # made of them is in memory some episodes at a time.
        blocks, stop = self._reader.blocks(), self._description.stop
        made = replace(self._description, schema=self._description.schema.drawn)
        size = rows_per_block or default_rows(made)
        for rows, firsts in groups(blocks, stop, max_nbytes=MAX_EPISODE_NBYTES):
            edges = [0]
            for first in firsts.tolist():
                if first - edges[-1] >= size:
                    edges.append(first)
            for first, last in pairwise([*edges, len(rows)]):
                within = firsts[(firsts >= first) & (firsts < last)] - first
                block = self._mapped(rows.rows(first, last), within)
                for at in range(0, len(block), size):
                    yield block.rows(at, at + size)

    def _mapped(self, rows: Block, firsts: Ids) -> Block:
        """The same rows, with what the function returns for each episode."""
        fields = self._description.schema.fields
        pieces: dict[str, list[Any]] = {path: [] for path in fields}
        for first, stop in zip(firsts, np.append(firsts[1:], len(rows)), strict=True):
            final = bool(rows.flags[stop - 1] & FINAL)
            episode = rows.rows(first, stop)
            steps = len(episode) - final
            changed: Mapping[str, Any] = self._call(episode, steps) if steps else {}
            for path, field in fields.items():
                if path in changed:
                    pieces[path].append(changed[path])
                elif path in episode.columns:
                    pieces[path].append(episode.columns[path][:steps])
                if final:
                    column: Any = episode.columns.get(path)
                    pieces[path].append(zeros(field) if column is None else column[steps:])
        columns: dict[str, Any] = {
            path: Ragged.concatenate(each) if fields[path].varies else np.concatenate(each)
            for path, each in pieces.items()
        }
        if PRIORITY in rows.columns:
            columns[PRIORITY] = rows.columns[PRIORITY]
        return Block(columns, rows.env_ids, rows.positions, rows.flags)

    def _call(self, episode: Block, steps: int) -> dict[str, Any]:
        """What the function changes of an episode, as it is stored."""
        env_id, position = int(episode.env_ids[0]), int(episode.positions[0])
        source = self._reader.path_of(env_id, position)
        at = f"map {self._name}: the episode at position {position} of environment {env_id}"
        at += "" if source is None else f", of {source},"
        fields = self._description.schema.fields
        given = {
            path: given_values(fields[path], column[:steps])
            for path, column in episode.columns.items()
            if path in fields
        }
        returned = self._returned(dict(given), at)
        changed: dict[str, Any] = {}
        for path, values in {**given, **returned}.items():
            try:
                changed[path] = fields[path].rules.convert(fields[path], values, path, (steps,))
            except ReplayError as error:
                raise SourceError(f"{at}: {error}") from error
        for role in ("terminated", "truncated"):
            for path in self._description.schema.role_paths(role):
                if not np.array_equal(changed[path], episode.columns[path][:steps]):
                    raise SourceError(
                        f"{at} must not change {path!r}, as flags say where episodes end. Leave "
                        "it out of what is returned."
                    )
        self._doubt(episode, steps, changed)
        return changed

    def _doubt(self, episode: Block, steps: int, changed: Mapping[str, Any]) -> None:
        """Say that final observations do not fit changed ones, if there are any."""
        schema = self._description.schema

        def is_changed(path: str) -> bool:
            if path in self._added:
                return True
            old: Any = episode.columns[path][:steps]
            new: Any = changed[path]
            if not schema.fields[path].varies:
                return not np.array_equal(old, new, equal_nan=old.dtype.kind == "f")
            old, new = (Ragged.concatenate([each]) for each in (old, new))
            same = np.array_equal(old.offsets, new.offsets)
            return not (same and np.array_equal(old.values, new.values))

        if len(episode) > steps and any(map(is_changed, schema.role_paths("observation"))):
            self.report.doubt(
                f"map {self._name} was not called with final observations, which stay as they are"
            )

    def _returned(self, columns: dict[str, Any], at: str) -> Mapping[str, Any]:
        """The columns that the function returns, with those that it adds."""
        fields = self._description.schema.fields
        try:
            returned = self._function(columns)
        except Exception as error:
            raise SourceError(
                f"{at} raised {type(error).__name__}: {error}. Call it with these columns to find "
                "the cause."
            ) from error
        if not isinstance(returned, Mapping):
            raise SourceError(
                f"{at} must return columns by path, got {shown(returned)}. Return a dict."
            )
        for path in returned:
            if path not in fields:
                raise SourceError(
                    f"{at} returned field {shown(path)}, which nothing declares. Give the function "
                    "an attribute schema = {path: mr.Field(...)}."
                )
        for path in self._added:
            if path not in returned:
                raise SourceError(
                    f"{at} did not return field {path!r}, which its schema declares. Return it for "
                    "each episode."
                )
        return returned


def given_values(field: Field, column: Any) -> Any:
    """The values of a column as a function gets them."""
    if isinstance(column, Ragged):
        return column.text() if field.kind == "text" else column
    numbers = field.rules.numbers(field, column)
    return np.array(column if numbers is None else numbers)


def zeros(field: Field) -> Any:
    """One row of zeros of a field, or of an empty value."""
    if field.varies:
        return Ragged(np.zeros((0, *field.inner), field.numpy), np.zeros(2, np.int64))
    return np.zeros((1, *field.shape), field.numpy)
