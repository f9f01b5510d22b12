"""What the registry of a run knows of it, and stores with the cluster."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from mmreplay.ray import cluster
from mmreplay.ray.agreement import described
from mmreplay.ray.cluster import Remote, RunFacts
from mmreplay.schema import Schema


@dataclass(slots=True)
class Member:
    """A node of a run.

    Attributes:
        key: The node's.
        root: The folder of the runs on it; None where a restarted registry has no
            answer from its shard yet.
        host: The name of its host, likewise.
        network: Whether the folder may be on a network file system.
        info: What its shard said last.
    """

    key: str
    root: str | None = None
    host: str | None = None
    network: bool = False
    info: dict[str, Any] | None = None

    @property
    def where(self) -> list[Any] | None:
        """Root, host and network as they travel; None where they are not known."""
        if self.root is None or self.host is None:
            return None
        return [self.root, self.host, self.network]


@dataclass(frozen=True, slots=True)
class Counted:
    """What a shard's rings counted for the rate limiter when it said so last.

    Attributes:
        at_s: When that was, or when the shard was first known.
        inserts: Rows written.
        samples: Items drawn.
        size: Rows alive.
    """

    at_s: float
    inserts: int = 0
    samples: int = 0
    size: int = 0

    @property
    def counts(self) -> list[int]:
        """What it counted, as it travels and is stored."""
        return [self.inserts, self.samples, self.size]


class KnownRun:
    """Members, schema, limiter and counts of a run, as its registry knows them.

    Threads: any may ask and store; `registry` says under which lock what changes.

    Attributes:
        run: Its name.
        members: By key of the node.
        schema: Of its rings; None while there is none.
        bound: Settings of its rate limiter; None without one.
        counted: By key of the node, what its rings counted.
    """

    def __init__(self, run: str) -> None:
        """Know nothing yet; nothing here may raise."""
        self.run = run
        self.members: dict[str, Member] = {}
        self.schema: Schema | None = None
        self.bound: list[float] | None = None
        self.counted: dict[str, Counted] = {}
        self._saved: RunFacts | None = None
        self._lock = threading.Lock()

    def shard(self, key: str) -> Remote:
        """The shard of a node."""
        return Remote(cluster.shard_name(self.run, key))

    def node_keys(self) -> list[str]:
        """Keys of the nodes that are members, or have a shard."""
        self.load()
        return sorted({*self.members, *cluster.shard_keys(self.run)})

    def learn(self, info: dict[str, Any]) -> None:
        """Take the run's schema from the first ring that is known."""
        for ring in info["rings"].values():
            if self.schema is None:
                self.schema = Schema.from_json(ring["schema"], ring["roles"])

    def load(self) -> None:
        """Take in what was stored before this actor was restarted."""
        if self._saved is not None:
            return
        with suppress(RayError, ConnectionError):
            saved = cluster.load_facts(self.run)
            for key, (root, host, network) in saved["members"].items():
                self.members.setdefault(key, Member(key, root, host, network))
            now = time.monotonic()
            for key, counts in saved["counts"].items():
                if key not in self.counted or not self.counted[key].inserts:
                    self.counted[key] = Counted(now, *counts)
            self.bound = self.bound or saved["bound"]
            if self.schema is None and saved["schema"] is not None:
                self.schema = Schema.from_json(*saved["schema"])
            self._saved = saved

    def save(self) -> None:
        """Store what changed; a failure is made good by the next call."""
        # Threads of joins and of grants: the newest is stored last.
        with self._lock:
            members = {
                key: member.where
                for key, member in sorted(self.members.items())
                if member.where is not None
            }
            schema = None if self.schema is None else [*described(self.schema)]
            counts = {key: each.counts for key, each in sorted(self.counted.items())}
            facts: RunFacts = {
                "members": members,
                "bound": self.bound,
                "schema": schema,
                "counts": counts,
            }
            if self._saved is not None and facts != self._saved:
                with suppress(RayError, ConnectionError):
                    cluster.save_facts(self.run, facts)
                    self._saved = facts
