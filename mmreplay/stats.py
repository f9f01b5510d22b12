"""Facts about a buffer's data, streamed in blocks: episodes, moments, histograms.

Memory is bounded by the block and the number of episodes, never by the dataset.
Final rows are no steps: they are left out everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer
from mmreplay.buffer.replay_buffer import ReplayBuffer, check_buffer
from mmreplay.episodes import BREAK, CUT, END, EnvironmentEpisodes
from mmreplay.errors import StaleError, called
from mmreplay.schema import Field
from mmreplay.schema.convert import widen

BLOCK_NBYTES = 8 << 20
MAX_BLOCK_ROWS = 1 << 16
CACHED = 1 << 15
"""Elements that are processed at once."""
MAX_WHOLE = 1 << 51
"""Half a number from smaller ones is a float64 as well."""

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
        number: int64 ``[N]``, the number that `mr.load` and `mr.export` select each by.
        source: int64 ``[N]``, the place among several sources, from 0.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> table = mr.episode_table(buffer)
        >>> whole = table.pick(table.whole)
        >>> bool((whole.returns == whole.lengths).all())  # each step is rewarded by 1
        True
    """

    env_ids: Array
    begin: Array
    end: Array
    lengths: Array
    returns: Floats
    headless: NDArray[np.bool_]
    running: NDArray[np.bool_]
    broken: NDArray[np.bool_]
    number: Array = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    source: Array = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)

    def __setstate__(self, state: list[Any]) -> None:
        # One that was pickled before episodes had numbers and sources has none.
        none = state[0][:0]
        for name, value in zip(EpisodeTable.__slots__, [*state, none, none], strict=False):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        count = len(self.env_ids)
        if len(self.number) != count:
            object.__setattr__(self, "number", np.arange(count))
        if len(self.source) != count:
            object.__setattr__(self, "source", np.zeros(count, np.int64))

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
        return EpisodeTable(*(getattr(self, name)[which] for name in EpisodeTable.__slots__))

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
        whole: All of the finite elements are whole numbers.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> reward = mr.field_moments(buffer, ("reward",))["reward"]
        >>> reward.mean, reward.std
        (1.0, 0.0)
    """

    count: int = 0
    nonfinite: int = 0
    min: float = math.nan
    max: float = math.nan
    mean: float = math.nan
    m2: float = 0.0
    whole: bool = False

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
            self.whole and other.whole,
        )


def numbers_of(values: Any, field: Field) -> NDArray[Any]:
    """Return the numbers of stored values whose moments are taken, and counted.

    Args:
        values: Array of a field, or `Ragged` where it varies.
        field: Of the values.

    Returns:
        All elements, bfloat16 as float32; of text and bytes the length of each value.
    """
    numbers = field.rules.numbers(field, values)
    return np.asarray(values.lengths) if numbers is None else numbers


def moments_of(values: NDArray[np.generic]) -> Moments:
    """Moments of one array, any shape."""
    flat = values.ravel()
    if flat.size == 0:
        return Moments()
    if flat.dtype.itemsize == 1:
        # Exact, from how often each of 256 values occurs.
        offset = 128 if flat.dtype.kind == "i" else 0
        codes = flat.view(np.uint8) ^ np.uint8(offset)
        occurs = np.zeros(256, np.int64)
        for first in range(0, flat.size, CACHED):
            occurs += np.bincount(codes[first : first + CACHED], minlength=256)
        kinds = np.flatnonzero(occurs)
        count, numbers = occurs[kinds].astype(np.float64), kinds - offset
        mean = float(count @ numbers) / flat.size
        least, most = numbers[0].item(), numbers[-1].item()
        if flat.dtype.kind == "b":
            least, most = bool(least), bool(most)
        m2 = float(count @ (numbers - mean) ** 2)
        return Moments(flat.size, 0, least, most, mean, m2, whole=True)
    total = Moments()
    # So few that what is made of them stays in the processor's cache.
    for first in range(0, flat.size, CACHED):
        piece = flat[first : first + CACHED]
        least, most, nonfinite = piece.min(), piece.max(), 0
        if not (np.isfinite(least) and np.isfinite(most)):
            finite = piece[np.isfinite(piece)]
            nonfinite = piece.size - finite.size
            if finite.size == 0:
                total = total.merge(Moments(nonfinite=nonfinite))
                continue
            piece, least, most = finite, finite.min(), finite.max()
        wide = piece.astype(np.float64)
        # Sums beyond what float64 holds are infinite, and shown as such.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(wide.mean())
            wide -= mean
            # Not by BLAS, whose threads cost more than they gain here. Limits as
            # Python numbers: an int64 need not fit a float.
            m2 = float(np.einsum("i,i", wide, wide))
        # Of most that are not, the first few show it.
        whole = flat.dtype.kind != "f" or all(
            bool((some == np.floor(some)).all()) for some in (piece[:64], piece)
        )
        found = Moments(piece.size, nonfinite, least.item(), most.item(), mean, m2, whole)
        total = total.merge(found)
    return total


def field_moments(
    buffer: ReplayBuffer,
    paths: tuple[str, ...] | str | None = None,
    progress: Progress | None = None,
) -> dict[str, Moments]:
    """Moments of fields over all steps alive.

    Of a field that varies these are of the items of all values; of text and bytes of
    their lengths in bytes.

    Args:
        buffer: Open in any mode.
        paths: A field or several; all by default.
        progress: Called with (steps read, steps to read).

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> moments = mr.field_moments(buffer, ("reward",))
        >>> moments["reward"].max
        1.0
    """
    check_buffer(buffer)
    given = (paths,) if isinstance(paths, str) else paths
    chosen = buffer.schema.paths if given is None else tuple(given)
    return _scan(buffer, _episodes(buffer), chosen, None, progress)[0]


def summarize(
    buffer: ReplayBuffer, paths: tuple[str, ...] | None = None, progress: Progress | None = None
) -> tuple[dict[str, Moments], EpisodeTable]:
    """Return what `field_moments` and `episode_table` do, and read each row once.

    Args:
        buffer: Open in any mode.
        paths: Fields; all by default.
        progress: Called with (steps read, steps to read).
    """
    check_buffer(buffer)
    chosen = buffer.schema.paths if paths is None else tuple(paths)
    return _scan(buffer, _episodes(buffer), chosen, reward_field(buffer), progress)


def histogram(
    buffer: ReplayBuffer, path: str, bins: int, progress: Progress | None = None
) -> tuple[Array, Floats]:
    """Count a field's values, in two passes.

    Args:
        buffer: Open in any mode.
        path: The field; all its elements are counted, NaN and infinity left out. A
            field that varies counts the items of all values; text and bytes count by
            their lengths in bytes.
        bins: At most so many. Whole numbers, in a float field too, get bins of whole
            width, one per value where they fit.
        progress: Called with (steps read, steps to read), in each pass.

    Returns:
        Counts int64 ``[N]`` and edges float64 ``[N + 1]``.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> counts, edges = mr.histogram(buffer, "action", bins=10)
        >>> edges
        array([-0.5,  0.5,  1.5])
    """
    bins = integer("bins", bins, 1, "The edges are chosen by the values.")
    moments = field_moments(buffer, (path,), progress)
    return histograms(buffer, moments, bins, progress)[path]


def histograms(
    buffer: ReplayBuffer, moments: dict[str, Moments], bins: int, progress: Progress | None = None
) -> dict[str, tuple[Array, Floats]]:
    """Count the values of fields whose moments are known, in one pass.

    Args:
        buffer: Open in any mode.
        moments: As `field_moments` gives them. Values beyond their limits, of rows
            that came since, are left out.
        bins: See `histogram`.
        progress: Called with (steps read, steps to read).

    Returns:
        By field what `histogram` returns.
    """
    schema, paths = buffer.schema.drawn, tuple(moments)
    edges = {path: edges_of(moments[path], schema[path], bins) for path in paths}
    counts = {path: np.zeros(len(edges[path]) - 1, np.int64) for path in paths}
    table, counter = _episodes(buffer), _Counter(progress, len(buffer))
    for _, columns in _all_blocks(buffer, paths, table, counter):
        for path, values in columns.items():
            flat = numbers_of(values, schema[path]).ravel()
            for first in range(0, flat.size, CACHED):
                piece = flat[first : first + CACHED]
                counts[path] += count_values(piece, moments[path], edges[path])
    return {path: (counts[path], edges[path]) for path in paths}


def count_values(values: NDArray[Any], total: Moments, edges: Floats) -> Array:
    """Count the values of one array between neighbouring edges.

    Args:
        values: ``[N]``; those beyond the limits of total are left out.
        total: Moments that the edges were made of.
        edges: float64 ``[M + 1]``, as `edges_of` returns them.

    Returns:
        int64 ``[M]``.
    """
    if total.count == 0:
        return np.zeros(len(edges) - 1, np.int64)
    bins, least, most = len(edges) - 1, total.min, total.max
    if values.dtype.kind in "iub" and int(most) - int(least) < 1 << 62:
        # The width that `edges_of` uses, whose floats may have lost the last digits.
        width = -(-(int(most) - int(least) + 1) // bins)
        inside = values
        if values.min() < least or values.max() > most:
            inside = values[(values >= least) & (values <= most)]
        wrapping = inside.astype(np.uint64) - np.uint64(int(least) % (1 << 64))
        places = wrapping.astype(np.int64)
        return np.bincount(places if width == 1 else places // width, minlength=bins)
    finite = values
    if not (np.isfinite(values.min()) and np.isfinite(values.max())):
        finite = values[np.isfinite(values)]
    wide = finite.astype(np.float64)
    if values.dtype.kind in "iub":
        # The edges of so wide a range are rounded.
        wide = wide[(values >= least) & (values <= most)].clip(edges[0], edges[-1])
    if math.isfinite(edges[-1] - edges[0]) and (edges[1:] > edges[:-1]).all():
        # Bins of one width take no sorting.
        return np.histogram(wide, bins, (float(edges[0]), float(edges[-1])))[0]
    return np.histogram(wide, edges)[0]


def edges_of(total: Moments, field: Field, bins: int) -> Floats:
    """Edges of the bins that `histogram` counts a field's values in.

    Args:
        total: Moments of the values.
        field: Of the values. Whole numbers get bins of whole width in a float field
            too: bins of 2 numbers beside bins of 3 would look like a pattern of the
            values.
        bins: At most so many.

    Returns:
        float64 ``[N + 1]``, growing.
    """
    if total.count == 0:
        return np.array([0.0, 1.0])
    if field.rules.integers(field) or (
        total.whole and max(abs(total.min), abs(total.max)) < MAX_WHOLE
    ):
        # Each bin holds equally many numbers; the last may reach beyond the largest.
        first, count = int(total.min), int(total.max) - int(total.min) + 1
        width = -(-count // bins)
        return float(first) - 0.5 + width * np.arange(-(-count // width) + 1.0)
    least, most = float(total.min), float(total.max)
    if least == most:
        half = max(0.5, abs(least) * 1e-6)
        return np.array([least - half, least + half])
    return np.linspace(least, most, bins + 1)


def episode_table(
    buffer: ReplayBuffer, progress: Progress | None = None, newest: int | None = None
) -> EpisodeTable:
    """Returns and lengths of the episodes alive.

    `mr.episode_table` is that of `mmreplay.convert`, which takes other sources too.

    Args:
        buffer: Open in any mode; of a live one, episodes that leave the ring
            during the call are left out or become headless.
        progress: Called with (steps read, steps to read).
        newest: Read rewards of the newest so many whole episodes of each
            environment only, and leave out the others.
    """
    check_buffer(buffer)
    table = _episodes(buffer)
    if newest is not None:
        table = table.newest(newest)
    return read_returns(buffer, table, progress)


def read_returns(
    buffer: ReplayBuffer, table: EpisodeTable, progress: Progress | None = None
) -> EpisodeTable:
    """Read the rewards of some episodes, and return the table with their returns.

    Args:
        buffer: Open in any mode.
        table: Some episodes of it, sorted by environment and position.
        progress: Called with (steps read, steps to read).

    Returns:
        Episodes that left the ring are left out; those of which some steps left it are
        headless. Without a scalar reward field the table itself.
    """
    reward = reward_field(buffer)
    if reward is None:
        return table
    return _scan(buffer, table, (), reward, progress)[1]


def reward_field(buffer: ReplayBuffer) -> str | None:
    """The field whose sums are returns, if there is a scalar one."""
    reward = buffer.schema.role("reward")
    field = None if reward is None else buffer.schema.fields.get(reward)
    return None if field is None or math.prod(field.shape) != 1 else reward


def _episodes(buffer: ReplayBuffer) -> EpisodeTable:
    """The episodes alive, without their returns."""
    index = buffer.episodes
    parts = [_columns(buffer, index.episodes(e)) for e in range(buffer.num_envs)]
    return EpisodeTable(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _columns(
    buffer: ReplayBuffer, episodes: EnvironmentEpisodes
) -> tuple[NDArray[np.generic], ...]:
    count = len(episodes.begin)
    return (
        np.full(count, episodes.env_id, np.int64),
        episodes.begin,
        episodes.end,
        episodes.lengths,
        np.full(count, np.nan),
        episodes.headless,
        episodes.running,
        _broken(buffer, episodes),
    )


def _broken(buffer: ReplayBuffer, episodes: EnvironmentEpisodes) -> NDArray[np.bool_]:
    """Which episodes end because another begins, and not by a step that says so."""
    flags, broken = buffer.view.flags, np.zeros(len(episodes.begin), bool)
    which = np.flatnonzero(~episodes.running)
    env_ids, end = np.full(len(which), episodes.env_id), episodes.end[which]
    endless = (flags(env_ids, end - 1) & END) == 0
    # A row follows those: a final one, or the first of another episode.
    after = flags(env_ids[endless], end[endless])
    broken[which[endless]] = (after & (BREAK | CUT)) == BREAK
    return broken


def _scan(
    buffer: ReplayBuffer,
    table: EpisodeTable,
    paths: tuple[str, ...],
    reward: str | None,
    progress: Progress | None,
) -> tuple[dict[str, Moments], EpisodeTable]:
    """Read the steps of some episodes once: moments of fields, sums of rewards.

    Args:
        buffer: Open in any mode.
        table: The episodes.
        paths: Fields to take moments of.
        reward: The field whose sums are returns; None for no returns.
        progress: Called with (steps read, steps to read).

    Returns:
        Moments by field, and the table with returns and the lengths really read.
    """
    counter = _Counter(progress, int(table.lengths.sum()))
    moments = dict.fromkeys(paths, Moments())
    returns, lengths = np.zeros(len(table)), np.zeros(len(table), np.int64)
    read = paths if reward is None or reward in paths else (*paths, reward)
    for which, columns in _all_blocks(buffer, read, table, counter):
        for path in paths:
            values = numbers_of(columns[path], buffer.schema.drawn[path])
            moments[path] = moments[path].merge(moments_of(values))
        if reward is not None and len(which):
            some = slice(which[0], which[-1] + 1)
            numbers = which - which[0]
            rewards = widen(columns[reward], buffer.schema[reward])
            flat = rewards.reshape(len(which)).astype(np.float64)
            every = np.arange(len(returns[some]))
            # Seeded with the sums so far, one number is added after another.
            returns[some] = np.bincount(
                np.concatenate([every, numbers]), np.concatenate([returns[some], flat])
            )
            lengths[some] += np.bincount(numbers)
    if reward is None:
        return moments, table
    kept = lengths > 0
    known = replace(
        table,
        returns=returns,
        begin=np.maximum(table.begin, table.end - lengths),
        lengths=lengths,
        headless=table.headless | (lengths < table.lengths),
    ).pick(kept)
    return moments, known


@dataclass(slots=True)
class _Counter:
    """Counts the steps read, and reports them to a progress function."""

    progress: Progress | None
    total: int
    done: int = 0

    def add(self, steps: int) -> None:
        self.done += steps
        if self.progress is not None:
            done = min(self.done, self.total)
            called("progress", self.progress, done, self.total)


def _all_blocks(
    buffer: ReplayBuffer, paths: tuple[str, ...], table: EpisodeTable, counter: _Counter
) -> Iterator[tuple[Array, dict[str, NDArray[np.generic]]]]:
    """Read some fields of a table's episodes, in blocks, environment by environment.

    Rows that a writer overwrites during the call are left out.

    Yields:
        int64 ``[B]``, the number in the table of each step's episode, and values
        ``[B, *shape]`` by path, or `Ragged`, as they are stored.
    """
    edges = np.searchsorted(table.env_ids, np.arange(buffer.num_envs + 1))
    for env_id, (low, high) in enumerate(pairwise(edges.tolist())):
        begin, end = table.begin[low:high], table.end[low:high]
        for which, columns in _blocks(buffer, paths, env_id, begin, end, counter):
            yield which + low, columns


def _blocks(
    buffer: ReplayBuffer,
    paths: tuple[str, ...],
    env_id: int,
    begin: Array,
    end: Array,
    counter: _Counter,
) -> Iterator[tuple[Array, dict[str, NDArray[np.generic]]]]:
    """Read some fields of some episodes of one environment, in blocks.

    Yields:
        int64 ``[B]``, the episode of each step, and values ``[B, *shape]`` by path, or
        `Ragged`, as they are stored.
    """
    fields = {path: buffer.schema.drawn[path] for path in paths}
    row_nbytes = max(1, sum(field.nbytes for field in fields.values()))
    rows = max(1, min(MAX_BLOCK_ROWS, BLOCK_NBYTES // row_nbytes))
    first, last = (int(begin[0]), int(end[-1])) if len(begin) else (0, 0)
    while first < last:
        stop = min(first + rows, last)
        # Episodes with a step in the block, and the stretch of it that each has.
        low = int(np.searchsorted(end, first, side="right"))
        high = int(np.searchsorted(begin, stop, side="left"))
        starts, ends = begin[low:high].clip(first), end[low:high].clip(None, stop)
        which = np.repeat(np.arange(low, high), ends - starts)
        try:
            columns = buffer.get_fields(paths, env_id, np.arange(first, stop))
        except StaleError:
            # A writer overwrote them while we read: go on with the oldest alive.
            first = max(first + 1, int(buffer.span.first[env_id]))
            continue
        if len(which) < stop - first:
            # Between episodes lie final rows, or episodes that were not asked for.
            between = np.concatenate([[first], ends]), np.concatenate([starts, [stop]])
            lengths = np.zeros(2 * (high - low) + 1, np.int64)
            lengths[::2], lengths[1::2] = between[1] - between[0], ends - starts
            steps = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
            columns = {path: values[steps] for path, values in columns.items()}
        first = stop
        counter.add(len(which))
        yield which, columns
