"""Shuffled epochs over all rings of a run: each legal start once.

When an epoch begins each ring *freezes* it: it notes how many legal starts it has and
where the newest one is, durably, before anything is drawn. Rings in the order of their
uuids, their legal starts by rank one after the other, are numbered from 0 to the sum of
all. The order of these numbers is a permutation by seed and epoch, and learner r of R
takes every R-th from the r-th on. So a learner's progress is one number, the parts of
learners are disjoint, and nothing is stored that grows with the rings.

A number becomes a ring and a share of it, which the ring's sampler looks up as any
other share (`ShuffledSampler.draw_at`). Starts that were overwritten since are left out
of the batch, and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import EmptyError, FormatError, SchemaError, StaleError
from mmreplay.format import ray_files
from mmreplay.format.ray_files import FrozenEpoch
from mmreplay.samplers.base import Sampler, State, View, innermost, traits_of
from mmreplay.samplers.permutation import Permutation
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.shuffled import EpochSnapshot, ShuffledSampler, share_of_rank
from mmreplay.samplers.states import check_kind, same, stored_integer
from mmreplay.samplers.uniform import BlockPermutation, order_of

Ids = NDArray[np.int64]
NUM_EPOCHS = 2
"""Epochs of one name that a ring remembers: learners may be one epoch apart."""
NUM_NAMES = 16
"""Names that a ring remembers, the newest ones; each learner, or group, has one."""


# At a shard.


def shuffled_in(sampler: Sampler) -> ShuffledSampler | None:
    """The sampler, or the one inside it, that draws epochs by ranks."""
    if not traits_of(sampler).in_ranks:
        return None
    # One of another class has the same names, as its traits say.
    return cast(ShuffledSampler, innermost(sampler))


class FrozenEpochs:
    """The epochs that one ring has frozen, in its folder.

    Threads: any may call.
    """

    def __init__(self, folder: Path, uuid: str) -> None:
        """Read what the folder has.

        Args:
            folder: The ring's.
            uuid: The ring's, in hex digits.

        Raises:
            FormatError: The file is damaged.
        """
        self._folder, self.uuid = folder, uuid
        self._lock = threading.Lock()
        self._epochs = ray_files.read_epochs(folder)

    def get(self, name: str, epoch: int) -> FrozenEpoch | None:
        """Return an epoch, or None where the ring has not frozen it."""
        for each in self._epochs:
            if (each.name, each.epoch) == (name, epoch):
                return each
        return None

    def names(self, start: str) -> list[str]:
        """Names of epochs that begin so, the newest last."""
        names = [each.name for each in self._epochs if each.name.startswith(start)]
        return list(dict.fromkeys(names))

    def freeze(
        self, name: str, epoch: int, buffers: Sequence[str], look: Callable[[], tuple[Ids, Ids]]
    ) -> FrozenEpoch:
        """Freeze an epoch, or return what was frozen for it before.

        Args:
            name: Of the epoch's learners.
            epoch: Its number.
            buffers: uuids of all its rings.
            look: Returns the stops and counts of now, see `frozen_now`.

        Raises:
            FormatError: The name is too long.
            FullError: No space is left.
        """
        with self._lock:
            frozen = self.get(name, epoch)
            if frozen is None:
                stops, counts = look()
                frozen = FrozenEpoch(
                    name, epoch, tuple(stops.tolist()), tuple(counts.tolist()), tuple(buffers)
                )
                self._put(frozen)
            return frozen

    def put(self, frozen: FrozenEpoch) -> None:
        """Remember an epoch again that was frozen here, from a learner's state.

        Raises:
            FullError: No space is left.
        """
        with self._lock:
            if self.get(frozen.name, frozen.epoch) is None:
                self._put(frozen)

    def _put(self, frozen: FrozenEpoch) -> None:
        # What cannot be read back would end the draws of all learners.
        FrozenEpoch.from_json(frozen.to_json(), f"epoch of ring {self.uuid}")
        own = [each for each in self._epochs if each.name == frozen.name]
        # One that a learner brings back may be older than both.
        own = sorted([*own, frozen], key=lambda epoch: epoch.epoch)
        if len(own) > NUM_EPOCHS:
            own.remove(min(own, key=lambda epoch: (epoch is frozen, epoch.epoch)))
        others = [each for each in self._epochs if each.name != frozen.name]
        names = list(dict.fromkeys(each.name for each in others))
        dropped = names[: max(0, len(names) + 1 - NUM_NAMES)]
        epochs = [each for each in others if each.name not in dropped] + own
        # Durable before any learner knows of it.
        ray_files.write_epochs(self._folder, epochs)
        self._epochs = epochs


def frozen_now(sampler: Sampler, view: View) -> tuple[Ids, Ids]:
    """Stops and counts of the legal starts of now; the view's lock is held.

    Args:
        sampler: A fresh one, of the learners' class and arguments.
        view: The ring.

    Raises:
        SchemaError: It draws no epochs.
    """
    inner = shuffled_in(sampler)
    if inner is None:
        raise SchemaError(
            f"epochs need a ShuffledSampler, or a SequenceSampler around one, got "
            f"{type(sampler).__name__}. Use one of them."
        )
    sampler.mass(view, 0)
    if inner.begun is None:
        none = np.zeros(len(view.span.first), np.int64)
        return none, none
    return inner.begun.stops, inner.begun.counts


def at_epoch(sampler: Sampler, frozen: FrozenEpoch, uuid: str) -> Sampler:
    """Have a fresh sampler draw from an epoch as it was frozen; return it.

    Args:
        sampler: Of the class and arguments by which it was frozen.
        frozen: The epoch, of at least one legal start.
        uuid: The ring's, in hex digits.
    """
    inner = shuffled_in(sampler)
    assert inner is not None
    stops, counts = np.array(frozen.stops), np.array(frozen.counts)
    inner.begin_at(EpochSnapshot(uuid, stops, counts))
    return sampler


def unknown_epoch(name: str, epoch: int, ring: str) -> StaleError:
    """Return the error for an epoch that a ring has forgotten."""
    return StaleError(
        f"{ring}: epoch {epoch} of {name!r} is not known, since newer ones were "
        "frozen or its folder was copied. The learner brings it back."
    )


# At the registry.


Frozen = dict[str, dict[str, Any] | None]
"""By uuid of each ring what it froze for an epoch, as JSON; None where it has not."""


def freeze_rings(ask: Callable[[list[str] | None], tuple[Frozen, list[str]]]) -> dict[str, Any]:
    """Have every ring of a run freeze an epoch, or find what was frozen for it.

    Which rings belong to the epoch is what any ring has written down: a registry that
    was killed in the middle goes on with the same.

    Args:
        ask: Asks all shards to freeze for these rings, or with None what they have
            frozen. Returns the answers, and the keys of shards that gave none.

    Returns:
        ``rings``, by uuid what each ring of the epoch froze, in its order; and
        ``away``, the shards that have to answer before it can begin: none where it
        has.
    """
    found, away = ask(None)
    known = [each for each in found.values() if each is not None]
    if known:
        buffers = list(known[0]["buffers"])
    elif away:
        # A new epoch is over the rings of all shards.
        return {"rings": {}, "away": away}
    else:
        buffers = sorted(found)
    if any(found.get(each) is None for each in buffers):
        more, away = ask(buffers)
        found.update(more)
    rings = {each: found.get(each) for each in buffers}
    return {"rings": rings, "away": away if None in rings.values() else []}


# At a learner.


@dataclass(frozen=True, slots=True)
class FrozenRun:
    """An epoch over all its rings.

    Attributes:
        name: Of its learners.
        epoch: Its number.
        rings: What each ring froze, by uuid, in the order of the epoch.
    """

    name: str
    epoch: int
    rings: dict[str, FrozenEpoch]

    @classmethod
    def of(cls, rings: Mapping[str, FrozenEpoch]) -> FrozenRun:
        """Join what the rings of an epoch froze.

        Args:
            rings: By uuid, all of them.

        Raises:
            FormatError: They are not those of one epoch.
        """
        first = next(iter(rings.values()))
        for each in rings.values():
            if (each.name, each.epoch, each.buffers) != (
                first.name,
                first.epoch,
                first.buffers,
            ) or set(each.buffers) != set(rings):
                raise FormatError(
                    f"epoch {first.epoch} of {first.name!r} is over other rings than "
                    f"those given: {sorted(rings)}. Give all rings that it names."
                )
        return cls(first.name, first.epoch, {u: rings[u] for u in first.buffers})

    @property
    def totals(self) -> Ids:
        """int64 ``[R]``, legal starts of each ring."""
        return np.array([sum(each.counts) for each in self.rings.values()], np.int64)

    def to_json(self) -> State:
        """Return it in JSON's types; O(environments)."""
        return {
            "name": self.name,
            "rings": {
                uuid: {"stops": list(each.stops), "counts": list(each.counts)}
                for uuid, each in self.rings.items()
            },
        }

    @classmethod
    def from_json(cls, value: object, epoch: int) -> FrozenRun:
        """Return the epoch of a state.

        Raises:
            FormatError: It describes none.
        """
        where = "state of a client: began"
        if not isinstance(value, Mapping) or not isinstance(value.get("rings"), dict):
            raise FormatError(
                f"{where} must describe the beginning of an epoch, got {value!r:.60}. "
                "Pass what state_dict returned, unchanged."
            )
        buffers = list(value["rings"])
        rings = {}
        for uuid, each in value["rings"].items():
            own = {"name": value.get("name"), "epoch": epoch, "buffers": buffers}
            members = {**each, **own} if isinstance(each, dict) else own
            rings[uuid] = FrozenEpoch.from_json(members, f"{where}[{uuid}]")
        return cls(str(value.get("name")), epoch, rings)


@dataclass(frozen=True, slots=True)
class EpochShare:
    """What a learner draws for one batch.

    Attributes:
        name: Of the epoch's learners.
        epoch: Number of the epoch.
        first: First of the learner's steps of the epoch in the batch.
        stop: One past the last.
        shares: float64 ``[k]`` in ``[0, 1)`` by uuid of the ring, of those with any.
    """

    name: str
    epoch: int
    first: int
    stop: int
    shares: dict[str, NDArray[np.float64]]


class EpochPlan:
    """One learner's way through the epochs of a run.

    Batches may be planned ahead: a batch that was not handed over is planned again
    from the state of before it.

    Attributes:
        epoch: Number of the epoch of the next batch to plan.
    """

    def __init__(
        self, sampler: ShuffledSampler, rank: int = 0, num_ranks: int = 1, seed: int | None = None
    ) -> None:
        """Begin before the first epoch.

        Args:
            sampler: Its seed, order and options are the learner's.
            rank: Of the learner, in ``[0, num_ranks)``.
            num_ranks: Learners that share the epochs, all with one seed.
            seed: In place of the sampler's.

        Raises:
            SchemaError: The sampler has an option that is for one buffer only, or
                another rank.
        """
        state = sampler.state_dict()
        for option, legal in (("batches", None), ("layout", "env_major")):
            if state[option] != legal:
                raise SchemaError(
                    f"{option} must be {legal!r} over the rings of a run, got "
                    f"{state[option]!r}. Leave it out."
                )
        if sampler.num_ranks != 1:
            own = sampler.rank, sampler.num_ranks
            if num_ranks != 1 and (rank, num_ranks) != own:
                raise SchemaError(
                    f"rank must be {own[0]} of {own[1]}, as of the ShuffledSampler, "
                    f"got {rank} of {num_ranks}. Leave it out of one of both."
                )
            rank, num_ranks = own
        if num_ranks > 1 and seed is None and sampler.generators()[0].given_seed is None:
            raise SchemaError(
                f"seed must be given where {num_ranks} learners share epochs, got "
                "None. Pass the same one to all."
            )
        self.rank, self.num_ranks = rank, num_ranks
        self._options = {
            "num_ranks": num_ranks,
            "shuffle": bool(state["shuffle"]),
            "drop_last": bool(state["drop_last"]),
            "block": int(state.get("block", 1)),
        }
        self._random = StepGenerator(int(state["seed"]) if seed is None else seed)
        self.epoch = 0
        # What was overwritten, by the first step of its batch: a batch that is drawn
        # again counts once. And what a state that was loaded has counted.
        self._missing: dict[int, int] = {}
        self._skipped_epoch = self._skipped_before = 0
        self._done = 0
        self._frozen: dict[int, FrozenRun] = {}
        self._order: tuple[int, Permutation | BlockPermutation] | None = None

    @property
    def seed(self) -> int:
        """Of the orders; all ranks need the same."""
        return self._random.seed

    @property
    def done(self) -> int:
        """Steps of the learner's part of the epoch that were planned."""
        return self._done

    @property
    def skipped(self) -> int:
        """Starts of the newest gathered epoch that were overwritten before a draw."""
        return self._skipped_before + sum(self._missing.values())

    def frozen(self, epoch: int) -> FrozenRun | None:
        """Return an epoch that was begun, and is not over."""
        return self._frozen.get(epoch)

    def begin(self, frozen: FrozenRun) -> None:
        """Begin the epoch of the next batch to plan.

        Raises:
            EmptyError: There are fewer legal starts than learners.
        """
        assert frozen.epoch == self.epoch
        if self._size(frozen) == 0:
            total = int(frozen.totals.sum())
            raise EmptyError(
                f"an epoch needs a legal start for each of {self.num_ranks} learners, "
                f"got {total} in {len(frozen.rings)} rings. Add steps first."
            )
        self._frozen[self.epoch] = frozen

    def _size(self, frozen: FrozenRun) -> int:
        total = int(frozen.totals.sum())
        if self._options["drop_last"]:
            return total // self.num_ranks
        return (total - self.rank + self.num_ranks - 1) // self.num_ranks

    def size(self, batch_size: int) -> int:
        """Steps of the learner in the epoch that is planned, which has begun."""
        size = self._size(self._frozen[self.epoch])
        return size - size % batch_size if self._options["drop_last"] else size

    def next(self, batch_size: int) -> EpochShare | None:
        """Plan the next batch of the epoch, which has begun.

        Args:
            batch_size: Steps; the last batch of an epoch may have fewer.

        Returns:
            None where the epoch has no other: `next_epoch`, then `begin`.
        """
        frozen = self._frozen[self.epoch]
        first, stop = self._done, self.size(batch_size)
        if first >= stop:
            return None
        stop = min(stop, first + batch_size)
        numbers = np.arange(first, stop) * self.num_ranks + self.rank
        if self._options["shuffle"]:
            numbers = self._order_of(frozen)(numbers)
        totals = frozen.totals
        ends = np.cumsum(totals)
        which = np.searchsorted(ends, numbers, side="right")
        shares = {}
        for number, (uuid, total) in enumerate(zip(frozen.rings, totals.tolist(), strict=True)):
            ranks = numbers[which == number] - (ends[number] - total)
            if len(ranks):
                shares[uuid] = share_of_rank(ranks, total)
        self._done = stop
        return EpochShare(frozen.name, self.epoch, first, stop, shares)

    def _order_of(self, frozen: FrozenRun) -> Permutation | BlockPermutation:
        if self._order is None or self._order[0] != frozen.epoch:
            rng = self._random.at(frozen.epoch)
            total = int(frozen.totals.sum())
            order = order_of(total, int(self._options["block"]), rng)
            self._order = frozen.epoch, order
        return self._order[1]

    def next_epoch(self) -> None:
        """Plan the next epoch from here on, which `begin` has to begin."""
        # Batches of the one before may not be gathered yet.
        for epoch in [each for each in self._frozen if each < self.epoch]:
            del self._frozen[epoch]
        self.epoch += 1
        self._done = 0

    def gathered(self, share: EpochShare, count: int) -> None:
        """Note how many steps of a batch were there, to count the others.

        Args:
            share: What was planned for it.
            count: Steps that it has.
        """
        if share.epoch > self._skipped_epoch:
            self._skipped_epoch, self._skipped_before, self._missing = (share.epoch, 0, {})
        if share.epoch == self._skipped_epoch:
            missing = share.stop - share.first - count
            self._missing.pop(share.first, None)
            if missing:
                self._missing[share.first] = missing

    def state_dict(self) -> State:
        """Where the next batch to plan is; O(environments) of all rings."""
        began = self._frozen.get(self.epoch)
        return {
            "kind": "EpochPlan",
            "seed": self._random.seed,
            "epoch": self.epoch,
            "done": self._done,
            "skipped": self.skipped,
            "began": None if began is None else began.to_json(),
            **self._options,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state, of this rank or of another.

        Raises:
            FormatError: It is another sampler's, or not a state at all.
        """
        check_kind(state, "EpochPlan")
        for name, own in self._options.items():
            same(state, name, own)
        epoch, done = stored_integer(state, "epoch"), stored_integer(state, "done")
        seed, skipped = stored_integer(state, "seed"), stored_integer(state, "skipped")
        began = state.get("began")
        frozen = None if began is None else FrozenRun.from_json(began, epoch)
        if done > (0 if frozen is None else self._size(frozen)):
            raise FormatError(
                f"state of a client: done must be at most the steps of its epoch, got "
                f"{done}. Pass what state_dict returned, unchanged."
            )
        former = self._frozen.get(epoch)
        if former is None or frozen is None or former.name != frozen.name:
            self._skipped_epoch, self._skipped_before = epoch, skipped
            self._missing = {}
        elif self._skipped_epoch == epoch:
            # Of the same epoch more is known here: also of batches ahead of the state.
            self._missing = {f: n for f, n in self._missing.items() if f < done}
        self._random = StepGenerator(seed)
        self.epoch, self._done, self._order = epoch, done, None
        self._frozen = {} if frozen is None else {epoch: frozen}
