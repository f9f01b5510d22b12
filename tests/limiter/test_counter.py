"""A counter counts what a limiter counts, allows what it allows, and never waits."""

import dataclasses
import math
import pickle
import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.limiting import Counts
from mmreplay.errors import FailedError, SchemaError, StarvedError
from tests.limiter.support import (
    PARAMETERS,
    SCHEMA,
    add,
    create,
    rate_limiter,
    reader,
    until_starved,
)


def counter(**options):
    return mr.RateCounter(**{**PARAMETERS, **options})


def test_no_call_waits_however_far_both_sides_are_apart(tmp_path):
    with create(tmp_path / "b", counter()) as buffer:
        add(buffer, 60)
        assert buffer.limit.counts() == Counts(inserts=60, samples=0, size=60)
        assert not buffer.limit.allows_insert()
        for _ in range(50):
            buffer.sample(20)
        assert buffer.limit.counts() == Counts(inserts=60, samples=1000, size=60)
        assert not buffer.limit.allows_sample()


@pytest.mark.parametrize("count", [1, 3, 16])
def test_as_many_are_allowed_as_single_calls_of_a_limiter(tmp_path, rng, count):
    limiter = rate_limiter()
    with create(tmp_path / "b", counter()) as buffer:
        for _ in range(200):
            inserts, samples, size = dataclasses.astuple(buffer.limit.counts())
            if size >= limiter.min_size:
                assert buffer.limit.allows_insert(count) == all(
                    limiter.allows_insert(inserts + each, samples, size) for each in range(count)
                )
            assert buffer.limit.allows_sample(count) == all(
                limiter.allows_sample(inserts, samples + each, size) for each in range(count)
            )
            if size and rng.random() < 0.6:
                buffer.sample(int(rng.integers(1, 12)))
            else:
                add(buffer)


def test_one_thread_that_writes_and_draws_stays_within_the_bound(tmp_path):
    """A limiter would wait for a thread that it is in itself."""
    with create(tmp_path / "b", counter()) as buffer:
        while len(buffer) < 90:
            if buffer.limit.allows_sample(8):
                buffer.sample(8)
            else:
                assert buffer.limit.allows_insert()
                add(buffer)
            counts = buffer.limit.counts()
            if counts.size >= 10:
                assert abs(4 * counts.inserts - counts.samples - 40) <= 20
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", limiter=rate_limiter()) as buffer:
        until_starved(lambda: add(buffer))


def test_a_limiter_elsewhere_sees_what_a_counter_counts(tmp_path):
    with (
        create(tmp_path / "b", rate_limiter()) as buffer,
        reader(tmp_path / "b", counter()) as learner,
    ):
        assert until_starved(lambda: add(buffer)) == 15
        learner.sample(40)
        assert learner.limit.counts() == buffer.limit.counts()
        # 4 * inserts - 40 <= 60.
        assert until_starved(lambda: add(buffer)) == 10


def test_a_counter_that_writes_is_known_to_those_who_wait_for_a_writer(tmp_path):
    limiter = rate_limiter(timeout=0.2)
    wrote, may_end = threading.Event(), threading.Event()

    def write():
        add(buffer)
        wrote.set()
        may_end.wait()

    with create(tmp_path / "b", counter()) as buffer, reader(tmp_path / "b", limiter) as learner:
        with pytest.raises(StarvedError, match="none is running"):
            learner.sample(1)
        thread = threading.Thread(target=write)
        thread.start()
        wrote.wait()
        with pytest.raises(StarvedError, match=r"0\.2 s have passed"):
            learner.sample(1)
        may_end.set()
        thread.join()


def test_a_learner_that_asks_until_it_may_draw_is_waited_for(tmp_path):
    """The writer's patience ends while the learner asks for more than there is."""
    asked, may_end = threading.Event(), threading.Event()

    def poll():
        while not (may_end.is_set() and learner.limit.allows_sample(8)):
            learner.limit.allows_sample(1_000)
            asked.set()
        learner.sample(8)

    with (
        create(tmp_path / "b", rate_limiter(timeout=0.3)) as buffer,
        reader(tmp_path / "b", counter()) as learner,
    ):
        thread = threading.Thread(target=poll)
        thread.start()
        asked.wait()
        with pytest.raises(StarvedError, match=r"0\.3 s have passed"):
            add(buffer, 1_000)
        may_end.set()
        thread.join()
        add(buffer, 2)


def test_without_arguments_everything_is_allowed_and_counted(tmp_path):
    with create(tmp_path / "b", mr.RateCounter()) as buffer:
        assert not buffer.limit.allows_sample()
        add(buffer, 3)
        buffer.sample(1000)
        assert buffer.limit.allows_insert(10**9)
        assert buffer.limit.allows_sample(10**9)
        assert buffer.limit.counts() == Counts(inserts=3, samples=1000, size=3)


def test_overwritten_rows_stay_counted(tmp_path):
    with create(tmp_path / "b", mr.RateCounter()) as buffer:
        buffer.extend(number=np.arange(250))
        counts = buffer.limit.counts()
        assert counts.inserts == 250
        assert counts.size == len(buffer)


def test_a_limiter_also_says_what_it_counts(tmp_path):
    with create(tmp_path / "b", rate_limiter()) as buffer:
        add(buffer, 12)
        assert buffer.limit.counts() == Counts(inserts=12, samples=0, size=12)
        assert buffer.limit.allows_insert(3)
        assert not buffer.limit.allows_insert(4)
        assert buffer.limit.allows_sample(28)
        assert not buffer.limit.allows_sample(29)
    with create(tmp_path / "c", None) as buffer:
        assert buffer.limit is None


def test_a_closed_counter_says_so(tmp_path):
    buffer = create(tmp_path / "b", counter())
    limit = buffer.limit
    buffer.close()
    limit.close()
    with pytest.raises(FailedError, match="is closed"):
        limit.counts()


def test_a_buffer_with_a_counter_is_pickled_with_it(tmp_path):
    with create(tmp_path / "b", counter()) as buffer:
        add(buffer, 10)
        with reader(tmp_path / "b", counter()) as learner:
            learner.sample(5)
            again = pickle.loads(pickle.dumps(learner))
        with again:
            assert again.limit.counts() == Counts(inserts=10, samples=5, size=10)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"samples_per_insert": 0.0}, "samples_per_insert must be a number above 0"),
        ({"samples_per_insert": math.inf}, "samples_per_insert must be a number"),
        ({"min_size": 0}, "min_size must be an integer of at least 1"),
        ({"error_buffer": 3.0}, "error_buffer must be at least 4"),
    ],
)
def test_what_a_limiter_refuses_a_counter_refuses(options, match):
    with pytest.raises(SchemaError, match=match):
        counter(**options)


def test_other_arguments_and_a_buffer_in_ram_are_refused(tmp_path):
    with create(tmp_path / "b", counter()):
        pass
    with pytest.raises(SchemaError, match=r"limiter: \(samples_per_insert, min_size"):
        reader(tmp_path / "b", counter(min_size=11))
    with pytest.raises(SchemaError, match="needs a buffer with a folder"):
        mr.ReplayBuffer.create(None, SCHEMA, 100, engine="memory", limiter=counter())
    with pytest.raises(SchemaError, match="min_size must be at most 100"):
        create(tmp_path / "c", counter(min_size=101))
