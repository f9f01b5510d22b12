"""ReplayBuffer: a circular buffer of environment steps that lives in a folder.

The public class: create, open and close it, add rows, draw and read them, and
change stored rows. `Appender` adds rows, `GenerationReader` reads one generation of the
files, and a resize switches to the next one.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay import kernels, process
from mmreplay.arguments import flag
from mmreplay.batch import OWN, Batch
from mmreplay.buffer import copy_rows, opening
from mmreplay.buffer.append import Appender, BeforeOverwrite
from mmreplay.buffer.copy_files import Snapshot, snapshot
from mmreplay.buffer.draw import batch_transform, check_sampler
from mmreplay.buffer.facts import Facts
from mmreplay.buffer.limiting import Limit, Limiter
from mmreplay.buffer.open_files import OpenFiles, close_in_owner
from mmreplay.buffer.opening import check_mode
from mmreplay.buffer.reader import GenerationReader, ReplacedError
from mmreplay.buffer.statistics import read_statistics, write_statistics
from mmreplay.episodes import EpisodeIndex
from mmreplay.episodes.starts import BufferIdentity
from mmreplay.errors import (
    DurabilityWarning,
    FailedError,
    ForkedError,
    FullWarning,
    RemovedError,
    SchemaError,
    frames_to_caller,
    shown,
)
from mmreplay.format.metadata import Autoreset, Engine, Metadata
from mmreplay.format.sharding import Codec
from mmreplay.notebook import html_table
from mmreplay.ring import Layout, Ring, Span
from mmreplay.samplers.base import Draw, Sampler, num_left_out, unseeded
from mmreplay.samplers.holding import Claims
from mmreplay.samplers.priority_file import close_columns
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Field, Schema
from mmreplay.schema.schema import stated_num_envs
from mmreplay.storage import disk_space
from mmreplay.storage.memory_usage import MemoryUsage, measure
from mmreplay.storage.recovery import Recovery
from mmreplay.storage.store import Advise, ReadMode, ReadPolicy, Store

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform
    from mmreplay.zarr_groups.mapping import GroupMapping
    from mmreplay.zarr_groups.source import ZarrSource

Heads = NDArray[np.int64]
P = ParamSpec("P")
T = TypeVar("T")


def _retry_replaced(
    method: Callable[Concatenate[ReplayBuffer, P], T],
) -> Callable[Concatenate[ReplayBuffer, P], T]:
    """Call a method that reads again, from the start, when its generation is replaced.

    A thread may resize the buffer between the look at the current generation and the
    draw from it; and a writer that began after a failed sync may have cut rows that
    were just copied. The next attempt reads the generation that is current then.
    """

    @wraps(method)
    def call(self: ReplayBuffer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return method(self, *args, **kwargs)
            except ReplacedError:
                continue

    return call


class ReplayBuffer:
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
        limit: Counts of its limiter, and what it allows now; None without a limiter.

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

    limit: Limit | None = None
    _finalizer: weakref.finalize[..., ReplayBuffer]

    if not TYPE_CHECKING:

        def __new__(cls, *args: object, **_: object) -> ReplayBuffer:
            """Refuse a direct call; `create` and `open` pass open files.

            Raises:
                TypeError: It was called directly.
            """
            if not args or not isinstance(args[0], OpenFiles):
                raise TypeError(
                    f"{cls.__name__} cannot be called. Use ReplayBuffer.create(path, "
                    "schema, capacity) for a new buffer, or ReplayBuffer.open(path) "
                    "for an existing one."
                )
            return super().__new__(cls)

    def __init__(
        self,
        opened: OpenFiles,
        sampler: Sampler | None,
        commit_every: float | None,
        transforms: Sequence[Transform] = (),
        limiter: Limiter | None = None,
    ) -> None:
        """Take over open files; use `create` or `open`.

        Args:
            opened: The current generation.
            sampler: What `sample` draws with; None for the default.
            commit_every: Seconds between commits by a thread; None for none.
            transforms: What draws make of stored steps.
            limiter: How fast it is written and drawn from; None for no limit.
        """
        self.path = opened.path
        self._commit_every = commit_every
        # Calls that change the buffer take turns, in whichever generation.
        self._turn = threading.RLock()
        self._switching = threading.Lock()
        # Of each generation: a sampler may have drawn from a former one last.
        self._identities: list[BufferIdentity] = []
        self._stores: list[weakref.ref[Store]] = []
        try:
            self.transforms = opening.check_options(transforms=transforms)
            self._switch_to(opened)
            if sampler is not None:
                self._reader.check_sampler(sampler)
        except BaseException:
            # Samplers and transforms that do not fit leave nothing open.
            opened.close()
            raise
        self._sampler = UniformSampler() if sampler is None else sampler
        self._default_sampler = self._sampler if sampler is None else None
        self._limiter = limiter
        if limiter is not None:
            ring = opened.metadata.ring
            try:
                self.limit = limiter.bind(
                    self.path, ring.capacity * ring.num_envs, self._count_rows, self._count_left_out
                )
            except BaseException:
                # A limiter that does not fit leaves nothing open either.
                self._close_files()
                raise
        self._num_forks = process.num_forks

    @classmethod
    def create(
        cls,
        path: opening.StrPath | None,
        schema: Schema,
        capacity: int,
        num_envs: int = 1,
        *,
        heap_bytes: int | str | None = None,
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
        user_metadata: dict[str, Any] | None = None,
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
            heap_bytes: Bytes for the values that vary, of each environment, such as
                ``"1 GiB"``; needed where a field varies. Rows then end when there are
                `capacity` newer ones, or when their bytes are needed: up to a
                sixteenth of the heap sooner.
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
            user_metadata: JSON kept in the metadata.

        Raises:
            SchemaError: An argument is not legal, transforms do not fit the schema or
                the capacity, or ``num_envs > 1`` and neither ``autoreset`` nor the
                schema states the mode.
            FormatError: The path holds something already.
            FullError: No space is left.
        """
        if not kernels.looked:
            kernels.warn_of_missing(2)
        if (path is None) != (engine == "memory"):
            raise SchemaError(
                f"path must be a folder, or None with engine='memory', got {path!r} "
                f"with engine={engine!r}. Pass a path, or engine='memory'."
            )
        metadata = opening.describe(
            schema,
            capacity,
            num_envs,
            engine,
            layout,
            autoreset,
            user_metadata,
            codec,
            level,
            chunk_crc32c,
            heap_bytes,
        )
        stated = stated_num_envs(schema)
        if num_envs == 1 and (stated or 1) > 1:
            raise SchemaError(
                f"num_envs is 1, but the schema was made of {stated} environments. "
                f"Pass num_envs={stated}, or make the schema by Schema.from_spaces."
            )
        if shared := sorted(OWN & {path.partition("/")[0] for path in schema.fields}):
            warnings.warn(
                f"field {shared[0]!r} has the name of an attribute of batches. The "
                f"field is batch[{shared[0]!r}], and batch.{shared[0]} stays the "
                "attribute: rename the field to avoid confusion.",
                RuntimeWarning,
                stacklevel=2,
            )
        # Refused before there is a folder.
        opening.check_options(metadata, transforms=transforms, sampler=sampler)
        if limiter is not None:
            limiter.check(path, metadata.ring.capacity * metadata.ring.num_envs)
        if path is None:
            opened = opening.create_memory(metadata)
            return cls(opened, sampler, None, transforms, limiter)
        where = opening.absolute(path)
        disk_space.refuse_larger_heap(where, metadata)
        disk_space.warn_where_short(where, metadata, 0, 2)
        opened = opening.create(where, metadata, commit_every, allow_network)
        return cls(opened, sampler, commit_every, transforms, limiter)

    @classmethod
    def open(
        cls,
        path: opening.StrPath,
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
        check_values: bool = False,
    ) -> ReplayBuffer:
        """Open a buffer.

        Args:
            path: Its folder; or, to read, a Zarr group (`ZarrSource`).
            mode: ``"r"`` reads, also while a writer lives and on a read-only disk;
                ``"r+"`` adds as well, and needs the writer's lock.
            sampler: What `sample` draws with; `UniformSampler` by default.
            transforms: What `sample` and `take` make of stored steps, in order.
            limiter: How fast it is written and drawn from; `mmreplay.RateLimiter`.
            on_resume: What the first row added by this appender is to the last one:
                ``"break"`` (an unrelated row follows), ``"truncate"`` (the same,
                and the last step is reported as truncated) or ``"continue"``.
            commit_every: Seconds between commits by a thread; None for none.
            allow_network: Write to a network file system all the same.
            read_mode: ``"mmap"`` copies rows out of mappings, ``"pread"`` reads them,
                ``"auto"`` does so on network file systems.
            advise: When the disk is asked for the rows of a batch at once: ``"auto"``
                where some are missing, ``"always"``, ``"never"``, or ``"kernel"``, as
                never, with the kernel's own read-ahead. docs/loader.md says which.
            check_values: Compare values that vary with their checksums whenever they
                are read; a difference is a `CorruptError`. Other fields are checked by
                `verify_buffer`.

        Raises:
            FormatError: It is no buffer, or damaged (`CorruptError`), or of a newer
                version (`VersionError`).
            LockedError: Somebody else is writing.
            FailedError: The disk cannot be written.
            SchemaError: As in `create`.
        """
        if not kernels.looked:
            kernels.warn_of_missing(2)
        check_mode(mode)
        opening.check_options(sampler=sampler)
        policy = ReadPolicy(read_mode, advise, check_values)
        if mode == "r":
            if (opener := opening.opener_of(path)) is not None:
                opened = opener.open_reader(path, policy)
            else:
                opened = opening.open_reader(opening.absolute(path), policy)
            return cls(opened, sampler, None, transforms, limiter)
        where = opening.writable_folder(path)
        opened = opening.open_writer(where, on_resume, commit_every, allow_network, policy)
        ring_nbytes = disk_space.ring_nbytes(opened.metadata, opened.commit.heads)
        try:
            disk_space.warn_where_short(where, opened.metadata, ring_nbytes, 2)
        except FullWarning:
            # Warnings are errors for this caller.
            opened.close()
            raise
        return cls(opened, sampler, commit_every, transforms, limiter)

    def close(self, seal: bool = True) -> None:
        """Commit and close all files; a second call does nothing.

        Args:
            seal: Of the Zarr engine: put the shards that are not full yet into the
                group too, so that it holds every row; False leaves their rows to
                the next writer, where only this library reads them.

        Warns:
            DurabilityWarning: `end_episodes` ended an episode, and no row followed
                that stores it; all is closed.

        Raises:
            FullError: All is committed and closed, but no space is left to put the
                newest rows into the group.
            RemovedError: All is closed, but the folder was deleted, or its path leads
                to another one.
            FailedError: Likewise, for want of memory, of threads or of files to
                open; or the device failed.
        """
        with self._turn:
            opened = self._files
            store, closed = opened.store, opened.closed
            ended: list[NDArray[np.int64]] = []
            if opened.appender is not None and not closed:
                opened.appender.owner.check()
                if opened.appender.warns_of_ends and self.path is not None:
                    ended = [opened.appender.unstored_ends(discard) for discard in (False, True)]
            opened.seal = seal
            self._close_files()
            if store.sealing is not None and not closed:
                store.sealing.raise_if_unsealed()
            for discarded, of in zip((False, True), ended, strict=False):
                if not len(of):
                    continue
                envs = f"environments {of.tolist()}" if len(of) < 9 else f"{len(of)} environments"
                if discarded:
                    warnings.warn(
                        f"{self.path}: the end_episodes(discard=True) of {envs} is not stored, as "
                        "no row followed it. Open the buffer with on_resume='break' instead.",
                        DurabilityWarning,
                        stacklevel=frames_to_caller(),
                    )
                    continue
                warnings.warn(
                    f"{self.path}: the end_episodes of {envs} is not stored, as no row "
                    "followed it. Open the buffer with on_resume='truncate' instead.",
                    DurabilityWarning,
                    stacklevel=frames_to_caller(),
                )

    def _close_files(self) -> None:
        """Close everything: files, columns of samplers, and the part in a limiter."""
        limit, self.limit = self.limit, None
        try:
            self._finalizer.detach()
            try:
                self._files.close()
                for store in [reference() for reference in self._stores]:
                    if store is not None:
                        store.unmap()
            finally:
                close_columns(self._identities)
        finally:
            if limit is not None:
                limit.close()

    def __enter__(self) -> Self:
        """Return the buffer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the buffer."""
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a buffer opened with mode ``"r"`` as its path and how it was opened.

        Unpickling opens the path again, and finds the rows that are there by then. The
        sampler goes along as it is now, and so do transforms, read mode, advice and
        limiter.

        Raises:
            FailedError: The buffer is open for writing, in RAM, or closed.
        """
        where = self.source or self.path
        name, way = self._name, "Pass the path, and use ReplayBuffer.open(path) there"
        if where is None:
            state = "in the RAM of this process"
            way = "Create it with a path, or write it to a file with mmreplay.export"
        elif self.closed:
            state = "closed"
        elif self.writable:
            state = "open for writing"
        else:
            own = None if self.sampler is self._default_sampler else self.sampler
            policy = self.read_policy
            return _opened_again, (
                type(self),
                where,
                own,
                list(self.transforms),
                self._limiter,
                policy.read_mode,
                policy.advise,
            )
        raise FailedError(
            f"pickling or copying {name} needs a buffer opened with mode='r', but "
            f"this one is {state}. {way}."
        )

    def __repr__(self) -> str:
        """Say what the buffer is and holds."""
        if self._files.closed:
            return f"<ReplayBuffer {self._name} (closed)>"
        metadata = self.metadata
        ring = metadata.ring
        mode = "r" if self._files.appender is None else "r+"
        return (
            f"<ReplayBuffer {self._name} {mode!r}: {len(self):,} steps of "
            f"{ring.num_envs} x {ring.capacity:,}, {len(metadata.schema)} fields, "
            f"{metadata.engine}, {ring.layout}>"
        )

    def _repr_html_(self) -> str:
        """Return what `repr` says and the fields as a table, for notebooks."""
        title = repr(self)
        if self._files.closed:
            return html_table(title, (), ())
        return html_table(title, *self.schema.table())

    def __len__(self) -> int:
        """Steps alive, of all environments; final rows are not counted."""
        return self._current().index.num_steps

    def __getitem__(self, key: object) -> NoReturn:
        """Refuse to be indexed; calls such as `sample` and `take` choose steps.

        Raises:
            TypeError: Always.
        """
        if isinstance(key, str):
            raise TypeError(
                f"buffer[{key!r}]: a buffer is not indexed by field. Use "
                f"buffer.sample(256)[{key!r}] for drawn steps, or "
                f"buffer.gather_all()[{key!r}] for all rows."
            )
        raise TypeError(
            f"buffer[{key!r}]: a buffer is not indexed by number. Use "
            "buffer.take(env_ids, positions) for given steps, or "
            "mmreplay.ReplayDataset(buffer) for a torch DataLoader."
        )

    def __iter__(self) -> NoReturn:
        """Refuse to be iterated over; loaders and `gather_all` have an order.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "iter(buffer): a buffer cannot be iterated over. Use "
            "mmreplay.ReplayLoader(buffer, batch_size) for batches, "
            "buffer.gather_all() for all rows, or mmreplay.episode_table(buffer) for "
            "episodes."
        )

    def __contains__(self, key: object) -> NoReturn:
        """Refuse ``in``; `schema` has the fields, and `span` the positions.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"{key!r} in buffer: a buffer has no membership test. Use {key!r} in "
            "buffer.schema for a field, or buffer.span for positions."
        )

    # What the buffer is and holds now.

    @property
    def metadata(self) -> Metadata:
        """What metadata.json says; of a closed buffer, what it said last."""
        if self._files.appender is None and not self._files.closed:
            # A reader looks whether its writer resized the buffer meanwhile.
            self._current()
        return self._files.metadata

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
        return self._files.metadata.ring.num_envs

    @property
    def autoreset(self) -> Autoreset:
        """What the row after an episode's end is."""
        return self._files.metadata.autoreset

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._files.appender is not None

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._files.closed

    @property
    def recovery(self) -> Recovery:
        """What opening found."""
        return self._files.recovery

    @property
    def read_policy(self) -> ReadPolicy:
        """How it was opened to read."""
        return self._files.policy

    @property
    def source(self) -> ZarrSource | None:
        """What a Zarr group was opened by, for `open` again; None of buffers."""
        return None if self._files.origin is None else self._files.origin.source

    @property
    def mapping(self) -> GroupMapping | None:
        """How a Zarr group was taken, with notes and doubts; None of buffers."""
        return None if self._files.origin is None else self._files.origin.mapping

    @property
    def span(self) -> Span:
        """What is alive now: positions ``[first, stop)``, int64 ``[E]`` each."""
        return self._current().span

    @property
    def heads(self) -> NDArray[np.int64]:
        """int64 ``[E]``, the next position to be written."""
        return self._current().span.stop

    @property
    def tails(self) -> NDArray[np.int64]:
        """int64 ``[E]``; rows below were cleared, dequeued, or lost to a power cut.

        The oldest row alive is at ``span.first``, never below: what the ring itself
        gives up, as heads go on, moves no tail.
        """
        self._current()
        return self._files.commit.tails.copy()

    @property
    def published(self) -> Heads:
        """int64 ``[E]``, the heads: another array each time that rows were added.

        It must not be changed. A reader beside a writer sees it as of the last look.

        Raises:
            FailedError: The buffer is closed.
        """
        opened = self._files
        if opened.closed:
            self._current()
        return opened.commit.heads

    @property
    def committed(self) -> NDArray[np.int64]:
        """int64 ``[E]``, heads that a power cut would leave."""
        if self._files.committer is None:
            return self._files.recovery.committed
        return self._files.committer.committed

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 ``[E]``, steps alive per environment."""
        return self._current().index.sizes()

    @property
    def episodes(self) -> EpisodeIndex:
        """The episodes alive now."""
        return self._current().index

    @_retry_replaced
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
            is reported as truncated).

        Raises:
            SchemaError: An environment is unknown.
            StaleError: A position is not in the buffer.
        """
        return self._current().get_flags(env_ids, positions)

    @property
    def view(self) -> GenerationReader:
        """What samplers draw from: spans and boundaries, brought up to date."""
        return self._current()

    def still_view(self) -> GenerationReader:
        """Return a view with an index and a lock of its own, over the same files.

        It shows the rows of the moment, while `view` and other still views go on, until
        its `refresh` looks at the writer. So a thread that takes long to draw from it
        holds up no other. It stays with its generation of the files, which a resize
        replaces, and ends with the buffer.

        Raises:
            FailedError: The buffer is closed, or open for writing.
        """
        return self._current().still()

    def folder_now(self) -> Path | None:
        """Return where its folder is now; None where it has none.

        An open buffer goes on where its folder was renamed, and `path` leads nowhere.
        """
        watch = self._files.watch
        return self.path if watch is None else watch.folder_now()

    def facts(self) -> Facts:
        """Say what the buffer is and holds, as `mmreplay info` does.

        Returns:
            Rows, heap, disk, last commit and writer, each looked up when it is asked
            for: ``buffer.facts().rows().legal_starts``.
        """
        return Facts(self)

    @property
    def in_place(self) -> bool:
        """Whether its path still leads to its files; False once they were moved."""
        watch = self._files.watch
        return watch is None or watch.in_place()

    @property
    def files_identity(self) -> str:
        """What tells its files from those of a copy; empty in RAM."""
        watch = self._files.watch
        return "" if watch is None else watch.identity

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the data files: (apparent, allocated on disk)."""
        self._current()
        return self._files.store.disk_nbytes()

    @property
    def zarr_path(self) -> Path | None:
        """The Zarr group of an ``engine="zarr"`` buffer, for any Zarr reader; or None.

        It holds every row alive once the buffer is closed; before, the sealed ones.
        """
        sealing = self._files.store.sealing
        return None if sealing is None else sealing.path

    @property
    def compression(self) -> dict[str, tuple[int, int]]:
        """Per path, (bytes of its shards, bytes of the rows in them); of zarr only."""
        self._current()
        sealing, heads = self._files.store.sealing, self._files.commit.heads
        return {} if sealing is None else sealing.compression(heads)

    def memory(self) -> MemoryUsage:
        """Measure what the buffer's files and this process have in memory."""
        return measure(self._current().data_paths)

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
        self._appender().owner.check()
        write_statistics(self.path, statistics)

    # Adding rows.

    def add(
        self,
        data: Mapping[str, object] | None = None,
        /,
        *others: object,
        final_observation: object = None,
        env_ids: ArrayLike | None = None,
        **fields: object,
    ) -> None:
        """Add one step of each environment, all or nothing.

        Args:
            data: The step as one nested mapping, or else keywords; every field of
                the schema ``[E, *shape]``, or ``[*shape]`` where num_envs is 1. Of a
                field with one value for each agent also a dict of them by the names of
                agents, as PettingZoo and RLlib give it.
            *others: Refused: fields go by name.
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
            # As `_appender` does, whose call a step would notice.
            opened = self._files
            appender = opened.appender
            if appender is None or opened.closed:
                appender = self._appender()
            if others:
                appender.validator.refuse_positional(1 + len(others), "add")
            if data is None:
                data = fields
            elif fields:
                appender.validator.refuse_both(fields)
            appender.add(data, final_observation, env_ids)

    def try_add(self, data: Mapping[str, object], after: Heads | None = None) -> Heads | None:
        """Add one step of each environment, if no value needs a conversion.

        A fast path for adapters: of any other step it returns None, and `add` casts the
        step or says what is wrong with it.

        Args:
            data: A nested mapping, or a flat one with paths as keys: arrays of the
                fields' dtypes, ``[E, *shape]``, or ``[*shape]`` where num_envs is 1;
                of one environment scalars as well. A DLPack capsule of an array's
                values stands for the array.
            after: The `published` heads that the step follows; with others it is not
                added.

        Returns:
            int64 ``[E]``, `published` from now on; None for a step that was not added.

        Raises:
            FullError: As in `add`.
            FailedError: As in `add`.
        """
        if self.limit is not None:
            self._await_insert()
        with self._turn:
            # As `_appender` does, whose call a step would notice.
            opened = self._files
            appender = opened.appender
            if appender is None or opened.closed:
                appender = self._appender()
            return appender.try_add(data, after)

    def extend(
        self,
        data: Mapping[str, object] | None = None,
        /,
        *others: object,
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
            *others: As in `add`.
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
            appender = self._appender()
            if others:
                appender.validator.refuse_positional(1 + len(others), "extend")
            if data is None:
                data = fields
            elif fields:
                appender.validator.refuse_both(fields)
            appender.extend(data, final_observation, env_ids)

    def _await_insert(self) -> None:
        # Another thread may close the buffer while this one waits.
        limit = self.limit
        self._appender()  # Refuses a reader before it locks the limiter as its writer.
        if limit is not None:
            limit.await_insert()

    def skip_autoreset_check(self) -> None:
        """Do not check rows after episode ends, nor warn of ends that no row stores.

        For adapters: their library states what its environments do, and their users
        cannot answer otherwise; it resets all environments when it goes on.
        """
        appender = self._appender()
        appender.checks_ends = appender.warns_of_ends = False

    def hold_rows(self, callback: BeforeOverwrite | None) -> None:
        """Register a callback that runs before rows are overwritten and may delay it.

        None removes it. Where a field varies, it also runs before rows end as the bytes
        of their values are needed: with the heads and limits at which a ring of this
        capacity would overwrite them. Rows of a compressed buffer end by the capacity
        alone.

        Args:
            callback: Called with heads, tails, the heads that an add needs and the new
                limits, int64 ``[E]`` each, before rows below the limits are
                overwritten: those more than the capacity below them. It may return
                lower limits, at least the needed heads. It may wait. If it raises, the
                add raises the same error and nothing is visible. From the call of
                `hold_rows` on no row goes that it did not let go, also if the process
                is killed.

        Raises:
            FailedError: The buffer is not open for writing, or has a callback already.
        """
        appender = self._files.appender
        if appender is None or self._files.closed:
            raise FailedError(
                f"{self._name} is not open for writing, so no rows can be held. Use "
                "ReplayBuffer.open(path, 'r+')."
            )
        if callback is not None and appender.before_overwrite is not None:
            raise FailedError(
                f"another callback already holds the rows of {self._name}. Close its owner first."
            )
        appender.before_overwrite = callback

    # Drawing and reading.

    @property
    def sampler(self) -> Sampler:
        """What `sample` draws with; another one counts from the next draw on.

        Raises:
            SchemaError: It is set to what is no sampler, or to one of fields that the
                buffer does not have.
        """
        return self._sampler

    @sampler.setter
    def sampler(self, sampler: Sampler) -> None:
        if sampler is not self._sampler:
            self._reader.check_sampler(check_sampler(sampler))
            self._sampler = sampler

    @_retry_replaced
    def count_left_out(self) -> int:
        """Count the rows alive that the sampler does not draw, nor begin an item at.

        Of windows, episodes and groups the rows that none begins at, or is of, count.
        Costs O(rows).

        Example:
            >>> sampler = mr.SequenceSampler(8, mr.UniformSampler(seed=0))
            >>> buffer = mr.ReplayBuffer.open("runs/cartpole", sampler=sampler)
            >>> starts = int(buffer.span.lengths.sum()) - buffer.count_left_out()
            >>> starts > 0
            True
        """
        return self._count_left_out(True)

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
                f"sample: the {name} has no seed, and would draw the same in {child} "
                "as elsewhere. Create a sampler with its own seed there, or use "
                "ReplayStream or ReplayDataset in workers of a DataLoader."
            )
        return self.sample_by(self.sampler, batch_size, contiguous=contiguous)

    def sample_by(self, sampler: Sampler, batch_size: int, *, contiguous: bool = False) -> Batch:
        """Draw a batch with another sampler, in any process; see `sample`."""
        if sampler is not self._sampler:
            check_sampler(sampler)
        limit = self.limit
        if limit is not None:
            limit.await_sample()
        batch = self.sample_uncounted(sampler, batch_size, contiguous=contiguous)
        if limit is not None:
            limit.count(len(batch.env_ids))
        return batch

    def sample_uncounted(
        self, sampler: Sampler, batch_size: int, *, contiguous: bool = False
    ) -> Batch:
        """Draw a batch that no limit counts, for `concat`; see `sample_by`."""
        while True:
            reader, claims = self._current(), Claims()
            try:
                batch = reader.sample(sampler, batch_size, claims, contiguous)
                if claims:
                    claims.keep()
                return batch
            except BaseException as error:
                claims.release()
                reader.put_back(sampler, claims, error)
                # As of `_retry_replaced`, which takes another microsecond's tenth.
                if not isinstance(error, ReplacedError):
                    raise

    @_retry_replaced
    def take(self, env_ids: ArrayLike, positions: ArrayLike, *, key: int = 0) -> Batch:
        """Gather given steps as `sample` does, through the buffer's transforms.

        Args:
            env_ids: int ``[B]``, or what broadcasts with positions.
            positions: int ``[B]``.
            key: Seed of random transforms; ``batch.key`` reproduces those of a batch.

        Raises:
            StaleError: A position is not in the buffer, or cannot be drawn.
        """
        return self._current().take(env_ids, positions, key)

    @_retry_replaced
    def gather(self, draw: Draw) -> Batch:
        """Gather a draw that a sampler made of this buffer's `view`, here or elsewhere.

        Args:
            draw: Steps or windows, which are read through the buffer's transforms.

        Raises:
            StaleError: A step is not in the buffer any more, or cannot be drawn.
        """
        return self._current().gather_draw(draw)

    @_retry_replaced
    def gather_all(self) -> Batch:
        """Gather every row alive, oldest first, environment by environment.

        Final rows are included: they are True in ``batch.fields["final"]``, bool
        ``[B]``. A field ``final`` of the schema replaces that column.
        """
        return self._current().gather_all()

    @_retry_replaced
    def get_field(self, path: str, env_ids: ArrayLike, positions: ArrayLike) -> NDArray[np.generic]:
        """Read one field of given rows.

        Args:
            path: Such as ``"observation/pixels"``.
            env_ids: int, any shape that broadcasts with positions.
            positions: int, any shape; final rows are legal.

        Returns:
            ``[*broadcast, *shape]``; `Ragged` of the shape ``[*broadcast]`` where the
            field varies.

        Raises:
            StaleError: A position is not in the buffer.
        """
        fields = self._current().get_fields((path,), env_ids, positions)
        field: NDArray[np.generic] = fields[path]
        return field

    @_retry_replaced
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
        return self._current().get_fields(tuple(paths), env_ids, positions)

    @_retry_replaced
    def find(self, path: str, values: ArrayLike) -> tuple[Any, Any]:
        """Find rows by the value of an integer field, such as an id.

        The first call reads the field of all rows; later ones read what was added
        since. It keeps at most 24 bytes a living row in RAM, as long as the buffer is
        open; samplers that look up the same field share it.

        Args:
            path: An integer field of one number, which is not mutable.
            values: An integer, or integers ``[N]``.

        Returns:
            env_ids and positions of the rows alive that hold the value, newest first,
            int64 ``[K]`` each. Of several values each of them is `Ragged` of shape
            ``(N,)``, with the rows of each value. Final rows hold no value.

        Raises:
            SchemaError: The field is no such field, or the values are no integers.

        Example:
            >>> schema = mr.Schema(
            ...     {
            ...         "uid": mr.Field((), "int64"),
            ...         "reward": mr.Field((), "float32", mutable=True),
            ...     }
            ... )
            >>> buffer = mr.ReplayBuffer.create(None, schema, 9, engine="memory")
            >>> buffer.extend(uid=[7, 8, 7], reward=[0.0, 0.0, 0.0])
            >>> env_ids, positions = buffer.find("uid", 7)
            >>> positions.tolist()
            [2, 0]
            >>> buffer.write_field("reward", env_ids, positions, [1.0, 0.5])  # late
        """
        return self._current().find_rows(path, values)

    def mapped(self, path: str) -> list[NDArray[Any]] | None:
        """Map one field of all rows alive: views of its file, oldest first.

        Later rows overwrite them once the ring comes round; what is written into them
        stays there. One ``[T, num_envs, *shape]``, or two that follow each other; None
        where environments are not in step, the field varies or is an end of episodes,
        or the engine is not ``"memmap"``: use `gather_all`.

        Args:
            path: Path of the field, such as ``"observation/pixels"``.
        """
        return self._current().map_field(path)

    @_retry_replaced
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
        return self._current().update_priorities(self.sampler, batch, values)

    # Changing what is there.

    @_retry_replaced
    def acknowledge(self, batch: Batch | dict[str, Any], *, sync: bool = False) -> int:
        """Say that a batch was used, for a `UseCounter` with a lease.

        To say it again is harmless.

        Args:
            batch: As `sample` returned it; or what `ticket` returned for it, also
                after a restart.
            sync: Make all counts outlive a power cut, as far as their rows do: also
                of rows that are committed later. docs/samplers.md has the one case in
                which those lose theirs.

        Returns:
            How many of its rows have a higher count now; 0 where it was acknowledged
            before, or its counter has no lease.

        Raises:
            StaleError: The lease of the batch has ended, and a batch was drawn since.
            SchemaError: The sampler has no `UseCounter`, the batch is of another
                buffer, or it is no batch.
            FormatError: It is no ticket of this buffer.
        """
        return self._current().acknowledge(self.sampler, batch, sync)

    @_retry_replaced
    def ticket(self, batch: Batch) -> dict[str, Any]:
        """Return what acknowledges a batch of a `UseCounter` with a lease later.

        It is JSON: in the learner's checkpoint it says which batch the checkpoint
        knows. It counts for no row that was overwritten since, or cut by a power cut
        or a failed sync, and for none written in its place. A ticket without
        ``cut_epoch``, made before there was one, counts below the last cut alone.

        Args:
            batch: As `sample` returned it, and not acknowledged yet.

        Raises:
            StaleError: The batch has no lease.
            SchemaError: The sampler has no `UseCounter`, or the batch is of another
                buffer.
        """
        return self._current().ticket(self.sampler, batch)

    def write_field(
        self, path: str, env_ids: ArrayLike, positions: ArrayLike, values: object
    ) -> None:
        """Overwrite values of a mutable field.

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
            self._appender().check()
            self._current().write_field(path, env_ids, positions, values)
            self._files.mark_changed()

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
            appender = self._appender()
            batch = self._current().oldest(count, appender.validator.env_ids(env_ids))
            firsts = batch.positions.reshape(-1, count)[:, -1] + 1
            appender.drop(batch.env_ids.reshape(-1, count)[:, 0], firsts)
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
            appender = self._appender()
            appender.clear(appender.validator.env_ids(env_ids))
            self.commit()

    def end_episodes(self, env_ids: ArrayLike | None = None, *, discard: bool = False) -> None:
        """End unfinished episodes; the next row of each environment starts one.

        They are truncated. With ``discard`` they are broken off instead, as a take that
        is recorded again: their steps stay in the ring and are drawn, but the episode
        has no end, and appends to a LeRobot set leave it out. An episode whose last
        step has ended it is finished, and stays so.

        The next row of an environment stores this, as the last call asked for it. Until
        then nothing on disk does: after a close, which warns of it, or a kill,
        ``on_resume`` of the next open decides.

        Args:
            env_ids: As in `clear`.
            discard: Break the episodes off, in place of truncating them.

        Raises:
            SchemaError: An environment is unknown, or named twice; or `discard` is no
                bool.

        Example:
            >>> schema = mr.Schema({"action": mr.Field((), "int64")})
            >>> buffer = mr.ReplayBuffer.create(None, schema, 100, engine="memory")
            >>> heads = buffer.add(action=0)
            >>> buffer.end_episodes(discard=True)  # the take is recorded again
        """
        flag("discard", discard, "Pass True to break the episodes off.")
        with self._turn:
            appender = self._appender()
            appender.end_episodes(appender.validator.env_ids(env_ids), discard)

    def declared_ends(self, *, discard: bool = False) -> NDArray[np.int64]:
        """Environments whose episode `end_episodes` ended, and no row stores it yet.

        Args:
            discard: Those that are broken off, in place of those that are truncated.

        Returns:
            int64 ``[N]``.
        """
        return self._appender().unstored_ends(discard)

    def resize(self, capacity: int, *, heap_bytes: int | str | None = None) -> None:
        """Keep the newest steps in a ring of another capacity; safe to kill.

        They are copied beside the ring, whose space is given back when the buffer is
        next opened for writing: until then readers may still come from it.

        Where fields vary, rows are also dropped until the values of the others leave a
        sixteenth of the heap free.

        Args:
            capacity: Rows per environment, at least 1.
            heap_bytes: As in `create`; by default those of now.

        Raises:
            SchemaError: It is no such number, or less than the transforms' windows; or
                `heap_bytes` is not legal.
            CorruptError: A value that varies differs from its checksum, or is not where
                its row says; the buffer stays as it was.
            FullError: No space is left; likewise.
        """
        with self._turn:
            self._appender().check()
            ring = self.metadata.ring
            ring = copy_rows.resized(ring, capacity, self.schema.row_nbytes)
            heap_nbytes = self.metadata.heap_nbytes
            if heap_bytes is not None:
                heap_nbytes = opening.heap_nbytes_of(heap_bytes, ring, self.schema)
            self._rebuild(ring, self.schema, None, heap_nbytes)

    def add_field(
        self, path: str, field: Field, fill: object, *, heap_bytes: int | str | None = None
    ) -> None:
        """Add a field; rows before it read as fill.

        Args:
            path: A new path.
            field: Its shape and dtype.
            fill: ``[*shape]`` or a scalar. Of a field that varies an empty value, such
                as ``""`` or ``[]``.
            heap_bytes: As in `create`; by default those of now. The first field that
                varies needs them, and the buffer is of file format 1.1 from then on.

        Raises:
            SchemaError: The path exists, fill, `heap_bytes` or the transforms do not
                fit, or it would change what old rows say of their ends and next
                observations.
            CorruptError: As of `resize`.
        """
        with self._turn:
            self._appender().check()
            schema = self.schema.with_field(path, field)
            column = copy_rows.filling(path, field, fill)
            copy_rows.refuse_role(self.schema, schema, column)
            if heap_bytes is None and self.metadata.heap_nbytes:
                heap_bytes = self.metadata.heap_nbytes
            ring = self.metadata.ring
            heap_nbytes = opening.heap_nbytes_of(heap_bytes, ring, schema)
            self._rebuild(ring, schema, {path: column}, heap_nbytes)

    def _rebuild(
        self,
        ring: Ring,
        schema: Schema,
        fill: dict[str, NDArray[np.generic]] | None,
        heap_nbytes: int,
    ) -> None:
        former, reader = self._files, self._reader
        metadata = former.metadata.next_generation(ring, schema, heap_nbytes)
        # Refused before the switch, which nothing takes back.
        batch_transform(self.transforms, metadata)
        if former.path is not None:
            if heap_nbytes > former.metadata.heap_nbytes:
                disk_space.refuse_larger_heap(former.path, metadata)
            nbytes = disk_space.ring_nbytes(former.metadata, former.commit.heads)
            disk_space.warn_where_short(former.path, metadata, nbytes, 3)
        fresh = copy_rows.replace_generation(
            reader, ring, schema, fill, self._commit_every, heap_nbytes
        )
        try:
            self._switch_to(fresh, reader)
        except BaseException:
            fresh.close()
            raise
        finally:
            if former.path is not None:
                former.retire()

    def commit(self) -> None:
        """Make everything added so far survive a power cut.

        Raises:
            RemovedError: The folder was deleted, or its path leads to another one. It
                is raised by each add from then on, until the folder is back.
            FailedError: The disk refused, and nothing more is taken; or a shard of a
                compressed buffer could not be made, raised once all is committed.
            FullError: No space is left.
        """
        opened = self._files
        try:
            opened.check_writable().check()
            if opened.committer is not None:
                opened.committer.commit()
        except FailedError:
            with self._turn:
                # A generation that replaced this one meanwhile is durable as a whole.
                if opened is self._files:
                    raise

    def snapshot(
        self, path: opening.StrPath, *, pause: bool = False, allow_network: bool = False
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
        self._current()
        if self.path is None:
            raise FailedError(
                f"{self.source or 'a buffer that is in RAM'} has no folder, which "
                "snapshot needs. Write it to a file with mmreplay.export instead."
            )
        # It is read by its path.
        self._files.refuse_elsewhere()
        where = opening.absolute(path)
        return snapshot(self.path, where, pause=pause, allow_network=allow_network)

    # The current generation.

    @property
    def _name(self) -> str:
        return self._files.name

    def _current(self) -> GenerationReader:
        """Return the reader of the current generation, after a look at the writer.

        A draw reads the generation that it began with to its end, whichever thread
        switches to another one meanwhile.

        Raises:
            FailedError: The buffer is closed.
            RemovedError: The folder was deleted, or its path leads to another one.
        """
        opened = self._files
        # Another thread may have switched to another generation just now.
        if opened.closed and opened is self._files:
            raise FailedError(f"{opened.name} is closed. Use ReplayBuffer.open(path).")
        reader = self._reader
        reader.refresh()
        look = opened.refuse_removed
        # A reader's folder may be gone from its path, or replaced by a resize whose
        # record it missed.
        if look is not None and not opened.commit.moved and look():
            opened.commit.mark_moved()
        if self._files.commit.moved:
            self._follow_resize()
            reader = self._reader
        return reader

    def _follow_resize(self) -> None:
        """Open the generation that the writer put in place of this one.

        It holds the same steps in another folder. One thread opens it for all.
        """
        with self._switching:
            former = self._files
            if former.commit.moved and not former.closed:
                assert self.path is not None
                fresh = opening.open_reader(self.path, former.policy)
                if fresh.metadata.uuid != former.metadata.uuid:
                    fresh.close()
                    raise RemovedError(
                        f"{self.path} leads to another buffer now: this one was "
                        "resized elsewhere. Close this buffer, and open it by its new "
                        "path.",
                        errno_=errno.ESTALE,
                    )
                try:
                    self._switch_to(fresh, self._reader)
                except BaseException:
                    # Transforms that do not fit: every later call says so as well.
                    fresh.close()
                    raise
                former.close()

    def _switch_to(self, opened: OpenFiles, former: GenerationReader | None = None) -> None:
        """Make a generation the current one; if this fails nothing has changed.

        The switch is made under the readers' lock, which the former reader hands to
        the new one: a draw, which holds it from the check of `replaced` to the end of
        the sampler's call, is either of the one generation or of the other. All that
        can fail comes before.
        """
        reader = GenerationReader(opened, self.transforms, former)
        with reader.lock:
            if former is not None:
                self._finalizer.detach()
                former.replaced = True
            self._files, self._reader = opened, reader
            self._identities.append(reader.home)
            self._stores.append(weakref.ref(opened.store))
            # A buffer that was dropped, or left open at exit, is closed all the same.
            # The finaliser holds the files only: it must not keep the buffer alive.
            self._finalizer = weakref.finalize(self, close_in_owner, opened, os.getpid())

    def _appender(self) -> Appender:
        """Return what adds rows.

        Raises:
            FailedError: The buffer is closed, or not open for writing.
        """
        opened = self._files
        appender = opened.appender
        if appender is None or opened.closed:
            return opened.check_writable()
        return appender

    def _count_left_out(self, draws: bool) -> int:
        """Rows that the sampler leaves out; with False, that are no legal starts."""
        reader = self._current()
        with reader.lock:
            return num_left_out(self.sampler if draws else None, reader)

    def _count_rows(self) -> tuple[int, int]:
        """Rows ever written, and rows alive."""
        opened = self._files
        if opened.appender is None or opened.closed:
            span = self.span
            return int(span.stop.sum()), int(span.lengths.sum())
        commit, capacity = opened.commit, opened.metadata.ring.capacity
        heads = commit.heads
        firsts = np.maximum(commit.tails, heads - capacity)
        return int(heads.sum()), int((heads - firsts).sum())


def _opened_again(
    kind: type[ReplayBuffer],
    where: opening.StrPath,
    sampler: Sampler | None,
    transforms: Sequence[Transform],
    limiter: Limiter | None,
    read_mode: ReadMode,
    advise: Advise,
) -> ReplayBuffer:
    """Open a buffer that was pickled."""
    buffer = kind.open(
        where,
        sampler=sampler,
        transforms=transforms,
        limiter=limiter,
        read_mode=read_mode,
        advise=advise,
    )
    if sampler is not None and unseeded(sampler, elsewhere=True):
        buffer._num_forks = -1  # of no count of forks: `sample` refuses, as in a child
    return buffer


def check_buffer(buffer: object) -> None:
    """Refuse anything but an open buffer, such as its path.

    Raises:
        SchemaError: It is something else.
    """
    if not isinstance(buffer, ReplayBuffer):
        raise SchemaError(
            f"buffer must be an open ReplayBuffer, got {shown(buffer)}. Pass "
            "ReplayBuffer.open(path)."
        )
