"""What a `ReplayClient` draws from: all rings of a run, as one source of batches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty

from numpy.typing import ArrayLike

from mmreplay.batch import Batch
from mmreplay.buffer.limiting import Limit
from mmreplay.errors import FailedError, ReplayError, frames_to_caller
from mmreplay.loader.prefetch import PendingBatch
from mmreplay.process import Worker, owned_by_thread
from mmreplay.ray.client_stats import ClientStats, LostWarning
from mmreplay.ray.epoch_draws import EpochDraws
from mmreplay.ray.epochs import EpochPlan, shuffled_in
from mmreplay.ray.joined_batches import BatchJoiner
from mmreplay.ray.mass_draws import MassDraws
from mmreplay.ray.priority_updates import PriorityUpdates
from mmreplay.ray.requests import PlannedBatch, Requests, draw_of
from mmreplay.ray.ring_table import RingTable
from mmreplay.ray.seeds import seed_of_rank
from mmreplay.ray.shard_calls import RunCalls
from mmreplay.samplers.base import Sampler, State, traits_of
from mmreplay.schema import Schema
from mmreplay.storage.gather import BufferPool
from mmreplay.storage.read_ahead import Gathering
from mmreplay.transforms.base import Transform

TICK_S = 0.05
"""Seconds between two looks after the shards."""


class RingsSource:
    """Draws from all rings of a run; see `mmreplay.loader.prefetch.Drawable`.

    Threads: one at a time draws; any may gather, update priorities and ask for stats.
    A thread of its own sends priorities that wait for long, asks for masses that are
    old, and looks for nodes that are lost or new.

    Attributes:
        table: The rings that are known.
    """

    in_shares = True
    calls_user_functions = False

    def __init__(
        self,
        run: RunCalls,
        sampler: Sampler,
        transforms: Sequence[Transform],
        *,
        per_call: int = 1,
        ahead: int = 0,
        alone: bool = False,
        straggler_s: float | None = None,
        lost_s: float = 5.0,
        patience_s: float = 600.0,
        seed: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        group: str | None = None,
        limit: Limit | None = None,
    ) -> None:
        """Find the rings.

        Args:
            run: The run.
            sampler: What they are drawn by.
            transforms: Of every ring.
            per_call: Batches that one call asks for.
            ahead: Calls under way for a learner that gathers its batches itself.
            alone: Own the priorities of this node's rings.
            straggler_s: Seconds after which a batch goes without a late ring.
            lost_s: Seconds without an answer after which a shard is lost.
            patience_s: Seconds that a shard which is being restarted is waited for.
            seed: Of the draws; that of the sampler by default.
            rank: Each rank draws other steps.
            num_ranks: Learners that share epochs.
            group: Their name.
            limit: Grants batches, and is closed with this; None for no limit.

        Raises:
            SchemaError: The run has no ring, schemas differ, or the sampler or a
                transform cannot draw from rings of a run.
        """
        self._sampler, self._limit = sampler, limit
        self._stats = ClientStats()
        shuffled = shuffled_in(sampler)
        epochs = None
        if shuffled is not None:
            epochs = EpochPlan(shuffled, rank, num_ranks, seed)
        self.table = RingTable(
            run,
            sampler,
            transforms,
            self._stats,
            alone=alone,
            lost_s=lost_s,
            patience_s=patience_s,
            waits=epochs is not None,
        )
        self._requests = Requests(self.table, self._stats)
        self._joiner = BatchJoiner(sampler, self.table)
        self._updates = PriorityUpdates(sampler, self.table, self._requests, self._stats)
        self._draws: MassDraws | EpochDraws
        if epochs is not None:
            self._draws = EpochDraws(epochs, self.table, self._requests, self._joiner, group)
        else:
            self._draws = MassDraws(
                sampler,
                self.table,
                self._requests,
                self._joiner,
                self._stats,
                per_call=per_call,
                ahead=ahead,
                straggler_s=straggler_s,
                seed=seed_of_rank(sampler, seed, rank),
            )
        self._worker: Worker[None] | None = None
        self._said = ""

    def __repr__(self) -> str:
        """Show the run and its rings."""
        return f"<run {self.table.run.run!r} of {len(self.table.rings)} rings>"

    @property
    def schema(self) -> Schema:
        """The fields of one step."""
        return self.table.schema

    @property
    def window_length(self) -> int:
        """Steps a window; 1 without windows."""
        return traits_of(self._sampler).window_length or 1

    def use_pool(self, pool: BufferPool) -> None:
        """Join batches in the memory of a pool."""
        self._joiner.pool = pool

    # Batches.

    @property
    def limits(self) -> Sequence[Limit]:
        """What grants batches, where the run has a limiter."""
        return () if self._limit is None else (self._limit,)

    def limit_by(self, limit: Limit) -> None:
        """Have batches granted from here on; it is closed with this."""
        # Rings that this process draws from itself are to count, too.
        self.table.look_again()
        self._limit = limit

    def begin(self) -> None:
        """Start the thread that looks after the shards."""
        if self._worker is None:
            self._worker = Worker("mmreplay-rings", self._look_after)
            self._worker.start()

    def end(self) -> None:
        """Do nothing: no other client has this one's epochs."""

    def owned_by_thread(self) -> bool:
        """Whether this thread is in the middle of a plan."""
        return owned_by_thread(self.table.lock)

    def more(self, count: int) -> bool:
        """Whether the epoch has another batch; without epochs there always is."""
        return self._draws.more(count)

    def draw(self, pending: PendingBatch, count: int) -> bool:
        """Plan a batch, and ask for it; False where the epoch is over."""
        self._refuse_unattended()
        # Nothing waits for a node under the lock, which those need that look for it.
        self._draws.prepare(count)
        with self.table.lock:
            pending.state = self.state_dict()
            planned = self._draws.plan(count)
            if planned is None:
                return False
            pending.shares = (planned,)
        return True

    def _refuse_unattended(self) -> None:
        """Refuse to draw where the thread that looks after the shards has failed.

        Raises:
            FailedError: It has.
        """
        failure = None if self._worker is None else self._worker.failure
        if failure is not None:
            raise FailedError(
                f"run {self.table.run.run!r}: the thread that looks after the shards "
                f"ended by {failure!r}. Close the client, and make it again."
            ) from failure

    def gather(self, pending: PendingBatch) -> Batch | None:
        """Wait for the rows of a batch, or gather them here, and join them."""
        # It was not known which rows it takes when the disk could have been asked.
        with Gathering(pending.prefetched and self._in_process):
            return self._draws.gather(pending.shares[0])

    def sample(self, pending: PendingBatch, count: int) -> Batch | None:
        """Draw and gather; None where the epoch is over."""
        while self.draw(pending, count):
            if isinstance(self._draws, MassDraws):
                self._draws.ask_ahead(count)
            batch = self.gather(pending)
            if batch is not None:
                return batch
        return None

    def go_back(self, state: State) -> bool:
        """Draw an epoch from a state on; without epochs nothing is missing."""
        if not isinstance(self._draws, EpochDraws):
            return False
        self.load_state_dict(state)
        return True

    @property
    def _in_process(self) -> bool:
        """Whether no batch waits for a call."""
        return all(shard.draws is not None for shard in self.table.shards.values())

    def nbytes(self, pending: PendingBatch) -> int:
        """Bytes of the rows of a batch."""
        planned: PlannedBatch = pending.shares[0]
        return planned.count * self.window_length * self.schema.row_nbytes

    def prefetch(self, pending: PendingBatch) -> int:
        """Ask the disk for rows that are known.

        Of shards that draw nothing is known yet. Those of an epoch are asked for by
        threads alone, so that they count as missing.
        """
        if not self._in_process:
            return 0 if isinstance(self._draws, MassDraws) else self.nbytes(pending)
        planned: PlannedBatch = pending.shares[0]
        missing = 0
        for request, slices in planned.requests:
            # What fails here is met by `gather` as well, which brings an epoch back
            # that is not known any more, and goes without a ring that was deleted.
            try:
                draws = request.call.result(0.0)["draws"]
            except ReplayError:
                continue
            for name, own in slices.items():
                buffer, drawn = request.shard.rings[name].buffer, draws[name]
                if drawn is not None and buffer is not None:
                    draw = draw_of(drawn, own, planned.key)
                    with suppress(FailedError):
                        missing += buffer.view.prefetch(draw)
        return missing

    def num_batches(self, count: int) -> int:
        """Batches of the whole epoch, which begins here where it has not.

        Raises:
            TypeError: The sampler has no epochs.
        """
        return self._draws.num_batches(count)

    def state_dict(self, priorities: bool = False) -> State:
        """Where the next batch is; priorities stay with the rings, on disk."""
        return self._draws.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Draw from a state on."""
        with self.table.lock:
            self._draws.load_state_dict(state)

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Note priorities for the rings of a batch; see `PriorityUpdates.update`."""
        return self._updates.update(batch, values)

    def count(self, batch: Batch, size: int) -> None:
        """Note that the learner took a batch; shards count what is drawn."""
        if self._limit is not None:
            self._limit.count(size)

    def num_answered(self) -> int:
        """Batches that were asked for together with others, and are answered."""
        draws = self._draws
        return draws.num_answered() if isinstance(draws, MassDraws) else 0

    def stats(self) -> ClientStats:
        """What was met so far."""
        with self.table.lock:
            names = {ring: f"{ring.shard.remote.key}/{ring.name}" for ring in self.table.rings}
            skipped = 0
            if isinstance(self._draws, EpochDraws):
                skipped = self._draws.skipped
            return replace(
                self._stats,
                rings=tuple(names.values()),
                lost=tuple(n for ring, n in names.items() if ring.shard.lost),
                skipped=skipped,
            )

    def warn(self) -> None:
        """Warn of nodes that were lost, in the learner's thread."""
        while self.table.warnings:
            warnings.warn(self.table.warnings.popleft(), LostWarning, stacklevel=frames_to_caller())

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
        for shard in list(self.table.shards.values()):
            # This thread goes on, whatever fails: nothing else hears that a lost node
            # is back. What a shard refuses is raised by the draw that meets it.
            try:
                self._updates.send_waiting(shard)
            except ReplayError:
                pass
            except Exception as error:
                self._warn_once(error)
            try:
                self.table.ask_again(shard)
            except ReplayError:
                shard.asked = []
            except Exception as error:
                shard.asked = []
                self._warn_once(error)
        try:
            self.table.find_new_rings()
        except Exception as error:
            self._warn_once(error)

    def _warn_once(self, error: Exception) -> None:
        # It is tried again and again.
        text = f"run {self.table.run.run!r}: {error}"
        if text != self._said:
            self._said = text
            self.table.warnings.append(text)

    def end_waits(self) -> None:
        """End waits for nodes that are away, as the client is about to be closed."""
        self.table.closing = True

    def close(self) -> None:
        """Send the priorities that wait, and close the rings of this node."""
        if self._limit is not None:
            self._limit.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
        try:
            self._updates.send_last()
        finally:
            self.table.close()
