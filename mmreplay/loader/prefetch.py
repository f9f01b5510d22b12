"""Batches drawn and gathered ahead of the learner, by threads, in the order of draws.

**Order.** Draws are made one after another under one lock, each from what the buffer
holds and from its priorities at that time. The disk is asked for a draw's rows at once.
Threads gather the draws in that order, and the learner takes them in that order.

**Ctrl-C.** The learner waits on no lock that is written in Python, such as an
`Event`'s: Ctrl-C inside one may leave it held. What is done is written down before
anybody is woken for it, so that an interrupted call is made again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

from numpy.typing import ArrayLike

from mmreplay.batch import Batch
from mmreplay.buffer.draw import PendingDraw
from mmreplay.buffer.limiting import Limit
from mmreplay.buffer.reader import GenerationReader
from mmreplay.errors import FailedError, ReplayError
from mmreplay.process import Worker, owned_by_thread
from mmreplay.samplers.base import State
from mmreplay.samplers.holding import Claims
from mmreplay.schema import Schema
from mmreplay.storage.gather import BufferPool
from mmreplay.storage.read_ahead import Gathering


@dataclass(slots=True)
class PendingShare:
    """The draw from one buffer, as the whole of a batch or a share of it.

    Attributes:
        buffer_id: Number of the buffer.
        fraction: Its share of all steps.
        reader: The generation of the buffer that it was drawn from.
        drawn: The draw.
    """

    buffer_id: int
    fraction: float
    reader: GenerationReader
    drawn: PendingDraw

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return len(self.drawn.draw)


class PendingBatch:
    """A batch that was drawn and is not gathered yet, or the error in its place.

    Attributes:
        state: State of the source before the draw; None where even that failed.
        shares: The draws, one of each buffer that has a share, or what else the source
            gathers it by.
        hold: What the draws took; stored when the learner gets the batch.
        nbytes: Bytes that it is gathered from.
        requested: The disk was asked for its rows, or a look was not worth it.
        prefetched: Pages of its rows were missing, and are being read.
        result: What the learner gets.
        error: Raised in the learner.
        done: Set once the result or the error is stored.
    """

    # Defaults of the class: a learner that samples by itself makes one a batch.
    state: State | None = None
    shares: Sequence[Any] = ()
    nbytes = 0
    requested = prefetched = done = False
    result: Any = None
    error: BaseException | None = None

    def __init__(self) -> None:
        self.claims = Claims()


class Drawable(Protocol):
    """What a loader draws from: one buffer, or several.

    Threads: one at a time draws, samples and begins; any may gather.
    """

    @property
    def schema(self) -> Schema:
        """The fields of one step."""

    @property
    def in_shares(self) -> bool:
        """Whether batches are joined of shares, whose lengths change."""

    @property
    def calls_user_functions(self) -> bool:
        """Whether gathers call the user's functions, which may not be thread-safe."""

    def use_pool(self, pool: BufferPool) -> None:
        """Join batches in the memory of a pool; called before the first draw."""

    @property
    def limits(self) -> Sequence[Limit]:
        """Rate limits that have to allow each batch, and count it."""

    def begin(self) -> None:
        """Begin an iteration, which ends with the sampler's current epoch.

        Raises:
            FailedError: Another loader iterates over the sampler's epoch.
        """

    def end(self) -> None:
        """Leave the sampler's epoch to other loaders; a second call does nothing."""

    def owned_by_thread(self) -> bool:
        """Whether this thread holds a lock that draws wait for."""

    def more(self, count: int) -> bool:
        """Whether the epoch has another batch of so many steps."""

    def draw(self, pending: PendingBatch, count: int) -> bool:
        """Fill a pending batch with the next draw.

        Its state, that of before the draw, is set first: an interrupted caller loads
        it and draws again.

        Returns:
            Whether the epoch had another batch; if not, nothing was drawn.
        """

    def gather(self, pending: PendingBatch) -> Batch | None:
        """Copy the data of a draw.

        Returns:
            The batch; None where each of its steps was overwritten and the sampler
            draws each step once.
        """

    def sample(self, pending: PendingBatch, count: int) -> Batch | None:
        """Draw and gather at once; None where the epoch is over.

        Args:
            pending: Gets the state of before the draw, first of all.
            count: Steps, or windows.
        """

    def nbytes(self, pending: PendingBatch) -> int:
        """Bytes that a draw is gathered from."""

    def prefetch(self, pending: PendingBatch) -> int:
        """Ask the disk for a draw's rows; return the bytes that were missing."""

    def go_back(self, state: State) -> bool:
        """Draw from an earlier state of this iteration on, to repeat what failed.

        Returns:
            Whether the sampler draws by epochs, in which a batch that failed and is not
            drawn again would be missing; if not, nothing has changed.
        """

    def num_batches(self, count: int) -> int:
        """Batches of a whole epoch.

        Raises:
            TypeError: The sampler has no epochs.
        """

    def state_dict(self, priorities: bool = False) -> State:
        """State of the samplers now."""

    def load_state_dict(self, state: State) -> None:
        """Draw from a state on."""

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Set the priorities of a batch's steps; return how many were overwritten."""

    def count(self, batch: Batch, size: int) -> None:
        """Count a batch in the limits.

        Args:
            batch: As the learner got it.
            size: Steps that were asked for.
        """


QUICK_S = 100e-6
"""A learner that asks again sooner gathers small batches itself: a thread's batch,
waited for, comes later than its own (tools/bench/bench_loader.py)."""
HURRIED = 0.25
"""A learner that asks again within so much of the time of a gather is going to wait,
and leaves its core to one more thread: below a half, two gathers at once are done
sooner than one after the other beside the learner's work."""


class LearnerTiming:
    """How soon the learner asks for the next batch.

    Attributes:
        quick: At once, and the batches are small.
        hurried: Long before a gather would be over.
        gather_s: Seconds that the last gather took.
    """

    def __init__(self, quick_s: float = 0.0) -> None:
        """Know nothing yet.

        Args:
            quick_s: What counts as at once, where that is longer than `QUICK_S`.
        """
        self.quick = self.hurried = False
        self._quick_s = quick_s
        self.gather_s = self._delivered_at = 0.0

    def requested(self, small: bool) -> None:
        """Note that the learner asks for a batch, and whether batches are small."""
        away_s = perf_counter() - self._delivered_at
        self.hurried = away_s < HURRIED * self.gather_s
        self.quick = small and away_s < max(QUICK_S, self._quick_s)

    def delivered(self) -> None:
        """Note that the learner gets a batch."""
        self._delivered_at = perf_counter()


MAX_SKIPS = 64
"""Draws between two looks for missing pages, where none was missing for long."""
SMALL_NBYTES = 1 << 20
"""Larger batches are worth the hand-over between threads: 256 rows of pixels come twice
as fast from a thread, 4,096 rows of vectors, 680 KB, a fifth slower (bench_loader)."""


class ReadAheadBudget:
    """Asks the disk for batches in the order of their draws, within a number of bytes.

    Attributes:
        skips: Draws to come whose pages are not looked at.
    """

    def __init__(self, source: Drawable, max_nbytes: int) -> None:
        """Make one.

        Args:
            source: Where the batches are drawn from.
            max_nbytes: Bytes asked for and not gathered yet, at most; one batch is
                asked for whatever its size.
        """
        self._source = source
        self._max_nbytes = max_nbytes
        self._nbytes = self._last_skips = 0
        self.skips = 0

    @property
    def small(self) -> bool:
        """Whether batches are small, and no page was missing at the last look."""
        return self._last_skips > 0 and self._nbytes < SMALL_NBYTES

    @staticmethod
    def under_way(drawn: deque[PendingBatch]) -> int:
        """Bytes that were asked for and are not gathered yet."""
        # A copy, made in one step of C: the learner takes batches out meanwhile.
        batches = tuple(drawn)
        return sum([b.nbytes for b in batches if b.requested and not b.done])

    def request(self, drawn: deque[PendingBatch], ungathered: deque[PendingBatch]) -> None:
        """Ask for the oldest batches that were not asked for yet.

        Args:
            drawn: All batches that the learner has not taken.
            ungathered: Those of them that no thread gathers yet.
        """
        nbytes = self.under_way(drawn)
        for pending in ungathered:
            if pending.requested:
                continue
            pending.nbytes = self._nbytes = self._source.nbytes(pending)
            # Bounded: what is asked for and not gathered takes page cache, and beyond
            # memory it would push out pages that were asked for before it.
            if nbytes and nbytes + pending.nbytes > self._max_nbytes:
                return
            pending.requested, nbytes = True, nbytes + pending.nbytes
            # A look costs about 1 us for each of four rows: as much as a fifth of a
            # small batch, and is left out more and more while nothing is missing.
            if self.skips:
                self.skips -= 1
            elif self._source.prefetch(pending):
                # One missing page ends that: the next draws are looked at again, as a
                # row that was not asked for is waited for alone, 0.1 ms or more.
                self._last_skips, pending.prefetched = 0, True
            else:
                # Nothing is missing: look less and less often. Gathers look as well.
                self.skips = self._last_skips = min(MAX_SKIPS, 2 * self._last_skips + 1)


POLL_S = 0.1
"""Seconds that a thread waits for the lock before it looks whether it is to stop: the
lock's owner may be in a signal's handler that waits for this thread."""


class Prefetcher:
    """Draws and gathers batches of one source ahead of the learner.

    Threads: the learner calls `next`, `more`, `state` and `begin`; workers call `run`.
    `_lock` is held for draws. The learner takes batches out of `_drawn` without it.

    Attributes:
        nothing_left: The next iteration continues an epoch whose last batch was taken.
    """

    def __init__(
        self,
        source: Drawable,
        batch_size: int,
        prefetch: int,
        read_ahead_nbytes: int,
        pool: BufferPool,
        send: Callable[[Batch], Any],
        max_gathering: tuple[int, int] = (1, 1),
        quick_s: float = 0.0,
        says_end: bool = False,
    ) -> None:
        """Make one that has not begun.

        Args:
            source: Where batches are drawn from.
            batch_size: Steps a batch.
            prefetch: Batches drawn and not yet taken, at most.
            read_ahead_nbytes: Bytes that the disk is asked for at a time.
            pool: Memory of the batches.
            send: Makes of a batch what the learner gets; called in threads.
            max_gathering: Threads that gather at a time: as a rule, and while the
                learner waits that asked again at once.
            quick_s: See `LearnerTiming`.
            says_end: A state of an epoch's end leaves nothing of the iteration; else
                it is the state of before the next epoch.
        """
        self._source, self._batch_size = source, batch_size
        self._prefetch = prefetch
        self._budget = ReadAheadBudget(source, read_ahead_nbytes)
        self._pool, self._send = pool, send
        # Owned by a thread, and entered again by it: a signal's handler that closes the
        # loader, or a destructor, may run in the middle of a draw.
        self._lock = threading.RLock()
        # The batch that is being drawn, or sampled, now: its state is the loader's.
        self._in_draw: PendingBatch | None = None
        self._timing, self._in_next = LearnerTiming(quick_s), False
        # Batches that were drawn and not taken, oldest first: the order of hand-over.
        self._drawn: deque[PendingBatch] = deque()
        # Those of them that no thread gathers yet, in the same order.
        self._ungathered: deque[PendingBatch] = deque()
        self._max_gathering = max_gathering
        self._num_gathering = 0
        # Whether the epoch that was begun has more batches to draw.
        self._draws_on = False
        # Whether the learner iterates, and has not heard that its epoch is over.
        self._iterating = False
        self._says_end, self.nothing_left = says_end, False
        # A draw that failed ends draws until the learner, which got its error, asks
        # again: it may have done something about it.
        self._failed: PendingBatch | None = None
        self._failure_raised = False
        self._num_idle, self._stopping = 0, False
        self._learner_waits, self._abandoned = False, False
        self._alive: set[int] = set()
        # Queues written in C, not Conditions: their locks are in Python, and Ctrl-C
        # inside one may leave it held, for good.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._ready: SimpleQueue[None] = SimpleQueue()

    def begin(self) -> None:
        """Draw from here on; batches that were drawn and not taken come first.

        An epoch whose last batch was taken is over, also where the learner, which
        counted its batches, did not ask for one more. Of an iteration that continues
        a state of its end, nothing is left.

        Raises:
            FailedError: See `Drawable.begin`.
        """
        # Asked of the source first: if another loader owns the epoch, nothing has
        # changed.
        with self._lock:
            if self.nothing_left:
                self._stopping = False
            elif not self._draws_on or self._find_end():
                self._source.begin()
                self._stopping, self._draws_on = False, True
            self._iterating = True
        self._wake_thread()

    def _find_end(self) -> bool:
        """Whether the epoch's last batch was taken; the source then ends the epoch."""
        if self._drawn:
            return False
        if self._draws_on and not self._source.more(self._batch_size):
            self._draws_on = self._source.draw(PendingBatch(), self._batch_size)
        return not self._draws_on

    def at_end(self) -> bool:
        """Whether an iteration from `state` on has no batch: it ends the epoch.

        That is so from the last batch on until the learner hears of the end, by None
        from `next`.
        """
        if not (self._says_end and self._iterating) or self._source.owned_by_thread():
            return self.nothing_left
        # What fails here is raised by the next draw.
        with suppress(ReplayError), self._lock:
            return self.nothing_left or self._find_end()
        return False

    def resume(self, at_end: bool) -> None:
        """Continue from the state that the source has loaded; no thread may run.

        Args:
            at_end: As `at_end` was with the state.
        """
        self._iterating, self.nothing_left = False, at_end

    def more(self) -> bool:
        """Whether there is another batch, as far as is known before it is drawn."""
        with self._lock:
            if self._drawn or not self._draws_on:
                return len(self._drawn) > 0
            return self._source.more(self._batch_size)

    def num_ready(self) -> int:
        """Batches that wait for the learner; any thread may ask."""
        # A copy, made in one step of C: the learner takes batches out meanwhile.
        return sum(batch.result is not None for batch in tuple(self._drawn))

    def next(self) -> tuple[Any, Claims] | None:
        """Return the next batch and what it took, or None where the epoch is over.

        Raises:
            BaseException: The error of its draw or gather, in whichever thread.
            FailedError: Another call is under way.
        """
        if self._in_next:
            raise FailedError(
                "ReplayLoader: another call of next is in progress. Take batches in "
                "one thread, or give each thread a loader over its own buffer."
            )
        # No call lies between the look and this line, so that neither another thread
        # nor Ctrl-C comes between them.
        self._in_next = True
        try:
            if self._failure_raised:
                self._failed, self._failure_raised = None, False
            # While pages are missing, threads look further ahead than a learner does.
            # Small batches in memory are drawn by the learner itself: handed over by a
            # thread 4,096 rows of vectors, 680 KB, come a fifth later.
            small = self._budget.small
            self._timing.requested(small)
            if small and self._budget.skips and not self._drawn:
                # Nothing is drawn ahead for a learner that was quick so far, or that is
                # faster than threads.
                sampled = self._sample()
                if sampled is not None:
                    if not self._timing.quick:
                        self._wake_thread()
                    self._timing.delivered()
                    if sampled.result is None:
                        self._iterating = False
                        return None
                    return sampled.result, sampled.claims
            while True:
                pending = self._take_oldest()
                self._timing.delivered()
                if pending is None:
                    if not self._stopping:
                        self._iterating = self.nothing_left = False
                    return None
                if pending.error is not None:
                    break
                # A thread that waits still names the last batch that it gathered:
                # memory that it referred to would not be used again.
                result, pending.result = pending.result, None
                if result is not None:
                    return result, pending.claims
                pending.claims.release()
            # The traceback of an error holds the frames of the callers, and the loader
            # with them: held here, it would keep the loader and its threads alive after
            # the last other reference is gone.
            error, pending.error = pending.error, None
            pending.claims.release()
            try:
                raise _raisable(error)
            finally:
                del pending, error
        finally:
            self._in_next = False

    def _take_oldest(self) -> PendingBatch | None:
        """Take the oldest batch out once it is done; None where none is to come."""
        drawn = self._drawn
        while not (drawn and drawn[0].done):
            if self._stopping or not (drawn or self._draws_on):
                return None
            if not (self._timing.quick and self._gather_oldest()):
                self._wait()
        pending = drawn[0]
        if pending.error is not None:
            self._go_back(pending)
            if not drawn:
                # A signal's handler closed the loader meanwhile.
                return None
        # Written down before the batch is out: a draw that failed is over only once.
        self._failure_raised = self._failed is pending
        drawn.popleft()
        # One batch fewer is drawn ahead: an idle thread may draw the next one.
        if not self._timing.quick:
            self._wake_thread()
        return pending

    def _go_back(self, pending: PendingBatch) -> None:
        """Have a batch that failed, and those behind it, drawn again if by epochs.

        An epoch would lack its steps otherwise. Ctrl-C anywhere here has it repeated,
        as the batch that failed is still the oldest one.
        """
        with self._lock:
            state = pending.state
            if state is None or self._stopping or not self._source.go_back(state):
                return
            # As after a draw that failed: nothing is drawn until the learner asks.
            self._failed, self._draws_on = pending, True
            self._ungathered.clear()
            while len(self._drawn) > 1:
                self._drawn.pop().claims.release()

    def _sample(self) -> PendingBatch | None:
        """Draw and gather a batch in the learner's thread, none being drawn ahead.

        Returns:
            It, without a result where the epoch is over; None where threads have begun.

        Raises:
            BaseException: What failed.
        """
        pending = PendingBatch()
        try:
            with self._lock, self._pool:
                self._in_draw = pending
                if not self._draws_on or self._drawn or self._failed is not None or self._stopping:
                    return None
                self._budget.skips -= 1
                try:
                    batch = self._source.sample(pending, self._batch_size)
                    if batch is None:
                        self._draws_on = False
                    else:
                        pending.result = self._send(batch)
                    return pending
                except Exception:
                    pending.claims.release()
                    if pending.state is not None:
                        self._source.go_back(pending.state)
                    raise
        except StopIteration as error:
            raise _raisable(error) from error
        except Exception:
            raise
        except BaseException:
            # Ctrl-C: the batch that it struck is drawn when the learner asks again.
            pending.claims.release()
            if pending.state is not None:
                self._source.load_state_dict(pending.state)
            raise
        finally:
            self._in_draw = None

    def _gather_oldest(self) -> bool:
        """Gather the oldest batch in the learner's thread, if no thread has begun it.

        Returns:
            Whether the oldest batch is done.
        """
        # Under the lock for the draw alone: threads may draw and gather other batches
        # while this one is copied.
        with self._lock:
            if not self._drawn and self._draws_on and self._failed is None:
                self._draw()
                if self._budget.skips:
                    self._budget.skips -= 1
                else:
                    self._budget.request(self._drawn, self._ungathered)
            if not self._ungathered or self._ungathered[0] is not self._drawn[0]:
                return bool(self._drawn) and self._drawn[0].done
            pending = self._ungathered.popleft()
        try:
            with self._pool:
                self._gather(pending, Exception)
        except BaseException:
            # Ctrl-C: it is gathered when the learner asks again.
            self._ungathered.appendleft(pending)
            raise
        if pending.error is not None and not self._drawn:
            # A signal's handler closed the loader meanwhile.
            raise _raisable(pending.error)
        return True

    def _wait(self) -> None:
        """Wait, in the learner's thread, until a batch is done or none is to come."""
        drawn = self._drawn
        # Said before the look: a thread that is done after it wakes the learner.
        self._learner_waits = True
        try:
            come = drawn[0].done if drawn else not self._draws_on
            if not come and not self._stopping:
                self._wake_thread()
                self._ready.get()
        finally:
            self._learner_waits = False

    def _wake_thread(self) -> None:
        """Have a thread look for work, if one has none."""
        if self._num_idle:
            self._wake.put(None)

    def _wake_learner(self) -> None:
        """Have the learner look for its batch, if it waits."""
        if self._learner_waits:
            self._ready.put(None)

    def state(self) -> State:
        """State of the source before the draw of the batch that the learner takes next.

        Draws are ahead of the learner by up to `prefetch` batches, and so is the state
        of the sampler.
        """
        if self._source.owned_by_thread():
            # No other thread can draw now; one that began to may hold the lock.
            return self._state_before()
        with self._lock:
            return self._state_before()

    def _state_before(self) -> State:
        pending = self._drawn[0] if self._drawn else self._in_draw
        state = None if pending is None else pending.state
        return state or self._source.state_dict()

    def owned_by_thread(self) -> bool:
        """Whether this thread holds a lock that the other threads may wait for."""
        return owned_by_thread(self._lock) or self._source.owned_by_thread()

    def stop(self, num_threads: int) -> None:
        """Have every thread end after its current batch, and the learner not wait."""
        # One wake-up for each thread, whether it sleeps or not: one that is left over
        # is a look for work that finds none.
        self._stopping = True
        for _ in range(num_threads):
            self._wake.put(None)
        self._ready.put(None)

    def reset(self) -> None:
        """Drop what was drawn, and put the sampler back to where the learner is.

        No thread may run.
        """
        self.nothing_left, self._iterating = self.at_end(), False
        # Draws ran ahead of the learner by up to `prefetch` batches. Put back to the
        # oldest one, the next iteration draws the same batches again.
        before = self._drawn[0].state if self._drawn else None
        if before is not None:
            self._source.load_state_dict(before)
        self._source.end()
        while self._drawn:
            # Taken out first, so that a batch that a learner takes is not released.
            self._drawn.popleft().claims.release()
        self._ungathered.clear()
        self._num_idle = self._num_gathering = 0
        self._draws_on = self._failure_raised = self._abandoned = False
        self._failed = None

    def abandon(self) -> None:
        """Have the last thread `reset` this as it ends."""
        self._abandoned = True
        if not self._alive:
            self.reset()

    def run(self, _: Worker[None]) -> None:
        """Draw and gather until the end, in a worker."""
        self._alive.add(threading.get_ident())
        try:
            with self._pool:
                pending = None
                while not self._stopping:
                    pending = self._draw_ahead(pending is not None)
                    if pending is not None:
                        self._gather(pending)
                    elif not self._stopping:
                        self._wake.get()
                        if self._acquire():
                            self._num_idle -= 1
                            self._lock.release()
        finally:
            self._alive.discard(threading.get_ident())
            if self._abandoned and not self._alive:
                with self._lock:
                    self.reset()

    def _acquire(self) -> bool:
        """Take the lock, in a worker; False where it is to stop instead."""
        while not self._lock.acquire(timeout=POLL_S):
            if self._stopping:
                return False
        return True

    def _draw_ahead(self, gathered: bool) -> PendingBatch | None:
        """Draw what may be drawn, and take the oldest batch that is to be gathered.

        Where there is none, this thread counts as idle.

        Args:
            gathered: This thread has just gathered another batch.
        """
        if not self._acquire():
            return None
        try:
            self._num_gathering -= gathered
            # Said before the look: a learner that takes a batch meanwhile wakes it.
            self._num_idle += 1
            while (
                self._draws_on
                and not self._timing.quick
                and not self._stopping
                and self._failed is None
                and len(self._drawn) < self._prefetch
            ):
                self._draw()
            # What fails here fails in the gather as well, which raises it.
            with suppress(Exception):
                self._budget.request(self._drawn, self._ungathered)
            limit = self._max_gathering[self._timing.hurried]
            if not self._ungathered or self._stopping or self._num_gathering >= limit:
                return None
            pending = self._ungathered.popleft()
            self._num_idle -= 1
            self._num_gathering += 1
            if self._ungathered and self._num_gathering < limit:
                self._wake_thread()
            return pending
        finally:
            self._lock.release()

    def _draw(self) -> None:
        """Draw one batch, under the lock."""
        self._in_draw = pending = PendingBatch()
        try:
            if not self._source.draw(pending, self._batch_size):
                self._draws_on = False
                self._wake_learner()
                return
            # In this order: a thread that sees it as the oldest drawn batch also sees
            # it among the ungathered ones.
            self._ungathered.append(pending)
            self._drawn.append(pending)
        except BaseException as error:
            pending.claims.release()
            if not isinstance(error, Exception) and pending.state is not None:
                # Ctrl-C: what it struck is drawn when the learner asks again.
                self._source.load_state_dict(pending.state)
            pending.error, pending.done = error, True
            self._failed = pending
            self._drawn.append(pending)
            self._wake_learner()
        finally:
            self._in_draw = None

    def _gather(self, pending: PendingBatch, caught: type[BaseException] = BaseException) -> None:
        """Gather a batch and mark it done, with its result or what was caught."""
        # Without the loader's lock: any number of threads gather at a time.
        began = perf_counter()
        try:
            with Gathering(pending.prefetched):
                batch = self._source.gather(pending)
            # Where no step was left of it, the learner goes on with the next batch.
            pending.result = None if batch is None else self._send(batch)
        except caught as error:
            pending.error = error
        # The draw refers to a view of the buffer, and that to its files.
        pending.shares = ()
        self._timing.gather_s = perf_counter() - began
        # Done first, then the look whether the learner waits, which says so before its
        # own look: in this order one of both sees the other, and no wake-up is lost.
        pending.done = True
        self._wake_learner()


def _raisable(error: BaseException) -> BaseException:
    """The error itself, unless it would end the learner's loop without a word."""
    if not isinstance(error, StopIteration):
        return error
    changed = RuntimeError("a sampler or transform raised StopIteration")
    changed.__cause__ = error
    return changed
