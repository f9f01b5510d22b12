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
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import RemovedError, ReplayError, StaleError, StarvedError
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
TOGETHER_NBYTES = 1 << 20
"""Rows of the batches of one call are gathered at once where they are no larger."""
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
        reply: The answer, once it is here.
        lock: Held by who waits for it, and by who gathers for several batches.
        gathered: Rows for all of its batches, by ring of this node; None where some
            were overwritten, and each batch gathers its own.
    """

    shard: KnownShard
    arguments: tuple[Any, ...]
    call: Call
    at: float
    reply: Reply | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    gathered: dict[str, RingRows | None] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, Numbers]:
        """By ring what it draws; nothing where it only brings priorities."""
        wanted: Wanted = self.arguments[2]
        return wanted["shares"]


RequestSlices = tuple[Request, dict[str, slice]]
"""A request, and which of each ring's draws in its reply are for one batch. Of an epoch
there are fewer draws where starts were overwritten."""


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch that was planned and asked for.

    Attributes:
        step: Of the client.
        count: Steps.
        key: See `Draw.key`.
        fractions: float64 ``[R]``, each ring's share in the plan.
        shares: float64 ``[k]`` of each ring.
        requests: To shards that have a share.
        epoch_share: Of an epoch, where the sampler draws epochs.
    """

    step: int
    count: int
    key: int
    fractions: Numbers
    shares: list[Numbers]
    requests: list[RequestSlices] = field(default_factory=list)
    epoch_share: EpochShare | None = None


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
        fields: By path arrays of rows that follow each other. Those that travelled are
            Ray's memory, which is read-only and has to be left.
        bfloat16: Paths whose arrays hold the bits of bfloat16 numbers.
    """

    number: int
    env_ids: Array
    positions: Array
    probabilities: Array
    mask: Array | None
    windows: Array | None
    fields: dict[str, list[Array]]
    bfloat16: frozenset[str]

    def __len__(self) -> int:
        """Rows."""
        return len(self.positions)

    def of_batch(self, own: slice) -> RingRows:
        """Some of the rows, of one array a field each."""
        return RingRows(
            self.number,
            self.env_ids[own],
            self.positions[own],
            self.probabilities[own],
            None if self.mask is None else self.mask[own],
            None if self.windows is None else self.windows[own],
            {path: [array[own]] for path, (array,) in self.fields.items()},
            self.bfloat16,
        )


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

    def ask_for(self, batches: Sequence[PlannedBatch]) -> None:
        """Ask every shard for its part of some batches."""
        # Those of this process first: their rows are copied while others travel.
        for shard in sorted(
            self._table.shards.values(), key=lambda shard: shard.draws is None
        ):
            self._ask_shard(shard, batches)

    def ask_for_shares(
        self, planned: PlannedBatch, shares: Sequence[Numbers]
    ) -> list[RequestSlices]:
        """Ask for other shares of rings for a batch, outside the order of plans."""
        redrawn = replace(planned, shares=list(shares), requests=[])
        self.ask_for([redrawn])
        return redrawn.requests

    def _ask_shard(self, shard: KnownShard, batches: Sequence[PlannedBatch]) -> None:
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
        request = self.send(shard, newest.step, oldest.key, shares, newest.epoch_share)
        for batch, mine in zip(batches, slices, strict=True):
            if mine:
                batch.requests.append((request, mine))

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
        self.settle(shard)
        with self._table.lock:
            updates: dict[str, list[Update]] = {}
            if shard.updating is None:
                noted, shard.updates = shard.updates, updates
                updates = {name: merged(own) for name, own in noted.items()}
            return self._sent(shard, updates, wanted)

    def _sent(
        self, shard: KnownShard, updates: dict[str, list[Update]], wanted: Wanted
    ) -> Request:
        shard.sent_at = now = time.monotonic()
        arguments = (self._table.client, updates, wanted, self._table.highest)
        try:
            call = shard.calls.send("exchange", *arguments)
        except ReplayError:
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
        except ReplayError:
            self._put_back(request.shard, self._updates_of(request))
            raise

    def _repeat(self, request: Request) -> None:
        """Repeat a request whose call was lost, where that is of use.

        Raises:
            FailedError: The client is closed, and it draws.
            StarvedError: The shard ended in it again and again.
        """
        self._stats.repeated += 1
        if request.shares and self._table.closing:
            self._put_back(request.shard, self._updates_of(request))
            self._table.refuse_closing()
        if time.monotonic() - request.at > MAX_REPEAT_S:
            self._stats.dropped += number_of(self._updates_of(request))
            num_steps = sum(len(own) for own in request.shares.values())
            raise StarvedError(
                f"run {self._table.run.run!r}: the shard {request.shard.remote.key!r} "
                f"ended each time that it was asked for {num_steps} steps, for "
                f"{MAX_REPEAT_S:g} s, as where its memory is short. Lower batch_size "
                "or per_call, or see the log of its node."
            )
        self.send_again(request)

    # Priorities under way.

    def settle(self, shard: KnownShard) -> None:
        """Look whether the priorities under way to a shard arrived; do not wait."""
        request = shard.updating
        if request is not None:
            # Where it draws as well, the call that waits for its rows gets the error.
            with suppress(ReplayError):
                self.answered(request)

    def _updates_of(self, request: Request) -> dict[str, list[Update]]:
        """Take its priorities out of a request that has no answer."""
        with self._table.lock:
            client, updates, wanted, highest = request.arguments
            request.arguments = client, {}, wanted, highest
            if request.shard.updating is request:
                request.shard.updating = None
        return dict(updates)

    def _put_back(self, shard: KnownShard, updates: dict[str, list[Update]]) -> None:
        """Have priorities sent again, before those that were noted since."""
        with self._table.lock:
            for name, own in updates.items():
                shard.updates[name] = own + shard.updates.get(name, [])

    # Replies.

    def answer(
        self, request: Request, straggler_s: float | None = None
    ) -> Reply | None:
        """Wait for a reply; None where the shard is lost, or late.

        A shard that is restarted gets the same request again.

        Raises:
            FailedError: The client is closed.
            StarvedError: The shard ended in it again and again.
        """
        with request.lock:
            while request.reply is None:
                wait_s = WAIT_S
                if straggler_s is not None:
                    wait_s = request.at + straggler_s - time.monotonic()
                if self._look(request, min(max(0.0, wait_s), WAIT_S)):
                    break
                if straggler_s is not None and wait_s <= WAIT_S:
                    return None
                if self._is_lost(request):
                    return None
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
        except ReplayError:
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
        self._put_back(request.shard, self._updates_of(request))
        return True

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
                return _arrived(ring.number, drawn, own, wanted)
            try:
                if ring.buffer is not None:
                    return self._gather(ring.buffer, ring, request, drawn, own, planned)
            except StaleError:
                self._stats.overwritten += 1
            except RemovedError:
                # Its shard reads what is there by now, if anything.
                ring.buffer = None
            # Overwritten since the draw: the ring's whole share is drawn again, by the
            # same shares, with the probabilities of then. An epoch has the same starts,
            # without those that are gone.
            again = {ring.name: shares}
            request = self.send(
                ring.shard, planned.step, planned.key, again, planned.epoch_share
            )
            reply, own = answer(request), slice(None)
        raise StarvedError(
            f"gave up after {MAX_REDRAWS} attempts: the writer of ring {ring.name} "
            "overwrote drawn steps before they were read. Increase its capacity, or "
            "lower batch_size or prefetch."
        )

    def _gather(
        self,
        buffer: ReplayBuffer,
        ring: KnownRing,
        request: Request,
        drawn: RingDraw,
        own: slice,
        planned: PlannedBatch,
    ) -> RingRows:
        """Gather rows of a ring of this node.

        Small rows are gathered for all batches of a call at once, which takes little
        longer than for one. Rings that are drawn without a call have no such batches,
        and may have transforms that are random by batch.

        Raises:
            StaleError: Some were overwritten.
        """
        count, name = len(drawn["positions"]), ring.name
        nbytes = count * self._table.schema.row_nbytes
        if drawn["windows"] is not None:
            nbytes *= drawn["windows"].shape[1]
        asks_for_one = own == slice(0, count) or own == slice(None)
        if not asks_for_one and ring.shard.draws is None and nbytes <= TOGETHER_NBYTES:
            with request.lock:
                if name not in request.gathered:
                    request.gathered[name] = None
                    with suppress(StaleError):
                        draw = draw_of(drawn, slice(None), planned.key)
                        rows = _gathered(ring.number, buffer.gather(draw))
                        request.gathered[name] = rows
                together = request.gathered[name]
            if together is not None:
                return together.of_batch(own)
        draw = draw_of(drawn, own, planned.key)
        return _gathered(ring.number, buffer.gather(draw))


def merged(updates: list[Update]) -> list[Update]:
    """The same priorities in one update, where that is possible; the last ones win."""
    if len(updates) < 2 or any(each["values"].ndim > 1 for each in updates):
        return updates

    def column(name: Literal["env_ids", "positions", "values"]) -> Array:
        return np.concatenate([each[name] for each in updates])

    return [
        {
            "env_ids": column("env_ids"),
            "positions": column("positions"),
            "values": column("values"),
            "mask": None,
        }
    ]


def number_of(updates: Mapping[str, Sequence[Update]]) -> int:
    """How many steps, or windows, priorities are for."""
    return sum(len(each["positions"]) for own in updates.values() for each in own)


def draw_of(drawn: RingDraw, own: slice, key: int) -> Draw:
    """The draw of a reply, or some of its steps."""
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


def _gathered(number: int, batch: Batch) -> RingRows:
    """The rows of a ring of this node."""
    fields = {path: [array] for path, array in batch.fields.items()}
    return RingRows(
        number, batch.env_ids, batch.positions, batch.probabilities, batch.mask,
        batch.window_positions, fields, batch.bfloat16,
    )  # fmt: skip


def _arrived(number: int, drawn: RingDraw, own: slice, wanted: Wanted) -> RingRows:
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
