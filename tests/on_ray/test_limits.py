"""A rate limiter over the writers and clients of a run, on a head and two nodes."""

import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.errors import FormatError, SchemaError, StarvedError  # noqa: E402
from mmreplay.ray import cluster as calls  # noqa: E402
from mmreplay.ray import ring_writer  # noqa: E402
from mmreplay.ray.draws import RingDraws  # noqa: E402
from mmreplay.ray.limits import RingCounter, counter_of, limiter_of  # noqa: E402
from mmreplay.ray.messages import client_to_bytes, request_to_bytes  # noqa: E402
from mmreplay.ray.shard import Shard  # noqa: E402
from tests.on_ray.actors import ask, kill, shard  # noqa: E402
from tests.on_ray.rings import client_of, wanted_of  # noqa: E402
from tests.on_ray.rows import SCHEMA, block, check  # noqa: E402
from tests.waits import WAIT_S, until  # noqa: E402

BOUND = {
    "samples_per_insert": 4.0,
    "min_size": 500,
    "error_buffer": 3_000.0,
    # A learner may take long to start.
    "patience": WAIT_S,
}


class Steady:
    """An actor that writes in a thread, as fast as the limiter allows."""

    def __init__(self, run, root, number, limiter, num_envs=1):
        self.number = number
        self.writer = mr.ray.writer(
            run, SCHEMA, 100_000, root=root, limiter=limiter, num_envs=num_envs
        )
        self.error = None
        self.stopped = False
        self.thread = threading.Thread(target=self.write, daemon=True)
        self.thread.start()

    def write(self):
        written = 0
        try:
            while not self.stopped:
                rows = block(self.number, written, 1)
                self.writer.add({path: column[0] for path, column in rows.items()})
                written += 1
        except Exception as error:
            self.error = repr(error)

    def facts(self):
        return str(self.writer.buffer.path), self.error

    def stop(self):
        self.stopped = True
        self.writer.close()
        self.thread.join(10)


class SteadyThin(Steady):
    """Likewise, to the ring of another node."""

    def __init__(self, run, number, to):
        self.number = number
        self.writer = mr.ray.thin_writer(run, SCHEMA, num_envs=1, steps=32, to=to)
        self.error, self.stopped = None, False
        self.thread = threading.Thread(target=self.write, daemon=True)
        self.thread.start()

    def pid(self):
        return os.getpid()

    def facts(self):
        return self.writer.lost_rows, self.error

    def stop(self):
        self.stopped = True
        self.thread.join(10)
        self.writer.close()


def make_thin_ring(run, root, limiter):
    mr.ray.thin_ring(
        run, SCHEMA, 100_000, root=root, num_envs=4, limiter=limiter, autoreset="disabled"
    )


class Learner:
    """An actor that draws in a thread, as fast as the limiter allows."""

    def __init__(self, run, batch_size):
        self.client = mr.ray.ReplayClient(run, mr.UniformSampler(seed=0), batch_size=batch_size)
        self.drawn, self.error, self.stopped = 0, None, False
        self.thread = threading.Thread(target=self.learn, daemon=True)
        self.thread.start()

    def learn(self):
        try:
            for batch in self.client:
                check(batch)
                self.drawn += len(batch)
                if self.stopped:
                    return
        except Exception as error:
            self.error = repr(error)

    def facts(self):
        return self.drawn, self.error

    def stop(self):
        self.stopped = True
        self.client.close()
        self.thread.join(10)


def on(kind, label, *arguments):
    where = {"label_selector": {"mmreplay": label}}
    return ray.remote(kind).options(num_cpus=0, **where).remote(*arguments)


def end_registry(run):
    """Kill the registry; Ray restarts it."""
    actor = ray.get_actor(calls.registry_name(run), namespace="mmreplay")
    ray.kill(actor, no_restart=False)


def counts_of(run):
    found = [shard(run, key).call("counts")["counts"] for key in ("n0", "n1")]
    return [sum(each) for each in zip(*found, strict=True)]


def test_four_writers_and_two_learners_keep_the_ratio_over_kills(run_name, tmp_path):
    limiter = mr.RateLimiter(**BOUND)
    writers = [
        on(Steady, label, run_name, str(tmp_path / label), 2 * n + k, limiter)
        for k, label in enumerate(("n0", "n1"))
        for n in range(2)
    ]
    paths = [ask(writer, "facts")[0] for writer in writers]
    assert len(set(paths)) == 4
    # Alone, writers stop where r (inserts - min_size) is the error buffer.
    until(lambda: counts_of(run_name)[0] >= 1_180)
    time.sleep(1)
    assert counts_of(run_name)[0] <= 500 + 3_000 / 4 + 64
    learners = [on(Learner, label, run_name, 64) for label in ("n0", "n1")]
    worst = 0.0
    for number in range(4):
        before = counts_of(run_name)[0]
        # A busy machine takes its time; what it draws is bounded all the same.
        until(lambda inserts=before + 800: counts_of(run_name)[0] >= inserts)
        inserts, samples, size = counts_of(run_name)
        assert size == inserts
        worst = max(worst, abs(4 * (inserts - 500) - samples))
        if number == 1:
            kill(shard(run_name, "n0").call("info")["pid"])
        if number == 2:
            end_registry(run_name)
    # Rows under way at the kills, and batches that were drawn ahead.
    assert worst <= 3_000 + 4 * 64 * 4 + 2 * 3 * 64
    inserts, samples, _ = counts_of(run_name)
    assert samples / (inserts - 500) == pytest.approx(4.0, abs=(worst + 512) / (inserts - 500))
    for each in (*writers, *learners):
        assert ask(each, "facts")[1] is None
        ask(each, "stop")
    for path in paths:
        assert limiter_of(Path(path)).settings == limiter.settings


def test_thin_writers_keep_the_ratio_over_kills(run_name, tmp_path):
    limiter = mr.RateLimiter(**BOUND)
    where = {"num_cpus": 0, "label_selector": {"mmreplay": "n0"}}
    make = ray.remote(make_thin_ring).options(**where)
    ray.get(make.remote(run_name, str(tmp_path / "n0"), limiter), timeout=WAIT_S)
    plain = on(Steady, "n1", run_name, str(tmp_path / "n1"), 9, limiter)
    assert ask(plain, "facts")[1] is None
    thin = [on(SteadyThin, "n1", run_name, number, "n0") for number in range(2)]
    # Without a learner all of them stop at the bound together.
    until(lambda: counts_of(run_name)[0] >= 1_050)
    time.sleep(1)
    assert counts_of(run_name)[0] <= 500 + 3_000 / 4 + 64
    learner = on(Learner, "n0", run_name, 64)
    worst = 0.0
    for number in range(4):
        before = counts_of(run_name)[0]
        until(lambda inserts=before + 500: counts_of(run_name)[0] >= inserts)
        inserts, samples, _ = counts_of(run_name)
        worst = max(worst, abs(4 * (inserts - 500) - samples))
        if number == 0:
            kill(shard(run_name, "n0").call("info")["pid"])
        elif number == 1:
            end_registry(run_name)
        elif number == 2:
            kill(ask(thin[0], "pid"))
            thin[0] = on(SteadyThin, "n1", run_name, 2, "n0")
    # Rows under way at the kills, and batches that were drawn ahead.
    assert worst <= 3_000 + 4 * 64 * 3 + 3 * 64
    for each in (plain, *thin):
        assert ask(each, "facts")[1] is None
    for each in (*thin, plain, learner):
        ask(each, "stop")
    mr.ray.stop(run_name)
    with mr.ReplayBuffer.open(tmp_path / "n0" / run_name / "thin") as ring:
        check(ring.gather_all())
        assert limiter_of(ring.path).settings == limiter.settings
        assert int(ring.heads.sum()) > 200


@pytest.mark.parametrize("per_call", [1, 4])
def test_one_program_writes_and_draws_by_turns(run_name, tmp_path, per_call):
    # 64 rows and 256 items at a time: full speed of one writer and one client.
    limiter = mr.RateLimiter(4.0, 128, 512.0)
    rounds, errors = [], []

    def turns(writer):
        try:
            writer.extend(block(0, 0, 128))
            with mr.ray.ReplayClient(
                run_name, mr.UniformSampler(seed=0), batch_size=256, per_call=per_call
            ) as client:
                for number, batch in enumerate(client):
                    check(batch)
                    for row in range(64):
                        one = block(0, 128 + 64 * number + row, 1)
                        writer.add({path: each[0] for path, each in one.items()})
                    rounds.append(number)
                    if number == 30:
                        return
        except Exception as error:
            errors.append(error)

    with mr.ray.writer(run_name, SCHEMA, 10_000, root=tmp_path, limiter=limiter) as writer:
        thread = threading.Thread(target=turns, args=(writer,), daemon=True)
        thread.start()
        until(lambda: not thread.is_alive())
    assert errors == []
    assert len(rounds) == 31


@pytest.mark.parametrize("sampler", ["UniformSampler", "DistinctSampler"])
def test_a_client_follows_a_limiter_that_comes_after_it(run_name, tmp_path, sampler):
    limiter = mr.RateLimiter(1.0, 100, 2_000.0, patience=WAIT_S)
    options = {"root": tmp_path, "name": "ring"}
    with mr.ray.writer(run_name, SCHEMA, 1_000, **options) as writer:
        writer.extend(block(0, 0, 500))
    client = mr.ray.ReplayClient(run_name, getattr(mr, sampler)(seed=0), batch_size=64)
    for _ in range(20):
        check(next(client))
    error = []

    def draw():
        try:
            for batch in client:
                check(batch)
        except Exception as caught:
            error.append(caught)

    # What was drawn before the limiter does not count.
    with mr.ray.writer(run_name, SCHEMA, 1_000, limiter=limiter, **options) as held:
        thread = threading.Thread(target=draw)
        thread.start()
        drawn = [-1]

        def stays():
            time.sleep(1.0)
            drawn.append(held.buffer.limit.counts().samples)
            return drawn[-1] == drawn[-2] > 0

        until(stays)
        # By one grant at most, and by what was asked for before.
        assert drawn[-1] <= 500 + 2_000 + 64 * 8
        held.extend(block(0, 500, 500))
        until(lambda: held.buffer.limit.counts().samples > drawn[-1])
        client.close()
        thread.join(60)
    assert not thread.is_alive()
    assert all(isinstance(each, mr.FailedError) for each in error), error


def test_what_does_not_fit_the_limiter_of_a_run_is_refused(run_name, tmp_path):
    limiter = mr.RateLimiter(4.0, 100, 200.0)
    with pytest.raises(SchemaError, match="limiter of a run must be a RateLimiter"):
        mr.ray.writer(run_name, SCHEMA, 1_000, root=tmp_path, limiter=mr.RateCounter())
    with mr.ray.writer(run_name, SCHEMA, 1_000, root=tmp_path, limiter=limiter) as writer:
        other = mr.RateLimiter(5.0, 100, 400.0)
        with pytest.raises(SchemaError, match="everywhere in the run, got"):
            mr.ray.writer(run_name, SCHEMA, 1_000, root=tmp_path, limiter=other)
        # The refused writer left no ring, and no bound in a ring without one.
        assert {each.name for each in (tmp_path / run_name).glob("ring-*")} == {"ring-000"}
        mr.ray.writer(run_name, SCHEMA, 1_000, root=tmp_path).close()
        with pytest.raises(SchemaError, match="everywhere in the run, got"):
            mr.ray.writer(run_name, SCHEMA, 1_000, root=tmp_path, limiter=other)
        mr.ray.writer(run_name, SCHEMA, 1_000, root=tmp_path, limiter=limiter).close()
        with pytest.raises(SchemaError, match="at least 256 where 64 rows and 256"):
            mr.ray.ReplayClient(run_name, mr.UniformSampler(), batch_size=256)
        writer.extend(block(0, 0, 100))
        with mr.ray.ReplayClient(run_name, mr.UniformSampler(seed=0), batch_size=16) as client:
            check(next(iter(client)))


def test_a_first_writer_whose_limiter_is_refused_leaves_nothing(run_name, tmp_path, monkeypatch):
    def write(run, limiter, **more):
        return mr.ray.writer(run, SCHEMA, 1_000, root=tmp_path, limiter=limiter, **more)

    small = mr.RateLimiter(4.0, 100, 64.0)
    for asks_first in (True, False):
        with monkeypatch.context() as patch:
            if not asks_first:
                # As where another writer came between the question and the ring.
                patch.setattr(ring_writer, "refuse_unfit_limiter", lambda *_: None)
            for name in (None, "own"):
                with pytest.raises(SchemaError, match=r"least 128 where .* Pass 256"):
                    write(run_name, small, name=name)
    assert not any((tmp_path / run_name).iterdir())
    # As it says. The ring of a run without rows is opened again, and stays.
    for _ in range(2):
        write(run_name, limiter := mr.RateLimiter(4.0, 100, 256.0)).close()
    with monkeypatch.context() as patch:
        patch.setattr(ring_writer, "refuse_unfit_limiter", lambda *_: None)
        with pytest.raises(SchemaError, match=r"as in .*law\.json, got"):
            write(run_name, small)
        with pytest.raises(SchemaError, match="everywhere in the run, got"):
            write(run_name, small, name="other")
    assert [each.name for each in (tmp_path / run_name).glob("*-*")] == ["ring-000"]
    mr.ray.stop(run_name)
    # A copy under another name has its limiter, and a wrong one is not the run's.
    copy = f"{run_name}-copy"
    (tmp_path / run_name).rename(tmp_path / copy)
    other = mr.RateLimiter(4.0, 100, 300.0)
    with pytest.raises(SchemaError, match=r"as in .*law\.json, got"):
        write(copy, other)
    write(copy, limiter).close()
    mr.ray.stop(copy)


def test_a_writer_alone_gets_an_error_and_goes_on_with_a_client(run_name, tmp_path):
    limiter = mr.RateLimiter(1.0, 50, 100.0, patience=5.0)
    with mr.ray.writer(run_name, SCHEMA, 1_000, root=tmp_path, limiter=limiter) as writer:
        # Each call goes on while one more row is granted.

        def write():
            for first in range(0, 10_000, 10):
                writer.extend(block(0, first, 10))

        with pytest.raises(StarvedError, match="waited for a client to draw, but none"):
            write()
        written = len(writer.buffer)
        assert 150 - 64 <= written <= 150 + 10
        assert writer.buffer.limit.counts().inserts == written
        with mr.ray.ReplayClient(run_name, mr.UniformSampler(seed=0), batch_size=16) as client:
            batches = iter(client)
            for _ in range(4):
                check(next(batches))
            writer.extend(block(0, written, 10))


def test_rings_count_and_remember_the_bound_of_their_run(tmp_path):
    """Without a cluster: a shard is a plain class."""
    folder = tmp_path / "run" / "ring"
    limiter = mr.RateLimiter(4.0, 5_000, math.inf)
    assert counter_of(folder) is None
    with mr.ReplayBuffer.create(
        folder, SCHEMA, 100, limiter=RingCounter(limiter), commit_every=None
    ) as buffer:
        buffer.extend(block(0, 0, 60))
    assert limiter_of(folder) == limiter
    own = Shard("run", str(tmp_path), "key")
    assert own.counts() == {"counts": [60, 0, 60], "bound": [4.0, 5_000, math.inf]}
    draws = RingDraws(client_of(mr.UniformSampler()))
    draws.serve({"ring": folder})
    for rows in (False, True):
        draws.exchange({}, wanted_of({"ring": np.full(16, 0.5)}, rows=rows), 0.0)
    assert own.counts()["counts"] == [60, 32, 60]
    draws.close()
    own.stop()
    (folder / "limiter" / "law.json").write_text('{"law": [4.0, 1], "base": 0}')
    with pytest.raises(FormatError, match="the law must be a ratio, a size and"):
        limiter_of(folder)


def test_draws_of_a_ring_count_once_its_writer_brings_a_limiter(tmp_path):
    folder = tmp_path / "run" / "ring"
    with mr.ReplayBuffer.create(folder, SCHEMA, 100, commit_every=None) as buffer:
        buffer.extend(block(0, 0, 60))
    own, client = Shard("run", str(tmp_path), "key"), client_of(mr.UniformSampler())
    request = request_to_bytes({}, wanted_of({"ring": np.full(16, 0.5)}), 0.0)
    own.exchange(client_to_bytes(client), *request)
    with mr.ReplayBuffer.open(folder, "r+", limiter=RingCounter(mr.RateLimiter(4.0, 1, math.inf))):
        own.masses(client, 0, 0.0)
        own.exchange(client_to_bytes(client), *request)
    assert own.counts()["counts"] == [60, 16, 60]
    own.stop()
