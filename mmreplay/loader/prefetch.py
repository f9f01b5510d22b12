"""Draws, reads ahead and gathers in threads, in the order of the draws.

Draws are made one after another under one lock, each from what the buffer holds and
its priorities are at that moment; the disk is asked for their rows at once, and
threads copy them in that order. The learner takes them in that order, too.

Nothing here waits on a lock of Python's own: Ctrl-C inside one may leave it held.
What is done is written down first and told afterwards, so that a call that was
interrupted can be made again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from mmreplay.batch import Batch
from mmreplay.loader.sources import Order, Source
from mmreplay.samplers.base import State
from mmreplay.storage.recycler import Recycler

MAX_RESTS = 64
"""Draws between two looks whether pages are missing, where none was for long."""
QUICK_S = 100e-6
"""A learner that is back sooner makes small batches itself: to have a thread make one
and wait for it takes longer than the batch (tools/bench/bench_loader.py)."""
SMALL_NBYTES = 1 << 20
"""Larger ones pay for the way between threads: 256 rows of pixels came twice as fast
from a thread, 4,096 rows of vectors, 680 KB, a fifth slower (the same script)."""
HURRIED = 0.25
"""A learner that is back within so much of the time that a gather takes is going to
wait, and leaves its core to one thread more: at less than a half, two batches are done
sooner than one after the other beside what the learner does."""
NOTHING = object()
"""In place of a batch that a thread is to make."""


class Entry(Order):
    """One batch on its way, or the error in its place.

    Attributes:
        nbytes: What it is read from.
        asked: The disk was asked for it.
        result: What the learner is to have.
        error: Raised in the learner.
        done: One of both is there.
    """

    __slots__ = ("asked", "done", "error", "nbytes", "result")

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.asked = self.done = False
        self.result: Any = None
        self.error: BaseException | None = None


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
        recycler: Recycler,
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
        self._source = source
        self._batch_size = batch_size
        self._prefetch = prefetch
        self._read_ahead_nbytes = read_ahead_nbytes
        self._recycler = recycler
        self._send = send
        self._turn = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._pending: deque[Entry] = deque()
        self._asked_nbytes = 0
        self._rest = self._rests = 0
        self._nbytes = 0
        self._quick = False
        self._handed_at = self._gather_s = 0.0
        self._hurried = False
        self._at_once = at_once
        self._gathering = 0
        self._drawing = False
        self._failed: Entry | None = None
        self._told = False
        self._stop = self._waits = False
        self._idle = 0
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._ready: SimpleQueue[None] = SimpleQueue()

    def begin(self) -> None:
        """Draw from here on; what was drawn and not taken comes first."""
        with self._turn:
            if not self._drawing:
                self._source.begin()
                self._drawing = True
        self._call()

    def take(self) -> Any:
        """Return the next batch, or None where the epoch is over.

        Raises:
            BaseException: What failed in a thread.
        """
        entries = self._entries
        if self._told:
            # Only now: the learner may have done something about it.
            self._failed, self._told = None, False
        away_s = perf_counter() - self._handed_at
        self._hurried = away_s < HURRIED * self._gather_s
        # While pages are missing, threads look further ahead than a learner does.
        small = self._rest > 0 and self._nbytes < SMALL_NBYTES
        self._quick = small and away_s < QUICK_S
        if small and self._rests and not entries:
            # None is ahead of one that was quick so far, or is faster than threads.
            found = self._make()
            if found is not NOTHING:
                if not self._quick:
                    self._call()
                self._handed_at = perf_counter()
                return found
        while not (entries and entries[0].done):
            if self._stop or not (entries or self._drawing):
                return None
            if not (self._quick and self._help()):
                self._await()
        entry = entries[0]
        self._told = self._failed is entry
        entries.popleft()
        if not self._quick:
            self._call()
        self._handed_at = perf_counter()
        if entry.error is None:
            # A thread that waits still names the last entry that it made.
            result, entry.result = entry.result, None
            return result
        # The error's traceback holds whoever called, and the loader: what is held here
        # would keep it and its threads alive when everybody else has dropped it.
        error, entry.error = entry.error, None
        try:
            raise _raisable(error)
        finally:
            del entry, error

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
                if not self._drawing or self._entries or self._failed or self._stop:
                    return NOTHING
                self._rests -= 1
                batch = self._source.make(order, self._batch_size)
                if batch is None:
                    self._drawing = False
                    return None
                return self._send(batch)
        except StopIteration as error:
            raise _raisable(error) from error
        except Exception:
            raise
        except BaseException:
            # Ctrl-C: what it struck is drawn when the learner asks again.
            if order.state is not None:
                self._source.load_state_dict(order.state)
            raise

    def _help(self) -> bool:
        """Make the batch to be taken next, if no thread has begun it."""
        with self._turn:
            if not self._entries and self._drawing and self._failed is None:
                self._draw()
                if self._rests:
                    self._rests -= 1
                else:
                    self._read_ahead()
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
        with self._turn:
            before = self._entries[0].state if self._entries else None
            return self._source.state_dict() if before is None else before

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
        self._entries.clear()
        self._pending.clear()
        self._asked_nbytes = 0
        self._idle = self._gathering = 0
        self._drawing = self._stop = self._told = False
        self._failed = None

    def run(self, ticket: list[None]) -> None:
        """What each thread does.

        Args:
            ticket: One item, which the thread takes; without it, it ends at once.
        """
        try:
            ticket.pop()
        except IndexError:
            return
        with self._recycler:
            entry = None
            while not self._stop:
                entry = self._next(entry is not None)
                if entry is not None:
                    self._gather(entry)
                elif not self._stop:
                    self._wake.get()
                    with self._turn:
                        self._idle -= 1

    def _next(self, gathered: bool) -> Entry | None:
        """Draw what may be drawn, and take the oldest that is to be gathered.

        Where there is none, this thread counts as idle.

        Args:
            gathered: This thread has done so with another.
        """
        with self._turn:
            self._gathering -= gathered
            # Said before it is looked: who makes room meanwhile then calls.
            self._idle += 1
            while (
                self._drawing and not self._quick and not self._stop
                and self._failed is None and len(self._entries) < self._prefetch
            ):  # fmt: skip
                self._draw()
            # What is wrong here is wrong with the gather as well, which says so.
            with suppress(Exception):
                self._read_ahead()
            most = self._at_once[self._hurried]
            if not self._pending or self._stop or self._gathering >= most:
                return None
            entry = self._pending.popleft()
            self._idle -= 1
            self._gathering += 1
            if self._pending and self._gathering < most:
                self._call()
            return entry

    def _draw(self) -> None:
        """Draw one batch, under the lock."""
        entry = Entry()
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

    def _read_ahead(self) -> None:
        """Ask the disk for the oldest that it was not asked for, within bounds."""
        for entry in self._pending:
            if entry.asked:
                continue
            entry.nbytes = self._nbytes = self._source.nbytes(entry)
            asked = self._asked_nbytes + entry.nbytes
            if self._asked_nbytes and asked > self._read_ahead_nbytes:
                return
            entry.asked, self._asked_nbytes = True, asked
            if self._rests:
                self._rests -= 1
            elif self._source.ask(entry):
                self._rest = 0
            else:
                # All is in memory: look less and less often, gathers look as well.
                self._rests = self._rest = min(MAX_RESTS, 2 * self._rest + 1)

    def _gather(
        self, entry: Entry, caught: type[BaseException] = BaseException
    ) -> None:
        """Copy a batch and say that it is done, or what was caught on the way."""
        began = perf_counter()
        try:
            entry.result = self._send(self._source.finish(entry))
        except caught as error:
            entry.error = error
        if entry.asked:
            with self._turn:
                self._asked_nbytes -= entry.nbytes
        entry.parts = ()
        self._gather_s = perf_counter() - began
        entry.done = True
        self._tell()


def _raisable(error: BaseException) -> BaseException:
    """The error itself, unless it would end the learner's loop without a word."""
    if not isinstance(error, StopIteration):
        return error
    changed = RuntimeError("a sampler or transform raised StopIteration")
    changed.__cause__ = error
    return changed
