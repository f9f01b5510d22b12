"""Batches of a run's rings: planned, asked for ahead, gathered, joined and weighed.

`RingsSource` is what a `ReplayClient` draws from. It makes no call of Ray itself: it
sends requests through `ShardCalls`, which Ray's actors implement, and tests do by
shards of the same process.

**Plan.** The points of a batch are divided between the rings by the masses that are
known; each shard gets shares of its rings' own masses. A row's probability is its
ring's share in the plan times its probability in its ring at the draw, which is
unbiased whatever the masses did since; see `mmreplay.samplers.joint`.

**Rings that answer nothing.** Where a ring is empty by now, lost or late, all points
that fell on it are drawn among the other rings. With phi the sum of the silent rings'
shares in the plan, a row of the others is drawn 1 / (1 - phi) times as often, and so
its probability is divided by 1 - phi, in the whole batch.
"""

from __future__ import annotations

import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty
from typing import Any, Protocol, TypedDict, cast
from uuid import uuid4

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay import errors
from mmreplay.batch import Batch
from mmreplay.buffer.limiting import Limit
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.concatenation import as_numpy, join_batches
from mmreplay.errors import (
    EmptyError,
    FailedError,
    FormatError,
    RemovedError,
    ReplayError,
    SchemaError,
    StaleError,
    StarvedError,
    frames_to_caller,
)
from mmreplay.format.ray_files import FrozenEpoch
from mmreplay.loader.prefetch import PendingBatch
from mmreplay.process import Worker, owned_by_thread
from mmreplay.ragged import Ragged
from mmreplay.ray.descriptions import (
    Description,
    describe_sampler,
    describe_transforms,
)
from mmreplay.ray.draws import (
    Client,
    Masses,
    Reply,
    RingDraw,
    RingDraws,
    Update,
    Wanted,
    describe_client,
)
from mmreplay.ray.epochs import EpochPlan, EpochShare, FrozenRun, shuffled_in
from mmreplay.samplers.base import Draw, Sampler, State, Windows, keeps_priorities
from mmreplay.samplers.joint import JointSampler, JointWeights, Mass, Numbers, plan
from mmreplay.samplers.priority_store import storable
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.sequence import SequenceSampler
from mmreplay.samplers.states import check_kind, same, stored_integer
from mmreplay.schema import Schema
from mmreplay.storage.gather import BufferPool
from mmreplay.storage.read_ahead import Gathering
from mmreplay.transforms.base import Transform

MAX_REDRAWS = 100
"""Tries to read a ring's rows before a writer overwrites them, as of a buffer."""
REPEAT_S = 0.05
"""Seconds between two tries of a call whose shard is being restarted."""
IDLE_S = 0.1
"""Priorities are sent by themselves where nothing was drawn for so long."""
OLD_S = 1.0
"""Masses that are older are asked for, also of rings that are lost."""
LOOK_S = 2.0
"""Seconds between two looks for new shards."""
TICK_S = 0.05
WAIT_S = 0.5
"""A wait for an answer looks so often whether the shard counts as lost."""


class RingInfo(TypedDict):
    """What a client needs to know of a ring; part of a shard's ``info``.

    Attributes:
        path: Its folder on the shard's node.
        uuid: In hex digits; see `Metadata`.
        schema: See `Schema.to_json`.
        roles: Of the schema, path by role.
    """

    path: str
    uuid: str
    schema: list[dict[str, object]]
    roles: dict[str, str]


class NotYetError(Exception):
    """A call has no answer yet."""


class CallLostError(Exception):
    """A call will have no answer, since its shard is being restarted: repeat it."""


class LostWarning(UserWarning):
    """A node does not answer; its rings are not drawn from until it does."""


class Call(Protocol):
    """A call that is under way."""

    def result(self, timeout_s: float) -> Any:
        """Wait for the answer.

        Raises:
            NotYetError: There is none within so many seconds.
            CallLostError: There will be none.
            ReplayError: That is the answer.
        """


class ShardCalls(Protocol):
    """Calls to one shard.

    Attributes:
        key: The shard's, which is its node's.
    """

    key: str

    def send(self, method: str, *arguments: Any) -> Call:
        """Begin a call of ``info``, ``masses`` or ``exchange``; see `ShardDraws`."""


class RunCalls(Protocol):
    """The shards of a run.

    Attributes:
        run: Its name.
        key: Of this node.
    """

    run: str
    key: str

    def shards(self) -> Sequence[ShardCalls]:
        """The shards that are known now."""

    def epoch_name(self, start: str, rank: int) -> str:
        """Name of the epochs of a group of learners; see `Registry.epoch_name`."""

    def epoch(self, client: Client, name: str, epoch: int) -> Mapping[str, Any]:
        """Freeze an epoch in all rings; see `Registry.epoch`."""


@dataclass(slots=True)
class Done:
    """A call that was made in this process."""

    reply: Any
    error: BaseException | None = None

    def result(self, timeout_s: float) -> Any:
        """Return the answer."""
        if self.error is not None:
            raise self.error
        return self.reply


class LocalCalls:
    """Draws from rings of this node without a call; see `ShardCalls`."""

    def __init__(self, key: str, draws: RingDraws) -> None:
        """Draw from opened rings."""
        self.key, self._draws = key, draws

    def send(self, method: str, *arguments: Any) -> Call:
        """Answer at once; the client is left out, as there is one alone."""
        try:
            return Done(getattr(self._draws, method)(*arguments[1:]))
        except Exception as error:
            return Done(None, error)


@dataclass(slots=True, eq=False)
class Ring:
    """What is known of a ring.

    Attributes:
        number: Its number in batches.
        name: Within its shard.
        uuid: In hex digits.
        shard: That serves it.
        buffer: To gather from, where it is on this node.
        mass: As it was heard last.
    """

    number: int
    name: str
    uuid: str
    shard: Shard
    buffer: ReplayBuffer | None
    mass: Mass = field(default_factory=lambda: Mass(0.0, 0, np.inf, 0.0))


@dataclass(slots=True, eq=False)
class Shard:
    """What is known of a shard.

    Attributes:
        remote: Calls to the actor.
        calls: That draw: the same, or of this process.
        draws: This process's own, where it draws without a call.
        rings: By name.
        lost: It has not answered for too long.
        heard_at: When it was heard last.
        updates: Priorities to be sent, by ring.
        asked: A call for masses that is under way, and since when.
        listed: A call for the rings of this node, likewise.
        flushing: Updates that were sent by themselves.
    """

    remote: ShardCalls
    calls: ShardCalls
    draws: RingDraws | None = None
    rings: dict[str, Ring] = field(default_factory=dict)
    lost: bool = False
    heard_at: float = 0.0
    updates: dict[str, list[Update]] = field(default_factory=dict)
    asked: tuple[Call, float] | None = None
    listed: Call | None = None
    flushing: Request | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A request to a shard, for its part of one or more batches.

    Attributes:
        shard: The shard.
        arguments: Of ``exchange``; the same again where it is repeated.
        call: The call under way.
        at: When it was sent first.
        reply: The answer, once it is here.
        lock: Held by who waits for it.
    """

    shard: Shard
    arguments: tuple[Any, ...]
    call: Call
    at: float
    reply: Reply | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


RequestSlices = tuple[Request, dict[str, slice]]


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch that was planned and asked for.

    Attributes:
        step: Of the client.
        count: Steps.
        key: See `Draw.key`.
        fractions: float64 ``[R]``, each ring's share in the plan.
        shares: float64 ``[k]`` of each ring.
        requests: To shards that have a share, and which of each ring's draws in
            the reply are this batch's.
        epoch_share: Of an epoch, where the sampler draws epochs.
    """

    step: int
    count: int
    key: int
    fractions: Numbers
    shares: list[Numbers]
    requests: list[RequestSlices] = field(default_factory=list)
    epoch_share: EpochShare | None = None


@dataclass(slots=True)
class ClientStats:
    """What a client has met; counts are since it was made.

    Attributes:
        rings: Rings known, as ``"shard/ring"``; their index is that of ``buffer_ids``.
        lost: Those of them that are not drawn from now, since their node is silent.
        times_lost: How often a node was lost.
        late: Batches that went without a late ring, by straggler_s.
        redrawn: Steps drawn from other rings, in place of silent or empty ones.
        overwritten: Draws repeated, since rows were overwritten before the gather.
        repeated: Calls repeated, since a shard was restarted.
        dropped: Priorities whose rows had been overwritten.
        skipped: Starts of the newest epoch that were overwritten before they were
            drawn.
    """

    rings: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    times_lost: int = 0
    late: int = 0
    redrawn: int = 0
    overwritten: int = 0
    repeated: int = 0
    dropped: int = 0
    skipped: int = 0


class RingsSource:
    """Draws from all rings of a run; see `mmreplay.loader.prefetch.Drawable`.

    Threads: one at a time draws; any may gather, update priorities and ask for stats.
    A thread of its own sends priorities that wait for long, asks for masses that are
    old, and looks for nodes that are lost or new.

    Attributes:
        pool: Memory of the batches.
        closing: Whether waits for a node that is away are to end.
    """

    def __init__(
        self,
        run: RunCalls,
        sampler: Sampler,
        transforms: Sequence[Transform],
        *,
        per_call: int = 1,
        alone: bool = False,
        straggler_s: float | None = None,
        lost_s: float = 5.0,
        seed: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        limit: Limit | None = None,
    ) -> None:
        """Find the rings.

        Args:
            run: The run.
            sampler: What they are drawn by.
            transforms: Of every ring.
            per_call: Batches that one call asks for.
            alone: Own the priorities of this node's rings.
            straggler_s: Seconds after which a batch goes without a late ring.
            lost_s: Seconds without an answer after which a shard is lost.
            seed: Of the draws; that of the sampler by default.
            rank: Each rank draws other steps.
            num_ranks: Learners that share epochs.
            limit: Grants batches, and is closed with this; None for no limit.

        Raises:
            SchemaError: The run has no ring, schemas differ, or the sampler or a
                transform cannot draw from rings of a run.
        """
        self._run, self._sampler, self._limit = run, sampler, limit
        self.pool = BufferPool()
        self.closing = False
        self._transforms = tuple(transforms)
        self._per_call, self._alone = per_call, alone
        self._straggler_s, self._lost_s = straggler_s, lost_s
        described: list[Description] = []
        # Refused once it is known that a ring is on another node.
        self._not_described: SchemaError | None = None
        try:
            described = describe_transforms(transforms)
        except SchemaError as error:
            self._not_described = error
        self._client: Client = describe_client(describe_sampler(sampler), described)
        shuffled, given_seed = shuffled_in(sampler), seed
        seed = _seed_of(sampler) if seed is None else seed
        self._epochs: EpochPlan | None = None
        self._epoch_name = ""
        if shuffled is not None:
            self._epochs = EpochPlan(shuffled, rank, num_ranks, given_seed)
            self._start_of_name = f"{self._client['name']} {self._epochs.seed}"
        elif rank:
            sequence = np.random.SeedSequence([seed or 0, rank])
            seed = int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
        self._random = StepGenerator(seed)
        self._step = 0
        self._prioritized = keeps_priorities(sampler)
        self._lock = threading.RLock()
        self._shards: dict[str, Shard] = {}
        self._rings: list[Ring] = []
        self._planned: deque[PlannedBatch] = deque()
        self._stats = ClientStats()
        self._warnings: deque[str] = deque()
        self._drew_at = self._looked_at = 0.0
        self._schema: Schema | None = None
        self._start_nbytes = 0
        self._new_rings = False
        self._worker: Worker[None] | None = None
        self.find_rings()
        if not self._rings:
            raise SchemaError(
                f"run {run.run!r} must have a ring, but none was found. Make one with "
                "mr.ray.writer(run, schema, capacity, root=...)."
            )

    def __repr__(self) -> str:
        """Show the run and its rings."""
        return f"<run {self._run.run!r} of {len(self._rings)} rings>"

    # Rings and their masses.

    @property
    def schema(self) -> Schema:
        """The fields of one step."""
        assert self._schema is not None
        return self._schema

    @property
    def window_length(self) -> int:
        """Steps a window; 1 without windows."""
        sampler = self._sampler
        return sampler.window_length if isinstance(sampler, SequenceSampler) else 1

    def find_rings(self) -> None:
        """Take in shards and rings that are new, and ask all for their masses.

        Raises:
            SchemaError: A ring has another schema, or transforms do not travel.
            LockedError: Another process owns the priorities of a ring.
        """
        self._looked_at = time.monotonic()
        self._new_rings = False
        asked = []
        for calls in sorted(self._run.shards(), key=lambda calls: calls.key):
            shard = self._shards.get(calls.key)
            if shard is None:
                shard = self._shards[calls.key] = Shard(calls, calls)
            if not shard.lost:
                asked.append((shard, calls.send("info"), time.monotonic()))
        for shard, call, at in asked:
            info = self._wait(shard, call, at, "info")
            if info is not None:
                self._take_in(shard, info)
        self._ask_all()

    def _take_in(self, shard: Shard, info: Mapping[str, Any]) -> None:
        """Open what is on this node, and number the rings that are new.

        Raises:
            ReplayError: What the shard met when it opened its rings.
        """
        if info["error"] is not None:
            kind = getattr(errors, info["error"]["kind"], FailedError)
            raise kind(info["error"]["message"])
        found: Mapping[str, RingInfo] = info["rings"]
        here = shard.remote.key == self._run.key
        buffers: Mapping[str, ReplayBuffer] = {}
        if here and (self._alone or not self._prioritized):
            folders = {name: Path(each["path"]) for name, each in found.items()}
            if all(folder.is_dir() for folder in folders.values()):
                if shard.draws is None:
                    shard.draws = RingDraws(self._client, self._transforms)
                    shard.calls = LocalCalls(shard.remote.key, shard.draws)
                shard.draws.serve(folders)
                buffers = shard.draws.buffers
        if shard.draws is None and self._not_described is not None:
            raise self._not_described
        for name in sorted(found):
            if name in shard.rings:
                if shard.draws is not None:
                    # Another one, where the folder was deleted and made again.
                    shard.rings[name].buffer = buffers.get(name)
                continue
            each = found[name]
            schema = Schema.from_json(each["schema"], each["roles"])
            self._check_schema(schema, f"{shard.remote.key}/{name}")
            buffer = buffers.get(name)
            if here and buffer is None:
                buffer = _opened(each, self._transforms)
            with self._lock:
                ring = Ring(len(self._rings), name, each["uuid"], shard, buffer)
                shard.rings[name] = ring
                self._rings.append(ring)

    def _check_schema(self, schema: Schema, name: str) -> None:
        if self._schema is None:
            self._schema = schema
            self._start_nbytes = self.window_length * schema.row_nbytes
            return
        mine, other = schema.fields, self._schema.fields
        for path in dict.fromkeys((*other, *mine)):
            if mine.get(path) != other.get(path):
                first = self._rings[0]
                raise SchemaError(
                    f"field {path!r} of ring {name} must be {other.get(path)}, as in "
                    f"{first.shard.remote.key}/{first.name}, got {mine.get(path)}. "
                    "Use one schema in a run."
                )
        if schema != self._schema:
            raise SchemaError(
                f"ring {name} must have the roles and the order of fields of the "
                f"others, {dict(self._schema.roles)}, got {dict(schema.roles)}. Use "
                "one schema in a run."
            )

    @property
    def _highest(self) -> float:
        return max((ring.mass.highest for ring in self._rings), default=0.0)

    def _ask_all(self) -> None:
        """Ask all shards for their masses, and wait."""
        asked = [
            (shard, self._send_masses(shard), time.monotonic())
            for shard in list(self._shards.values())
            if not shard.lost
        ]
        for shard, call, at in asked:
            masses = self._wait(shard, call, at, "masses")
            if masses is not None:
                self._note(shard, masses)

    def _send_masses(self, shard: Shard) -> Call:
        return shard.calls.send("masses", self._client, self._step, self._highest)

    def _note(self, shard: Shard, masses: Masses) -> None:
        """Take note of masses that were heard."""
        with self._lock:
            shard.heard_at, shard.lost = time.monotonic(), False
            for name, ring in shard.rings.items():
                total, num_legal, lowest, highest = masses.get(name, (0, 0, np.inf, 0))
                ring.mass = Mass(total, int(num_legal), lowest, highest)
            self._new_rings |= bool(masses.keys() - shard.rings.keys())

    def _wait(self, shard: Shard, call: Call, at: float, method: str) -> Any:
        """Wait for the answer to a call that asks; None where the shard is lost."""
        while True:
            try:
                return call.result(WAIT_S)
            except NotYetError:
                pass
            except CallLostError:
                time.sleep(REPEAT_S)
                self._stats.repeated += 1
                if method == "masses":
                    call = self._send_masses(shard)
                else:
                    call = shard.remote.send(method)
            if self._is_lost(shard, at):
                return None

    def _is_lost(self, shard: Shard, since: float) -> bool:
        """Whether a shard has been silent for too long."""
        if shard.lost:
            return True
        if time.monotonic() - max(since, shard.heard_at) < self._lost_s:
            return False
        with self._lock:
            if not shard.lost:
                shard.lost, shard.asked = True, None
                self._stats.times_lost += 1
                rings = [f"{shard.remote.key}/{name}" for name in shard.rings]
                self._warnings.append(
                    f"run {self._run.run!r}: node {shard.remote.key!r} has not "
                    f"answered for {self._lost_s:g} s. Batches are drawn without its "
                    f"rings {rings} until it answers."
                )
        return True

    # One batch: plan, requests, answers.

    def draw(self, pending: PendingBatch, count: int) -> bool:
        """Plan a batch, and ask for it; one call asks for several."""
        if self._epochs is not None:
            return self._draw_epoch_share(self._epochs, pending, count)
        with self._lock:
            pending.state = self.state_dict()
            planned = self._planned
            if planned and planned[0].count != count:
                planned.clear()
            if not planned:
                planned.extend(self._plan(count, self._per_call))
            pending.shares = (planned.popleft(),)
            self._step += 1
            self._drew_at = time.monotonic()
        return True

    def _plan(self, count: int, num_batches: int) -> list[PlannedBatch]:
        """Divide the next batches between the rings, and send the requests."""
        totals, batches = self._totals(count), []
        for step in range(self._step, self._step + num_batches):
            points = self._points(self._random.shares(step, count))
            fractions, shares = plan(totals, points)
            key = self._random.key(step)
            batches.append(PlannedBatch(step, count, key, fractions, shares))
        # Those of this process first: their rows are copied while others travel.
        for shard in sorted(
            self._shards.values(), key=lambda shard: shard.draws is None
        ):
            self._request(shard, batches)
        return batches

    def _request(self, shard: Shard, batches: Sequence[PlannedBatch]) -> None:
        """Ask a shard for its part of some batches, all of a ring's at once."""
        shares: dict[str, Numbers] = {}
        slices: list[dict[str, slice]] = [{} for _ in batches]
        for ring in list(shard.rings.values()):
            each = [
                batch.shares[ring.number]
                for batch in batches
                if ring.number < len(batch.shares)
            ]
            stops = np.cumsum([len(own) for own in each]).tolist()
            if not stops or not stops[-1]:
                continue
            shares[ring.name] = np.concatenate(each) if len(each) > 1 else each[0]
            for mine, first, stop in zip(slices, [0, *stops], stops, strict=False):
                if first < stop:
                    mine[ring.name] = slice(first, stop)
        if not shares:
            return
        newest, oldest = batches[-1], batches[0]
        request = self._send(shard, newest.step, oldest.key, shares, newest.epoch_share)
        for batch, mine in zip(batches, slices, strict=True):
            if mine:
                batch.requests.append((request, mine))

    def _totals(self, count: int) -> Numbers:
        """Masses of the rings as they are known; 0 of those that are lost.

        Raises:
            EmptyError: There is no mass.
            StarvedError: No shard answers.
        """
        for is_new in (False, True):
            if is_new:
                self._ask_all()
            totals = np.array(
                [0.0 if r.shard.lost else r.mass.total for r in self._rings]
            )
            if totals.sum() > 0:
                return totals
        if all(ring.shard.lost for ring in self._rings):
            raise StarvedError(
                f"run {self._run.run!r}: no node has answered for {self._lost_s:g} s, "
                f"of {sorted(self._shards)}. Check them with mmreplay ray status "
                f"{self._run.run}, and draw again."
            )
        legal = sum(ring.mass.num_legal for ring in self._rings)
        raise EmptyError(
            f"cannot draw {count} steps: the {len(self._rings)} rings of run "
            f"{self._run.run!r} have {legal} legal starts, and all of them priority 0. "
            "Add steps, or update the priorities."
        )

    def _points(self, numbers: Numbers) -> Numbers:
        """Points of a batch on the line of all masses."""
        sampler = self._sampler
        if self._prioritized:
            return cast(JointSampler, sampler).points(numbers)
        return numbers

    def _send(
        self,
        shard: Shard,
        step: int,
        key: int,
        shares: dict[str, Numbers],
        epoch_share: EpochShare | None = None,
    ) -> Request:
        """Send shares to a shard, and the priorities that wait for it."""
        wanted: Wanted | None = None
        if shares:
            rings = shard.rings
            rows = [name for name in shares if rings[name].buffer is None]
            wanted = {"step": step, "key": key, "shares": shares, "rows": rows}
            if epoch_share is not None:
                wanted["epoch"] = epoch_share.name, epoch_share.epoch
        with self._lock:
            updates, shard.updates = shard.updates, {}
        arguments = (self._client, updates, wanted, self._highest)
        call = shard.calls.send("exchange", *arguments)
        return Request(shard, arguments, call, time.monotonic())

    def _answer(self, request: Request, straggler_s: float | None) -> Reply | None:
        """Wait for a reply; None where the shard is lost, or late.

        A shard that is restarted gets the same request again.
        """
        shard = request.shard
        with request.lock:
            while request.reply is None:
                wait_s = WAIT_S
                if straggler_s is not None:
                    wait_s = request.at + straggler_s - time.monotonic()
                try:
                    reply = request.call.result(min(max(0.0, wait_s), WAIT_S))
                except NotYetError:
                    if straggler_s is not None and wait_s <= WAIT_S:
                        return None
                except CallLostError:
                    self._stats.repeated += 1
                    time.sleep(REPEAT_S)
                    request.call = shard.calls.send("exchange", *request.arguments)
                else:
                    request.reply = reply
                    self._note(shard, reply["masses"])
                    self._stats.dropped += reply["dropped"]
                    break
                if self._is_lost(shard, request.at):
                    return None
            return request.reply

    # From the replies to a batch.

    def gather(self, pending: PendingBatch) -> Batch | None:
        """Wait for the rows of a batch, or gather them here, and join them."""
        # It was not known which rows it takes when the disk could have been asked.
        planned: PlannedBatch = pending.shares[0]
        with Gathering(pending.prefetched and self._in_process):
            if self._epochs is not None:
                return self._gather_epoch_share(self._epochs, planned)
            return self._gather(planned)

    def _gather(self, planned: PlannedBatch) -> Batch:
        for _ in range(MAX_REDRAWS):
            batch = self._collect(planned)
            if batch is not None:
                return batch
            # No ring of the plan has anything to draw: plan by what is there now.
            self._ask_all()
            with self._lock:
                totals = self._totals(planned.count)
                points = self._points(self._random.shares(planned.step, planned.count))
                fractions, shares = plan(totals, points)
                planned = PlannedBatch(
                    planned.step, planned.count, planned.key, fractions, shares
                )  # fmt: skip
            planned.requests = self._ask_for(planned, shares)
        raise StarvedError(
            f"run {self._run.run!r}: gave up after {MAX_REDRAWS} attempts, as rings "
            "were empty each time. Lower the batch_size, or increase the capacities."
        )

    def _ask_for(
        self, planned: PlannedBatch, shares: Sequence[Numbers]
    ) -> list[RequestSlices]:
        """Ask for shares of rings, outside the order of plans."""
        redrawn = replace(planned, shares=list(shares), requests=[])
        for shard in list(self._shards.values()):
            self._request(shard, [redrawn])
        return redrawn.requests

    def _collect(self, planned: PlannedBatch) -> Batch | None:
        """Collect the parts of a batch; None where no ring gave any."""
        fractions = planned.fractions
        batches: dict[int, list[Batch]] = {}
        silent = self._receive(planned, planned.requests, batches)
        if not silent:
            return self._join(planned, batches, fractions, silent)
        points = np.array([len(own) for own in planned.shares])
        spent, failed = planned.count, silent
        while failed:
            # All points of a ring that gives nothing are drawn among the others.
            gone = list(silent)
            for number in gone:
                batches.pop(number, None)
            missing = int(points[gone].sum())
            points[gone] = 0
            rest = fractions.copy()
            rest[gone] = 0.0
            if not rest.sum() > 0:
                return None
            self._stats.redrawn += missing
            numbers = self._random.shares(planned.step, spent + missing)[spent:]
            spent += missing
            _, shares = plan(rest, self._points(numbers))
            points += [len(own) for own in shares]
            failed = self._receive(planned, self._ask_for(planned, shares), batches)
            silent |= failed
        phi = float(fractions[list(silent)].sum())
        return self._join(planned, batches, fractions / (1.0 - phi), silent)

    def _receive(
        self,
        planned: PlannedBatch,
        requests: Sequence[RequestSlices],
        batches: dict[int, list[Batch]],
    ) -> set[int]:
        """Add what shards gave to the batches; return the rings that gave nothing."""
        failed: set[int] = set()
        late: list[RequestSlices] = []
        for straggler_s in (self._straggler_s, None):
            for request, slices in requests:
                rings = request.shard.rings
                reply = self._answer(request, straggler_s)
                if reply is None:
                    if not request.shard.lost:
                        late.append((request, slices))
                    failed |= {rings[name].number for name in slices}
                    continue
                for name, own in slices.items():
                    batch = self._rows(rings[name], request, own, planned)
                    if batch is None:
                        failed.add(rings[name].number)
                    else:
                        failed.discard(rings[name].number)
                        batches.setdefault(rings[name].number, []).append(batch)
            if not late or batches:
                break
            # None is in time: wait for them all.
            requests, late = late, []
        self._stats.late += bool(late)
        return failed

    def _rows(
        self, ring: Ring, request: Request, own: slice, planned: PlannedBatch
    ) -> Batch | None:
        """The rows of one ring; None where it has nothing to draw."""
        shares = request.arguments[2]["shares"][ring.name][own]
        reply = request.reply
        for _ in range(MAX_REDRAWS):
            drawn = None if reply is None else reply["draws"][ring.name]
            if drawn is None:
                return None
            if "fields" in drawn:
                return _arrived(drawn, own, planned.key)
            try:
                if ring.buffer is not None:
                    return ring.buffer.gather(_draw_of(drawn, own, planned.key))
            except StaleError:
                self._stats.overwritten += 1
            except RemovedError:
                # Its shard reads what is there by now, if anything.
                ring.buffer = None
            # Overwritten since the draw: the ring's whole share is drawn again, by the
            # same shares, with the probabilities of then.
            again = {ring.name: shares}
            request = self._send(ring.shard, planned.step, planned.key, again)
            reply, own = self._answer(request, None), slice(None)
        raise StarvedError(
            f"gave up after {MAX_REDRAWS} attempts: the writer of ring {ring.name} "
            "overwrote drawn steps before they were read. Increase its capacity, or "
            "lower batch_size or prefetch."
        )

    def _join(
        self,
        planned: PlannedBatch,
        by_ring: Mapping[int, Sequence[Batch]],
        fractions: Numbers,
        silent: set[int],
    ) -> Batch:
        """Join the batches in the order of the rings, and weigh them."""
        batches = []
        for number in sorted(by_ring):
            for batch in by_ring[number]:
                batch.buffer_ids = np.full(len(batch), number)
                batch.probabilities = batch.probabilities * fractions[number]
                batches.append(batch)
        joined = batches[0]
        if len(batches) > 1 or not _is_writeable(joined):
            joined = join_batches(batches, self._concatenate)
        joined.key, joined.buffer = planned.key, b""
        if self._prioritized:
            weights = self._weights(planned, fractions, silent)
            joined.weights = weights.of(joined.probabilities)
        return joined

    def _weights(
        self, planned: PlannedBatch, fractions: Numbers, silent: set[int]
    ) -> JointWeights:
        """Weights by the newest masses, as if all were one buffer's."""
        masses = []
        with self._lock:
            known = [(r.number, r.mass, r.shard.lost) for r in self._rings]
        for number, mass, lost in known:
            if lost or number in silent:
                continue
            # A ring's total is its share in the plan, and masses are in proportion.
            share = fractions[number] if number < len(fractions) else 0.0
            lowest = np.inf
            if share > 0 and mass.total > 0:
                lowest = share * mass.lowest / mass.total
            masses.append(Mass(float(share), mass.num_legal, lowest, mass.highest))
        sampler = cast(JointSampler, self._sampler)
        return sampler.joint_weights(planned.step, masses)

    def _concatenate(
        self, arrays: Sequence[NDArray[Any]], axis: int = 0
    ) -> NDArray[Any]:
        """Concatenate arrays in memory that is used again."""
        first = arrays[0]
        if len(arrays) == 1 and first.flags.writeable:
            return first
        shape = list(first.shape)
        shape[axis] = sum(array.shape[axis] for array in arrays)
        out = self.pool.empty(tuple(shape), np.result_type(*arrays))
        return np.concatenate(arrays, axis, out=out)

    # Epochs.

    def _draw_epoch_share(
        self, epochs: EpochPlan, pending: PendingBatch, count: int
    ) -> bool:
        """Plan the next batch of an epoch, and ask for it."""
        with self._lock:
            pending.state = self.state_dict()
            if epochs.frozen(epochs.epoch) is None:
                epochs.begin(self._begun(epochs))
            share = epochs.next(count)
            if share is None:
                epochs.next_epoch()
                return False
            frozen = epochs.frozen(share.epoch)
            assert frozen is not None
            while not self._has_rings(frozen.rings):
                self._refuse_closing()
                time.sleep(REPEAT_S)
                self.find_rings()
            rings = tuple(self._rings)
            numbers = {ring.uuid: ring.number for ring in rings}
            totals = np.zeros(len(rings))
            shares = [np.empty(0)] * len(rings)
            for uuid, total in zip(frozen.rings, frozen.totals.tolist(), strict=True):
                totals[numbers[uuid]] = total
                shares[numbers[uuid]] = share.shares.get(uuid, np.empty(0))
            number = (share.epoch << 32) + share.first * epochs.num_ranks + epochs.rank
            key = StepGenerator(epochs.seed).key(number)
            planned = PlannedBatch(
                0,
                share.stop - share.first,
                key,
                totals / totals.sum(),
                shares,
                epoch_share=share,
            )
            for shard in list(self._shards.values()):
                self._request(shard, [planned])
            pending.shares = (planned,)
            self._drew_at = time.monotonic()
        return True

    def _has_rings(self, uuids: Iterable[str]) -> bool:
        return {ring.uuid for ring in self._rings} >= set(uuids)

    def _begun(self, epochs: EpochPlan) -> FrozenRun:
        """Have all rings freeze the next epoch; waits for shards that are away."""
        if not self._epoch_name:
            start = f"{zlib.crc32(self._start_of_name.encode()):08x}"
            if epochs.num_ranks > 1:
                start = f"{start}.{epochs.num_ranks}"
                self._epoch_name = self._run.epoch_name(start, epochs.rank)
            else:
                self._epoch_name = f"{start}/{uuid4().hex}"
        while True:
            answer = self._run.epoch(self._client, self._epoch_name, epochs.epoch)
            if not answer["away"]:
                return FrozenRun.of(
                    {
                        uuid: FrozenEpoch.from_json(each, f"epoch of ring {uuid}")
                        for uuid, each in answer["rings"].items()
                    }
                )
            self._refuse_closing()
            time.sleep(WAIT_S)

    def _gather_epoch_share(
        self, epochs: EpochPlan, planned: PlannedBatch
    ) -> Batch | None:
        """Collect a batch of an epoch; None where none of its steps is there."""
        share = planned.epoch_share
        assert share is not None
        batches: dict[int, list[Batch]] = {}
        for request, slices in planned.requests:
            reply = self._answer_of_epoch(epochs, request, share)
            for name in slices:
                ring = request.shard.rings[name]
                batch = self._rows_of_epoch(epochs, ring, request, reply, planned)
                if batch is not None and len(batch):
                    batches.setdefault(ring.number, []).append(batch)
        joined = None
        if batches:
            joined = self._join(planned, batches, planned.fractions, set())
        with self._lock:
            epochs.gathered(share, 0 if joined is None else len(joined))
        return joined

    def _rows_of_epoch(
        self,
        epochs: EpochPlan,
        ring: Ring,
        request: Request,
        reply: Reply,
        planned: PlannedBatch,
    ) -> Batch | None:
        """The rows of one ring that are still there; None where the ring is gone."""
        share, every = planned.epoch_share, slice(None)
        assert share is not None
        shares = request.arguments[2]["shares"][ring.name]
        for _ in range(MAX_REDRAWS):
            drawn = reply["draws"][ring.name]
            if drawn is None:
                return None
            if "fields" in drawn:
                return _arrived(drawn, every, planned.key)
            try:
                if ring.buffer is not None:
                    return ring.buffer.gather(_draw_of(drawn, every, planned.key))
            except StaleError:
                self._stats.overwritten += 1
            except RemovedError:
                ring.buffer = None
            # Some were overwritten since: the same starts, without those.
            again = self._send(
                ring.shard, planned.step, planned.key, {ring.name: shares}, share
            )
            reply = self._answer_of_epoch(epochs, again, share)
        raise StarvedError(
            f"gave up after {MAX_REDRAWS} attempts: the writer of ring {ring.name} "
            "overwrote drawn steps before they were read. Increase its capacity, or "
            "lower batch_size or prefetch."
        )

    def _answer_of_epoch(
        self, epochs: EpochPlan, request: Request, share: EpochShare
    ) -> Reply:
        """Wait for a reply, however long a shard is away."""
        shard = request.shard
        while True:
            try:
                reply = self._answer(request, None)
            except StaleError:
                # The ring has forgotten the epoch, or its folder was replaced.
                frozen = epochs.frozen(share.epoch)
                if frozen is None:
                    raise
                rings = {u: each.to_json() for u, each in frozen.rings.items()}
                restored = shard.remote.send("restore", self._client, rings)
                with suppress(NotYetError, CallLostError):
                    restored.result(self._lost_s)
            else:
                if reply is not None:
                    return reply
            while shard.lost:
                # The thread that looks after the shards hears when it is back.
                self._refuse_closing()
                time.sleep(REPEAT_S)
            request.at = time.monotonic()
            request.call = shard.calls.send("exchange", *request.arguments)

    def _refuse_closing(self) -> None:
        if self.closing:
            raise FailedError(f"run {self._run.run!r}: the client is closed.")

    # Priorities.

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Note priorities for the rings of a batch's steps.

        Returns:
            How many were dropped; of other processes' rings that is not known yet, and
            is counted in `stats`.

        Raises:
            SchemaError: The sampler has no priorities, the batch is not of a client,
                or values do not fit.
        """
        if not self._prioritized:
            raise SchemaError(
                "update_priorities needs a sampler with priorities, got "
                f"{type(self._sampler).__name__}. Create the client with "
                "PrioritizedSampler(...)."
            )
        if not isinstance(batch, Batch) or batch.buffer_ids is None:
            raise SchemaError(
                "update_priorities needs a batch that a ReplayClient returned, got "
                f"{type(batch).__name__} without buffer_ids. Pass it to the buffer "
                "that drew it."
            )
        ids, rings, dropped = as_numpy(batch.buffer_ids), list(self._rings), 0
        numbers = self._checked(as_numpy(values), batch, len(ids))
        # Looked at as arrays, of which no tensor was made yet.
        env_ids = as_numpy(batch.drawn("env_ids"))
        positions = as_numpy(batch.drawn("positions"))
        mask = None
        if numbers.ndim == 2 and batch.mask is not None:
            mask = as_numpy(batch.mask)
        used = np.flatnonzero(np.bincount(ids)).tolist() if len(ids) else []
        if used and used[-1] >= len(rings):
            raise SchemaError(
                f"buffer_ids must be in [0, {len(rings)}), got values up to "
                f"{used[-1]}. Pass a batch of this client."
            )
        for number in used:
            # Batches are laid out ring by ring; the others are in any order.
            rows = np.flatnonzero(ids == number) if len(used) > 1 else slice(None)
            update: Update = {
                "env_ids": env_ids[rows],
                "positions": positions[rows],
                "values": numbers[rows],
                "mask": None if mask is None else mask[rows],
            }
            ring = rings[number]
            if ring.shard.draws is not None:
                dropped += ring.shard.draws.update(ring.name, [update])
            else:
                with self._lock:
                    ring.shard.updates.setdefault(ring.name, []).append(update)
        self._stats.dropped += dropped
        return dropped

    def _checked(self, values: NDArray[Any], batch: Batch, count: int) -> NDArray[Any]:
        """Priorities of a batch, refused here where a shard would refuse them."""
        if values.dtype.kind not in "fiu" and values.size:
            raise SchemaError(
                f"priorities must be real numbers, got {values.dtype}. Cast them."
            )
        lengths: tuple[int, ...] = ()
        if isinstance(self._sampler, SequenceSampler):
            lengths = (self._sampler.window_length, self._sampler.length)
        fits = values.ndim == 1 or (values.ndim == 2 and values.shape[1] in lengths)
        if not fits or len(values) != count:
            windows = "".join(f" or [{count}, {n}]" for n in dict.fromkeys(lengths))
            raise SchemaError(
                f"priorities must have shape [{count}]{windows}, got "
                f"{list(values.shape)}. Pass one priority for each step of the batch."
            )
        shape: tuple[int, ...] = values.shape
        if len(shape) == 1:
            return storable(values)
        mask = np.ones(shape, bool)
        if batch.mask is not None:
            mask, width = as_numpy(batch.mask), shape[1]
            if mask.shape[1] != width:
                first = cast(SequenceSampler, self._sampler).burn_in
                mask = mask[:, first : first + width]
        storable(values[mask])
        return values

    # What else a loader asks for.

    @property
    def _in_process(self) -> bool:
        """Whether no batch waits for a call."""
        return all(shard.draws is not None for shard in self._shards.values())

    @property
    def limits(self) -> Sequence[Limit]:
        """What grants batches, where the run has a limiter."""
        return () if self._limit is None else (self._limit,)

    def begin(self) -> None:
        """Start the thread that looks after the shards."""
        if self._worker is None:
            self._worker = Worker("mmreplay-rings", self._look_after)
            self._worker.start()

    def end(self) -> None:
        """Do nothing: no other client has this one's epochs."""

    def owned_by_thread(self) -> bool:
        """Whether this thread is in the middle of a plan."""
        return owned_by_thread(self._lock)

    def more(self, count: int) -> bool:
        """Whether the epoch has another batch; without epochs there always is."""
        epochs = self._epochs
        if epochs is None or epochs.frozen(epochs.epoch) is None:
            return True
        return epochs.done < epochs.size(count)

    def sample(self, pending: PendingBatch, count: int) -> Batch | None:
        """Draw and gather; None where the epoch is over."""
        while self.draw(pending, count):
            batch = self.gather(pending)
            if batch is not None:
                return batch
        return None

    def nbytes(self, pending: PendingBatch) -> int:
        """Bytes of the rows of a batch."""
        planned: PlannedBatch = pending.shares[0]
        return planned.count * self._start_nbytes

    def prefetch(self, pending: PendingBatch) -> int:
        """Ask the disk for rows that are known; those that travel count as missing."""
        if not self._in_process:
            return self.nbytes(pending)
        planned: PlannedBatch = pending.shares[0]
        missing = 0
        for request, slices in planned.requests:
            try:
                draws = request.call.result(0.0)["draws"]
            except StaleError:
                # The epoch is not known here any more; `gather` brings it back.
                continue
            for name, each in slices.items():
                buffer, drawn = request.shard.rings[name].buffer, draws[name]
                # Of an epoch there are fewer where some were overwritten.
                own = slice(None) if planned.epoch_share is not None else each
                if drawn is not None and buffer is not None:
                    draw = _draw_of(drawn, own, planned.key)
                    missing += buffer.reading.prefetch(draw)
        return missing

    def num_batches(self, count: int) -> int:
        """Batches of the whole epoch, which begins here where it has not.

        Raises:
            TypeError: The sampler has no epochs.
        """
        epochs = self._epochs
        if epochs is not None:
            with self._lock:
                if epochs.frozen(epochs.epoch) is None:
                    epochs.begin(self._begun(epochs))
                return -(-epochs.size(count) // count)
        raise TypeError(
            f"ReplayClient: {type(self._sampler).__name__} draws without an end, so it "
            "has no length. Use a sampler with epochs, such as ShuffledSampler."
        )

    def state_dict(self, priorities: bool = False) -> State:
        """Seed and step; priorities stay with the rings, on disk."""
        if self._epochs is not None:
            return {**self._epochs.state_dict(), "group": self._epoch_name}
        return {
            "kind": "RingsSource", "seed": self._random.seed, "step": self._step,
            "sampler": type(self._sampler).__name__,
        }  # fmt: skip

    def load_state_dict(self, state: State) -> None:
        """Draw from a state on."""
        if self._epochs is not None:
            with self._lock:
                self._epochs.load_state_dict(state)
                self._epoch_name = str(state.get("group", ""))
            return
        check_kind(state, "RingsSource")
        same(state, "sampler", type(self._sampler).__name__)
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        with self._lock:
            self._random, self._step = StepGenerator(seed), step
            self._planned.clear()

    def count(self, batch: Batch, size: int) -> None:
        """Do nothing: items are counted where they are drawn."""

    def stats(self) -> ClientStats:
        """What was met so far."""
        with self._lock:
            names = {
                ring: f"{ring.shard.remote.key}/{ring.name}" for ring in self._rings
            }
            return replace(
                self._stats,
                rings=tuple(names.values()),
                lost=tuple(n for ring, n in names.items() if ring.shard.lost),
                skipped=0 if self._epochs is None else self._epochs.skipped,
            )

    def warn(self) -> None:
        """Warn of nodes that were lost, in the learner's thread."""
        while self._warnings:
            warnings.warn(
                self._warnings.popleft(), LostWarning, stacklevel=frames_to_caller()
            )

    # The thread that looks after the shards.

    def _look_after(self, worker: Worker[None]) -> None:
        while True:
            try:
                worker.get(TICK_S)
            except Empty:
                self.tick()
            else:
                return

    def tick(self) -> None:
        """Send priorities that wait, ask for old masses, and look for new rings."""
        for shard in list(self._shards.values()):
            # What fails here is raised by the draw that meets it.
            try:
                self._look_at(shard)
            except ReplayError:
                shard.asked = shard.flushing = None
        if not self._new_rings and time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            if self._has_new_rings():
                self.find_rings()
        except ReplayError as error:
            self._warnings.append(f"run {self._run.run!r}: {error}")

    def _has_new_rings(self) -> bool:
        """Whether there are shards or rings that are not known yet."""
        keys = {calls.key for calls in self._run.shards()}
        is_new = self._new_rings or not keys <= self._shards.keys()
        for shard in list(self._shards.values()):
            # Masses of its rings are this process's own, and say of no other ring.
            if shard.draws is None or shard.lost:
                continue
            if shard.listed is None:
                shard.listed = shard.remote.send("info")
                continue
            try:
                info = shard.listed.result(0.0)
            except NotYetError:
                continue
            except CallLostError:
                shard.listed = None
                continue
            shard.listed, before = None, len(self._rings)
            self._take_in(shard, info)
            is_new |= len(self._rings) > before
        return is_new

    def _look_at(self, shard: Shard) -> None:
        now = time.monotonic()
        if shard.flushing is None and shard.updates and now - self._drew_at > IDLE_S:
            shard.flushing = self._send(shard, 0, 0, {})
        request = shard.flushing
        if request is not None and not shard.lost and self._answer_now(request):
            shard.flushing = None
        if shard.asked is not None:
            call, at = shard.asked
            try:
                masses = call.result(0.0)
            except NotYetError:
                # A call of before a node died may never be answered.
                if self._is_lost(shard, at) and now - at > self._lost_s:
                    shard.asked = None
            except CallLostError:
                shard.asked = None
                self._is_lost(shard, at)
            else:
                shard.asked = None
                self._note(shard, masses)
        elif now - shard.heard_at > OLD_S:
            shard.asked = self._send_masses(shard), now

    def _answer_now(self, request: Request) -> bool:
        """Look for the answer to a request once."""
        try:
            reply = request.call.result(0.0)
        except NotYetError:
            return self._is_lost(request.shard, request.at)
        except CallLostError:
            arguments = request.arguments
            request.call = request.shard.calls.send("exchange", *arguments)
            return self._is_lost(request.shard, request.at)
        self._note(request.shard, reply["masses"])
        self._stats.dropped += reply["dropped"]
        return True

    def close(self) -> None:
        """Send the priorities that wait, and close the rings of this node."""
        if self._limit is not None:
            self._limit.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
        for shard in list(self._shards.values()):
            request = shard.flushing
            if request is None and shard.updates and not shard.lost:
                request = self._send(shard, 0, 0, {})
            if request is not None:
                try:
                    self._answer(request, None)
                except ReplayError as error:
                    warnings.warn(
                        f"run {self._run.run!r}: the last priorities were not stored: "
                        f"{error}",
                        LostWarning,
                        stacklevel=frames_to_caller(),
                    )
            shard.flushing = None
            if shard.draws is not None:
                shard.draws.close()
        for ring in self._rings:
            if ring.buffer is not None:
                ring.buffer.close()


def _opened(info: RingInfo, transforms: Sequence[Transform]) -> ReplayBuffer | None:
    """Open a ring of this node, where its folder can be seen from here."""
    try:
        buffer = ReplayBuffer.open(info["path"], transforms=transforms)
    except FormatError:
        # Another container of this node has it under another path.
        return None
    if buffer.metadata.uuid.hex() == info["uuid"]:
        return buffer
    buffer.close()
    return None


def _seed_of(sampler: Sampler) -> int | None:
    """The seed of a sampler, or of the one inside it."""
    inner = sampler.parts[0] if sampler.parts else sampler
    for generator in inner.generators():
        return generator.seed
    return None


def _draw_of(drawn: RingDraw, own: slice, key: int) -> Draw:
    windows = None
    if drawn["windows"] is not None and drawn["mask"] is not None:
        firsts = drawn["is_first"]
        windows = Windows(
            drawn["windows"][own], drawn["mask"][own],
            None if firsts is None else firsts[own], tuple(drawn["first_only"]),
        )  # fmt: skip
    positions = drawn["positions"][own]
    return Draw(
        drawn["env_ids"][own], positions, drawn["probabilities"][own],
        np.ones(len(positions), np.float32), key, windows,
    )  # fmt: skip


def _is_writeable(batch: Batch) -> bool:
    """Whether no array is of Ray's memory, which is read-only and has to be left."""
    arrays = [batch.env_ids, batch.positions, *batch.fields.values()]
    return all(
        array.values.flags.writeable and array.offsets.flags.writeable
        if isinstance(array, Ragged)
        else array.flags.writeable
        for array in arrays
    )


def _arrived(drawn: RingDraw, own: slice, key: int) -> Batch:
    """The rows of a ring on another node; arrays may be views of Ray's memory."""
    positions, windows, mask = drawn["positions"][own], drawn["windows"], drawn["mask"]
    return Batch(
        {path: array[own] for path, array in drawn["fields"].items()},
        drawn["env_ids"][own],
        positions,
        drawn["probabilities"][own],
        np.ones(len(positions), np.float32),
        None if mask is None else mask[own],
        frozenset(drawn["bfloat16"]),
        key,
        None if windows is None else windows[own],
    )
