"""The episodes of a buffer: a table of all of them, and one with its rewards.

The table has narrow columns, of 22 bytes an episode, which are sorted, filtered and
counted. Returns are read by a thread: the newest ones first, so that the overview has
them at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes import BREAK, CUT, FINAL, TERMINATED, TRUNCATED
from mmreplay.errors import StaleError
from mmreplay.page import faults
from mmreplay.page.requests import NOT_IN_RING, UNREADABLE, Query, Refusal
from mmreplay.page.rows import MAX_TRIES, read_left
from mmreplay.page.sample import Histogram, bin_values
from mmreplay.page.shown import BackgroundReader, SharedView, ShownBuffer, rows_version, version_of
from mmreplay.schema import Field
from mmreplay.schema.convert import widen
from mmreplay.stats import EpisodeTable, read_returns, reward_field

KINDS = ("terminated", "truncated", "both", "broken off", "running")
UNFINISHED = "unfinished"
"""What a running episode is called where no writer is at work."""
KIND_TERMINATED, KIND_TRUNCATED, KIND_BOTH, KIND_BROKEN, KIND_RUNNING = range(5)
AT_ONCE_STEPS = 1 << 18
"""So many rewards are read within a request."""
SLICE_STEPS = 1 << 21
"""So many rewards are read at a time by the thread: about 0.1 s."""
CHUNK = 1 << 17
"""Episodes whose flags are read at a time."""
REFRESH_S, PATIENCE = 1.0, 4
"""Episodes are read again after a second, or four times as long as it took to."""
MAX_LIMIT = 500
MAX_ORDERS = 2
BINS = 48
SORTS = ("age", "length", "return", "env", "begin", "end")
LISTED_REWARDS, MAX_LISTED_REWARDS = 2000, 20_000
"""Steps of an episode with a reward other than 0 that are listed; in a saved page."""
REWARD_ROWS, MAX_EPISODE_ROWS = 1 << 20, 1 << 24
"""Rewards of an episode that are read at a time, and at all: of a longer one no return
is computed, and later rewards are not listed."""

Ids = NDArray[np.int64]


@dataclass(slots=True)
class EpisodeColumns:
    """The episodes of a buffer at one version, environment by environment.

    Attributes:
        version: Of the buffer.
        rows: See `rows_version`; of another one, equal positions are other rows.
        env_ids: int32 ``[N]``.
        begin: int64 ``[N]``, position of the first step alive.
        lengths: int32 ``[N]``, steps alive; int64 in a ring of 2^31 rows or more.
        returns: float32 ``[N]``, sums of rewards; NaN where not known.
        kinds: uint8 ``[N]``, index into `KINDS`.
        missing_start: bool ``[N]``, the first steps have left the ring.
        known: bool ``[N]``, the return was read, or there is none to read.
        heads: int64 ``[E]``.
    """

    version: str
    rows: str
    env_ids: NDArray[np.int32]
    begin: Ids
    lengths: NDArray[Any]
    returns: NDArray[np.float32]
    kinds: NDArray[np.uint8]
    missing_start: NDArray[np.bool_]
    known: NDArray[np.bool_]
    heads: Ids

    def __len__(self) -> int:
        """Episodes."""
        return len(self.env_ids)

    @property
    def done(self) -> float:
        """Share of the returns that are known."""
        return float(self.known.mean()) if len(self) else 1.0

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Bool ``[N]``, from their first steps to their ends: returns are exact."""
        return ~self.missing_start & (self.kinds < KIND_BROKEN)

    def ends(self) -> dict[str, int]:
        """Episodes by how they end."""
        counts = np.bincount(self.kinds, minlength=len(KINDS)).tolist()
        return dict(zip(KINDS, counts, strict=True))

    def ages(self, rows: NDArray[Any]) -> Ids:
        """Steps since the ends of some episodes, int64 ``[M]``."""
        ends = self.begin[rows] + self.lengths[rows]
        ages: Ids = self.heads[self.env_ids[rows]] - ends
        return ages

    def stops(self, rows: NDArray[Any]) -> Ids:
        """Position past the last row of some episodes, final rows included."""
        following = np.minimum(rows + 1, len(self) - 1)
        same = (self.env_ids[following] == self.env_ids[rows]) & (following > rows)
        stops: Ids = np.where(same, self.begin[following], self.heads[self.env_ids[rows]])
        return stops

    def newest(self, count: int) -> Ids:
        """Rows of the newest whole episodes, at most about count, int64 ``[M]``.

        Each environment gives as many.
        """
        edges = np.searchsorted(self.env_ids, np.arange(len(self.heads) + 1))
        each = max(1, count // max(1, len(self.heads)))
        complete = np.flatnonzero(self.complete)
        stops = np.searchsorted(complete, edges[1:])
        firsts = np.maximum(np.searchsorted(complete, edges[:-1]), stops - each)
        counts = stops - firsts
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Ids = complete[np.repeat(firsts, counts) + offsets]
        return rows

    def read(self, buffer: ReplayBuffer, rows: Ids) -> None:
        """Read the returns of some episodes, int64 ``[M]``, growing."""
        if reward_field(buffer) is None:
            self.known[rows] = True
            return
        env_ids, begin = self.env_ids[rows].astype(np.int64), self.begin[rows]
        lengths = self.lengths[rows].astype(np.int64)
        none = np.zeros(len(rows), bool)
        table = EpisodeTable(
            env_ids, begin, begin + lengths, lengths, np.zeros(len(rows)), none, none, none
        )
        read = read_returns(buffer, table)
        # Episodes overwritten since are missing: ends say which.
        wanted = np.arange(len(rows))
        if len(read) < len(rows):
            ends = {
                key: number
                for number, key in enumerate(zip(env_ids.tolist(), table.end.tolist(), strict=True))
            }
            pairs = zip(read.env_ids.tolist(), read.end.tolist(), strict=True)
            wanted = np.array([ends[pair] for pair in pairs], np.int64)
        complete = read.lengths == lengths[wanted]
        with np.errstate(over="ignore"):
            returns = np.where(complete, read.returns, np.nan).astype(np.float32)
        self.returns[rows[wanted]] = returns
        self.known[rows] = True

    def unknown_slice(self) -> Ids:
        """Neighbouring episodes whose returns are to be read next, the newest first."""
        unknown = np.flatnonzero(~self.known)
        if not len(unknown):
            return unknown
        steps = np.cumsum(self.lengths[unknown[::-1]].astype(np.int64))
        count = max(1, int(np.searchsorted(steps, SLICE_STEPS)))
        return unknown[len(unknown) - count :]


def read_columns(buffer: ReplayBuffer) -> EpisodeColumns:
    """Read all but the returns, from the index and the flags of last rows."""
    view = buffer.view
    with view.lock:
        index, version = view.index, version_of(buffer)
        version_of_rows = rows_version(buffer)
        span = view.span
        parts = deque(index.episodes(env_id) for env_id in range(len(span.stop)))
    count = sum(len(part.begin) for part in parts)
    wide = view.home.ring.slots >= 1 << 31
    env_ids = np.empty(count, np.int32)
    begin = np.empty(count, np.int64)
    lengths = np.empty(count, np.int64 if wide else np.int32)
    kinds = np.empty(count, np.uint8)
    missing_start = np.empty(count, bool)
    running = np.empty(count, bool)
    first = 0
    while parts:
        part = parts.popleft()
        rows = slice(first, first + len(part.begin))
        env_ids[rows], begin[rows] = part.env_id, part.begin
        lengths[rows] = part.lengths
        missing_start[rows], running[rows] = part.headless, part.running
        first = rows.stop
    for first in range(0, count, CHUNK):
        rows = slice(first, min(first + CHUNK, count))
        last = begin[rows] + lengths[rows].astype(np.int64) - 1
        kinds[rows] = end_kinds(view, env_ids[rows].astype(np.int64), last, running[rows])
    # Of ends that were overwritten since, the flags are those of other rows.
    left = begin + lengths.astype(np.int64) > buffer.span.first[env_ids]
    if not left.all():
        env_ids, begin, lengths = env_ids[left], begin[left], lengths[left]
        kinds, missing_start = kinds[left], missing_start[left]
    known = np.full(len(env_ids), reward_field(buffer) is None)
    returns = np.full(len(env_ids), np.nan, np.float32)
    return EpisodeColumns(
        version,
        version_of_rows,
        env_ids,
        begin,
        lengths,
        returns,
        kinds,
        missing_start,
        known,
        span.stop,
    )


def end_kinds(
    view: SharedView, env_ids: Ids, last: Ids, running: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """Return how episodes end, from the flags of their last rows and of those after.

    Args:
        view: Of the buffer.
        env_ids: int64 ``[N]``.
        last: int64 ``[N]``, position of the last step.
        running: bool ``[N]``, no end was seen yet.

    Returns:
        uint8 ``[N]``, indices into `KINDS`.
    """
    flags = view.flags(env_ids, last)
    terminated, truncated = (flags & TERMINATED) != 0, (flags & TRUNCATED) != 0
    kinds = np.full(len(last), KIND_BROKEN, np.uint8)
    kinds[terminated] = KIND_TERMINATED
    kinds[truncated] = KIND_TRUNCATED
    kinds[terminated & truncated] = KIND_BOTH
    kinds[running] = KIND_RUNNING
    endless = np.flatnonzero(kinds == KIND_BROKEN)
    if len(endless):
        # A writer that came back may say that it truncated the episode.
        after = view.flags(env_ids[endless], last[endless] + 1)
        kinds[endless[(after & (BREAK | CUT)) != BREAK]] = KIND_TRUNCATED
    return kinds


class EpisodeList:
    """The episodes of one shown buffer, kept up to date while it grows."""

    def __init__(self, shown: ShownBuffer, background: BackgroundReader) -> None:
        """Make an empty list.

        Args:
            shown: The buffer.
            background: Reads returns that take long.
        """
        self._shown = shown
        self._background = background
        self._lock = threading.Lock()
        self._columns: EpisodeColumns | None = None
        self._made = self._seconds = 0.0
        self._orders: OrderedDict[object, NDArray[np.int32]] = OrderedDict()

    def columns(self) -> EpisodeColumns:
        """Return the episodes as of now, or as of a second ago.

        Of a buffer whose folder was removed, the last ones are returned.

        Raises:
            Refusal: The buffer cannot be read.
        """
        before = faults.count()
        try:
            buffer = self._shown.buffer()
        except Refusal:
            with self._lock:
                if self._columns is None or not self._shown.removed:
                    raise
                # Returns that were not read will not be.
                self._columns.known[:] = True
                return self._columns
        version = version_of(buffer)
        with self._lock:
            former = self._columns
            begin = time.monotonic()
            young = begin - self._made < max(REFRESH_S, PATIENCE * self._seconds)
            if (
                former is not None
                and former.rows == rows_version(buffer)
                and (former.version == version or young)
            ):
                return former
            columns = read_columns(buffer)
            if faults.count() != before:
                raise Refusal(UNREADABLE, faults.TEXT)
            path = reward_field(buffer)
            mutable = path is not None and buffer.schema.drawn[path].mutable
            if former is not None and former.rows == columns.rows and not mutable:
                _carry_returns(former, columns)
            self._columns, self._made = columns, time.monotonic()
            self._seconds = self._made - begin
            self._orders.clear()
        return columns

    def with_returns(self) -> EpisodeColumns:
        """Return the episodes; returns that are not known yet are being read."""
        columns = self.columns()
        unknown = np.flatnonzero(~columns.known)
        if len(unknown):
            if int(columns.lengths[unknown].sum(dtype=np.int64)) <= AT_ONCE_STEPS:
                columns.read(self._shown.buffer(), unknown)
            else:
                self._background.submit(self, self._read_more)
        return columns

    def _read_more(self) -> bool:
        with self._lock:
            columns = self._columns
        if columns is None:
            return False
        rows = columns.unknown_slice()
        if len(rows):
            columns.read(self._shown.buffer(), rows)
        return not bool(columns.known.all())

    def newest(self, count: int) -> tuple[EpisodeColumns, Ids]:
        """Return the episodes, and rows of the newest whole ones with their returns.

        Args:
            count: About so many, of all environments.
        """
        columns = self.columns()
        rows = columns.newest(count)
        unknown = rows[~columns.known[rows]]
        if len(unknown):
            columns.read(self._shown.buffer(), unknown)
        return columns, rows

    def order(
        self, columns: EpisodeColumns, key: object, make: Callable[[], NDArray[Any]]
    ) -> NDArray[np.int32]:
        """Return the sorted, filtered rows of a query; the last two are kept."""
        full_key = (columns.version, columns.done, key)
        with self._lock:
            order = self._orders.get(full_key)
            if order is not None:
                self._orders.move_to_end(full_key)
                return order
        order = make().astype(np.int32)
        with self._lock:
            self._orders[full_key] = order
            while len(self._orders) > MAX_ORDERS:
                self._orders.popitem(last=False)
        return order


def _carry_returns(former: EpisodeColumns, columns: EpisodeColumns) -> None:
    """Copy the returns of episodes that are as they were at the former version."""
    num_envs = len(columns.heads)
    edges = np.searchsorted(columns.env_ids, np.arange(num_envs + 1)).tolist()
    before = np.searchsorted(former.env_ids, np.arange(num_envs + 1)).tolist()
    for env_id in range(num_envs):
        rows = slice(edges[env_id], edges[env_id + 1])
        old = slice(before[env_id], before[env_id + 1])
        if rows.start == rows.stop or old.start == old.stop:
            continue
        at = np.searchsorted(former.begin[old], columns.begin[rows])
        at = np.minimum(at, old.stop - old.start - 1) + old.start
        same = former.begin[at] == columns.begin[rows]
        same &= former.lengths[at] == columns.lengths[rows]
        same &= former.known[at]
        columns.returns[rows][same] = former.returns[at][same]
        columns.known[rows][same] = True


def answer_episodes(
    episodes: EpisodeList, columns: EpisodeColumns, query: Query, live: bool = True
) -> dict[str, Any]:
    """Return a page of the table, as JSON values.

    Args:
        episodes: Of the buffer; keeps orders of rows.
        columns: As the list returned them.
        query: ``sort``, ``desc``, ``env``, ``len``, ``ret``, ``end``, ``whole``,
            ``hist``, ``offset`` and ``limit``.
        live: A writer is at work.

    Returns:
        ``rows`` as `table_rows` returns them; ``total`` after the filters, ``all``,
        ``histogram``, ``written`` (rows of all environments at the time) and ``done``,
        the share of the returns that are known.

    Raises:
        Refusal: A parameter is out of bounds.
    """
    sort = query.choice("sort", SORTS, "age")
    descending = query.flag("desc", sort in ("length", "return"))
    env_id = query.integer("env", 0, (1 << 31) - 1, -1) if "env" in query else None
    lengths, returns = query.limits("len"), query.limits("ret")
    kind = query.choice("end", ("", *KINDS, UNFINISHED), "")
    kind = KINDS[KIND_RUNNING] if kind == UNFINISHED else kind
    whole = query.flag("whole")
    measure = query.choice("hist", ("return", "length"), "return")
    offset = query.integer("offset", 0, 1 << 40, 0)
    limit = query.integer("limit", 1, MAX_LIMIT, 100)
    done = columns.done

    def make_order() -> NDArray[Any]:
        keep = np.ones(len(columns), bool)
        if env_id is not None:
            keep &= columns.env_ids == env_id
        if lengths is not None:
            keep &= (columns.lengths >= lengths[0]) & (columns.lengths <= lengths[1])
        if returns is not None:
            low, high = _around(returns[0], -1), _around(returns[1], 1)
            keep &= (columns.returns >= low) & (columns.returns <= high)
        if kind:
            keep &= columns.kinds == KINDS.index(kind)
        if whole:
            keep &= columns.complete
        rows = np.flatnonzero(keep)
        if sort == "age":
            numbers: NDArray[Any] = columns.ages(rows)
        elif sort == "return":
            # What is not known or not finite comes last, in either order.
            numbers = columns.returns[rows]
            missing = -np.inf if descending else np.inf
            numbers = np.where(np.isnan(numbers), missing, numbers)
        else:
            names = {"length": "lengths", "env": "env_ids", "end": "kinds"}
            numbers = getattr(columns, names.get(sort, sort))[rows].astype(np.int64)
        order = np.argsort(-numbers if descending else numbers, kind="stable")
        return rows[order]

    key = (sort, descending, env_id, lengths, returns, kind, whole)
    order = episodes.order(columns, key, make_order)
    some = order[offset : offset + limit]
    return {
        "total": len(order),
        "all": len(columns),
        "written": int(columns.heads.sum()),
        "offset": offset,
        "rows": table_rows(columns, some, live),
        "done": done,
        "histogram": histogram_of_episodes(columns, measure).to_json(),
    }


def kind_words(live: bool) -> tuple[str, ...]:
    """Return the words for `KINDS`: without a writer no episode is running."""
    return KINDS if live else (*KINDS[:KIND_RUNNING], UNFINISHED)


def table_rows(columns: EpisodeColumns, some: NDArray[Any], live: bool = True) -> list[list[Any]]:
    """Return rows of the table of episodes.

    Args:
        columns: The episodes.
        some: int ``[M]``, which of them.
        live: A writer is at work.

    Returns:
        For each environment, begin, length, return, kind, missing_start, steps since
        the end, and one past the last row, a final row included.
    """
    words = kind_words(live)
    return [
        [env_id, begin, length, value, words[kind], missing, age, stop]
        for env_id, begin, length, value, kind, missing, age, stop in zip(
            columns.env_ids[some].tolist(),
            columns.begin[some].tolist(),
            columns.lengths[some].tolist(),
            columns.returns[some].tolist(),
            columns.kinds[some].tolist(),
            columns.missing_start[some].tolist(),
            columns.ages(some).tolist(),
            columns.stops(some).tolist(),
            strict=True,
        )
    ]


def _around(limit: float, side: int) -> float:
    """A limit in float32, so that a value that was shown lies within it."""
    if not math.isfinite(limit):
        return limit
    with np.errstate(over="ignore"):
        near = np.float32(limit)
        return float(np.nextafter(near, np.float32(side * np.inf)))


def histogram_of_episodes(columns: EpisodeColumns, measure: str) -> Histogram:
    """Count the returns or the lengths of all episodes.

    Args:
        columns: The episodes.
        measure: ``"return"`` or ``"length"``.
    """
    values = columns.returns if measure == "return" else columns.lengths
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return Histogram(np.zeros(0, np.int64), np.zeros(0))
    (histogram,) = bin_values([finite], Field((), "float64"), BINS)
    return histogram


def read_episode(
    buffer: ReplayBuffer, env_id: int, position: int, listed: int = LISTED_REWARDS
) -> dict[str, Any]:
    """Return the episode that holds a position, as JSON values.

    Args:
        buffer: Open in any mode.
        env_id: The environment.
        position: Of any of its steps, or of its final row.
        listed: Rewards other than 0 that are listed, at most.

    Returns:
        ``begin`` and ``end`` (one past the last step), ``kind``, ``missing_start``,
        ``previous`` and ``next`` (where the neighbours begin; None where there is
        none), ``number`` and ``count`` within the environment, ``return``,
        ``nonfinite`` and ``rewards``: ``count``, ``at`` and ``values`` of those that
        are not 0, ``at`` as steps within the episode.

    Raises:
        Refusal: The position is not in the buffer.
    """
    margin = 0
    for _ in range(MAX_TRIES):
        first = int(buffer.span.first[env_id])
        try:
            return _read_episode(buffer, env_id, position, listed, first + margin)
        except StaleError:
            # A writer overwrites its oldest steps: newer ones are left.
            margin = 2 * (margin + int(buffer.span.first[env_id]) - first)
    raise Refusal(NOT_IN_RING, _why_not_there(env_id, position, position + 1))


def _read_episode(
    buffer: ReplayBuffer, env_id: int, position: int, listed: int, oldest: int
) -> dict[str, Any]:
    """Return an episode from the position ``oldest`` on; see `read_episode`."""
    view = buffer.view
    with view.lock:
        index, span = view.index, view.span
        first, stop = max(oldest, int(span.first[env_id])), int(span.stop[env_id])
        if not first <= position < stop:
            raise Refusal(NOT_IN_RING, _why_not_there(env_id, position, first))
        episodes = index.episodes(env_id)
    if not len(episodes.begin):
        raise Refusal(NOT_IN_RING, f"No step of environment {env_id} is left.")
    number = max(0, int(np.searchsorted(episodes.begin, position, "right")) - 1)
    begin, end = int(episodes.begin[number]), int(episodes.end[number])
    missing_start = bool(episodes.headless[number]) or begin < first
    begin = min(max(begin, first), end)
    count = len(episodes.begin)
    kinds = end_kinds(view, np.array([env_id]), np.array([end - 1]), episodes.running[[number]])
    final = end < stop and bool(view.flags(np.array([env_id]), np.array([end]))[0] & FINAL)
    return {
        "env": env_id,
        "begin": begin,
        "end": end,
        "kind": KINDS[kinds[0]],
        "missing_start": missing_start,
        "final_row": final,
        "previous": int(episodes.begin[number - 1]) if number else None,
        "next": int(episodes.begin[number + 1]) if number + 1 < count else None,
        "number": number,
        "count": count,
        "age": stop - end,
        **_rewards(buffer, env_id, begin, end, listed),
    }


def _why_not_there(env_id: int, position: int, first: int) -> str:
    if position < first:
        return f"Position {position:,} of environment {env_id} was overwritten."
    return f"Position {position:,} of environment {env_id} is not written yet."


def _rewards(
    buffer: ReplayBuffer, env_id: int, begin: int, end: int, listed: int
) -> dict[str, Any]:
    """Return of an episode, and its rewards other than 0."""
    path = reward_field(buffer)
    if path is None:
        return {"return": None, "nonfinite": 0, "rewards": None}
    field = buffer.schema.drawn[path]
    total, num_nonfinite, num_nonzero = 0.0, 0, 0
    steps: list[int] = []
    values: list[float] = []
    stop = min(end, begin + MAX_EPISODE_ROWS)
    for first in range(begin, stop, REWARD_ROWS):
        positions = np.arange(first, min(first + REWARD_ROWS, stop))
        rewards = widen(buffer.get_field(path, env_id, positions), field)
        numbers = rewards.reshape(-1).astype(np.float64)
        finite = np.isfinite(numbers)
        num_nonfinite += int(len(numbers) - finite.sum())
        total += float(numbers.sum())
        nonzero = np.flatnonzero(finite & (numbers != 0))
        num_nonzero += len(nonzero)
        some = nonzero[: listed - len(steps)]
        steps += (some + first - begin).tolist()
        values += numbers[some].tolist()
    return {
        "return": total if stop == end else None,
        "nonfinite": num_nonfinite,
        "rewards": {"count": num_nonzero, "at": steps, "values": values},
    }


def find_reward(
    buffer: ReplayBuffer, env_id: int, first: int, stop: int, back: bool
) -> dict[str, Any]:
    """Find the next reward other than 0, as JSON values.

    Args:
        buffer: Open in any mode.
        env_id: The environment.
        first: Position of the first step that is looked at.
        stop: One past the last.
        back: The last of the range is looked for, not the first.

    Returns:
        ``at``, its position, or None; ``rest``, first and stop of what was not looked
        at: one request reads 2^24 rewards at most.
    """
    path, span = reward_field(buffer), buffer.span
    first = max(first, int(span.first[env_id]))
    stop = min(stop, int(span.stop[env_id]))
    if path is None:
        first = stop
    read = 0
    while first < stop and read < MAX_EPISODE_ROWS:
        count = min(REWARD_ROWS, stop - first)
        begin = stop - count if back else first
        read += count
        positions = np.arange(begin, begin + count)
        left, rewards = read_left(buffer, path or "", np.full(count, env_id), positions)
        numbers = widen(rewards, buffer.schema.drawn[path or ""]).reshape(-1)
        found = positions[left][np.isfinite(numbers) & (numbers != 0)]
        if len(found):
            return {"at": int(found[-1 if back else 0]), "rest": [first, stop]}
        first, stop = (first, begin) if back else (begin + count, stop)
    return {"at": None, "rest": [first, max(first, stop)]}
