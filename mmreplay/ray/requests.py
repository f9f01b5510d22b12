"""What a client asks shards for, batch by batch, and the rows of their replies.

A request is for the part of one shard in one batch, or in several. It brings the
priorities that wait for the shard, and goes out again where the shard was restarted. A
reply has the rows of a ring on another node; those of this node are gathered here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError, RemovedError, StaleError, StarvedError
from mmreplay.ray.client_stats import ClientStats
from mmreplay.ray.draws import Reply, RingDraw, Update, Wanted
from mmreplay.ray.epochs import EpochShare
from mmreplay.ray.reply_blocks import BlockSizes, has_rows, rows_of
from mmreplay.ray.ring_table import REPEAT_S, WAIT_S, KnownRing, KnownShard, RingTable
from mmreplay.ray.shard_calls import Call, CallLostError, NotYetError
from mmreplay.samplers.base import Draw, Windows
from mmreplay.samplers.joint import Numbers

Array = NDArray[Any]
MAX_REPEAT_S = 60.0
"""A request that ends its shard again and again is not repeated for longer."""
SOONEST_S = 1e-3
"""A call has no answer sooner, and to look for one takes as long as to join a batch."""
MAX_REDRAWS = 100
"""Tries to read a ring's rows before a writer overwrites them, as of a buffer."""


@dataclass(slots=True, eq=False)
class Request:
    """A request to a shard, for its part of one or more batches.

    Attributes:
        shard: The shard.
        arguments: Of ``exchange``; the same again where it is repeated. The priorities
            are taken out where they are not stored.
        call: The call under way.
        at: When it was sent first.
        ended_at: When its shard was first found to have ended before it answered.
        reply: The answer, once it is here.
        stops: By ring where the draws for each batch end.
        lock: Held by who waits for it, whose thread may enter again: a signal's handler
            that closes the client waits for its priorities.
    """

    shard: KnownShard
    arguments: tuple[Any, ...]
    call: Call
    at: float
    ended_at: float = 0.0
    reply: Reply | None = None
    stops: dict[str, list[int]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def shares(self) -> dict[str, Numbers]:
        """By ring what it draws; nothing where it only brings priorities."""
        wanted: Wanted = self.arguments[2]
        return wanted["shares"]

    def slices(self, number: int) -> dict[str, slice]:
        """By ring which of its draws are for one of the batches."""
        found = {}
        for name, stops in self.stops.items():
            first = stops[number - 1] if number else 0
            if first < stops[number]:
                found[name] = slice(first, stops[number])
        return found


RequestSlices = tuple[Request, dict[str, slice]]
"""A request, and which of each ring's draws in its reply are for one batch. Of an epoch
there are fewer draws where starts were overwritten."""


@dataclass(slots=True, eq=False)
class PlannedCall:
    """Batches that are planned and asked for together.

    Attributes:
        steps: Of the client, of each batch.
        keys: Of each batch; see `Draw.key`.
        count: Steps of each batch.
        fractions: float64 ``[R]``, each ring's share in the plan.
        shares: float64 ``[k]`` of each ring, batch by batch.
        stops: Of each ring where the shares of each batch end.
        epoch_share: Of an epoch, where the sampler draws epochs.
        requests: To shards that have a share; none once the batches were joined.
        joined: All batches, once they were joined at once.
        tried: They were, or cannot be.
        lock: Held by who joins them.
    """

    steps: Sequence[int]
    keys: Sequence[int]
    count: int
    fractions: Numbers
    shares: list[Numbers]
    stops: list[list[int]]
    epoch_share: EpochShare | None = None
    requests: list[Request] = field(default_factory=list)
    joined: Batch | None = None
    tried: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def batches(self) -> list[PlannedBatch]:
        """Each of them."""
        return [PlannedBatch(self, number) for number in range(len(self.steps))]


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch that was planned and asked for.

    Attributes:
        call: That asked for it.
        number: Which batch of the call it is.
    """

    call: PlannedCall
    number: int

    @property
    def step(self) -> int:
        """Of the client."""
        return self.call.steps[self.number]

    @property
    def key(self) -> int:
        """See `Draw.key`."""
        return self.call.keys[self.number]

    @property
    def count(self) -> int:
        """Steps."""
        return self.call.count

    @property
    def num_points(self) -> list[int]:
        """How many points of it fall to each ring."""
        number = self.number
        return [stops[number] - (stops[number - 1] if number else 0) for stops in self.call.stops]

    @property
    def requests(self) -> list[RequestSlices]:
        """The requests for it, and which of their draws are its own."""
        found = [(each, each.slices(self.number)) for each in self.call.requests]
        return [(request, slices) for request, slices in found if slices]


@dataclass(slots=True, eq=False)
class RingRows:
    """The rows of one ring for a batch.

    Attributes:
        number: The ring's.
        env_ids: int64 ``[k]``.
        positions: int64 ``[k]``.
        probabilities: float64 ``[k]``, of each step within the ring.
        mask: bool ``[k, T]`` of windows, or None.
        windows: int64 ``[k, T]``, their positions, or None.
        blocks: Fields by path, in blocks of rows that follow each other. Those that
            travelled are Ray's memory, which is read-only and has to be left.
        bfloat16: Paths whose arrays hold the bits of bfloat16 numbers.
    """

    number: int
    env_ids: Array
    positions: Array
    probabilities: Array
    mask: Array | None
    windows: Array | None
    blocks: Sequence[Mapping[str, Any]]
    bfloat16: frozenset[str]

    def __len__(self) -> int:
        """Rows."""
        return len(self.positions)

    def batches(self, fraction: float) -> list[Batch]:
        """The rows of each block as a batch without weights.

        Args:
            fraction: How much of all draws was the ring's.
        """
        columns: dict[str, Any] = {
            "env_ids": self.env_ids,
            "positions": self.positions,
            "probabilities": self.probabilities * fraction,
            "mask": self.mask,
            "window_positions": self.windows,
            "buffer_ids": np.full(len(self), self.number),
        }
        found, first = [], 0
        for block in self.blocks:
            own = columns
            if len(self.blocks) > 1:
                stop = first + len(next(iter(block.values())))
                own = {name: a if a is None else a[first:stop] for name, a in columns.items()}
                first = stop
            found.append(Batch(dict(block), weights=None, bfloat16=self.bfloat16, **own))
        return found


AwaitReply = Callable[[Request], Reply | None]
"""Waits for the reply to a request; None where there will be none in time."""


class Requests:
    """Sends the requests of one client, and waits for replies.

    Priorities are under way to a shard in one request at a time: two could arrive in
    the other order, and the older ones win. Those of a request that has no answer are
    sent again, or counted as dropped.

    Threads: any may call.
    """

    def __init__(self, table: RingTable, stats: ClientStats) -> None:
        """Ask the shards of a table.

        Args:
            table: The rings that are known.
            stats: What is met is counted there.
        """
        self._table, self._stats = table, stats
        self._block_sizes = BlockSizes()

    def ask_for(self, call: PlannedCall) -> None:
        """Ask every shard for its part of the batches of a call."""
        # Those of this process first: their rows are copied while others travel.
        for shard in sorted(self._table.shards.values(), key=lambda shard: shard.draws is None):
            shares: dict[str, Numbers] = {}
            stops: dict[str, list[int]] = {}
            for name, ring in list(shard.rings.items()):
                # A ring that is newer than the plan has none.
                if ring.number < len(call.shares) and len(call.shares[ring.number]):
                    shares[name] = call.shares[ring.number]
                    stops[name] = call.stops[ring.number]
            if shares:
                step, key = call.steps[-1], call.keys[0]
                request = self.send(shard, step, key, shares, call.epoch_share)
                request.stops = stops
                call.requests.append(request)

    def ask_for_shares(
        self, planned: PlannedBatch, shares: Sequence[Numbers]
    ) -> list[RequestSlices]:
        """Ask for other shares of rings for a batch, outside the order of plans."""
        redrawn = PlannedCall(
            (planned.step,),
            (planned.key,),
            planned.count,
            planned.call.fractions,
            list(shares),
            [[len(own)] for own in shares],
            planned.call.epoch_share,
        )
        self.ask_for(redrawn)
        return PlannedBatch(redrawn, 0).requests

    def send(
        self,
        shard: KnownShard,
        step: int,
        key: int,
        shares: dict[str, Numbers],
        epoch_share: EpochShare | None = None,
    ) -> Request:
        """Send shares to a shard, and the priorities that wait for it.

        Raises:
            FailedError: The run was stopped, or this process left the cluster.
        """
        rows = [name for name in shares if shard.rings[name].buffer is None]
        wanted: Wanted = {"step": step, "key": key, "shares": shares, "rows": rows}
        if epoch_share is not None:
            wanted["epoch"] = epoch_share.name, epoch_share.epoch
        block_rows = self._block_sizes.rows(sum(len(shares[name]) for name in rows))
        if block_rows:
            wanted["block_rows"] = block_rows
        if not shard.updates:
            return self._sent(shard, {}, wanted)
        under_way = shard.updating
        if under_way is not None and time.monotonic() - under_way.at > SOONEST_S:
            self.settle(shard)
        with self._table.lock:
            updates: dict[str, list[Update]] = {}
            if shard.updating is None:
                updates, shard.updates = shard.updates, updates
            return self._sent(shard, updates, wanted)

    def _sent(self, shard: KnownShard, updates: dict[str, list[Update]], wanted: Wanted) -> Request:
        shard.sent_at = now = time.monotonic()
        arguments = (self._table.client, updates, wanted, self._table.highest)
        try:
            call = shard.calls.send("exchange", *arguments)
        except Exception:
            self._put_back(shard, updates)
            raise
        request = Request(shard, arguments, call, now)
        if updates:
            shard.updating = request
        return request

    def send_again(self, request: Request) -> None:
        """Repeat a request whose call was lost.

        Raises:
            FailedError: The run was stopped, or this process left the cluster.
        """
        try:
            request.call = request.shard.calls.send("exchange", *request.arguments)
        except Exception:
            self._return_updates_of(request)
            raise

    def _repeat(self, request: Request) -> None:
        """Repeat a request whose call was lost, where that is of use.

        Raises:
            FailedError: The client is closed, and it draws.
            StarvedError: The shard ended in it again and again.
        """
        self._stats.repeated += 1
        if request.shares:
            self._refuse_closing(request)
        shard, now = request.shard, time.monotonic()
        request.ended_at = since = request.ended_at or now
        if shard.heard_at <= request.at:
            # It may be one restart that takes long: see `RingTable.is_lost`.
            self._table.note_restarts(now - request.at)
            since = max(since, shard.restarted_at)
        if now - since > MAX_REPEAT_S:
            self._stats.dropped += number_of(self._updates_of(request))
            num_steps = sum(len(own) for own in request.shares.values())
            raise StarvedError(
                f"run {self._table.run.run!r}: the shard {shard.remote.key!r} "
                f"ended each time that it was asked for {num_steps} steps, for "
                f"{MAX_REPEAT_S:g} s, as where its memory is short. Lower batch_size "
                "or per_call, or see the log of its node."
            )
        self.send_again(request)

    def _refuse_closing(self, request: Request) -> None:
        """End the wait for a draw; priorities are sent again by who closes.

        Raises:
            FailedError: The client is closed, and it draws.
        """
        if self._table.closing:
            self._return_updates_of(request)
            self._table.refuse_closing()

    # Priorities under way.

    def draw_no_more(self, request: Request) -> None:
        """Wait only for the priorities of a request, and ask for no more draws."""
        with self._table.lock:
            client, updates, wanted, highest = request.arguments
            request.arguments = client, updates, {**wanted, "shares": {}}, highest

    def settle(self, shard: KnownShard) -> None:
        """Look whether the priorities under way to a shard arrived; do not wait."""
        request = shard.updating
        if request is not None:
            # Where it draws as well, the call that waits for its rows gets the error,
            # whatever it is: Ray returns the same one each time that it is asked.
            with suppress(Exception):
                self.answered(request)

    def _updates_of(self, request: Request) -> dict[str, list[Update]]:
        """Take its priorities out of a request that has no answer."""
        with self._table.lock:
            client, updates, wanted, highest = request.arguments
            request.arguments = client, {}, wanted, highest
            if request.shard.updating is request:
                request.shard.updating = None
        return dict(updates)

    def _return_updates_of(self, request: Request) -> None:
        """Have the priorities of a request that has no answer sent again."""
        # In one step: newer ones that were sent in between would be set first, and the
        # older ones win.
        with self._table.lock:
            self._put_back(request.shard, self._updates_of(request))

    def _put_back(self, shard: KnownShard, updates: dict[str, list[Update]]) -> None:
        """Have priorities sent again, before those that were noted since."""
        with self._table.lock:
            for name, own in updates.items():
                shard.updates[name] = own + shard.updates.get(name, [])

    # Replies.

    def answer(self, request: Request, straggler_s: float | None = None) -> Reply | None:
        """Wait for a reply; None where the shard is lost, or late.

        A shard that is restarted gets the same request again.

        Raises:
            FailedError: The client is closed.
            StarvedError: The shard ended in it again and again.
        """
        draws = bool(request.shares)
        with request.lock:
            while request.reply is None:
                wait_s = WAIT_S
                if straggler_s is not None:
                    wait_s = request.at + straggler_s - time.monotonic()
                if self._look(request, min(max(0.0, wait_s), WAIT_S)):
                    break
                if draws:
                    self._refuse_closing(request)
                if straggler_s is not None and wait_s <= WAIT_S:
                    return None
                if self._is_lost(request):
                    return None
            if draws and not request.shares:
                # A signal's handler closed the client during the wait: the reply may
                # have no draws.
                self._refuse_closing(request)
            return request.reply

    def answered(self, request: Request) -> bool:
        """Look for a reply once; True where there is one, or the shard is lost."""
        if not request.lock.acquire(blocking=False):
            # A batch waits for it.
            return False
        try:
            return self._look(request, 0.0) or self._is_lost(request)
        finally:
            request.lock.release()

    def _look(self, request: Request, timeout_s: float) -> bool:
        """Whether there is a reply in time; `Request.lock` is held."""
        if request.reply is not None:
            return True
        try:
            reply = request.call.result(timeout_s)
        except NotYetError:
            return False
        except CallLostError:
            time.sleep(min(timeout_s, REPEAT_S))
            self._repeat(request)
            return False
        except Exception:
            # Of whatever class: others would wait for this request for good.
            self._stats.dropped += number_of(self._updates_of(request))
            raise
        request.reply = reply
        self._block_sizes.learn(reply)
        if request.shard.updating is request:
            request.shard.updating = None
        self._table.note(request.shard, reply["masses"])
        self._stats.dropped += reply["dropped"]
        return True

    def _is_lost(self, request: Request) -> bool:
        if not self._table.is_lost(request.shard, request.at):
            return False
        self._return_updates_of(request)
        if request.shares:
            self._table.refuse_overdue()
        return True

    def all_rows(self, request: Request, reply: Reply, name: str, key: int) -> RingRows | None:
        """The rows of one ring for all batches of a request, as they are now.

        Args:
            request: The request.
            reply: Its answer.
            name: Of the ring in its shard.
            key: Of the first batch.

        Returns:
            None where it has nothing to draw, or rows were overwritten.
        """
        ring, drawn = request.shard.rings[name], reply["draws"][name]
        if drawn is None:
            return None
        if has_rows(drawn):
            return arrived(ring.number, drawn, slice(None), request.arguments[2])
        if ring.buffer is None:
            return None
        try:
            draw = draw_of(drawn, slice(None), key)
            return gathered(ring.number, ring.buffer.gather(draw))
        except (StaleError, FailedError) as error:
            if is_gone(error, ring.buffer):
                return None
            raise

    def rows(
        self,
        ring: KnownRing,
        request: Request,
        own: slice,
        planned: PlannedBatch,
        answer: AwaitReply,
    ) -> RingRows | None:
        """The rows of one ring; None where it has nothing to draw.

        Args:
            ring: The ring.
            request: That was answered.
            own: Which of its draws are for the batch.
            planned: The batch.
            answer: Waits for the replies of other requests.

        Raises:
            StarvedError: A writer overwrote every row before it could be read.
        """
        shares = request.arguments[2]["shares"][ring.name][own]
        reply = request.reply
        for _ in range(MAX_REDRAWS):
            drawn = None if reply is None else reply["draws"][ring.name]
            if drawn is None:
                return None
            if has_rows(drawn):
                wanted: Wanted = request.arguments[2]
                return arrived(ring.number, drawn, own, wanted)
            buffer = ring.buffer
            try:
                if buffer is not None:
                    draw = draw_of(drawn, own, planned.key)
                    return gathered(ring.number, buffer.gather(draw))
            except StaleError:
                self._stats.overwritten += 1
            except FailedError as error:
                if not is_gone(error, buffer):
                    raise
                # Its shard reads what is there by now, if anything.
                if ring.buffer is buffer:
                    ring.buffer = None
            # Overwritten since the draw: the ring's whole share is drawn again, by the
            # same shares, with the probabilities of then. An epoch has the same starts,
            # without those that are gone.
            again = {ring.name: shares}
            request = self.send(
                ring.shard, planned.step, planned.key, again, planned.call.epoch_share
            )
            reply, own = answer(request), slice(None)
        raise StarvedError(
            f"gave up after {MAX_REDRAWS} attempts: the writer of ring {ring.name} "
            "overwrote drawn steps before they were read. Increase its capacity, or "
            "lower batch_size or prefetch."
        )


def is_gone(error: Exception, buffer: ReplayBuffer | None) -> bool:
    """Whether rows were overwritten, or their ring deleted, and maybe closed since."""
    gone = isinstance(error, StaleError | RemovedError)
    return gone or (buffer is not None and buffer.closed)


def number_of(updates: Mapping[str, Sequence[Update]]) -> int:
    """How many steps, or windows, priorities are for."""
    return sum(len(each["positions"]) for own in updates.values() for each in own)


def draw_of(drawn: RingDraw, own: slice, key: int) -> Draw:
    """The draw of a reply, or some of its steps."""
    windows = None
    if drawn["windows"] is not None and drawn["mask"] is not None:
        firsts = drawn["is_first"]
        windows = Windows(
            drawn["windows"][own],
            drawn["mask"][own],
            None if firsts is None else firsts[own],
            tuple(drawn["first_only"]),
        )
    probabilities = drawn["probabilities"][own]
    # Weights are of the whole batch: nothing looks at those of a ring.
    return Draw(
        drawn["env_ids"][own], drawn["positions"][own], probabilities, probabilities, key, windows
    )


def gathered(number: int, batch: Batch) -> RingRows:
    """The rows of a ring of this node."""
    return RingRows(
        number,
        batch.env_ids,
        batch.positions,
        batch.probabilities,
        batch.mask,
        batch.window_positions,
        [batch.fields],
        batch.bfloat16,
    )


def arrived(number: int, drawn: RingDraw, own: slice, wanted: Wanted) -> RingRows:
    """The rows of a ring of another node."""
    mask, windows = drawn["mask"], drawn["windows"]
    return RingRows(
        number,
        drawn["env_ids"][own],
        drawn["positions"][own],
        drawn["probabilities"][own],
        None if mask is None else mask[own],
        None if windows is None else windows[own],
        rows_of(drawn, own, wanted),
        frozenset(drawn["bfloat16"]),
    )
