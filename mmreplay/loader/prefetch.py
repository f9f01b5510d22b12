"""Draws that are made now and copied later, in any thread, and who makes them.

How soon a learner comes back for the next batch, and what follows from it.

Asking the disk ahead of gathers: within bounds, and seldom where it need not be.

Draws, reads ahead and gathers in threads, in the order of the draws.

Draws are made one after another under one lock, each from what the buffer holds and
its priorities are at that moment; the disk is asked for their rows at once, and
threads copy them in that order. The learner takes them in that order, too.

The learner waits on no lock of Python's own: Ctrl-C inside one may leave it held. What
is done is written down first and told afterwards: an interrupted call is made again.
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
from mmreplay.buffer.reader import Reader
from mmreplay.errors import FailedError
from mmreplay.process import Worker, owned_by_thread
from mmreplay.samplers.base import State
from mmreplay.storage.buffer_pool import BufferPool
from mmreplay.storage.read_ahead import Gathering


@dataclass(slots=True)
class Part:
    """What was drawn from one buffer.

    Attributes:
        number: Which buffer.
        fraction: Its share of all steps.
        reader: What it was drawn with.
        drawn: The draw.
    """

    number: int
    fraction: float
    reader: Reader
    drawn: PendingDraw

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return len(self.drawn.draw)


class Order:
    """A batch that was drawn and is to be copied.

    Attributes:
        state: That of the source before the draw; None where even that failed.
        parts: What was drawn, of each buffer.
    """

    __slots__ = ("parts", "state")

    def __init__(self) -> None:
        self.state: State | None = None
        self.parts: Sequence[Part] = ()


class PendingBatch(Order):
    """One batch on its way, or the error in its place.

    Attributes:
        nbytes: What it is read from.
        asked: The disk was asked for it, or it was left at what was seen before.
        early: Pages were missing, and are on their way.
        result: What the learner is to have.
        error: Raised in the learner.
        done: One of both is there.
    """

    __slots__ = ("asked", "done", "early", "error", "nbytes", "result")

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.asked = self.early = self.done = False
        self.result: Any = None
        self.error: BaseException | None = None


class Source(Protocol):
    """What is drawn from. One thread at a time draws; any may copy."""

    def begin(self) -> None:
        """Begin an iteration, which ends where the epoch does that is under way.

        Raises:
            FailedError: Another loader goes through the sampler's epoch.
        """

    def end(self) -> None:
        """Leave the sampler to others; a second call does nothing."""

    def held(self) -> bool:
        """Whether this thread is in the middle of what draws wait for."""

    def more(self, count: int) -> bool:
        """Whether the epoch has another batch."""

    def draw(self, order: Order, count: int) -> bool:
        """Fill an order with the next draw.

        The state from before it is there first: who is interrupted goes back to it.

        Returns:
            Whether the epoch had another batch; where not, nothing was drawn.
        """

    def make(self, order: Order, count: int) -> Batch | None:
        """Draw and copy at once, until there is something; None: an epoch is over."""

    def nbytes(self, order: Order) -> int:
        """Bytes that it is copied from."""

    def ask(self, order: Order) -> int:
        """Ask the disk for its rows; return bytes asked for, 0 where all are there."""

    def finish(self, order: Order) -> Batch | None:
        """Copy the data of an order; None where nothing is left of it to be had."""

    def num_batches(self, count: int) -> int:
        """Batches of a whole epoch.

        Raises:
            TypeError: There are no epochs.
        """

    def state_dict(self, priorities: bool = False) -> State:
        """State of what draws now."""

    def load_state_dict(self, state: State) -> None:
        """Draw from a state on."""

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Give the steps of a batch new priorities; return how many were dropped."""

    @property
    def limits(self) -> Sequence[Limit]:
        """What has to allow a batch, and is told of it."""

    def count(self, batch: Batch, size: int) -> None:
        """Tell limits of a batch."""


def raisable(error: BaseException) -> BaseException:
    """The error itself, unless it would end the learner's loop without a word."""
    if not isinstance(error, StopIteration):
        return error
    changed = RuntimeError("a sampler or transform raised StopIteration")
    changed.__cause__ = error
    return changed


QUICK_S = 100e-6
"""A learner that is back sooner makes small batches itself: to have a thread make one
and wait for it takes longer than the batch (tools/bench/bench_loader.py)."""
HURRIED = 0.25
"""A learner that is back within so much of the time that a gather takes is going to
wait, and leaves its core to one thread more: at less than a half, two batches are done
sooner than one after the other beside what the learner does."""


class LearnerTiming:
    """Of one learner.

    Attributes:
        quick: It is back at once, for a small batch.
        hurried: It is back long before a gather is over.
        gather_s: What the last gather took, in seconds.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.quick = self.hurried = False
        self.gather_s = self._left_at = 0.0

    def back(self, small: bool) -> None:
        """It asks for a batch, a small one or not."""
        away_s = perf_counter() - self._left_at
        self.hurried = away_s < HURRIED * self.gather_s
        self.quick = small and away_s < QUICK_S

    def leaves(self) -> None:
        """It has got one."""
        self._left_at = perf_counter()


MAX_RESTS = 64
"""Draws between two looks whether pages are missing, where none was for long."""
SMALL_NBYTES = 1 << 20
"""Larger ones pay for the way between threads: 256 rows of pixels came twice as fast
from a thread, 4,096 rows of vectors, 680 KB, a fifth slower (bench_loader)."""


class ReadAheadBudget:
    """Asks for batches in the order of their draws.

    Attributes:
        rests: Draws to come that are not looked at.
    """

    def __init__(self, source: Source, most_nbytes: int) -> None:
        """Ask for at most so many bytes at a time, and for a batch whatever it has."""
        self._source = source
        self._most_nbytes = most_nbytes
        self._nbytes = self._rest = 0
        self.rests = 0

    @property
    def small(self) -> bool:
        """Whether batches are small, and no page was missing at the last look."""
        return self._rest > 0 and self._nbytes < SMALL_NBYTES

    @staticmethod
    def under_way(entries: deque[PendingBatch]) -> int:
        """Bytes that were asked for and are not gathered yet."""
        # A copy, made at once: the learner takes out what is done.
        each = tuple(entries)
        return sum([entry.nbytes for entry in each if entry.asked and not entry.done])

    def finish(self, entry: PendingBatch) -> Batch | None:
        """Copy the data of an entry; see `Source.finish`."""
        with Gathering(entry.early):
            return self._source.finish(entry)

    def ask(self, entries: deque[PendingBatch], pending: deque[PendingBatch]) -> None:
        """Ask for the oldest that were not asked for yet.

        Args:
            entries: All that were drawn and not taken.
            pending: Those that no thread gathers yet.
        """
        asked = self.under_way(entries)
        for entry in pending:
            if entry.asked:
                continue
            entry.nbytes = self._nbytes = self._source.nbytes(entry)
            if asked and asked + entry.nbytes > self._most_nbytes:
                return
            entry.asked, asked = True, asked + entry.nbytes
            if self.rests:
                self.rests -= 1
            elif self._source.ask(entry):
                self._rest, entry.early = 0, True
            else:
                # All is in memory: look less and less often, gathers look as well.
                self.rests = self._rest = min(MAX_RESTS, 2 * self._rest + 1)


POLL_S = 0.1
"""Between looks of a thread that waits for the lock whether it is to stop: a signal's
handler may have come over who holds it, and wait for that thread."""
NOTHING = object()
"""In place of a batch that a thread is to make."""


class Prefetcher:
    """Batches of one source, ahead of who takes them.

    Threads: one learner calls; the others are its own.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        prefetch: int,
        read_ahead_nbytes: int,
        recycler: BufferPool,
        send: Callable[[Batch], Any],
        at_once: tuple[int, int] = (1, 1),
    ) -> None:
        """Make one that has not begun.

        Args:
            source: What is drawn from.
            batch_size: Steps a batch.
            prefetch: Batches drawn and not yet taken, at most.
            read_ahead_nbytes: Bytes that the disk is asked for at a time.
            recycler: Memory of the batches.
            send: Makes of a batch what the learner is given; called in threads.
            at_once: Threads that gather at a time, and while the learner waits that
                came back at once.
        """
        self._source, self._batch_size = source, batch_size
        self._prefetch = prefetch
        self._asking = ReadAheadBudget(source, read_ahead_nbytes)
        self._recycler, self._send = recycler, send
        self._turn = threading.RLock()
        self._making: Order | None = None
        self._pace, self._taking = LearnerTiming(), False
        self._entries: deque[PendingBatch] = deque()
        self._pending: deque[PendingBatch] = deque()
        self._at_once = at_once
        self._gathering = 0
        self._drawing = self._told = False
        self._failed: PendingBatch | None = None
        self._idle, self._stop, self._waits, self._abandoned = 0, False, False, False
        self._alive: set[int] = set()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._ready: SimpleQueue[None] = SimpleQueue()

    def begin(self) -> None:
        """Draw from here on; what was drawn and not taken comes first.

        Raises:
            FailedError: See `Source.begin`.
        """
        with self._turn:
            if not self._drawing:
                self._source.begin()
                self._stop, self._drawing = False, True
        self._call()

    def more(self) -> bool:
        """Whether there is another batch, as far as can be told before it is drawn."""
        with self._turn:
            if self._entries or not self._drawing:
                return len(self._entries) > 0
            return self._source.more(self._batch_size)

    def take(self) -> Any:
        """Return the next batch, or None where the epoch is over.

        Raises:
            BaseException: What failed in a thread.
            FailedError: Another call is under way.
        """
        if self._taking:
            raise FailedError(
                "ReplayLoader: got next while another is under way, expected one at a "
                "time; give each thread a loader over a buffer of its own"
            )
        # Nothing is called in between, so neither a thread nor Ctrl-C comes there.
        self._taking = True
        try:
            return self._take()
        finally:
            self._taking = False

    def _take(self) -> Any:
        if self._told:
            # Only now: the learner may have done something about it.
            self._failed, self._told = None, False
        # While pages are missing, threads look further ahead than a learner does.
        small = self._asking.small
        self._pace.back(small)
        if small and self._asking.rests and not self._entries:
            # None is ahead of one that was quick so far, or is faster than threads.
            found = self._make()
            if found is not NOTHING:
                if not self._pace.quick:
                    self._call()
                self._pace.leaves()
                return found
        while True:
            entry = self._first()
            self._pace.leaves()
            if entry is None:
                return None
            if entry.error is not None:
                break
            # A thread that waits still names the last entry that it made.
            result, entry.result = entry.result, None
            if result is not None:
                return result
        # The error's traceback holds whoever called, and the loader: what is held here
        # would keep it and its threads alive when everybody else has dropped it.
        error, entry.error = entry.error, None
        try:
            raise raisable(error)
        finally:
            del entry, error

    def _first(self) -> PendingBatch | None:
        """Take the oldest out once it is done; None where none is to come."""
        entries = self._entries
        while not (entries and entries[0].done):
            if self._stop or not (entries or self._drawing):
                return None
            if not (self._pace.quick and self._help()):
                self._await()
        entry = entries[0]
        self._told = self._failed is entry
        entries.popleft()
        if not self._pace.quick:
            self._call()
        return entry

    def _make(self) -> Any:
        """Draw and make a batch here and now, none being under way.

        Returns:
            The batch; None where the epoch is over; NOTHING where threads have begun.

        Raises:
            BaseException: What failed.
        """
        order = Order()
        try:
            with self._turn, self._recycler:
                self._making = order
                if not self._drawing or self._entries or self._failed or self._stop:
                    return NOTHING
                self._asking.rests -= 1
                batch = self._source.make(order, self._batch_size)
                if batch is None:
                    self._drawing = False
                    return None
                return self._send(batch)
        except StopIteration as error:
            raise raisable(error) from error
        except Exception:
            raise
        except BaseException:
            # Ctrl-C: what it struck is drawn when the learner asks again.
            if order.state is not None:
                self._source.load_state_dict(order.state)
            raise
        finally:
            self._making = None

    def _help(self) -> bool:
        """Make the batch to be taken next, if no thread has begun it."""
        with self._turn:
            if not self._entries and self._drawing and self._failed is None:
                self._draw()
                if self._asking.rests:
                    self._asking.rests -= 1
                else:
                    self._asking.ask(self._entries, self._pending)
            if not self._pending or self._pending[0] is not self._entries[0]:
                return bool(self._entries) and self._entries[0].done
            entry = self._pending.popleft()
        try:
            with self._recycler:
                self._gather(entry, Exception)
        except BaseException:
            # Ctrl-C: it is made when the learner asks again.
            self._pending.appendleft(entry)
            raise
        if entry.error is not None and not self._entries:
            # By a signal's handler that closed the loader meanwhile.
            raise raisable(entry.error)
        return True

    def _await(self) -> None:
        """Wait until an entry is done, or none is to come."""
        entries = self._entries
        self._waits = True
        try:
            come = entries[0].done if entries else not self._drawing
            if not come and not self._stop:
                self._call()
                self._ready.get()
        finally:
            self._waits = False

    def _call(self) -> None:
        """Have a thread look for work, if one has none."""
        if self._idle:
            self._wake.put(None)

    def _tell(self) -> None:
        """Have the learner look, if it waits."""
        if self._waits:
            self._ready.put(None)

    def state(self) -> State:
        """The source's state before the draw of the batch to be taken next."""
        if self._source.held():
            # Nobody else draws meanwhile, and who began to may have the lock.
            return self._before()
        with self._turn:
            return self._before()

    def _before(self) -> State:
        order = self._entries[0] if self._entries else self._making
        before = order and order.state
        return before or self._source.state_dict()

    def entangled(self) -> bool:
        """Whether this thread holds what the others may wait for."""
        return owned_by_thread(self._turn) or self._source.held()

    def stop(self, num_threads: int) -> None:
        """Have every thread end after what it is doing, and the learner not wait."""
        self._stop = True
        for _ in range(num_threads):
            self._wake.put(None)
        self._ready.put(None)

    def forget(self) -> None:
        """Drop what was drawn and put the source back; no thread may be running."""
        before = self._entries[0].state if self._entries else None
        if before is not None:
            self._source.load_state_dict(before)
        self._source.end()
        self._entries.clear()
        self._pending.clear()
        self._idle = self._gathering = 0
        self._drawing = self._told = self._abandoned = False
        self._failed = None

    def abandon(self) -> None:
        """Have the last thread `forget` when it ends."""
        self._abandoned = True
        if not self._alive:
            self.forget()

    def run(self, _: Worker[None]) -> None:
        """Draw and gather until the end, in each worker."""
        self._alive.add(threading.get_ident())
        try:
            with self._recycler:
                self._work()
        finally:
            self._alive.discard(threading.get_ident())
            if self._abandoned and not self._alive:
                with self._turn:
                    self.forget()

    def _work(self) -> None:
        """Draw and gather until told to stop."""
        entry = None
        while not self._stop:
            entry = self._next(entry is not None)
            if entry is not None:
                self._gather(entry)
            elif not self._stop:
                self._wake.get()
                if self._enter():
                    self._idle -= 1
                    self._turn.release()

    def _enter(self) -> bool:
        """Take the lock, in a thread; False where it is to stop instead."""
        while not self._turn.acquire(timeout=POLL_S):
            if self._stop:
                return False
        return True

    def _next(self, gathered: bool) -> PendingBatch | None:
        """Draw what may be drawn, and take the oldest that is to be gathered.

        Where there is none, this thread counts as idle.

        Args:
            gathered: This thread has done so with another.
        """
        if not self._enter():
            return None
        try:
            self._gathering -= gathered
            # Said before it is looked: who makes room meanwhile then calls.
            self._idle += 1
            while (
                self._drawing and not self._pace.quick and not self._stop
                and self._failed is None and len(self._entries) < self._prefetch
            ):  # fmt: skip
                self._draw()
            # What is wrong here is wrong with the gather as well, which says so.
            with suppress(Exception):
                self._asking.ask(self._entries, self._pending)
            most = self._at_once[self._pace.hurried]
            if not self._pending or self._stop or self._gathering >= most:
                return None
            entry = self._pending.popleft()
            self._idle -= 1
            self._gathering += 1
            if self._pending and self._gathering < most:
                self._call()
            return entry
        finally:
            self._turn.release()

    def _draw(self) -> None:
        """Draw one batch, under the lock."""
        self._making = entry = PendingBatch()
        try:
            if not self._source.draw(entry, self._batch_size):
                self._drawing = False
                self._tell()
                return
            self._pending.append(entry)
            self._entries.append(entry)
        except BaseException as error:
            if not isinstance(error, Exception) and entry.state is not None:
                # Ctrl-C: what it struck is drawn when the learner asks again.
                self._source.load_state_dict(entry.state)
            entry.error, entry.done = error, True
            self._failed = entry
            self._entries.append(entry)
            self._tell()
        finally:
            self._making = None

    def _gather(
        self, entry: PendingBatch, caught: type[BaseException] = BaseException
    ) -> None:
        """Copy a batch and say that it is done, or what was caught on the way."""
        began = perf_counter()
        try:
            batch = self._asking.finish(entry)
            # Where nothing was left of it, the learner goes on with the next one.
            entry.result = None if batch is None else self._send(batch)
        except caught as error:
            entry.error = error
        entry.parts = ()
        self._pace.gather_s = perf_counter() - began
        entry.done = True
        self._tell()
