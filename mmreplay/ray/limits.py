"""A run's rate limiter at its writers, clients and rings; `grants` has the bound.

Each ring counts its rows and items by the files of a `RateLimiter`, which hold the
bound of the whole run: by them a restarted shard or registry knows it again. Nothing
waits for a single ring. Writers and clients wait for grants of the registry.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from mmreplay.buffer.limiting import Count, Counts, LeftOut
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError, FormatError, SchemaError
from mmreplay.limiter import RateLimiter
from mmreplay.limiter.bound import FOLDER, BoundLimit, stored_settings
from mmreplay.limiter.rate_counter import BoundCounter
from mmreplay.ray import cluster
from mmreplay.ray.cluster import Remote, UnansweredError
from mmreplay.ray.grants import STEPS, Allowance, Answer, Asker, Side, limiter_from

LOOK_S = 1.0
"""A client without a limiter asks so often whether its run has one by now."""
GRANT_S = 3.0
"""How long an asker waits for an answer, before it asks again."""


def limiter_of(folder: Path) -> RateLimiter | None:
    """Return the bound that a ring's folder holds; None without one.

    Raises:
        FormatError: The file is damaged.
    """
    settings = stored_settings(folder)
    if settings is None:
        return None
    try:
        if isinstance(settings, list) and len(settings) == 3:
            return RateLimiter(*settings)
    except SchemaError:
        pass
    raise FormatError(
        f"{folder / FOLDER}: the law must be a ratio, a size and an error buffer, got "
        f"{settings!r:.60}. Remove the folder while no process uses it."
    )


@dataclass(frozen=True)
class RingCounter:
    """Counts for one ring by the bound of its run; see `mmreplay.buffer.limiting`.

    Attributes:
        limiter: The run's. Its least size is of all rings together.
    """

    limiter: RateLimiter

    def check(self, folder: object, capacity: int) -> None:
        """Refuse a buffer in RAM; a ring may be smaller than the run's least size."""
        self.limiter.check(folder, max(capacity, self.limiter.min_size))

    def bind(
        self, folder: Path | None, capacity: int, count: Count, left_out: LeftOut | None = None
    ) -> BoundCounter:
        """Count for a ring; see `Limiter.bind`."""
        self.check(folder, capacity)
        assert folder is not None
        return BoundCounter(BoundLimit(self.limiter, folder / FOLDER, count))

    def bind_to(self, ring: ReplayBuffer) -> BoundCounter:
        """Count for a ring that was opened without."""

        def rows() -> tuple[int, int]:
            span = ring.span
            return int(span.stop.sum()), int(span.lengths.sum())

        return self.bind(ring.path, ring.capacity * ring.num_envs, rows)


def counter_of(folder: Path) -> RingCounter | None:
    """Return what counts for a ring whose run has a limiter, or None."""
    limiter = limiter_of(folder)
    return None if limiter is None else RingCounter(limiter)


@dataclass(frozen=True)
class RunLimiter:
    """Has a writer wait for grants of rows; see `mmreplay.buffer.limiting.Limiter`.

    Attributes:
        run: The run.
        limiter: Its bound.
        num_envs: Of the writer.
    """

    run: str
    limiter: RateLimiter
    num_envs: int

    def check(self, folder: object, capacity: int) -> None:
        """Refuse a buffer in RAM."""
        RingCounter(self.limiter).check(folder, capacity)

    def bind(
        self, folder: Path | None, capacity: int, count: Count, left_out: LeftOut | None = None
    ) -> GrantedRows:
        """Begin to ask for grants; see `Limiter.bind`."""
        assert folder is not None
        ring = RingCounter(self.limiter)
        # The run does not take a bound that the ring refuses, nor a new ring one that
        # the run refuses.
        counter = None
        if limiter_of(folder) is not None:
            counter = ring.bind(folder, capacity, count)
        asker = None
        try:
            asker = ask_registry(self.run, "insert", self.limiter, STEPS * self.num_envs)
            counter = counter or ring.bind(folder, capacity, count)
        except BaseException:
            for each in (asker, counter):
                if each is not None:
                    each.close()
            raise
        return GrantedRows(counter, asker, count)


class GrantedRows:
    """A writer's side of a run's limiter; see `mmreplay.buffer.limiting.Limit`."""

    def __init__(self, counter: BoundCounter, asker: Asker, count: Count) -> None:
        """Take over a counter and an asker of rows.

        Args:
            counter: Of the ring.
            asker: Of the writer.
            count: Returns the rows written and alive.
        """
        self._counter, self._asker, self._rows = counter, asker, count
        self._written = count()[0]

    def await_insert(self) -> None:
        """Return once a row may be written; see `Limit.await_insert`."""
        self._counter.await_insert()
        written = self._rows()[0]
        new, self._written = written - self._written, written
        # What the last calls wrote; a call writes as many rows as it likes.
        if new:
            self._asker.use(new)
        if not self._asker.available:
            self._asker.wait(1)

    def await_sample(self) -> None:
        """Return at once: a writer that draws its own ring is counted only."""
        self._counter.await_sample()

    def count(self, count: int) -> None:
        """Count items drawn; see `Limit.count`."""
        self._counter.count(count)

    def counts(self) -> Counts:
        """Return what the ring counts; see `Limit.counts`."""
        return self._counter.counts()

    def allows_insert(self, count: int = 1) -> bool:
        """Whether so many rows are granted; see `Limit.allows_insert`."""
        return self._asker.available >= count

    def allows_sample(self, count: int = 1) -> bool:
        """Whether so many items may be drawn here, which nothing forbids."""
        return True

    def close(self) -> None:
        """End the asking, and release the locks."""
        self._asker.close()
        self._counter.close()


@dataclass(frozen=True)
class ClientLimiter:
    """Has a client wait for grants of batches; see `mmreplay.buffer.limiting.Limiter`.

    Attributes:
        run: The run.
        limiter: Its bound.
        batch_size: Items of a batch.
    """

    run: str
    limiter: RateLimiter
    batch_size: int

    def check(self, folder: object, capacity: int) -> None:
        """Refuse a buffer in RAM."""
        RingCounter(self.limiter).check(folder, capacity)

    def bind(
        self, folder: Path | None, capacity: int, count: Count, left_out: LeftOut | None = None
    ) -> GrantedItems:
        """Begin to ask for grants, and count for one ring; see `Limiter.bind`."""
        counter = RingCounter(self.limiter).bind(folder, capacity, count)
        try:
            return GrantedItems(self, counter)
        except BaseException:
            counter.close()
            raise


def none_ahead() -> int:
    """Batches ahead of a client that counts a batch when it takes it."""
    return 0


class GrantedItems:
    """A client's side of a run's limiter; see `mmreplay.buffer.limiting.Limit`.

    Attributes:
        batches_ahead: Says how many batches rings have counted and the learner has not
            taken.
    """

    def __init__(self, limiter: ClientLimiter, counter: BoundCounter | None = None) -> None:
        """Begin to ask for grants.

        Args:
            limiter: Of the client.
            counter: Of the ring that is drawn from; None where shards count.
        """
        self._batch_size, self._counter = limiter.batch_size, counter
        self.batches_ahead: Callable[[], int] = none_ahead
        self._asker = ask_registry(
            limiter.run, "sample", limiter.limiter, limiter.batch_size, self._ahead
        )

    def _ahead(self) -> int:
        return self.batches_ahead() * self._batch_size

    def await_insert(self) -> None:
        """Return at once: a client writes nothing."""

    def await_sample(self) -> None:
        """Return once a batch may be taken; see `Limit.await_sample`."""
        self._asker.wait(self._batch_size)

    def count(self, count: int) -> None:
        """Count items that the learner took; see `Limit.count`."""
        if self._counter is not None:
            self._counter.count(count)
        self._asker.use(count)

    def counts(self) -> Counts:
        """Return what all rings of the run count, as of the last answer."""
        answer = self._asker.answer
        return Counts(0, 0, 0) if answer is None else answer.counts

    def allows_insert(self, count: int = 1) -> bool:
        """Whether rows may be written here: none."""
        return False

    def allows_sample(self, count: int = 1) -> bool:
        """Whether so many items are granted; see `Limit.allows_sample`."""
        return self._asker.available >= count

    def close(self) -> None:
        """End the asking; a wait in another thread ends with an error."""
        self._asker.close()
        if self._counter is not None:
            self._counter.close()


def client_limiter(run: str, batch_size: int) -> ClientLimiter | None:
    """Return the limiter of a run, as a client follows it; None without one."""
    settings = Remote(cluster.registry_name(run)).call("bound")
    if settings is None:
        return None
    return ClientLimiter(run, limiter_from(settings), batch_size)


class LateLimiter:
    """Looks whether a run has a limiter by now, for a client that was made before it.

    Its writers bring it, and tell the registry.
    """

    def __init__(self, run: str, batch_size: int) -> None:
        """Begin to look.

        Args:
            run: The run.
            batch_size: Items of a batch of the client.
        """
        self._run, self._batch_size = run, batch_size
        self._registry = Remote(cluster.registry_name(run))
        self._call: Any = None
        self._asked_at = time.monotonic()

    def look(self) -> ClientLimiter | None:
        """Return the limiter; None while there is none. Nothing is waited for."""
        now = time.monotonic()
        if self._call is None:
            if now - self._asked_at >= LOOK_S and ray.is_initialized():
                self._asked_at = now
                # Where the run was stopped the next draw says so.
                with suppress(FailedError):
                    self._call = self._registry.send("known_bound")
            return None
        try:
            settings = self._registry.receive(self._call, 0.0)
        except UnansweredError:
            if now - self._asked_at > GRANT_S:
                self._call = None
            return None
        self._call = None
        if settings is None:
            return None
        return ClientLimiter(self._run, limiter_from(settings), self._batch_size)


def ask_registry(
    run: str,
    side: Side,
    limiter: RateLimiter,
    count: int,
    items_ahead: Callable[[], int] = none_ahead,
) -> Asker:
    """Begin to ask a run's registry for grants.

    Args:
        run: The run.
        side: Of the asker.
        limiter: The run's.
        count: Rows or items to ask for at a time.
        items_ahead: Says how many items a client drew and has not taken.

    Raises:
        SchemaError: The run has another bound, or its error buffer is too small for
            this asker.
    """
    registry = Remote(cluster.registry_name(run))
    who = f"{side} {uuid.uuid4().hex}"
    settings = list(limiter.settings)
    registry.call("limit", who, side, count, settings)
    ahead = count // 2 if side == "insert" else 0
    ask = partial(_ask, registry, who, side, settings, items_ahead)
    return Asker(side, limiter, Allowance(count, ahead), ask, f"run {run!r}")


def _ask(
    registry: Remote,
    who: str,
    side: Side,
    settings: list[float],
    items_ahead: Callable[[], int],
    count: int,
    unused: int,
    number: int,
) -> Answer | None:
    if not ray.is_initialized():
        # A call would begin a cluster of its own.
        raise FailedError(
            "cannot ask for grants of the rate limiter: this process is not connected "
            "to its Ray cluster any more. Close writers and clients before "
            "ray.shutdown()."
        )
    try:
        reference = registry.send(
            "grant", who, side, count, unused, number, settings, items_ahead()
        )
        answer: dict[str, Any] = registry.receive(reference, GRANT_S)
    except UnansweredError:
        # It is restarted: asked again, it counts what is there.
        return None
    return Answer(answer["granted"], Counts(*answer["counts"]), answer["others"])


def refuse_unfit_limiter(run: str, limiter: RateLimiter, rows: int) -> None:
    """Refuse a limiter that a run does not take, before a ring is made for it.

    Args:
        run: The run.
        limiter: Of a writer.
        rows: That the writer will ask for at a time.

    Raises:
        SchemaError: The run has another bound, or its error buffer is too small for
            this writer.
    """
    registry = Remote(cluster.registry_name(run))
    registry.call("check_limit", "insert", rows, list(limiter.settings))


def refuse_other_limiters(limiter: object) -> None:
    """Refuse a writer's limiter that is of another kind.

    Raises:
        SchemaError: It is no `RateLimiter`.
    """
    if limiter is None or isinstance(limiter, RateLimiter):
        return
    raise SchemaError(
        f"limiter of a run must be a RateLimiter or None, got "
        f"{type(limiter).__name__}. Pass mmreplay.RateLimiter(...): the registry "
        "holds all writers and clients to it."
    )
