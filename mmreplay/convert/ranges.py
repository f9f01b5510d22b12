"""Selects ranges of rows by environment and position, as the page saves them.

A selection is a JSON object: ``format`` is ``"mmreplay selection"``, ``version`` is 1,
``uuid`` names the buffer, and ``rows`` lists ``[environment, first, stop]``, half-open,
by positions. Rows that were overwritten since are left out and counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.convert.base import Block, Reader
from mmreplay.convert.description import MAX_POSITION, PRIORITY, Description
from mmreplay.disk import files
from mmreplay.episodes import BREAK, CUT, END, FINAL, START, TRUNCATED
from mmreplay.errors import FormatError, SchemaError
from mmreplay.format.metadata import MAX_NUM_ENVS
from mmreplay.ring import Span, one_env
from mmreplay.schema.source_names import OwnNames

FORMAT, VERSION = "mmreplay selection", 1
MAX_NBYTES = 16 << 20
MAX_RANGES = 1 << 19

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowRanges:
    """Ranges of rows, sorted by environment and position; none overlap or touch.

    Attributes:
        env_ids: int64 ``[N]``.
        first: int64 ``[N]``, position of the first row of each range.
        stop: int64 ``[N]``, one past its last row.
        uuid: Hex name of the buffer that they are of, or ``""``.
        truncated: bool ``[N]``, the CUT of the row after a range says that its last
            step is truncated; None where that is not known.
    """

    env_ids: Ids
    first: Ids
    stop: Ids
    uuid: str = ""
    truncated: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, rows: list[tuple[int, int, int]], uuid: str = "") -> RowRanges:
        """Sort and join ranges.

        Args:
            rows: (environment, first, stop), in any order.
            uuid: Hex name of the buffer.
        """
        joined: list[list[int]] = []
        for env_id, first, stop in sorted(rows):
            if joined and joined[-1][0] == env_id and first <= joined[-1][2]:
                joined[-1][2] = max(joined[-1][2], stop)
            else:
                joined.append([env_id, first, stop])
        columns = np.array(joined, np.int64).reshape(-1, 3)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], uuid)

    @classmethod
    def of_span(cls, span: Span) -> RowRanges:
        """One range for each environment that has rows."""
        (env_ids,) = np.nonzero(span.lengths > 0)
        return cls(env_ids, span.first[env_ids], span.stop[env_ids])

    @property
    def rows(self) -> int:
        """Rows of all ranges."""
        return int((self.stop - self.first).sum())

    def clip(self, span: Span) -> RowRanges:
        """Return the rows of them that lie within a span."""
        known = self.env_ids < len(span.stop)
        env_ids = self.env_ids[known]
        first = np.maximum(self.first[known], span.first[env_ids])
        stop = np.minimum(self.stop[known], span.stop[env_ids])
        some = first < stop
        return RowRanges(env_ids[some], first[some], stop[some], self.uuid)

    def sliced(self, first: int, stop: int) -> RowRanges:
        """Return some of their rows, counted from the first one."""
        lengths = self.stop - self.first
        before = np.cumsum(lengths) - lengths
        low = self.first + np.clip(first - before, 0, lengths)
        high = self.first + np.clip(stop - before, 0, lengths)
        some = low < high
        truncated = self.truncated
        if truncated is not None:
            truncated = (truncated & (high == self.stop))[some]
        return RowRanges(self.env_ids[some], low[some], high[some], self.uuid, truncated)

    def span(self, heads: Ids) -> Span:
        """From the first to the last row of each environment; empty at its head."""
        first, stop = heads.copy(), heads.copy()
        # Ranges are sorted: of several the last one to be written counts.
        first[self.env_ids[::-1]] = self.first[::-1]
        stop[self.env_ids] = self.stop
        return Span(first, stop)

    def to_json(self) -> dict[str, Any]:
        """Return them as the JSON object of a selection file."""
        columns = np.stack([self.env_ids, self.first, self.stop], axis=1)
        return {"format": FORMAT, "version": VERSION, "uuid": self.uuid, "rows": columns.tolist()}

    def to_bytes(self) -> bytes:
        """Return them as a selection file.

        Raises:
            FormatError: `read_ranges` would refuse the file.
        """
        data = json.dumps(self.to_json()).encode()
        if len(self.env_ids) > MAX_RANGES or len(data) > MAX_NBYTES:
            raise FormatError(
                f"a selection holds at most {MAX_RANGES:,} ranges of rows and {MAX_NBYTES:,} "
                f"bytes, got {len(self.env_ids):,} ranges. Select by numbers of episodes instead."
            )
        return data


def read_ranges(path: Path) -> RowRanges:
    """Read a selection file.

    Raises:
        FormatError: There is no such file, or it is no selection.
    """
    if not os.path.lexists(path):
        raise FormatError(f"{path} does not exist. Check the path.")
    value = strict_json.parse(files.read_bytes(path, MAX_NBYTES), str(path))
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        raise FormatError(
            f"{path} must be a selection of version {VERSION}, got format "
            f"{value.get('format')!r} and version {value.get('version')!r}. Save one "
            "from the page of mmreplay view."
        )
    rows, uuid = value.get("rows"), value.get("uuid", "")
    if not isinstance(rows, list) or not rows or len(rows) > MAX_RANGES:
        raise FormatError(
            f"{path}: rows must be a list of 1 to {MAX_RANGES:,} ranges. Save it from "
            "the page again."
        )
    for row in rows:
        if not _is_range(row):
            raise FormatError(
                f"{path}: each of rows must be [environment, first, stop] with 0 <= "
                f"first < stop, got {str(row)[:80]}."
            )
    return RowRanges.of([tuple(row) for row in rows], str(uuid)[:64])


def write_selection(path: Path, data: bytes) -> None:
    """Write a selection file, over an existing one."""
    files.replace_bytes(path, data)


def _is_range(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 3:
        return False
    if not all(type(number) is int for number in row):
        return False
    env_id, first, stop = row
    return bool(0 <= env_id < MAX_NUM_ENVS and 0 <= first < stop <= MAX_POSITION)


def select_ranges(reader: Reader, ranges: RowRanges) -> RangesReader:
    """Read the rows of ranges that a user selected, as far as a source has them.

    Final rows whose step is not selected are left out.

    Args:
        reader: Of the source, which is closed with the result.
        ranges: The selection.

    Raises:
        SchemaError: The source has none of the rows.
    """
    notes, description = reader.report, reader.describe()
    other = ""
    if ranges.uuid and description.uuid and ranges.uuid != description.uuid:
        other = (
            f"the selection is of the buffer {ranges.uuid}, and the source is {description.uuid}"
        )
        notes.doubt(f"{other}: positions may name other rows")
    here = ranges.clip(Span(description.first, description.stop))
    if not here.rows and other:
        raise SchemaError(
            f"{other}, which has none of its rows. Pass the buffer that the "
            "selection was saved from."
        )
    if not here.rows:
        raise SchemaError(
            f"select names {ranges.rows:,} rows, but the source has none of them. "
            + _way_out(ranges, description.stop)
        )
    lost = ranges.rows - here.rows
    if lost:
        notes.note(
            f"{lost:,} of {ranges.rows:,} selected rows are not in the source any "
            "more, or not yet, and were left out"
        )
    reader.narrow(here.span(description.stop))
    orphans, truncated = np.zeros((2, len(here.env_ids)), bool)
    for block in reader.marks():
        before = _range_of(here, block.env_ids, block.positions - 1)
        after = (before >= 0) & (block.positions == here.stop[before])
        truncated[before[after & ((block.flags & CUT) != 0)]] = True
        which = _range_of(here, block.env_ids, block.positions)
        begins = (which >= 0) & (block.positions == here.first[which])
        orphans[which[begins & ((block.flags & FINAL) != 0)]] = True
    first = here.first + orphans
    some = first < here.stop
    steps = RowRanges(here.env_ids[some], first[some], here.stop[some], "", truncated[some])
    return RangesReader(reader, steps)


class RangesReader(Reader):
    """Reads ranges of another reader's rows, one after the other without gaps.

    Environments keep their numbers, and the oldest row of each its position; the rows
    after a gap continue_from at the next positions. Where the row before a gap ended no
    episode, the row after it begins another one by an interruption (BREAK).

    Attributes:
        ranges: The rows that it reads.
        paths: The columns of its blocks.
    """

    def __init__(
        self,
        reader: Reader,
        ranges: RowRanges,
        heads: Ids | None = None,
        continue_from: Ids | None = None,
    ) -> None:
        """Wrap a reader, which is closed with this one.

        Args:
            reader: The source. It may lack rows between the ranges.
            ranges: Rows that it has. After a gap none begins with a final row.
            heads: int64 ``[E]``, where an environment without rows begins; where the
                source's ends by default.
            continue_from: int64 ``[E]``, the position of the oldest row where rows of
                another source stand before it, as behind a gap; -1 where none do.
        """
        self.report = reader.report
        self._reader, self.ranges = reader, ranges
        description = reader.describe()
        schema = description.schema
        self._truncated = schema.role("truncated") or ""
        # Ends per agent stay true until the last one ends.
        agents = schema.num_agents is not None
        self._terminated = (schema.role("terminated") or "") if agents else ""
        self._final_follows = description.autoreset == "next_step"
        self.paths = description.schema.paths
        if description.priorities:
            self.paths = (*self.paths, PRIORITY)
        heads = description.stop if heads is None else heads
        self._lay_out(
            description, heads, np.full(len(heads), -1) if continue_from is None else continue_from
        )

    def _lay_out(self, description: Description, heads: Ids, continue_from: Ids) -> None:
        """Choose the position of each range: one after the other."""
        ranges = self.ranges
        lengths = ranges.stop - ranges.first
        self._gap = np.diff(ranges.env_ids, prepend=-1) == 0
        oldest = np.flatnonzero(~self._gap)
        before = np.cumsum(lengths) - lengths
        counts = np.diff(oldest, append=len(lengths))
        new_first, new_stop = heads.copy(), heads.copy()
        env_ids, newest = ranges.env_ids[oldest], oldest + counts - 1
        begins = np.where(continue_from[env_ids] < 0, ranges.first[oldest], continue_from[env_ids])
        self._gap[oldest] = continue_from[env_ids] >= 0
        self._base = before + np.repeat(begins - before[oldest], counts)
        new_first[env_ids] = begins
        new_stop[env_ids] = self._base[newest] + lengths[newest]
        # Rows behind a gap have other positions than the buffer's of that name.
        uuid = "" if self._gap.any() else description.uuid
        self._description = replace(description, first=new_first, stop=new_stop, uuid=uuid)

    def keep(self, paths: tuple[str, ...], *, priorities: bool = True) -> None:
        """Read some fields only, in the schema's order, and priorities or none."""
        self.only(paths)
        self._description = self._description.select(paths)
        self.paths = paths
        if self._description.priorities and priorities:
            self.paths = (*paths, PRIORITY)

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._description

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        return self.select(self._reader.blocks(rows_per_block), self.paths)

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        return self.select(self._reader.marks(), ())

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`."""
        paths = self._description.schema.varying
        return self.select(self._reader.measures(), paths)

    def select(
        self, blocks: Iterator[Block], paths: tuple[str, ...], last: NDArray[np.uint8] | None = None
    ) -> Iterator[Block]:
        """Rows of the ranges out of the source's.

        Args:
            blocks: What a pass over the source gives.
            paths: The columns of the result.
            last: uint8 ``[E]``, flags of the rows before, and then of the last ones.
        """
        last = np.zeros(self._description.num_envs, np.uint8) if last is None else last
        ranges = self.ranges
        moved = self._base - ranges.first
        for block in blocks:
            which = _range_of(ranges, block.env_ids, block.positions)
            inside = which >= 0
            if not inside.any():
                continue
            rows, which = block.select(inside), which[inside]
            positions = rows.positions + moved[which]
            flags = self._flags(rows, which, last)
            columns = {p: rows.columns[p] for p in paths if p in rows.columns}
            yield Block(columns, rows.env_ids, positions, flags)

    def _flags(self, rows: Block, which: Ids, last: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Flags of rows whose neighbours may be others now.

        Args:
            rows: Of the ranges.
            which: int64 ``[N]``, the range of each.
            last: uint8 ``[E]``, flags of the row before, and then of the last one.
        """
        flags, ranges = rows.flags.copy(), self.ranges
        served = rows.columns.get(self._truncated)
        if served is not None:
            # Only the CUT of the next row, which is left out, says that it truncates.
            truncated = served.astype(bool).reshape(len(rows), -1)
            over = truncated
            if self._terminated:
                over = truncated | (rows.columns[self._terminated] != 0)
            cut = truncated.any(axis=1) & over.all(axis=1)
            cut &= (rows.positions == ranges.stop[which] - 1) & ((flags & FINAL) == 0)
            flags[cut] |= TRUNCATED
        if ranges.truncated is not None:
            last_rows = (rows.positions == ranges.stop[which] - 1) & ((flags & FINAL) == 0)
            flags[last_rows & ranges.truncated[which]] |= TRUNCATED
        # The row before is of another range; so are most where environments alternate.
        begins = np.flatnonzero(np.diff(which, prepend=-1))
        begins = begins[self._gap[which[begins]]]
        begins = begins[rows.positions[begins] == ranges.first[which[begins]]]
        if len(begins):
            before = _flags_before(begins, rows.env_ids, flags, last)
            over = (before & (FINAL if self._final_follows else FINAL | END)) != 0
            fresh = flags[begins] & ~np.uint8(CUT)
            plain = (fresh & (START | BREAK)) == START
            flags[begins] = np.where(plain & over, fresh, fresh | START | BREAK)
        # Of each environment the last row of the block counts.
        newest = slice(-1, None) if one_env(rows.env_ids) else slice(None)
        last[rows.env_ids[newest]] = flags[newest]
        return flags

    def only(self, paths: tuple[str, ...]) -> None:
        """See `Reader.only`."""
        # What truncates a step is read in any case: see `_flags`.
        ends = (self._truncated, self._terminated)
        self._reader.only((*paths, *(path for path in ends if path not in ("", *paths))))

    def own_names(self) -> OwnNames:
        """See `Reader.own_names`."""
        return self._reader.own_names()

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()


def _way_out(ranges: RowRanges, heads: Ids) -> str:
    """Say what to select instead of rows that a source does not have."""
    num_envs = len(heads)
    known = ranges.env_ids < num_envs
    if not known.any():
        return (
            f"They are of environment {int(ranges.env_ids[0])}, and it has "
            f"{num_envs}. Pass the buffer that the selection was saved from."
        )
    later = ranges.first[known] >= heads[ranges.env_ids[known]]
    if later.all():
        return "They are not written yet. Select older rows."
    return "Select newer rows."


def _flags_before(
    at: Ids, env_ids: Ids, flags: NDArray[np.uint8], last: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Flags of the row of the same environment before each of some rows.

    Args:
        at: int64 ``[K]``, rows of a block.
        env_ids: int64 ``[N]``, of the block's rows.
        flags: uint8 ``[N]``.
        last: uint8 ``[E]``, of the rows before the block.
    """
    if one_env(env_ids):
        return np.where(at > 0, flags[at - 1], last[env_ids[at]])
    before = last[env_ids]
    order = np.argsort(env_ids, kind="stable")
    follows = np.diff(env_ids[order]) == 0
    before[order[1:][follows]] = flags[order[:-1][follows]]
    found: NDArray[np.uint8] = before[at]
    return found


def _range_of(ranges: RowRanges, env_ids: Ids, positions: Ids) -> Ids:
    """Number of the range that holds each row, int64 ``[N]``; -1 for none."""
    which = np.full(len(positions), -1)
    # Most blocks are of one environment: its rows are not sorted and picked.
    single = len(env_ids) > 0 and one_env(env_ids)
    for env_id in env_ids[:1].tolist() if single else np.unique(env_ids).tolist():
        low, high = np.searchsorted(ranges.env_ids, [env_id, env_id + 1])
        if low == high:
            continue
        mine = slice(None) if single else np.flatnonzero(env_ids == env_id)
        at = positions[mine]
        number = np.searchsorted(ranges.first[low:high], at, "right") - 1
        inside = (number >= 0) & (at < ranges.stop[low:high][number])
        which[mine] = np.where(inside, number + low, -1)
    return which
