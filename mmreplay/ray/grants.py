"""A rate limiter over all writers and learners of a run, by grants.

No call asks for each step. A registry grants rows to writers, 64 steps at a time, and
items to learners, a batch at a time; the bound is that of `RateLimiter`, over the sums
of all rings. What is written and drawn is counted by each ring as ever, by its heads
and the files of its limiter. The registry has no files: it looks those counts up.

Items are done when the learner takes them. A learner's threads draw batches ahead of
it, and rings count items where they are drawn. So with each request a learner says how
many it has *ahead*: drawn, counted and not taken. These are subtracted from the counts:
otherwise a learner would wait for rows while batches wait for it, and a program that
writes and learns by turns would wait for itself.

Between two looks the registry knows bounds only. At a look that began at time b, every
row that a writer had used when it last asked before b is counted. So of each asker at
most this is not counted: what was unused at that ask, and all that was granted since.
The side that asks is held to the upper bound, what was counted and may have been done
since; the other side to the lower one, what was counted:

    rows:   r * (inserts + unused + k) - samples      <=  r * min_size + error_buffer
    items:  r * inserts - (samples + unused + b)      >=  r * min_size - error_buffer

So the bound holds, whatever is under way, but for one grant beyond min_size and for
what a call of many rows writes beyond its grant. Where both sides are refused and
nobody holds anything, ``r * k + b > 2 * error_buffer``: an error buffer of at least
half of that never stalls, and a smaller one is refused.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from mmreplay.buffer.limiting import Counts
from mmreplay.errors import FailedError, SchemaError, StarvedError
from mmreplay.limiter import RateLimiter
from mmreplay.process import Worker

Side = Literal["insert", "sample"]
Clock = Callable[[], float]
STEPS = 64
"""Steps of all its environments that a writer is granted at a time."""
PATIENCE_S = 10.0
"""A grant that was not used for so long is void."""
LOOK_S = 1.0
"""Counts older than this are looked up again, also where they allow everything."""
LOOK_AGAIN_S = 0.005
"""Counts that allowed nothing are looked up again after this."""
SHORTEST_S, LONGEST_S = 0.002, 0.05


@dataclass(slots=True)
class _Ask:
    """One request of an asker, and what it was granted."""

    at_s: float
    unused: int
    ahead: int
    granted: int = 0


@dataclass(slots=True)
class _Asker:
    """A writer or learner, by its requests from the last one before the look on."""

    side: Side
    count: int
    number: int
    asks: deque[_Ask] = field(default_factory=deque)

    @property
    def not_counted(self) -> int:
        """Rows or items that it may have done, or may do, and no look has counted."""
        return self.asks[0].unused + sum(ask.granted for ask in self.asks)

    def ahead(self, began_s: float) -> int:
        """Items that a look that began then has counted, and it has not taken."""
        return self.asks[0].ahead if self.asks[0].at_s < began_s else 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the registry says to a request.

    Attributes:
        granted: Rows or items, all that were asked for or 0.
        counts: As the registry last looked them up.
        others: Askers of the other side that live: they asked a short while ago.
    """

    granted: int
    counts: Counts
    others: int


def limiter_from(settings: Sequence[float]) -> RateLimiter:
    """Return the limiter of settings as they travel; see `RateLimiter.settings`."""
    ratio, min_size, error = settings
    return RateLimiter(ratio, int(min_size), error)


class Grants:
    """The registry's side: who was granted what, and what the bound still allows.

    Kept in memory only. A registry that was killed looks the counts up again, and
    learns what is held from the next request of each asker; until then the bound can
    be passed by what was under way.

    Threads: the caller's lock is held in each call.
    """

    def __init__(self, limiter: RateLimiter, clock: Clock = time.monotonic) -> None:
        """Begin without counts; see `looked`.

        Args:
            limiter: The bound.
            clock: Seconds, never falling.
        """
        self.limiter = limiter
        self._clock = clock
        self._askers: dict[str, _Asker] = {}
        self._counts: Counts | None = None
        self._began_s = -math.inf

    def agree(self, settings: Sequence[float]) -> None:
        """Refuse an asker with another bound.

        Raises:
            SchemaError: It has other settings than the first one.
        """
        if limiter_from(settings).settings != self.limiter.settings:
            raise SchemaError(
                "limiter: (samples_per_insert, min_size, error_buffer) must be "
                f"{list(self.limiter.settings)} as everywhere in the run, got "
                f"{list(settings)}. Pass equal ones to all writers and clients."
            )

    def check(self, side: Side, count: int) -> None:
        """Refuse an error buffer in which both sides could wait for each other.

        Args:
            side: Of the asker.
            count: Rows or items that it asks for at a time.

        Raises:
            SchemaError: It is too small, and the message says the least one.
        """
        self._forget_silent()
        largest = {"insert": 0, "sample": 0, side: count}
        numbers = {"insert": 0, "sample": 0, side: 1}
        for asker in self._askers.values():
            largest[asker.side] = max(largest[asker.side], asker.count)
            numbers[asker.side] += 1
        ratio, _, error = self.limiter.settings
        rows, items = largest["insert"], largest["sample"]
        least = (ratio * rows + items) / 2
        if error < least:
            writers, learners = max(1, numbers["insert"]), max(1, numbers["sample"])
            full = ratio * rows * writers + items * learners
            raise SchemaError(
                f"error_buffer must be at least {least:g} where {rows} rows and "
                f"{items} items are granted at a time, got {error:g}: otherwise "
                f"writers and learners could wait for each other. Pass {full:g} or "
                "more for full speed, or use fewer environments or smaller batches."
            )

    def ask(
        self, who: str, side: Side, count: int, unused: int, number: int, ahead: int = 0
    ) -> bool:
        """Note a request; `decide` answers it.

        Args:
            who: Of one asker, in all of the run.
            side: Its side.
            count: Rows or items that it asks for, 0 to say only that it lives.
            unused: Rows or items that it was granted and has not used.
            number: Of the request, growing.
            ahead: Items that it drew, and has not taken.

        Returns:
            Whether it is to be answered; False for one that a newer one overtook.
        """
        asker = self._askers.get(who)
        if asker is None:
            asker = self._askers[who] = _Asker(side, count, -1)
        if number <= asker.number:
            return False
        asker.number, asker.count = number, max(asker.count, count)
        asker.asks.append(_Ask(self._clock(), unused, ahead))
        return True

    def decide(self, who: str, count: int) -> Answer:
        """Grant all that was asked for, or nothing.

        Args:
            who: The asker, after `ask`.
            count: Rows or items, 0 for an answer without a grant.
        """
        self._forget_silent()
        counts = self._counts or Counts(0, 0, 0)
        asker = self._askers.get(who)
        granted = 0
        if asker is not None and count and self._counts is not None:
            own = asker.side
            unused = sum(each.not_counted for each in self._askers.values() if each.side == own)
            ahead = sum(each.ahead(self._began_s) for each in self._askers.values())
            samples = max(0, counts.samples - ahead)
            if own == "insert":
                # Rows that are under way will be alive.
                size = counts.size + unused
                allowed = self.limiter.allows_insert(
                    counts.inserts + unused + count - 1, samples, size
                )
            else:
                allowed = self.limiter.allows_sample(
                    counts.inserts, samples + unused + count - 1, counts.size
                )
            if allowed:
                granted = count
                asker.asks[-1].granted += count
        side = "" if asker is None else asker.side
        others = sum(each.side != side for each in self._askers.values())
        return Answer(granted, counts, others)

    def is_old(self, *, refused: bool) -> bool:
        """Whether counts have to be looked up before the next answer.

        Args:
            refused: They allowed nothing, so that any newer ones are worth a look.
        """
        age_s = self._clock() - self._began_s
        return age_s >= (LOOK_AGAIN_S if refused else LOOK_S)

    def begin_look(self) -> float:
        """Return the time from which counts are read, for `looked`."""
        return self._clock()

    def looked(self, began_s: float, counts: Counts) -> None:
        """Take counts of all rings, which never fall.

        Args:
            began_s: From `begin_look`, before the first of them was read.
            counts: Their sums.
        """
        if began_s < self._began_s:
            return
        self._counts, self._began_s = counts, began_s
        for asker in self._askers.values():
            # A request at the very time of the look may have come after it.
            while len(asker.asks) > 1 and asker.asks[1].at_s < began_s:
                asker.asks.popleft()

    def _forget_silent(self) -> None:
        """Forget askers that did not ask for as long as a grant lasts.

        They drop what they hold by themselves, see `Allowance`. What they did with it
        must have been counted first, so a look has to have begun since.
        """
        deadline_s = self._began_s - PATIENCE_S
        for who in list(self._askers):
            if self._askers[who].asks[-1].at_s <= deadline_s:
                del self._askers[who]


class Allowance:
    """The grants that a writer or learner has not used; drops those that are void.

    Attributes:
        count: Rows or items that it asks for at a time.
    """

    def __init__(self, count: int, ahead: int, clock: Clock = time.monotonic) -> None:
        """Begin without grants.

        Args:
            count: Rows or items to ask for at a time.
            ahead: Ask again while no more than this is left.
            clock: Seconds, never falling.
        """
        self.count = count
        self._ahead, self._clock = ahead, clock
        self._grants: deque[tuple[int, float]] = deque()
        self._under_way = 0
        self._number = 0
        self._used_since = False

    @property
    def available(self) -> int:
        """Rows or items that may be begun now."""
        now_s = self._clock()
        while self._grants and self._grants[0][1] <= now_s:
            self._grants.popleft()
        return sum(count for count, _ in self._grants)

    def wants(self, needed: int = 0) -> bool:
        """Whether to ask now.

        Asks ahead only after some were used: an asker that does nothing must not take
        again and again what others wait for.

        Args:
            needed: Rows or items that a call waits for.
        """
        left = self.available
        return left < needed or (self._used_since and left <= self._ahead)

    def request(self) -> tuple[int, int, float]:
        """Return what is not used, the request's number and when it is sent."""
        self._number += 1
        return self.available + self._under_way, self._number, self._clock()

    def granted(self, count: int, sent_s: float) -> None:
        """Take a grant.

        Args:
            count: Rows or items, may be 0.
            sent_s: When the request was sent.
        """
        if count:
            self._grants.append((count, sent_s + PATIENCE_S))
            self._used_since = False

    def use(self, count: int) -> None:
        """Use grants, the oldest first; all of them where there are fewer.

        Rows are used once they are published, items once they are taken: until then
        they are held. Rows on their way to another node are used, and are held by
        `set_under_way`.
        """
        self._used_since = True
        count = min(count, self.available)
        while count:
            unused, until_s = self._grants.popleft()
            if unused > count:
                self._grants.appendleft((unused - count, until_s))
            count -= min(unused, count)

    def set_under_way(self, count: int) -> None:
        """Hold rows that were used and may not be published yet, however long."""
        self._under_way = count


Ask = Callable[[int, int, int], Answer | None]
"""Asks the registry by count, unused and number; None where it could not be asked."""


class Asker:
    """Asks for grants in a thread, ahead of the calls that use them.

    Threads: any may call.
    """

    def __init__(
        self, side: Side, limiter: RateLimiter, allowance: Allowance, ask: Ask, what: str
    ) -> None:
        """Begin to ask.

        Args:
            side: Its side.
            limiter: Its timeout and patience end waits.
            allowance: Not used elsewhere.
            ask: Called in the thread. What it raises is raised again by calls here.
            what: The run, for messages.

        Raises:
            RuntimeError: The system has no thread left.
        """
        self._side, self._limiter, self._what = side, limiter, what
        self._allowance, self._ask = allowance, ask
        self._changed = threading.Condition()
        self._needed: list[int] = []
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._answer: Answer | None = None
        self._progress_s = self._due_s = self._answered_s = time.monotonic()
        self._worker: Worker[None] = Worker("mmreplay-grants", self._run)
        self._worker.start()

    def use(self, count: int, under_way: int = 0) -> None:
        """Use grants, beyond what there is where more was done.

        Args:
            count: Rows or items.
            under_way: Rows that were used and may not be published yet, these included.
        """
        with self._changed:
            self._check()
            self._allowance.use(count)
            self._allowance.set_under_way(under_way)
            if self._allowance.wants():
                self._worker.put(None)

    def set_under_way(self, under_way: int) -> None:
        """Say how many rows that were used may not be published yet.

        The registry hears of it at once: other writers may wait for it.
        """
        with self._changed:
            self._allowance.set_under_way(under_way)
            self._due_s = time.monotonic()
        self._worker.put(None)

    @property
    def answer(self) -> Answer | None:
        """The registry's last one."""
        return self._answer

    @property
    def available(self) -> int:
        """Rows or items that may be begun now."""
        with self._changed:
            self._check()
            return self._allowance.available

    def wait(self, count: int) -> bool:
        """Wait until so much is available.

        Returns:
            False where the wait ended without, and the limiter says to proceed.

        Raises:
            StarvedError: The limiter's timeout is over, or for its patience the
                registry did not answer, or no other side asked for anything and nothing
                was counted.
        """
        began_s = time.monotonic()
        limiter = self._limiter
        with self._changed:
            self._needed.append(count)
            # A wait is not alone before it has asked.
            self._progress_s = began_s
            try:
                while True:
                    self._check()
                    if self._allowance.available >= count:
                        return True
                    now_s = time.monotonic()
                    over = limiter.timeout is not None and now_s - began_s >= limiter.timeout
                    alone = (
                        self._answer is not None
                        and self._answer.others == 0
                        and now_s - self._progress_s >= limiter.patience
                    )
                    silent_s = now_s - max(began_s, self._answered_s)
                    silent = silent_s >= limiter.patience
                    if over or alone or silent:
                        if limiter.on_timeout == "raise":
                            why = "none is running"
                            if over:
                                why = f"{limiter.timeout:g} s have passed"
                            elif silent:
                                why = "the registry does not answer"
                            raise self._starved(self._answer, why)
                        return False
                    self._worker.put(None)
                    self._changed.wait(LONGEST_S)
            finally:
                self._needed.remove(count)

    def _starved(self, answer: Answer | None, why: str) -> StarvedError:
        what = "a client to draw" if self._side == "insert" else "a writer to add"
        counts = Counts(0, 0, 0) if answer is None else answer.counts
        ratio, min_size, error = self._limiter.settings
        return StarvedError(
            f"{self._what}: waited for {what}, but {why}. {counts.inserts} rows are "
            f"written, {counts.size} of them alive, and {counts.samples} items drawn; "
            f"the limiter needs {min_size} rows alive and {ratio:g} items per row "
            f"within {error:g}. Start the other side, or change timeout, patience or "
            "on_timeout."
        )

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ended.is_set():
            raise FailedError(
                f"{self._what}: this asker of the rate limiter is closed. Close a "
                "writer or client only after all threads have finished with it."
            )

    def _run(self, worker: Worker[None]) -> None:
        """Ask, and say at least every third of `PATIENCE_S` what this asker holds."""
        pause_s, last_s, alive_s = 0.0, SHORTEST_S, PATIENCE_S / 3
        while not self._ended.wait(pause_s):
            if not pause_s:
                left_s = max(0.0, self._due_s - time.monotonic())
                _take_all(worker, min(left_s, threading.TIMEOUT_MAX))
            pause_s = 0.0
            with self._changed:
                wants = self._allowance.wants(max(self._needed, default=0))
                count = self._allowance.count if wants else 0
                unused, number, sent_s = self._allowance.request()
                is_due = time.monotonic() >= self._due_s
                if wants or is_due:
                    self._due_s = time.monotonic() + alive_s
            if self._ended.is_set() or not (wants or is_due):
                continue
            try:
                answer = self._ask(count, unused, number)
            except Exception as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            refused = wants and (answer is None or not answer.granted)
            if refused:
                pause_s = min(LONGEST_S, 2 * last_s)
            last_s = pause_s or SHORTEST_S
            if answer is None:
                continue
            with self._changed:
                self._allowance.granted(answer.granted, sent_s)
                if self._answer is None or answer.counts != self._answer.counts:
                    self._progress_s = time.monotonic()
                self._answer, self._answered_s = answer, time.monotonic()
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread, and all waits; a request that is under way is waited for."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        self._worker.stop()


def _take_all(worker: Worker[None], timeout_s: float) -> None:
    """Wait for a sign that something changed; several are one."""
    with suppress(queue.Empty):
        worker.get(timeout_s)
        while True:
            worker.get(0)
