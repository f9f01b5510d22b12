"""Shuffled epochs over three nodes: every start once, over kills and losses."""

import os
import warnings
from collections import Counter
from itertools import islice

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.errors import SchemaError  # noqa: E402
from tests.on_ray.actors import ask, ended, kill, shard, writing  # noqa: E402
from tests.on_ray.rows import check  # noqa: E402
from tests.waits import WAIT_S, until  # noqa: E402

STEPS = 400


class Going:
    """An actor that goes through epochs on its node."""

    def __init__(self, run, state=None, **options):
        warnings.simplefilter("ignore")
        sampler = mr.ShuffledSampler(seed=3)
        if options.pop("windows", False):
            sampler = mr.SequenceSampler(4, sampler)
        self.client = mr.ray.ReplayClient(run, sampler, **options)
        if state is not None:
            self.client.load_state_dict(state)
        self.batches = iter(self.client)

    def pid(self):
        return os.getpid()

    def go(self, batches=None):
        """Rows of some batches, or of the rest of the epoch, as (writer, number)."""
        rows = []
        for batch in islice(self.batches, batches):
            numbers, writers = batch["number"], batch["writer"]
            if numbers.ndim == 1:
                check(batch)
            else:
                numbers, writers = numbers[:, 0], writers[:, 0]
            rows += zip(writers.tolist(), numbers.tolist(), strict=True)
        return rows

    def again(self):
        self.batches = iter(self.client)

    def state(self):
        return self.client.state_dict()

    def stats(self):
        return self.client.stats()

    def close(self):
        self.client.close()


def going(label, *arguments, **more):
    where = {"label_selector": {"mmreplay": label}}
    return ray.remote(Going).options(num_cpus=0, **where).remote(*arguments, **more)


@pytest.fixture(scope="module")
def third(cluster):
    """A third node, for as long as these tests run."""
    cluster.add("n2")
    yield
    cluster.remove("n2")


@pytest.fixture
def three(third, run_name, tmp_path):
    """A run with a ring on each of three nodes; its writers."""
    writers = [
        writing(label, run_name, str(tmp_path / label), number)
        for number, label in enumerate(("n0", "n1", "n2"))
    ]
    for writer in writers:
        ask(writer, "add", STEPS)
    yield writers
    for writer in writers:
        ray.kill(writer)


def every(steps=STEPS):
    return Counter((writer, n) for writer in range(3) for n in range(steps))


def test_each_start_is_drawn_once_though_shards_are_killed(run_name, three):
    learner = going("n0", run_name, batch_size=32)
    rows = ask(learner, "go", 5)
    for number, label in enumerate(("n1", "n2", "n0")):
        kill(shard(run_name, label).call("info")["pid"])
        rows += ask(learner, "go", 5)
        # Rows that come while it goes on are for the next epoch.
        ask(three[number], "add", 10)
    rows += ask(learner, "go")
    assert Counter(rows) == every()
    ask(learner, "again")
    assert Counter(ask(learner, "go")) == every(STEPS + 10)
    assert ask(learner, "stats").skipped == 0
    ask(learner, "close")


def test_ranks_are_disjoint_and_a_killed_one_resumes_from_its_state(run_name, three):
    ranks = [
        going(label, run_name, batch_size=32, rank=rank, num_ranks=2)
        for rank, label in enumerate(("n0", "n1"))
    ]
    rows = [ask(rank, "go", 7) for rank in ranks]
    state = ask(ranks[1], "state")
    ask(ranks[1], "go", 3)
    kill(ask(ranks[1], "pid"))
    for writer in three:
        ask(writer, "add", 50)
    ranks[1] = going("n2", run_name, state, batch_size=32, rank=1, num_ranks=2)
    for number in range(2):
        rows[number] += ask(ranks[number], "go")
    assert Counter(rows[0]) + Counter(rows[1]) == every()
    assert abs(len(rows[0]) - len(rows[1])) <= 1
    for rank in ranks:
        ask(rank, "again")
    rows = [ask(rank, "go") for rank in ranks]
    assert Counter(rows[0]) + Counter(rows[1]) == every(STEPS + 50)
    for rank in ranks:
        ask(rank, "close")


def test_an_epoch_waits_for_a_node_that_is_away(cluster, three, run_name):
    learner = going("n0", run_name, batch_size=32, lost_s=1.0)
    rows = ask(learner, "go", 3)
    ray.kill(three[2])
    node_id, pid = cluster.node_id("n2"), shard(run_name, "n2").call("info")["pid"]
    cluster.remove("n2")
    # Workers answer until they find their raylet gone.
    until(lambda: ended(pid))
    rest = learner.go.remote()
    assert ray.wait([rest], timeout=4)[0] == []
    cluster.add("n2")
    rows += ray.get(rest, timeout=WAIT_S)
    assert Counter(rows) == every()
    ask(learner, "close")
    # Ray would start actors of the next test on the old node until then.
    cluster.wait_dead(node_id)


def test_windows_are_drawn_once_each(run_name, three):
    learner = going("n1", run_name, batch_size=32, windows=True)
    rows = ask(learner, "go")
    assert max(Counter(rows).values()) == 1
    # Episodes of 50 steps have 47 windows of 4, or one for each step of a short one.
    assert len(rows) >= 3 * STEPS // 50 * 47
    ask(learner, "close")


def test_what_has_no_epochs_over_rings_is_refused(run_name, three):
    with pytest.raises(SchemaError, match="seed must be given where 2 learners"):
        mr.ray.ReplayClient(run_name, mr.ShuffledSampler(), num_ranks=2)
    with pytest.raises(SchemaError, match="batches must be None"):
        mr.ray.ReplayClient(run_name, mr.ShuffledSampler(batches=3))
