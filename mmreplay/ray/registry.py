"""The actor that knows the members of a run.

It keeps nothing on disk: after a kill it asks the shards, whose names Ray knows. Its
members, its schema, its limiter's settings and what the rings counted last are stored
with the cluster, as shards may be away, and Ray forgets those without a label with
their nodes. Draws and writes do not need it; a join does, and a shard whose node is
back without a label.

**Locks**, each after those above it only:

1. `Members._lock`, while members and schema change. Shards are asked under it, and
   made again; that of a node that joins is started without it.
2. `RunGrants._looking`, by the one request that asks the shards what their rings
   count. The counts change under it, and settings that a ring had are found.
3. `RunGrants._lock`, while grants change, and by the first asker, whose settings are
   the run's. No shard is asked under it.
4. `KnownRun._lock`, while what is known is stored.

The first is never held with the second or the third. A join adds the counts of its
node under the first one, and any thread may load what was stored: both only add what
is not known yet.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmreplay.ray import cluster
from mmreplay.ray.cluster import Remote
from mmreplay.ray.epoch_names import EpochNames
from mmreplay.ray.grants import Side
from mmreplay.ray.known_run import KnownRun
from mmreplay.ray.members import Members
from mmreplay.ray.run_grants import RunGrants


class Registry:
    """What the actor of a run is called for; a plain class, made one by `cluster`."""

    def __init__(self, run: str) -> None:
        """Remember the run; nothing here may raise."""
        self._run, known = run, KnownRun(run)
        self._members, self._grants = Members(known), RunGrants(known)
        self._epochs = EpochNames(known)

    def states(self) -> dict[str, str]:
        """Say what Ray says of the shards; see `cluster.shard_states`."""
        return cluster.shard_states(self._run)

    def check(self, version: str, fields: Any, roles: Any) -> None:
        """Refuse a writer that does not fit the run; see `Members.check`."""
        self._members.check(version, fields, roles)

    def join(self, key: str, root: str, host: str, node_id: str, network: bool) -> dict[str, Any]:
        """Add a node to the run; see `Members.join`."""
        return self._members.join(key, root, host, node_id, network)

    def members(self) -> dict[str, dict[str, Any]]:
        """Say which nodes belong to the run; see `Members.listed`."""
        return self._members.listed()

    def epoch_name(self, start: str, rank: int, token: str, lasts: bool = False) -> dict[str, Any]:
        """Name the epochs of a group of learners; see `EpochNames.name_of`."""
        return self._epochs.name_of(start, rank, token, lasts)

    def epoch(self, client: Any, name: str, epoch: int) -> dict[str, Any]:
        """Have every ring freeze an epoch; see `EpochNames.freeze`."""
        return self._epochs.freeze(client, name, epoch)

    def bound(self) -> list[float] | None:
        """Return the settings of the run's rate limiter; see `RunGrants.bound`."""
        return self._grants.bound()

    def known_bound(self) -> list[float] | None:
        """Return the same where it is known; see `RunGrants.known_bound`."""
        return self._grants.known_bound()

    def check_limit(self, side: Side, count: int, settings: list[float]) -> None:
        """Refuse what `limit` would refuse; see `RunGrants.check_limit`."""
        self._grants.check_limit(side, count, settings)

    def limit(self, who: str, side: Side, count: int, settings: list[float]) -> None:
        """Take in a writer or client; see `RunGrants.limit`."""
        self._grants.limit(who, side, count, settings)

    def grant(
        self,
        who: str,
        side: Side,
        count: int,
        unused: int,
        number: int,
        settings: list[float],
        ahead: int = 0,
    ) -> dict[str, Any]:
        """Grant rows or items of a rate limiter; see `RunGrants.grant`."""
        return self._grants.grant(who, side, count, unused, number, settings, ahead)


def start_registry(run: str) -> Remote:
    """Return the run's registry, made if there is none yet.

    It runs on the head of the cluster, where it can: so no loss of a node with rings
    takes along what it knows of that node.
    """
    name = cluster.registry_name(run)
    actor = cluster.actor_class(Registry, cluster.REGISTRY_THREADS, cluster.REGISTRY_CALLS)
    options = cluster.options_of(name)
    for node in ray.nodes():
        if node["Alive"] and cluster.HEAD in node["Resources"]:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                node["NodeID"], soft=True
            )
    actor.options(**options).remote(run)
    return Remote(name)
