"""The nodes of a run: who may write to it, and whose shards are to be made again."""

from __future__ import annotations

import threading
import time
from typing import Any

from mmreplay.errors import FailedError, SchemaError
from mmreplay.ray import cluster
from mmreplay.ray.agreement import differing
from mmreplay.ray.cluster import ANSWER_S, PAUSE_S, VERSION, Node, UnansweredError
from mmreplay.ray.known_run import Counted, KnownRun, Member
from mmreplay.ray.shard import start_shard
from mmreplay.schema import Schema

INFO_S = 3.0
"""Within which a shard says what it serves, or counts as away."""


class Members:
    """Takes nodes into a run, and makes the shards of those that are back."""

    def __init__(self, known: KnownRun) -> None:
        """Begin with what is known of the run."""
        self._known = known
        self._lock = threading.RLock()

    def check(self, version: str, fields: Any, roles: Any) -> None:
        """Refuse a writer that does not fit the run, before it makes a ring.

        Args:
            version: Of its mmreplay.
            fields: Of its schema, as JSON.
            roles: Likewise.

        Raises:
            SchemaError: The run has other fields.
            FailedError: It runs another version.
        """
        cluster.check_version(f"the run {self._known.run!r}", VERSION, version)
        with self._lock:
            self._refresh()
            self._refuse_another_schema(Schema.from_json(fields, roles))

    def _refuse_another_schema(self, mine: Schema) -> None:
        if self._known.schema is not None and mine != self._known.schema:
            raise SchemaError(
                f"the run {self._known.run!r} has another schema: "
                f"{differing(mine, self._known.schema)}. Name another run, or write the "
                "fields of this one."
            )

    def join(self, key: str, root: str, host: str, node_id: str, network: bool) -> dict[str, Any]:
        """Add a node to the run and make its shard; may be repeated.

        Args:
            key: The node's.
            root: The folder of the runs on it.
            host: The name of its host.
            node_id: Ray's number of it now.
            network: Whether the folder may be on a network file system.

        Returns:
            What the shard says of itself.

        Raises:
            SchemaError: The node is a member with another folder, or its rings have
                another schema than the run: two writers may begin it at one time.
            FailedError: Its shard has another version of mmreplay.
            StarvedError: Its shard does not answer.
        """
        node = Node(node_id, host, None)
        for each in cluster.nodes():
            if each.node_id == node_id:
                node = each
        # Others do not wait while a shard starts.
        info = self._started(key, root, node, network)
        cluster.check_version(f"the shard {key!r}", info["version"], VERSION)
        # Ray ignores the arguments where there was an actor of the name.
        if info["root"] != root:
            raise SchemaError(
                f"root must be {info['root']!r} on the node {key!r}, as the run "
                f"{self._known.run!r} is served from there, got {root!r}. Pass that "
                "folder, or name another run."
            )
        try:
            with self._lock:
                self._known.load()
                for ring in info["rings"].values():
                    mine = Schema.from_json(ring["schema"], ring["roles"])
                    self._refuse_another_schema(mine)
                self._known.members[key] = Member(key, root, host, network, info)
                # Its rows count for a rate limiter from the first one on.
                self._known.counted.setdefault(key, Counted(time.monotonic()))
                self._known.learn(info)
                self._known.save()
                return dict(info)
        except SchemaError:
            # None of its rings belongs to the run, as those of a shard are alike.
            # Clients would find it by its name.
            self._forget(key)
            raise

    def _forget(self, key: str) -> None:
        """End a shard, which is no member any more."""
        cluster.kill(cluster.shard_name(self._known.run, key))
        with self._lock:
            self._known.members.pop(key, None)
            self._known.counted.pop(key, None)
            self._known.save()

    def _started(self, key: str, root: str, node: Node, network: bool) -> dict[str, Any]:
        """Make the shard of a node that joins, and return what it says of itself.

        A node without a label may be back before Ray finds that it was gone. The shard
        of before ends then, and leaves its name to the new one.
        """
        stop = time.monotonic() + ANSWER_S
        while True:
            start_shard(self._known.run, key, root, node, network)
            left = max(0.0, stop - time.monotonic())
            try:
                info: dict[str, Any] = self._known.shard(key).call("info", timeout_s=left)
                return info
            except FailedError:
                if time.monotonic() + PAUSE_S >= stop:
                    raise
            time.sleep(PAUSE_S)

    def listed(self) -> dict[str, dict[str, Any]]:
        """Say which nodes belong to the run, and make shards whose nodes are back.

        Returns:
            By key: ``root``, ``host``, ``alive`` and ``info``, what the shard said
            last; of a node that is away what it said before, or None.
        """
        with self._lock:
            alive = self._refresh()
            if self._make_again():
                alive = self._refresh()
            return {
                key: {
                    "root": member.root,
                    "host": member.host,
                    "alive": key in alive,
                    "info": member.info,
                }
                for key, member in sorted(self._known.members.items())
            }

    def _refresh(self) -> set[str]:
        """Ask all shards what they serve; return the keys of those that answer."""
        asked = []
        self._known.load()
        for key in {*self._known.members, *cluster.shard_keys(self._known.run)}:
            remote = self._known.shard(key)
            try:
                asked.append((key, remote, remote.send("info")))
            except FailedError:
                continue
        stop = time.monotonic() + INFO_S
        alive = set()
        for key, remote, reference in asked:
            member = self._known.members.setdefault(key, Member(key))
            try:
                left = max(0.0, stop - time.monotonic())
                info = remote.receive(reference, left)
            except UnansweredError:
                continue
            alive.add(key)
            member.info, member.root = info, info["root"]
            member.host, member.network = info["host"], info["network"]
            self._known.learn(info)
        self._known.save()
        return alive

    def _make_again(self) -> bool:
        """Make the shards that died with a node without a label, if one is back.

        Returns:
            Whether there was one.
        """
        missing = {*self._known.members} - {*cluster.shard_keys(self._known.run)}
        nodes, made = cluster.nodes() if missing else [], False
        for key in missing:
            member = self._known.members[key]
            if member.root is None or member.host is None:
                continue
            for node in nodes:
                if node.host == member.host and node.label in (None, key):
                    start_shard(self._known.run, key, member.root, node, member.network)
                    made = True
                    break
        return made
