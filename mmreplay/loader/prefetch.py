"""Draws, reads ahead and gathers in threads, in the order of the draws.

Draws are made one after another under one lock, each from what the buffer holds and
its priorities are at that moment; the disk is asked for their rows at once, and
threads copy them in that order. The learner takes them in that order, too.

The learner waits on no lock of Python's own: Ctrl-C inside one may leave it held. What
is done is written down first and told afterwards: an interrupted call is made again.
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
from mmreplay.errors import FailedError
from mmreplay.loader.asking import Asking
from mmreplay.loader.locks import held
from mmreplay.loader.orders import Entry, Order, Source, raisable
from mmreplay.loader.pace import Pace
from mmreplay.samplers.base import State
from mmreplay.storage.recycler import Recycler

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
        self._source, self._batch_size = source, batch_size
        self._prefetch = prefetch
        self._asking = Asking(source, read_ahead_nbytes)
        self._recycler, self._send = recycler, send
        self._turn = threading.RLock()
        self._making: Order | None = None
        self._pace, self._taking = Pace(), False
        self._entries: deque[Entry] = deque()
        self._pending: deque[Entry] = deque()
        self._at_once = at_once
        self._gathering = 0
        self._drawing = self._told = False
        self._failed: Entry | None = None
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

    def _first(self) -> Entry | None:
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
        return held(self._turn) or self._source.held()

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

    def run(self, ticket: list[None]) -> None:
        """What each thread does.

        Args:
            ticket: One item, which it takes; without it, it ends at once.
        """
        try:
            ticket.pop()
        except IndexError:
            return
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

    def _next(self, gathered: bool) -> Entry | None:
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
        self._making = entry = Entry()
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
        self, entry: Entry, caught: type[BaseException] = BaseException
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
