"""Calls from other processes, and calls that wait."""

import multiprocessing
import os
import threading

import pytest
import torch

from mmreplay.adapters.alf import BatchInfo, ReplayBuffer, RingBuffer
from mmreplay.adapters.alf.sharing import Remote, Server
from mmreplay.errors import FailedError, ForkedError
from tests.adapters.alf.support import MID, SPEC, counted, equal, rows

WAIT_S = 60.0


def in_child(start, function, *arguments):
    """Run a function in a child and return what it sends back."""
    context = multiprocessing.get_context(start)
    here, there = context.Pipe()
    child = context.Process(target=function, args=(there, *arguments))
    child.start()
    try:
        assert here.poll(WAIT_S), "the child sent nothing"
        return here.recv()
    finally:
        child.join(WAIT_S)


def adds_and_draws(pipe, buffer):
    for step in range(3, 6):
        buffer.add_batch(rows([MID] * 2, [1.0] * 2, [step] * 2))
    data, info = buffer.get_batch(4, 2)
    assert type(data) is type(SPEC)
    assert type(info) is BatchInfo
    assert info.replay_buffer is buffer
    buffer.update_priority(info.env_ids, info.positions, torch.full((4,), 9.0))
    found = buffer.get_field("reward", torch.tensor(1), torch.arange(6)).tolist()
    try:
        buffer.add_batch(rows([MID], [1.0], [0.0]))
    except AssertionError as error:
        pipe.send((found, repr(buffer), str(error), int(buffer.total_size)))


@pytest.mark.parametrize(
    "start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_a_child_calls_as_if_the_buffer_were_its_own(start):
    buffer = ReplayBuffer(
        SPEC, 2, 8, prioritized_sampling=True, allow_multiprocess=True
    )
    counted(buffer, 3, 2)
    found, told, refusal, size = in_child(start, adds_and_draws, buffer)
    assert found == [0, 1, 2, 3, 4, 5]
    assert told == repr(buffer)
    assert "expected a row for each" in refusal
    assert size == int(buffer.total_size) == 12
    assert float(buffer.initial_priority) == 9
    buffer.close()


def fills(pipe, buffer, env_id, steps):
    for step in range(steps):
        buffer.add_batch(rows([MID], [1.0], [step]), torch.tensor([env_id]))
    pipe.send(steps)


def test_children_add_while_their_parent_draws():
    steps, length = 60, 40
    buffer = ReplayBuffer(SPEC, 2, length, allow_multiprocess=True)
    counted(buffer, 2, 2)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    children = [
        context.Process(target=fills, args=(there, buffer, env_id, steps))
        for env_id in range(2)
    ]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):
        data, _ = buffer.get_batch(8, 2)
        # The first two rows and the children's are counted from 0 each.
        following = data.reward[:, 1] - data.reward[:, 0]
        assert set(following.tolist()) <= {1.0, -1.0}
    for child in children:
        child.join(WAIT_S)
    assert [here.recv(), here.recv()] == [steps, steps]
    wanted = list(range(steps - length, steps))
    assert buffer.gather_all()[0].reward.tolist() == [wanted] * 2
    buffer.close()


def adds_alone(pipe, buffer):
    try:
        counted(buffer, 1, 1)
    except ForkedError as error:
        pipe.send(str(error))


def test_a_fork_of_a_buffer_that_is_not_shared_is_refused():
    buffer = RingBuffer(SPEC, 1, 4)
    assert "opened for writing by pid" in in_child("fork", adds_alone, buffer)
    with pytest.raises(AssertionError, match="expected one made with allow_multiproc"):
        buffer.__getstate__()


def waits(pipe, buffer):
    pipe.send(buffer.dequeue(n=2, blocking=True).reward.tolist())


def test_a_child_waits_for_what_its_parent_adds():
    buffer = RingBuffer(SPEC, 1, 4, allow_multiprocess=True)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=waits, args=(there, buffer))
    child.start()
    counted(buffer, 2, 1)
    assert here.poll(WAIT_S)
    assert here.recv() == [[0, 1]]
    child.join(WAIT_S)
    assert int(buffer.total_size) == 0
    buffer.close()


def in_thread(function):
    """Start a call; what it returns is put into the list given back."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    return thread, found


def test_a_full_ring_takes_the_next_row_when_one_is_taken_out():
    buffer = RingBuffer(SPEC, 1, 2, allow_multiprocess=True)
    counted(buffer, 2, 1)
    batch = rows([MID], [1.0], [2.0])
    thread, found = in_thread(lambda: buffer.enqueue(batch, blocking=True))
    assert buffer.dequeue().reward.tolist() == [[0]]
    thread.join(WAIT_S)
    assert found == [True]
    assert buffer.dequeue(n=2).reward.tolist() == [[1, 2]]
    buffer.close()


def test_stopping_lets_those_who_wait_go_with_nothing_done():
    buffer = RingBuffer(SPEC, 1, 2, allow_multiprocess=True)
    thread, found = in_thread(lambda: buffer.dequeue(blocking=True))
    buffer.stop()
    thread.join(WAIT_S)
    assert found == [None]
    counted(buffer, 1, 1)
    batch = rows([MID], [1.0], [1.0])
    assert buffer.enqueue(batch, blocking=True) is False
    assert buffer.current_pos.tolist() == [1]
    buffer.revive()
    assert buffer.enqueue(batch, blocking=True) is True
    assert equal(buffer.dequeue(n=2, blocking=True).reward, torch.tensor([[0.0, 1]]))
    buffer.close()


def test_stopping_adds_no_row_and_no_priority():
    buffer = ReplayBuffer(
        SPEC, 1, 2, prioritized_sampling=True, allow_multiprocess=True
    )
    counted(buffer, 2, 1)
    buffer.stop()
    assert buffer.add_batch(rows([MID], [1.0], [2.0]), blocking=True) is False
    _, info = buffer.get_batch(2, 1)
    assert sorted(info.positions.tolist()) == [0, 1]
    buffer.close()


def dies(pipe, path):
    """Own a buffer and die while a child calls it."""
    buffer = RingBuffer(SPEC, 1, 4, allow_multiprocess=True, path=path)
    ours, theirs = os.pipe()
    called, calls = os.pipe()
    if os.fork():
        os.read(called, 1)
        os._exit(0)
    assert buffer.has_space()
    os.write(calls, b".")
    os.close(theirs)
    os.read(ours, 1)  # returns when nobody holds the other end any more
    for attempt in (buffer, RingBuffer.__new__(RingBuffer)):
        # The second one has to connect anew.
        attempt.__setstate__(buffer.__getstate__())
        try:
            attempt.has_space()
        except FailedError as error:
            pipe.send(str(error))
    os._exit(0)


def test_children_are_told_that_their_owner_died(tmp_path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    owner = context.Process(target=dies, args=(there, tmp_path / "b"))
    owner.start()
    for _ in range(2):
        assert here.poll(WAIT_S), "a call hangs"
        assert "expected it to live" in here.recv()
    owner.join(WAIT_S)


class Target:
    def twice(self, number):
        return 2 * number


def test_who_does_not_know_the_key_is_not_served():
    server = Server(Target())
    remote = Remote(server.address)
    assert remote.twice(4) == 8
    process = multiprocessing.current_process()
    key = process.authkey
    try:
        process.authkey = b"another"
        with pytest.raises(FailedError, match="twice: got no answer from the process"):
            Remote(server.address).twice(4)
    finally:
        process.authkey = key
    # Others are served as before.
    assert Remote(server.address).twice(5) == 10
    server.close()


def test_an_owner_that_is_gone_is_told():
    server = Server(Target())
    server.close()
    with pytest.raises(FailedError, match="keep it alive while others use it"):
        Remote(server.address).twice(4)
