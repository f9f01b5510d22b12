"""Reading: what is alive now, which steps may be drawn, and their data.

Rows are copied first and checked afterwards: a writer in another process may have
given them up meanwhile, and what it gave up is told apart exactly by its limit.
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.steps import Fields, Ids, StepReader
from mmreplay.episodes import EpisodeIndex
from mmreplay.errors import FailedError, SchemaError, StaleError
from mmreplay.kernels.steps import Judge
from mmreplay.ring import Span
from mmreplay.samplers.base import Home
from mmreplay.schema import Schema
from mmreplay.storage.base import Store
from mmreplay.storage.ledger import CUT_ROWS, Ledger
from mmreplay.transforms.base import Asked, Direct, Found, Plan, Sums


class Window(Protocol):
    """How far around a step its data reaches.

    Attributes:
        before: Rows before the step, where its episode has them.
        after: Rows after it, up to the episode's end; the row of the next observation
            is one of them.
    """

    before: int
    after: int


Moment = tuple[Ids, Ids]
"""Limits and tails before rows were copied."""


class ReplacedError(FailedError):
    """Another generation took this one's place: draw from that one."""


class LiveView:
    """One open buffer as samplers and gathers see it.

    A draw looks at `starts` first and keeps to that moment. Threads: hold `lock`
    from there to the end of the draw; copying rows needs none.

    Attributes:
        lock: One for all generations of an open buffer, which samplers go through
            with it.
        replaced: Whether another generation is in force.
        num_illegal: Rows within `starts`, as last looked at, that are no legal start.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        schema: Schema,
        autoreset: str,
        home: Home,
        window: Window | None = None,
        former: LiveView | None = None,
    ) -> None:
        self.lock: threading.RLock = threading.RLock()
        if former is not None:
            self.lock = former.lock
        self.replaced = False
        self.home = home
        self._window = window
        self._before = 0 if window is None else window.before
        self._store = store
        self._ledger = ledger
        self._ring = store.ring
        self._final_follows = autoreset == "next_step"
        after = None if window is None else window.after
        self._steps = StepReader(store, schema, autoreset, after)
        self.next_paths = self._steps.next_paths
        self._index = self._make_index()
        self._indexed: Span | None = None
        self.num_illegal = 0
        self._span = self._make_span(ledger.heads, ledger.tails)

    def __repr__(self) -> str:
        """Say what it is."""
        buffer = self.home.folder or "a buffer in RAM"
        rows = int(self._span.lengths.sum())
        known = "replaced" if self.replaced else f"{rows:,} rows"
        return f"<View of {buffer}: {known}>"

    @property
    def span(self) -> Span:
        """What is alive now."""
        heads, tails = self._ledger.heads, self._ledger.tails
        if heads is not self._of[0] or tails is not self._of[1]:
            self._span = self._make_span(heads, tails)
        return self._span

    def _make_span(self, heads: Ids, tails: Ids) -> Span:
        span = Span(np.maximum(tails, heads - self._ring.capacity), heads)
        self._of = (heads, tails)
        return span

    def _make_index(self) -> EpisodeIndex:
        return EpisodeIndex(
            self._ring.num_envs,
            derived=self._steps.derived,
            final_follows=self._final_follows,
            before=self._before,
            after=None if self._window is None else self._window.after,
        )

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive now."""
        with self.lock:
            self._look()
            return self._index

    def _look(self) -> Span:
        """Bring the index to one moment, which a draw then keeps to."""
        span = self.span
        if span is not self._indexed:
            try:
                self._index.update(span, self._store.flags_between, self._new_flags)
            except BaseException:
                # Ctrl-C in the middle: rows half taken in would be counted twice.
                self._indexed = None
                self._index = self._make_index()
                raise
            self._indexed, self.num_illegal = span, self._index.num_illegal
        return span

    @property
    def starts(self) -> Span:
        """Where legal starts lie; see `samplers.base.View`."""
        known, ledger = self._span is self._indexed, self._ledger
        if known and self._of[0] is ledger.heads and self._of[1] is ledger.tails:
            # Nothing came or went since the last look, as between most draws.
            return self._index.starts
        with self.lock:
            self._look()
            return self._index.starts

    def legal(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Tell legal starts; see `samplers.base.View`."""
        return self._steps.legal(env_ids, positions, self._known()[0].stop)

    @property
    def law(self) -> Judge:
        """What decides which steps are legal."""
        return self._steps.law(self._known()[0].stop)

    def start_at(self, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by rank; see `samplers.base.View`."""
        return self._index.start_at(ranks)

    def legal_before(self, env_ids: Ids, positions: Ids) -> Ids:
        """Ranks of positions; see `samplers.ranks.legal_before`."""
        return self._index.legal_before(env_ids, positions)

    def check_in_force(self) -> None:
        """Refuse a draw that samplers would go back to a former generation for.

        Raises:
            ReplacedError: A thread put another one in force since this was asked for.
        """
        if self.replaced:
            raise ReplacedError(
                "this view is of a generation that was replaced, expected the one in "
                "force; ask the buffer for its view again"
            )

    def refresh(self) -> None:
        """Look at what the writer published since."""
        with self.lock:
            self._ledger.refresh()

    def check_uncut(self) -> None:
        """Refuse rows that were read beside a writer, after a look at its record.

        Raises:
            ReplacedError: It cut them before, and may have written others there.
        """
        ledger = self._ledger
        with self.lock:
            ledger.refresh()
        if ledger.cut:
            raise ReplacedError(CUT_ROWS)

    def check(self, env_ids: Ids, positions: Ids) -> None:
        """Refuse positions that are not alive.

        Raises:
            StaleError: A position was given up, or is not written yet.
            SchemaError: An environment is unknown.
        """
        if len(env_ids) and (env_ids.min() < 0 or env_ids.max() >= self._ring.num_envs):
            raise SchemaError(
                f"env_ids: got values in [{env_ids.min()}, {env_ids.max()}], expected "
                f"them in [0, {self._ring.num_envs}); environments are counted from 0"
            )
        span = self.span
        bad = (positions < span.first[env_ids]) | (positions >= span.stop[env_ids])
        if bad.any():
            which = int(np.flatnonzero(bad)[0])
            env_id, position = int(env_ids[which]), int(positions[which])
            raise StaleError(
                f"position {position} of environment {env_id} is not in the buffer, "
                f"expected one in [{span.first[env_id]}, {span.stop[env_id]}); it was "
                "overwritten, cleared, or is yet to be written"
            )

    @property
    def heads(self) -> Ids:
        """int64 ``[E]``: rows below are written."""
        return self._ledger.heads

    @property
    def moment(self) -> Moment:
        """What to keep before rows are copied; see `stale`."""
        return self._ledger.limits, self._ledger.tails

    def stale(
        self, env_ids: Ids, positions: Ids, moment: Moment
    ) -> NDArray[np.bool_] | None:
        """Tell which copied rows may have been overwritten while they were copied.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, alive at that moment; of steps that were folded
                the rows before them count, too.
            moment: `moment` from before the copying.

        Returns:
            bool ``[B]``, or None for none.

        Raises:
            ReplacedError: See `check_uncut`.
        """
        self.check_uncut()
        limits, tails = self._ledger.limits, self._ledger.tails
        if limits is moment[0] and (self._window is None or tails is moment[1]):
            return None
        edge = limits[env_ids] - self._ring.slots
        dead = positions - self._before < edge
        if self._window is not None and dead.any():
            # Where the episode begins later, nothing before it was read.
            with self.lock:
                begun = self.index.begun(env_ids, positions)
            dead = np.maximum(positions - self._before, begun) < edge
        if self._window is not None:
            # Folds ask the index for episodes, which knows no row that was given up.
            dead |= positions < self.span.first[env_ids]
        return dead if dead.any() else None

    def gather(self, env_ids: Ids, positions: Ids, contiguous: bool = False) -> Fields:
        """Copy steps with their next observations; see `StepReader.gather`."""
        known, index = self._known()
        return self._steps.gather(env_ids, positions, known.stop, index, contiguous)

    def _known(self) -> tuple[Span, EpisodeIndex]:
        """The rows whose flags are known, and the index of them.

        Rows that came since may be known to the ledger; of their flags nothing is.
        """
        index, known = self._index, self._indexed
        if known is None:
            # Drawn before this ring was put in another one's place.
            with self.lock:
                known, index = self._look(), self._index
        return known, index

    def plan(
        self, before: int, steps: int, direct: Direct, asked: Asked, sums: Sums | None
    ) -> Plan:
        """Find out what draws need to know; see `transforms.base.Rows`."""
        return self._steps.plan(before, steps, direct, asked, sums)

    def find(self, plan: Plan, env_ids: Ids, positions: Ids) -> Found:
        """Look around legal starts, and read; see `transforms.base.Rows`."""
        known = self._indexed
        if known is None:
            known = self._known()[0]
        return plan.find(env_ids, positions, known.stop)

    def read(self, paths: tuple[str, ...], env_ids: Ids, positions: Ids) -> Fields:
        """Copy stored fields of rows, nothing derived but the two ends."""
        return self._steps.read(paths, env_ids, positions, self._ledger.heads)

    def locate(self, env_ids: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """Begin and end of episodes; see `transforms.base.Rows`."""
        with self.lock:
            self._look()
            return self._index.locate(env_ids, positions)

    def known(self, env_ids: Ids, ends: Ids) -> Ids:
        """Where what is known of episodes ends; see `transforms.base.Rows`."""
        return self._steps.known(env_ids, ends, self._known()[0].stop)

    def intact(self, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Whether rows read until now were whole; see `transforms.base.Rows`."""
        self.check_uncut()
        whole: NDArray[np.bool_] = (
            positions >= self._ledger.limits[env_ids] - self._ring.slots
        )
        return whole

    def _new_flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of rows that the index takes in, and gathers look at from here on."""
        return self._store.flags(self._ring.rows(env_ids, positions), new=True)

    def flags(self, env_ids: Ids, positions: Ids) -> NDArray[np.uint8]:
        """Flags of rows, uint8 ``[B]``."""
        return self._store.flags(self._ring.rows(env_ids, positions))
