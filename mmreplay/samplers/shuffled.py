"""Every legal start once an epoch, in an order that is computed and not stored.

An epoch is of the legal starts that there were when it began. Steps leave a ring at its
old end and come at its new end, so a legal start is named for good by its environment
and by how many legal starts of the epoch follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import flag, integer, one_of
from mmreplay.episodes.starts import nothing_to_draw, num_legal, rank_edges
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.ring import LAYOUTS, Layout, Span
from mmreplay.samplers.base import RANKS, Draw, Sampler, State, Traits, View, call_repr
from mmreplay.samplers.joint import Mass
from mmreplay.samplers.permutation import Permutation
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import LIMIT, check_kind, integers, same, stored_integer
from mmreplay.samplers.uniform import BlockPermutation, checked_block, order_of

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EpochSnapshot:
    """The legal starts when an epoch began: how many, and where the newest one was.

    Attributes:
        buffer: The buffer's uuid, in hexadecimal.
        stops: int64 ``[E]``, one past the newest legal start; 0 where there is none.
        counts: int64 ``[E]``.
    """

    buffer: str
    stops: Ids
    counts: Ids

    @classmethod
    def of(cls, view: View) -> EpochSnapshot:
        """Keep what a view has now."""
        edges = rank_edges(view)
        counts, stops = np.diff(edges), np.zeros(len(edges) - 1, np.int64)
        some = np.flatnonzero(counts)
        if len(some):
            # The newest legal start and not the end of the rows: what lies between
            # may become legal, and would move every start that is counted from there.
            stops[some] = view.start_at(edges[some + 1] - 1)[1] + 1
        return cls(view.home.uuid.hex(), stops, counts)

    @property
    def total(self) -> int:
        """Legal starts of the epoch."""
        return int(self.counts.sum())

    def check(self, view: View) -> None:
        """Refuse a view of another buffer.

        Raises:
            FormatError: It is of another one, or of an older state of this one.
        """
        uuid = view.home.uuid.hex()
        if uuid != self.buffer or len(self.stops) != len(view.starts.first):
            raise FormatError(
                f"sampler: its unfinished epoch is over the buffer {self.buffer} with "
                f"{len(self.stops)} environments, got {uuid} with "
                f"{len(view.starts.first)}. Create a sampler for each buffer, or call "
                "restart() of the ShuffledSampler itself."
            )
        short = np.flatnonzero(view.starts.stop < self.stops)
        if len(short):
            env_id = int(short[0])
            raise FormatError(
                f"sampler: environment {env_id} ends at {view.starts.stop[env_id]}, "
                f"but the unfinished epoch has rows up to {self.stops[env_id]}, which "
                "are lost. Call restart() of the ShuffledSampler itself, or make a "
                "sampler without this state."
            )

    def steps_at(self, view: View, ranks: Ids) -> tuple[Ids, Ids]:
        """Legal starts by their rank when the epoch began.

        Args:
            view: The buffer now.
            ranks: int64 ``[B]``, in ``[0, total)``.

        Returns:
            env_ids and positions, int64 ``[B]`` each; position -1 where the step
            was overwritten since.
        """
        every = np.arange(len(self.counts))
        first = view.legal_before(every, view.starts.first)
        stop = view.legal_before(every, self.stops)
        ends = np.cumsum(self.counts)
        env_ids = np.searchsorted(ends, ranks, side="right")
        now = stop[env_ids] - (ends[env_ids] - ranks)
        alive = now >= first[env_ids]
        positions = np.full(len(ranks), -1)
        if alive.any():
            positions[alive] = view.start_at(now[alive])[1]
        return env_ids, positions

    def alive(self, view: View, env_ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Bool ``[B]``: which of the steps found before can be drawn now."""
        alive: NDArray[np.bool_] = positions >= view.starts.first[env_ids]
        if view.num_illegal and alive.any():
            alive[alive] = view.legal(env_ids[alive], positions[alive])
        return alive

    def all_gone(self, view: View) -> bool:
        """Whether no step of the epoch is left."""
        return bool((view.starts.first >= self.stops).all()) or num_legal(view) == 0

    def in_turn(self, indices: Ids) -> Ids:
        """Ranks in time-major order: the oldest of each environment, the second...

        Args:
            indices: int64 ``[B]``, in ``[0, total)``.
        """
        order = np.argsort(self.counts, kind="stable")
        rounds = self.counts[order]
        left = len(order) - np.arange(len(order))
        # Steps before the round in which each environment, shortest first, is through.
        before = np.cumsum(rounds) - rounds + left * rounds
        through = np.searchsorted(before, indices, side="right")
        base = np.append(0, rounds)[through]
        turn, which = np.divmod(indices - np.append(0, before)[through], left[through])
        ranks = base + turn
        edges = np.cumsum(self.counts) - self.counts
        for count in np.unique(through).tolist():
            here = through == count
            ranks[here] += edges[np.sort(order[count:])[which[here]]]
        return ranks

    def state_dict(self) -> State:
        """JSON values; O(environments)."""
        return {"buffer": self.buffer, "stops": self.stops.tolist(), "counts": self.counts.tolist()}

    @classmethod
    def from_state(cls, state: State) -> EpochSnapshot:
        """Read a state.

        Raises:
            FormatError: It is none.
        """
        buffer = state.get("buffer") if isinstance(state, Mapping) else None
        if not isinstance(buffer, str):
            raise FormatError(
                "sampler state: began must describe the start of an epoch, got "
                f"{state!r:.60}. Pass what state_dict returned, unchanged."
            )
        stops, counts = integers(state, "stops"), integers(state, "counts")
        if len(stops) != len(counts) or (counts > stops).any() or not counts.any():
            raise FormatError(
                "sampler state: stops and counts must have one value for each "
                "environment, and each count must be at most its stop, got "
                f"{len(stops)} stops and {len(counts)} counts. Pass what state_dict "
                "returned, unchanged."
            )
        return cls(buffer, stops, counts)


def share_of_rank(ranks: Ids, total: int) -> NDArray[np.float64]:
    """Return the shares at which `ShuffledSampler.draw_at` finds ranks.

    Args:
        ranks: int64 ``[B]``, in ``[0, total)``.
        total: Legal starts of the epoch, at most 2**51, so that none is rounded into
            the next one.

    Returns:
        float64 ``[B]``, in ``[0, 1)``.
    """
    return (ranks + 0.5) / total


ONLY_LEARNERS = frozenset(
    ("seed", "rank", "num_ranks", "drop_last", "shuffle", "layout", "batches", "block")
)
"""All arguments: the program that plans the epoch draws the ranks."""
CHUNK = 8192
"""Steps looked up at once, so that no batch pays for a search of the buffer."""


class ShuffledSampler(Sampler):
    """Draws without replacement, epoch by epoch: every legal start exactly once.

    An epoch is of the legal starts that there were at its beginning. Steps added
    meanwhile are for the next one; steps overwritten meanwhile are skipped, and
    `skipped` counts them. The last batch of an epoch may be short, and the draw
    after it begins the next epoch; a DataLoader over `ReplayDataset.draws` ends
    with the epoch.

    Memory is O(environments), whatever the buffer holds: the order is a keyed
    permutation of ranks (see `permutation`), and a state says how far it is gone
    through. So a run that is stopped after any batch goes on exactly there, also
    when the buffer has moved on.

    Ranks of a distributed run take every num_ranks-th step of one common order:
    disjoint, and together everything, sizes differing by one at most. With
    ``drop_last=True`` all ranks draw equally many batches. They must see the same
    buffer when an epoch begins: use one without a writer, or load the state of one
    rank into the others.

    Attributes:
        rank: This process's, in ``[0, num_ranks)``.
        num_ranks: Processes that share an epoch.
        skipped: Steps that were overwritten before they were drawn, of the epoch that
            the last draw is of; so it can be read when that one has ended.

    Example:
        >>> sampler = mr.ShuffledSampler(seed=0)  # each step once an epoch
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
        >>> len(buffer.sample(32))
        32
    """

    divides = RANKS
    _random: StepGenerator

    def __init__(
        self,
        seed: int | None = None,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        drop_last: bool = False,
        shuffle: bool = True,
        layout: Layout = "env_major",
        batches: int | None = None,
        block: int = 1,
    ) -> None:
        """Make a sampler.

        Args:
            seed: Seed of the orders; None takes one from the system. All ranks need
                the same.
            rank: In ``[0, num_ranks)``.
            num_ranks: Processes that share an epoch, at least 1.
            drop_last: Leave out what does not fill a batch at an epoch's end.
            shuffle: False draws oldest first.
            layout: Of ``shuffle=False``: ``"env_major"``, one environment after the
                other, or ``"time_major"``, the oldest of each, the second of each.
            batches: Split each epoch into so many batches, whose sizes differ by
                one at most (fewer where there are fewer steps); the batch_size asked
                for is then not looked at. At least 1.
            block: Keep so many legal starts that follow each other together, of all
                ranks, and shuffle those; see docs/samplers.md.

        Raises:
            SchemaError: An argument is not legal.
        """
        drop_last, shuffle = flag("drop_last", drop_last), flag("shuffle", shuffle)
        _check(rank, num_ranks, layout, batches, drop_last)
        self.rank, self.num_ranks = rank, num_ranks
        self.skipped = 0
        self._random = StepGenerator(seed)
        self._drop_last, self._batches = drop_last, batches
        self._block = checked_block(block, shuffle)
        self._options: dict[str, Any] = {
            "num_ranks": num_ranks,
            "shuffle": shuffle,
            "layout": layout,
            "batches": batches,
            "drop_last": drop_last,
        }
        if self._block > 1:
            self._options["block"] = self._block
        self._epoch = self._step = self._done = 0
        self._frozen: EpochSnapshot | None = None
        self._forget()

    def _forget(self) -> None:
        """Drop what was computed for an epoch."""
        self._order: Permutation | BlockPermutation | None = None
        self._chunk: tuple[int, Ids, Ids] = (0, np.empty(0, int), np.empty(0, int))
        # The starts in which the chunk was looked up.
        self._chunk_starts: Span | None = None

    def __repr__(self) -> str:
        """Show the call that makes it again."""
        return call_repr(self)

    def settings(self) -> dict[str, Any]:
        """See `Sampler.settings`."""
        return {
            "seed": self._random.given_seed,
            "rank": self.rank,
            "block": self._block,
            **{name: each for name, each in self._options.items() if name != "block"},
        }

    @property
    def traits(self) -> Traits:
        """Its epochs and their order are the learner's."""
        return replace(super().traits, local=ONLY_LEARNERS)

    @property
    def epoch(self) -> int:  # type: ignore[override]  # counted by itself alone
        """Number of the epoch that the next draw is of, from 0 on."""
        return self._epoch

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw the next batch of the epoch, or the first of the next one.

        Args:
            view: The buffer's, of the epoch's beginning or later.
            batch_size: Steps, at least 1.

        Returns:
            batch_size steps, or fewer at the end of an epoch.

        Raises:
            EmptyError: There is no legal start, or too few for a batch.
            FormatError: The epoch was begun on another buffer.
        """
        before = self._frozen, self._done, self._epoch
        try:
            batch = self._next(view, batch_size)
            while batch is None:
                self._end_epoch()
                batch = self._next(view, batch_size)
            frozen, (env_ids, positions, done) = self._begun(view), batch
        except BaseException:
            # A failed draw begins and ends no epoch.
            self._frozen, self._done, self._epoch = before
            self._forget()
            raise
        if self._done == 0:
            self.skipped = 0
        self.skipped += done - self._done - len(positions)
        self._done = done
        key = self._random.key(self._step * self.num_ranks + self.rank)
        self._step += 1
        if self._left(batch_size) == 0:
            self._end_epoch()
        probabilities = np.full(len(positions), 1.0 / frozen.total)
        weights = np.ones(len(positions), np.float32)
        return Draw(env_ids, positions, probabilities, weights, key)

    def more(self, view: View, batch_size: int) -> bool:
        """Whether this epoch has another batch; see `Sampler.more`."""
        if self._next(view, batch_size) is None:
            self._end_epoch()
            return False
        return True

    def num_batches(self, view: View, batch_size: int) -> int:
        """Batches of the whole of this epoch; see `Sampler.num_batches`."""
        size = self._size(self._frozen or EpochSnapshot.of(view))
        if self._batches is not None:
            return min(self._batches, size)
        return size // batch_size if self._drop_last else -(-size // batch_size)

    def restart(self) -> None:
        """Skip the rest of this epoch; the next draw begins another."""
        self._end_epoch()

    def mass(self, view: View, step: int) -> Mass:
        """A legal start of the epoch has the mass 1; see `Sampler.mass`.

        The epoch begins here where it has not begun: from then on the mass stays the
        same until it ends, whatever is written or overwritten.
        """
        frozen = self._frozen or EpochSnapshot.of(view)
        if frozen.total:
            frozen = self._begun(view)
        return Mass(float(frozen.total), frozen.total, 1.0, 0.0)

    def draw_at(self, view: View, shares: NDArray[np.float64]) -> Draw:
        """Draw steps of the epoch by rank; see `Sampler.draw_at`.

        Rank k of n is at the shares ``[k / n, (k + 1) / n)``: `share_of_rank` has the
        middle of each. An epoch that is gone through by ranks, each of them once,
        draws each legal start once.

        Returns:
            In the order of the shares, without those that were overwritten since the
            epoch began.
        """
        frozen = self._begun(view)
        ranks = (shares * frozen.total).astype(np.int64)
        env_ids, positions = frozen.steps_at(view, ranks)
        here = np.flatnonzero(positions >= 0)
        probabilities = np.full(len(here), 1.0 / frozen.total)
        weights = np.ones(len(here), np.float32)
        return Draw(env_ids[here], positions[here], probabilities, weights)

    @property
    def begun(self) -> EpochSnapshot | None:
        """The legal starts of the epoch; None where none has begun."""
        return self._frozen

    def begin_at(self, snapshot: EpochSnapshot) -> None:
        """Begin this epoch with the legal starts of another time.

        Args:
            snapshot: Of the buffer that it draws from, with at least one start.
        """
        self._frozen, self._done = snapshot, 0
        self._forget()

    def _begun(self, view: View) -> EpochSnapshot:
        """Begin the epoch where it is not, or see that it is of this buffer."""
        if self._frozen is None:
            frozen = EpochSnapshot.of(view)
            if frozen.total == 0:
                raise nothing_to_draw(view, 1)
            self._frozen = frozen
        else:
            self._frozen.check(view)
        return self._frozen

    def _end_epoch(self) -> None:
        self._frozen = None
        self._done = 0
        self._epoch += 1
        self._forget()

    def _size(self, frozen: EpochSnapshot) -> int:
        """Steps of an epoch that are for this rank."""
        if self._drop_last:
            return frozen.total // self.num_ranks
        return (frozen.total - self.rank + self.num_ranks - 1) // self.num_ranks

    def _minimum(self, batch_size: int) -> int:
        return batch_size if self._drop_last else 1

    def _left(self, batch_size: int) -> int:
        """Steps, overwritten or not, that this epoch still has batches of."""
        assert self._frozen is not None
        left = self._size(self._frozen) - self._done
        return left if left >= self._minimum(batch_size) else 0

    def _next(self, view: View, batch_size: int) -> tuple[Ids, Ids, int] | None:
        """Find the next batch: env_ids, positions, and how far the epoch is then."""
        has_begun = self._frozen is not None
        frozen = self._begun(view)
        size, done = self._size(frozen), self._done
        if size < self._minimum(batch_size):
            # Only an epoch that has as many can give a batch: where a new one would
            # not have them either, one that runs goes on with smaller batches.
            size = self._size(EpochSnapshot.of(view)) if has_begun else size
            if has_begun and size >= self._minimum(batch_size):
                return None
            if not has_begun:
                self._frozen = None
            raise self._too_few(batch_size, size)
        envs, steps, have = [], [], 0
        while done < size:
            stop = self._stop(size, done, batch_size - have)
            env_ids, positions = self._steps_at(view, frozen, done, stop)
            done += len(positions)
            if view.starts is self._chunk_starts:
                # Looked up in these very starts: what is there is legal.
                here = np.flatnonzero(positions >= 0)
            else:
                here = np.flatnonzero(frozen.alive(view, env_ids, positions))
            envs.append(env_ids[here])
            steps.append(positions[here])
            have += len(here)
            if have and (have == batch_size or self._batches is not None):
                break
            if len(here) == 0:
                if frozen.all_gone(view):
                    return None
                done = self._skip(view, frozen, done)
        if have < self._minimum(batch_size):
            return None
        return np.concatenate(envs), np.concatenate(steps), done

    def _skip(self, view: View, frozen: EpochSnapshot, done: int) -> int:
        """Skip the steps looked up that are gone, up to the first one alive."""
        start, env_ids, positions = self._chunk
        if self._batches is not None:
            return done
        rest = slice(done - start, None)
        alive = frozen.alive(view, env_ids[rest], positions[rest])
        return done + (int(alive.argmax()) if alive.any() else len(alive))

    def _stop(self, size: int, done: int, want: int) -> int:
        """Where the steps that come next end."""
        if self._batches is None:
            return min(size, done + want)
        count = min(self._batches, size)
        batch = -(-done * count // size)
        return (batch + 1) * size // count

    def _steps_at(
        self, view: View, frozen: EpochSnapshot, first: int, stop: int
    ) -> tuple[Ids, Ids]:
        """Steps ``[first, stop)`` of this rank's epoch, position -1 if overwritten."""
        start, envs, steps = self._chunk
        if not (start <= first and stop <= start + len(steps)):
            until = min(self._size(frozen), max(stop, first + CHUNK))
            indices = np.arange(first, until) * self.num_ranks + self.rank
            if self._options["shuffle"]:
                if self._order is None:
                    rng = self._random.at(self._epoch)
                    self._order = order_of(frozen.total, self._block, rng)
                ranks = self._order(indices)
            elif self._options["layout"] == "env_major":
                ranks = indices
            else:
                ranks = frozen.in_turn(indices)
            start, (envs, steps) = first, frozen.steps_at(view, ranks)
            self._chunk = (start, envs, steps)
            self._chunk_starts = view.starts
        chunk = slice(first - start, stop - start)
        return envs[chunk], steps[chunk]

    def _too_few(self, batch_size: int, size: int) -> EmptyError:
        return EmptyError(
            f"cannot draw {batch_size} steps without replacement: rank {self.rank} of "
            f"{self.num_ranks} needs at least {self._minimum(batch_size)}, got "
            f"{size}. Add steps, or use fewer ranks, a smaller batch or "
            "drop_last=False."
        )

    def bookmark(self) -> Any:
        """See `Sampler.bookmark`."""
        return self._step, self._epoch, self._done, self.skipped, self._frozen

    def return_to(self, bookmark: Any) -> None:
        """See `Sampler.return_to`."""
        self._step, self._epoch, self._done, self.skipped, self._frozen = bookmark
        self._forget()

    def state_dict(self) -> State:
        """Seed, step, epoch and how far it is; where it began, O(environments).

        The same for every rank, as long as nothing was skipped.
        """
        return {
            "kind": "ShuffledSampler",
            "seed": self._random.seed,
            "step": self._step,
            "epoch": self._epoch,
            "done": self._done,
            "skipped": self.skipped,
            "began": None if self._frozen is None else self._frozen.state_dict(),
            **self._options,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""
        check_kind(state, "ShuffledSampler")
        same({"block": 1, **state}, "block", self._block)
        for name, own in self._options.items():
            same(state, name, own)
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        epoch, done = stored_integer(state, "epoch"), stored_integer(state, "done")
        # Before the first draw of an epoch it is of the one before.
        skipped = stored_integer(state, "skipped", done + 1 if done else LIMIT)
        began = state.get("began")
        frozen = None if began is None else EpochSnapshot.from_state(began)
        size = 0 if frozen is None else self._size(frozen)
        if done > size:
            raise FormatError(
                f"sampler state: done must be at most {size}, the steps of its epoch, "
                f"got {done}. Pass what state_dict returned, unchanged."
            )
        self._random = StepGenerator(seed)
        self._step, self._epoch, self._done = step, epoch, done
        self.skipped, self._frozen = skipped, frozen
        self._forget()


def _check(rank: int, num_ranks: int, layout: str, batches: int | None, drop_last: bool) -> None:
    """Refuse arguments that make no sense."""
    distributed = "Pass torch.distributed's rank and world size."
    integer("rank", rank, 0, distributed)
    integer("num_ranks", num_ranks, 1, distributed)
    if rank >= num_ranks:
        raise SchemaError(
            f"rank must be in [0, num_ranks), got {rank} of {num_ranks}. Pass "
            "torch.distributed's rank and world size."
        )
    one_of("layout", layout, LAYOUTS)
    if batches is not None:
        integer("batches", batches, 1, "Leave it out to draw by batch_size.")
        if drop_last:
            raise SchemaError(
                "drop_last must be False with batches, got True with "
                f"batches={batches}. Batches of an epoch leave nothing out."
            )
