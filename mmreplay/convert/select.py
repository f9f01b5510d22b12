"""Selects fields, environments, episodes or rows of a reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.convert.base import Block, Reader
from mmreplay.convert.description import PRIORITY, Description
from mmreplay.convert.episode_ends import EpisodeSpans, inside
from mmreplay.convert.ranges import RowRanges, select_ranges
from mmreplay.episodes import FINAL, TRUNCATED
from mmreplay.errors import SchemaError, shown, undone_by
from mmreplay.nesting import SEPARATOR, meant, under
from mmreplay.ring import Span
from mmreplay.schema.source_names import OwnNames


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a source that a user selects; all of it by default.

    Attributes:
        fields: Paths, or subtrees.
        env_ids: int ``[N]``.
        episodes: Complete episodes, counted environment by environment, oldest first.
        rows: Rows, counted likewise, within the other selections.
        ranges: Rows by position, in place of the other selections but fields.
    """

    fields: Sequence[str] | None = None
    env_ids: ArrayLike | None = None
    episodes: slice | None = None
    rows: slice | None = None
    ranges: RowRanges | None = None


def select(reader: Reader, selection: Selection) -> Reader:
    """A reader of the selected part, which closes the other reader with itself.

    Raises:
        SchemaError: Something selected does not exist; the reader is closed.
    """
    counted = (selection.env_ids, selection.episodes, selection.rows)
    parts = (selection.fields, *counted, selection.ranges)
    if all(part is None for part in parts):
        return reader
    with undone_by(reader.close):
        if selection.ranges is not None:
            if any(part is not None for part in counted):
                raise SchemaError(
                    "select: rows must be selected by position or by number, got both. "
                    "Leave out env_ids, episodes and rows."
                )
            fields = replace(selection, ranges=None)
            return select_ranges(select(reader, fields), selection.ranges)
        description = reader.describe()
        paths = None
        if selection.fields is not None:
            names = reader.own_names()
            paths = paths_of(description.schema.paths, selection.fields, names)
            reader.only(paths)
        span = Span(description.first, description.stop)
        if selection.env_ids is not None:
            mask = env_mask(description.num_envs, selection.env_ids)
            span = Span(np.where(mask, span.first, span.stop), span.stop)
        if selection.episodes is not None:
            episodes = EpisodeSpans(reader, span)
            first, stop = bounds_of("episodes", selection.episodes, episodes.total)
            span = episodes.span(first, stop)
        if selection.rows is not None:
            lengths = span.lengths
            before = np.cumsum(lengths) - lengths
            first, stop = bounds_of("rows", selection.rows, int(lengths.sum()))
            low = span.first + np.clip(first - before, 0, lengths)
            high = span.first + np.clip(stop - before, 0, lengths)
            some = low < high
            # Environments left out keep their position, and are empty.
            low, high = np.where(some, low, span.stop), np.where(some, high, span.stop)
            span = Span(low, high)
        reader.narrow(span)
        return SelectedReader(reader, span, paths)


def paths_of(
    paths: tuple[str, ...], fields: Sequence[str], own_names: OwnNames | None = None
) -> tuple[str, ...]:
    """Paths of the fields and subtrees that a user names, in schema order.

    Args:
        paths: Of all fields.
        fields: As the user named them.
        own_names: Other names of the fields, see `Reader.own_names`. One that is named
            in full is that column, whatever path has the same name.

    Raises:
        SchemaError: A name is no field, or there is none.
    """
    several = isinstance(fields, Iterable) and not isinstance(fields, str)
    names = list(fields) if several else []
    if not names:
        raise SchemaError(
            f"fields must be a list of at least one path, got {shown(fields)}. Leave "
            "it out for all fields."
        )
    known = own_names or {}
    selected: set[str] = set()
    for name in names:
        found: set[str] = set()
        if isinstance(name, str):
            exact = [name] if name in known else under(known, name)
            found = {path for own in exact for path in known[own]}.intersection(paths)
            found.update(under(paths, name) if name not in known else ())
        if not found:
            raise _unknown(name, paths, known)
        selected.update(found)
    return tuple(path for path in paths if path in selected)


def _unknown(name: object, paths: tuple[str, ...], known: Iterable[str]) -> SchemaError:
    """The error for a name that is neither a field nor a subtree."""
    legal = {
        SEPARATOR.join(parts[:depth])
        for parts in (path.split(SEPARATOR) for path in (*paths, *known))
        for depth in range(1, len(parts) + 1)
    }
    advice = meant(name, sorted(legal - {name}), "Check the spelling.")
    return SchemaError(
        f"fields must be fields or subtrees of {', '.join(paths[:20])}, got {shown(name)}. {advice}"
    )


def env_mask(num_envs: int, env_ids: ArrayLike) -> NDArray[np.bool_]:
    """A mask of the environments that a user names, bool ``[E]``.

    Raises:
        SchemaError: They are no environments.
    """
    try:
        ids = np.asarray(env_ids)
    except ValueError:
        # Lists of several lengths; numpy's message would not help the user.
        ids = np.zeros(0)
    integers = ids.dtype.kind in "iu" and ids.ndim <= 1 and ids.size > 0
    if not integers or ids.min() < 0 or ids.max() >= num_envs:
        raise SchemaError(
            f"env_ids must be one or more integers in [0, {num_envs}), got "
            f"{shown(env_ids)}. Leave it out for all environments."
        )
    mask = np.zeros(num_envs, bool)
    mask[ids] = True
    return mask


def bounds_of(name: str, selected: slice, total: int) -> tuple[int, int]:
    """First and stop of a slice among so many items.

    Args:
        name: Of the argument, for errors.
        selected: The slice; ends beyond the items are clipped.
        total: Number of items.

    Raises:
        SchemaError: It is no slice of step 1, or selects no item.
    """
    plain = isinstance(selected, slice) and selected.step in (None, 1)
    if not plain or not all(
        end is None or type(end) is int for end in (selected.start, selected.stop)
    ):
        raise SchemaError(
            f"{name} must be a slice of step 1, such as slice(0, 100) (0:100), got "
            f"{shown(selected)}. Rows of a buffer have no gaps."
        )
    first, stop, _ = selected.indices(total)
    if first >= stop and total:
        start, end = ("" if n is None else n for n in (selected.start, selected.stop))
        raise SchemaError(
            f"{name} selects none of {total}, got {start}:{end}. Select at least one."
        )
    return first, max(first, stop)


class SelectedReader(Reader):
    """Reads a range of each environment of another reader, with some of its fields.

    Environments keep their numbers, rows their positions.
    """

    def __init__(self, reader: Reader, span: Span, fields: Sequence[str] | None = None) -> None:
        """Wrap a reader, which is closed with this one."""
        self.report = reader.report
        self._reader = reader
        description = reader.describe()
        self._paths = description.schema.paths
        self._truncated = description.schema.role("truncated") or ""
        if fields is not None:
            self._paths = paths_of(self._paths, fields)
            description = description.select(self._paths)
        if description.priorities:
            self._paths = (*self._paths, PRIORITY)
        self._span = span
        self._shortened = span.stop < description.stop
        self._description = replace(description, first=span.first, stop=span.stop)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for block in self._reader.blocks(rows_per_block):
            mask = inside(block, self._span)
            if mask.any():
                rows = block.select(mask)
                columns = {path: rows.columns[path] for path in self._paths}
                yield Block(columns, rows.env_ids, rows.positions, self._flags(rows))

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        for block in self._reader.marks():
            yield block.select(inside(block, self._span))

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`."""
        varying = self._description.schema.varying
        for block in self._reader.measures():
            rows = block.select(inside(block, self._span))
            lengths = {path: rows.columns[path] for path in varying}
            yield Block(lengths, rows.env_ids, rows.positions, rows.flags)

    def _flags(self, block: Block) -> NDArray[np.uint8]:
        """Flags, truncated where the first row left out has CUT.

        Only the CUT of the next row may say that a step is truncated.
        """
        served = block.columns.get(self._truncated)
        if served is None or not self._shortened.any():
            return block.flags
        truncated = served.astype(bool).reshape(len(block), -1).any(axis=1)
        last = self._shortened[block.env_ids] & truncated
        last &= block.positions == self._span.stop[block.env_ids] - 1
        last &= (block.flags & FINAL) == 0
        flags = block.flags.copy()
        flags[last] |= TRUNCATED
        return flags

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()
