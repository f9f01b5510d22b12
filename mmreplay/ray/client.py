"""ReplayClient: batches of all rings of a run, on whichever nodes they are."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from numpy.typing import ArrayLike
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
)

from mmreplay.arguments import flag, integer, number
from mmreplay.batch import Batch
from mmreplay.buffer.opening import check_options
from mmreplay.errors import FailedError, ReplayError, SchemaError
from mmreplay.loader.replay_loader import ReplayLoader
from mmreplay.process import ProcessGuard
from mmreplay.ray import cluster
from mmreplay.ray.client_rings import AllRings, OnlyRing, draws_from_several, open_only_ring
from mmreplay.ray.client_stats import ClientStats
from mmreplay.ray.draws import Client, Update, Wanted
from mmreplay.ray.epochs import shuffled_in
from mmreplay.ray.limits import LateLimiter, client_limiter
from mmreplay.ray.messages import client_to_bytes, reply_from_bytes, request_to_bytes
from mmreplay.ray.reply_blocks import from_blocks, num_blocks
from mmreplay.ray.run_status import require_run
from mmreplay.ray.seeds import draw_by_rank
from mmreplay.ray.shard_calls import Call, CallLostError, NotYetError, RunCalls, ShardCalls
from mmreplay.ray.sources import RingsSource
from mmreplay.samplers.base import Sampler, State, checked
from mmreplay.transforms.base import Transform

if TYPE_CHECKING:
    from torch import device as Device

STATES_S = 0.5
"""While a shard is silent the registry is asked so often what Ray says of it."""
OLD_STATES_S = 3.0
"""What it was asked longer ago counts no more."""


class RayCall:
    """A call of an actor; see `Call`."""

    def __init__(
        self, shard: RayShard, references: list[Any], wanted: Wanted | None = None
    ) -> None:
        """Wait for what Ray will store.

        Args:
            shard: That was called.
            references: To the results; none where it cannot be called.
            wanted: Where the reply comes in blocks, what was asked for.
        """
        self._shard, self._references, self._wanted = shard, references, wanted
        if references:
            shard.unanswered.add(references[0], references, weakref.ref(self))

    def result(self, timeout_s: float) -> Any:
        """Wait for the answer; see `Call.result`."""
        if not self._references:
            raise CallLostError
        _require_cluster(self._shard.key)
        try:
            results = ray.get(self._references, timeout=timeout_s)
        except GetTimeoutError as error:
            raise NotYetError from error
        except RayError as error:
            self._shard.unanswered.remove(self._references[0])
            if isinstance(error, RayTaskError):
                if isinstance(error.cause, ReplayError):
                    raise error.cause from None
                raise
            if isinstance(error, ActorDiedError | ActorUnschedulableError):
                self._shard.forget()
            raise CallLostError from error
        self._shard.unanswered.remove(self._references[0])
        wanted = self._wanted
        if isinstance(results[0], bytes):
            results[0] = reply_from_bytes(results[0])
        return results[0] if wanted is None else from_blocks(results, wanted)


class RayShard:
    """Calls to the shard of a node; see `ShardCalls`.

    Attributes:
        key: The node's.
        unanswered: Its calls that were not looked at.
    """

    def __init__(self, run: str, key: str) -> None:
        """Look the actor up at the first call."""
        self.key, self.unanswered = key, cluster.Unanswered()
        self._run, self._name = run, cluster.shard_name(run, key)
        self._handle: Any = None
        self._client: Client | None = None
        self._client_bytes = b""

    def send(self, method: str, *arguments: Any) -> Call:
        """Begin a call; see `ShardCalls.send`.

        Raises:
            FailedError: The run was stopped, or this process left the cluster.
        """
        _require_cluster(self.key)
        if self._handle is None:
            try:
                self._handle = ray.get_actor(self._name, cluster.NAMESPACE)
            except ValueError:
                if not cluster.run_exists(self._run):
                    raise cluster.stopped(self._name) from None
                # Its node is gone: the registry makes it again when that is back.
                return RayCall(self, [])
        call = getattr(self._handle, method)
        if method == "exchange":
            return self._exchange(call, *arguments)
        return RayCall(self, [call.remote(*arguments)])

    def _exchange(
        self,
        call: Any,
        client: Client,
        updates: dict[str, list[Update]],
        wanted: Wanted,
        highest: float,
    ) -> RayCall:
        """Begin an exchange, which travels as bytes; see `Shard.exchange`."""
        if client is not self._client:
            self._client, self._client_bytes = client, client_to_bytes(client)
        request = request_to_bytes(updates, wanted, highest)
        blocks = num_blocks(wanted)
        if blocks:
            call = call.options(num_returns=1 + blocks)
            references = call.remote(self._client_bytes, *request)
            return RayCall(self, references, wanted)
        return RayCall(self, [call.remote(self._client_bytes, *request)])

    def forget(self) -> None:
        """Look the actor up again: this one is dead for good."""
        self._handle = None

    def settle(self) -> None:
        """Look at answers that no one needs any more; see `ShardCalls.settle`."""
        if ray.is_initialized():
            self.unanswered.settle()


def _require_cluster(key: str) -> None:
    """Refuse a call after the program left the cluster: Ray would start another one.

    Raises:
        FailedError: It did.
    """
    if not ray.is_initialized():
        raise FailedError(
            f"cannot ask node {key!r}: this process is not connected to its Ray "
            "cluster any more. Close clients before ray.shutdown()."
        )


class RayRun:
    """The shards of a run; see `RunCalls`.

    Attributes:
        run: Its name.
        node_id: Of this node, whatever the key that its shard goes by.
    """

    def __init__(self, run: str) -> None:
        """Find a run.

        Raises:
            SchemaError: There is no such run, or no cluster.
        """
        cluster.require_connection()
        require_run(run)
        self.run = run
        self.node_id = cluster.this_node_id()
        self._shards: dict[str, RayShard] = {}
        self._members_call: Any = None
        self._states: Mapping[str, str] | None = None
        self._states_call: Any = None
        self._states_sent_at = self._states_asked_at = -math.inf
        self._states_lock = threading.Lock()
        self._registry = cluster.Remote(cluster.registry_name(run))

    def epoch_name(
        self, start: str, rank: int, token: str, lasts: bool = False
    ) -> Mapping[str, Any]:
        """Name of the epochs of a group of learners; see `RunCalls.epoch_name`."""
        arguments = start, rank, token, lasts
        answer: Mapping[str, Any] = self._registry.call("epoch_name", *arguments)
        return answer

    def epoch(self, client: Any, name: str, epoch: int) -> Mapping[str, Any]:
        """Freeze an epoch in all rings; see `RunCalls.epoch`."""
        answer: Mapping[str, Any] = self._registry.call("epoch", client, name, epoch)
        return answer

    def shards(self) -> Sequence[ShardCalls]:
        """The shards that are known now; see `RunCalls.shards`."""
        if not ray.is_initialized():
            return list(self._shards.values())
        try:
            keys = cluster.shard_keys(self.run)
        except (RayError, ConnectionError, RuntimeError):
            # The head is gone; the shards that are known serve on.
            return list(self._shards.values())
        if not self._shards.keys() <= set(keys):
            # A shard without a label dies with its node: the registry looks whether
            # the node is back. Nothing waits here.
            self._ask_for_members()
        for key in keys:
            self._shards.setdefault(key, RayShard(self.run, key))
        return [self._shards[key] for key in sorted(keys)]

    def states(self) -> Mapping[str, str] | None:
        """State of each shard by key; see `RunCalls.states`."""
        if not ray.is_initialized():
            return None
        with self._states_lock:
            now = time.monotonic()
            call = self._states_call
            if call is not None and ray.wait([call], timeout=0)[0]:
                self._states_call = None
                with suppress(ReplayError):
                    self._states = self._registry.receive(call, 0.0)
                    # The answer may have come long before this look.
                    self._states_asked_at = self._states_sent_at
            # A registry with much to do has longer to answer.
            pause_s = STATES_S if self._states_call is None else OLD_STATES_S
            if now - self._states_sent_at >= pause_s:
                self._states_sent_at = now
                with suppress(ReplayError):
                    self._states_call = self._registry.send("states")
            is_new = now - self._states_asked_at < OLD_STATES_S
            return self._states if is_new else None

    def _ask_for_members(self) -> None:
        """Ask the registry for the members, which has it look; one call at a time."""
        if self._members_call is not None:
            if not ray.wait([self._members_call], timeout=0)[0]:
                return
            with suppress(ReplayError, RayError):
                self._registry.receive(self._members_call, 0.0)
        self._members_call = self._registry.send("members")


class ReplayClient(ReplayLoader):
    """Batches of all rings of a run as tensors, made while the learner works.

    **Order, memory, end** are those of `ReplayLoader`. A batch is laid out ring by
    ring, and has ``batch.buffer_ids``: the numbers of the rings in `stats().rings`.

    **Threads** make batches ahead of the learner. A learner that asks again within
    0.5 ms makes those of less than 1 MiB itself, while its next calls are under way.

    **Rings of this node** are gathered through this process's own mapping; of other
    nodes the rows arrive with the reply, and are copied into memory that is used again.

    **Probabilities** are those of the draw, whatever the priorities did since, so
    that importance weights are unbiased; see docs/ray.md.

    **Priorities** belong to the shards, for any number of learners. They are sent with
    the next draws. With ``alone=True`` this learner owns those of its node's rings, and
    draws them without a call; others that draw by them get `LockedError` until it ends.

    **Nodes that do not answer** for `lost_s` seconds are left out with a `LostWarning`
    until they are back; `stats` counts them. A shard that is being restarted on its
    node is waited for, for `patience_s` at most.
    """

    _kind = "ReplayClient"
    _says_end = True

    def __init__(
        self,
        run: str | RunCalls,
        sampler: Sampler,
        transforms: Sequence[Transform] = (),
        batch_size: int = 256,
        *,
        prefetch: int = 2,
        per_call: int = 1,
        device: str | Device = "cpu",
        alone: bool = False,
        straggler_s: float | None = None,
        lost_s: float = 5.0,
        patience_s: float = 600.0,
        seed: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        group: str | None = None,
    ) -> None:
        """Make a client; its threads start when it is iterated over.

        Args:
            run: Name of the run.
            sampler: One whose batches can be divided (``traits.divides``), such as
                `UniformSampler`, `PrioritizedSampler`, `ShuffledSampler`, or a
                `SequenceSampler` around one; any other where the run has one ring, on
                this node.
            transforms: Of every ring; without functions of yours where they run on
                other nodes.
            batch_size: Steps, or windows, a batch, at least 1.
            prefetch: Calls ahead of the learner, at least 1.
            per_call: Batches that one call asks for, at least 1. More are drawn by
                older priorities: up to ``prefetch * per_call`` batches old, which may
                be 4096 at most.
            device: Where tensors are handed over, such as ``"cuda"``.
            alone: Own the priorities of this node's rings. A sampler that draws from
                one ring alone does so in any case.
            straggler_s: Draw without a ring that has not answered a batch's call for
                so long: unbiased for the other rings. None waits. Epochs, and samplers
                that draw from one ring alone, leave no ring out.
            lost_s: Seconds without an answer after which a node is left out.
            patience_s: Seconds after which `StarvedError` ends the wait for a shard
                that is being restarted, as the run's registry says.
            seed: Of the draws; by default that of the sampler.
            rank: Number of this learner; each draws by another seed, or another part
                of the epochs of a `ShuffledSampler`.
            num_ranks: How many learners share the run, and its epochs.
            group: Name of the learners that share epochs, equal for all of them. By
                default those of one seed that begin within 10 minutes of each other.

        Raises:
            SchemaError: An argument is not legal, there is no such run, or it has no
                ring.
            LockedError: Another process owns the priorities.
        """
        most = self._max_prefetch
        integer("prefetch", prefetch, 1, "Pass a number of calls.", maximum=most)
        integer("per_call", per_call, 1, "Pass a number of batches.", maximum=most)
        if prefetch * per_call > most:
            raise SchemaError(
                f"prefetch * per_call must be at most {most} batches, got {prefetch} * "
                f"{per_call}. Lower one of them."
            )
        flag("alone", alone)
        number("lost_s", lost_s, above=0, way_out="Pass a number of seconds.")
        number("patience_s", patience_s, above=0, way_out="Pass a number of seconds.")
        if straggler_s is not None:
            number("straggler_s", straggler_s, above=0, way_out="None waits.")
        integer("num_ranks", num_ranks, 1, "Pass the number of learners.")
        integer("rank", rank, 0, "Ranks are counted from 0.")
        if rank >= num_ranks:
            raise SchemaError(
                f"rank must be below num_ranks, {num_ranks}, got {rank}. Ranks are counted from 0."
            )
        guard = ProcessGuard("this client was made", "Make one in the child")
        own = checked(sampler)
        if group is not None:
            cluster.check_name("group", group)
            if shuffled_in(own) is None:
                raise SchemaError(
                    f"group must be None with {type(own).__name__}, got "
                    f"{group!r}. Learners share epochs, which ShuffledSampler draws."
                )
        if not hasattr(run, "shards"):
            cluster.check_name("run", run)
        transforms = check_options(transforms=transforms)
        calls = RayRun(run) if isinstance(run, str) else run
        # The limiter of its writers holds for it, too.
        limiter = client_limiter(run, batch_size) if isinstance(run, str) else None
        self._late_limiter = None
        if limiter is None and isinstance(run, str):
            self._late_limiter = LateLimiter(run, batch_size)
        self._rings: AllRings | OnlyRing
        if draws_from_several(own):
            self._rings = AllRings(
                lambda limit: RingsSource(
                    calls,
                    own,
                    transforms,
                    per_call=per_call,
                    ahead=prefetch,
                    alone=alone,
                    straggler_s=straggler_s,
                    lost_s=lost_s,
                    patience_s=patience_s,
                    seed=seed,
                    rank=rank,
                    num_ranks=num_ranks,
                    group=group,
                    limit=limit,
                ),
                limiter,
            )
        else:
            draw_by_rank(own, seed, rank)
            self._rings = OnlyRing(
                open_only_ring(calls, own, transforms, lost_s, patience_s, limiter)
            )
        try:
            self._set_up(
                self._rings.source,
                batch_size,
                prefetch=prefetch * per_call,
                device=device,
                quick_s=self._rings.quick_s,
            )
        except BaseException:
            _close(guard, self._rings)
            raise
        # Of the work, and not of the client: a limit outlives a client that is dropped.
        self._rings.count_ahead(self._work.num_ready)
        self._closer = weakref.finalize(self, _close, guard, self._rings)

    def __repr__(self) -> str:
        """Show the run and the sizes."""
        return super().__repr__().replace("<ReplayLoader of", "<ReplayClient of")

    def __next__(self) -> Batch:
        """Return the next batch; see `ReplayLoader`.

        Raises:
            EmptyError: No ring has a step to draw.
            StarvedError: No node answers, or a shard was being restarted for longer
                than `patience_s`.
            FailedError: The client is closed, or the run was stopped.

        Warns:
            LostWarning: A node does not answer; batches go on without its rings.
        """
        if self._late_limiter is not None:
            limiter = self._late_limiter.look()
            if limiter is not None:
                self._rings.limit_by(limiter)
                self._late_limiter = None
        try:
            return super().__next__()
        finally:
            self._rings.warn()

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Have the priorities of a batch's steps set; see `ReplayLoader`.

        They are sent with the next draws, and the last ones by `close`.

        Returns:
            How many were dropped, of rings whose priorities this process owns; see
            ``stats().dropped`` for others.

        Raises:
            SchemaError: The sampler has no priorities, the batch is not of a client, or
                values do not fit.
            FailedError: The client is closed.
        """
        if self.closed:
            raise FailedError(
                "update_priorities: this client is closed, and sends nothing any more. "
                "Update before close."
            )
        return super().update_priorities(batch, values)

    def state_dict(self, priorities: bool = False) -> State:
        """Return the state to continue with the next batch; see `ReplayLoader`.

        After the last batch of an epoch it says that the epoch has ended: the next
        iteration after a load has no batch, and the one after it is the next epoch.
        Once ``StopIteration`` was raised, the next iteration is the next epoch.
        """
        return super().state_dict(priorities)

    def stats(self) -> ClientStats:
        """What the client has met: rings, nodes lost, calls and draws repeated."""
        return self._rings.stats()

    def close(self) -> None:
        """End the threads, send the last priorities, and release memory."""
        self._rings.end_waits()
        super().close()
        self._closer()


def _close(guard: ProcessGuard, rings: AllRings | OnlyRing) -> None:
    """Close what a client opened; a forked child leaves it to the other process."""
    if not guard.forked:
        rings.close()
