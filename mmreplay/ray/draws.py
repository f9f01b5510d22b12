"""What a shard does for its clients: masses of its rings, draws at shares, priorities.

`RingDraws` is over opened rings and makes no call of Ray: a shard has one for each
sampler that its clients draw by, and a client that owns the priorities of its node's
rings has one of its own. Requests and replies are dicts of arrays, numbers and strings.

One request brings the priorities of earlier batches first, then shares, of one batch
or of several. A share in [0, 1) is looked up in the masses of now, whatever the client
knew when it planned; see `mmreplay.samplers.joint` for why that is unbiased. A repeated
request draws again and sets the same priorities again, so it does no harm.
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.buffer.reader import GenerationReader, ReplacedError
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import (
    DurabilityWarning,
    EmptyError,
    FailedError,
    FormatError,
    FullError,
    LockedError,
    RemovedError,
    StaleError,
)
from mmreplay.format.ray_files import FrozenEpoch
from mmreplay.ray.descriptions import Description, make, text_of
from mmreplay.ray.epochs import NUM_EPOCHS, FrozenEpochs, at_epoch, frozen_now, unknown_epoch
from mmreplay.ray.limits import counter_of
from mmreplay.samplers.base import Draw, Sampler, ask, innermost, traits_of
from mmreplay.samplers.divided import DrawAtShares
from mmreplay.samplers.joint import JointWeights, Mass
from mmreplay.transforms.base import Transform

Array = NDArray[Any]
LOOK_S = 1.0
"""Seconds between two looks for new rings."""
IDLE_S = 120.0
"""Priorities are given back once no learner has asked by them for so long; a learner
asks every second."""
UNWEIGHTED = JointWeights(0.0, 1.0)
"""Weights are the client's: it alone knows the whole batch."""


class Client(TypedDict):
    """What a client draws by.

    Attributes:
        name: The same for clients that share priorities.
        sampler: From `describe_sampler`.
        transforms: From `describe_transforms`.
    """

    name: str
    sampler: Description
    transforms: list[Description]


def describe_client(sampler: Description, transforms: list[Description]) -> Client:
    """Describe a client by its sampler and transforms."""
    name = text_of([sampler, transforms])
    return {"name": name, "sampler": sampler, "transforms": transforms}


class Update(TypedDict):
    """Priorities of steps, or windows, of one ring.

    Attributes:
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``.
        values: Numbers ``[B]``, or ``[B, T]`` of the steps of windows.
        mask: bool ``[B, T]``, which of those are steps; None for all.
    """

    env_ids: Array
    positions: Array
    values: Array
    mask: Array | None


class Wanted(TypedDict):
    """What a client wants a shard to draw, for one batch or several.

    Attributes:
        step: Of the newest batch, for exponents that follow a schedule.
        key: See `Draw.key`.
        shares: float64 ``[k]`` in ``[0, 1)`` by ring.
        rows: The rings whose rows the client needs, and not only which they are.
        epoch: Name and number of the frozen epoch that the shares are of, where the
            sampler draws epochs.
        block_rows: Rows of each block, where they travel in blocks; see `reply_blocks`.
    """

    step: int
    key: int
    shares: dict[str, Array]
    rows: list[str]
    epoch: NotRequired[tuple[str, int]]
    block_rows: NotRequired[int]


class RingDraw(TypedDict):
    """The steps of one ring, in the order of the shares.

    Attributes:
        env_ids: int64 ``[k]``.
        positions: int64 ``[k]``.
        probabilities: float64 ``[k]``, of each step within the ring.
        windows: int64 ``[k, T]`` positions of windows; None without windows.
        mask: bool ``[k, T]``, likewise.
        is_first: bool ``[k, T]``, likewise; None where it was not asked for.
        first_only: Paths of fields that a window holds of its first step only.
        fields: Arrays ``[k, *shape]`` by path, where rows were asked for.
        blocks: The same in blocks, where they travelled so.
        bfloat16: Paths whose arrays hold the bits of bfloat16 numbers.
    """

    env_ids: Array
    positions: Array
    probabilities: Array
    windows: Array | None
    mask: Array | None
    is_first: Array | None
    first_only: list[str]
    fields: NotRequired[dict[str, Array]]
    blocks: NotRequired[list[dict[str, Array]]]
    bfloat16: NotRequired[list[str]]


Masses = dict[str, list[float]]
"""By ring: total, number of legal starts, lowest and highest; see `Mass`."""


class Reply(TypedDict):
    """Answer to a request.

    Attributes:
        masses: Of every ring of the shard, after the draws.
        draws: By ring; None where there is no mass.
        dropped: Priorities whose rows had been overwritten.
    """

    masses: Masses
    draws: dict[str, RingDraw | None]
    dropped: int


@dataclass(slots=True)
class _Ring:
    """One ring as one kind of client draws from it."""

    buffer: ReplayBuffer
    sampler: Sampler
    folder: Path
    epochs: dict[tuple[str, int], Sampler] = field(default_factory=dict)
    prioritized: Sampler | None = field(init=False)

    def __post_init__(self) -> None:
        # Found once: to ask what a sampler is took 4 % of a request.
        self.prioritized = _prioritized(self.sampler)

    @property
    def uuid(self) -> str:
        """The ring's, in hex digits."""
        return self.buffer.metadata.uuid.hex()

    @property
    def view(self) -> GenerationReader:
        """The ring now.

        Raises:
            RemovedError: Its folder was deleted.
            FailedError: It is closed.
        """
        return self.buffer.view


class RingDraws:
    """Draws from the rings of one node, for clients with one sampler.

    Threads: any may call; draws from one ring are made one after another.

    Attributes:
        client: What it draws by.
        known: What `masses` returned last.
    """

    def __init__(self, client: Client, transforms: Sequence[Transform] | None = None) -> None:
        """Make one without rings; see `serve`.

        Args:
            client: What it draws by.
            transforms: In place of those described, in the client's own process.
        """
        self.client = client
        self.known: Masses = {}
        self._rings: dict[str, _Ring] = {}
        self._lock = threading.RLock()
        self._by_ranks = traits_of(make(client["sampler"])).in_ranks
        if transforms is None:
            transforms = [make(each) for each in client["transforms"]]
        self._transforms = transforms

    @property
    def buffers(self) -> dict[str, ReplayBuffer]:
        """The opened rings by name."""
        return {name: ring.buffer for name, ring in self._rings.items()}

    def serve(self, folders: Mapping[str, Path]) -> None:
        """Open rings that are not open yet, and close those that are not listed.

        Args:
            folders: By name of the ring.

        Raises:
            ReplayError: A folder cannot be opened, or transforms do not fit its schema.
        """
        with self._lock:
            for name in [each for each in self._rings if each not in folders]:
                self._rings.pop(name).buffer.close()
            for name, folder in folders.items():
                ring = self._rings.get(name)
                if ring is not None:
                    if ring.folder == folder and not _is_gone(ring.buffer):
                        if ring.buffer.limit is None:
                            # A writer brings a limiter to a ring that had none.
                            counter = counter_of(folder)
                            if counter is not None:
                                ring.buffer.limit = counter.bind_to(ring.buffer)
                        continue
                    ring.buffer.close()
                sampler = make(self.client["sampler"])
                buffer = ReplayBuffer.open(
                    folder, sampler=sampler, transforms=self._transforms, limiter=counter_of(folder)
                )
                self._rings[name] = _Ring(buffer, sampler, folder)
            # In the order of names, whichever came first.
            self._rings = dict(sorted(self._rings.items()))

    def masses(self, step: int = 0, highest: float = 0.0) -> Masses:
        """What there is to draw from, of every ring.

        Args:
            step: The client's, for exponents that follow a schedule.
            highest: The highest priority of all rings that the client knows: new rows
                enter at least at it.

        Raises:
            LockedError: Another process owns the priorities of a ring.
        """
        with self._lock:
            rings = dict(self._rings)
        return self._masses(rings, step, highest, {})

    def _masses(
        self,
        rings: Mapping[str, _Ring],
        step: int,
        highest: float,
        views: Mapping[str, GenerationReader | None],
    ) -> Masses:
        if self._draws_epochs:
            # An epoch draws what was frozen for it.
            return {name: [0.0, 0.0, float("inf"), 0.0] for name in rings}
        self.known = {
            name: _numbers(self._mass(ring, step, highest, views.get(name)))
            for name, ring in rings.items()
        }
        return self.known

    def exchange(
        self, updates: Mapping[str, Sequence[Update]], wanted: Wanted | None, highest: float
    ) -> Reply:
        """Set priorities, then draw.

        Args:
            updates: By ring, the oldest first. Rings that are not here are passed over.
            wanted: None only sets priorities.
            highest: See `masses`.

        Raises:
            LockedError: Another process owns the priorities of a ring.
            StarvedError: A writer overwrote every row before it could be read.
        """
        step = 0 if wanted is None else wanted["step"]
        shares = {} if wanted is None else wanted["shares"]
        with self._lock:
            rings = dict(self._rings)
        views = {name: _view_of(ring) for name, ring in rings.items()}
        dropped = 0
        for name, own in updates.items():
            dropped += self.update(name, own, step, views.get(name))
        # They look at new rows and at schedules, so that the draws are of what is here.
        masses = self._masses(rings, step, highest, views)
        draws: dict[str, RingDraw | None] = dict.fromkeys(shares)
        if wanted is not None:
            for name in shares.keys() & rings.keys():
                draws[name] = self._draw(
                    rings[name], shares[name], wanted, name in wanted["rows"], views[name]
                )
        return {"masses": masses, "draws": draws, "dropped": dropped}

    def update(
        self,
        name: str,
        updates: Sequence[Update],
        step: int = 0,
        view: GenerationReader | None = None,
    ) -> int:
        """Set priorities of one ring's steps; return how many are there no more.

        Args:
            name: The ring's.
            updates: The oldest first.
            step: See `masses`.
            view: Of the ring now, where it is known.

        Raises:
            LockedError: Another process owns the priorities.
            SchemaError: Values do not fit the sampler.
        """
        ring = self._rings.get(name)
        count = sum(len(each["positions"]) for each in updates)
        if ring is None:
            return count
        prioritized = ring.prioritized
        if prioritized is not None and prioritized.where is None:
            # The first look at its priorities, which may be another process's.
            self._mass(ring, step, 0.0)
        try:
            view = ring.view if view is None or ring.buffer.closed else view
        except FailedError:
            if _is_gone(ring.buffer):
                return count
            raise
        dropped, update = 0, ask(ring.sampler, "update_priorities")
        for each in updates:
            with view.lock:
                try:
                    dropped += update(
                        view, each["env_ids"], each["positions"], each["values"], each["mask"]
                    )
                except StaleError:
                    # Rows that a power cut took back: they are not there any more.
                    dropped += len(each["positions"])
        return dropped

    def _mass(
        self, ring: _Ring, step: int, highest: float, view: GenerationReader | None = None
    ) -> Mass:
        sampler = ring.sampler
        while True:
            try:
                if view is None or ring.buffer.closed:
                    view = ring.view
                with view.lock:
                    view.check_current()
                    sampler.enter_at(highest)
                    prioritized = ring.prioritized
                    if prioritized is None:
                        return sampler.mass(view, step)
                    if prioritized.where is not None:
                        mass = sampler.mass(view, step)
                    else:
                        with warnings.catch_warnings():
                            # Refused below, with the process that has them.
                            warnings.simplefilter("ignore", DurabilityWarning)
                            mass = sampler.mass(view, step)
                    if (prioritized.where or "").startswith("RAM: "):
                        self._refuse(ring, prioritized)
                    return mass
            except ReplacedError:
                # Another thread followed a resize.
                view = None
            except RemovedError:
                # Its folder was deleted: the next look opens what is there by then.
                return Mass(0.0, 0, np.inf, 0.0)

    def _refuse(self, ring: _Ring, sampler: Sampler) -> None:
        """Refuse priorities in RAM: they are another process's, or would be lost."""
        where, cause = sampler.where, ask(sampler, "priorities").column.cause
        # The next call looks again: the other process may have ended.
        renewed = make(self.client["sampler"])
        ring.prioritized = _prioritized(renewed)
        ring.sampler = ring.buffer.sampler = renewed
        sampler.close()
        if isinstance(cause, LockedError) and cause.pid == os.getpid():
            raise LockedError(
                f"the priorities of {ring.folder} belong to another sampler of pid "
                f"{cause.pid}. Where it is that of learners with other settings, they "
                f"are given back {IDLE_S:g} s after the last of these ended. Use their "
                "settings, or give this one another name.",
                pid=cause.pid,
                host=cause.host,
            )
        if isinstance(cause, LockedError):
            raise LockedError(str(cause), pid=cause.pid, host=cause.host)
        kind = FullError if isinstance(cause, FullError) else FailedError
        raise kind(
            f"the priorities of {ring.folder} must be on disk, but are in "
            f"{(where or '').rstrip('.')}. Or pass PrioritizedSampler(name=None) to "
            "have them in memory."
        )

    def _draw(
        self,
        ring: _Ring,
        shares: Array,
        wanted: Wanted,
        rows: bool,
        view: GenerationReader | None = None,
    ) -> RingDraw | None:
        """Draw from one ring; None where it has no mass, or was deleted."""
        numbers = np.asarray(shares, np.float64)
        source = ring.sampler
        if "epoch" in wanted:
            source = self._at_epoch(ring, *wanted["epoch"])
        try:
            if rows:
                sampler = DrawAtShares(source, numbers, wanted["key"], UNWEIGHTED)
                return _of_batch(ring.buffer.sample_by(sampler, len(numbers)))
            while True:
                if view is None or ring.buffer.closed:
                    view = ring.view
                try:
                    with view.lock:
                        view.check_current()
                        draw = source.draw_at(view, numbers.copy())
                except ReplacedError:
                    view = None
                else:
                    break
            if ring.buffer.limit is not None:
                ring.buffer.limit.count(len(draw))
            return _of_draw(draw)
        except (EmptyError, RemovedError):
            return None

    # Epochs.

    @property
    def _draws_epochs(self) -> bool:
        return self._by_ranks

    def freeze(self, name: str) -> tuple[Array, Array]:
        """Return stops and counts of the legal starts of a ring now.

        Raises:
            SchemaError: The sampler draws no epochs.
        """
        ring = self._rings[name]
        while True:
            view = ring.buffer.view
            with suppress(ReplacedError), view.lock:
                view.check_current()
                return frozen_now(make(self.client["sampler"]), view)

    def _at_epoch(self, ring: _Ring, name: str, epoch: int) -> Sampler:
        """What draws from an epoch of a ring.

        Raises:
            StaleError: The ring does not know it.
        """
        with self._lock:
            sampler = ring.epochs.get((name, epoch))
            if sampler is not None:
                return sampler
            # The shard froze it in the ring's folder.
            frozen = FrozenEpochs(ring.folder, ring.uuid).get(name, epoch)
            if frozen is not None:
                # Batches of the epoch before may still be under way.
                while len(ring.epochs) >= NUM_EPOCHS:
                    ring.epochs.pop(next(iter(ring.epochs)))
                sampler = at_epoch(make(self.client["sampler"]), frozen, ring.uuid)
                ring.epochs[name, epoch] = sampler
                return sampler
        raise unknown_epoch(name, epoch, str(ring.folder))

    def close(self) -> None:
        """Close the rings, and make their priorities durable."""
        with self._lock:
            rings, self._rings = self._rings, {}
        for ring in rings.values():
            ring.buffer.close()


@dataclass(slots=True)
class _Served:
    """The draws for learners of one kind.

    Attributes:
        draws: Over the rings.
        listed_at: When the rings were listed last.
        asked_at: When a learner asked last.
    """

    draws: RingDraws
    listed_at: float = -math.inf
    asked_at: float = 0.0


class ShardDraws:
    """Draws from a node's rings, for any clients.

    Clients with the same sampler and transforms share priorities. Clients that differ
    need samplers of different names, or wait until the others have ended for `IDLE_S`.

    Threads: any may call.
    """

    def __init__(self, folders: Callable[[], Mapping[str, Path]]) -> None:
        """Make one.

        Args:
            folders: Lists the rings by name.
        """
        self._folders = folders
        self._by_client: dict[str, _Served] = {}
        self._epochs: dict[str, FrozenEpochs] = {}
        self._lock = threading.Lock()

    def masses(self, client: Client, step: int, highest: float) -> Masses:
        """Masses of all rings, also of new ones; see `RingDraws.masses`."""
        return self._served(client, 0.0).masses(step, highest)

    def exchange(
        self,
        client: Client,
        updates: Mapping[str, Sequence[Update]],
        wanted: Wanted | None,
        highest: float,
    ) -> Reply:
        """Set priorities, then draw; see `RingDraws.exchange`.

        A shard that was restarted opens its rings here, and new rings are looked for
        every second.
        """
        return self._served(client, LOOK_S).exchange(updates, wanted, highest)

    def freeze(
        self, client: Client, name: str, epoch: int, buffers: Sequence[str] | None
    ) -> dict[str, dict[str, Any] | None]:
        """Freeze an epoch, or say what was frozen for it; see `FrozenEpochs`.

        Args:
            client: What its learners draw by.
            name: Of the learners.
            epoch: Its number.
            buffers: uuids of all rings of the epoch; None to freeze nothing.

        Returns:
            By uuid of each ring here what it froze, as JSON; None where it has not.
        """
        draws = self._served(client, 0.0)
        found: dict[str, dict[str, Any] | None] = {}
        for ring, buffer in draws.buffers.items():
            epochs = self._epochs_of(buffer)
            frozen = epochs.get(name, epoch)
            if frozen is None and buffers is not None and epochs.uuid in buffers:
                look = partial(draws.freeze, ring)
                frozen = epochs.freeze(name, epoch, buffers, look)
            found[epochs.uuid] = None if frozen is None else frozen.to_json()
        return found

    def restore(self, client: Client, frozen: Mapping[str, Mapping[str, Any]]) -> None:
        """Remember epochs again that were frozen here; see `FrozenEpochs.put`.

        Args:
            client: What its learners draw by.
            frozen: By uuid of the ring, as JSON.

        Raises:
            FormatError: It is no epoch of the ring.
        """
        for buffer in self._served(client, 0.0).buffers.values():
            epochs = self._epochs_of(buffer)
            if epochs.uuid in frozen:
                each = dict(frozen[epochs.uuid])
                epoch = FrozenEpoch.from_json(each, f"epoch of {epochs.uuid}")
                if len(epoch.stops) != buffer.num_envs:
                    raise FormatError(
                        f"epoch {epoch.epoch} of ring {epochs.uuid} must be of "
                        f"{buffer.num_envs} environments, got {len(epoch.stops)}. Pass "
                        "what state_dict returned, unchanged."
                    )
                epochs.put(epoch)

    def epoch_names(self, start: str) -> list[str]:
        """Names of epochs that begin so, of all rings."""
        names: set[str] = set()
        for folder in self._folders().values():
            names.update(FrozenEpochs(folder, "").names(start))
        return sorted(names)

    def _epochs_of(self, buffer: ReplayBuffer) -> FrozenEpochs:
        uuid = buffer.metadata.uuid.hex()
        with self._lock:
            if uuid not in self._epochs:
                assert buffer.path is not None
                self._epochs[uuid] = FrozenEpochs(buffer.path, uuid)
            return self._epochs[uuid]

    def _served(self, client: Client, look_s: float) -> RingDraws:
        """The draws for a client, over rings that were listed lately."""
        name, now = client["name"], time.monotonic()
        with self._lock:
            ended = [
                self._by_client.pop(other)
                for other, each in list(self._by_client.items())
                if other != name and now - each.asked_at > IDLE_S
            ]
        for each in ended:
            each.draws.close()
        with self._lock:
            served = self._by_client.get(name) or _Served(RingDraws(client))
            if now - served.listed_at >= look_s:
                try:
                    served.draws.serve(self._folders())
                except FormatError:
                    # A ring may have been deleted since it was listed: once more.
                    served.draws.serve(self._folders())
                served.listed_at = now
            served.asked_at = now
            self._by_client[name] = served
        return served.draws

    def sums_of_priorities(self) -> dict[str, dict[str, float]]:
        """Sums as of the last request, by ring and by the name of the sampler."""
        with self._lock:
            own = [each.draws for each in self._by_client.values()]
        sums: dict[str, dict[str, float]] = {}
        for draws in own:
            prioritized = _prioritized(make(draws.client["sampler"]))
            if prioritized is None:
                continue
            for name, numbers in draws.known.items():
                key = getattr(prioritized, "name", None) or "in RAM"
                sums.setdefault(name, {})[key] = numbers[0]
        return sums

    def close(self) -> None:
        """Close all rings, and make priorities durable."""
        with self._lock:
            own, self._by_client = list(self._by_client.values()), {}
        for each in own:
            each.draws.close()


def _prioritized(sampler: Sampler) -> Sampler | None:
    """The sampler, or the one inside it, that has priorities."""
    return innermost(sampler) if traits_of(sampler).priorities else None


def _is_removed(buffer: ReplayBuffer) -> bool:
    """Whether a buffer's folder was deleted, or leads to another buffer."""
    try:
        return buffer.view is None
    except RemovedError:
        return True


def _is_gone(buffer: ReplayBuffer) -> bool:
    """Whether a ring was deleted, or was closed and could not be opened again."""
    return buffer.closed or _is_removed(buffer)


def _view_of(ring: _Ring) -> GenerationReader | None:
    """What there is of a ring now; None where its folder was deleted."""
    try:
        return ring.view
    except RemovedError:
        return None


def _numbers(mass: Mass) -> list[float]:
    return [mass.total, float(mass.num_legal), mass.lowest, mass.highest]


def _of_draw(draw: Draw) -> RingDraw:
    windows = draw.windows
    return {
        "env_ids": draw.env_ids,
        "positions": draw.positions,
        "probabilities": draw.probabilities,
        "windows": None if windows is None else windows.positions,
        "mask": None if windows is None else windows.mask,
        "is_first": None if windows is None else windows.is_first,
        "first_only": [] if windows is None else list(windows.first_only),
    }


def _of_batch(batch: Batch) -> RingDraw:
    return {
        "env_ids": batch.env_ids,
        "positions": batch.positions,
        "probabilities": batch.probabilities,
        "windows": batch.window_positions,
        "mask": batch.mask,
        "is_first": None,
        "first_only": [],
        "fields": dict(batch.fields),
        "bfloat16": sorted(batch.bfloat16),
    }
