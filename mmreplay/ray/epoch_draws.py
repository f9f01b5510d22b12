"""Draws of shuffled epochs over the rings of a run, as one learner goes through them.

`EpochPlan` says which starts each batch has. All rings freeze an epoch when it begins,
which the registry sees to. An epoch leaves no ring out: shards that are away are waited
for, and a ring that has forgotten the epoch is reminded of it.
"""

from __future__ import annotations

import threading
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any
from uuid import uuid4

import numpy as np

from mmreplay.batch import Batch
from mmreplay.errors import FormatError, StaleError, frames_to_caller, shown
from mmreplay.format.ray_files import MAX_NAME_LENGTH, FrozenEpoch
from mmreplay.ray.client_stats import LostWarning
from mmreplay.ray.draws import Reply
from mmreplay.ray.epochs import EpochPlan, EpochShare, FrozenRun
from mmreplay.ray.joined_batches import BatchJoiner
from mmreplay.ray.requests import PlannedBatch, PlannedCall, Request, Requests, RingRows
from mmreplay.ray.ring_table import REPEAT_S, WAIT_S, RingTable
from mmreplay.ray.shard_calls import CallLostError, NotYetError
from mmreplay.samplers.base import State
from mmreplay.samplers.random import StepGenerator

MAX_RESTORES = 3
"""Times that a ring is reminded of an epoch: another learner's may come in between."""


class EpochDraws:
    """Draws each legal start of all rings once an epoch.

    Threads: the table's lock is held in `plan` and `load_state_dict`, and in no wait.
    """

    def __init__(
        self,
        epochs: EpochPlan,
        table: RingTable,
        requests: Requests,
        joiner: BatchJoiner,
        group: str | None = None,
    ) -> None:
        """Begin before the first epoch.

        Args:
            epochs: The learner's way through them.
            table: The rings that are known.
            requests: To their shards.
            joiner: Of their batches.
            group: Name of the learners that share epochs; None for those of one seed.
        """
        self._epochs, self._table = epochs, table
        self._requests, self._joiner = requests, joiner
        self._group = group
        self._start_of_name = f"{table.client['name']} {epochs.seed}"
        if group is not None:
            self._start_of_name += f" {group}"
        self._name = ""
        # A call that is repeated must not look like another learner's.
        self._token = uuid4().hex
        self._beginning = threading.RLock()

    @property
    def skipped(self) -> int:
        """Starts of the newest epoch that were overwritten before they were drawn."""
        return self._epochs.skipped

    def prepare(self, count: int) -> None:
        """Wait until the next batch can be planned: its epoch begun, its rings known.

        Raises:
            EmptyError: There are fewer legal starts than learners.
            FailedError: The client is closed.
            StaleError: A ring of the epoch no longer exists.
        """
        epochs = self._epochs
        with self._beginning:
            self._begin()
            frozen = epochs.frozen(epochs.epoch)
            if frozen is not None and epochs.done < epochs.size(count):
                self._wait_for_rings(frozen.rings)

    def plan(self, count: int) -> PlannedBatch | None:
        """Plan the next batch of the epoch, and ask for it; None at its end."""
        epochs, table = self._epochs, self._table
        share = epochs.next(count)
        if share is None:
            epochs.next_epoch()
            return None
        frozen = epochs.frozen(share.epoch)
        assert frozen is not None
        rings = tuple(table.rings)
        numbers = {ring.uuid: ring.number for ring in rings}
        totals = np.zeros(len(rings))
        shares = [np.empty(0)] * len(rings)
        for uuid, total in zip(frozen.rings, frozen.totals.tolist(), strict=True):
            totals[numbers[uuid]] = total
            shares[numbers[uuid]] = share.shares.get(uuid, np.empty(0))
        number = (share.epoch << 32) + share.first * epochs.num_ranks + epochs.rank
        call = PlannedCall(
            (0,),
            (StepGenerator(epochs.seed).key(number),),
            share.stop - share.first,
            totals / totals.sum(),
            shares,
            [[len(own)] for own in shares],
            share,
        )
        self._requests.ask_for(call)
        return PlannedBatch(call, 0)

    def _wait_for_rings(self, uuids: Collection[str]) -> None:
        """Find the rings of an epoch, however long their nodes are away.

        Raises:
            FailedError: The client is closed.
            StaleError: All nodes have answered, and a ring is on none of them.
        """
        table, warned = self._table, False
        while True:
            missing = sorted(set(uuids) - {ring.uuid for ring in table.rings})
            if not missing:
                return
            away = sorted(key for key, each in table.shards.items() if each.lost)
            if away:
                table.refuse_closing()
                warned = warned or self._warn_of(away)
                time.sleep(REPEAT_S)
                table.ask_lost()
            table.find_rings()
            if not away and not any(each.lost for each in table.shards.values()):
                known = {ring.uuid for ring in table.rings}
                self._refuse_missing([each for each in missing if each not in known])

    def _refuse_missing(self, uuids: Collection[str]) -> None:
        """Refuse an epoch whose rings no longer exist.

        Raises:
            StaleError: There are such rings.
        """
        if uuids:
            epochs, run = self._epochs, self._table.run.run
            raise StaleError(
                f"run {run!r}: rings {sorted(uuids)} of epoch {epochs.epoch} are "
                "nowhere any more: their folders were deleted, or made again. Make "
                "the clients again without their states, to begin an epoch over the "
                "rings there are."
            )

    def _warn_of(self, away: Collection[str]) -> bool:
        """Say that an epoch waits, while it does; return True."""
        warnings.warn(
            f"run {self._table.run.run!r}: epoch {self._epochs.epoch} waits for nodes "
            f"{sorted(away)}, which do not answer. It goes on when they do; close() "
            "ends the wait.",
            LostWarning,
            stacklevel=frames_to_caller(),
        )
        return True

    def _begin(self) -> None:
        """Have all rings freeze the next epoch, unless it has begun."""
        epochs, run = self._epochs, self._table.run
        if epochs.frozen(epochs.epoch) is not None:
            return
        if not self._name:
            start = f"{zlib.crc32(self._start_of_name.encode()):08x}"
            if epochs.num_ranks > 1:
                start = f"{start}.{epochs.num_ranks}"
                lasts = self._group is not None
                own = start, epochs.rank, self._token, lasts
                self._name = self._answered(lambda: run.epoch_name(*own))["name"]
            else:
                self._name = f"{start}/{uuid4().hex}"
        name, client = self._name, self._table.client
        answer = self._answered(lambda: run.epoch(client, name, epochs.epoch))
        self._refuse_missing([u for u, each in answer["rings"].items() if each is None])
        frozen = {
            uuid: FrozenEpoch.from_json(each, f"epoch of ring {uuid}")
            for uuid, each in answer["rings"].items()
        }
        epochs.begin(FrozenRun.of(frozen))

    def _answered(self, ask: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Ask the registry until no node is away.

        Raises:
            FailedError: The client is closed.
        """
        warned = False
        while True:
            answer = ask()
            if not answer["away"]:
                return answer
            self._table.refuse_closing()
            warned = warned or self._warn_of(answer["away"])
            time.sleep(WAIT_S)

    # From the replies to a batch.

    def gather(self, planned: PlannedBatch) -> Batch | None:
        """Collect a batch; None where all of its steps were overwritten.

        Raises:
            StarvedError: A writer overwrote rows again and again.
            FailedError: The client is closed.
        """
        share = planned.call.epoch_share
        assert share is not None
        answer = partial(self._answer, share)
        rows: dict[int, list[RingRows]] = {}
        with self._joiner.share([*accumulate(planned.num_points)]) as shared:
            for request, slices in planned.requests:
                answer(request)
                for name, own in slices.items():
                    ring = request.shard.rings[name]
                    shared.begin(ring.number)
                    found = self._requests.rows(ring, request, own, planned, answer)
                    if found is not None and len(found):
                        rows.setdefault(ring.number, []).append(found)
        joined = None
        if rows:
            fractions = planned.call.fractions
            joined = self._joiner.join(planned, rows, fractions, shared=shared)
        with self._table.lock:
            self._epochs.gathered(share, 0 if joined is None else len(joined))
        return joined

    def _answer(self, share: EpochShare, request: Request) -> Reply:
        """Wait for a reply, however long a shard is away.

        Raises:
            FailedError: The client is closed.
            StaleError: The ring was replaced by another one.
            StarvedError: The shard was being restarted for too long.
        """
        shard, table, began = request.shard, self._table, request.at
        num_restores, warned = 0, False
        while True:
            try:
                reply = self._requests.answer(request)
            except StaleError as error:
                # The ring has forgotten the epoch, or its folder was replaced.
                frozen = self._epochs.frozen(share.epoch)
                if frozen is None:
                    raise
                if num_restores == MAX_RESTORES:
                    names = [f"{shard.remote.key}/{n}" for n in request.shares]
                    raise StaleError(
                        f"ring {', '.join(names)} does not know epoch {share.epoch}, "
                        "and was reminded of it: its folder was deleted and made "
                        "again. Make the client again without its state, to begin an "
                        "epoch over the rings there are."
                    ) from error
                rings = {u: each.to_json() for u, each in frozen.rings.items()}
                restored = shard.remote.send("restore", table.client, rings)
                with suppress(NotYetError, CallLostError):
                    restored.result(table.lost_s)
                    num_restores += 1
                time.sleep(REPEAT_S)
            else:
                if reply is not None:
                    return reply
            while shard.lost:
                # The thread that looks after the shards hears when it is back.
                table.refuse_closing()
                table.refuse_overdue_since(shard, began)
                warned = warned or self._warn_of([shard.remote.key])
                time.sleep(REPEAT_S)
            table.refuse_closing()
            request.at = time.monotonic()
            self._requests.send_again(request)

    # What a loader asks for.

    def more(self, count: int) -> bool:
        """Whether the epoch has another batch."""
        epochs = self._epochs
        if epochs.frozen(epochs.epoch) is None:
            return True
        return epochs.done < epochs.size(count)

    def num_batches(self, count: int) -> int:
        """Batches of the whole epoch, which begins here where it has not."""
        with self._beginning:
            self._begin()
            return -(-self._epochs.size(count) // count)

    def state_dict(self) -> State:
        """Where the next batch is; O(environments) of all rings."""
        return {**self._epochs.state_dict(), "group": self._name}

    def load_state_dict(self, state: State) -> None:
        """Draw from a state on.

        Raises:
            FormatError: It is another sampler's, or not a state at all.
        """
        name = state.get("group", "")
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
            raise FormatError(
                f"state of a client: group must be a name of {MAX_NAME_LENGTH} "
                f"characters at most, got {shown(name)}. Pass what state_dict "
                "returned, unchanged."
            )
        self._epochs.load_state_dict(state)
        self._name, self._token = name, uuid4().hex
