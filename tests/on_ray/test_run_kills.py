"""Whatever is killed, a run goes on, and no published row of it is lost.

Rows carry a checksum of their writer and number. What `Writing.add` returned is
published, and must be there in the end.
"""

import socket

import pytest

ray = pytest.importorskip("ray")

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

import mmreplay as mr  # noqa: E402
from mmreplay.ray import cluster as calls  # noqa: E402
from tests.on_ray.actors import ask, ended, kill, registry, shard, writing  # noqa: E402
from tests.on_ray.rows import check  # noqa: E402
from tests.waits import WAIT_S, until  # noqa: E402


def holds(path, rows):
    """Check that a ring has the rows, and whole."""
    with mr.ReplayBuffer.open(path) as ring:
        assert ring.heads.tolist() == [rows]
        batch = ring.gather_all()
        assert batch["number"].tolist() == list(range(rows))
        check(batch)


def node_comes_back(cluster, run_name, host, path):
    """The node without a label joins again, and its ring of 200 rows is served."""
    node = cluster.add(None)
    try:
        until(lambda: mr.ray.status(run_name).shards[0].alive)
        info = shard(run_name, host).call("info")
        assert info["rings"]["ring-000"]["heads"] == [200]
        holds(path, 200)
    finally:
        mr.ray.stop(run_name)
        cluster.remove_node(node)
        # Ray would start actors of the next test on it until then.
        cluster.wait_dead(node.node_id)


def test_a_killed_shard_is_back_with_its_rings(run_name, tmp_path):
    writer = writing("n0", run_name, str(tmp_path))
    ask(writer, "add", 100)
    remote = shard(run_name, "n0")
    pids = set()
    for turn in range(3):
        pid = remote.call("info")["pid"]
        pids.add(pid)
        kill(pid)
        # Writing does not need the shard.
        assert ask(writer, "add", 100) == 200 + 100 * turn
        info = remote.call("info", timeout_s=WAIT_S)
        assert info["error"] is None
        assert info["rings"]["ring-000"]["heads"] == [200 + 100 * turn]
    assert len(pids) == 3
    holds(ask(writer, "path"), 400)


def test_the_registry_says_that_a_killed_shard_is_being_restarted(run_name, tmp_path):
    ask(writing("n0", run_name, str(tmp_path)), "add", 100)
    remote, members = shard(run_name, "n0"), registry(run_name)
    pid = remote.call("info")["pid"]
    assert members.call("states") == {"n0": calls.ALIVE}
    kill(pid)
    until(lambda: members.call("states") == {"n0": calls.RESTARTING})
    remote.call("info", timeout_s=WAIT_S)
    until(lambda: members.call("states") == {"n0": calls.ALIVE})


def test_a_killed_writer_opens_its_ring_again_and_goes_on(run_name, tmp_path):
    for turn in range(3):
        writer = writing("n0", run_name, str(tmp_path), name="w")
        assert ask(writer, "add", 100) == 100 * (turn + 1)
        path = ask(writer, "path")
        kill(ask(writer, "pid"))
        holds(path, 100 * (turn + 1))
        remote = shard(run_name, "n0")
        info = remote.call("info")
        assert info["rings"]["w"]["heads"] == [100 * (turn + 1)]
        # Threads of a killed process may outlive its first one by a little.
        until(lambda: remote.call("info")["rings"]["w"]["writer"] is None)  # noqa: B023


def test_a_killed_registry_knows_the_members_again(run_name, tmp_path):
    for label in ("n0", "n1"):
        ask(writing(label, run_name, str(tmp_path / label)), "add", 50)
    before = mr.ray.status(run_name)
    actor = ray.get_actor(calls.registry_name(run_name), namespace="mmreplay")
    ray.kill(actor, no_restart=False)
    after = until(lambda: mr.ray.status(run_name))
    assert [each.key for each in after.shards] == ["n0", "n1"]
    assert [each.root for each in after.shards] == [each.root for each in before.shards]
    assert after.steps == before.steps == 100
    # And refuses other schemas as before.
    with pytest.raises(mr.SchemaError, match="has another schema"):
        mr.ray.writer(run_name, mr.Schema({"x": mr.Field((), "int8")}), 10, root=tmp_path)


def test_a_node_that_is_back_has_its_shard_back_by_its_label(run_name, tmp_path, cluster):
    writer = writing("n1", run_name, str(tmp_path))
    assert ask(writer, "add", 200) == 200
    remote = shard(run_name, "n1")
    pid = remote.call("info")["pid"]
    cluster.remove("n1")
    until(lambda: ended(pid))
    (away,) = mr.ray.status(run_name).shards
    assert not away.alive
    assert away.pid is None
    assert mr.ray.status(run_name).steps == 0
    cluster.add("n1")
    info = remote.call("info", timeout_s=WAIT_S)
    assert info["error"] is None
    assert info["rings"]["ring-000"]["heads"] == [200]
    again = writing("n1", run_name, str(tmp_path))
    assert ask(again, "add", 100) == 300
    holds(ask(again, "path"), 300)


@pytest.mark.slow
def test_a_run_is_stopped_while_a_node_is_away(run_name, tmp_path, cluster):
    for label in ("n0", "n1"):
        ask(writing(label, run_name, str(tmp_path / label)), "add", 50)
    cluster.remove("n1")
    mr.ray.stop(run_name)
    assert calls.shard_keys(run_name) == []
    cluster.add("n1")
    # Nothing of it comes back with the node.
    assert calls.shard_keys(run_name) == []
    with mr.ReplayBuffer.open(tmp_path / "n1" / run_name / "ring-000") as ring:
        assert len(ring) == 50


@pytest.mark.slow
def test_a_killed_raylet_takes_its_shard_along_which_is_back_with_the_node(
    run_name, tmp_path, cluster
):
    writer = writing("n0", run_name, str(tmp_path))
    assert ask(writer, "add", 200) == 200
    path = ask(writer, "path")
    remote = shard(run_name, "n0")
    pids = remote.call("info")["pid"], ask(writer, "pid")
    node_id = cluster.node_id("n0")
    cluster.kill_raylet("n0")
    # Workers end by themselves, and their locks with them.
    until(lambda: all(map(ended, pids)))
    holds(path, 200)
    cluster.wait_dead(node_id)
    cluster.remove("n0")
    cluster.add("n0")
    info = remote.call("info", timeout_s=WAIT_S)
    assert info["pid"] not in pids
    assert info["rings"]["ring-000"]["heads"] == [200]
    assert ask(writing("n0", run_name, str(tmp_path)), "add", 100) == 300
    holds(path, 300)


@pytest.mark.slow
def test_a_shard_without_a_label_is_made_again_by_the_registry(run_name, tmp_path, cluster):
    host = socket.gethostname()
    node = cluster.add(None)
    selector = {"resources": {"unlabelled": 0.001}}
    try:
        writer = writing(None, run_name, str(tmp_path), selector=selector)
        assert ask(writer, "key") == host
        assert ask(writer, "add", 200) == 200
        path = ask(writer, "path")
        assert shard(run_name, host).call("info")["error"] is None
    finally:
        node_id = node.node_id
        cluster.remove_node(node)
    cluster.wait_dead(node_id)
    # Dead for good: its name is free.
    until(lambda: calls.shard_keys(run_name) == [])
    with pytest.raises(mr.FailedError, match="ended with its node"):
        shard(run_name, host).call("info")
    (away,) = mr.ray.status(run_name).shards
    assert (away.key, away.alive, away.root) == (host, False, str(tmp_path))
    node_comes_back(cluster, run_name, host, path)


@pytest.mark.slow
def test_a_restarted_registry_knows_a_node_without_a_label_that_is_away(
    run_name, tmp_path, cluster
):
    host = socket.gethostname()
    node = cluster.add(None)
    selector = {"resources": {"unlabelled": 0.001}}
    try:
        writer = writing(None, run_name, str(tmp_path), selector=selector)
        assert ask(writer, "add", 200) == 200
        path = ask(writer, "path")
    finally:
        node_id = node.node_id
        cluster.remove_node(node)
    cluster.wait_dead(node_id)
    until(lambda: host not in calls.shard_keys(run_name))
    actor = ray.get_actor(calls.registry_name(run_name), namespace="mmreplay")
    ray.kill(actor, no_restart=False)
    # No other shard, and no client.
    (away,) = until(lambda: mr.ray.status(run_name)).shards
    assert (away.key, away.alive, away.root) == (host, False, str(tmp_path))
    node_comes_back(cluster, run_name, host, path)


@pytest.mark.slow
def test_a_node_without_a_label_that_is_back_at_once_takes_its_writer(run_name, tmp_path, cluster):
    selector = {"resources": {"unlabelled": 0.001}}
    node = cluster.add(None)
    writer = writing(None, run_name, str(tmp_path), selector=selector)
    assert ask(writer, "add", 100) == 100
    cluster.remove_node(node)
    # Ray declares the former one dead 15 seconds later.
    node = cluster.add(None)
    try:
        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        selector = {"scheduling_strategy": there}
        again = writing(None, run_name, str(tmp_path), selector=selector)
        assert ask(again, "add", 100) == 200
    finally:
        mr.ray.stop(run_name)
        cluster.remove_node(node)
        cluster.wait_dead(node.node_id)
