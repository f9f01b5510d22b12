"""Some fields, environments, episodes or rows of what a reader gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.convert.base import Block, Reader
from mmreplay.convert.description import PRIORITY, Description
from mmreplay.convert.episode_ends import Begins, inside
from mmreplay.episodes import FINAL, TRUNCATED
from mmreplay.errors import SchemaError, shown
from mmreplay.nesting import under
from mmreplay.ring import Span


@dataclass(frozen=True, slots=True)
class Selection:
    """What a user wants of a source; all of it by default.

    Attributes:
        fields: Paths, or subtrees.
        env_ids: int ``[N]``.
        episodes: Whole episodes, counted environment by environment, oldest first.
        rows: Rows, counted likewise, within what else is chosen.
    """

    fields: Sequence[str] | None = None
    env_ids: ArrayLike | None = None
    episodes: slice | None = None
    rows: slice | None = None

    @property
    def whole(self) -> bool:
        """Whether all is wanted; arrays are not to be compared with ``==``."""
        chosen = (self.fields, self.env_ids, self.episodes, self.rows)
        return all(each is None for each in chosen)


def paths_of(paths: tuple[str, ...], fields: Sequence[str]) -> tuple[str, ...]:
    """Paths of fields, or of subtrees, that a user names, in schema order.

    Raises:
        SchemaError: A name is no field, or there is none.
    """
    several = isinstance(fields, Iterable) and not isinstance(fields, str)
    names = list(fields) if several else []
    if not names:
        raise SchemaError(
            f"fields: got {shown(fields)}, expected a list of at least one path; "
            "leave it "
            "out for all"
        )
    kept: set[str] = set()
    for name in names:
        found = under(paths, name) if isinstance(name, str) else ()
        if not found:
            raise SchemaError(
                f"fields: got {shown(name)}, expected fields or subtrees of "
                f"{', '.join(paths[:20])}; check the spelling"
            )
        kept.update(found)
    return tuple(path for path in paths if path in kept)


def mask_of(num_envs: int, env_ids: ArrayLike) -> NDArray[np.bool_]:
    """Which environments a user names, bool ``[E]``.

    Raises:
        SchemaError: They are no environments.
    """
    try:
        ids = np.asarray(env_ids)
    except ValueError:
        # Lists of several lengths; what it says is of no use to the user.
        ids = np.zeros(0)
    whole = ids.dtype.kind in "iu" and ids.ndim <= 1 and ids.size > 0
    if not whole or ids.min() < 0 or ids.max() >= num_envs:
        raise SchemaError(
            f"env_ids: got {shown(env_ids)}, expected integers in [0, {num_envs}), at "
            "least one; environments are counted from 0"
        )
    kept = np.zeros(num_envs, bool)
    kept[ids] = True
    return kept


def bounds_of(what: str, chosen: slice, total: int) -> tuple[int, int]:
    """First and stop that a slice means among so many; what lies beyond is cut off.

    Raises:
        SchemaError: It is no slice of step 1, or means none of them.
    """
    whole = isinstance(chosen, slice) and chosen.step in (None, 1)
    if not whole or not all(
        end is None or type(end) is int for end in (chosen.start, chosen.stop)
    ):
        raise SchemaError(
            f"{what}: got {shown(chosen)}, expected a slice of step 1, such as "
            "slice(0, "
            "100) (0:100); rows of a buffer have no gaps"
        )
    first, stop, _ = chosen.indices(total)
    if first >= stop and total:
        start, end = ("" if n is None else n for n in (chosen.start, chosen.stop))
        raise SchemaError(
            f"{what}: got {start}:{end} of {total}, expected at least one of them; "
            "choose others"
        )
    return first, max(first, stop)


def choose(reader: Reader, choice: Selection) -> Reader:
    """What of a reader is wanted, as a reader of its own, which closes the other one.

    Raises:
        SchemaError: Something chosen is not there.
    """
    if choice.whole:
        return reader
    description = reader.describe()
    paths = None
    if choice.fields is not None:
        paths = paths_of(description.schema.paths, choice.fields)
        reader.only(paths)
    span = Span(description.first, description.stop)
    if choice.env_ids is not None:
        kept = mask_of(description.num_envs, choice.env_ids)
        span = Span(np.where(kept, span.first, span.stop), span.stop)
    if choice.episodes is not None:
        begins = Begins(reader, span)
        span = begins.span(*bounds_of("episodes", choice.episodes, begins.total))
    if choice.rows is not None:
        span = _rows(span, choice.rows)
    reader.narrow(span)
    return Selected(reader, span, paths)


def _rows(span: Span, chosen: slice) -> Span:
    """The stretch of each environment that a slice of all rows means."""
    lengths = span.lengths
    before = np.cumsum(lengths) - lengths
    first, stop = bounds_of("rows", chosen, int(lengths.sum()))
    low = span.first + np.clip(first - before, 0, lengths)
    high = span.first + np.clip(stop - before, 0, lengths)
    some = low < high
    # Environments left out stay where they are, and hold nothing.
    return Span(np.where(some, low, span.stop), np.where(some, high, span.stop))


class Selected(Reader):
    """A stretch of each environment of a reader's, with some of its fields.

    Environments keep their numbers, rows their positions.
    """

    def __init__(
        self, reader: Reader, span: Span, fields: Sequence[str] | None = None
    ) -> None:
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
        self._cut = span.stop < description.stop
        self._description = replace(description, first=span.first, stop=span.stop)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        for block in self._reader.blocks(rows_per_block):
            kept = inside(block, self._span)
            if kept.any():
                taken = block.taken(kept)
                columns = {path: taken.columns[path] for path in self._paths}
                yield Block(columns, taken.env_ids, taken.positions, self._flags(taken))

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        for block in self._reader.marks():
            yield block.taken(inside(block, self._span))

    def _flags(self, block: Block) -> NDArray[np.uint8]:
        """Flags, with what a row that is left out says of the last one that stays.

        A step may be truncated by its next row's CUT alone.
        """
        served = block.columns.get(self._truncated)
        if served is None or not self._cut.any():
            return block.flags
        told = served.astype(bool).reshape(len(block), -1).any(axis=1)
        last = self._cut[block.env_ids] & told
        last &= block.positions == self._span.stop[block.env_ids] - 1
        last &= (block.flags & FINAL) == 0
        flags = block.flags.copy()
        flags[last] |= TRUNCATED
        return flags

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()
