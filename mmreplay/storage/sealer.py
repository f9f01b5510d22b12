"""The thread that seals places, and frees what shards have taken over."""

from __future__ import annotations

import _thread
import errno
import queue
from collections.abc import Callable

from mmreplay.errors import shortage

Work = Callable[[], None]


class Sealer:
    """Does work in the order given, off the thread of whoever gives it.

    A full disk leaves a place unsealed, which loses nothing, and so does a want of
    memory, threads or files to open; another failure ends the work, told by `failure`.

    Attributes:
        failure: What the device refused, if it did.
        short: The number of what was short last, or 0.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._running = False
        self.failure: BaseException | None = None
        self.short = 0
        self._given = self._done = 0

    def give(self, work: Work) -> None:
        """Have work done; starts the thread at the first."""
        if self.failure is not None:
            return
        self._given += 1
        self._queue.put(work)
        if not self._running:
            self._running = True
            try:
                # Not a Thread, whose start waits for an Event that Ctrl-C may break.
                _thread.start_new_thread(self._run, ())
            except RuntimeError:
                # What was given waits until there is one: nothing waits for it.
                self._running, self.short = False, errno.EAGAIN

    @property
    def waiting(self) -> int:
        """Pieces of work given and not done."""
        return self._given - self._done

    def drain(self) -> None:
        """Wait until everything given is done, or refused."""
        if not self._running or self.failure is not None:
            return
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.give(lambda: done.put(None))
        while self.failure is None:
            try:
                done.get(timeout=0.2)
            except queue.Empty:
                continue
            return

    def stop(self) -> None:
        """End the thread once all is done, and wait for it."""
        if self._running:
            self._queue.put(None)
            self._ended.get()
            self._running = False

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if self.failure is None:
                    work()
            except BaseException as error:
                # Where something is short nothing is lost: the place stays in the tail,
                # and is tried again when the buffer is closed.
                short = shortage(error)
                self.short = short or self.short
                if not short:
                    self.failure = error
            self._done += 1
        self._ended.put(None)
