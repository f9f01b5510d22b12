"""A writer whose rows the whole run can draw.

The ring is an ordinary buffer on a disk of the writer's node. Adding rows is no call of
Ray: the shard of the node, a process beside it, sees new rows through its mapping.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from mmreplay.arguments import one_of
from mmreplay.buffer.opening import (
    StrPath,
    absolute,
    check_options,
    describe,
    holds_buffer,
    remove_empty,
)
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk import files
from mmreplay.disk.lock import FILE_NAME as LOCK
from mmreplay.disk.lock import Owner, refuse_network
from mmreplay.errors import FormatError, LockedError, SchemaError
from mmreplay.format.metadata import FILE_NAME as METADATA
from mmreplay.format.metadata import ON_DISK
from mmreplay.limiter import RateLimiter
from mmreplay.ray import cluster
from mmreplay.ray.agreement import check_same, described
from mmreplay.ray.cluster import PAUSE_S, VERSION, Remote
from mmreplay.ray.grants import STEPS
from mmreplay.ray.lanes import THIN
from mmreplay.ray.limits import RingCounter, RunLimiter, refuse_other_limiters, refuse_unfit_limiter
from mmreplay.ray.registry import start_registry
from mmreplay.schema import Schema

LOCKED_S = 10.0
"""How long a shard's predecessor may still hold the folder: it ends within 3 seconds
of its node's raylet."""
MAX_RINGS = 1000


def writer(
    run: str,
    schema: Schema,
    capacity: int,
    *,
    root: StrPath,
    name: str | None = None,
    num_envs: int = 1,
    limiter: RateLimiter | None = None,
    key: str | None = None,
    on_resume: Literal["break", "truncate", "continue"] = "break",
    **create: Any,
) -> RingWriter:
    """Write a ring of a run on this node's disk; the run begins with its first writer.

    The ring is the buffer ``root/run/name``, made or opened again.

    Args:
        run: The run's name.
        schema: The fields of one step; the same in the whole run.
        capacity: Rows of each environment.
        root: A folder on a disk of this node, the same for all writers of the node.
        name: The ring's name. By default the first of ``ring-000``, ``ring-001`` and
            so on that has no writer.
        num_envs: Environments.
        limiter: Of the whole run: all its writers need an equal one, and its clients
            follow it. None for no limit.
        key: What names this node where it has no label ``mmreplay``; by default its
            host's name.
        on_resume: As of `ReplayBuffer.open`, for a ring that is opened again.
        **create: More arguments of `ReplayBuffer.create`.

    Raises:
        SchemaError: An argument is not legal, there is no cluster, or the run has
            another schema or limiter or, on this node, another root.
        LockedError: The ring has a writer, or the folder is served already.
        FailedError: The disk cannot be written, or is a network file system.

    Example:
        >>> import ray  # doctest: +SKIP
        >>> ray.init(address="auto")  # doctest: +SKIP
        >>> with mr.ray.writer(  # doctest: +SKIP
        ...     "cartpole", schema, 100_000, root="/data/replay"
        ... ) as writer:
        ...     writer.add(observation=observation, reward=1.0, terminated=False)
    """
    cluster.require_connection()
    cluster.check_name("run", run)
    check_options(on_resume=on_resume)
    fields, roles = described(schema)
    refuse_other_limiters(limiter)
    node = cluster.this_node()
    key = node_key(node, key)
    if name is not None:
        _check_ring_name(name)
    where = absolute(root)
    network = bool(create.get("allow_network", False))
    # Before there is a registry, which would stay.
    folder = where / run
    check_folder(folder, network)
    check_create(folder / "ring", schema, capacity, num_envs, limiter, create)
    names = _ring_names(name)
    _check_next_ring(folder, names, schema, capacity, num_envs, create)
    registry = start_registry(run)
    registry.call("check", VERSION, fields, roles)
    if limiter is not None:
        # Before a ring is made, or one has recorded it.
        refuse_unfit_limiter(run, limiter, STEPS * num_envs)
    granted = None if limiter is None else RunLimiter(run, limiter, num_envs)
    buffer, is_new = _open(folder, names, schema, capacity, num_envs, granted, on_resume, create)
    assert buffer.path is not None
    try:
        registry.call("join", key, str(where), node.host, node.node_id, network)
        serve(Remote(cluster.shard_name(run, key)), buffer.path.name)
    except BaseException as error:
        buffer.close()
        if is_new and isinstance(error, SchemaError):
            remove_refused(buffer.path, buffer.metadata.uuid)
        raise
    return RingWriter(run, key, buffer)


def remove_refused(path: Path, uuid: bytes | None = None, locked_s: float = 0.0) -> None:
    """Remove a ring that was made for a run which refuses it; see `remove_empty`.

    Args:
        path: The ring, closed.
        uuid: Of the ring that was made; None where that is not known.
        locked_s: How long another process may have it open for writing.
    """
    stop = time.monotonic() + locked_s
    while not remove_empty(path, uuid) and time.monotonic() < stop:
        time.sleep(PAUSE_S)
    with suppress(OSError):
        files.disk.rmdir(path)


def _check_ring_name(name: str) -> None:
    """Refuse names that are not legal, or of other files of the run's folder.

    Raises:
        SchemaError: It is one.
    """
    cluster.check_name("name", name)
    if name in (THIN, LOCK):
        raise SchemaError(
            f"name must not be {THIN!r}, which is the ring of thin writers, or "
            f"{LOCK!r}, got {name!r}. Give the ring another name."
        )


def node_key(node: cluster.Node, key: str | None) -> str:
    """Return the key of a node, which its label decides where it has one.

    Raises:
        SchemaError: Another key was given, or no key can be made of the host's name.
    """
    if key is None:
        return cluster.check_name("key", node.key)
    cluster.check_name("key", key)
    if node.label not in (None, key):
        raise SchemaError(
            f"key must be {node.label!r}, the label 'mmreplay' of this node, got "
            f"{key!r}. Leave it out."
        )
    return key


def serve(shard: Remote, name: str) -> dict[str, Any]:
    """Have a shard open a ring; a folder that is about to be free is waited for."""
    stop = time.monotonic() + LOCKED_S
    while True:
        try:
            facts: dict[str, Any] = shard.call("serve", name)
            return facts
        except LockedError:
            if time.monotonic() > stop:
                raise
        time.sleep(PAUSE_S)


def check_folder(folder: Path, network: bool) -> None:
    """Refuse a folder of a run that cannot be one.

    Args:
        folder: It need not exist yet.
        network: Whether it may be on a network file system.

    Raises:
        SchemaError: A file is in its place.
        FailedError: It is on a network file system.
    """
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise SchemaError(
            f"root must be a folder, but {there} is a file. Pass a folder on a local "
            "disk of this node."
        )
    refuse_network(there, network)


def check_create(
    path: Path,
    schema: Schema,
    capacity: int,
    num_envs: int,
    limiter: RateLimiter | None,
    create: dict[str, Any],
) -> None:
    """Refuse what `ReplayBuffer.create` would refuse, before anything is made.

    Args:
        path: Of the ring.
        schema: Of its writer.
        capacity: Rows of each environment.
        num_envs: Environments.
        limiter: Of the run.
        create: More arguments of `ReplayBuffer.create`.

    Raises:
        SchemaError: An argument is not legal.
        TypeError: There is no such argument.
    """
    call = signature(ReplayBuffer.create).bind(path, schema, capacity, **create)
    call.apply_defaults()
    given = call.arguments
    autoreset = given["autoreset"]
    if autoreset is None and isinstance(schema, Schema) and schema.autoreset is None:
        # Of a ring that is opened again it is known; else `create` asks for it.
        autoreset = "disabled" if any(path.parent.glob(f"*/{METADATA}")) else None
    metadata = describe(
        schema,
        capacity,
        num_envs,
        given["engine"],
        given["layout"],
        autoreset,
        given["user_metadata"],
        given["codec"],
        given["level"],
        given["chunk_crc32c"],
        given["heap_bytes"],
    )
    one_of("engine", given["engine"], ON_DISK, "Rings of a run are on disk.")
    options = {name: given[name] for name in ("commit_every", "transforms", "sampler")}
    check_options(metadata, **options)
    if limiter is not None:
        ring = metadata.ring
        RingCounter(limiter).check(path, ring.capacity * ring.num_envs)


def _check_next_ring(
    folder: Path,
    names: Sequence[str],
    schema: Schema,
    capacity: int,
    num_envs: int,
    create: dict[str, Any],
) -> None:
    """Refuse arguments that are not those of the ring that is to be opened again.

    Raises:
        SchemaError: One differs.
    """
    for each in names:
        path = folder / each
        if not holds_buffer(path):
            return
        if not Owner(path).alive:
            with ReplayBuffer.open(path) as ring:
                check_same(ring, schema, capacity, num_envs, create)
            return


def _ring_names(name: str | None) -> list[str]:
    """The names that a writer tries one after another."""
    return [f"ring-{k:03d}" for k in range(MAX_RINGS)] if name is None else [name]


def _open(
    folder: Path,
    names: Sequence[str],
    schema: Schema,
    capacity: int,
    num_envs: int,
    limiter: RunLimiter | None,
    on_resume: Literal["break", "truncate", "continue"],
    create: dict[str, Any],
) -> tuple[ReplayBuffer, bool]:
    """Make or open a ring for writing, the first one of some that has no writer.

    Returns:
        The ring, and whether it was made.
    """
    for each in names:
        path = folder / each
        if not holds_buffer(path):
            try:
                ring = ReplayBuffer.create(
                    path, schema, capacity, num_envs, limiter=limiter, **create
                )
                return ring, True
            except SchemaError:
                # Of two first writers of a run, the limiter of one was refused.
                remove_refused(path)
                raise
            except LockedError:
                # Another writer makes it, or it is just removed.
                if len(names) > 1:
                    continue
                raise
            except FormatError:
                # Another writer made it since it was looked for.
                if len(names) > 1 and (path / LOCK).exists():
                    continue
                raise
        shared = {
            argument: create[argument]
            for argument in ("sampler", "transforms", "commit_every", "allow_network")
            if argument in create
        }
        try:
            buffer = ReplayBuffer.open(path, "r+", limiter=limiter, on_resume=on_resume, **shared)
        except LockedError:
            if len(names) > 1:
                continue
            raise
        try:
            check_same(buffer, schema, capacity, num_envs, create)
        except BaseException:
            buffer.close()
            raise
        return buffer, False
    raise LockedError(
        f"all of {MAX_RINGS} rings in {folder} have a writer. Give this writer a name."
    )


class RingWriter:
    """The writer of a ring of a run; `writer` makes it.

    Attributes:
        run: The run.
        key: The key of this node.
        buffer: The ring, open for writing.
    """

    def __init__(self, run: str, key: str, buffer: ReplayBuffer) -> None:
        """Take over an open ring; use `writer`."""
        self.run, self.key, self.buffer = run, key, buffer
        # No call of ours between the caller and the buffer.
        self.add, self.extend = buffer.add, buffer.extend
        self.end_episodes = buffer.end_episodes

    def __repr__(self) -> str:
        """Show the run and the ring."""
        return f"<RingWriter of {self.run!r} on {self.key!r}: {self.buffer!r}>"

    def close(self) -> None:
        """Commit and close the ring; its rows can be drawn as before."""
        self.buffer.close()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()
