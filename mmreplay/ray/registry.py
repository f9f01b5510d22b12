"""The actor that knows the members of a run.

It keeps nothing on disk: after a kill it asks the shards, whose names Ray knows. Its
members, its schema, its limiter's settings and what the rings counted last are stored
with the cluster, as shards may be away, and Ray forgets those without a label with
their nodes. Draws and writes do not need it; a join does, and a shard whose node is
back without a label.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mmreplay.buffer.limiting import Counts
from mmreplay.errors import FailedError, ReplayError, SchemaError
from mmreplay.limiter import RateLimiter
from mmreplay.ray import cluster
from mmreplay.ray.agreement import described, differing
from mmreplay.ray.cluster import ANSWER_S, PAUSE_S, VERSION, Node, Remote, RunFacts, UnansweredError
from mmreplay.ray.epochs import Frozen, freeze_rings
from mmreplay.ray.grants import Grants, Side, limiter_from
from mmreplay.ray.shard import start_shard
from mmreplay.schema import Schema

INFO_S = 3.0
"""Within which a shard says what it serves, or counts as away."""
COUNTS_S = 1.0
"""Within which it says what its rings count for a rate limiter."""
SILENT_S = 5.0
"""After which a silent shard counts as it did last, as clients draw without it."""
GROUP_S = 600.0
"""Learners of a group begin within so long of each other."""
LIST_S = 1.0
"""Shards that are new are looked for so often."""
STORE_S = 1.0
"""What the rings count is stored so often, and when a shard gives no answer."""


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


class Registry:
    """Members of one run; a plain class, made an actor by `cluster`."""

    def __init__(self, run: str) -> None:
        """Remember the run; nothing here may raise."""
        self.run = run
        self._members: dict[str, Member] = {}
        self._saved: RunFacts | None = None
        self._schema: Schema | None = None
        self._lock = threading.RLock()
        self._groups: dict[str, tuple[str, set[int]]] = {}
        self._epoch_names: dict[str, str] = {}
        self._grants: Grants | None = None
        self._bound: list[float] | None = None
        self._grants_lock = threading.RLock()
        self._looking = threading.Lock()
        self._counted: dict[str, Counted] = {}
        self._listed_at = -LIST_S
        self._stored_at = -STORE_S
        self._silent: set[str] = set()
        self._facts_lock = threading.Lock()

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
        cluster.check_version(f"the run {self.run!r}", VERSION, version)
        with self._lock:
            self._refresh()
            self._refuse_another_schema(Schema.from_json(fields, roles))

    def _refuse_another_schema(self, mine: Schema) -> None:
        if self._schema is not None and mine != self._schema:
            raise SchemaError(
                f"the run {self.run!r} has another schema: "
                f"{differing(mine, self._schema)}. Name another run, or write the "
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
                f"{self.run!r} is served from there, got {root!r}. Pass that "
                "folder, or name another run."
            )
        try:
            with self._lock:
                self._load_facts()
                for ring in info["rings"].values():
                    mine = Schema.from_json(ring["schema"], ring["roles"])
                    self._refuse_another_schema(mine)
                self._members[key] = Member(key, root, host, network, info)
                # Its rows count for a rate limiter from the first one on.
                self._counted.setdefault(key, Counted(time.monotonic()))
                self._learn(info)
                self._save_facts()
                return dict(info)
        except SchemaError:
            # None of its rings belongs to the run, as those of a shard are alike.
            # Clients would find it by its name.
            self._forget(key)
            raise

    def _forget(self, key: str) -> None:
        """End a shard, which is no member any more."""
        cluster.kill(cluster.shard_name(self.run, key))
        with self._lock:
            self._members.pop(key, None)
            self._counted.pop(key, None)
            self._save_facts()

    def _started(self, key: str, root: str, node: Node, network: bool) -> dict[str, Any]:
        """Make the shard of a node that joins, and return what it says of itself.

        A node without a label may be back before Ray finds that it was gone. The shard
        of before ends then, and leaves its name to the new one.
        """
        stop = time.monotonic() + ANSWER_S
        while True:
            start_shard(self.run, key, root, node, network)
            left = max(0.0, stop - time.monotonic())
            try:
                info: dict[str, Any] = self._shard(key).call("info", timeout_s=left)
                return info
            except FailedError:
                if time.monotonic() + PAUSE_S >= stop:
                    raise
            time.sleep(PAUSE_S)

    def members(self) -> dict[str, dict[str, Any]]:
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
                for key, member in sorted(self._members.items())
            }

    def states(self) -> dict[str, str]:
        """Say what Ray says of the shards; see `cluster.shard_states`."""
        return cluster.shard_states(self.run)

    def epoch_name(self, start: str, rank: int, token: str, lasts: bool = False) -> dict[str, Any]:
        """Return the name of the epochs of a group of learners; may be repeated.

        The first learner of a group makes it. Another learner of a rank that it has
        belongs to another group, as after a restart without a state.

        Args:
            start: Equal for the learners of a group.
            rank: Of the learner in its group.
            token: Of the learner alone: asked again by it, the name is the same.
            lasts: Learners join it whenever they begin, as it was given a name.

        Returns:
            ``name``, and ``away``, the shards that have to answer before there is one:
            none where there is.
        """
        if token in self._epoch_names:
            return {"name": self._epoch_names[token], "away": []}
        name, ranks = self._groups.get(start, ("", set()))
        since_s = 0.0 if lasts else time.time() - GROUP_S
        if name and _began_s(name) <= since_s:
            name, ranks = "", set()
        if not name:
            # A registry that was restarted finds a group that began a moment ago.
            names, away = self._stored_epoch_names(f"{start}/")
            if away:
                return {"name": "", "away": away}
            name = max((each for each in names if _began_s(each) > since_s), default="")
        if not name or rank in ranks:
            name = f"{start}/{int(time.time())}-{uuid.uuid4().hex[:8]}"
            ranks = set()
        self._groups[start] = name, {*ranks, rank}
        self._epoch_names[token] = name
        return {"name": name, "away": []}

    def _stored_epoch_names(self, start: str) -> tuple[list[str], list[str]]:
        """Ask all shards for epochs whose names begin so; return who gave no answer."""
        names: list[str] = []
        asked, away = [], []
        for key in self._keys():
            remote = self._shard(key)
            try:
                asked.append((key, remote, remote.send("epoch_names", start)))
            except FailedError:
                # It ended with its node.
                away.append(key)
        stop = time.monotonic() + INFO_S
        for key, remote, reference in asked:
            try:
                left = max(0.0, stop - time.monotonic())
                names += remote.receive(reference, left)
            except UnansweredError:
                away.append(key)
        return names, sorted(away)

    def epoch(self, client: Any, name: str, epoch: int) -> dict[str, Any]:
        """Have every ring of the run freeze an epoch, or say what was frozen for it.

        Args:
            client: What its learners draw by.
            name: Of the learners.
            epoch: Its number.

        Returns:
            See `freeze_rings`.
        """
        shards = {key: self._shard(key) for key in self._keys()}
        return freeze_rings(partial(self._frozen, shards, client, name, epoch))

    def _frozen(
        self,
        shards: dict[str, Remote],
        client: Any,
        name: str,
        epoch: int,
        buffers: list[str] | None,
    ) -> tuple[Frozen, list[str]]:
        """Ask all shards for an epoch; return answers by ring, and who gave none."""
        found: Frozen = {}
        away = []
        for key, remote in shards.items():
            try:
                sent = remote.send("freeze", client, name, epoch, buffers)
            except FailedError:
                # It ended with its node.
                away.append(key)
                continue
            try:
                found.update(remote.receive(sent, INFO_S))
            except UnansweredError:
                away.append(key)
        return found, away

    def _keys(self) -> list[str]:
        self._load_facts()
        return sorted({*self._members, *cluster.shard_keys(self.run)})

    def bound(self) -> list[float] | None:
        """Return the settings of the run's rate limiter; None without one.

        They are found in the rings where the run was stopped and begun again. A shard
        that is slow is asked again, for as long as clients wait for it.
        """
        self._load_facts()
        stop = time.monotonic() + SILENT_S
        while self._bound is None:
            with self._looking:
                all_answered = self._look(Grants(RateLimiter(1.0, 1, math.inf)))
            if all_answered or time.monotonic() >= stop:
                break
            time.sleep(PAUSE_S)
        return self._bound

    def known_bound(self) -> list[float] | None:
        """Return the same where it is known; no shard is asked."""
        self._load_facts()
        return self._bound

    def check_limit(self, side: Side, count: int, settings: list[float]) -> None:
        """Refuse what `limit` would refuse; nothing is stored.

        Raises:
            SchemaError: See `limit`.
        """
        bound = self.bound() or settings
        with self._grants_lock:
            grants = self._grants or Grants(limiter_from(bound))
            grants.agree(settings)
            grants.check(side, count)

    def limit(self, who: str, side: Side, count: int, settings: list[float]) -> None:
        """Take in a writer or client that will ask for grants.

        Args:
            who: Of one asker, in all of the run.
            side: Its side.
            count: Rows or items that it will ask for at a time.
            settings: Of its limiter.

        Raises:
            SchemaError: The run has other settings, or both sides could wait for each
                other.
        """
        with self._grants_lock:
            self._agreed(side, count, settings).ask(who, side, count, 0, 0)

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
        """Grant rows or items of a rate limiter; see `Grants`.

        Returns:
            ``granted``, ``counts`` and ``others``; see `Answer`.

        Raises:
            SchemaError: See `limit`.
        """
        with self._grants_lock:
            grants = self._agreed(side, count, settings)
            if not grants.ask(who, side, count, unused, number, ahead):
                count = 0
            answer = grants.decide(who, count)
            is_old = grants.is_old(refused=bool(count) and not answer.granted)
        # Another request may be looking; this one is sent again by its asker.
        if is_old and self._looking.acquire(blocking=False):
            try:
                self._look(grants)
            finally:
                self._looking.release()
            with self._grants_lock:
                if not answer.granted:
                    answer = grants.decide(who, count)
        counts = answer.counts
        return {
            "granted": answer.granted,
            "counts": [counts.inserts, counts.samples, counts.size],
            "others": answer.others,
        }

    def _agreed(self, side: Side, count: int, settings: list[float]) -> Grants:
        """Check an asker; the settings of the first one are the run's from then on."""
        self._load_facts()
        grants = self._grants or Grants(limiter_from(self._bound or settings))
        grants.agree(settings)
        if count:
            grants.check(side, count)
        # Only now: what is refused leaves no settings to the run.
        self._grants = grants
        if self._bound is None:
            self._bound = list(grants.limiter.settings)
            self._save_facts()
        return grants

    def _look(self, grants: Grants) -> bool:
        """Ask all shards what their rings count.

        A shard that was silent for `SILENT_S` counts as it did last, also where this
        actor was restarted meanwhile. Until then nothing new is known, and what is
        under way stays held.

        Returns:
            Whether all shards answered.
        """
        self._load_facts()
        now = time.monotonic()
        if now - self._listed_at >= LIST_S:
            with suppress(RayError, ConnectionError):
                for key in cluster.shard_keys(self.run):
                    self._counted.setdefault(key, Counted(now))
            self._listed_at = now
        began_s = grants.begin_look()
        asked = []
        for key in list(self._counted):
            remote = self._shard(key)
            with suppress(FailedError):
                asked.append((key, remote, remote.send("counts")))
        stop = time.monotonic() + COUNTS_S
        for key, remote, reference in asked:
            with suppress(ReplayError):
                left = max(0.0, stop - time.monotonic())
                found = remote.receive(reference, left)
                self._counted[key] = Counted(time.monotonic(), *found["counts"])
                self._bound = self._bound or found["bound"]
        now = time.monotonic()
        # Another thread may add one.
        counted = dict(self._counted)
        every = counted.values()
        silent = {key for key, each in counted.items() if each.at_s < began_s}
        if silent - self._silent or now - self._stored_at >= STORE_S:
            # Before the first grant by what is known of those that are away.
            self._save_facts()
            self._stored_at = now
        self._silent = silent
        if all(each.at_s >= began_s or now - each.at_s > SILENT_S for each in every):
            sums = Counts(
                sum(each.inserts for each in every),
                sum(each.samples for each in every),
                sum(each.size for each in every),
            )
            with self._grants_lock:
                grants.looked(began_s, sums)
        return not silent

    def _shard(self, key: str) -> Remote:
        return Remote(cluster.shard_name(self.run, key))

    def _refresh(self) -> set[str]:
        """Ask all shards what they serve; return the keys of those that answer."""
        asked = []
        self._load_facts()
        for key in {*self._members, *cluster.shard_keys(self.run)}:
            remote = self._shard(key)
            try:
                asked.append((key, remote, remote.send("info")))
            except FailedError:
                continue
        stop = time.monotonic() + INFO_S
        alive = set()
        for key, remote, reference in asked:
            member = self._members.setdefault(key, Member(key))
            try:
                left = max(0.0, stop - time.monotonic())
                info = remote.receive(reference, left)
            except UnansweredError:
                continue
            alive.add(key)
            member.info, member.root = info, info["root"]
            member.host, member.network = info["host"], info["network"]
            self._learn(info)
        self._save_facts()
        return alive

    def _load_facts(self) -> None:
        """Take in what was stored before this actor was restarted."""
        if self._saved is not None:
            return
        with suppress(RayError, ConnectionError):
            saved = cluster.load_facts(self.run)
            for key, (root, host, network) in saved["members"].items():
                self._members.setdefault(key, Member(key, root, host, network))
            now = time.monotonic()
            for key, counts in saved["counts"].items():
                if key not in self._counted or not self._counted[key].inserts:
                    self._counted[key] = Counted(now, *counts)
            self._bound = self._bound or saved["bound"]
            if self._schema is None and saved["schema"] is not None:
                self._schema = Schema.from_json(*saved["schema"])
            self._saved = saved

    def _save_facts(self) -> None:
        """Store what changed; a failure is made good by the next call."""
        # Threads of joins and of grants: the newest is stored last.
        with self._facts_lock:
            members = {
                key: member.where
                for key, member in sorted(self._members.items())
                if member.where is not None
            }
            schema = None if self._schema is None else [*described(self._schema)]
            counts = {key: each.counts for key, each in sorted(self._counted.items())}
            facts: RunFacts = {
                "members": members,
                "bound": self._bound,
                "schema": schema,
                "counts": counts,
            }
            if self._saved is not None and facts != self._saved:
                with suppress(RayError, ConnectionError):
                    cluster.save_facts(self.run, facts)
                    self._saved = facts

    def _learn(self, info: dict[str, Any]) -> None:
        """Take the run's schema from the first ring that is known."""
        for ring in info["rings"].values():
            if self._schema is None:
                self._schema = Schema.from_json(ring["schema"], ring["roles"])

    def _make_again(self) -> bool:
        """Make the shards that died with a node without a label, if one is back.

        Returns:
            Whether there was one.
        """
        missing = {*self._members} - {*cluster.shard_keys(self.run)}
        nodes, made = cluster.nodes() if missing else [], False
        for key in missing:
            member = self._members[key]
            if member.root is None or member.host is None:
                continue
            for node in nodes:
                if node.host == member.host and node.label in (None, key):
                    start_shard(self.run, key, member.root, node, member.network)
                    made = True
                    break
        return made


def _began_s(name: str) -> float:
    """When a group of learners began, by its name."""
    return float(name.rpartition("/")[2].partition("-")[0])


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
