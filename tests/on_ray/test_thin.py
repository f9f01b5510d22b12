"""Thin writers on a cluster: rows arrive once, whatever is killed or cut off."""

import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.errors import DurabilityWarning, FailedError, SchemaError  # noqa: E402
from mmreplay.ray import cluster as calls  # noqa: E402
from mmreplay.ray import shard as shard_module  # noqa: E402
from mmreplay.ray.cluster import Remote  # noqa: E402
from mmreplay.ray.shard import Shard, start_shard  # noqa: E402
from tests.on_ray.thin_support import SCHEMA, Feed, add_steps, check_rows, quietly  # noqa: E402
from tests.waits import WAIT_S, until  # noqa: E402

KILLS = int(os.environ.get("MMREPLAY_KILLS", "5"))
"""Kills of a shard under writers; more by hand."""


class ArmedShard(Shard):
    """A shard that ends its process where a test says."""

    armed = None

    def arm(self, where):
        self.armed = where

    def lease(self, *arguments):
        answer = super().lease(*arguments)
        self.die_if("lease")
        return answer

    def extend(self, writer, first, columns, *more):
        if columns:
            self.die_if("before")
        answer = super().extend(writer, first, columns, *more)
        if columns:
            # Published, and not answered.
            self.die_if("after")
        return answer

    def die_if(self, where):
        if self.armed == where:
            os.kill(os.getpid(), signal.SIGKILL)


class Writing:
    """A thin writer in a process of its own."""

    def __init__(self, run, number, num_envs, **options):
        self.writer = mr.ray.thin_writer(run, SCHEMA, num_envs=num_envs, **options)
        self.feed = Feed(number, num_envs)
        self.rng = np.random.default_rng(number)

    def pid(self):
        return os.getpid()

    def add(self, steps):
        """Add steps; return the feed, which says what was given."""
        assert add_steps(self.writer, self.feed, self.rng, steps) is None
        return self.feed

    def flush(self):
        self.writer.flush()

    def close(self):
        self.writer.close()


def on_node(label, function, *arguments, **options):
    """Run a function on the node of a label."""
    task = ray.remote(function).options(num_cpus=0, label_selector={"mmreplay": label})
    return ray.get(task.remote(*arguments, **options), timeout=WAIT_S)


def make_ring(*arguments, **options):
    mr.ray.thin_ring(*arguments, **options)


def start(run, root, label="n0", num_envs=4, capacity=20_000, **options):
    """Make the ring of thin writers on a node, and return the shard and the folder."""
    options = {"autoreset": "disabled", **options}
    on_node(label, make_ring, run, SCHEMA, capacity, root=str(root), num_envs=num_envs, **options)
    return Remote(calls.shard_name(run, label)), root / run / "thin"


@pytest.fixture
def armed(cluster, monkeypatch):
    """Make shards that can be armed."""
    monkeypatch.setattr(shard_module, "Shard", ArmedShard)

    def make(run, root, label="n0"):
        (node,) = (node for node in calls.nodes() if node.label == label)
        start_shard(run, label, str(root), node, network=False)

    return make


def stop_writing(run, folder):
    """End the run, so that the ring is closed."""
    mr.ray.stop(run)
    with mr.ReplayBuffer.open(folder, "r+"):
        pass


def test_rows_of_two_writers_arrive(cluster, run_name, tmp_path):
    shard, folder = start(run_name, tmp_path)
    rng, feeds = np.random.default_rng(0), {}
    for number in range(2):
        with mr.ray.thin_writer(run_name, SCHEMA, num_envs=2) as writer:
            feed = feeds[number] = Feed(number, 2)
            assert add_steps(writer, feed, rng, 200) is None
            assert add_steps(writer, feed, rng, 300, blocks=True) is None
            (ring,) = shard.call("info")["rings"].values()
            assert ring["free"] == 2
        assert writer.lost_rows == 0
        writer.close()
    assert shard.call("info")["rings"]["thin"]["free"] == 4
    stop_writing(run_name, folder)
    assert check_rows(folder, feeds, {0: 0, 1: 0}, feeds) > 2000
    assert mr.verify_buffer(folder).findings == ()


def test_the_ring_of_a_run_takes_its_writers_on_the_node_with_the_most_free(
    cluster, run_name, tmp_path
):
    start(run_name, tmp_path / "0", "n0", num_envs=2)
    start(run_name, tmp_path / "1", "n1", num_envs=3)
    # It may be repeated.
    start(run_name, tmp_path / "1", "n1", num_envs=3)
    with (
        mr.ray.thin_writer(run_name, SCHEMA, num_envs=2) as first,
        mr.ray.thin_writer(run_name, SCHEMA, num_envs=2) as second,
        mr.ray.thin_writer(run_name, SCHEMA) as third,
    ):
        assert str(first._shard) == f"<Remote mmreplay/{run_name}/n1>"
        assert str(second._shard) == f"<Remote mmreplay/{run_name}/n0>"
        assert str(third._shard) == f"<Remote mmreplay/{run_name}/n1>"
        with pytest.raises(FailedError, match=r"has 0 of . environments free, as . ot"):
            mr.ray.thin_writer(run_name, SCHEMA)
        with pytest.raises(FailedError, match="0 of 2 environments free, as 1 other writer has"):
            mr.ray.thin_writer(run_name, SCHEMA, to="n0")
    with pytest.raises(SchemaError, match="num_envs must be at most 2, the environ"):
        mr.ray.thin_writer(run_name, SCHEMA, num_envs=9, to="n0")
    mr.ray.stop(run_name)


def test_what_does_not_fit_is_refused(cluster, run_name, tmp_path):
    with pytest.raises(FailedError, match="was stopped, or never began"):
        mr.ray.thin_writer(run_name, SCHEMA)
    start(run_name, tmp_path)
    other = mr.Schema({"x": mr.Field((), "float32")})
    with pytest.raises(SchemaError, match=r"has another schema: .* missing here, and"):
        mr.ray.thin_writer(run_name, other)
    with pytest.raises(SchemaError, match="schema must be a Schema, got dict"):
        mr.ray.thin_writer(run_name, {})
    with pytest.raises(SchemaError, match=r"to must be .*, \['n0'\], got 'n1'"):
        mr.ray.thin_writer(run_name, SCHEMA, to="n1")
    with pytest.raises(Exception, match=r"num_envs must be 4, as of .*thin, got 5"):
        start(run_name, tmp_path, num_envs=5)
    writer = mr.ray.thin_writer(run_name, SCHEMA)
    assert add_steps(writer, Feed(0, 1), np.random.default_rng(0), 10) is None
    mr.ray.stop(run_name)
    with pytest.raises(FailedError, match=f"run '{run_name}' was stopped"):
        writer.flush()


def test_a_run_without_such_a_ring_says_how_to_make_one(cluster, run_name, tmp_path):
    def write():
        mr.ray.writer(run_name, SCHEMA, 100, root=str(tmp_path)).close()

    on_node("n0", write)
    with pytest.raises(FailedError, match=r"has a ring for thin writers\. Call mr\.ray"):
        mr.ray.thin_writer(run_name, SCHEMA)
    with pytest.raises(FailedError, match=r"node 'n0' of the run .* has no ring for"):
        mr.ray.thin_writer(run_name, SCHEMA, to="n0")
    mr.ray.stop(run_name)


def test_each_row_arrives_once_whatever_call_the_shard_is_killed_in(
    cluster, run_name, tmp_path, armed
):
    armed(run_name, tmp_path)
    shard, folder = start(run_name, tmp_path, num_envs=6, capacity=20_000 * KILLS)
    rng, ended = np.random.default_rng(1), threading.Event()
    pairs = {}
    for number, keep in enumerate(("published", "committed")):
        writer = mr.ray.thin_writer(run_name, SCHEMA, num_envs=2, steps=16, keep=keep)
        pairs[number] = writer, Feed(number, 2)
    failed = []

    def write(number):
        writer, feed = pairs[number]
        own = np.random.default_rng(number)
        while not ended.is_set():
            # As an environment would, so that there are not too many rows to check.
            time.sleep(0.02)
            with_final = own.random() < 0.7
            if error := add_steps(writer, feed, own, 16, 0.05, with_final, blocks=True):
                failed.append(error)
                return

    threads = [threading.Thread(target=write, args=(number,)) for number in pairs]
    for thread in threads:
        thread.start()
    kills = dict.fromkeys(("before", "after", "random"), 0)
    waits = []
    while sum(kills.values()) < KILLS:
        pid = shard.call("info", timeout_s=WAIT_S)["pid"]
        time.sleep(rng.random() * 0.3)
        kind = str(rng.choice(["before", "after", "after", "random"]))
        if kind == "random":
            os.kill(pid, signal.SIGKILL)
        else:
            shard.call("arm", kind)
        began = time.monotonic()
        until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))
        shard.call("info")
        waits.append(time.monotonic() - began)
        kills[kind] += 1
    ended.set()
    for thread in threads:
        thread.join()
    assert failed == []
    feeds = {number: feed for number, (_, feed) in pairs.items()}
    for writer, _ in pairs.values():
        writer.close()
        assert writer.lost_rows == 0
    # A lease that was noted, and not answered; and one whose first row comes after
    # another kill.
    shard.call("arm", "lease")
    late = mr.ray.thin_writer(run_name, SCHEMA, num_envs=2)
    os.kill(shard.call("info")["pid"], signal.SIGKILL)
    feeds[2] = Feed(2, 2)
    assert add_steps(late, feeds[2], rng, 40) is None
    late.close()
    stop_writing(run_name, folder)
    rows = check_rows(folder, feeds, dict.fromkeys(feeds, 0), feeds)
    print("kills", kills, "rows", rows, "longest wait", round(max(waits), 2))
    assert mr.verify_buffer(folder).findings == ()


def test_rows_lost_by_a_power_cut_of_the_node_are_counted(cluster, run_name, tmp_path):
    shard, folder = start(run_name, tmp_path)
    rng = np.random.default_rng(2)
    safe, fast = (
        mr.ray.thin_writer(run_name, SCHEMA, num_envs=2, steps=8, keep=keep)
        for keep in ("committed", "published")
    )
    feeds = {0: Feed(0, 2), 1: Feed(1, 2)}
    for _ in range(2):
        assert add_steps(fast, feeds[1], rng, 100) is None
        fast.flush()
        assert add_steps(safe, feeds[0], rng, 60) is None
        # Commits all rows of the ring.
        safe.flush()
    for _ in range(3):
        assert add_steps(fast, feeds[1], rng, 50) is None
        assert add_steps(safe, feeds[0], rng, 50) is None
    fast.flush()
    assert sum(block.published for block in safe._blocks) > 3
    before = shard.call("info")["rings"]["thin"]["heads"]
    cluster.remove("n0")
    # A copy is other files: what was not committed is discarded, as after a power cut.
    shutil.copytree(folder, tmp_path / "aside")
    shutil.rmtree(folder)
    (tmp_path / "aside").rename(folder)
    cluster.add("n0")
    assert quietly(add_steps, safe, feeds[0], rng, 50) is None
    assert add_steps(fast, feeds[1], rng, 5) is None
    with pytest.warns(DurabilityWarning, match=r"lost power: \d+ rows of this writer"):
        fast.flush()
    after = shard.call("info")["rings"]["thin"]["heads"]
    assert sum(after) < sum(before) + 400
    for writer in (safe, fast):
        writer.close()
    assert safe.lost_rows == 0
    assert fast.lost_rows > 250
    stop_writing(run_name, folder)
    check_rows(folder, feeds, {0: 0, 1: fast.lost_rows}, feeds)
    assert mr.verify_buffer(folder).findings == ()


def test_the_environments_of_a_dead_writer_go_to_the_next(cluster, run_name, tmp_path):
    shard, folder = start(run_name, tmp_path, num_envs=2, idle_s=1.0)
    actor = ray.remote(Writing).options(num_cpus=0, label_selector={"mmreplay": "n1"})
    feeds = {}
    for number in range(2):
        dying = actor.remote(run_name, number, 2, steps=8)
        feeds[number] = ray.get(dying.add.remote(100), timeout=WAIT_S)
        os.kill(ray.get(dying.pid.remote(), timeout=WAIT_S), signal.SIGKILL)
        until(lambda: shard.call("info")["rings"]["thin"]["free"] == 2)
    last = actor.remote(run_name, 2, 2)
    feeds[2] = ray.get(last.add.remote(100), timeout=WAIT_S)
    ray.get(last.close.remote(), timeout=WAIT_S)
    ray.kill(last)
    stop_writing(run_name, folder)
    # Of the dead all full blocks but those that were under way.
    assert check_rows(folder, feeds, {2: 0}, [2]) >= 2 * (2 * 72 + 100)
