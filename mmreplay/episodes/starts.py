"""Legal starts: the steps that may be drawn, as samplers see them.

The buffer shows its samplers a `StartView`: what is alive, where episodes begin and
end, and which steps are legal starts. Four views narrow another one:

- `WindowStarts`: starts of windows and episodes, for sequence and episode samplers;
- `RangeStarts`: a range of the starts of each environment, for recent steps;
- `SubsetStarts`: the starts of a part that `split` made;
- `ListedStarts`: starts that are listed, such as those used less often than they may.

The *rank* of a legal start is its number among all of a view: environment by
environment, oldest first.

**Windows.** The steps of an episode that windows hold are one range of positions: only
its newest can wait for the next row, only its oldest can have left the ring. So whether
a window's start is legal follows from where it lies in its *run*, the range of its
episode, and the legal starts of an environment are all starts ever seen, less some at
both ends. Memory grows with the number of episodes only.

Starts keep their distance, the stride, from each other: they are the first step of each
episode and the positions that the stride divides. Counted from the first step alone,
all of them would move when that step leaves the ring, and so would the priorities kept
for them. Counted by positions alone, short episodes would have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes.column_index import ColumnIndex
from mmreplay.episodes.flags import FINAL, START
from mmreplay.episodes.index import NEVER, EnvironmentQueues, EpisodeIndex
from mmreplay.errors import EmptyError, SchemaError
from mmreplay.ring import Ring, Span

BEGINS, STOPS, BEFORE = 0, 1, 2
"""Columns of a run: first start, one past the last start, starts before it."""

Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]
StartTable = tuple[NDArray[np.uint8], int, int, bool, Bools, Ids, int]
"""What kernels look legal starts up in: flags of every row, slots, environments,
time_major, verdicts by flags, heads, and how many rows after a step count."""


@dataclass(frozen=True, slots=True)
class BufferIdentity:
    """Which buffer a view shows, for samplers that store something of their own.

    Attributes:
        ring: Where rows lie; its slots, layout and num_envs.
        folder: The buffer's, or None for one in RAM.
        uuid: 16 bytes, the buffer's.
        generation: The data folder's number; another one has other slots.
        cut_epoch: Epoch of the last opening that dropped rows; 0 if none did.
        cuts: int64 ``[E]``, rows at and above were published after it; None for 0.
        heap_nbytes: Bytes of each environment's heap; 0 where no field varies.
    """

    ring: Ring
    folder: Path | None
    uuid: bytes
    generation: int
    cut_epoch: int = 0
    cuts: NDArray[np.int64] | None = field(default=None, compare=False)
    heap_nbytes: int = 0

    def known(self, seen: NDArray[np.int64], generation: int, cut_epoch: int) -> NDArray[np.int64]:
        """Positions below which rows seen earlier are still the same rows.

        Args:
            seen: int64 ``[E]``.
            generation: Of the buffer, when they were seen.
            cut_epoch: Of the buffer, when they were seen.
        """
        if self.cuts is None or (generation, cut_epoch) >= self._age:
            return seen
        return np.minimum(seen, self.cuts)

    @property
    def _age(self) -> tuple[int, int]:
        return self.generation, self.cut_epoch


class StartView(Protocol):
    """A buffer as samplers see it: its legal starts and episodes, no data.

    Legal starts are the steps from which the buffer's transforms can be computed: all
    rows that they read around a start are alive and, where they stop at episode ends,
    of its episode. A draw reads `starts` first; the other members then describe the
    buffer as of that look. While nothing changed, `starts` is the same object.

    Attributes:
        home: Which buffer it shows; never changes.
        num_illegal: Rows within `starts` that are no legal start.
    """

    __slots__ = ()  # a reader of a buffer has slots only

    home: BufferIdentity
    num_illegal: int

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive."""

    @property
    def span(self) -> Span:
        """What is alive."""

    @property
    def starts(self) -> Span:
        """Where legal starts lie: the span less newest rows that cannot be drawn."""

    @property
    def steps(self) -> StartView:
        """The steps of windows and whole episodes, as the starts of another view.

        They are the legal starts of this one, and each step of an ended episode that is
        none only because the observation after the end is unknown.
        """
        return self

    def transitions(self, env_ids: Ids, positions: Ids) -> Bools | None:
        """Which of the `steps` of a view are legal starts, by that view of the steps.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, or ``[B, T]``.

        Returns:
            bool of the shape of positions; None for all.
        """
        return None

    @property
    def derives_next(self) -> bool:
        """Whether next observations are derived: draws of episodes then have a mask."""
        return False

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of alive rows, uint8 ``[B]``, as `mmreplay.episodes.TERMINATED`."""

    def legal(self, env_ids: Ids, positions: Ids) -> Bools:
        """Bool ``[B]``: the positions, within `starts`, that are legal starts."""

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank: environment by environment, oldest first.

        Args:
            ranks: int64 ``[B]``, in ``[0, number of legal starts)``.

        Returns:
            env_ids and positions, int64 ``[B]`` each.
        """

    @property
    def table(self) -> StartTable | None:
        """What the kernel looks legal starts up in; None: ask `legal`."""
        return None

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Legal starts, of all environments in rank order, before positions.

        This one bisects over ranks: log2(illegal rows) calls of `start_at`.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``; outside of `starts` the nearest edge counts.

        Returns:
            int64 ``[B]``: the rank of each position that is a legal start.
        """
        starts, illegal = self.starts, self.num_illegal
        lengths = starts.lengths
        edges = np.cumsum(lengths) - lengths
        total = int(lengths.sum()) - illegal
        inside = np.clip(positions, starts.first[env_ids], starts.stop[env_ids])
        rows = edges[env_ids] + inside - starts.first[env_ids]
        low: Ids = np.maximum(rows - illegal, 0)
        high: Ids = np.minimum(rows, total)
        while (low < high).any():
            middle = (low + high) // 2
            envs, middle_positions = self.start_at(np.minimum(middle, total - 1))
            less = (envs < env_ids) | ((envs == env_ids) & (middle_positions < inside))
            less &= low < high
            high = np.where(less, high, np.minimum(middle, high))
            low = np.where(less, middle + 1, low)
        return low

    def column_index(self, path: str) -> ColumnIndex:
        """The rows alive by the value of an integer field, as of now.

        Args:
            path: A field of one number, which is not mutable.

        Raises:
            SchemaError: There is no such field, or the view has no data.
        """
        raise _no_data(self)

    def read_rows(
        self, paths: tuple[str, ...], env_ids: Ids, positions: Ids
    ) -> tuple[Mapping[str, NDArray[np.generic]], Bools]:
        """Copy stored fields of rows alive, and say which rows were read whole.

        Args:
            paths: Of stored fields.
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``.

        Returns:
            Per path ``[B, *shape]``, or `Ragged` of a field that varies, and bool
            ``[B]``: false where a writer may have overwritten the row since.

        Raises:
            SchemaError: There is no such field, or the view has no data.
        """
        raise _no_data(self)

    def role(self, name: str) -> str | None:
        """Path of the field or subtree that plays a role; None if none does."""
        return None

    def check_windows(self) -> None:
        """Refuse windows over this view's steps; this one refuses none.

        Raises:
            SchemaError: The view begins or ends within an episode.
        """
        return


def _no_data(view: StartView) -> SchemaError:
    return SchemaError(
        f"view: {type(view).__name__} shows no data. Draw with a sampler that needs "
        "none, or from a buffer's view."
    )


class NarrowedStarts(StartView):
    """Some of the legal starts of another view, its base."""

    def __init__(self, base: StartView) -> None:
        """Narrow a view.

        Args:
            base: The buffer, or part of it.
        """
        self.base = base
        self.home = base.home
        self.num_illegal = 0

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive."""
        return self.base.index

    @property
    def span(self) -> Span:
        """What is alive."""
        return self.base.span

    @property
    def derives_next(self) -> bool:
        """Whether next observations are derived, as of the base."""
        return self.base.derives_next

    def transitions(self, env_ids: Ids, positions: Ids) -> Bools | None:
        """Which steps are legal starts, as the base says."""
        return self.base.transitions(env_ids, positions)

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of alive rows, uint8 ``[B]``."""
        return self.base.flags(env_ids, positions)

    def column_index(self, path: str) -> ColumnIndex:
        """The rows alive by the value of an integer field, legal starts or not."""
        return self.base.column_index(path)

    def read_rows(
        self, paths: tuple[str, ...], env_ids: Ids, positions: Ids
    ) -> tuple[Mapping[str, NDArray[np.generic]], Bools]:
        """Copy stored fields of rows alive, and say which rows were read whole."""
        return self.base.read_rows(paths, env_ids, positions)

    def role(self, name: str) -> str | None:
        """Path of the field or subtree that plays a role; None if none does."""
        return self.base.role(name)

    def check_windows(self) -> None:
        """Refuse windows where the base does."""
        self.base.check_windows()


class EpisodeSteps(NarrowedStarts):
    """The steps of windows and whole episodes of a buffer; see `StartView.steps`.

    All rows within `EpisodeIndex.steps` are such steps, except final rows.
    """

    def __init__(self, base: StartView) -> None:
        """Show the steps of a buffer.

        Args:
            base: The buffer, which derives next observations.
        """
        super().__init__(base)
        self._base_starts: Span | None = None
        self._all_known = False

    @property
    def starts(self) -> Span:
        """Where the steps lie; the same object while nothing changed."""
        base_starts = self.base.starts
        if base_starts is not self._base_starts:
            # Of one moment, which may be a later one: the next look then sees it.
            index = self.base.index
            self._steps = index.steps
            self.num_illegal = index.num_finals_in_steps
            self._base_starts = base_starts
            self._all_known = index.num_unknown_next == 0
        return self._steps

    def legal(self, env_ids: Ids, positions: Ids) -> Bools:
        """Bool ``[B]``: the positions, within `starts`, that are such steps."""
        legal: Bools = (self.base.flags(env_ids, positions) & FINAL) == 0
        return legal

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Steps by rank, int64 ``[B]`` each."""
        return self.base.index.step_at(ranks)

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Steps, of all environments in rank order, before positions."""
        return self.base.index.steps_before(env_ids, positions)

    def transitions(self, env_ids: Ids, positions: Ids) -> Bools | None:
        """Which steps are legal starts of the buffer; None for all."""
        if self._all_known:
            return None
        shape = positions.shape
        if positions.ndim > 1:
            env_ids, positions = np.repeat(env_ids, shape[1]), positions.reshape(-1)
        legal = self.base.legal(env_ids, positions)
        # After the look-up: where a writer goes on, the stop only rises.
        legal &= positions < self.base.starts.stop[env_ids]
        return legal.reshape(shape)


class ListedStarts(NarrowedStarts):
    """Some legal starts of another view, listed."""

    def __init__(self, base: StartView, env_ids: Ids, positions: Ids) -> None:
        """Narrow a view.

        Args:
            base: The buffer now.
            env_ids: int64 ``[N]``, never falling.
            positions: int64 ``[N]``, legal starts, rising within an environment.
        """
        super().__init__(base)
        self._env_ids, self._positions = env_ids, positions
        # Steps since the oldest row alive, environment by environment, never fall.
        self._first, slots = base.span.first, base.home.ring.slots
        self._slots = slots
        self._keys = env_ids * slots + (positions - self._first[env_ids])
        stop = base.span.first.copy()
        np.maximum.at(stop, env_ids, positions + 1)
        first = stop.copy()
        np.minimum.at(first, env_ids, positions)
        self._starts = Span(first, stop)
        self.num_illegal = int(self._starts.lengths.sum()) - len(positions)

    @property
    def starts(self) -> Span:
        """Where the legal starts lie."""
        return self._starts

    def legal(self, env_ids: Ids, positions: Ids) -> Bools:
        """Bool ``[B]``: the positions, within `starts`, that are legal starts."""
        if not len(self._keys):
            return np.zeros(len(positions), bool)
        keys = env_ids * self._slots + (positions - self._first[env_ids])
        places = np.searchsorted(self._keys, keys)
        result: Bools = self._keys[np.minimum(places, len(self._keys) - 1)] == keys
        return result

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank, int64 ``[B]`` each."""
        return self._env_ids[ranks], self._positions[ranks]

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Legal starts, of all environments in rank order, before positions."""
        inside = np.clip(positions - self._first[env_ids], 0, self._slots)
        before: Ids = np.searchsorted(self._keys, env_ids * self._slots + inside)
        return before


class RangeStarts(NarrowedStarts):
    """The legal starts of each environment whose ranks lie in a range."""

    def __init__(self, base: StartView, first: Ids, stop: Ids) -> None:
        """Narrow a view to ranges of ranks.

        Args:
            base: The buffer now.
            first: int64 ``[E]``, the first rank of each environment to keep.
            stop: int64 ``[E]``, one past its last rank.
        """
        super().__init__(base)
        self._set_ranks(first, stop)

    def _set_ranks(self, first: Ids, stop: Ids) -> None:
        self._first, self._stop = first, stop
        self._ends: Ids = np.cumsum(stop - first)
        starts = self.base.starts
        oldest = starts.stop.copy()
        some = np.flatnonzero(first < stop)
        if len(some):
            oldest[some] = self.base.start_at(first[some])[1]
        self._starts = Span(oldest, starts.stop)
        self.num_illegal = int(self._starts.lengths.sum() - self._ends[-1])

    @property
    def starts(self) -> Span:
        """Where the legal starts lie."""
        return self._starts

    def legal(self, env_ids: Ids, positions: Ids) -> Bools:
        """Bool ``[B]``: the positions, within `starts`, that are legal starts."""
        return self.base.legal(env_ids, positions)

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank, int64 ``[B]`` each."""
        env_ids = np.searchsorted(self._ends, ranks, side="right")
        within: Ids = self._stop[env_ids] - (self._ends[env_ids] - ranks)
        return self.base.start_at(within)

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Legal starts, of all environments in rank order, before positions."""
        first, stop = self._first[env_ids], self._stop[env_ids]
        ranks = np.clip(self.base.legal_before(env_ids, positions), first, stop)
        before: Ids = self._ends[env_ids] - (stop - ranks)
        return before


class LaterStarts(RangeStarts):
    """The legal starts that are not among the oldest rows of their environment.

    It follows its base: one object serves a buffer as long as it is open, so that
    `WindowStarts` over it need not read every episode again after each added step.
    """

    def __init__(self, base: StartView, count: int) -> None:
        """Narrow a view.

        Args:
            base: The buffer.
            count: Oldest rows of each environment to leave out.
        """
        NarrowedStarts.__init__(self, base)
        self._count = count
        self._base_starts: Span | None = None

    @property
    def steps(self) -> StartView:
        """The same range of the steps of windows and episodes."""
        return LaterStarts(self.base.steps, self._count)

    @property
    def starts(self) -> Span:
        """Where the legal starts lie."""
        base_starts = self.base.starts
        if base_starts is not self._base_starts:
            edges = rank_edges(self.base)
            every = np.arange(len(edges) - 1)
            firsts = self.base.span.first + self._count
            self._set_ranks(self.base.legal_before(every, firsts), edges[1:])
            self._base_starts = base_starts
        return self._starts


def newest(view: StartView, counts: Ids, edges: Ids) -> RangeStarts:
    """Keep the newest legal starts of each environment.

    Args:
        view: The buffer now.
        counts: int64 ``[E]``, at most this many of each environment.
        edges: int64 ``[E + 1]``, `rank_edges` of the view.
    """
    return RangeStarts(view, np.maximum(edges[:-1], edges[1:] - counts), edges[1:])


class Fragments(Protocol):
    """Ranges ``[begin, end)`` of positions, N of them, that do not overlap."""

    @property
    def env_ids(self) -> Ids:
        """int64 ``[N]``, never falling."""

    @property
    def begins(self) -> Ids:
        """int64 ``[N]``, growing within an environment."""

    @property
    def ends(self) -> Ids:
        """int64 ``[N]``, at most the next begin."""


class SubsetStarts(NarrowedStarts):
    """The legal starts within the fragments of a part that `split` made."""

    def __init__(self, base: StartView, part: Fragments) -> None:
        """Narrow a view to a part.

        Args:
            base: The buffer now.
            part: Its fragments.
        """
        super().__init__(base)
        self._part = part
        self._all_starts = starts = base.starts
        lengths = starts.lengths
        self._edges = np.cumsum(lengths) - lengths
        self._begins = self._rows(part.env_ids, part.begins)
        self._stops = self._rows(part.env_ids, part.ends)
        # Of each fragment: its first rank, one past its last, and the legal starts
        # of all fragments up to its end.
        self._low = base.legal_before(part.env_ids, part.begins)
        self._high = base.legal_before(part.env_ids, part.ends)
        self._ends: Ids = np.cumsum(self._high - self._low)
        # The range of each environment that holds all of the part that is left.
        some = self._high > self._low
        env_ids = part.env_ids[some]
        first, stop = starts.stop.copy(), starts.first.copy()
        np.minimum.at(first, env_ids, part.begins[some])
        np.maximum.at(stop, env_ids, part.ends[some])
        first = np.maximum(first, starts.first)
        self._starts = Span(first, np.maximum(first, np.minimum(stop, starts.stop)))
        total = int(self._ends[-1]) if len(self._ends) else 0
        self.num_illegal = int(self._starts.lengths.sum()) - total

    @property
    def steps(self) -> StartView:
        """The steps of windows and episodes within the part."""
        return SubsetStarts(self.base.steps, self._part)

    def _rows(self, env_ids: Ids, positions: Ids) -> Ids:
        """Rows of the base's starts, laid end to end, before positions; int64 [B]."""
        first = self._all_starts.first[env_ids]
        inside = np.clip(positions, first, self._all_starts.stop[env_ids])
        return self._edges[env_ids] + inside - first

    @property
    def starts(self) -> Span:
        """Where the legal starts lie."""
        return self._starts

    def legal(self, env_ids: Ids, positions: Ids) -> Bools:
        """Bool ``[B]``: the positions, within `starts`, that are legal starts."""
        rows = self._rows(env_ids, positions)
        which = np.searchsorted(self._begins, rows, side="right") - 1
        member = (which >= 0) & (rows < self._stops[np.maximum(which, 0)])
        return member & self.base.legal(env_ids, positions)

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank, int64 ``[B]`` each."""
        which = np.searchsorted(self._ends, ranks, side="right")
        within: Ids = self._high[which] - (self._ends[which] - ranks)
        return self.base.start_at(within)

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Legal starts, of all environments in rank order, before positions."""
        rows = self._rows(env_ids, positions)
        which = np.searchsorted(self._begins, rows, side="left") - 1
        inside = np.maximum(which, 0)
        ranks = self.base.legal_before(env_ids, positions)
        ranks = np.clip(ranks, self._low[inside], self._high[inside])
        before = self._ends[inside] - (self._high[inside] - ranks)
        return np.where(which < 0, 0, before)

    def check_windows(self) -> None:
        """Refuse windows over a part that begins within an episode.

        Raises:
            SchemaError: Windows would hold steps of no part, or of another one.
        """
        part = self._part
        inside = part.begins > self._all_starts.first[part.env_ids]
        inside &= part.begins < self._all_starts.stop[part.env_ids]
        env_ids, begins = part.env_ids[inside], part.begins[inside]
        within = self.base.index.locate(env_ids, begins)[0] != begins
        if within.any():
            which = int(np.argmax(within))
            raise SchemaError(
                "part: windows must be drawn from whole episodes, but one would begin "
                f"at position {begins[which]} of environment {env_ids[which]}, amid "
                "an episode, and hold steps of other parts. Split by='episode', or "
                "restrict the sampler inside the SequenceSampler to the part."
            )


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Which steps a window needs around its start.

    Attributes:
        before: Steps that the window needs before its start.
        after: Steps that it needs from the start on, with it; at least 1.
        stride: Distance of starts, at least 1.
        across: The steps may be of several episodes, one after the other.
    """

    before: int
    after: int
    stride: int
    across: bool


class EpisodeFilter(Protocol):
    """Chooses the episodes that may have windows."""

    @property
    def missing_start(self) -> bool:
        """Whether episodes whose first steps have left the ring may."""

    @property
    def unfinished(self) -> bool:
        """Whether episodes that have not ended may."""

    def keep(
        self, index: EpisodeIndex, env_ids: Ids, begins: Ids, stops: Ids, unfinished: Bools
    ) -> Bools:
        """Choose among episodes; the newest of each environment is asked repeatedly.

        Args:
            index: The episodes alive.
            env_ids: int64 ``[N]``.
            begins: int64 ``[N]``, first steps alive.
            stops: int64 ``[N]``, one past the last steps that batches hold.
            unfinished: bool ``[N]``, whether they have not ended.

        Returns:
            bool ``[N]``.
        """


class WindowStarts(NarrowedStarts):
    """The legal starts of a view that are starts of windows.

    It describes the buffer as of the last look at `starts`. A look costs O(E + episodes
    that came or went), a start O(log episodes). Not thread-safe.
    """

    def __init__(
        self, base: StartView, shape: WindowShape, episodes: EpisodeFilter | None = None
    ) -> None:
        """Narrow a view to starts of windows.

        Args:
            base: What single steps may be drawn from; windows hold its `steps`.
            shape: Which steps a window needs.
            episodes: Which episodes have any; None for all.
        """
        super().__init__(base.steps)
        self._shape = shape
        self._episodes = episodes
        self._envs = np.arange(len(base.span.first))
        self._offsets = np.arange(-shape.before, shape.after)
        self._base_starts: Span | None = None
        self._num_begun: Ids = np.zeros(len(self._envs), np.int64)

    @property
    def starts(self) -> Span:
        """Where legal starts lie; whether a row below its stop is one stays so."""
        self.look()
        return self._starts

    def look(self) -> int:
        """Look at the buffer now, and return the number of legal starts."""
        base_starts = self.base.starts
        if base_starts is not self._base_starts:
            self._look(base_starts)
        return self.num_legal

    @property
    def num_legal(self) -> int:
        """Legal starts, as last looked at."""
        return int(self._rank_stops[-1])

    def legal(self, env_ids: Ids, positions: Ids) -> Bools:
        """Bool ``[B]``: the positions, within `starts`, that are legal starts."""
        begin, stop, _ = self._runs.at_positions(env_ids, positions)
        legal: Bools = (positions >= begin) & (positions < stop)
        legal &= positions >= self._lower[env_ids]
        if self._shape.across:
            legal &= positions < self._starts.stop[env_ids]
        if self._shape.stride > 1:
            legal &= (positions == begin) | (positions % self._shape.stride == 0)
        return legal

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank, int64 ``[B]`` each."""
        env_ids = self._rank_stops.searchsorted(ranks, "right")
        within = ranks - self._rank_stops[env_ids] + self._rank_ends[env_ids]
        return env_ids, self._runs.starts_at(env_ids, within)

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Legal starts of all environments, in rank order, before positions.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``; outside of `starts` the nearest edge counts.
        """
        stop = self._starts.stop[env_ids]
        inside = np.clip(positions, np.minimum(self._lower[env_ids], stop), stop)
        ranks = self._runs.below(env_ids, inside)
        ranks = np.clip(ranks, self._rank_firsts[env_ids], self._rank_ends[env_ids])
        before: Ids = self._rank_stops[env_ids] - (self._rank_ends[env_ids] - ranks)
        return before

    def episode_bounds(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """First step and one past the last of the episodes that hold legal starts.

        Where windows lie in one episode, rows that only they need are left out.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``.
        """
        begin, stop, _ = self._runs.at_positions(env_ids, positions)
        known = self._known[env_ids]
        begin = np.where(begin == self._missing_start[env_ids], known, begin)
        return np.maximum(begin, known), stop

    def steps_around(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Bools]:
        """Positions of the steps of windows that go across episodes.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, legal starts.

        Returns:
            int64 ``[B, before + after]``, steps one after the other, and bool of that
            shape, where episodes begin.
        """
        steps, offsets = self._steps, self._offsets
        around: Ids = positions[:, None] + offsets
        if self.base.num_illegal == 0:
            # Every row is a step, and the next one follows it.
            ids = env_ids.repeat(len(offsets))
            flags = self.base.flags(ids, around.reshape(-1)) & START
            return around, flags.reshape(around.shape) != 0
        begin, stop, before = steps.at_positions(env_ids, positions)
        fresh = np.zeros(around.shape, bool)
        # Most windows stay within an episode, where steps follow each other.
        leaves = np.flatnonzero((around[:, 0] < begin) | (around[:, -1] >= stop))
        if len(leaves):
            ranks = (positions - begin + before)[leaves, None] + offsets
            ids = np.repeat(env_ids[leaves], len(offsets))
            found = steps.starts_at(ids, ranks.reshape(-1))
            around[leaves] = found.reshape(ranks.shape)
            flags = self.base.flags(ids, found) & START
            fresh[leaves] = flags.reshape(ranks.shape)
        fresh[:, 0] = self.base.flags(env_ids, around[:, 0]) & START
        return around, fresh

    def _look(self, base_starts: Span) -> None:
        """Follow the base after its starts have changed."""
        index = self.base.index
        if self._base_starts is None or index is not self._index:
            self._forget(index, base_starts)
        for env_id in np.flatnonzero(index.num_begun != self._num_begun).tolist():
            self._add_ended(env_id, base_starts)
        self._num_begun = index.num_begun.copy()
        self._update_newest(base_starts)
        self._drop_overwritten(base_starts)
        self._bound(base_starts)
        self._base_starts = base_starts

    def _forget(self, index: EpisodeIndex, base_starts: Span) -> None:
        """Begin as with a buffer that was not seen yet."""
        num_envs, shape = len(self._envs), self._shape
        self._index = index
        self._num_begun = np.zeros(num_envs, np.int64)
        self._runs = StartRuns(num_envs, shape.stride)
        # All steps, by which windows that go across episodes are counted out.
        apart = shape.across and shape.stride > 1
        self._steps = StartRuns(num_envs, 1) if apart else self._runs
        # The newest episode of each environment. What was there before the first look
        # counts as an episode whose first step is gone.
        self._newest = base_starts.first.copy()
        self._has_start = np.zeros(num_envs, bool)
        # First start of the run whose first step was gone when it was added.
        self._missing_start = np.full(num_envs, -1)

    @property
    def _margins(self) -> tuple[int, int]:
        """Steps of a run, at its two ends, that are no start."""
        shape = self._shape
        return (0, 0) if shape.across else (shape.before, shape.after - 1)

    def _add_ended(self, env_id: int, base_starts: Span) -> None:
        """Add the episodes after which others have begun since the last look."""
        num_new = int(self._index.num_begun[env_id] - self._num_begun[env_id])
        begins = self._index.begins(env_id)[-num_new:]
        if len(begins) == 0:
            return
        lows = np.concatenate([self._newest[env_id : env_id + 1], begins[:-1]])
        first, stop = base_starts.first[env_id], base_starts.stop[env_id]
        seen = np.clip(lows, first, stop), np.clip(begins, first, stop)
        stops = last_legal(self.base, np.full(len(lows), env_id), *seen)
        stops = np.minimum(stops, begins)
        starts = lows + self._margins[0]
        starts[:1] = self._on_stride(starts[:1], self._has_start[env_id])
        until = stops - self._margins[1]
        counts = num_starts(starts, until, self._shape.stride)
        if self._episodes is not None:
            self._filter(self._episodes, env_id, lows, stops, int(first), counts)
        if not self._has_start[env_id]:
            self._missing_start[env_id] = starts[0] if counts[0] else -1
        self._runs.append(env_id, starts, until, counts)
        if self._steps is not self._runs:
            self._steps.append(env_id, lows, stops, np.maximum(stops - lows, 0))
        self._newest[env_id], self._has_start[env_id] = begins[-1], True

    def _filter(
        self, episodes: EpisodeFilter, env_id: int, lows: Ids, stops: Ids, oldest: int, counts: Ids
    ) -> None:
        """Set the counts of episodes that the filter leaves out to 0."""
        if not episodes.missing_start:
            counts[lows < oldest] = 0
            counts[:1] *= self._has_start[env_id]
        some = np.flatnonzero(counts)
        if len(some):
            begins = np.maximum(lows[some], oldest)
            ids = np.full(len(some), env_id)
            unfinished = np.zeros(len(some), bool)
            counts[some] *= episodes.keep(self._index, ids, begins, stops[some], unfinished)

    def _on_stride(self, starts: Ids, has_start: Bools) -> Ids:
        """Move the starts of runs whose first step is gone onto the stride."""
        stride = self._shape.stride
        first: Ids = np.where(has_start, starts, -(-starts // stride) * stride)
        return first

    def _update_newest(self, base_starts: Span) -> None:
        """Look how far the newest episodes have come."""
        lows = np.clip(self._newest, base_starts.first, base_starts.stop)
        stops = last_legal(self.base, self._envs, lows, base_starts.stop)
        self._settled = stops
        starts = self._on_stride(self._newest + self._margins[0], self._has_start)
        self._missing_start = np.where(self._has_start, self._missing_start, starts)
        until = stops - self._margins[1]
        if self._episodes is not None:
            until = self._filter_newest(self._episodes, starts, until, lows, stops)
        self._runs.set_newest(starts, until)
        if self._steps is not self._runs:
            self._steps.set_newest(self._newest, stops)

    def _filter_newest(
        self, episodes: EpisodeFilter, starts: Ids, until: Ids, lows: Ids, stops: Ids
    ) -> Ids:
        """Return `until`, moved to `starts` where the filter leaves an episode out."""
        some = np.flatnonzero(until > starts)
        last = self.base.flags(some, self.base.span.stop[some] - 1)
        unfinished = (last & self._index.whole_at) == 0
        if not episodes.unfinished:
            some, unfinished = some[~unfinished], unfinished[~unfinished]
        if not episodes.missing_start:
            # The first step may be alive and yet before what the base shows.
            has_start = self._newest[some] >= lows[some]
            some, unfinished = some[has_start], unfinished[has_start]
        accepted = np.zeros(len(starts), bool)
        accepted[some] = episodes.keep(self._index, some, lows[some], stops[some], unfinished)
        # Episodes that are left out may yet be drawn when they are over.
        self._settled = np.where(accepted, stops, self._newest)
        return np.where(accepted, until, starts)

    def _drop_overwritten(self, base_starts: Span) -> None:
        """Drop the runs that have left the ring."""
        first, stop = base_starts.first, base_starts.stop
        if self._episodes is None or self._episodes.missing_start:
            self._known = first_known(self.base, self._envs, first, stop)
        else:
            # The first step may be alive and yet before what the base shows: only
            # episodes that begin at the first start or after it are known.
            self._known = stop.copy()
            for env_id in range(len(self._envs)):
                begins = self._index.begins(env_id)
                which = int(np.searchsorted(begins, first[env_id]))
                if which < len(begins):
                    self._known[env_id] = begins[which]
        for runs in (self._runs, self._steps):
            for env_id in np.flatnonzero(runs.oldest <= self._known).tolist():
                runs.drop(env_id, int(self._known[env_id]))

    def _bound(self, base_starts: Span) -> None:
        """Find between which ranks, and which positions, starts are legal."""
        if self._shape.across:
            stop, firsts, ends = self._bounds_across(base_starts)
        else:
            self._lower = self._known + self._shape.before
            stop = np.maximum(self._newest, self._settled - self._margins[1])
            firsts = self._runs.below(self._envs, self._lower)
            ends = self._runs.ends
        stop = np.clip(stop, base_starts.first, base_starts.stop)
        self._starts = Span(np.minimum(self._lower, stop), stop)
        counts = np.maximum(ends - firsts, 0)
        self._rank_firsts, self._rank_ends = firsts, firsts + counts
        self._rank_stops = np.cumsum(counts)
        self.num_illegal = int(self._starts.lengths.sum()) - self.num_legal

    def _bounds_across(self, base_starts: Span) -> tuple[Ids, Ids, Ids]:
        """One past the last start, and the ranks of the first and one past the last."""
        steps, envs, shape = self._steps, self._envs, self._shape
        lost = steps.below(envs, self._known)
        firsts, ends = lost + shape.before, steps.ends - (shape.after - 1)
        last = steps.starts_at(envs, np.maximum(ends - 1, lost))
        stop = np.where(ends > lost, last + 1, base_starts.first)
        first = steps.starts_at(envs, np.clip(firsts, lost, steps.ends - 1))
        self._lower = np.where(firsts < steps.ends, first, base_starts.stop)
        if steps is self._runs:
            return stop, firsts, ends
        return stop, self._runs.below(envs, self._lower), self._runs.below(envs, stop)


def num_legal(view: StartView) -> int:
    """Legal starts of a view."""
    return int(view.starts.lengths.sum()) - view.num_illegal


def legal_among(view: StartView, env_ids: Ids, positions: Ids) -> Bools:
    """Which rows alive are legal starts of a view, bool ``[N]``.

    Args:
        view: The buffer now, or a part of it.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``, of rows alive, also outside of `starts`.
    """
    starts = view.starts
    legal: Bools = positions >= starts.first[env_ids]
    legal &= positions < starts.stop[env_ids]
    inside = np.flatnonzero(legal)
    legal[inside] = view.legal(env_ids[inside], positions[inside])
    return legal


def nothing_to_draw(view: StartView, batch_size: int) -> EmptyError:
    """Say that there is no legal start."""
    return EmptyError(
        f"cannot draw {batch_size} steps: none of {int(view.span.lengths.sum())} "
        "published rows is a legal start yet. Add steps first: a step can be drawn "
        "when its next observation, and all rows that transforms read around it, are "
        "there."
    )


def rank_edges(view: StartView) -> Ids:
    """First rank of each environment and, last, the number of legal starts.

    Returns:
        int64 ``[E + 1]``.
    """
    starts = view.starts
    edges = np.zeros(len(starts.first) + 1, np.int64)
    if view.num_illegal == 0:
        np.cumsum(starts.lengths, out=edges[1:])
    else:
        edges[:-1] = view.legal_before(np.arange(len(starts.first)), starts.first)
        edges[-1] = num_legal(view)
    return edges


def num_starts(begin: Ids, stop: Ids, stride: int) -> Ids:
    """Count the starts of ``[begin, stop)``, where begin is one; int64 ``[N]``."""
    if stride == 1:
        return (stop - begin).clip(0)
    return np.where(stop > begin, (stop - 1) // stride - begin // stride + 1, 0)


class StartRuns:
    """Runs of each environment, oldest first; the newest may still grow.

    A *run* is a range of positions of one environment, as a rule an episode, some of
    which are *starts*: its first position, and those that the stride divides. Runs
    arrive at one end and leave at the other, as rows do. Ranks count every start that
    ever was, so that nothing that stays is counted again when others come or go.

    Costs 24 bytes a run and O(log runs) a look-up. Adding and dropping runs cost their
    number, amortised. Not thread-safe.

    Attributes:
        stride: Distance of starts within a run.
        total: int64 ``[E]``, starts of all finished runs ever added.
        ends: int64 ``[E]``, those and the starts of the newest runs.
        oldest: int64 ``[E]``, stop of the oldest finished run; NEVER where there is
            none.
    """

    def __init__(self, num_envs: int, stride: int) -> None:
        """Make one without runs.

        Args:
            num_envs: Environments.
            stride: At least 1.
        """
        self.stride = stride
        self.total = np.zeros(num_envs, np.int64)
        self.ends = np.zeros(num_envs, np.int64)
        self.oldest = np.full(num_envs, NEVER)
        self._newest = self._newest_stop = np.zeros(num_envs, np.int64)
        # Of each finished run: its begin, its stop, and the starts before it.
        self._finished = EnvironmentQueues(num_envs, 3)

    def __len__(self) -> int:
        """Finished runs of all environments."""
        return int(self._finished.lengths.sum())

    def append(self, env_id: int, begin: Ids, stop: Ids, counts: Ids) -> None:
        """Add runs of one environment, newer than those it has.

        Args:
            env_id: The environment.
            begin: int64 ``[N]``, first start of each run, growing.
            stop: int64 ``[N]``, one past where the last start may be.
            counts: int64 ``[N]``, starts of each run; a run of none is left out.
        """
        some = np.flatnonzero(counts)
        if len(some) == 0:
            return
        if len(some) < len(counts):
            begin, stop, counts = begin[some], stop[some], counts[some]
        ends = np.cumsum(counts) + self.total[env_id]
        self._finished.append(env_id, begin, stop, ends - counts)
        self.total[env_id] = ends[-1]
        self.oldest[env_id] = self._finished.oldest(env_id, STOPS)

    def drop(self, env_id: int, position: int) -> None:
        """Drop the runs of one environment that stop at a position or before it."""
        self._finished.drop_below(env_id, position + 1, STOPS)
        self.oldest[env_id] = self._finished.oldest(env_id, STOPS)

    def set_newest(self, begins: Ids, stops: Ids) -> None:
        """Set the newest run of each environment, which still grows.

        Args:
            begins: int64 ``[E]``, first starts, beyond all finished runs.
            stops: int64 ``[E]``, one past where the last start may be.
        """
        self._newest, self._newest_stop = begins, stops
        self.ends = self.total + num_starts(begins, stops, self.stride)

    def at_ranks(self, env_ids: Ids, ranks: Ids) -> tuple[Ids, Ids, Ids]:
        """Find runs by the ranks of their starts.

        Args:
            env_ids: int64 ``[N]``.
            ranks: int64 ``[N]``, of starts that were not dropped.

        Returns:
            Begin, stop, and the starts of the environment before, int64 ``[N]``.
        """
        newest = ranks >= self.total[env_ids]
        return self._last_run(BEFORE, env_ids, ranks, newest)

    def at_positions(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Ids, Ids]:
        """Find the newest runs that begin at positions or before.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``; where no run begins before, the oldest is found.

        Returns:
            Begin, stop, and the starts of the environment before, int64 ``[N]``.
        """
        newest = positions >= self._newest[env_ids]
        newest |= (self._finished.lengths == 0)[env_ids]
        return self._last_run(BEGINS, env_ids, positions, newest)

    def _last_run(
        self, column: int, env_ids: Ids, values: Ids, newest: Bools
    ) -> tuple[Ids, Ids, Ids]:
        """Of each value the last finished run whose column is at most that.

        Where no run's column is, the oldest. Where `newest` is true, the run that still
        grows.
        """
        runs = self._finished
        which = runs.find(env_ids, values, "right", column) - 1
        np.maximum(which, runs.firsts[env_ids], out=which)
        begin, stop, before = (runs.at(which, each) for each in (BEGINS, STOPS, BEFORE))
        if np.count_nonzero(newest):  # a third of `any` in a small draw
            begin = np.where(newest, self._newest[env_ids], begin)
            stop = np.where(newest, self._newest_stop[env_ids], stop)
            before = np.where(newest, self.total[env_ids], before)
        return begin, stop, before

    def below(self, env_ids: Ids, positions: Ids) -> Ids:
        """Ranks: how many starts each environment ever had before a position.

        Args:
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``, not before the starts that were dropped.

        Returns:
            int64 ``[N]``.
        """
        begin, stop, before = self.at_positions(env_ids, positions)
        inside = np.minimum(positions, stop)
        ranks: Ids = before + num_starts(begin, inside, self.stride)
        return ranks

    def starts_at(self, env_ids: Ids, ranks: Ids) -> Ids:
        """Positions of starts by rank; see `at_ranks`."""
        begin, _, before = self.at_ranks(env_ids, ranks)
        if self.stride == 1:
            return begin + (ranks - before)
        beyond: Ids = (begin // self.stride + (ranks - before)) * self.stride
        np.maximum(begin, beyond, out=beyond)
        return beyond


MAX_WIDTH = 64
MAX_RUNS = 1 << 16


def last_legal(view: StartView, env_ids: Ids, lows: Ids, stops: Ids) -> Ids:
    """Find where the last legal starts of ranges are.

    Args:
        view: Looked at, see `StartView.starts`.
        env_ids: int64 ``[N]``.
        lows: int64 ``[N]``, first rows of the ranges, within `starts`.
        stops: int64 ``[N]``, one past their last rows, within `starts`.

    Returns:
        int64 ``[N]``, one past the last legal start of each range; its low where
        it has none.
    """
    ends = lows.copy()
    # In chunks, so that opening a buffer of any size takes little memory.
    for first in range(0, len(lows), MAX_RUNS):
        chunk = slice(first, first + MAX_RUNS)
        _from_the_end(view, env_ids[chunk], lows[chunk], stops[chunk], ends[chunk])
    return ends


def _from_the_end(view: StartView, env_ids: Ids, lows: Ids, stops: Ids, ends: Ids) -> None:
    todo = np.flatnonzero(stops > lows)
    tops, width = stops[todo], 1
    while len(todo):
        rows = tops[:, None] - np.arange(1, width + 1)
        inside = rows >= lows[todo, None]
        rows = np.where(inside, rows, lows[todo, None])
        legal = view.legal(np.repeat(env_ids[todo], width), rows.reshape(-1))
        legal = legal.reshape(rows.shape) & inside
        hit = legal.any(1)
        ends[todo[hit]] = rows[hit, legal[hit].argmax(1)] + 1
        left = np.flatnonzero(~hit & inside[:, -1])
        todo, tops = todo[left], tops[left] - width
        width = min(MAX_WIDTH, 4 * width)


def first_known(view: StartView, env_ids: Ids, firsts: Ids, stops: Ids) -> Ids:
    """Find the first rows that begin an episode or are legal starts.

    Args:
        view: Looked at, see `StartView.starts`.
        env_ids: int64 ``[N]``.
        firsts: int64 ``[N]``, within `starts`.
        stops: int64 ``[N]``, where to stop looking, within `starts`.

    Returns:
        int64 ``[N]``; stops where there is none.
    """
    result = np.maximum(firsts, stops)
    todo, width = np.flatnonzero(stops > firsts), 1
    lows = firsts[todo]
    while len(todo):
        rows = lows[:, None] + np.arange(width)
        inside = rows < stops[todo, None]
        rows = np.where(inside, rows, stops[todo, None] - 1)
        ids, flat = np.repeat(env_ids[todo], width), rows.reshape(-1)
        known = view.legal(ids, flat) | ((view.flags(ids, flat) & START) != 0)
        known = known.reshape(rows.shape)
        hit = known.any(1)
        result[todo[hit]] = rows[hit, known[hit].argmax(1)]
        left = np.flatnonzero(~hit & inside[:, -1])
        todo, lows = todo[left], lows[left] + width
        width = min(MAX_WIDTH, 4 * width)
    return result
