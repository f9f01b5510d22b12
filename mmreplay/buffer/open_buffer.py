"""What an open buffer tells about itself, whoever opened it and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.batch import Batch
from mmreplay.buffer import lifecycle
from mmreplay.buffer.generations import Generations
from mmreplay.buffer.limiting import Limit, Limiter
from mmreplay.buffer.mapped import mapped
from mmreplay.buffer.reading import Reading
from mmreplay.buffer.snapshot import Snapshot, snapshot
from mmreplay.buffer.state import read_statistics, write_statistics
from mmreplay.buffer.view import LiveView
from mmreplay.buffer.writer import Hold
from mmreplay.episodes import EpisodeIndex
from mmreplay.errors import FailedError
from mmreplay.format.metadata import Autoreset, Metadata
from mmreplay.recovery import Recovery
from mmreplay.ring import Layout, Span
from mmreplay.samplers.base import Draw, Sampler
from mmreplay.schema import Schema
from mmreplay.storage.policy import ReadPolicy
from mmreplay.storage.residency import Memory, measure
from mmreplay.storage.zarr import ZarrStore


class OpenBuffer(Generations):
    """An open buffer as it is now; see `ReplayBuffer`.

    Attributes:
        limit: This process's side of a rate limiter, if it has one.
    """

    sampler: Sampler
    limit: Limit | None = None

    def _limit_by(self, limiter: Limiter | None) -> None:
        """Apply a limiter; one that does not fit leaves nothing open."""
        if limiter is None:
            return
        ring = self._parts.metadata.ring
        try:
            self.limit = limiter.bind(
                self.path, ring.capacity * ring.num_envs, self._count
            )
        except BaseException:
            self._give_back()
            raise

    def _count(self) -> tuple[int, int]:
        """Rows ever written, and rows alive."""
        if self._parts.writer is None or self._parts.closed:
            span = self.span
            return int(span.stop.sum()), int(span.lengths.sum())
        ledger, capacity = self._parts.ledger, self._parts.metadata.ring.capacity
        heads = ledger.heads
        firsts = np.maximum(ledger.tails, heads - capacity)
        return int(heads.sum()), int((heads - firsts).sum())

    def _give_back(self) -> None:
        """Close everything, its place in a limiter too."""
        limit, self.limit = self.limit, None
        try:
            super()._give_back()
        finally:
            if limit is not None:
                limit.close()

    def __len__(self) -> int:
        """Steps alive, of all environments; final rows are not counted."""
        return self._read().index.num_steps

    def __repr__(self) -> str:
        """Say what the buffer is and holds."""
        if self._parts.closed:
            return f"<ReplayBuffer {self._name} (closed)>"
        metadata = self.metadata
        ring = metadata.ring
        mode = "r" if self._parts.writer is None else "r+"
        return (
            f"<ReplayBuffer {self._name} {mode!r}: {len(self):,} steps of "
            f"{ring.num_envs} x {ring.capacity:,}, {len(metadata.schema)} fields, "
            f"{metadata.engine}, {ring.layout}>"
        )

    @property
    def metadata(self) -> Metadata:
        """What metadata.json says; of a closed buffer, what it said last."""
        if self._parts.writer is None and not self._parts.closed:
            # A reader looks whether its writer resized the buffer meanwhile.
            self._read()
        return self._parts.metadata

    @property
    def schema(self) -> Schema:
        """The fields of one step."""
        return self.metadata.schema

    @property
    def capacity(self) -> int:
        """Rows kept per environment."""
        return self.metadata.ring.capacity

    @property
    def slots(self) -> int:
        """Rows per environment on disk: the capacity and the ring's slack."""
        return self.metadata.ring.slots

    @property
    def layout(self) -> Layout:
        """How rows follow each other in the files."""
        return self.metadata.ring.layout

    @property
    def num_envs(self) -> int:
        """Environments."""
        return self._parts.metadata.ring.num_envs

    @property
    def autoreset(self) -> Autoreset:
        """What the row after an episode's end is."""
        return self._parts.metadata.autoreset

    @property
    def span(self) -> Span:
        """What is alive now: positions ``[first, stop)``, int64 ``[E]`` each."""
        return self._read().span

    @property
    def heads(self) -> NDArray[np.int64]:
        """int64 ``[E]``, the next position to be written."""
        return self._read().span.stop

    @property
    def tails(self) -> NDArray[np.int64]:
        """int64 ``[E]``; rows below were cleared, dequeued, or lost to a power cut.

        The oldest row alive is at ``span.first``, never below: what the ring itself
        gives up, as heads go on, moves no tail.
        """
        self._read()
        return self._parts.ledger.tails.copy()

    def flags(self, env_ids: ArrayLike, positions: ArrayLike) -> NDArray[np.uint8]:
        """What rows are to their episodes.

        Args:
            env_ids: int, any shape that broadcasts with positions.
            positions: int, any shape; final rows are legal.

        Returns:
            uint8 ``[*broadcast]``, sums of the constants in `mmreplay.episodes`:
            START 1 (an episode begins here), TERMINATED 2, TRUNCATED 4, FINAL 8 (no
            step: it holds what followed the last one), BREAK 16 (START is a
            resume's or a clear's, not the environment's), CUT 32 (the step before
            is told as truncated).

        Raises:
            SchemaError: An environment is unknown.
            StaleError: A position is not in the buffer.
        """
        return self._in_force(lambda r: r.flags(env_ids, positions))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 ``[E]``, steps alive per environment."""
        return self._read().index.sizes()

    @property
    def episodes(self) -> EpisodeIndex:
        """The episodes alive now."""
        return self._read().index

    @property
    def view(self) -> LiveView:
        """What samplers are given: spans and boundaries, brought up to date."""
        return self._read().view

    @property
    def reading(self) -> Reading:
        """What reads the generation in force, brought up to date; for loaders."""
        return self._read()

    @property
    def read_policy(self) -> ReadPolicy:
        """How it was opened to read."""
        return self._parts.policy

    @property
    def recovery(self) -> Recovery:
        """What opening found."""
        return self._parts.recovery

    @property
    def committed(self) -> NDArray[np.int64]:
        """int64 ``[E]``, heads that a power cut would leave."""
        if self._parts.committer is None:
            return self._parts.recovery.committed
        return self._parts.committer.committed

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._parts.writer is not None

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._parts.closed

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the data files: (apparent, allocated on disk)."""
        self._read()
        return self._parts.store.disk_nbytes()

    @property
    def zarr_path(self) -> Path | None:
        """The Zarr group of an ``engine="zarr"`` buffer, for any Zarr reader; or None.

        It holds every row alive once the buffer is closed; before, the sealed ones.
        """
        store = self._parts.store
        return store.path if isinstance(store, ZarrStore) else None

    @property
    def compression(self) -> dict[str, tuple[int, int]]:
        """Per path, (bytes of its shards, bytes of the rows in them); of zarr only."""
        self._read()
        store, heads = self._parts.store, self._parts.ledger.heads
        return store.compression(heads) if isinstance(store, ZarrStore) else {}

    def memory(self) -> Memory:
        """What the buffer's files and this process have in memory; see `Memory`."""
        return measure(self._read().paths)

    def take(self, env_ids: ArrayLike, positions: ArrayLike, *, key: int = 0) -> Batch:
        """Gather given steps as `sample` does, through the buffer's transforms.

        Args:
            env_ids: int ``[B]``, or what broadcasts with positions.
            positions: int ``[B]``.
            key: What transforms draw by, such as ``batch.key``.

        Raises:
            StaleError: A position is not in the buffer, or cannot be drawn.
        """
        return self._in_force(lambda r: r.take(env_ids, positions, key))

    def gather(self, draw: Draw) -> Batch:
        """Gather a draw that a sampler made of this buffer's `view`, here or elsewhere.

        Args:
            draw: Steps or windows, which are read through the buffer's transforms.

        Raises:
            StaleError: A step is not in the buffer any more, or cannot be drawn.
        """
        return self._in_force(lambda r: r.drawing.gather(draw))

    def gather_all(self) -> Batch:
        """Gather every row alive, oldest first, environment by environment.

        Final rows are included, and told by ``batch.fields["final"]``, bool
        ``[B]`` (which a field of that name of the schema's own takes the place of).
        """
        return self._in_force(lambda r: r.gather_all())

    def get_field(
        self, path: str, env_ids: ArrayLike, positions: ArrayLike
    ) -> NDArray[np.generic]:
        """Read one field of given rows.

        Args:
            path: Such as ``"observation/pixels"``.
            env_ids: int, any shape that broadcasts with positions.
            positions: int, any shape; final rows are legal.

        Returns:
            ``[*broadcast, *shape]``.

        Raises:
            StaleError: A position is not in the buffer.
        """
        return self._in_force(lambda r: r.get_field(path, env_ids, positions))

    def get_fields(
        self, paths: Sequence[str], env_ids: ArrayLike, positions: ArrayLike
    ) -> dict[str, NDArray[np.generic]]:
        """Read several fields of given rows at once.

        Args:
            paths: Such as ``["observation/pixels", "reward"]``.
            env_ids: int, any shape that broadcasts with positions.
            positions: int, any shape; final rows are legal.

        Returns:
            By path ``[*broadcast, *shape]``.

        Raises:
            StaleError: A position is not in the buffer.
        """
        return self._in_force(lambda r: r.get_fields(tuple(paths), env_ids, positions))

    def mapped(self, path: str) -> list[NDArray[Any]] | None:
        """Map one field of all rows alive: views of its file, oldest first.

        Later rows overwrite them once the ring comes round; what is written into them
        stays there. One ``[T, num_envs, *shape]``, or two that follow each other; None
        where environments are not in step, the field is an end of episodes, or the
        engine is not ``"memmap"``: use `gather_all`.
        """
        return mapped(self._parts.store, self._read().span, path)

    def update_priorities(self, batch: Batch, values: ArrayLike) -> int:
        """Give the steps, or windows, of a batch new priorities.

        Args:
            batch: What `sample` gave, as numpy or as tensors.
            values: Numbers ``[B]``, at least 0, such as absolute TD errors; for
                windows also ``[B, T]``, of which those under the mask count.

        Returns:
            How many were dropped, because they have been overwritten since.

        Raises:
            SchemaError: The sampler keeps no priorities, or values do not fit.
            StaleError: A position was never written.
        """
        return self._in_force(
            lambda r: r.update_priorities(self.sampler, batch, values)
        )

    def snapshot(
        self,
        path: lifecycle.StrPath,
        *,
        pause: bool = False,
        allow_network: bool = False,
    ) -> Snapshot:
        """Make a whole buffer elsewhere that holds what this one holds now.

        Writing may go on, here and in other processes, and any process may ask for it
        that has the buffer open. Where the file system shares blocks (btrfs, XFS) it
        takes milliseconds and no space; elsewhere the rows alive are copied, oldest
        first. Rows that the writer gives up before they are taken are cut, and
        counted. The snapshot has the uuid, generation, positions and statistics of
        the original, so that samplers' states and parts fit both.

        Args:
            path: A new or empty folder, which is a buffer only once it is whole.
            pause: Have the writer wait, whatever process it is in, rather than give
                up a row meanwhile; it goes on within its reserve.
            allow_network: Write to a network file system all the same.

        Raises:
            FormatError: The path holds something already.
            LockedError: Another snapshot pauses the writer, or fills the path.
            RemovedError: The folder was deleted, or its path leads to another one.
            FailedError: It is closed, in RAM, or rows were cut after a failed sync.
            FullError: No space is left.
        """
        self._read()
        if self.path is None:
            raise FailedError(
                f"{self.source or 'a buffer that is in RAM'}: got none of its own, "
                "expected a folder; write it to a file by mmreplay.export first"
            )
        # It is read by its path.
        self._parts.refuse_elsewhere()
        where = lifecycle.absolute(path)
        return snapshot(self.path, where, pause=pause, allow_network=allow_network)

    def hold_rows(self, hold: Hold | None) -> None:
        """Have somebody asked before rows are given up, or nobody any more.

        Args:
            hold: Called with heads, tails, the heads that are needed and the limits
                that rows are to be given up by, int64 ``[E]`` each, before any of them
                is overwritten. Returns lower limits, not below the needed heads, or
                waits, or raises what the add then raises with nothing visible.

        Raises:
            FailedError: The buffer is not open for writing, or is held by another.
        """
        writer = self._parts.writer
        if writer is None or self._parts.closed:
            raise FailedError(
                f"{self._name} is not open for writing, expected its writer's rows to "
                "be held; use ReplayBuffer.open(path, 'r+')"
            )
        if hold is not None and writer.hold is not None:
            raise FailedError(
                f"rows of {self._name} are held by another already, expected one; "
                "close that first"
            )
        writer.hold = hold

    @property
    def statistics(self) -> dict[str, Any]:
        """The free-form JSON stored with the data; ``{}`` where there is none."""
        return read_statistics(self.path)

    def set_statistics(self, statistics: dict[str, Any]) -> None:
        """Store free-form JSON with the data, in one step.

        Args:
            statistics: A dict of JSON values, in place of those that are there.

        Raises:
            FormatError: A value is no JSON.
        """
        self._writer().owner.check()
        write_statistics(self.path, statistics)
