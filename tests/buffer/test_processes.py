"""A writer and its readers in several processes: nothing torn, one writer, no orphan.

What a child does is bounded by rows, not by a clock; the parent waits for messages.
"""

import multiprocessing
import os
import signal
import zlib
from contextlib import suppress

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import ForkedError, LockedError, StaleError, StarvedError
from mmreplay.process import ProcessGuard
from tests.buffer.support import Twin, schema, step

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")
WAIT_S = 60

CHECKED = mr.Schema(
    {
        "observation": {"pixels": mr.Field((64, 64), "uint8"), "state": mr.Field((4,), "int64")},
        "reward": mr.Field((), "int64"),
        "crc": mr.Field((), "uint32"),
        "terminated": mr.Field((), "bool"),
    }
)


def checked_rows(env_ids, positions):
    """Rows that any part of can be told from its place, and a checksum of all."""
    numbers = positions * 7 + env_ids
    pixels = np.broadcast_to(
        (numbers % 251).astype(np.uint8)[..., None, None], (*numbers.shape, 64, 64)
    )
    state = np.stack([numbers, -numbers, numbers * 3, env_ids], axis=-1)
    crcs = [zlib.crc32(row.tobytes()) for row in state.reshape(-1, 4)]
    return {
        "observation": {"pixels": np.ascontiguousarray(pixels), "state": state},
        "reward": numbers,
        "crc": np.array(crcs, np.uint32).reshape(numbers.shape),
        "terminated": numbers % 13 == 0,
    }


def assert_whole(batch):
    """Every row is of its place, and so is what follows it."""
    expected = checked_rows(batch.env_ids, batch.positions)
    for path in ("reward", "crc", "terminated"):
        np.testing.assert_array_equal(batch[path], expected[path])
    own = expected["terminated"] if "next_observation/state" in batch else None
    following = checked_rows(batch.env_ids, batch.positions + 1)
    for leaf, column in expected["observation"].items():
        np.testing.assert_array_equal(batch[f"observation/{leaf}"], column)
        if own is not None:
            shape = (-1,) + (1,) * (column.ndim - 1)
            nexts = np.where(own.reshape(shape), column, following["observation"][leaf])
            np.testing.assert_array_equal(batch[f"next_observation/{leaf}"], nexts)


def write(path, rows, pipe):
    """Overwrite a small ring again and again, in steps and in blocks."""
    with mr.ReplayBuffer.open(path, "r+", on_resume="continue") as buffer:
        envs = np.arange(buffer.num_envs)
        pipe.send("writing")
        for _ in range(rows):
            head = int(buffer.heads[0])
            if head % 5:
                buffer.add(checked_rows(envs, np.full(len(envs), head)))
            else:
                block = head + np.arange(6)[:, None] + np.zeros(len(envs), int)
                buffer.extend(checked_rows(envs + np.zeros_like(block), block))
            if pipe.poll():
                break
        pipe.send(int(buffer.heads[0]))


@pytest.fixture
def children():
    """Processes that do not outlive the test."""
    started = []
    yield started
    for process in started:
        if process.is_alive():
            process.kill()
        process.join(WAIT_S)


def start(children, context, target, *args):
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs))
    process.start()
    children.append(process)
    return process, ours


def receive(pipe):
    assert pipe.poll(WAIT_S), "the other process says nothing"
    return pipe.recv()


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.sliced(1)
@pytest.mark.slow
def test_a_reader_of_a_ring_that_wraps_sees_no_mixed_row(tmp_path, children, layout):
    path = tmp_path / "ring"
    with mr.ReplayBuffer.create(
        path, CHECKED, 48, 2, layout=layout, autoreset="disabled"
    ) as buffer:
        for position in range(60):
            buffer.add(checked_rows(np.arange(2), np.full(2, position)))
    _, pipe = start(children, SPAWN, write, path, 1_000_000)
    assert receive(pipe) == "writing"
    heads = set()
    with mr.ReplayBuffer.open(path) as reader:
        assert reader.recovery.how == "live"
        # Until the ring went round some fifteen times under the reader's eyes.
        while int(reader.heads[0]) < 900:
            look(reader)
            heads.add(int(reader.heads[0]))
        pipe.send("enough")
        last = receive(pipe)
        while int(reader.heads[0]) < last:
            pass
        assert_whole(reader.gather_all())
    # It looked at several moments, in which almost every row was another.
    assert len(heads) > 5


def look(reader):
    """Read by every way there is; rows given up meanwhile are told, not shown."""
    with suppress(StarvedError):
        assert_whole(reader.sample(32))
    with suppress(StaleError):
        assert_whole(reader.gather_all())
    span = reader.span
    positions = np.arange(span.first[0] + 1, span.stop[0] - 2)
    with suppress(StaleError):
        assert_whole(reader.take(0, positions))
    with suppress(StaleError):
        rewards = reader.get_field("reward", 1, positions)
        assert rewards.tolist() == (positions * 7 + 1).tolist()


def hold_lock(path, pipe):
    """Hold the writer's lock until told otherwise."""
    buffer = mr.ReplayBuffer.open(path, "r+", commit_every=None)
    buffer.add(step(77))
    pipe.send(os.getpid())
    pipe.recv()
    buffer.close()
    pipe.send("closed")


@pytest.fixture
def ring(tmp_path):
    twin = Twin(tmp_path / "ring", 6)
    twin.extend([[""], ["t"], [""]])
    twin.buffer.close()
    return twin.path


def test_the_error_of_a_second_writer_names_the_first(ring, children):
    _, pipe = start(children, SPAWN, hold_lock, ring)
    pid = receive(pipe)
    told = rf"is being written by pid {pid} on .*\. Wait .*mode='r'"
    with pytest.raises(LockedError, match=told):
        mr.ReplayBuffer.open(ring, "r+")
    with mr.ReplayBuffer.open(ring) as reader:
        assert len(reader) == 4
        assert reader.recovery.how == "live"
    pipe.send("go")
    assert receive(pipe) == "closed"
    with mr.ReplayBuffer.open(ring, "r+") as buffer:
        assert len(buffer) == 4


def test_a_killed_writer_leaves_the_lock_and_every_row(ring, children):
    process, pipe = start(children, SPAWN, hold_lock, ring)
    receive(pipe)
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)
    with mr.ReplayBuffer.open(ring, "r+") as buffer:
        assert buffer.recovery.how == "killed"
        assert len(buffer) == 4
        assert buffer.get_field("action", 0, 3) == 77


def fork_and_wait(path, pipe):
    """A writer whose forked child outlives it, as a DataLoader's worker may."""
    buffer = mr.ReplayBuffer.open(path, "r+", commit_every=None)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"x")
        signal.pause()
        os._exit(0)
    # Until the child runs, it holds the copy of the lock that it closes first.
    os.read(reading, 1)
    buffer.add(step(5))
    pipe.send(child)
    signal.pause()


def test_the_lock_is_free_when_the_writer_dies_and_its_child_lives(ring, children):
    process, pipe = start(children, SPAWN, fork_and_wait, ring)
    orphan = receive(pipe)
    try:
        os.kill(process.pid, signal.SIGKILL)
        # With a time limit it would wait for the orphan's end of a pipe.
        process.join()
        os.kill(orphan, 0)
        with mr.ReplayBuffer.open(ring, "r+") as buffer:
            assert len(buffer) == 4
    finally:
        os.kill(orphan, signal.SIGKILL)


def use_in_child(buffer, pipe):
    """Try every call that writes, and say what came of it."""
    given = step(1) | {"note": 0}
    calls = {
        "add": lambda: buffer.add(given),
        "extend": lambda: buffer.extend({k: [v] for k, v in given.items()}),
        "set": lambda: buffer.write_field("note", 0, 0, 1.0),
        "dequeue": lambda: buffer.dequeue(1),
        "clear": lambda: buffer.clear(),
        "commit": lambda: buffer.commit(),
        "resize": lambda: buffer.resize(9),
        "add_field": lambda: buffer.add_field("x", mr.Field((), "int8"), 0),
        "statistics": lambda: buffer.set_statistics({"a": 1}),
        "close": lambda: buffer.close(),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ForkedError as error:
            found[name] = str(error)
        except Exception as error:
            found[name] = f"other: {error!r}"
        else:
            found[name] = "done"
    pipe.send(found)


def test_a_forked_child_may_not_write(tmp_path, children):
    note = mr.Field((), "float32", mutable=True)
    path = tmp_path / "ring"
    with mr.ReplayBuffer.create(path, schema(note=note), 6) as buffer:
        for number in range(3):
            buffer.add(step(number) | {"note": 0})
        before = {p: np.array(c) for p, c in buffer.gather_all().fields.items()}
        child, pipe = start(children, FORK, use_in_child, buffer)
        found = receive(pipe)
        child.join(WAIT_S)
        assert child.exitcode == 0
        told = f"opened for writing by pid {os.getpid()}, and pid"
        assert {name: told in text for name, text in found.items()} == dict.fromkeys(found, True), (
            found
        )
        # The child's end neither unlocks, nor commits, nor closes.
        with pytest.raises(LockedError, match="already open for writing"):
            mr.ReplayBuffer.open(path, "r+")
        buffer.add(step(3) | {"note": 0})
        after = buffer.gather_all()
        assert len(after) == 4
        for name, column in before.items():
            np.testing.assert_array_equal(after[name][:3], column)
        assert buffer.statistics == {}


def read_in_child(buffer, pipe):
    with mr.ReplayBuffer.open(buffer.path) as reader:
        pipe.send(len(reader))


def test_a_forked_child_reads_by_opening_the_path(tmp_path, children):
    twin = Twin(tmp_path / "ring", 6)
    twin.extend([[""], [""]])
    _, pipe = start(children, FORK, read_in_child, twin.buffer)
    assert receive(pipe) == 2
    twin.add([""])
    twin.check()
    twin.buffer.close()


def read_on_request(path, pipe):
    """A reader that says what it sees, each time it is asked."""
    with mr.ReplayBuffer.open(path) as reader:
        while pipe.recv() == "look":
            rows = reader.gather_all()
            pipe.send((rows["action"].tolist(), reader.capacity, sorted(rows)))


def test_a_reader_follows_its_writer_through_rebuilds(tmp_path, children):
    twin = Twin(tmp_path / "ring", 6)
    twin.extend([[""]] * 9)
    _, pipe = start(children, SPAWN, read_on_request, twin.path)

    def seen():
        pipe.send("look")
        return receive(pipe)

    assert seen()[:2] == ([4, 5, 6, 7, 8, 9], 6)
    twin.buffer.resize(3)
    assert seen()[:2] == ([7, 8, 9], 3)
    twin.buffer.resize(8)
    twin.buffer.resize(20)
    twin.extend([[""]] * 2)
    assert seen()[:2] == ([7, 8, 9, 10, 11], 20)
    twin.buffer.add_field("more", mr.Field((), "int8"), 4)
    assert "more" in seen()[2]
    twin.buffer.close()
    with mr.ReplayBuffer.open(twin.path, "r+") as buffer:
        buffer.add(step(50) | {"more": 1})
        assert seen()[0] == [7, 8, 9, 10, 11, 50]
    pipe.send("enough")


def test_a_reader_outlives_a_rebuild_that_was_killed_at_the_switch(tmp_path):
    twin = Twin(tmp_path / "ring", 6)
    twin.extend([[""]] * 4)
    with mr.ReplayBuffer.open(twin.path) as reader:
        assert len(reader) == 4
        ledger = twin.buffer._files.commit
        ledger.mark_moved = lambda: os._exit(9)
        child = os.fork()
        if child == 0:
            # The owner's pid is checked; here the child stands for the owner.
            try:
                twin.buffer._files.appender.owner = ProcessGuard("opened", "open it")
                twin.buffer.resize(9)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        parts = twin.buffer._files
        twin.buffer._finalizer.detach()
        parts.committer.stop()
        parts.lock.release()
        with mr.ReplayBuffer.open(twin.path, "r+") as buffer:
            assert buffer.capacity == 9
            buffer.add(step(50))
            assert len(reader) == 5
            assert reader.capacity == 9


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.sliced(1)
def test_forked_children_without_a_seed_would_draw_alike(tmp_path, children, mode):
    with Twin(tmp_path / "b", 50).buffer as buffer:
        for _ in range(20):
            buffer.add(step(0))
    for sampler, name in (
        (mr.UniformSampler(), "UniformSampler"),
        (mr.MixtureSampler([(mr.UniformSampler(), 1)], seed=0), "UniformSampler"),
        (mr.PrioritizedSampler(name=None), "PrioritizedSampler"),
        (mr.RankPrioritizedSampler(name=None), "RankPrioritizedSampler"),
        (mr.SequenceSampler(2, mr.PrioritizedSampler(name=None)), "PrioritizedSampler"),
        (mr.RecentSampler(9, 0.5), "RecentSampler"),
        (mr.ShuffledSampler(), "ShuffledSampler"),
        (mr.StratifiedSampler(), "StratifiedSampler"),
        (mr.DistinctSampler(), "DistinctSampler"),
    ):
        with mr.ReplayBuffer.open(tmp_path / "b", mode, sampler=sampler) as buffer:
            buffer.sample(4)
            _, pipe = start(children, FORK, draw_in_child, buffer)
            assert f"the {name} has no seed, and would draw the same in a forked" in receive(pipe)
            _, pipe = start(children, FORK, draw_in_child, buffer, mr.UniformSampler)
            assert receive(pipe) == ""
            buffer.sampler = mr.UniformSampler(seed=0)
            _, pipe = start(children, FORK, draw_in_child, buffer)
            assert receive(pipe) == ""


def draw_in_child(buffer, *args):
    """Also with a sampler that is made here."""
    *make, pipe = args
    if make:
        buffer.sampler = make[0]()
    try:
        buffer.sample(4)
    except ForkedError as error:
        pipe.send(str(error))
    else:
        pipe.send("")
