"""Thin writers obey the rate limiter of their run, over a simulated shard."""

import functools
import itertools
import threading
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.limiting import Counts
from mmreplay.errors import SchemaError, StarvedError
from mmreplay.ray.grants import Allowance, Asker, Grants
from mmreplay.ray.lanes import create_lanes
from mmreplay.ray.limits import counter_of, limiter_of
from mmreplay.ray.shard import Shard
from tests.on_ray.thin_support import SCHEMA, SimulatedShard, add_steps, check_rows, make_writer

RATIO, MIN_SIZE = 2.0, 100


class Registry:
    """Grants by what the ring has, in the threads that ask.

    Attributes:
        samples: Items drawn.
    """

    def __init__(self, rule, shard):
        self.rule, self.shard = rule, shard
        self.grants, self.lock = Grants(rule), threading.Lock()
        self.samples = 0
        self.names = itertools.count()

    def asker(self, limiter, count):
        name = f"insert {next(self.names)}"
        ask = functools.partial(self.ask, name)
        allowance = Allowance(count, count // 2)
        return Asker("insert", limiter, allowance, ask, "run 'r'")

    def ask(self, name, count, unused, number):
        with self.lock:
            self.grants.ask(name, "insert", count, unused, number)
            began = self.grants.begin_look()
            # As a request of a later time than the look's would.
            time.sleep(0.001)
            self.grants.looked(began, self.counts)
            return self.grants.decide(name, count)

    @property
    def counts(self):
        rows = self.shard.rows
        return Counts(rows, self.samples, rows)


class CountedShard(SimulatedShard):
    """A shard whose ring has a limiter.

    Attributes:
        rows: Rows in the ring, as of the last call that ran.
    """

    rows = 0

    def __init__(self, folder, limiter):
        create_lanes(
            folder, SCHEMA, 4_000, 4, limiter=limiter, commit_every=None, autoreset="disabled"
        )
        super().__init__(folder, num_lanes=4)

    def _run(self, call):
        super()._run(call)
        self.rows = int(self.opened().ring.published.sum())


def start(tmp_path, error, **waits):
    rule = mr.RateLimiter(RATIO, MIN_SIZE, error, **waits)
    shard = CountedShard(tmp_path / "ring", rule)
    return rule, shard, Registry(rule, shard)


def test_a_thin_writer_stops_at_the_bound_and_goes_on_with_a_learner(tmp_path, rng):
    rule, shard, registry = start(tmp_path, 400.0, patience=0.2)
    writer, feed = make_writer(shard, 0, 2, steps=16, limiter=rule, ask=registry.asker, ahead=1)
    error = None
    while error is None:
        error = add_steps(writer, feed, rng, 1, ends=0.0)
    assert isinstance(error, StarvedError)
    assert "waited for a client to draw" in str(error)
    # The last block that fits below 100 + 400 / 2 rows.
    assert 300 - 32 < shard.rows <= 300
    registry.samples = 200
    assert add_steps(writer, feed, rng, 32, ends=0.0) is None
    assert 300 < shard.rows <= 400
    writer.close()
    # The steps that were not sent pass the bound when the writer is closed.
    assert shard.rows == 2 * feed.seq
    assert check_rows(shard.folder, {0: feed}, {0: 0}, [0]) == shard.rows


def test_rows_under_way_stand_in_the_way_of_other_writers(tmp_path, rng):
    rule, shard, registry = start(tmp_path, 200.0, patience=0.2)
    options = {"steps": 32, "limiter": rule, "ask": registry.asker}
    (one, first), (two, second) = (make_writer(shard, number, 2, **options) for number in range(2))
    for writer, feed in ((one, first), (two, second)):
        assert add_steps(writer, feed, rng, 32, ends=0.0) is None
    # Both blocks were granted and sent; a third one would pass 100 + 200 / 2 rows.
    assert shard.rows == 0
    assert add_steps(two, second, rng, 32, ends=0.0) is None
    assert isinstance(add_steps(two, second, rng, 1, ends=0.0), StarvedError)
    assert shard.rows <= 128
    one.flush()
    assert isinstance(add_steps(two, second, rng, 1, ends=0.0), StarvedError)
    assert shard.rows == 128
    registry.samples = 200
    two.flush()
    assert shard.rows == 192
    one.close()
    two.close()
    assert check_rows(shard.folder, {0: first, 1: second}, {0: 0, 1: 0}, [0, 1]) == 192


FAULTS = ("before", "after", "lost", "late", "deliver", "swapped", None, None, None)


@pytest.mark.parametrize("seed", range(4))
def test_kills_neither_pass_the_bound_nor_lose_a_row(tmp_path, seed):
    rng = np.random.default_rng(seed)
    rule, shard, registry = start(tmp_path, 400.0, patience=30.0)
    options = {"steps": 8, "limiter": rule, "ask": registry.asker}
    pairs = [make_writer(shard, number, 2, **options) for number in range(2)]
    stopped, worst = threading.Event(), [0.0]

    def draw():
        # As a learner that is granted items by the same bound.
        while not stopped.wait(0.001):
            rows, samples = shard.rows, registry.samples
            difference = RATIO * (rows - MIN_SIZE) - samples
            worst[0] = max(worst[0], difference)
            if rows >= MIN_SIZE and rule.allows_sample(rows, samples + 63, rows):
                registry.samples += 64

    learner = threading.Thread(target=draw)
    learner.start()
    try:
        for _ in range(60):
            writer, feed = pairs[int(rng.integers(2))]
            shard.plan = [FAULTS[int(n)] for n in rng.integers(len(FAULTS), size=2)]
            assert add_steps(writer, feed, rng, 12, ends=0.1) is None
        shard.plan = []
        for writer, _ in pairs:
            writer.flush()
            assert writer.lost_rows == 0
    finally:
        stopped.set()
        learner.join()
    # Each block may have a final row for each end more than was granted.
    assert worst[0] <= rule.error_buffer + RATIO * 2 * 8 * 2
    assert shard.kills > 5
    for writer, _ in pairs:
        writer.close()
    feeds = {feed.number: feed for _, feed in pairs}
    check_rows(shard.folder, feeds, dict.fromkeys(feeds, 0), feeds)


def test_a_writer_follows_the_limiter_of_its_ring_by_itself(tmp_path, rng):
    rule, shard, registry = start(tmp_path, 400.0)
    asked = []

    def ask(limiter, count):
        asked.append((limiter.settings, count))
        return registry.asker(limiter, count)

    writer, feed = make_writer(shard, 0, 2, steps=16, ask=ask)
    assert asked == [(rule.settings, 32)]
    assert add_steps(writer, feed, rng, 20) is None
    writer.close()


def test_a_limiter_that_is_not_the_ring_s_is_refused_and_gives_back(tmp_path):
    _, shard, registry = start(tmp_path, 400.0)
    other = mr.RateLimiter(RATIO + 1, MIN_SIZE, 400.0)
    with pytest.raises(SchemaError, match=r"limiter: .* must be \[2\.0, 100, 400\.0\]"):
        make_writer(shard, 0, 2, limiter=other, ask=registry.asker)
    assert shard.opened().num_free == 4
    with pytest.raises(SchemaError, match=r"limiter: .* must be \[2\.0, 100, 400\.0\]"):
        create_lanes(shard.folder, SCHEMA, 4_000, 4, limiter=other)
    plain = SimulatedShard(tmp_path / "plain")
    with pytest.raises(SchemaError, match="limiter must be None, as the simulated"):
        make_writer(plain, 0, 2, limiter=other, ask=registry.asker)
    assert plain.opened().num_free == 5


def test_the_ring_counts_for_the_limiter_it_was_made_with(tmp_path, rng):
    """Without a cluster: a shard is a plain class."""
    rule = mr.RateLimiter(RATIO, MIN_SIZE, 400.0)
    folder = tmp_path / "run" / "thin"
    folder.parent.mkdir()
    create_lanes(folder, SCHEMA, 1_000, 4, commit_every=None, autoreset="disabled")
    assert counter_of(folder) is None
    # One without a limiter gets it later, and keeps it.
    create_lanes(folder, SCHEMA, 1_000, 4, limiter=rule)
    create_lanes(folder, SCHEMA, 1_000, 4)
    assert limiter_of(folder).settings == rule.settings
    shard = Shard("run", str(tmp_path), "key")
    terms = shard.lease("a" * 32, 2, SCHEMA.to_json(), dict(SCHEMA.roles))
    assert terms["limiter"] == list(rule.settings)
    assert shard.counts() == {"counts": [0, 0, 0], "bound": list(rule.settings)}
    shard.stop()
