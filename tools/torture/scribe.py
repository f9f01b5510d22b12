"""A writer that does everything a writer can, and says what it is about to do.

Its notes are what an opening after a crash is held to. They are plain arrays, so
that they can lie in memory shared with a process about to be killed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.format import commit
from mmreplay.ring import Ring, Span
from mmreplay.storage.commit_state import open_commit
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.store import rounded_up
from mmreplay.storage.zarr.engine import ZarrStore
from tools.torture.groups import GroupRows
from tools.torture.rows import MUTABLE, VERSIONS, Array, Columns, Geometry, content
from tools.torture.values import Values

NUM_NOTES = 7


@dataclass(slots=True)
class Notes:
    """What a writer did and was doing: int64 ``[E]`` each.

    Attributes:
        acked: Heads when the last call returned.
        attempted: Heads that the call under way, or any before it, would reach.
        tails: Positions below may have been given up on purpose.
        committed: Heads when the last commit returned.
        committing: Heads that a commit under way, or any before it, vouches for.
        removed: Positions below were given up on purpose when the last call returned.
        buried: The same of what the last commit that returned vouches for.
    """

    acked: Array
    attempted: Array
    tails: Array
    committed: Array
    committing: Array
    removed: Array
    buried: Array

    @classmethod
    def over(cls, memory: Any, num_envs: int) -> Notes:
        """Take notes in writable memory of `nbytes` bytes."""
        arrays = np.frombuffer(memory, np.int64, NUM_NOTES * num_envs)
        return cls(*arrays.reshape(NUM_NOTES, num_envs))

    @classmethod
    def blank(cls, num_envs: int) -> Notes:
        """Take notes in memory of one's own."""
        return cls.over(bytearray(cls.nbytes(num_envs)), num_envs)

    @staticmethod
    def nbytes(num_envs: int) -> int:
        """Bytes that notes take."""
        return 8 * NUM_NOTES * num_envs


@dataclass(slots=True)
class Scribe:
    """Writes at random until stopped.

    Attributes:
        buffer: Open for writing.
        geometry: Of the buffer.
        lineage: Of this session.
        notes: Kept up to date around every call.
        rng: Decides everything.
        values: What `write_field` gave rows; None where nobody takes note.
        busy: A call is under way.
    """

    buffer: ReplayBuffer
    geometry: Geometry
    lineage: int
    notes: Notes
    rng: np.random.Generator
    commit_chance: float = 0.1
    values: Values | None = None
    busy: bool = field(default=False)

    def step(self) -> None:
        """Make one call."""
        draw = self.rng.random()
        if draw < self.commit_chance:
            self.commit()
        elif draw < self.commit_chance + 0.005:
            self.clear()
        elif draw < self.commit_chance + 0.010:
            self.resize()
        elif draw < self.commit_chance + 0.05:
            self.look_ahead()
        elif draw < self.commit_chance + 0.09:
            self.set()
        elif draw < self.commit_chance + 0.12:
            self.dequeue()
        elif draw < 0.45:
            self.extend()
        else:
            self.add()

    def add(self) -> None:
        """Add one step, of all environments or of some."""
        env_ids = self._env_ids()
        finals = bool(self.rng.random() < 0.5)
        columns, ends, final = self._steps(1, env_ids, finals)
        kept = {path: column[0] for path, column in columns.items()}
        self._attempt(env_ids, ends)
        last = None if final is None else final[0]
        self.buffer.add(kept, final_observation=last, env_ids=self._named(env_ids))
        self._acknowledge()

    def extend(self) -> None:
        """Add many steps, now and then more than fit."""
        env_ids = self._env_ids()
        ring = self.buffer.metadata.ring
        steps = int(self.rng.integers(1, 2 * ring.reserve + 3))
        finals = bool(self.rng.random() < 0.5)
        if self.rng.random() < 0.01:
            steps = ring.capacity + int(self.rng.integers(1, 6))
        columns, ends, final = self._steps(steps, env_ids, finals)
        self._attempt(env_ids, ends)
        self.buffer.extend(columns, final_observation=final, env_ids=self._named(env_ids))
        self._acknowledge()

    def set(self) -> None:
        """Give a stretch of rows, or some rows, another value."""
        span = self.buffer.span
        env_id = int(self.rng.integers(self.geometry.num_envs))
        first, stop = int(span.first[env_id]), int(span.stop[env_id])
        if first == stop:
            return
        positions = np.arange(first, stop)[:: int(self.rng.integers(1, 4))]
        env_ids = np.full(len(positions), env_id)
        version = int(self.rng.integers(1, VERSIONS))
        origins = self.buffer.get_field("origin", env_ids, positions).astype(np.int64)
        # A final row repeats the step before it.
        steps, lineages = origins[:, 1], origins[:, 2]
        own = content(self.geometry, env_ids, steps, lineages)[MUTABLE]
        if self.values is not None:
            self.values.begin(env_id, positions, version)
        self.buffer.write_field(MUTABLE, env_ids, positions, own + np.uint8(version))
        if self.values is not None:
            self.values.end()

    def dequeue(self) -> None:
        """Take the oldest rows of some environments."""
        env_ids, span = self._env_ids(), self.buffer.span
        held = span.lengths[env_ids]
        if not len(env_ids) or not held.min():
            return
        count = int(self.rng.integers(1, min(4, held.min()) + 1))
        firsts = span.first[env_ids] + count
        tails = self.notes.tails
        tails[env_ids] = np.maximum(tails[env_ids], firsts)
        self.buffer.dequeue(count, self._named(env_ids))
        self.notes.removed[env_ids] = firsts

    def commit(self) -> None:
        """Commit what is published."""
        heads = self._commit_begins()
        removed = self.notes.removed.copy()
        self.busy = True
        self.buffer.commit()
        self.busy = False
        self._commit_ends(heads)
        self.notes.buried[:] = np.maximum(self.notes.buried, removed)

    def clear(self) -> None:
        """Give up some environments' rows, which commits too."""
        env_ids = self._env_ids()
        heads = self._commit_begins()
        self.notes.tails[env_ids] = np.maximum(self.notes.tails, heads)[env_ids]
        self.buffer.clear(self._named(env_ids))
        self._commit_ends(heads)
        removed = self.notes.removed
        removed[env_ids] = np.maximum(removed[env_ids], heads[env_ids])
        self.notes.buried[:] = removed

    def resize(self) -> None:
        """Move to another ring, which commits too."""
        heads = self._commit_begins()
        least = max(1, self.geometry.capacity // 2)
        capacity = int(self.rng.integers(least, self.geometry.capacity + 1))
        smallest = min(capacity, self.buffer.capacity)
        self.notes.tails[:] = np.maximum(self.notes.tails, heads - smallest)
        self.buffer.resize(capacity)
        self._commit_ends(heads)

    def look_ahead(self) -> None:
        """Raise the durable limits as the commit thread does."""
        committer = self.buffer._files.committer
        assert committer is not None
        if self.geometry.heap_bytes is not None:
            # It commits, too, where half of a heap is not committed.
            self._commit_begins()
        committer._turn(math.inf)

    def close(self, seal: bool = True) -> None:
        """Close in order; see `ReplayBuffer.close`."""
        heads = self._commit_begins()
        self.buffer.close(seal)
        self._commit_ends(heads)

    def _env_ids(self) -> Array:
        num_envs = self.geometry.num_envs
        every = np.arange(num_envs)
        if num_envs == 1 or self.rng.random() < 0.7:
            return every
        return (
            np.flatnonzero(self.rng.random(num_envs) < 0.5)
            if num_envs > 3
            else (self.rng.permutation(num_envs)[: int(self.rng.integers(1, num_envs))])
        )

    def _named(self, env_ids: Array) -> Array | None:
        return None if len(env_ids) == self.geometry.num_envs else env_ids

    def _steps(
        self, steps: int, env_ids: Array, finals: bool
    ) -> tuple[Columns, Array, NDArray[np.generic] | None]:
        """Steps ``[T, E, *shape]``, the heads after them, and final observations."""
        positions = np.empty((steps, len(env_ids)), np.int64)
        now = self.buffer.heads[env_ids]
        for step in range(steps):
            positions[step] = now
            now = now + 1
            if finals:
                made = self._content(env_ids, positions[step])
                now = now + np.logical_or(made["terminated"], made["truncated"])
        flat_ids = np.tile(env_ids, steps)
        columns = self._content(flat_ids, positions.ravel())
        lead = (steps, len(env_ids))
        wide = {p: c.reshape(*lead, *c.shape[1:]) for p, c in columns.items()}
        if not finals:
            return wide, now, None
        after = self._content(flat_ids, positions.ravel() + 1)["observation"]
        return wide, now, after.reshape(*lead, -1)

    def _content(self, env_ids: Array, positions: Array) -> Columns:
        lineages = np.full(len(positions), self.lineage)
        return content(self.geometry, env_ids, positions, lineages)

    def _attempt(self, env_ids: Array, ends: Array) -> None:
        attempted = self.notes.attempted
        attempted[env_ids] = np.maximum(attempted[env_ids], ends)
        if self.commits_at_adds:
            self.notes.committing[:] = np.maximum(self.notes.committing, attempted)

    @property
    def commits_at_adds(self) -> bool:
        """An add may commit: shards of what is committed take values from a heap."""
        geometry = self.geometry
        return geometry.engine == "zarr" and geometry.heap_bytes is not None

    def _acknowledge(self) -> None:
        self.notes.acked[:] = self.buffer.heads

    def _commit_begins(self) -> Array:
        heads = self.buffer.heads
        self.notes.committing[:] = np.maximum(self.notes.committing, heads)
        return heads

    def _commit_ends(self, heads: Array) -> None:
        if self.values is not None:
            self.values.committed()
        self.notes.committed[:] = np.maximum(self.notes.committed, heads)


def highest_lift(notes: Notes, ring: Ring, multiple: int) -> Array:
    """Positions below may have been given up for what was being written."""
    return rounded_up(notes.attempted + ring.reserve, multiple) - ring.slots


def broken_promises(
    buffer: ReplayBuffer, notes: Notes, low: Array, high: Array, removed: Array
) -> list[str]:
    """What an opening lost, invented or gave up against the notes.

    Args:
        buffer: Just opened.
        notes: Of the writers before.
        low: int64 ``[E]``, heads that must be there.
        high: int64 ``[E]``, heads above which nothing may be.
        removed: int64 ``[E]``, positions below which nothing may be.
    """
    span, metadata = buffer.span, buffer.metadata
    ring, heap_nbytes = metadata.ring, metadata.heap_nbytes
    lift = highest_lift(notes, ring, buffer._files.store.limit_step)
    found = []
    if (span.stop < low).any():
        found.append(f"lost: heads {span.stop} of at least {low}")
    invented = span.stop > np.maximum(high, lift)
    ends_rows = bool(heap_nbytes) and metadata.engine != "zarr"
    if ends_rows:
        # Heads at tails that were raised past them, with no row alive.
        invented &= (span.first < span.stop) | (span.stop > notes.attempted)
    if invented.any():
        found.append(f"invented: heads {span.stop} of at most {high}")
    allowed = np.maximum(np.maximum(span.stop - ring.capacity, lift), notes.tails)
    early = span.first > np.maximum(allowed, 0)
    if ends_rows:
        early &= ~heap_needed(buffer, notes)
    if early.any():
        found.append(f"given up: first {span.first}, expected at most {allowed}")
    if (span.first < np.minimum(removed, span.stop)).any():
        found.append(f"came back: first {span.first}, expected at least {removed}")
    return found


def heap_needed(buffer: ReplayBuffer, notes: Notes) -> NDArray[np.bool_]:
    """Where the heap could not have held the rows from one before the first on.

    It is counted with what was being written, a reserve, and what is skipped where the
    ring ends: bool ``[E]``.
    """
    metadata, span = buffer.metadata, buffer.span
    longest = metadata.schema.max_heap_nbytes
    reserve = max(metadata.heap_nbytes // 16, longest)
    needed = []
    for env_id, (first, stop) in enumerate(zip(span.first, span.stop, strict=True)):
        # The row before the first may have been as long as any.
        nbytes = longest
        positions = np.arange(first, stop)
        for path in metadata.schema.varying:
            env_ids = np.full_like(positions, env_id)
            values: Any = buffer.get_field(path, env_ids, positions)
            sizes = values.lengths * metadata.schema[path].inner_nbytes
            nbytes += int((-(-sizes // 8) * 8).sum())
        ahead = max(0, int(notes.attempted[env_id] - stop))
        needed.append(nbytes + ahead * longest + reserve + longest)
    return np.array(needed) > metadata.heap_nbytes


def broken_closing(group: GroupRows | None, span: Span, seal: bool) -> list[str]:
    """What the group of a buffer that was closed in order tells otherwise than it held.

    Args:
        group: By the group.
        span: Of the buffer when it was closed.
        seal: Its newest rows were to be in shards too.
    """
    if group is None:
        return ["group silent: its buffer was closed in order"]
    same = (group.first == span.first).all() and (group.stop == span.stop).all()
    if same and ((group.sealed == group.stop).all() or not seal):
        return []
    return [
        f"group closed otherwise: first {group.first}, stop {group.stop}, sealed "
        f"{group.sealed}, expected {span} and seal={seal}"
    ]


def _durable_tails(buffer: ReplayBuffer) -> Array:
    """Tails of the newest durable record, int64 ``[E]``."""
    metadata, path = buffer.metadata, buffer.path
    num_envs, heap_nbytes = metadata.ring.num_envs, metadata.heap_nbytes
    assert path is not None
    folder = path / metadata.folder
    file, data = open_commit(folder, num_envs, heap_nbytes, writable=False)
    file.close()
    durable = commit.newest_durable(
        commit.split(data, metadata.uuid, metadata.generation, num_envs, heap_nbytes)
    )
    assert durable is not None
    return durable.tails


def broken_sums(buffer: ReplayBuffer, rng: np.random.Generator) -> list[str]:
    """Which whole committed blocks of some environments disagree with their sums."""
    store, ring, span = buffer._files.store, buffer.metadata.ring, buffer.span
    assert isinstance(store, MemmapStore | ZarrStore)
    size = ring.block_rows
    committed = buffer.committed
    durable_tails = _durable_tails(buffer)
    some = rng.permutation(ring.num_envs)[:4].tolist()
    for env_id in some:
        first = -(-int(span.first[env_id]) // size)
        # Heads at durable tails that passed them vouch for no block below.
        first = max(first, int(durable_tails[env_id]) // size)
        for block in range(first, int(committed[env_id]) // size):
            kept = store.read_sum(env_id, block)
            lap = (block // ring.num_blocks) & 0xFFFFFFFF
            if kept != (store.checksum(env_id, block), lap):
                return [f"wrong sum: env {env_id} block {block} lap {lap}: {kept}"]
    return []
