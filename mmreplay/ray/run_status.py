"""What a run has and does now, and its end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mmreplay.errors import ReplayError, SchemaError
from mmreplay.ray import cluster
from mmreplay.ray.cluster import Remote

STOP_S = 10.0
"""How long the shards have to close their rings."""


@dataclass(frozen=True, slots=True)
class RingStatus:
    """A ring as its shard sees it.

    Attributes:
        name: The ring's.
        path: Its folder on its node.
        capacity: Rows of each environment.
        num_envs: Environments.
        steps: Steps that are alive.
        rows: Rows written since the ring was made, of all environments.
        heads: The same by environment.
        rate: Rows a second since the shard was asked last, a second ago or more; None
            where it was not.
        writer: The pid of its writer; None where it has none, or it is not known.
        free: Bytes free on the disk of the ring; None where it cannot be asked.
        priorities: Their sums, by the name of the sampler that clients draw by, as of
            the last draw.
    """

    name: str
    path: str
    capacity: int
    num_envs: int
    steps: int
    rows: int
    heads: tuple[int, ...]
    rate: float | None
    writer: int | None
    free: int | None
    priorities: dict[str, float]


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """A node of a run.

    Attributes:
        key: The node's.
        host: The name of its host; None where it is not known.
        root: The folder of the runs on it, likewise.
        pid: The process of its shard; None while it is away.
        alive: Whether its shard answers.
        error: Why it cannot serve its rings; None where it can.
        rings: Its rings; of a shard that is away as they were last.
        node_id: Ray's number of the node; None while it is away.
    """

    key: str
    host: str | None
    root: str | None
    pid: int | None
    alive: bool
    error: str | None
    rings: tuple[RingStatus, ...]
    node_id: str | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run now; see `status`.

    Attributes:
        run: The run.
        shards: Its nodes, by key.
    """

    run: str
    shards: tuple[ShardStatus, ...]

    @property
    def steps(self) -> int:
        """Steps that can be drawn now."""
        return sum(ring.steps for shard in self.shards if shard.alive for ring in shard.rings)


def status(run: str) -> RunStatus:
    """Say what a run has and does.

    Args:
        run: The run.

    Raises:
        SchemaError: There is no such run, or no cluster.
        StarvedError: The registry does not answer.

    Example:
        >>> mr.ray.status("cartpole").steps  # doctest: +SKIP
        100000
    """
    cluster.require_connection()
    require_run(run)
    members = Remote(cluster.registry_name(run)).call("members")
    return RunStatus(run, tuple(_shard(key, each) for key, each in members.items()))


def stop(run: str) -> None:
    """End a run: its shards close their rings, and its actors are no more.

    Actors outlive the drivers that made them, so that a run ends only by this. The
    folders stay, and a writer begins the run again with them.

    Args:
        run: The run.

    Raises:
        SchemaError: There is no such run, or no cluster.

    Example:
        >>> mr.ray.stop("cartpole")  # doctest: +SKIP
    """
    cluster.require_connection()
    if not cluster.shard_keys(cluster.check_name("run", run)):
        require_run(run)
    # First, as it makes shards again that end.
    cluster.kill(cluster.registry_name(run))
    names = [cluster.shard_name(run, key) for key in cluster.shard_keys(run)]
    asked = []
    for remote in map(Remote, names):
        try:
            asked.append((remote, remote.send("stop")))
        except ReplayError:
            continue
    until = time.monotonic() + STOP_S
    for remote, reference in asked:
        try:
            remote.receive(reference, max(0.0, until - time.monotonic()))
        except ReplayError:
            # It is away, and is killed when its node is back, if ever.
            continue
    for name in names:
        cluster.kill(name)
    cluster.forget_facts(run)


def require_run(run: str) -> None:
    """Refuse a run that does not exist.

    Raises:
        SchemaError: There is none of that name.
    """
    cluster.check_name("run", run)
    if not cluster.run_exists(run):
        names = cluster.run_names()
        there = f"There are {names}." if names else "There is no other."
        raise SchemaError(
            f"this cluster has no run {run!r}. {there} A run begins with mr.ray.writer(run, ...)."
        )


def _shard(key: str, member: dict[str, Any]) -> ShardStatus:
    info = member["info"] or {"rings": {}, "pid": None, "error": None}
    error = info["error"]
    return ShardStatus(
        key=key,
        host=member["host"],
        root=member["root"],
        pid=info["pid"] if member["alive"] else None,
        alive=member["alive"],
        error=None if error is None else error["message"],
        node_id=info["node_id"] if member["alive"] else None,
        rings=tuple(
            RingStatus(
                name=name,
                path=ring["path"],
                capacity=ring["capacity"],
                num_envs=ring["num_envs"],
                steps=ring["steps"],
                rows=sum(ring["heads"]),
                heads=tuple(ring["heads"]),
                rate=ring["rate"],
                writer=ring["writer"],
                free=ring["disk_free"],
                priorities=ring["priorities"] or {},
            )
            for name, ring in info["rings"].items()
        ),
    )
