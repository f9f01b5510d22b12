"""Clients of a run on a head and two nodes: rows, kills, losses, owners."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from itertools import islice

import numpy as np
import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.errors import FailedError, LockedError, SchemaError  # noqa: E402
from mmreplay.ray.client import RayShard  # noqa: E402
from tests.combinations.own_sampler import ThirdsSampler  # noqa: E402
from tests.on_ray.actors import ask, kill, shard, writing  # noqa: E402
from tests.on_ray.rows import SCHEMA, check  # noqa: E402
from tests.waits import WAIT_S, until  # noqa: E402


class Learning:
    """An actor that draws on its node."""

    def __init__(self, run, sampler, **options):
        self.sampler = getattr(mr, sampler)(seed=0)
        self.client = mr.ray.ReplayClient(run, self.sampler, **options)
        self.steps = iter(self.client)

    def pid(self):
        return os.getpid()

    def learn(self, batches):
        """Draw batches, check their rows and set priorities; return the rings."""
        drawn = set()
        for batch in islice(self.steps, batches):
            check(batch)
            drawn |= set(batch.buffer_ids.tolist())
            if isinstance(self.sampler, mr.PrioritizedSampler):
                self.client.update_priorities(batch, np.ones(len(batch)))
        return sorted(drawn)

    def stats(self):
        return self.client.stats()

    def close(self):
        self.client.close()


def learning(label, *arguments, **more):
    """An actor on the node of a label that learns."""
    where = {"label_selector": {"mmreplay": label}}
    return ray.remote(Learning).options(num_cpus=0, **where).remote(*arguments, **more)


@pytest.fixture
def two(run_name, tmp_path):
    """A run with a ring of 500 rows on each node."""
    writers = [
        writing(label, run_name, str(tmp_path / label), number)
        for number, label in enumerate(("n0", "n1"))
    ]
    for each in writers:
        ask(each, "add", 500)
    return run_name, writers


def firsts(client, count):
    """Rings of the next batches, whose rows are checked."""
    drawn = set()
    for batch in islice(client, count):
        check(batch)
        drawn |= set(batch.buffer_ids.tolist())
    return drawn


@pytest.mark.parametrize("sampler", ["UniformSampler", "PrioritizedSampler"])
@pytest.mark.parametrize("per_call", [1, 4])
def test_a_learner_on_a_node_draws_from_both(two, sampler, per_call):
    run, _ = two
    learner = learning("n0", run, sampler, batch_size=64, per_call=per_call)
    assert ask(learner, "learn", 40) == [0, 1]
    assert ask(learner, "stats").rings == ("n0/ring-000", "n1/ring-000")
    assert ask(learner, "stats").dropped == 0
    ask(learner, "close")


@pytest.mark.parametrize("batch_size", [64, 8192])
def test_rows_of_other_nodes_are_copied_into_memory_that_is_used_again(two, batch_size):
    """Of small replies, and of large ones, which lie in Ray's store."""
    run, _ = two
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ray.ReplayClient(run, sampler, batch_size=batch_size) as client:
        seen, kept = set(), []
        for number, batch in enumerate(islice(client, 100)):
            check(batch)
            seen.add(batch["number"].data_ptr())
            # Ray's memory is read-only; this is the client's own.
            batch["number"][0] = batch["number"][0]
            client.update_priorities(batch, np.ones(batch_size))
            if number < 3:
                kept.append((batch, batch["number"].clone()))
        assert len(seen) <= 50
        for batch, numbers in kept:
            assert (batch["number"] == numbers).all()


def test_rows_of_other_nodes_come_with_the_reply_and_not_through_ray_s_store(two, monkeypatch):
    run, _ = two
    sent, send = [], RayShard.send

    def noted(shard, method, *arguments):
        call = send(shard, method, *arguments)
        sent.append((method, call._references))
        return call

    monkeypatch.setattr(RayShard, "send", noted)
    # As much as Ray would store of each node: 8,192 rows of 22 bytes.
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ray.ReplayClient(run, sampler, batch_size=16_384) as client:
        for batch in islice(client, 10):
            check(batch)
            client.update_priorities(batch, np.ones(len(batch)))
        drawn = [each for method, each in sent if method == "exchange"]
        replies = [each for each in drawn if len(each) > 1]
        assert len(replies) >= len(drawn) - 8
        blocks = [block for reply in replies for block in reply[1:]]
        assert len(blocks) >= 2 * len(replies)
        ray.wait(blocks, num_returns=len(blocks), timeout=WAIT_S)
        where = ray.experimental.get_object_locations(blocks)
        assert not any(each["node_ids"] for each in where.values())


STOPPED = """
import sys, threading, time, warnings
import numpy as np
import ray
import mmreplay as mr
from tests.on_ray.rows import SCHEMA
address, run = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
thin = mr.ray.thin_writer(run, SCHEMA, num_envs=2)
for number in range(200):
    row = {"number": [number] * 2, "writer": [0] * 2, "crc": [0] * 2}
    thin.add(**row, terminated=[False] * 2, truncated=[False] * 2)
sampler = mr.PrioritizedSampler(seed=0)
client = mr.ray.ReplayClient(run, sampler, batch_size=64, prefetch=8, per_call=4)

def learn():
    try:
        for batch in client:
            client.update_priorities(batch, np.ones(64))
    except mr.FailedError:
        pass

learner = threading.Thread(target=learn)
learner.start()
time.sleep(3)
mr.ray.stop(run)
learner.join()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    client.close()
try:
    thin.extend(
        **{name: np.zeros((300, 2), int) for name in ("number", "writer", "crc")},
        terminated=np.zeros((300, 2), bool), truncated=np.zeros((300, 2), bool),
    )
    thin.close()
except mr.FailedError as error:
    print("refused:", error)
del thin
# Ray looks for errors that no one asked for every few seconds.
time.sleep(8)
"""


def test_those_who_use_a_stopped_run_leave_no_error_to_ray(two, cluster, tmp_path):
    run, _ = two
    mr.ray.thin_ring(run, SCHEMA, 1_000, root=tmp_path / "head", num_envs=2, autoreset="disabled")
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, cluster.address, run],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"refused: the run '{run}' was stopped" in done.stdout
    assert "Unhandled error" not in done.stderr + done.stdout


def test_priorities_are_set_where_the_ring_is_and_outlive_its_shard(two):
    run, _ = two
    sampler = mr.PrioritizedSampler(1.0, eps=0.0, seed=0)
    with mr.ray.ReplayClient(run, sampler, batch_size=4000) as client:
        (batch,) = islice(client, 1)
        wanted = (batch["number"] == 7) & (batch["writer"] == 1)
        client.update_priorities(batch, wanted.numpy().astype(np.float32))
    kill(shard(run, "n1").call("info")["pid"])
    with mr.ray.ReplayClient(run, sampler, batch_size=64) as client:
        (batch,) = islice(client, 1)
        assert set(batch["number"].tolist()) == {7}
        assert set(batch["writer"].tolist()) == {1}


def test_a_restart_of_a_shard_is_waited_for(two):
    run, writers = two
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ray.ReplayClient(run, sampler, batch_size=64, lost_s=60) as client:
        assert firsts(client, 5) == {0, 1}
        for turn in range(3):
            kill(shard(run, "n0").call("info")["pid"])
            ask(writers[0], "add", 10 + turn)
            for batch in islice(client, 10):
                check(batch)
                assert set(batch.buffer_ids.tolist()) == {0, 1}
                client.update_priorities(batch, np.ones(64))
        stats = client.stats()
    assert stats.repeated > 0
    assert stats.times_lost == 0


def test_a_lost_node_drops_out_and_comes_back(two, cluster, tmp_path):
    run, _ = two
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ray.ReplayClient(run, sampler, batch_size=64, lost_s=5.0) as client:
        assert firsts(client, 5) == {0, 1}
        node_id = cluster.node_id("n1")
        cluster.remove("n1")
        with pytest.warns(mr.ray.LostWarning, match="node 'n1' has not answered"):
            until(lambda: firsts(client, 1) == {0} and client.stats().lost)
        stats = client.stats()
        assert stats.lost == ("n1/ring-000",)
        assert stats.times_lost == 1
        assert firsts(client, 50) == {0}
        cluster.add("n1")
        until(lambda: firsts(client, 5) == {0, 1})
        assert not client.stats().lost
    # The actors of later tests would wait for the node that is gone.
    cluster.wait_dead(node_id)


def test_a_node_without_a_label_comes_back_under_its_host(run_name, cluster, tmp_path):
    node = cluster.add(None)
    selector = {"resources": {"unlabelled": 0.01}}
    ask(writing(None, run_name, str(tmp_path), selector=selector), "add", 100)
    options = {"batch_size": 64, "lost_s": 5.0}
    with mr.ray.ReplayClient(run_name, mr.UniformSampler(0), **options) as client:
        assert firsts(client, 3) == {0}
        cluster.remove_node(node)
        with pytest.warns(mr.ray.LostWarning), pytest.raises(mr.StarvedError):
            # Its workers answer until they find that their node is gone.
            until(lambda: firsts(client, 50) != {0})
        node = cluster.add(None)
        try:
            until(lambda: firsts(client, 3) == {0}, mr.StarvedError)
        finally:
            cluster.remove_node(node)
            cluster.wait_dead(str(node.node_id))


def test_a_sampler_of_a_user_s_own_draws_by_its_probabilities_from_both(two):
    run, _ = two
    with mr.ray.ReplayClient(run, ThirdsSampler(0), batch_size=64) as client:
        batches = list(islice(client, 60))
    for batch in batches:
        check(batch)
    rings = np.concatenate([batch.buffer_ids for batch in batches])
    positions = np.concatenate([batch.positions for batch in batches])
    assert set(rings.tolist()) == {0, 1}
    # 5 of 7 on average; of 3,840 draws, by 0.0073 of a standard deviation.
    assert abs(np.mean(positions % 3 == 0) - 5 / 7) < 6 * 0.0073


def test_a_straggler_is_left_out_of_its_batches(two):
    run, _ = two
    options = {"batch_size": 64, "straggler_s": 0.3, "lost_s": 60}
    pid = shard(run, "n1").call("info")["pid"]
    with mr.ray.ReplayClient(run, mr.UniformSampler(0), **options) as client:
        assert firsts(client, 5) == {0, 1}
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: firsts(client, 1) == {0})
            assert client.stats().late > 0
            assert not client.stats().lost
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: firsts(client, 1) == {0, 1})


def test_alone_owns_the_priorities_of_its_node(two):
    run, _ = two
    learner = learning("n0", run, "PrioritizedSampler", batch_size=64, alone=True)
    assert ask(learner, "learn", 20) == [0, 1]
    pid = ask(learner, "pid")
    with pytest.raises(LockedError, match=f"of pid {pid}") as error:
        mr.ray.ReplayClient(run, mr.PrioritizedSampler(seed=0))
    assert error.value.pid == pid
    with mr.ray.ReplayClient(run, mr.UniformSampler(0), batch_size=64) as client:
        assert firsts(client, 3) == {0, 1}
    kill(pid)
    # It ends with the learner, also with one that was killed.
    sampler = mr.PrioritizedSampler(seed=0)
    (client,) = until(lambda: [mr.ray.ReplayClient(run, sampler)], LockedError)
    assert firsts(client, 3) == {0, 1}
    client.close()
    # The shard has them now, and gives them to nobody.
    again = learning("n0", run, "PrioritizedSampler", alone=True)
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"LockedError: .* of pid"):
        ask(again, "learn", 1)


def test_two_learners_share_priorities(two):
    run, _ = two
    one = mr.ray.ReplayClient(run, mr.PrioritizedSampler(beta=0.4, seed=0))
    other = mr.ray.ReplayClient(run, mr.PrioritizedSampler(beta=1.0, seed=1))
    with one, other:
        (batch,) = islice(one, 1)
        one.update_priorities(batch, np.full(256, 50.0))
        until(lambda: firsts(other, 1) and other._rings.source.table.highest == 50.0)


def test_a_client_follows_the_writers(two):
    run, writers = two
    with mr.ray.ReplayClient(run, mr.UniformSampler(0), batch_size=256) as client:
        firsts(client, 3)
        ask(writers[1], "add", 500)
        until(lambda: any(b["number"].max() >= 500 for b in islice(client, 1)))


def test_a_new_ring_is_found(two, tmp_path):
    run, _ = two
    with mr.ray.ReplayClient(run, mr.UniformSampler(0), batch_size=256) as client:
        firsts(client, 3)
        another = writing("n0", run, str(tmp_path / "n0"), 2)
        ask(another, "add", 500)
        until(lambda: firsts(client, 1) == {0, 1, 2})
        assert client.stats().rings[2] == "n0/ring-001"


def test_a_state_continues_in_another_client(two):
    run, _ = two
    with mr.ray.ReplayClient(run, mr.UniformSampler(3), batch_size=16) as client:
        for _ in islice(client, 5):
            pass
        state = client.state_dict()
        expected = [b["number"].tolist() for b in islice(client, 5)]
    with mr.ray.ReplayClient(run, mr.UniformSampler(0), batch_size=16) as client:
        client.load_state_dict(state)
        assert [b["number"].tolist() for b in islice(client, 5)] == expected


def test_transforms_run_on_the_node_of_the_ring(two):
    run, _ = two
    transforms = [mr.Cast("float32", ["writer"], scale=0.5)]
    with mr.ray.ReplayClient(run, mr.UniformSampler(0), transforms) as client:
        (batch,) = islice(client, 1)
        assert set(batch["writer"].tolist()) == {0.0, 0.5}
    with pytest.raises(SchemaError, match="got Apply"):
        mr.ray.ReplayClient(run, mr.UniformSampler(0), [mr.Apply(dict)])
    with pytest.raises(SchemaError, match="reward"):
        mr.ray.ReplayClient(run, mr.UniformSampler(0), [mr.NStep(3, gamma=0.9)])
    with pytest.raises(SchemaError, match=r"^RankPrioritizedSampler .* with 2 rings"):
        mr.ray.ReplayClient(run, mr.RankPrioritizedSampler())


def test_windows_travel(two):
    run, _ = two
    sampler = mr.SequenceSampler(4, mr.PrioritizedSampler(seed=0))
    with mr.ray.ReplayClient(run, sampler, batch_size=32) as client:
        for batch in islice(client, 5):
            assert batch["number"].shape == (32, 4)
            assert (batch["number"][:, 1:] - batch["number"][:, :-1] == 1).all()
            client.update_priorities(batch, np.ones((32, 4)))


def test_a_client_that_outlives_its_run_is_refused(two):
    run, _ = two
    with mr.ray.ReplayClient(run, mr.UniformSampler(0), batch_size=16) as client:
        firsts(client, 2)
        mr.ray.stop(run)
        with pytest.raises(FailedError, match=f"the run '{run}' was stopped"):
            firsts(client, 1000)
    with pytest.raises(SchemaError, match=f"this cluster has no run '{run}'"):
        mr.ray.ReplayClient(run, mr.UniformSampler(0))


def test_a_batch_larger_than_what_is_there_repeats_steps(two):
    run, _ = two
    with mr.ray.ReplayClient(run, mr.UniformSampler(0), batch_size=5000) as client:
        (batch,) = islice(client, 1)
    assert len(batch["number"]) == 5000


def test_kills_while_two_threads_learn_lose_no_batch(two):
    run, _ = two
    errors = []

    def learn(seed):
        try:
            sampler = mr.UniformSampler(seed)
            with mr.ray.ReplayClient(run, sampler, batch_size=64, lost_s=60) as client:
                for batch in islice(client, 60):
                    check(batch)
                    assert len(batch) == 64
                    time.sleep(0.02)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=learn, args=(n,)) for n in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", mr.ray.LostWarning)
        for thread in threads:
            thread.start()
        for label in ("n0", "n1", "n0"):
            time.sleep(0.5)
            kill(until(lambda: shard(run, label).call("info"))["pid"])  # noqa: B023
        for thread in threads:
            thread.join()
    assert not errors
