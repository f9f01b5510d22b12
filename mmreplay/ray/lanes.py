"""Environments of one ring, lent to writers without a disk; each block arrives once.

An environment of a thin writer is a *lane*: one environment of the ring, to which that
writer alone adds rows while its lease holds. The lane's head is the record of what
arrived, since rows and heads are published by one store: a block names the heads that
it follows, and is added if these are the heads. So a block that is sent again is added
once, whoever was killed in between, and no other record of blocks is needed.

`writers.json` (mmreplay/format/ray_files.py) says which writer has which lanes, and at
which heads its lease began. It is durable before the writer learns of its lease. The
first rows of a lease do not continue the episode before them. That end is declared
with the block that stores it, and not with the lease: nothing forgets it in between.

The folder may be removed, or another one put in its place, while it is open: each call
looks first, so that no row goes where it is no row of the run.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer, number
from mmreplay.buffer.opening import StrPath, absolute, holds_buffer
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError, RemovedError, SchemaError
from mmreplay.format import ray_files
from mmreplay.format.ray_files import IDLE_S, Lease, Leases
from mmreplay.limiter import RateLimiter
from mmreplay.nesting import unflatten
from mmreplay.ray.agreement import check_same, described, differing
from mmreplay.ray.limits import RingCounter, limiter_of
from mmreplay.schema import Schema
from mmreplay.schema.schema import refuse_varying

THIN = "thin"
"""The folder of a run's ring of thin writers, beside those of its other rings."""

Columns = Mapping[str, NDArray[Any]]


class Answer(TypedDict):
    """What a writer is answered.

    Attributes:
        state: ``"holds"``; ``"ended"``: others may have its lanes; ``"unknown"``: there
            is no such lease.
        heads: Heads of its lanes; where the lease ended, those at that time.
        committed: Heads that a power cut would leave, likewise.
        ring: `ReplayBuffer.files_identity` of the ring, which the shard adds.
    """

    state: Literal["holds", "ended", "unknown"]
    heads: list[int]
    committed: list[int]
    ring: NotRequired[str]


class Terms(Answer):
    """What a writer learns of its lease.

    Attributes:
        reserve: The ring's; a block has at most half as many steps.
        autoreset: The ring's.
        limiter: Settings of the run's rate limiter; None where the ring has none.
    """

    reserve: int
    autoreset: str
    limiter: list[float] | None


def create_lanes(
    path: StrPath,
    schema: Schema,
    capacity: int,
    num_lanes: int,
    *,
    idle_s: float = IDLE_S,
    limiter: RateLimiter | None = None,
    **create: Any,
) -> bytes | None:
    """Make the ring of thin writers, unless there is one; may be repeated after a kill.

    Args:
        path: Its folder.
        schema: The fields of one step.
        capacity: Rows of each lane.
        num_lanes: Environments of all writers together.
        idle_s: Seconds without a call of a writer after which others may get its
            lanes; of a new ring.
        limiter: Of the whole run; None leaves the ring as it is.
        **create: More arguments of `ReplayBuffer.create`.

    Returns:
        The uuid of the ring that was made; None where there was one.

    Raises:
        SchemaError: An argument is not legal, another ring is there, or the ring has
            another limiter.
        LockedError: Another process writes the ring.
        FullError: No space is left.
    """
    folder = absolute(path)
    described(schema)
    refuse_varying(schema, "a ring of thin writers, unlike one of mr.ray.writer,")
    number("idle_s", idle_s, above=0)
    counter = None if limiter is None else RingCounter(limiter)
    made = None
    if not holds_buffer(folder):
        with ReplayBuffer.create(
            folder, schema, capacity, num_lanes, limiter=counter, **create
        ) as ring:
            made = ring.metadata.uuid
    with ReplayBuffer.open(folder, limiter=counter) as ring:
        check_same(ring, schema, capacity, num_lanes, create)
        if ring.heads.any() and not has_lanes(folder):
            raise SchemaError(
                f"{folder} is a ring with a writer of its own. Give the ring of thin "
                "writers another folder."
            )
    if not has_lanes(folder):
        # What makes it a ring of thin writers.
        ray_files.write_leases(folder, Leases((), idle_s))
    return made


def has_lanes(folder: Path) -> bool:
    """Whether a ring is one of thin writers, which its shard writes."""
    return (folder / ray_files.FOLDER / ray_files.WRITERS).is_file()


class Lanes:
    """Leases of one ring, and the blocks of their writers.

    Each call takes the lock, so that any threads may call. All may be repeated: after
    any error the same call again is answered as if nothing had happened. All raise
    `RemovedError` once the folder is not in its place.

    Attributes:
        ring: Open for writing; nothing else adds rows to it.
    """

    def __init__(self, ring: ReplayBuffer, clock: Callable[[], float] = time.monotonic) -> None:
        """Take over an open ring; `open_lanes` opens one.

        Args:
            ring: Opened with ``on_resume="continue"``, as environments went on.
            clock: Seconds, of any beginning.

        Raises:
            FormatError: Its ``writers.json`` is damaged.
        """
        assert ring.path is not None
        self.ring, self._folder = ring, ring.path
        self._clock = clock
        # Nobody reads warnings of this process, and ends are declared with their rows.
        ring.skip_autoreset_check()
        noted = ray_files.read_leases(ring.path)
        self._idle_s = noted.idle_s
        self._leases = {lease.writer: lease for lease in noted.leases}
        # A shard that was away heard of no writer meanwhile.
        self._last_call = dict.fromkeys(self._leases, clock())
        self._lock = threading.RLock()

    @property
    def num_free(self) -> int:
        """Lanes without a lease, or of writers that were silent for long.

        Without the lock, which a slow disk holds for long.
        """
        self._refuse_moved()
        idle = sum(len(lease.env_ids) for lease in self._idle())
        return len(self._free()) + idle

    def lease(
        self,
        writer: str,
        num_envs: int,
        fields: list[dict[str, Any]],
        roles: dict[str, str],
        former: str | None = None,
    ) -> Terms:
        """Give a writer lanes, or say again what it has.

        Args:
            writer: 32 hexadecimal digits, others for each lease.
            num_envs: Lanes that it needs.
            fields: Of its schema, as JSON.
            roles: Likewise.
            former: A lease of the same writer that ends with this call, and whose lanes
                it gets: its rows did not all survive, so its episodes end.

        Raises:
            SchemaError: The ring has other fields, or fewer environments in all.
            FailedError: Other writers have the lanes.
            FormatError: The limiter of the ring is damaged.
            FullError: No space is left to note it; nothing has changed.
        """
        with self._lock:
            self._refuse_moved()
            known = self._leases.get(writer)
            if known is None:
                _check_schema(Schema.from_json(fields, roles), self.ring)
                known = self._begin(writer, num_envs, former)
            self._last_call[writer] = self._clock()
            limiter = limiter_of(self._folder)
            return {
                **self._answer(known),
                "reserve": self.ring.metadata.ring.reserve,
                "autoreset": self.ring.autoreset,
                "limiter": None if limiter is None else list(limiter.settings),
            }

    def extend(
        self,
        writer: str,
        first: Sequence[int],
        columns: Columns | None,
        final: Columns | None = None,
        commit: bool = False,
        envs: Sequence[int] | None = None,
    ) -> Answer:
        """Add a block of a writer, if it is the next one, and answer the heads.

        The block is in if, and only if, the heads are past it.

        Args:
            writer: Whose lease holds; all others are answered, and add nothing.
            first: The heads that the block follows, of all lanes of the writer.
            columns: Per path ``[T, E, *shape]``, at most half the ring's reserve of
                steps; None to ask for the heads alone.
            final: Likewise, of the observation's fields: what each ended episode ended
                with.
            commit: Make all rows so far survive a power cut.
            envs: ``[E]``, the lanes that the block has, by their numbers in the lease;
                None for all.

        Raises:
            SchemaError: The block does not fit the ring.
            FullError: No space is left; nothing of the block is visible.
            FailedError: The disk refused.
        """
        with self._lock:
            self._refuse_moved()
            lease = self._leases.get(writer)
            if lease is None:
                return {"state": "unknown", "heads": [], "committed": []}
            self._last_call[writer] = self._clock()
            if lease.stop is None:
                if columns and self._heads(lease) == list(first):
                    self._add(lease, columns, final, envs)
                if commit:
                    self.ring.commit()
            return self._answer(lease)

    def give_back(self, writer: str) -> Answer:
        """End a lease; its lanes are free.

        Raises:
            FullError: No space is left to note it; it still holds.
            FailedError: The disk refused.
        """
        with self._lock:
            self._refuse_moved()
            lease = self._leases.get(writer)
            if lease is None:
                return {"state": "unknown", "heads": [], "committed": []}
            if lease.stop is None:
                self._write(self._ended([lease]))
            return self._answer(self._leases[writer])

    def close(self) -> None:
        """Commit and close the ring; leases hold."""
        with self._lock:
            self.ring.close()

    def _add(
        self, lease: Lease, columns: Columns, final: Columns | None, envs: Sequence[int] | None
    ) -> None:
        """Add one block in one publication, so that it is in whole or not at all."""
        steps, half = len(next(iter(columns.values()))), self._max_steps
        if not 1 <= steps <= half:
            raise SchemaError(
                f"a block must have 1 to {half} steps, half of the ring's reserve, "
                f"got {steps}. Use the mmreplay of the shard."
            )
        heads = self._heads(lease)
        own = range(len(heads)) if envs is None else envs
        env_ids = [lease.env_ids[env] for env in own]
        begins = [lease.env_ids[env] for env in own if heads[env] == lease.first[env]]
        if begins:
            # Here and not when the lease began, which a restart would forget.
            self.ring.end_episodes(begins)
        self.ring.extend(
            columns,
            final_observation=None if final is None else _nested(self.ring, final),
            env_ids=env_ids,
        )

    @property
    def _max_steps(self) -> int:
        return max(1, self.ring.metadata.ring.reserve // 2)

    @property
    def in_place(self) -> bool:
        """Whether the ring is open, and its path leads to it."""
        return not self.ring.closed and self.ring.in_place

    def _refuse_moved(self) -> None:
        """Refuse to use a ring of which rows would be no rows of the run.

        Raises:
            RemovedError: It is not in place.
        """
        if not self.in_place:
            raise RemovedError(
                f"{self._folder} was removed or replaced while it was open. Open what "
                "is there now.",
                errno_=errno.ESTALE,
            )

    def _answer(self, lease: Lease) -> Answer:
        if lease.stop is not None:
            # It was committed before it ended.
            heads = list(lease.stop)
            return {"state": "ended", "heads": heads, "committed": list(heads)}
        committed = self.ring.committed[list(lease.env_ids)]
        heads = self._heads(lease)
        return {"state": "holds", "heads": heads, "committed": committed.tolist()}

    def _heads(self, lease: Lease) -> list[int]:
        heads: list[int] = self.ring.published[list(lease.env_ids)].tolist()
        return heads

    def _begin(self, writer: str, num_envs: int, former: str | None) -> Lease:
        """Note a new lease, and the end of those whose lanes it gets."""
        wanted = integer("num_envs", num_envs, 1)
        if wanted > self.ring.num_envs:
            raise SchemaError(
                f"num_envs must be at most {self.ring.num_envs}, the environments of "
                f"{self._folder}, got {wanted}. Use another shard, or more writers."
            )
        before = self._leases.get(former or "")
        if before is not None and before.stop is None:
            ended, env_ids = [before], before.env_ids
        else:
            ended, env_ids = self._find(wanted)
        heads = self.ring.published[list(env_ids)].tolist()
        lease = Lease(writer, tuple(env_ids), tuple(heads))
        # In one write: no kill leaves a lease ended, and the other one not begun.
        self._write({**self._ended(ended), writer: lease})
        return lease

    def _find(self, wanted: int) -> tuple[list[Lease], tuple[int, ...]]:
        """Find lanes; where too few are free, those of silent writers, longest first.

        Returns:
            Leases that end, and the lanes.
        """
        free, ended = self._free(), []
        for lease in self._idle():
            if len(free) >= wanted:
                break
            ended.append(lease)
            free += lease.env_ids
        if len(free) < wanted:
            num = len(self._holding()) - len(ended)
            others = f"{num} other writers have" if num != 1 else "1 other writer has"
            raise FailedError(
                f"{self._folder} has {len(free)} of {self.ring.num_envs} environments "
                f"free, as {others} the rest, but {wanted} are needed. "
                "Close a writer, or make a ring of more environments."
            )
        return ended, tuple(free[:wanted])

    def _holding(self) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.stop is None]

    def _free(self) -> list[int]:
        used = {env for lease in self._holding() for env in lease.env_ids}
        return [env for env in range(self.ring.num_envs) if env not in used]

    def _idle(self) -> list[Lease]:
        """Leases whose writers were silent for long, the longest first."""
        since, now = self._last_call, self._clock()
        silent_s = {lease: now - since.get(lease.writer, now) for lease in self._holding()}
        idle = [lease for lease in silent_s if silent_s[lease] >= self._idle_s]
        return sorted(idle, key=lambda lease: -silent_s[lease])

    def _ended(self, ended: Sequence[Lease]) -> dict[str, Lease]:
        """Return all leases, some of them ended now; they are not noted yet."""
        if ended:
            # A writer that comes back drops what arrived by then: a power cut must
            # not take it away.
            self.ring.commit()
        leases = dict(self._leases)
        for lease in ended:
            # As the newest one that ended.
            del leases[lease.writer]
            stop = tuple(self._heads(lease))
            leases[lease.writer] = replace(lease, stop=stop)
        return leases

    def _write(self, leases: dict[str, Lease]) -> None:
        new = Leases(tuple(leases.values()), self._idle_s)
        written = ray_files.write_leases(self._folder, new)
        self._leases = {lease.writer: lease for lease in written.leases}
        now = self._clock()
        self._last_call = {writer: self._last_call.get(writer, now) for writer in self._leases}


def open_lanes(folder: Path, **options: Any) -> Lanes:
    """Open the ring of thin writers that `create_lanes` made.

    Args:
        folder: Its folder.
        **options: More arguments of `ReplayBuffer.open`.

    Raises:
        LockedError: Another process writes it.
        FormatError: It is damaged, or its ``writers.json`` is.
    """
    ring = ReplayBuffer.open(folder, "r+", on_resume="continue", **options)
    try:
        return Lanes(ring)
    except BaseException:
        ring.close()
        raise


def _check_schema(schema: Schema, ring: ReplayBuffer) -> None:
    if schema != ring.schema:
        raise SchemaError(
            f"{ring.path} has another schema: {differing(schema, ring.schema)}. Write "
            "its fields, or name another run."
        )


def _nested(ring: ReplayBuffer, final: Columns) -> object:
    """Return final observations by path as `ReplayBuffer.extend` takes them."""
    role = ring.schema.role("observation")
    assert role is not None
    if set(final) == {role}:
        return final[role]
    return unflatten({path.removeprefix(f"{role}/"): final[path] for path in final})


def counts_after(
    first: NDArray[np.int64], ended: NDArray[np.bool_], final: bool
) -> NDArray[np.int64]:
    """Heads after a block, which the writer computes as the ring does.

    Args:
        first: int64 ``[E]``, heads before it.
        ended: bool ``[T, E]``, steps that end an episode.
        final: Whether a row with the final observation follows each of them.
    """
    return first + len(ended) + (ended.sum(axis=0) if final else 0)
