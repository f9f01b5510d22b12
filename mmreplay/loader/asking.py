"""Asking the disk ahead of gathers: within bounds, and seldom where it need not be."""

from __future__ import annotations

from collections import deque

from mmreplay.batch import Batch
from mmreplay.loader.orders import Entry, Source
from mmreplay.storage.early import Gathering

MAX_RESTS = 64
"""Draws between two looks whether pages are missing, where none was for long."""
SMALL_NBYTES = 1 << 20
"""Larger ones pay for the way between threads: 256 rows of pixels came twice as fast
from a thread, 4,096 rows of vectors, 680 KB, a fifth slower (bench_loader)."""


class Asking:
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
    def under_way(entries: deque[Entry]) -> int:
        """Bytes that were asked for and are not gathered yet."""
        # A copy, made at once: the learner takes out what is done.
        each = tuple(entries)
        return sum([entry.nbytes for entry in each if entry.asked and not entry.done])

    def finish(self, entry: Entry) -> Batch | None:
        """Copy the data of an entry; see `Source.finish`."""
        with Gathering(entry.early):
            return self._source.finish(entry)

    def ask(self, entries: deque[Entry], pending: deque[Entry]) -> None:
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
