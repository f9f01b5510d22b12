"""What a client of a run draws from: all rings of the run, or its only one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mmreplay.buffer.limiting import Limit
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError, SchemaError, StarvedError
from mmreplay.loader.sources import drawable_of
from mmreplay.ray import cluster
from mmreplay.ray.client_stats import ClientStats
from mmreplay.ray.descriptions import describe_sampler
from mmreplay.ray.limits import ClientLimiter, GrantedItems, RingCounter, none_ahead
from mmreplay.ray.ring_table import WAIT_S, is_restarted, out_of_patience, refuse_shard
from mmreplay.ray.shard_calls import CallLostError, NotYetError, RunCalls, ShardCalls
from mmreplay.ray.sources import RingsSource
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.divided import refuse_alone
from mmreplay.transforms.base import Transform


class AllRings:
    """All rings of a run, for a sampler whose batches can be divided between them.

    Attributes:
        source: What a loader draws from.
        quick_s: A learner that asks again sooner gathers small batches itself, while
            its next calls are under way. Away for 0.3 ms between batches of 256
            vectors, it got 1,120 of them a second so, and 785 from threads, which take
            turns with it at the interpreter. Its rate was 7 % lower with four batches a
            call, and up to 3 % with ``alone=True``, which makes no call. Away for 1 ms
            or more, it is faster with threads (two cores).
    """

    quick_s = 500e-6

    def __init__(
        self, make: Callable[[Limit | None], RingsSource], limiter: ClientLimiter | None
    ) -> None:
        """Find the rings.

        Args:
            make: Makes the source, with what grants its batches.
            limiter: Of the run, if it has one.
        """
        self._num_ready: Callable[[], int] = none_ahead
        limit = None if limiter is None else GrantedItems(limiter)
        try:
            self.source = make(limit)
        except BaseException:
            if limit is not None:
                limit.close()
            raise
        self._limit = limit

    def count_ahead(self, num_ready: Callable[[], int]) -> None:
        """Have grants know of batches that rings counted and the learner has not taken.

        Args:
            num_ready: Says how many of them the loader holds.
        """
        self._num_ready = num_ready
        if self._limit is not None:
            self._limit.batches_ahead = self._batches_ahead

    def _batches_ahead(self) -> int:
        return self._num_ready() + self.source.num_answered()

    def limit_by(self, limiter: ClientLimiter) -> None:
        """Be held to a limiter that writers brought later.

        Raises:
            SchemaError: Its error buffer is too small for this client.
        """
        limit = GrantedItems(limiter)
        limit.batches_ahead = self._batches_ahead
        self.source.limit_by(limit)

    def stats(self) -> ClientStats:
        """What was met so far."""
        return self.source.stats()

    def warn(self) -> None:
        """Warn of nodes that were lost."""
        self.source.warn()

    def end_waits(self) -> None:
        """End waits for nodes that are away."""
        self.source.end_waits()

    def close(self) -> None:
        """Send the priorities that wait, and close the rings of this node."""
        self.source.close()


class OnlyRing:
    """The one ring of a run, on this node, for a sampler that draws from one alone.

    Attributes:
        source: What a loader draws from.
        quick_s: 0: a loader over one buffer knows when its learner is quick.
    """

    quick_s = 0.0

    def __init__(self, ring: ReplayBuffer) -> None:
        """Draw from an open ring, which is closed with this."""
        self._ring, self.source = ring, drawable_of(ring)

    def count_ahead(self, num_ready: Callable[[], int]) -> None:
        """Do nothing: the ring counts a batch when the learner takes it."""

    def limit_by(self, limiter: ClientLimiter) -> None:
        """Be held to a limiter that writers brought later; see `AllRings.limit_by`."""
        counter = RingCounter(limiter.limiter).bind_to(self._ring)
        self._ring.limit = GrantedItems(limiter, counter)

    def stats(self) -> ClientStats:
        """The ring; nothing else is met."""
        return ClientStats(rings=(str(self._ring.path),))

    def warn(self) -> None:
        """Do nothing: no call is made that a node could leave without an answer."""

    def end_waits(self) -> None:
        """Do nothing: nothing waits for another node."""

    def close(self) -> None:
        """Close the ring."""
        self._ring.close()


def draws_from_several(sampler: Sampler) -> bool:
    """Whether a sampler's batches can be divided, and shards can make it again."""
    try:
        describe_sampler(sampler)
    except SchemaError:
        return False
    return True


def open_only_ring(
    run: RunCalls,
    sampler: Sampler,
    transforms: Sequence[Transform],
    lost_s: float,
    patience_s: float,
    limiter: ClientLimiter | None,
) -> ReplayBuffer:
    """Open the one ring of a run, for a sampler that cannot draw from several.

    Args:
        run: The run.
        sampler: Of the ring.
        transforms: Of the ring.
        lost_s: Seconds after which a shard that does not answer is lost.
        patience_s: Seconds that a shard which is being restarted is waited for.
        limiter: Of the run, if it has one.

    Raises:
        SchemaError: The run has several, or its ring is on another node.
        FailedError: A shard has another version of mmreplay, or does not answer.
        StarvedError: A shard was being restarted for longer than `patience_s`.
        ReplayError: What a shard met when it opened its rings.
    """
    found: list[tuple[str, bool, str]] = []
    for calls in run.shards():
        info = _info(run, calls, lost_s, patience_s)
        refuse_shard(calls.key, info)
        here = info["node_id"] == run.node_id
        found += [(calls.key, here, each["path"]) for each in info["rings"].values()]
    if len(found) != 1 or not found[0][1]:
        where = f"{len(found)} rings" if len(found) != 1 else f"its ring on {found[0][0]!r}"
        refuse_alone([sampler], f"run {run.run!r} with {where}", ranks=True)
        # It is known here alone: this says why.
        describe_sampler(sampler)
    return ReplayBuffer.open(found[0][2], sampler=sampler, transforms=transforms, limiter=limiter)


def _info(run: RunCalls, calls: ShardCalls, lost_s: float, patience_s: float) -> dict[str, Any]:
    began = time.monotonic()
    call = calls.send("info")
    while True:
        try:
            info: dict[str, Any] = call.result(min(lost_s, WAIT_S))
            return info
        except NotYetError:
            pass
        except CallLostError:
            time.sleep(cluster.PAUSE_S)
            call = calls.send("info")
        silent_s = time.monotonic() - began
        if silent_s < lost_s:
            continue
        if not is_restarted(run, calls.key, silent_s - lost_s):
            raise FailedError(
                f"node {calls.key!r} did not answer for {lost_s:g} s. Check it with "
                "mmreplay ray status."
            )
        if silent_s >= patience_s:
            raise StarvedError(out_of_patience(run, [calls.key], patience_s))
