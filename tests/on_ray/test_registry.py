"""Which nodes a registry knows, over shards of this process."""

from functools import partial

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.errors import FailedError  # noqa: E402
from mmreplay.ray import cluster, epoch_names, run_grants  # noqa: E402
from mmreplay.ray import members as members_module  # noqa: E402
from mmreplay.ray import shard as shard_module  # noqa: E402
from mmreplay.ray.agreement import described  # noqa: E402
from mmreplay.ray.cluster import Node, UnansweredError  # noqa: E402
from mmreplay.ray.grants import Grants  # noqa: E402
from mmreplay.ray.known_run import KnownRun  # noqa: E402
from mmreplay.ray.limits import RingCounter  # noqa: E402
from mmreplay.ray.registry import Registry  # noqa: E402
from mmreplay.ray.shard import Shard  # noqa: E402
from tests.on_ray.rings import client_of  # noqa: E402
from tests.on_ray.rows import SCHEMA, block  # noqa: E402

LIMITER = mr.RateLimiter(1.0, 1, 1000.0)


class Cluster:
    """Nodes and shards of this process, in place of Ray's.

    Attributes:
        shards: Those that Ray knows, by key.
        alive: The nodes that are alive.
        stale: Keys of shards that end with their node at the next call.
        late: How many calls are not answered in time, by key.
        stored: What is stored with the cluster, by run.
    """

    def __init__(self, folder, monkeypatch):
        self.folder, self.shards, self.alive = folder, {}, []
        self.stale, self.late = set(), {}
        nothing = {"members": {}, "bound": None, "schema": None, "counts": {}}
        self.stored = {"run": nothing}
        monkeypatch.setattr(cluster, "load_facts", lambda run: self.stored[run])
        monkeypatch.setattr(cluster, "save_facts", self.stored.__setitem__)
        monkeypatch.setattr(cluster, "nodes", lambda: list(self.alive))
        monkeypatch.setattr(cluster, "shard_keys", lambda run: sorted(self.shards))
        monkeypatch.setattr(members_module, "start_shard", self.start_shard)
        monkeypatch.setattr(cluster, "kill", self.kill)
        monkeypatch.setattr(KnownRun, "shard", lambda _, key: Remote(self, key))

    def start_shard(self, run, key, root, node, network):
        assert node in self.alive
        if key not in self.shards and key not in self.stale:
            self.shards[key] = Shard(run, root, key, network)

    def kill(self, name):
        shard = self.shards.pop(cluster.split_name(name)[1], None)
        if shard is not None:
            shard.stop()

    def join(self, registry, name, schema=SCHEMA):
        """A node without a label joins with a ring, and its writer the run."""
        root = self.folder / name
        with mr.ReplayBuffer.create(root / "run" / "ring", schema, 100) as ring:
            if schema is SCHEMA:
                ring.extend(block(0, 0, 10))
        self.alive.append(Node(f"id of {name}", name, None))
        registry.join(name, str(root), name, f"id of {name}", False)

    def lose(self, name):
        """A node is gone, and its shard for good."""
        self.alive = [node for node in self.alive if node.host != name]
        self.shards.pop(name).stop()


class Remote:
    """Calls of a shard of this process."""

    def __init__(self, nodes, key):
        self.nodes, self.key = nodes, key

    def send(self, method, *arguments):
        self.nodes.stale.discard(self.key)
        if self.key not in self.nodes.shards:
            raise FailedError("there is no such shard")
        return getattr(self.nodes.shards[self.key], method)(*arguments)

    def receive(self, reply, timeout_s):
        if self.nodes.late.get(self.key, 0):
            self.nodes.late[self.key] -= 1
            raise UnansweredError("late")
        return reply

    def call(self, method, *arguments, timeout_s=60.0):
        return self.send(method, *arguments)


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    result = Cluster(tmp_path, monkeypatch)
    yield result
    for shard in result.shards.values():
        shard.stop()


def test_a_restarted_registry_knows_the_nodes_that_are_away(nodes):
    registry = Registry("run")
    for name in ("a", "b", "c"):
        nodes.join(registry, name)
    # All of them, with their shards, and the registry with the last.
    for name in ("a", "b", "c"):
        nodes.lose(name)
    registry = Registry("run")
    members = registry.members()
    assert {key: each["alive"] for key, each in members.items()} == {
        "a": False,
        "b": False,
        "c": False,
    }
    assert members["b"]["root"] == str(nodes.folder / "b")
    # The host of one is back, as another node.
    nodes.alive.append(Node("another id", "b", None))
    members = registry.members()
    assert [key for key, each in members.items() if each["alive"]] == ["b"]
    assert members["b"]["info"]["rings"]["ring"]["heads"] == [10]


def name_of(registry, rank, token, lasts=False):
    """The name of the epochs of a learner of the group "start"."""
    answer = registry.epoch_name("start", rank, token, lasts)
    assert bool(answer["name"]) == (answer["away"] == [])
    return answer["name"]


def test_an_epoch_of_a_restarted_registry_waits_for_nodes_that_are_away(nodes):
    for name in ("a", "b", "c"):
        nodes.join(Registry("run"), name)
    # One with its shard, another one with a label, whose shard is known.
    nodes.lose("a")
    nodes.late["c"] = 1
    registry = Registry("run")
    answer = registry.epoch_name("start", 0, "0")
    assert answer == {"name": "", "away": ["a", "c"]}
    nodes.alive.append(Node("another id", "a", None))
    registry.members()
    assert name_of(registry, 0, "0")


def test_a_learner_that_asks_again_is_of_the_same_group(monkeypatch):
    registry = Registry("run")
    monkeypatch.setattr(KnownRun, "node_keys", lambda _: [])
    first = name_of(registry, 0, "0")
    # The answer was lost, and the call is repeated.
    assert name_of(registry, 1, "1") == name_of(registry, 1, "1") == first
    assert name_of(registry, 0, "0") == first
    # Started again, without a state.
    again = name_of(registry, 1, "another 1")
    assert again != first
    # A call of before that comes late changes nothing.
    assert name_of(registry, 1, "1") == first
    assert name_of(registry, 0, "another 0") == again


def test_what_a_shard_says_of_itself_is_newer_than_what_is_stored(nodes):
    nodes.join(Registry("run"), "a")
    nodes.stored["run"]["members"] = {"a": ["/elsewhere", "a", False]}
    members = Registry("run").members()
    assert members["a"]["root"] == str(nodes.folder / "a")
    assert nodes.stored["run"]["members"]["a"][0] == str(nodes.folder / "a")


def test_a_node_that_is_back_before_ray_missed_it_joins_with_a_new_shard(nodes):
    nodes.stale.add("a")
    nodes.join(registry := Registry("run"), "a")
    assert registry.members()["a"]["alive"]


def test_a_group_of_learners_is_complete_after_a_while(monkeypatch):
    registry = Registry("run")
    monkeypatch.setattr(KnownRun, "node_keys", lambda _: [])
    now = 1e9
    monkeypatch.setattr(epoch_names.time, "time", lambda: now)
    first = name_of(registry, 0, "0")
    assert name_of(registry, 1, "1") == first
    # Of another group, whose first learner was started again with its state.
    now += epoch_names.GROUP_S
    late = name_of(registry, 2, "2")
    assert late != first
    assert name_of(registry, 0, "another 0") == late


def test_learners_of_a_named_group_join_it_whenever_they_begin(nodes, monkeypatch):
    nodes.join(registry := Registry("run"), "a")
    now = 1e9
    monkeypatch.setattr(epoch_names.time, "time", lambda: now)
    first = name_of(registry, 0, "0", True)
    now += 10 * epoch_names.GROUP_S
    assert name_of(registry, 1, "1", True) == first
    # A rank that has lost its state begins another group, as ever.
    again = name_of(registry, 1, "another 1", True)
    assert again != first
    # A restarted registry finds what the rings have frozen.
    client = client_of(mr.ShuffledSampler(seed=0))
    registry.epoch(client, again, 0)
    now += 10 * epoch_names.GROUP_S
    assert name_of(Registry("run"), 0, "0", True) == again
    assert name_of(Registry("run"), 0, "0") != again


OTHER = mr.Schema({"number": mr.Field((), "int32")})


def test_a_restarted_registry_knows_the_schema_of_nodes_that_are_away(nodes):
    nodes.join(registry := Registry("run"), "a")
    nodes.lose("a")
    for each in (registry, Registry("run")):
        with pytest.raises(mr.SchemaError, match=r"field 'number' is .*int32"):
            each.check(cluster.VERSION, *described(OTHER))
        each.check(cluster.VERSION, *described(SCHEMA))
    # It is stored as it is compared, and not at each call.
    assert nodes.stored["run"]["schema"] == [*described(SCHEMA)]


def test_of_two_writers_of_other_schemas_that_begin_a_run_one_is_refused(nodes):
    registry = Registry("run")
    # Neither has a ring yet.
    registry.check(cluster.VERSION, *described(SCHEMA))
    registry.check(cluster.VERSION, *described(OTHER))
    nodes.join(registry, "a")
    with pytest.raises(mr.SchemaError, match="the run 'run' has another schema: field"):
        nodes.join(registry, "b", OTHER)
    # Clients find shards by their names.
    assert [*nodes.shards] == [*registry.members()] == ["a"]
    assert [*nodes.stored["run"]["counts"]] == ["a"]


def test_a_limiter_is_known_once_a_writer_brought_it(nodes):
    nodes.join(registry := Registry("run"), "a")
    assert registry.known_bound() is None
    registry.limit("insert 1", "insert", 64, list(LIMITER.settings))
    assert registry.known_bound() == list(LIMITER.settings)
    assert Registry("run").known_bound() == list(LIMITER.settings)


def test_a_limiter_that_is_refused_is_not_that_of_the_run(nodes):
    nodes.join(registry := Registry("run"), "a")
    small, large = [4.0, 1, 8.0], [4.0, 1, 256.0]
    for ask in (registry.check_limit, partial(registry.limit, "one")):
        with pytest.raises(mr.SchemaError, match=r"at least 128 where 64.* 256 or"):
            ask("insert", 64, small)
    with pytest.raises(mr.SchemaError, match="at least 128 where 64 rows"):
        registry.grant("one", "insert", 64, 0, 1, small)
    assert registry.known_bound() is None
    assert nodes.stored["run"]["bound"] is None
    # To ask whether one fits is not to bring it.
    registry.check_limit("insert", 64, [4.0, 1, 300.0])
    assert registry.known_bound() is None
    registry.limit("one", "insert", 64, large)
    assert registry.known_bound() == nodes.stored["run"]["bound"] == large
    for ask in (registry.check_limit, partial(registry.limit, "two")):
        with pytest.raises(mr.SchemaError, match="as everywhere in the run, got"):
            ask("insert", 64, [4.0, 1, 300.0])
        # The first asker's rows count, and the second one's items.
        with pytest.raises(mr.SchemaError, match="at least 278 where 64 rows and 300"):
            ask("sample", 300, large)


def test_what_a_shard_says_does_not_change_the_limiter_of_the_run(nodes):
    nodes.join(registry := Registry("run"), "a")
    registry.limit("one", "insert", 64, [2.0, 1, 1000.0])
    counting(nodes, "a", 0, 0, 0)
    registry.grant("one", "insert", 64, 0, 1, [2.0, 1, 1000.0])
    assert registry.known_bound() == [2.0, 1, 1000.0]


def test_a_shard_of_another_version_does_not_join(nodes, monkeypatch):
    monkeypatch.setattr(shard_module, "VERSION", "9.9.9")
    with pytest.raises(FailedError, match=r"but the shard 'a' has 9\.9\.9\. Install"):
        nodes.join(Registry("run"), "a")


def test_the_limiter_of_a_slow_shard_is_waited_for(nodes):
    nodes.join(registry := Registry("run"), "a")
    assert registry.bound() is None
    with mr.ReplayBuffer.open(
        nodes.folder / "a" / "run" / "ring", "r+", limiter=RingCounter(LIMITER)
    ):
        pass
    nodes.late["a"] = 2
    assert registry.bound() == list(LIMITER.settings)


def test_the_limiter_of_nodes_that_are_away_is_known_to_a_restarted_registry(nodes):
    nodes.join(registry := Registry("run"), "a")
    registry.limit("writer", "insert", 64, list(LIMITER.settings))
    nodes.lose("a")
    registry = Registry("run")
    assert registry.bound() == list(LIMITER.settings)
    with pytest.raises(mr.SchemaError, match="as everywhere in the run"):
        registry.limit("another", "insert", 64, [2.0, 1, 1000.0])


def counting(nodes, name, *counts):
    """Let the rings of a node have counted so much for the rate limiter."""
    answer = {"counts": list(counts), "bound": list(LIMITER.settings)}
    nodes.shards[name].counts = lambda: answer


def granted_items(registry, limit):
    """How many items a learner is granted, 100 at a time, that uses none of them."""
    settings = list(LIMITER.settings)
    for number in range(limit // 100):
        unused = 100 * number
        answer = registry.grant("learner", "sample", 100, unused, number + 1, settings)
        if not answer["granted"]:
            return unused
    return limit


def test_a_node_that_is_away_counts_in_a_restarted_registry_as_it_did_last(nodes, monkeypatch):
    monkeypatch.setattr(run_grants, "SILENT_S", 0.0)
    registry = Registry("run")
    for name in ("a", "b"):
        nodes.join(registry, name)
    # One wrote what was drawn from the other: 400 items more are within the bound.
    counting(nodes, "a", 8000, 2000, 8000)
    counting(nodes, "b", 2000, 8600, 2000)
    registry.limit("learner", "sample", 100, list(LIMITER.settings))
    assert granted_items(registry, 5000) == 300
    nodes.lose("b")
    for _ in range(2):
        # It is not heard of any more, and neither is its shard.
        assert granted_items(Registry("run"), 5000) == 300
    assert nodes.stored["run"]["counts"]["b"] == [2000, 8600, 2000]


def test_what_rings_count_is_stored_once_a_second_and_when_a_node_is_gone(nodes, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_grants.time, "monotonic", lambda: now[0])
    registry = Registry("run")
    for name in ("a", "b"):
        nodes.join(registry, name)

    def looked(count):
        for name in nodes.shards:
            counting(nodes, name, count, 0, count)
        now[0] += 0.4
        registry._grants._look(Grants(LIMITER, lambda: now[0]))
        stored = nodes.stored["run"]["counts"]
        return [stored[name][0] for name in ("a", "b")]

    assert [looked(count) for count in (1, 2, 3, 4)] == [[1, 1]] * 3 + [[4, 4]]
    assert looked(5) == [4, 4]
    nodes.lose("b")
    assert looked(6) == [6, 5]
    assert looked(7) == [6, 5]


def test_the_space_that_is_free_on_the_disk_of_a_ring_is_shown(nodes):
    nodes.join(registry := Registry("run"), "a")
    free = registry.members()["a"]["info"]["rings"]["ring"]["disk_free"]
    assert free > 1 << 20
