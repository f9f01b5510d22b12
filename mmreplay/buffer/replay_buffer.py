"""ReplayBuffer: circular buffers of environment steps that live in a folder.

The generation of a buffer that is in force, followed through resizes.

What an open buffer tells about itself, whoever opened it and why.

Steps added to a buffer, one of each environment at a time or many.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay import kernels, process
from mmreplay.batch import OWN, Batch
from mmreplay.buffer import copy_rows, opening, zarr_group
from mmreplay.buffer import opening as lifecycle
from mmreplay.buffer.append import Hold, Writer
from mmreplay.buffer.copy_files import Snapshot, snapshot
from mmreplay.buffer.draw import Reading, fold_of, listed
from mmreplay.buffer.limiting import Limit, Limiter
from mmreplay.buffer.opening import check_mode, check_sampler
from mmreplay.buffer.reader import LiveView, ReplacedError, mapped
from mmreplay.buffer.statistics import read_statistics, write_statistics
from mmreplay.buffer.zarr_group import GroupFiles
from mmreplay.episodes import EpisodeIndex
from mmreplay.errors import (
    FailedError,
    ForkedError,
    FullWarning,
    RemovedError,
    SchemaError,
    shown,
)
from mmreplay.format.metadata import Autoreset, Engine, Metadata
from mmreplay.format.sharding import Codec
from mmreplay.ring import Layout, Ring, Span
from mmreplay.samplers.base import Draw, Sampler
from mmreplay.samplers.priority_file import close_columns
from mmreplay.samplers.random import unseeded
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Field, Schema
from mmreplay.storage import disk_space
from mmreplay.storage.commit_state import CommitReader
from mmreplay.storage.foreign_zarr.mapping import GroupMapping
from mmreplay.storage.foreign_zarr.source import ZarrSource
from mmreplay.storage.memory_usage import Memory, measure
from mmreplay.storage.recovery import Recovery
from mmreplay.storage.store import Advise, ReadMode, ReadPolicy
from mmreplay.storage.zarr.engine import ZarrStore

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform

T = TypeVar("T")


class Generations:
    """What every call of an open buffer asks for its files; see `ReplayBuffer`.

    Threads: a draw reads the generation that it began with to its end, whichever is
    put in force meanwhile, and by whom.

    Attributes:
        path: The folder, or None for a buffer in RAM.
        transforms: What draws make of stored steps, in order.
    """

    _finalizer: weakref.finalize[..., Generations]

    def __init__(
        self,
        parts: opening.OpenFiles,
        transforms: Sequence[Transform] = (),
        commit_every: float | None = None,
    ) -> None:
        """Take over open parts.

        Args:
            parts: The generation in force.
            transforms: What draws make of stored steps.
            commit_every: Seconds between commits by a thread; None for none.
        """
        self.path = parts.path
        self._commit_every = commit_every
        # Whoever changes the buffer takes turns, whichever generation is in force.
        self._turn = threading.RLock()
        self._switching = threading.Lock()
        try:
            self.transforms = listed(transforms)
            self._use(parts)
        except BaseException:
            # Transforms that do not fit leave nothing open.
            parts.close()
            raise

    def _use(self, parts: opening.OpenFiles, former: Reading | None = None) -> None:
        """Read from these parts on; of what does not fit nothing is taken over."""
        fold = fold_of(self.transforms, parts.metadata)
        reading = Reading(parts, fold, former)
        with reading.view.lock:
            if former is not None:
                self._finalizer.detach()
                former.view.replaced = True
            self._parts, self._reading = parts, reading
            # A buffer that was dropped or left open at exit is closed all the same.
            self._finalizer = weakref.finalize(
                self, _close_in_owner, parts, os.getpid()
            )

    def _give_back(self) -> None:
        """Close everything, what samplers keep beside the data included."""
        self._finalizer.detach()
        try:
            self._parts.close()
            self._parts.store.unmap()
        finally:
            close_columns(self._reading.view.home)

    def close(self, seal: bool = True) -> None:
        """Commit and give everything back; a second call does nothing.

        Args:
            seal: Of the Zarr engine: put the shards that are not full yet into the
                group too, so that it holds every row; False leaves their rows to
                the next writer, where only this library reads them.

        Raises:
            FullError: All is committed and closed, but no space is left to put the
                newest rows into the group.
            RemovedError: All is closed, but the folder was deleted, or its path leads
                to another one.
            FailedError: Likewise, for want of memory, of threads or of files to
                open; or the device failed.
        """
        with self._turn:
            closed, store = self._parts.closed, self._parts.store
            if self._parts.writer is not None and not closed:
                self._parts.writer.owner.check()
            self._parts.seals = seal
            self._give_back()
            if isinstance(store, ZarrStore) and not closed:
                store.sealing.tell()

    def __enter__(self) -> Self:
        """Return the buffer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the buffer."""
        self.close()

    @property
    def source(self) -> ZarrSource | None:
        """What a Zarr group was opened by, for `open` again; None of buffers."""
        return self._parts.source if isinstance(self._parts, GroupFiles) else None

    @property
    def mapping(self) -> GroupMapping | None:
        """How a Zarr group was taken, with notes and doubts; None of buffers."""
        return self._parts.mapping if isinstance(self._parts, GroupFiles) else None

    @property
    def _name(self) -> str:
        return str(self.path or self.source or "this buffer")

    def _read(self) -> Reading:
        parts = self._parts
        # Another thread may have put another generation in force just now.
        if parts.closed and parts is self._parts:
            raise FailedError(
                f"{self._name} is closed, expected it open; use ReplayBuffer.open"
            )
        reading = self._reading
        reading.view.refresh()
        if parts.refuse_removed is not None and not parts.ledger.moved:
            self._look_for(parts)
        if self._parts.ledger.moved:
            self._follow()
            reading = self._reading
        return reading

    def _look_for(self, parts: opening.OpenFiles) -> None:
        """See that a reader's folder is still where its path leads."""
        ledger = parts.ledger
        assert parts.refuse_removed is not None
        if parts.refuse_removed() and isinstance(ledger, CommitReader):
            ledger.moved = True

    def _follow(self) -> None:
        """Open what the writer put in place of this generation, once for all threads.

        The same steps live in another folder then.
        """
        with self._switching:
            parts = self._parts
            if parts.ledger.moved and not parts.closed:
                assert self.path is not None
                fresh = opening.open_reader(self.path, parts.policy)
                if fresh.metadata.uuid != parts.metadata.uuid:
                    fresh.close()
                    raise RemovedError(
                        f"{self.path} leads to another buffer now, expected the one "
                        "that was opened, which was resized elsewhere; close this "
                        "buffer, and open that one by its new path",
                        errno_=errno.ESTALE,
                    )
                try:
                    self._use(fresh, self._reading)
                except BaseException:
                    # Transforms that do not fit: every later call says so as well.
                    fresh.close()
                    raise
                parts.close()

    def _in_force(self, call: Callable[[Reading], T]) -> T:
        """Call with what reads the generation in force until the end of the call."""
        while True:
            try:
                return call(self._read())
            except ReplacedError:
                continue

    def _writer(self) -> Writer:
        parts = self._parts
        writer = parts.writer
        if writer is None or parts.closed:
            return parts.writing(self._name)
        return writer

    def _rebuild(
        self, ring: Ring, schema: Schema, fill: dict[str, NDArray[np.generic]] | None
    ) -> None:
        parts, reading = self._parts, self._reading
        metadata = parts.metadata.next_generation(ring, schema)
        # Refused before the switch, which nothing takes back.
        fold_of(self.transforms, metadata)
        if parts.path is not None:
            there = disk_space.ring_nbytes(parts.metadata, parts.ledger.heads)
            disk_space.warn_where_short(parts.path, metadata, there, 3)
        fresh = copy_rows.swap(parts, reading, ring, schema, fill, self._commit_every)
        try:
            self._use(fresh, reading)
        except BaseException:
            fresh.close()
            raise
        finally:
            if parts.path is not None:
                parts.retire()

    def _commit(self) -> None:
        parts = self._parts
        try:
            parts.writing(self._name).check()
            if parts.committer is not None:
                parts.committer.commit()
        except FailedError:
            with self._turn:
                # A generation that replaced this one meanwhile is durable as a whole.
                if parts is self._parts:
                    raise


def _close_in_owner(parts: opening.OpenFiles, pid: int) -> None:
    if os.getpid() == pid:
        # A buffer that is collected has no caller to raise to.
        with suppress(RemovedError):
            parts.close()


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
        path: opening.StrPath,
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
        where = opening.absolute(path)
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


Heads = NDArray[np.int64]


class Adding(OpenBuffer):
    """What adds to an open buffer; see `ReplayBuffer`."""

    def add(
        self,
        data: Mapping[str, object] | None = None,
        /,
        *,
        final_observation: object = None,
        env_ids: ArrayLike | None = None,
        **fields: object,
    ) -> None:
        """Add one step of each environment, all or nothing.

        Args:
            data: The step as one nested mapping, or else keywords; every field of
                the schema ``[E, *shape]``, or ``[*shape]`` where num_envs is 1.
            final_observation: The observation that each ended episode ended with;
                read only where the step ends one. ``[E, *shape]``, nested as the
                observation is, or Gymnasium's ``infos["final_obs"]``: an object array
                or list ``[E]`` of observations (arrays, dicts or tuples), with None
                where no episode ended. Not with ``autoreset="next_step"``.
            env_ids: int ``[N]``, the environments that the step is of, each once;
                all of them by default. Fields are then ``[N, *shape]``.
            **fields: The step's fields, in place of data.

        Values decide what a field takes, as arrays, tensors, lists or scalars: integers
        and bools that it holds exactly, and floats in a field of floats. A narrower
        float rounds them. The first time that an array or a tensor is rounded, a
        `RuntimeWarning` names the field, but for rewards.

        Warns:
            AutoresetWarning: Once, before this step is added: rows after episode ends
                look like resets that another ``autoreset`` would leave out.

        Raises:
            SchemaError: A field is unknown, missing, or of a wrong shape or dtype; or
                a final observation is None where an episode ended.
            FullError: No space is left; nothing of the step is visible.
            FailedError: The buffer is read-only, closed, or its device failed.
        """
        if self.limit is not None:
            self._await_insert()
        with self._turn:
            writer = self._writer()
            plain = final_observation is None and env_ids is None
            plain = plain and (data is None or not fields)
            if plain and writer.add_plain(fields if data is None else data) is not None:
                return
            given = writer.intake.flat(data, fields)
            ids = None if env_ids is None else writer.intake.env_ids(env_ids)
            writer.add(given, final_observation, ids)

    def add_as_is(
        self, data: Mapping[str, object], published: Heads | None = None
    ) -> Heads | None:
        """Add one step of each environment, if no value is to be cast or shaped.

        For who makes steps of other libraries' and knows a longer way for all others,
        which tells what is wrong with a step.

        Args:
            data: By path, with no mapping in it: arrays, numbers, or DLPack capsules of
                arrays' values; see `PackerKernel.step`.
            published: What `published` is to be, if the step follows what is there.

        Returns:
            int64 ``[E]``, `published` from now on; None for a step that is not in.

        Raises:
            FullError: As in `add`.
            FailedError: As in `add`.
        """
        if self.limit is not None:
            self._await_insert()
        with self._turn:
            # As `_writer` does, whose call a step would notice.
            parts = self._parts
            writer = parts.writer
            if writer is None or parts.closed:
                writer = self._writer()
            if published is not None and parts.ledger.heads is not published:
                return None
            return writer.add_plain(data)

    def skip_autoreset_check(self) -> None:
        """Do not check rows after episode ends for a wrong ``autoreset``.

        For adapters: their library states what its environments do, and their users
        cannot answer otherwise.
        """
        self._writer().checks_ends = False

    @property
    def published(self) -> Heads:
        """int64 ``[E]``, the heads: another array each time that rows were added.

        Nobody may change it. Of who reads beside a writer, as of the last look.

        Raises:
            FailedError: The buffer is closed.
        """
        parts = self._parts
        if parts.closed:
            self._read()
        return parts.ledger.heads

    def extend(
        self,
        data: Mapping[str, object] | None = None,
        /,
        *,
        final_observation: object = None,
        env_ids: ArrayLike | None = None,
        **fields: object,
    ) -> None:
        """Add many steps of each environment.

        The whole call is validated first and then published in blocks. Of more
        steps than the capacity the last ones stay, and positions advance by all.

        Args:
            data: As in `add`, every field ``[T, E, *shape]``, or ``[T, *shape]``
                where num_envs is 1; T may be 0, which adds nothing.
            final_observation: As in `add`, with a leading axis of steps; None in
                place of a step's array where no episode ended.
            env_ids: As in `add`.
            **fields: As in `add`.

        Warns:
            AutoresetWarning: As in `add`, after all steps are in.

        Raises:
            SchemaError: As in `add`.
            FullError: No space is left; whole blocks are in, and the note on the
                error says how many steps.
            FailedError: As in `add`.
        """
        if self.limit is not None:
            self._await_insert()
        with self._turn:
            writer = self._writer()
            plain = final_observation is None and env_ids is None
            plain = plain and (data is None or not fields)
            if plain and writer.extend_plain(fields if data is None else data):
                return
            given = writer.intake.flat(data, fields)
            ids = None if env_ids is None else writer.intake.env_ids(env_ids)
            writer.extend(given, final_observation, ids)

    def _await_insert(self) -> None:
        # Who closes the buffer in another thread takes it away meanwhile.
        limit = self.limit
        self._writer()  # A reader is refused before it takes the writer's place.
        if limit is not None:
            limit.await_insert()


class ReplayBuffer(Adding):
    """Experience of one or more environments, in files that are always reopenable.

    One writer and any number of readers, in any processes. Everything `add` and
    `extend` wrote survives the death of the process; everything committed survives
    a power cut. Positions count the rows of each environment and never restart.

    Use `create` or `open`, and close it (or use ``with``). Any thread may call: changes
    take turns, and so do draws but for their gathering.

    A buffer opened with mode ``"r"`` may be pickled, and is opened again by its path
    where it is unpickled.

    Attributes:
        path: The folder, or None for a buffer in RAM.
        sampler: What `sample` draws with.
        transforms: What `sample` and `take` make of stored steps.

    Example:
        >>> schema = mr.Schema(
        ...     {
        ...         "observation": mr.Field((3,), "float32"),
        ...         "terminated": mr.Field((), "bool"),
        ...     }
        ... )
        >>> with mr.ReplayBuffer.create("runs/new", schema, capacity=1000) as buffer:
        ...     for step in range(50):
        ...         ended = step % 10 == 9
        ...         heads = buffer.add(observation=np.zeros(3), terminated=ended)
        >>> mr.ReplayBuffer.open("runs/new").sample(32)["observation"].shape
        (32, 3)
    """

    if not TYPE_CHECKING:

        def __new__(cls, *args: object, **_: object) -> ReplayBuffer:
            """Refuse what is not the parts that `create` and `open` hand over.

            Raises:
                TypeError: It was called directly.
            """
            if not args or not isinstance(args[0], lifecycle.OpenFiles):
                raise TypeError(
                    f"{cls.__name__}: got a direct call, expected "
                    "ReplayBuffer.create(path, schema, capacity) for a new buffer, or "
                    "ReplayBuffer.open(path) for one that exists"
                )
            return super().__new__(cls)

    def __init__(
        self,
        parts: lifecycle.OpenFiles,
        sampler: Sampler | None,
        commit_every: float | None,
        transforms: Sequence[Transform] = (),
        limiter: Limiter | None = None,
    ) -> None:
        """Wrap open parts; use `create` or `open`."""
        super().__init__(parts, transforms, commit_every)
        self.sampler = UniformSampler() if sampler is None else sampler
        self._default_sampler = self.sampler if sampler is None else None
        self._limiter = limiter
        self._limit_by(limiter)
        self._num_forks = process.num_forks

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a buffer opened with mode ``"r"`` as its path and how it was opened.

        Unpickling opens the path again, and finds the rows that are there by then. The
        sampler goes along as it is now, and so do transforms, read mode, advice and
        limiter.

        Raises:
            FailedError: The buffer is open for writing, in RAM, or closed.
        """
        where = self.source or self.path
        name, way = self._name, "pass the path, and use ReplayBuffer.open(path) there"
        if where is None:
            state = "in the RAM of this process"
            way = "create it with a path, or write it to a file by mmreplay.export"
        elif self.closed:
            state = "closed"
        elif self.writable:
            state = "open for writing, which one process does"
        else:
            own = None if self.sampler is self._default_sampler else self.sampler
            policy = self.read_policy
            return _opened_again, (
                type(self), where, own, list(self.transforms), self._limiter,
                policy.read_mode, policy.advise,
            )  # fmt: skip
        raise FailedError(
            f"pickling or copying {name}: got a buffer that is {state}, expected one "
            f"opened with mode='r'; {way}"
        )

    @classmethod
    def create(
        cls,
        path: lifecycle.StrPath | None,
        schema: Schema,
        capacity: int,
        num_envs: int = 1,
        *,
        engine: Engine = "memmap",
        layout: Layout | None = None,
        codec: Codec | None = None,
        level: int | None = None,
        chunk_crc32c: bool = False,
        autoreset: Autoreset | Enum | None = None,
        sampler: Sampler | None = None,
        transforms: Sequence[Transform] = (),
        limiter: Limiter | None = None,
        commit_every: float | None = 10.0,
        allow_network: bool = False,
        user: dict[str, Any] | None = None,
    ) -> ReplayBuffer:
        """Create a buffer and open it for writing.

        Takes milliseconds and no disk space: files are sparse until written. Where the
        disk has no room for all of them, a `FullWarning` says so. On a file system
        that does not say when a file was created, a `DurabilityWarning` says what a
        killed writer loses there.

        Args:
            path: Folder to make; new or empty. None with ``engine="memory"``.
            schema: The fields of one step.
            capacity: Rows kept per environment, at least 1.
            num_envs: Environments, at least 1.
            engine: ``"memmap"``, ``"zarr"`` (compressed) or ``"memory"``.
            layout: ``"env_major"`` or ``"time_major"``; None chooses by num_envs.
            codec: Of the Zarr engine: ``"blosc-lz4"`` (by default), ``"zstd"`` or
                ``"none"``; see docs/zarr.md, as for the next two.
            level: The codec's, more for smaller shards; by default 5 and 3.
            chunk_crc32c: Whether each chunk carries a checksum.
            autoreset: What the environments do after an episode ends.
                ``"next_step"`` (Gymnasium's vector default, EnvPool): the next call of
                ``step`` resets, so the next row holds the final observation and is no
                step. ``"same_step"`` (Gymnasium's ``AutoresetMode.SAME_STEP``,
                Stable-Baselines3, Isaac Lab): the step that ends the episode resets.
                ``"disabled"``: you call ``reset`` yourself. Gymnasium's enum member
                ``envs.metadata["autoreset_mode"]`` is accepted, too. By default the
                mode that `Schema.from_env` read; with one environment, else
                ``"disabled"``.
            sampler: What `sample` draws with; `UniformSampler` by default.
            transforms: What `sample` and `take` make of stored steps, in order.
            limiter: How fast it is written and drawn from; `mmreplay.RateLimiter`.
            commit_every: Seconds between commits by a thread; None for none.
            allow_network: Write to a network file system all the same.
            user: JSON kept in the metadata.

        Raises:
            SchemaError: An argument is not legal, transforms do not fit the schema or
                the capacity, or ``num_envs > 1`` and neither ``autoreset`` nor the
                schema states the mode.
            FormatError: The path holds something already.
            FullError: No space is left.
        """
        kernels.warn_of_missing(2)
        if (path is None) != (engine == "memory"):
            raise SchemaError(
                f"path: got {path!r} with engine={engine!r}, expected a folder for "
                "all but 'memory', and None for that; give a path, or engine='memory'"
            )
        metadata = opening.describe(
            schema, capacity, num_envs, engine, layout, autoreset, user, codec,
            level, chunk_crc32c,
        )  # fmt: skip
        check_sampler(sampler)
        if shared := sorted(OWN & {path.partition("/")[0] for path in schema.fields}):
            warnings.warn(
                f"field {shared[0]!r}: got a field with the name of an attribute of "
                f"batches, which batch.{shared[0]} stays; the field is "
                f"batch[{shared[0]!r}]: rename it if the two could be confused",
                RuntimeWarning,
                stacklevel=2,
            )
        # Refused before there is a folder.
        fold_of(transforms, metadata)
        if limiter is not None:
            limiter.check(path, metadata.ring.capacity * metadata.ring.num_envs)
        if path is None:
            parts = lifecycle.create_memory(metadata)
            return cls(parts, sampler, None, transforms, limiter)
        where = lifecycle.absolute(path)
        disk_space.warn_where_short(where, metadata, 0, 2)
        parts = lifecycle.create(where, metadata, commit_every, allow_network)
        return cls(parts, sampler, commit_every, transforms, limiter)

    @classmethod
    def open(
        cls,
        path: lifecycle.StrPath,
        mode: Literal["r", "r+"] = "r",
        *,
        sampler: Sampler | None = None,
        transforms: Sequence[Transform] = (),
        limiter: Limiter | None = None,
        on_resume: Literal["break", "truncate", "continue"] = "break",
        commit_every: float | None = 10.0,
        allow_network: bool = False,
        read_mode: ReadMode = "auto",
        advise: Advise = "auto",
    ) -> ReplayBuffer:
        """Open a buffer.

        Args:
            path: Its folder; or, to read, a Zarr group (`ZarrSource`).
            mode: ``"r"`` reads, also while a writer lives and on a read-only disk;
                ``"r+"`` adds as well, and needs the writer's lock.
            sampler: What `sample` draws with; `UniformSampler` by default.
            transforms: What `sample` and `take` make of stored steps, in order.
            limiter: How fast it is written and drawn from; `mmreplay.RateLimiter`.
            on_resume: What the first row added by this writer is to the last one:
                ``"break"`` (an unrelated row follows), ``"truncate"`` (the same,
                and the last step is reported as truncated) or ``"continue"``.
            commit_every: Seconds between commits by a thread; None for none.
            allow_network: Write to a network file system all the same.
            read_mode: ``"mmap"`` copies rows out of mappings, ``"pread"`` reads them,
                ``"auto"`` does so on network file systems.
            advise: When the disk is asked for the rows of a batch at once: ``"auto"``
                where some are missing, ``"always"``, ``"never"``, or ``"kernel"``, as
                never, with the kernel's own read-ahead. docs/loader.md says which.

        Raises:
            FormatError: It is no buffer, or damaged (`CorruptError`), or of a newer
                version (`VersionError`).
            LockedError: Somebody else is writing.
            FailedError: The disk cannot be written.
            SchemaError: As in `create`.
        """
        kernels.warn_of_missing(2)
        check_mode(mode)
        check_sampler(sampler)
        policy = ReadPolicy(read_mode, advise)
        if mode == "r":
            parts = zarr_group.open_reader(path, policy)
            return cls(parts, sampler, None, transforms, limiter)
        where = zarr_group.folder_of(path)
        parts = lifecycle.open_writer(
            where, on_resume, commit_every, allow_network, policy
        )
        there = disk_space.ring_nbytes(parts.metadata, parts.ledger.heads)
        try:
            disk_space.warn_where_short(where, parts.metadata, there, 2)
        except FullWarning:
            # An error, as its caller wants warnings to be.
            parts.close()
            raise
        return cls(parts, sampler, commit_every, transforms, limiter)

    def __getitem__(self, key: object) -> NoReturn:
        """Refuse to be indexed; calls such as `sample` and `take` choose steps.

        Raises:
            TypeError: Always.
        """
        if isinstance(key, str):
            raise TypeError(
                f"buffer[{key!r}]: a buffer is not indexed by field, expected a batch; "
                f"use buffer.sample(256)[{key!r}] for drawn steps, or "
                f"buffer.gather_all()[{key!r}] for all rows"
            )
        raise TypeError(
            f"buffer[{key!r}]: a buffer is not indexed by number, expected a call; use "
            "buffer.take(env_ids, positions) for given steps, or "
            "mmreplay.ReplayDataset(buffer) for a torch DataLoader"
        )

    def __iter__(self) -> NoReturn:
        """Refuse to be iterated over; loaders and `gather_all` have an order.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "iter(buffer): a buffer is not iterated over, expected a call; use "
            "mmreplay.ReplayLoader(buffer, batch_size) for batches, "
            "buffer.gather_all() for all rows, or mmreplay.episode_table(buffer) for "
            "episodes"
        )

    def __contains__(self, key: object) -> NoReturn:
        """Refuse ``in``; `schema` has the fields, and `span` the positions.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"{key!r} in buffer: got a buffer, expected its schema or its span; use "
            f"{key!r} in buffer.schema for a field, or buffer.span for positions"
        )

    def sample(self, batch_size: int, *, contiguous: bool = False) -> Batch:
        """Draw a batch with the buffer's sampler, through its transforms.

        Args:
            batch_size: Steps, at least 1.
            contiguous: Copy small fields out of the packed array they share.

        Returns:
            numpy arrays ``[batch_size, *shape]``; ``[batch_size, T, *shape]`` where
            the sampler draws windows. Fewer where a sampler without replacement
            ends an epoch, or another process overwrote what it drew.

        Raises:
            EmptyError: No step can be drawn yet.
            StarvedError: The writer overwrote every row before it could be read.
            ForkedError: In a forked child, or in another process that a pickled
                buffer was sent to, and the sampler has no seed: each child would draw
                the same.
        """
        if self._num_forks != process.num_forks and (
            name := unseeded(self.sampler, elsewhere=True)
        ):
            child = "a process that it was pickled for"
            child = "a forked child" if self._num_forks >= 0 else child
            raise ForkedError(
                f"sample: got a {name} without a seed in {child}, expected one "
                "that does not draw the same in every child; give it a seed of its own "
                "there, or workers of a DataLoader ReplayStream or ReplayDataset"
            )
        limit = self.limit
        if limit is not None:
            limit.await_sample()
        batch = self._in_force(
            lambda r: r.drawing.sample(self.sampler, batch_size, contiguous)
        )
        if limit is not None:
            limit.count(len(batch.env_ids))
        return batch

    def set(
        self, path: str, env_ids: ArrayLike, positions: ArrayLike, values: object
    ) -> None:
        """Overwrite a mutable field's values.

        Args:
            path: A field declared ``mutable=True``.
            env_ids: int, any shape that broadcasts with positions.
            positions: int, any shape.
            values: ``[*broadcast, *shape]``.

        Raises:
            SchemaError: The field is not mutable, or values do not fit.
            StaleError: A position is not in the buffer.
        """
        with self._turn:
            self._writer().check()
            self._read().set(path, env_ids, positions, values)
            self._parts.mark_changed()

    def dequeue(self, count: int, env_ids: ArrayLike | None = None) -> Batch:
        """Take the oldest rows of each environment out of the buffer.

        Args:
            count: Rows per environment, at least 1.
            env_ids: int ``[N]``; all environments by default.

        Returns:
            ``[N * count, *shape]``, environment by environment; stored fields only.

        Raises:
            EmptyError: An environment holds fewer rows; nothing is taken.
        """
        with self._turn:
            writer = self._writer()
            batch = self._read().oldest(count, writer.intake.env_ids(env_ids))
            firsts = batch.positions.reshape(-1, count)[:, -1] + 1
            writer.drop(batch.env_ids.reshape(-1, count)[:, 0], firsts)
            return batch

    def clear(self, env_ids: ArrayLike | None = None) -> None:
        """Give up every row of some environments; positions go on from where they are.

        Their space on disk stays the ring's. With ``autoreset="next_step"``, where the
        last step had ended an episode, the next row is the environment's reset row. It
        is stored as a FINAL row: the buffer then holds a row that is no step, and that
        no sampler draws.

        Args:
            env_ids: int ``[N]``; all environments by default.

        Raises:
            SchemaError: An environment is unknown, or named twice.
        """
        with self._turn:
            writer = self._writer()
            writer.clear(writer.intake.env_ids(env_ids))
            self.commit()

    def cut(self, env_ids: ArrayLike | None = None) -> None:
        """Let the next rows start anew, and tell running episodes as truncated.

        The next row of an environment carries it: until then nothing on disk does, and
        what is closed or killed goes on as ``on_resume`` says when it is opened again.

        Args:
            env_ids: As in `clear`.
        """
        with self._turn:
            writer = self._writer()
            writer.resume("truncate", writer.intake.env_ids(env_ids))

    def resize(self, capacity: int) -> None:
        """Keep the newest steps in a ring of another capacity; safe to kill.

        They are copied beside the ring, whose space is given back when the buffer is
        next opened for writing: until then readers may still come from it.

        Args:
            capacity: Rows per environment, at least 1.

        Raises:
            SchemaError: It is no such number, or less than the transforms' windows.
            FullError: No space is left; the buffer stays as it was.
        """
        with self._turn:
            self._writer().check()
            ring = self.metadata.ring
            ring = copy_rows.resized(ring, capacity, self.schema.row_nbytes)
            self._rebuild(ring, self.schema, None)

    def add_field(self, path: str, field: Field, fill: object) -> None:
        """Add a field; rows before it read as fill.

        Args:
            path: A new path.
            field: Its shape and dtype.
            fill: ``[*shape]`` or a scalar.

        Raises:
            SchemaError: The path exists, fill or the transforms do not fit, or it
                would change what old rows say of their ends and next observations.
        """
        with self._turn:
            self._writer().check()
            schema = self.schema.with_field(path, field)
            column = copy_rows.filling(path, field, fill)
            copy_rows.refuse_role(self.schema, schema, column)
            self._rebuild(self.metadata.ring, schema, {path: column})

    def commit(self) -> None:
        """Make everything added so far survive a power cut.

        Raises:
            RemovedError: The folder was deleted, or its path leads to another one. It
                is raised by each add from then on, until the folder is back.
            FailedError: The disk refused, and nothing more is taken; or a shard of a
                compressed buffer could not be made, told once all is committed.
            FullError: No space is left.
        """
        self._commit()


def _opened_again(
    kind: type[ReplayBuffer],
    where: lifecycle.StrPath,
    sampler: Sampler | None,
    transforms: Sequence[Transform],
    limiter: Limiter | None,
    read_mode: ReadMode,
    advise: Advise,
) -> ReplayBuffer:
    """Open a buffer that was pickled."""
    buffer = kind.open(
        where, sampler=sampler, transforms=transforms, limiter=limiter,
        read_mode=read_mode, advise=advise,
    )  # fmt: skip
    if unseeded(sampler, elsewhere=True):
        buffer._num_forks = -1  # of no count of forks: `sample` refuses, as in a child
    return buffer


def check_buffer(buffer: object) -> None:
    """Refuse anything but an open buffer, such as its path.

    Raises:
        SchemaError: It is something else.
    """
    if not isinstance(buffer, ReplayBuffer):
        raise SchemaError(
            f"buffer: got {shown(buffer)}, expected an open ReplayBuffer; pass "
            "ReplayBuffer.open(path)"
        )
