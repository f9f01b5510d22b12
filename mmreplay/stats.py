"""Facts about a buffer's data, streamed in blocks: episodes, moments, histograms.

Memory is bounded by the block and the number of episodes, never by the dataset.
Final rows are no steps: they are left out everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes import BREAK, CUT, END, Episodes
from mmreplay.errors import StaleError
from mmreplay.schema import Field

BLOCK_NBYTES = 8 << 20
MAX_BLOCK_ROWS = 1 << 16

Array = NDArray[np.int64]
Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]
"""(steps read so far, steps to read)."""


@dataclass(frozen=True, slots=True)
class EpisodeTable:
    """The episodes alive, environment by environment, oldest first.

    Attributes:
        env_ids: int64 ``[N]``.
        begin: int64 ``[N]``, position of the first step alive.
        end: int64 ``[N]``, one past the last step.
        lengths: int64 ``[N]``, steps alive.
        returns: float64 ``[N]``, sums of the rewards alive; NaN without a scalar
            reward field.
        headless: bool ``[N]``, the first steps have left the ring.
        running: bool ``[N]``, no end was seen yet.
        broken: bool ``[N]``, broken off: no end was seen, and what follows was said
            not to go on with it (``on_resume="break"``).
    """

    env_ids: Array
    begin: Array
    end: Array
    lengths: Array
    returns: Floats
    headless: NDArray[np.bool_]
    running: NDArray[np.bool_]
    broken: NDArray[np.bool_]

    def __len__(self) -> int:
        """Episodes."""
        return len(self.env_ids)

    @property
    def whole(self) -> NDArray[np.bool_]:
        """Bool ``[N]``, from their first steps to their ends: returns are exact."""
        return ~(self.headless | self.running | self.broken)

    def to_dict(self) -> dict[str, NDArray[np.generic]]:
        """Return the columns by name, arrays ``[N]``, `whole` included.

        Pandas, polars and pyarrow make tables of it.

        Returns:
            The attributes in their order, then ``whole``. The arrays are the table's.

        Example:
            >>> import mmreplay as mr
            >>> fields = {"reward": mr.Field((), "float32")}
            >>> fields["terminated"] = mr.Field((), "bool")
            >>> buffer = mr.ReplayBuffer.create(
            ...     None, mr.Schema(fields), 8, engine="memory"
            ... )
            >>> for end in (False, True, False):
            ...     buffer.add(reward=1.0, terminated=end)
            >>> columns = mr.episode_table(buffer).to_dict()
            >>> columns["returns"].tolist(), columns["whole"].tolist()
            ([2.0, 1.0], [True, False])
        """
        columns = {name: getattr(self, name) for name in EpisodeTable.__slots__}
        return columns | {"whole": self.whole}

    def pick(self, which: NDArray[np.generic]) -> EpisodeTable:
        """Return some of the episodes.

        Args:
            which: bool ``[N]``, whether each is one of them; or int ``[M]``, their
                places in ``[0, N)``.
        """
        return EpisodeTable(
            *(getattr(self, name)[which] for name in EpisodeTable.__slots__)
        )

    def newest(self, count: int) -> EpisodeTable:
        """Return at most count whole episodes, the newest of each environment.

        Args:
            count: Episodes of each environment, at least 0.
        """
        found = []
        for env_id in np.unique(self.env_ids):
            mine = np.flatnonzero((self.env_ids == env_id) & self.whole)
            found.append(mine[max(0, len(mine) - count) :])
        return self.pick(np.concatenate(found) if found else np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of one field over all elements of all steps.

    Attributes:
        count: Finite elements.
        nonfinite: NaNs and infinities, which nothing else here counts.
        min: Smallest; an int for integer fields. NaN where count is 0.
        max: Largest.
        mean: Arithmetic mean.
        m2: Sum of squared distances from the mean.
    """

    count: int = 0
    nonfinite: int = 0
    min: float = math.nan
    max: float = math.nan
    mean: float = math.nan
    m2: float = 0.0

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.m2 / self.count) if self.count else math.nan

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both samples together.

        Chan, Golub and LeVeque (1979): no difference of large sums, so that a mean
        far from zero costs no precision.

        Args:
            other: Moments of the same field over other steps.
        """
        nonfinite = self.nonfinite + other.nonfinite
        if self.count == 0 or other.count == 0:
            return replace(other if self.count == 0 else self, nonfinite=nonfinite)
        count = self.count + other.count
        gap = other.mean - self.mean
        return Moments(
            count,
            nonfinite,
            min(self.min, other.min),
            max(self.max, other.max),
            self.mean + gap * other.count / count,
            self.m2 + other.m2 + gap * gap * self.count * other.count / count,
        )


def moments_of(values: NDArray[np.generic]) -> Moments:
    """Moments of one array, any shape."""
    flat = values.ravel()
    if flat.dtype.kind == "f":
        flat = flat[np.isfinite(flat)]
    if flat.size == 0:
        return Moments(nonfinite=values.size)
    wide = flat.astype(np.float64)
    mean = float(wide.mean())
    wide -= mean
    # As Python numbers: an int64 need not fit a float.
    least, most = flat.min().item(), flat.max().item()
    return Moments(
        flat.size, values.size - flat.size, least, most, mean, float(wide @ wide)
    )


def field_moments(
    buffer: ReplayBuffer,
    paths: tuple[str, ...] | None = None,
    progress: Progress | None = None,
) -> dict[str, Moments]:
    """Moments of fields over all steps alive.

    Args:
        buffer: Open in any mode.
        paths: Fields; all by default.
        progress: Called with (steps read, steps to read).
    """
    chosen = buffer.schema.paths if paths is None else paths
    counter = _Counter(progress, len(chosen) * len(buffer))
    found = {}
    for path in chosen:
        total = Moments()
        for values in blocks(buffer, path, counter):
            total = total.merge(moments_of(values))
        found[path] = total
    return found


def histogram(
    buffer: ReplayBuffer, path: str, bins: int, progress: Progress | None = None
) -> tuple[Array, Floats]:
    """Count a field's values, in two passes.

    Args:
        buffer: Open in any mode.
        path: The field; all its elements are counted, NaN and infinity left out.
        bins: At most so many. Integers get bins of whole width, one per value
            where they fit.
        progress: Called with (steps read, steps to read), in each pass.

    Returns:
        Counts int64 ``[N]`` and edges float64 ``[N + 1]``.
    """
    total = field_moments(buffer, (path,), progress)[path]
    edges = _edges(total, buffer.schema[path], bins)
    counts = np.zeros(len(edges) - 1, np.int64)
    counter = _Counter(progress, len(buffer))
    for values in blocks(buffer, path, counter):
        finite = values[np.isfinite(values)].astype(np.float64)
        counts += np.histogram(finite, edges)[0]
    return counts, edges


def _edges(total: Moments, field: Field, bins: int) -> Floats:
    if total.count == 0:
        return np.array([0.0, 1.0])
    if field.numpy.kind in "iub" and field.dtype != "bfloat16":
        width = -(-(int(total.max) - int(total.min) + 1) // bins)
        number = -(-(int(total.max) - int(total.min) + 1) // width)
        return float(total.min) - 0.5 + width * np.arange(number + 1.0)
    least, most = float(total.min), float(total.max)
    if least == most:
        half = max(0.5, abs(least) * 1e-6)
        return np.array([least - half, least + half])
    return np.linspace(least, most, bins + 1)


def episode_table(
    buffer: ReplayBuffer,
    progress: Progress | None = None,
    newest: int | None = None,
) -> EpisodeTable:
    """Returns and lengths of the episodes alive.

    Args:
        buffer: Open in any mode; of a live one, episodes that leave the ring
            meanwhile are left out or become headless.
        progress: Called with (steps read, steps to read).
        newest: Read rewards of the newest so many whole episodes of each
            environment only, and leave out the others.
    """
    index = buffer.episodes
    parts = [_columns(buffer, index.episodes(e)) for e in range(buffer.num_envs)]
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    table = EpisodeTable(*joined)
    if newest is not None:
        table = table.newest(newest)
    reward = buffer.schema.role("reward")
    if reward is None or _elements(buffer.schema.fields.get(reward)) != 1:
        return table
    return _with_returns(buffer, reward, table, progress)


def _columns(buffer: ReplayBuffer, found: Episodes) -> tuple[NDArray[np.generic], ...]:
    count = len(found.begin)
    return (
        np.full(count, found.env_id, np.int64), found.begin, found.end, found.lengths,
        np.full(count, np.nan), found.headless, found.running,
        _broken(buffer, found),
    )  # fmt: skip


def _broken(buffer: ReplayBuffer, found: Episodes) -> NDArray[np.bool_]:
    """Which episodes end because another begins, and not by a step that says so."""
    flags, broken = buffer.reading.view.flags, np.zeros(len(found.begin), bool)
    which = np.flatnonzero(~found.running)
    env_ids, end = np.full(len(which), found.env_id), found.end[which]
    endless = (flags(env_ids, end - 1) & END) == 0
    # A row follows those: a final one, or the first of another episode.
    after = flags(env_ids[endless], end[endless])
    broken[which[endless]] = (after & (BREAK | CUT)) == BREAK
    return broken


def _elements(field: Field | None) -> int:
    return 0 if field is None else math.prod(field.shape)


def _with_returns(
    buffer: ReplayBuffer, reward: str, table: EpisodeTable, progress: Progress | None
) -> EpisodeTable:
    """Sum rewards episode by episode, and count the steps that were really read."""
    counter = _Counter(progress, int(table.lengths.sum()))
    returns, lengths = np.zeros(len(table)), np.zeros(len(table), np.int64)
    for env_id in np.unique(table.env_ids).tolist():
        mine = np.flatnonzero(table.env_ids == env_id)
        begin, end = table.begin[mine], table.end[mine]
        for which, values in _pieces(buffer, reward, env_id, begin, end, counter):
            if len(which):
                some = mine[which[0] : which[-1] + 1]
                numbers = which - which[0]
                flat = values.reshape(len(which)).astype(np.float64)
                returns[some] += np.bincount(numbers, flat)
                lengths[some] += np.bincount(numbers)
    kept = lengths > 0
    return replace(
        table,
        returns=returns,
        begin=np.maximum(table.begin, table.end - lengths),
        lengths=lengths,
        headless=table.headless | (lengths < table.lengths),
    ).pick(kept)


@dataclass(slots=True)
class _Counter:
    """Steps read, told to whoever waits."""

    progress: Progress | None
    total: int
    done: int = 0

    def add(self, steps: int) -> None:
        self.done += steps
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)


def blocks(
    buffer: ReplayBuffer, path: str, counter: _Counter | None = None
) -> Iterator[NDArray[np.generic]]:
    """Read one field of all steps alive, in blocks, environment by environment.

    Yields:
        Values ``[B, *shape]``, bfloat16 as float32. Of a live buffer, rows given up
        meanwhile are left out.
    """
    counter = counter or _Counter(None, 0)
    index = buffer.episodes
    for env_id in range(buffer.num_envs):
        found = index.episodes(env_id)
        for _, values in _pieces(buffer, path, env_id, found.begin, found.end, counter):
            yield values


def _pieces(
    buffer: ReplayBuffer, path: str, env_id: int, begin: Array, end: Array,
    counter: _Counter,
) -> Iterator[tuple[Array, NDArray[np.generic]]]:  # fmt: skip
    """Read one field of some episodes of one environment, in blocks.

    Yields:
        int64 ``[B]``, the episode of each step, and values ``[B, *shape]``.
    """
    field = buffer.schema[path]
    rows = max(1, min(MAX_BLOCK_ROWS, BLOCK_NBYTES // field.nbytes))
    first, stop = (int(begin[0]), int(end[-1])) if len(begin) else (0, 0)
    while first < stop:
        positions = np.arange(first, min(first + rows, stop))
        try:
            values = buffer.get_field(path, env_id, positions)
        except StaleError:
            # A writer overwrote them while we read: go on with the oldest alive.
            first = max(first + 1, int(buffer.span.first[env_id]))
            continue
        first += len(positions)
        which = np.searchsorted(begin, positions, side="right") - 1
        steps = positions < end[which]
        counter.add(int(steps.sum()))
        yield which[steps], _wide(values[steps], field)


def _wide(values: NDArray[np.generic], field: Field) -> NDArray[np.generic]:
    """Values that numpy can reckon with: bfloat16 is stored as its bits."""
    if field.dtype != "bfloat16":
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)
