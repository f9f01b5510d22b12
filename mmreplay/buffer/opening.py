"""Create and open a buffer's files, after checking the arguments.

Crash safety needs the order of the steps: a new folder becomes a buffer when
metadata.json appears in it, last; an opening for writing takes the lock first, and
removes former generations only when the current one is open.
"""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from mmreplay import strict_json
from mmreplay.arguments import integer, number, one_of, size_in_bytes
from mmreplay.buffer.append import Appender, FastAppend
from mmreplay.buffer.draw import batch_transform, check_fields, check_sampler
from mmreplay.buffer.new_generation import NewGeneration, prepare_folder
from mmreplay.buffer.open_files import OpenFiles, refuse_writing
from mmreplay.disk import files
from mmreplay.disk.address import URL_SCHEME, url_of
from mmreplay.disk.lock import FILE_NAME as LOCK
from mmreplay.disk.lock import Owner, WriterLock, refuse_network
from mmreplay.errors import (
    CorruptError,
    DurabilityWarning,
    FormatError,
    LockedError,
    SchemaError,
    VersionError,
    shown,
)
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import AUTORESETS, ENGINES, ON_DISK, Autoreset, Engine, Metadata
from mmreplay.format.sharding import Codec, Sharding
from mmreplay.ring import LAYOUTS, Layout, Ring
from mmreplay.samplers.base import Sampler
from mmreplay.schema import Schema
from mmreplay.storage import recovery
from mmreplay.storage.commit_state import MemoryCommitState
from mmreplay.storage.committer import Committer
from mmreplay.storage.engines import STORES
from mmreplay.storage.memmap import POLICY
from mmreplay.storage.memory import MemoryStore
from mmreplay.storage.recovery import Recovery
from mmreplay.storage.store import ReadPolicy
from mmreplay.storage.zarr import group
from mmreplay.strict_json import Json
from mmreplay.transforms.base import Transform

OPENERS: tuple[str, ...] = ("mmreplay.zarr_groups.opening",)
"""Modules that open, to be read, what is no buffer's folder; see `Opener`."""
ROWS_EACH = "Give the rows to keep of each environment, int(1e6) for a million."


def holds_buffer(path: object) -> bool:
    """Return whether a path is a folder with a buffer, and so no Zarr group or URL."""
    if not isinstance(path, str | os.PathLike):
        return False
    text = files.expanded(path)
    if text.startswith(URL_SCHEME):
        return False
    return os.path.exists(os.path.join(text, metadata_file.FILE_NAME))


class Opener(Protocol):
    """What a module of `OPENERS` has."""

    def claims(self, path: object) -> bool:
        """Whether a path is what it opens."""

    def open_reader(self, path: Any, policy: ReadPolicy) -> OpenFiles:
        """Open what it claims."""


def opener_of(path: object) -> Opener | None:
    """The module that opens what a path is; None of a buffer, or of nothing."""
    if holds_buffer(path):
        return None
    openers = (cast("Opener", import_module(name)) for name in OPENERS)
    return next((opener for opener in openers if opener.claims(path)), None)


def writable_folder(path: StrPath) -> Path:
    """Return a buffer's folder, to open it for writing.

    Raises:
        FailedError: The path leads to what is only read.
    """
    if opener_of(path) is not None:
        refuse_writing(path)
    return absolute(path)


def check_mode(mode: str) -> None:
    """Check the argument ``mode``.

    Raises:
        SchemaError: It is neither ``"r"`` nor ``"r+"``.
    """
    if mode not in ("r", "r+"):
        raise SchemaError(
            f"mode must be 'r' or 'r+', got {shown(mode)}. Use ReplayBuffer.create to "
            "make a new buffer."
        )


def check_options(
    metadata: Metadata | None = None,
    *,
    on_resume: str = "break",
    commit_every: float | None = None,
    transforms: Sequence[Transform] = (),
    sampler: Sampler | None = None,
) -> tuple[Transform, ...]:
    """Check options of a buffer that is to be created or opened, before it is.

    Args:
        metadata: Of the buffer, which transforms and sampler have to fit; None where it
            is not known yet.
        on_resume: As in `ReplayBuffer.open`, as the others.
        commit_every: See there.
        transforms: See there.
        sampler: See there.

    Returns:
        The transforms.

    Raises:
        SchemaError: One is not legal, or does not fit.
    """
    one_of(
        "on_resume",
        on_resume,
        RESUMES,
        "'break' is right unless the environments went on in the meantime.",
    )
    if commit_every is not None:
        number(
            "commit_every",
            commit_every,
            above=0,
            finite=False,
            way_out="Give seconds, or None to commit only by commit() and close().",
        )
    if not isinstance(transforms, Sequence):
        raise SchemaError(
            f"transforms must be a list of transforms, got {shown(transforms)}. Put a "
            "single transform into a list."
        )
    several = tuple(transforms)
    transform = None if metadata is None else batch_transform(several, metadata)
    if sampler is not None:
        check_sampler(sampler)
        if metadata is not None:
            check_fields(sampler, metadata.schema, transform)
    return several


def describe(
    schema: Schema,
    capacity: int,
    num_envs: int,
    engine: Engine,
    layout: Layout | None,
    autoreset: Autoreset | Enum | None,
    user_metadata: Json | None,
    codec: Codec | None = None,
    level: int | None = None,
    chunk_crc32c: bool = False,
    heap_bytes: int | str | None = None,
) -> Metadata:
    """Check the arguments of `ReplayBuffer.create` and return the metadata.

    Raises:
        SchemaError: An argument is not legal.
        FormatError: user_metadata holds a value that JSON cannot.
    """
    integer("capacity", capacity, 1, ROWS_EACH, maximum=metadata_file.MAX_CAPACITY)
    envs = "Give the number of environments; each call of add has a step of each."
    integer("num_envs", num_envs, 1, envs, maximum=metadata_file.MAX_NUM_ENVS)
    stated = schema.autoreset if isinstance(schema, Schema) else None
    named = _named_autoreset(autoreset, stated, num_envs)
    _check_choices(engine, layout, named)
    if stated not in (None, named):
        raise SchemaError(
            f"autoreset must be {stated!r} as in the schema's environment, got "
            f"{named!r}. Leave it out, or make the schema by Schema.from_spaces if "
            "other environments fill the buffer."
        )
    if user_metadata is not None and not isinstance(user_metadata, dict):
        raise SchemaError(
            f"user_metadata must be a dict of JSON values, got "
            f"{shown(user_metadata)}. Put the value into a dict."
        )
    # Also for a buffer in RAM, which an export may write.
    strict_json.dump(user_metadata or {}, "user_metadata")
    if not isinstance(schema, Schema):
        raise SchemaError(
            f"schema must be a Schema, got {type(schema).__name__}. Wrap the fields in "
            "mmreplay.Schema(...), or use Schema.from_env or Schema.from_example."
        )
    _check_compression(engine, codec=codec, level=level, chunk_crc32c=chunk_crc32c or None)
    if engine == "zarr" and schema.varying and layout is None:
        # Each environment has a heap of its own, which its own shards must follow.
        layout = "env_major"
    ring = Ring.sized(int(capacity), int(num_envs), layout, schema.row_nbytes)
    heap_nbytes = heap_nbytes_of(heap_bytes, ring, schema)
    sharding = None
    if engine == "zarr":
        group.check_names(schema)
        sharding = Sharding.sized(
            codec or "blosc-lz4",
            ring,
            schema.row_nbytes,
            level,
            chunk_crc32c,
            metadata_file.rows_of_heap(heap_nbytes, schema),
        )
        ring = sharding.fit(ring)
    return Metadata(
        uuid=secrets.token_bytes(16),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        generation=1,
        engine=engine,
        autoreset=cast("Autoreset", named),
        ring=ring,
        schema=schema,
        user=user_metadata or {},
        sharding=sharding,
        heap_nbytes=heap_nbytes,
    )


def _named_autoreset(
    autoreset: Autoreset | Enum | None, stated: Autoreset | None, num_envs: int
) -> str:
    """What environments do after an end, as the caller or the schema names it.

    Args:
        autoreset: The caller's, such as Gymnasium's enum member in
            `env.metadata["autoreset_mode"]`.
        stated: The schema's.
        num_envs: Of one environment it need not be said.

    Raises:
        SchemaError: Neither names it.
    """
    named = autoreset.name.lower() if isinstance(autoreset, Enum) else autoreset
    if named is None:
        named = stated
    if named is None and num_envs > 1:
        raise SchemaError(
            f"autoreset must say what the {num_envs} environments do after an episode "
            "ends. Use Schema.from_env(envs), or pass autoreset='next_step' "
            "(Gymnasium's vector default, EnvPool: the next call of step resets, with "
            "reward 0), 'same_step' (AutoresetMode.SAME_STEP, Stable-Baselines3's "
            "VecEnv, Isaac Lab: the step that ends the episode resets) or 'disabled' "
            "(you call reset)."
        )
    # One environment: a new episode begins only when the caller resets.
    return "disabled" if named is None else named


def _check_compression(engine: str, **asked: object) -> None:
    """Refuse options of compressed rows for another engine; None is not given."""
    for name, value in asked.items():
        if value is not None and engine != "zarr":
            raise SchemaError(
                f"{name}={shown(value)} needs engine='zarr', got "
                f"engine={shown(engine)}. Leave it out, or pass that engine."
            )


def heap_nbytes_of(heap_bytes: int | str | None, ring: Ring, schema: Schema) -> int:
    """Bytes of each environment's heap, as `ReplayBuffer.create` takes them."""
    planned = metadata_file.planned_lengths(schema)
    if schema.varying and heap_bytes is None and len(planned) == len(schema.varying):
        heap_bytes = metadata_file.planned_heap_nbytes(schema, ring.capacity, planned)
    if schema.varying and heap_bytes is None:
        unknown = next(path for path in schema.varying if path not in planned)
        least = metadata_file.smallest_heap_nbytes(schema)
        raise SchemaError(
            f"heap_bytes must be given, as field {unknown!r} varies: the "
            "bytes that values of one environment may take, such as '1 GiB'. For all "
            "rows to fit, pass about capacity times the average bytes of a row's "
            f"values; at least {least}."
        )
    given = 0 if heap_bytes is None else size_in_bytes("heap_bytes", heap_bytes)
    step = metadata_file.HEAP_STEP_NBYTES
    nbytes = -(-given // step) * step
    metadata_file.check_heap_nbytes(nbytes, ring, schema, given)
    return nbytes


def _check_choices(engine: str, layout: str | None, autoreset: str) -> None:
    one_of("engine", engine, ENGINES, "Leave it out for memory-mapped files.")
    if layout is not None:
        one_of("layout", layout, LAYOUTS, "Leave it out to choose it by num_envs.")
    one_of(
        "autoreset",
        autoreset,
        AUTORESETS,
        "Say what your environments do after an end: 'next_step' is the default of "
        "Gymnasium's vector environments, 'disabled' is for loops that call reset.",
    )


RESUMES = ("break", "truncate", "continue")
OPEN_TRIES = 3

StrPath = str | os.PathLike[str]


def absolute(path: StrPath) -> Path:
    """Return an absolute path; links and URLs stay as they are.

    Raises:
        FormatError: The argument is no path, or its home folder is not known, or the
            working folder was removed.
    """
    text = files.expanded(path)
    if text.startswith(URL_SCHEME) and url_of(text) is not None:
        return Path(text)
    return files.absolute(text)


def create_memory(metadata: Metadata) -> OpenFiles:
    """Make a buffer in RAM."""
    ring = metadata.ring
    store = MemoryStore(ring, metadata.schema, metadata.heap_nbytes)
    commit = MemoryCommitState(ring.num_envs, metadata.heap_nbytes)
    appender = Appender(
        store, commit, None, metadata.schema, metadata.autoreset, metadata.schema.row_nbytes
    )
    recovered = Recovery("new", commit.heads, commit.heads)
    return OpenFiles(None, metadata, store, commit, recovered, appender)


def create(
    path: Path, metadata: Metadata, commit_every: float | None, allow_network: bool
) -> OpenFiles:
    """Make a buffer's folder and open it for writing."""
    check_options(commit_every=commit_every)
    metadata_file.encode(metadata)  # what cannot be written is refused first
    there = os.path.exists(path)
    way_out = "Open it with ReplayBuffer.open(path, 'r+'), or choose another path."
    prepare_folder(path, way_out)
    refuse_network(path, allow_network)
    lock = WriterLock(path)
    opened = None
    try:
        if not lock.identifiable:
            warnings.warn(
                f"{path}: its file system does not say when a file was created, so a "
                "buffer looks like a copy of it, and a killed writer loses the rows "
                "since its last commit. Lower commit_every, or use a disk with ext4, "
                "XFS or btrfs.",
                DurabilityWarning,
                stacklevel=3,
            )
        prepare_folder(path, way_out)  # again: another process may have had the lock
        # metadata.json appears last: without it the folder is no buffer yet.
        recovery.clear_half(path)
        recovery.sweep(path, metadata)
        zeros = np.zeros(metadata.ring.num_envs, np.int64)
        with NewGeneration(path, metadata) as new:
            # The group of a Zarr buffer is made by its writer.
            new.finish(zeros, zeros, seal=None)
        new.publish()
        opened = _open_locked(path, metadata, lock)
        opened.recovery = Recovery("new", opened.commit.heads, opened.commit.heads)
        _start(opened, commit_every)
    except BaseException as error:
        recovery.withdraw(path, metadata.folder, there, error)
        _abort(opened, lock)
        raise
    return opened


def remove_empty(path: Path, uuid: bytes | None = None) -> bool:
    """Remove a buffer that was made for a call that failed: it would be in the way.

    A buffer with rows, or with a writer, stays. An error of the removal is not raised:
    the caller raises why its call failed.

    Args:
        path: Its folder, which stays, with the files of others in it. It is closed.
        uuid: Of the buffer that was made; None where that is not known.

    Returns:
        False where another process has it open for writing.
    """
    if not holds_buffer(path):
        return True
    # Not even a warning of the reader, which a program may have turned into an error.
    with suppress(Exception):
        try:
            lock = WriterLock(path)
        except LockedError:
            return False
        try:
            opened = open_reader(path)
            has_rows, metadata = bool(opened.commit.heads.any()), opened.metadata
            opened.close()
            if has_rows or uuid not in (None, metadata.uuid):
                return True
            # The metadata first: without it the folder is no buffer.
            own = metadata_file.FILE_NAME, metadata.folder, *metadata_file.SIDECARS
            for name in (*own, LOCK):
                files.remove_tree(path / name)
        finally:
            lock.release()
    return True


def refuse_inside(
    target: Path, source: Path, folder: Path | None = None, *, what: str = "buffer"
) -> None:
    """Refuse to write into a buffer's own folder, also through links.

    Args:
        target: The file or folder to make.
        source: The buffer.
        folder: The folder to write into; the target itself by default.
        what: What the source is, for the error.

    Raises:
        FormatError: The folder is the buffer's, or inside it.
    """
    root = os.path.realpath(source)
    if Path(os.path.realpath(folder or target)).is_relative_to(root):
        itself = os.path.realpath(target) == root
        where = f"the {what} itself" if itself else f"inside the {what} {source}"
        raise FormatError(f"{target} is {where}. Choose a path outside the {what}.")


def open_reader(path: Path, policy: ReadPolicy = POLICY) -> OpenFiles:
    """Open a buffer read-only, also while its writer resizes it."""
    for attempt in range(OPEN_TRIES):
        metadata = metadata_file.load(path)
        try:
            return _open_generation(path, metadata, policy)
        except CorruptError:
            # A writer may have moved on to the next generation while we opened.
            last = attempt == OPEN_TRIES - 1
            if last or metadata_file.load(path).generation == metadata.generation:
                raise
    raise AssertionError("unreachable")


def _open_generation(path: Path, metadata: Metadata, policy: ReadPolicy) -> OpenFiles:
    folder = path / metadata.folder
    _refuse_engine(path, metadata)
    commit, recovered = recovery.open_reader(folder, metadata)
    try:
        # Shards are opened when they are read: by then a link may lead elsewhere.
        real = Path(os.path.realpath(folder))
        open_store = STORES[metadata.engine].open
        store = open_store(real, metadata, writable=False, policy=policy)
    except BaseException:
        commit.close()
        raise
    if recovered.how == "killed" and Owner(path).alive:
        recovered = Recovery("live", recovered.heads, recovered.committed)
    opened = OpenFiles(path, metadata, store, commit, recovered, policy=policy)
    watch = recovery.FolderWatch(path, metadata, commit.file)
    opened.refuse_removed, opened.refuse_elsewhere = watch.look, watch.refuse_elsewhere
    opened.watch = watch
    return opened


def _refuse_engine(path: Path, metadata: Metadata) -> None:
    if metadata.engine not in ON_DISK:
        raise VersionError(
            f"{path} was written with engine {metadata.engine!r}, and this mmreplay "
            f"opens {list(ON_DISK)}. Install a newer mmreplay."
        )


def open_writer(
    path: Path,
    on_resume: str,
    commit_every: float | None,
    allow_network: bool,
    policy: ReadPolicy = POLICY,
) -> OpenFiles:
    """Open a buffer for writing, with its lock."""
    check_options(on_resume=on_resume, commit_every=commit_every)
    metadata = metadata_file.load(path)
    _refuse_engine(path, metadata)
    if metadata.unknown_features:
        raise VersionError(
            f"{path} uses the features {list(metadata.unknown_features)}, which this "
            "mmreplay cannot write. Open it with mode='r', or install a newer mmreplay."
        )
    refuse_network(path, allow_network)
    lock = WriterLock(path)
    opened = None
    try:
        metadata = metadata_file.load(path)
        # A writer killed between a rename and its sync left the switch visible, and
        # not durable; what follows builds on it, and sweeps what it replaced.
        files.sync_folder(path)
        opened = _open_locked(path, metadata, lock, policy)
        # Only now: the generation that is open is the current one.
        removed = recovery.sweep(path, metadata)
        opened.recovery = replace(opened.recovery, removed=removed)
        assert opened.appender is not None
        opened.appender.resume(on_resume)
        _start(opened, commit_every)
    except BaseException:
        _abort(opened, lock)
        raise
    return opened


def _abort(opened: OpenFiles | None, lock: WriterLock) -> None:
    """Close the files of an opening that failed or was interrupted."""
    if opened is None:
        lock.release()
    else:
        opened.close()


def _open_locked(
    path: Path, metadata: Metadata, lock: WriterLock | None, policy: ReadPolicy = POLICY
) -> OpenFiles:
    """Open a generation for writing; the caller holds the lock, or these files."""
    # Shards are made while the buffer is open: by then a link may lead elsewhere.
    folder = Path(os.path.realpath(path / metadata.folder))
    open_store = STORES[metadata.engine].open
    store = open_store(folder, metadata, writable=True, policy=policy)
    try:
        commit, recovered = recovery.open_writer(folder, metadata)
    except BaseException:
        store.close()
        raise
    watch = recovery.FolderWatch(path, metadata, commit.file)
    store.begin_writing(commit, watch.refuse_removed)
    committer = Committer(store, commit, path, watch.refuse_removed)
    # Values that a killed writer set are committed in time like those set from now on.
    committer.rows_modified = recovered.how == "killed"
    schema = metadata.schema
    writers = store.step_writers
    fast = None if writers is None else FastAppend(metadata.ring, writers, commit)
    appender = Appender(
        store, commit, committer, schema, metadata.autoreset, schema.row_nbytes, fast
    )
    opened = OpenFiles(path, metadata, store, commit, recovered, appender, committer, lock, policy)
    opened.refuse_elsewhere, opened.watch = watch.refuse_elsewhere, watch
    return opened


def open_next(former: OpenFiles, metadata: Metadata, commit_every: float | None) -> OpenFiles:
    """Open a generation that is to replace another one, before it does.

    The former one keeps the lock, and goes on if this fails; the caller hands the
    lock on when the new one comes into force.
    """
    assert former.path is not None
    fresh = _open_locked(former.path, metadata, None, former.policy)
    try:
        assert fresh.appender is not None
        assert former.appender is not None
        fresh.appender.continue_from(former.appender)
        _start(fresh, commit_every)
    except BaseException:
        fresh.discard()
        raise
    return fresh


def _start(opened: OpenFiles, commit_every: float | None) -> None:
    if opened.committer is not None and commit_every is not None:
        opened.committer.start(commit_every)
