"""Rows by the value of an integer field: an index that follows a ring.

It is built by one scan at the first look, and then takes in what is new. Entries lie in
*runs*, each sorted by value, so that a look-up is a bisection in a few arrays and the
rows of one value lie together. Rows that left the ring are found out at each look-up,
and dropped when they are a fifth of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import SchemaError, refuse_masked, shown
from mmreplay.ring import Ring, Span, position_chunks

Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]
Integers = NDArray[Any]
ReadColumn = Callable[[Ids, Ids], tuple[Integers, Bools]]
"""Returns the values of rows, and which of those are whole and no final rows."""

MAX_DEAD = 0.2
"""Entries of rows that left the ring, of one for each living row, at which they are
dropped."""
SPARE_ENTRIES = 1024
"""So many more stay, so that small rings are not gone through at each look."""
MERGE_RATIO = 2
"""A run is merged with the one before it if that has at most so many times its rows."""
BYTES_A_ROW = 24
"""The most that an index keeps for a living row, for many: value, position and
environment take 20, and a fifth more of rows that left."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Entries sorted by value; of equal ones the earlier taken in come first."""

    values: Integers
    env_ids: NDArray[np.int32]
    positions: Ids

    def __len__(self) -> int:
        return len(self.values)

    def only(self, chosen: Bools) -> _Run:
        return _Run(self.values[chosen], self.env_ids[chosen], self.positions[chosen])


@dataclass(frozen=True, slots=True)
class Matches:
    """Rows of several values, of one value after another.

    Attributes:
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``, newest first within a value; those of equal positions
            by environment.
        offsets: int64 ``[V + 1]``, where the rows of each value begin, and N.
        broken: bool ``[V]``, true where a row of the value was seen that has left the
            ring since, while others are still in it.
    """

    env_ids: Ids
    positions: Ids
    offsets: Ids
    broken: Bools

    @property
    def counts(self) -> Ids:
        """int64 ``[V]``, rows of each value."""
        return np.diff(self.offsets)


def require_path(field: object, example: str) -> None:
    """Check that a sampler was given the path of its field.

    Args:
        field: What was given.
        example: A path as users choose it.

    Raises:
        SchemaError: It is no text.
    """
    if not isinstance(field, str):
        raise SchemaError(
            f"field must be the path of an integer field, got {shown(field)}. Pass "
            f"a name such as {example!r}."
        )


class ColumnIndex:
    """Positions by value of one field. Not thread-safe: hold the view's lock."""

    def __init__(self, ring: Ring) -> None:
        """Make an index without any row.

        Args:
            ring: Where the rows lie.
        """
        self._ring = ring
        # Changed together by one assignment, so that an interrupt leaves them whole.
        self._state: tuple[list[_Run], Span, Integers] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its entries."""
        runs = [] if self._state is None else self._state[0]
        return sum(run.values.nbytes + run.env_ids.nbytes + run.positions.nbytes for run in runs)

    def update(self, span: Span, read: ReadColumn) -> None:
        """Take in the rows that came since the last look: O(new rows log rows).

        Args:
            span: What is alive now.
            read: Reads values of rows that are alive.
        """
        state = self._state
        if state is not None and state[1] is span:
            return
        if state is None or (span.stop < state[1].stop).any():
            # The first look, or rows that were seen are to come again.
            runs, broken = [], np.empty(0, np.int64)
            seen = span.first
        else:
            runs, broken = list(state[0]), state[2]
            seen = np.maximum(state[1].stop, span.first)
        for env_ids, positions in position_chunks(self._ring, seen, span.stop):
            values, whole = read(env_ids, positions)
            order = np.argsort(values, kind="stable")
            order = order[whole[order]]
            fresh = _Run(values[order], env_ids[order].astype(np.int32), positions[order])
            runs.append(fresh)
            while len(runs) > 1 and len(runs[-2]) <= MERGE_RATIO * len(runs[-1]):
                last, before = runs.pop(), runs.pop()
                runs.append(_merged(before, last))
        entries, rows = sum(map(len, runs)), int(span.lengths.sum())
        if entries > (1 + MAX_DEAD) * rows + SPARE_ENTRIES:
            runs, broken = _without_dead(runs, span.first, broken)
        self._state = runs, span, broken

    def look_up(self, values: Integers) -> Matches:
        """Find the rows alive of each value: O(values log rows + matches).

        Args:
            values: Integers ``[V]`` of any dtype.
        """
        assert self._state is not None
        runs, span, broken = self._state
        refuse_masked(values, "values")
        wanted = np.asarray(values)
        which: list[Ids] = []
        env_ids: list[Ids] = []
        positions: list[Ids] = []
        for run in runs:
            asked, inside = _within(wanted, run.values.dtype)
            first = np.searchsorted(run.values, asked, "left")
            lengths = np.searchsorted(run.values, asked, "right") - first
            lengths[~inside] = 0
            ends = np.cumsum(lengths)
            total = int(ends[-1]) if len(ends) else 0
            entries = np.arange(total) + np.repeat(first - ends + lengths, lengths)
            which.append(np.repeat(np.arange(len(wanted)), lengths))
            env_ids.append(run.env_ids[entries].astype(np.int64))
            positions.append(run.positions[entries])
        none = np.empty(0, np.int64)
        number = np.concatenate([none, *which])
        env_id = np.concatenate([none, *env_ids])
        position = np.concatenate([none, *positions])
        alive = position >= span.first[env_id]
        lost = np.zeros(len(wanted), bool)
        lost[number[~alive]] = True
        if len(broken):
            lost |= np.isin(wanted, broken)
        number, env_id, position = number[alive], env_id[alive], position[alive]
        order = np.lexsort((env_id, -position, number))
        counts = np.bincount(number, minlength=len(wanted))
        offsets = np.append(0, np.cumsum(counts))
        return Matches(env_id[order], position[order], offsets, lost & (counts > 0))

    def in_range(self, low: int, high: int) -> tuple[Ids, Ids, Integers]:
        """Find the rows alive with values in ``[low, high]``.

        Returns:
            env_ids, positions, and values ``[N]``, by environment, oldest first.
        """
        assert self._state is not None
        runs, span, _ = self._state
        none = np.empty(0, np.int64)
        env_ids, positions = [none], [none]
        values: list[Integers] = []
        for run in runs:
            info = np.iinfo(run.values.dtype)
            bounds = max(low, int(info.min)), min(high, int(info.max))
            if bounds[0] > bounds[1]:
                continue
            lowest, highest = np.array(bounds, run.values.dtype)
            first = int(np.searchsorted(run.values, lowest, "left"))
            stop = int(np.searchsorted(run.values, highest, "right"))
            alive = run.positions[first:stop] >= span.first[run.env_ids[first:stop]]
            env_ids.append(run.env_ids[first:stop][alive].astype(np.int64))
            positions.append(run.positions[first:stop][alive])
            values.append(run.values[first:stop][alive])
        ids, steps = np.concatenate(env_ids), np.concatenate(positions)
        order = np.lexsort((steps, ids))
        numbers = np.concatenate(values) if values else none
        return ids[order], steps[order], numbers[order]


def _within(values: Integers, dtype: np.dtype[Any]) -> tuple[Integers, Bools]:
    """Values as a dtype, and which of them it holds."""
    info = np.iinfo(dtype)
    # Compared as Python's integers, as no dtype holds int64 and uint64.
    low, high = int(info.min), int(info.max)
    own = np.iinfo(values.dtype)
    inside = np.ones(len(values), bool)
    if own.min < low:
        inside &= values >= low
    if own.max > high:
        inside &= values <= high
    return np.where(inside, values, values.dtype.type(0)).astype(dtype), inside


def _merged(before: _Run, last: _Run) -> _Run:
    values = np.concatenate([before.values, last.values])
    # Of two sorted stretches a stable sort is one merge.
    order = np.argsort(values, kind="stable")
    return _Run(
        values[order],
        np.concatenate([before.env_ids, last.env_ids])[order],
        np.concatenate([before.positions, last.positions])[order],
    )


def _without_dead(runs: list[_Run], first: Ids, broken: Integers) -> tuple[list[_Run], Integers]:
    """Drop entries of rows that left, and note the values of which others are left."""
    kept = [run.positions >= first[run.env_ids] for run in runs]
    lost = [np.unique(run.values[~k]) for run, k in zip(runs, kept, strict=True)]
    runs = [run.only(k) for run, k in zip(runs, kept, strict=True)]
    if not runs:
        return runs, broken
    lost.append(broken.astype(runs[0].values.dtype))
    values = np.unique(np.concatenate(lost))
    still = np.zeros(len(values), bool)
    for run in runs:
        found = np.searchsorted(run.values, values, "left")
        found[found == len(run)] = 0
        if len(run):
            still |= run.values[found] == values
    return [run for run in runs if len(run)], values[still]
