"""Draws of batches by the masses of the rings.

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

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np

from mmreplay.batch import Batch
from mmreplay.errors import EmptyError, ReplayError, StarvedError
from mmreplay.ray.client_stats import ClientStats
from mmreplay.ray.joined_batches import BatchJoiner
from mmreplay.ray.requests import (
    MAX_REDRAWS,
    PlannedBatch,
    PlannedCall,
    Requests,
    RequestSlices,
    RingRows,
)
from mmreplay.ray.ring_table import RingTable
from mmreplay.samplers.base import Sampler, State
from mmreplay.samplers.joint import DrawPlan, Numbers
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import check_kind, same, stored_integer
from mmreplay.storage.gather import SharedArrays

TOGETHER_NBYTES = 1 << 20
"""Batches of one call are joined at once where they are no larger."""


class MassDraws:
    """Draws batch after batch, without an end.

    Threads: the table's lock is held in `plan` and `load_state_dict`.
    """

    def __init__(
        self,
        sampler: Sampler,
        table: RingTable,
        requests: Requests,
        joiner: BatchJoiner,
        stats: ClientStats,
        *,
        per_call: int,
        ahead: int,
        straggler_s: float | None,
        seed: int | None,
    ) -> None:
        """Begin at the first batch.

        Args:
            sampler: What rings are drawn by.
            table: The rings that are known.
            requests: To their shards.
            joiner: Of their batches.
            stats: What is met is counted there.
            per_call: Batches that one call asks for.
            ahead: Calls under way for a learner that gathers its batches itself.
            straggler_s: Seconds after which a batch goes without a late ring.
            seed: Of the draws.
        """
        self._sampler, self._table, self._stats = sampler, table, stats
        self._requests, self._joiner = requests, joiner
        self._per_call, self._straggler_s = per_call, straggler_s
        self._max_planned = (ahead - 1) * per_call
        self._random = StepGenerator(seed)
        self._step = 0
        self._planned: deque[PlannedBatch] = deque()

    # Plans.

    def prepare(self, count: int) -> None:
        """Wait where no ring answers, and some are of shards that are being restarted.

        Raises:
            StarvedError: None of them has answered in time.
        """
        self._table.await_restarts()

    def plan(self, count: int) -> PlannedBatch:
        """Plan the next batch, and ask for it; one call asks for several.

        Raises:
            EmptyError: There is no mass.
            StarvedError: No shard answers.
        """
        planned = self._planned
        if planned and planned[0].count != count:
            planned.clear()
        if not planned:
            self._ask(count)
        self._step += 1
        self._table.step = self._step
        return planned.popleft()

    def ask_ahead(self, count: int) -> None:
        """Ask for batches that a learner will want who gathers them itself."""
        if len(self._planned) <= self._max_planned:
            # What is wrong is raised where the batches are wanted.
            with self._table.lock, suppress(ReplayError):
                self._ask(count)

    def _ask(self, count: int) -> None:
        """Plan the batches of one call, after those that are planned.

        Raises:
            EmptyError: There is no mass.
            StarvedError: No shard answers.
        """
        planned, random = self._planned, self._random
        first = planned[-1].step + 1 if planned else self._step
        steps = range(first, first + self._per_call)
        points = self._points(random.shares_of(steps, count))
        plan = DrawPlan.of(self._totals(count), points)
        keys = [random.key(step) for step in steps]
        call = PlannedCall(steps, keys, count, plan.fractions, plan.shares, plan.stops)
        self._requests.ask_for(call)
        planned.extend(call.batches)

    def _totals(self, count: int) -> Numbers:
        """Masses of the rings as they are known; 0 of those that are lost.

        Raises:
            EmptyError: There is no mass.
            StarvedError: No shard answers.
        """
        table = self._table
        for is_new in (False, True):
            if is_new:
                table.ask_all()
            totals = np.array([0.0 if r.shard.lost else r.mass.total for r in table.rings])
            if totals.sum() > 0:
                return totals
        run = table.run.run
        if all(ring.shard.lost for ring in table.rings):
            raise StarvedError(
                f"run {run!r}: no node has answered for {table.lost_s:g} s, of "
                f"{sorted(table.shards)}. Check them with mmreplay ray status {run}, "
                "and draw again."
            )
        legal = sum(ring.mass.num_legal for ring in table.rings)
        number = len(table.rings)
        rings = "the ring" if number == 1 else f"the {number} rings"
        have = "has" if number == 1 else "have"
        raise EmptyError(
            f"cannot draw {count} steps: {rings} of run {run!r} "
            f"{have} {legal} legal starts, and all of them priority 0. Add steps, or "
            "update the priorities."
        )

    def _points(self, numbers: Numbers) -> Numbers:
        """Points on the line of all masses, from the numbers of batches.

        Args:
            numbers: Of a step, or of several; points that are drawn again have others
                than those of the plan.
        """
        return self._sampler.points(numbers)

    def num_answered(self) -> int:
        """Batches of a call that was answered, which no one has asked for yet."""
        planned = tuple(self._planned)
        for call in {batch.call for batch in planned}:
            for request in tuple(call.requests):
                # What fails is raised where the batches are wanted.
                with suppress(Exception):
                    self._requests.answered(request)
        return sum(
            all(request.reply is not None for request in batch.call.requests) for batch in planned
        )

    # From the replies to a batch.

    def gather(self, planned: PlannedBatch) -> Batch:
        """Wait for the rows of a batch, or gather them here, and join them.

        Raises:
            StarvedError: Rings were empty again and again, or overwritten.
        """
        batch = self._joined(planned)
        if batch is not None:
            return batch
        for _ in range(MAX_REDRAWS):
            batch = self._collect(planned)
            if batch is not None:
                return batch
            # No ring of the plan has anything to draw: plan by what is there now.
            self._table.ask_all()
            step, count = planned.step, planned.count
            with self._table.lock:
                points = self._points(self._random.shares(step, count))
                now = DrawPlan.of(self._totals(count), points)
                call = PlannedCall(
                    (step,), (planned.key,), count, now.fractions, now.shares, now.stops
                )
                planned = PlannedBatch(call, 0)
            self._requests.ask_for(call)
        raise StarvedError(
            f"run {self._table.run.run!r}: gave up after {MAX_REDRAWS} attempts, as "
            "rings were empty each time. Lower the batch_size, or increase the "
            "capacities."
        )

    def _joined(self, planned: PlannedBatch) -> Batch | None:
        """One of the batches of a call that are joined at once.

        That takes little longer than to join one.

        Returns:
            None where they cannot be, as where a ring gave nothing.
        """
        call = planned.call
        with call.lock:
            if not call.tried:
                shared = self._joiner.share([*accumulate(own[-1] for own in call.stops)])
                with shared:
                    rows = self._rows_of(call, shared)
                call.tried = True
                if rows is not None:
                    call.joined = self._joiner.join_all(call, rows, shared)
                    # Replies are in Ray's memory, which is not to be held.
                    call.requests.clear()
        if call.joined is None:
            return None
        return self._joiner.batch_of(call, call.joined, planned.number)

    def _rows_of(self, call: PlannedCall, shared: SharedArrays) -> list[RingRows] | None:
        """The rows of all batches of a call, ring by ring.

        Returns:
            None where a ring gave nothing, is late, or had rows overwritten; and where
            it is better not to hold the memory of several batches for one.
        """
        several = len(call.steps) > 1
        schema = self._table.schema
        nbytes = len(call.steps) * call.count * schema.row_nbytes
        # How long values that vary are is not known.
        if several and (nbytes > TOGETHER_NBYTES or schema.varying):
            return None
        found: dict[int, RingRows] = {}
        for request in call.requests:
            if several and request.shard.draws is not None:
                # Rings that are drawn without a call may have transforms that are
                # random by batch.
                return None
            reply = self._requests.answer(request, self._straggler_s)
            if reply is None:
                return None
            for name in request.stops:
                shared.begin(request.shard.rings[name].number)
                rows = self._requests.all_rows(request, reply, name, call.keys[0])
                if rows is None:
                    return None
                found[rows.number] = rows
        return [found[number] for number in sorted(found)]

    def _collect(self, planned: PlannedBatch) -> Batch | None:
        """Collect the parts of a batch; None where no ring gave any."""
        fractions = planned.call.fractions
        rows: dict[int, list[RingRows]] = {}
        num_points = planned.num_points
        with self._joiner.share([*accumulate(num_points)]) as shared:
            silent = self._receive(planned, planned.requests, rows, shared)
        if not silent:
            return self._joiner.join(planned, rows, fractions, shared=shared)
        points = np.array(num_points)
        spent, failed = planned.count, silent
        while failed:
            # All points of a ring that gives nothing are drawn among the others.
            gone = list(silent)
            for number in gone:
                rows.pop(number, None)
            missing = int(points[gone].sum())
            points[gone] = 0
            rest = fractions.copy()
            rest[gone] = 0.0
            if not rest.sum() > 0:
                return None
            self._stats.redrawn += missing
            # Other numbers of the step than those of the plan.
            numbers = self._random.shares(planned.step, spent + missing)[spent:]
            spent += missing
            shares = DrawPlan.of(rest, self._points(numbers)).shares
            points += [len(own) for own in shares]
            requests = self._requests.ask_for_shares(planned, shares)
            failed = self._receive(planned, requests, rows)
            silent |= failed
        rest = fractions / (1.0 - float(fractions[list(silent)].sum()))
        return self._joiner.join(planned, rows, rest, silent, shared=shared)

    def _receive(
        self,
        planned: PlannedBatch,
        requests: Sequence[RequestSlices],
        rows: dict[int, list[RingRows]],
        shared: SharedArrays | None = None,
    ) -> set[int]:
        """Add the rows that shards gave; return the rings that gave nothing.

        Args:
            planned: The batch.
            requests: That were sent for it.
            rows: By number of the ring.
            shared: Where rings of this node are gathered; None of its own.
        """
        failed: set[int] = set()
        late: list[RequestSlices] = []
        for straggler_s in (self._straggler_s, None):
            for request, slices in requests:
                rings = request.shard.rings
                reply = self._requests.answer(request, straggler_s)
                if reply is None:
                    if not request.shard.lost:
                        late.append((request, slices))
                    failed |= {rings[name].number for name in slices}
                    continue
                for name, own in slices.items():
                    if shared is not None:
                        shared.begin(rings[name].number)
                    found = self._requests.rows(
                        rings[name], request, own, planned, self._requests.answer
                    )
                    if found is None:
                        failed.add(rings[name].number)
                    else:
                        failed.discard(rings[name].number)
                        rows.setdefault(rings[name].number, []).append(found)
            if not late or rows:
                break
            # None is in time: wait for them all.
            requests, late = late, []
        self._stats.late += bool(late)
        return failed

    # What a loader asks for.

    def more(self, count: int) -> bool:
        """Whether there is another batch: always."""
        return True

    def num_batches(self, count: int) -> int:
        """Refuse: there is no end.

        Raises:
            TypeError: In any case.
        """
        raise TypeError(
            f"ReplayClient: {type(self._sampler).__name__} draws without an end, so it "
            "has no length. Use a sampler with epochs, such as ShuffledSampler."
        )

    def state_dict(self) -> State:
        """Seed and step; priorities stay with the rings, on disk."""
        return {
            "kind": "RingsSource",
            "seed": self._random.seed,
            "step": self._step,
            "sampler": type(self._sampler).__name__,
        }

    def load_state_dict(self, state: State) -> None:
        """Draw from a state on."""
        check_kind(state, "RingsSource")
        same(state, "sampler", type(self._sampler).__name__)
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        self._random, self._step = StepGenerator(seed), step
        self._table.step = step
        self._planned.clear()
