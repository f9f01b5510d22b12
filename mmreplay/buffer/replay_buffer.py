"""ReplayBuffer: circular buffers of environment steps that live in a folder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from numpy.typing import ArrayLike

from mmreplay import kernels
from mmreplay.batch import OWN, Batch
from mmreplay.buffer import arguments, forks, groups, lifecycle, rebuild, room
from mmreplay.buffer.adding import Adding
from mmreplay.buffer.arguments import check_mode, check_sampler
from mmreplay.buffer.limiting import Limiter
from mmreplay.buffer.reading import fold_of
from mmreplay.errors import FailedError, ForkedError, FullWarning, SchemaError, shown
from mmreplay.format.metadata import Autoreset, Engine
from mmreplay.format.sharding import Codec
from mmreplay.ring import Layout
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.random import unseeded
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Field, Schema
from mmreplay.storage.policy import Advise, ReadMode, ReadPolicy

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform


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
            if not args or not isinstance(args[0], lifecycle.Parts):
                raise TypeError(
                    f"{cls.__name__}: got a direct call, expected "
                    "ReplayBuffer.create(path, schema, capacity) for a new buffer, or "
                    "ReplayBuffer.open(path) for one that exists"
                )
            return super().__new__(cls)

    def __init__(
        self,
        parts: lifecycle.Parts,
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
        self._forks = forks.count

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
        metadata = arguments.describe(
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
        room.warn_where_short(where, metadata, 0, 2)
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
            parts = groups.open_reader(path, policy)
            return cls(parts, sampler, None, transforms, limiter)
        where = groups.folder_of(path)
        parts = lifecycle.open_writer(
            where, on_resume, commit_every, allow_network, policy
        )
        there = room.ring_nbytes(parts.metadata, parts.ledger.heads)
        try:
            room.warn_where_short(where, parts.metadata, there, 2)
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
        if self._forks != forks.count and (
            name := unseeded(self.sampler, elsewhere=True)
        ):
            child = "a process that it was pickled for"
            child = "a forked child" if self._forks >= 0 else child
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
            ring = rebuild.resized(ring, capacity, self.schema.row_nbytes)
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
            column = rebuild.filling(path, field, fill)
            rebuild.refuse_role(self.schema, schema, column)
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
        buffer._forks = -1  # of no count of forks: `sample` refuses, as in a child
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
