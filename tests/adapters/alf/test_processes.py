"""Calls from other processes, and calls that wait."""

import errno
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from multiprocessing.connection import Client
from pathlib import Path

import pytest
import torch

from mmreplay.adapters.alf import BatchInfo, ReplayBuffer, RingBuffer, sharing
from mmreplay.adapters.alf.sharing import Remote, Server
from mmreplay.errors import FailedError, ForkedError
from tests.adapters.alf.support import MID, SPEC, counted, equal, rows

ROOT = Path(__file__).parents[3]
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


def adds_one(pipe, buffer):
    pipe.send(buffer.enqueue(rows([MID] * 2, [1.0] * 2, [0.0] * 2)))


def test_a_child_is_served_whatever_timeout_sockets_have_by_default():
    buffer = RingBuffer(SPEC, 2, 8, allow_multiprocess=True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(WAIT_S)
    try:
        assert in_child("fork", adds_one, buffer)
    finally:
        socket.setdefaulttimeout(before)
    assert int(buffer.total_size) == 2
    buffer.close()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_calls_as_if_the_buffer_were_its_own(start):
    buffer = ReplayBuffer(SPEC, 2, 8, prioritized_sampling=True, allow_multiprocess=True)
    counted(buffer, 3, 2)
    found, told, refusal, size = in_child(start, adds_and_draws, buffer)
    assert found == [0, 1, 2, 3, 4, 5]
    assert told == repr(buffer)
    assert "must have a row for each" in refusal
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
        context.Process(target=fills, args=(there, buffer, env_id, steps)) for env_id in range(2)
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
    with pytest.raises(AssertionError, match=r"process without allow_multiprocess=True\. Pass"):
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


def test_a_full_ring_accepts_the_next_row_after_one_is_removed():
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
    buffer = ReplayBuffer(SPEC, 1, 2, prioritized_sampling=True, allow_multiprocess=True)
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


def test_children_get_an_error_when_their_owner_died(tmp_path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    owner = context.Process(target=dies, args=(there, tmp_path / "b"))
    owner.start()
    for _ in range(2):
        assert here.poll(WAIT_S), "a call hangs"
        assert "does not answer" in here.recv()
    owner.join(WAIT_S)


def threads(name):
    return {each for each in threading.enumerate() if each.name == name}


class Target:
    def twice(self, number):
        return 2 * number


def test_a_client_without_the_key_is_not_served():
    server = Server(Target())
    remote = Remote(server.address)
    assert remote.twice(4) == 8
    process = multiprocessing.current_process()
    key = process.authkey
    try:
        process.authkey = b"another"
        with pytest.raises(FailedError, match="twice: the process that owns the buffer does"):
            Remote(server.address).twice(4)
    finally:
        process.authkey = key
    # Others are served as before.
    assert Remote(server.address).twice(5) == 10
    server.close()


def test_a_dead_owner_is_reported():
    server = Server(Target())
    server.close()
    with pytest.raises(FailedError, match="Keep it alive while other processes use the"):
        Remote(server.address).twice(4)


class Slow(Target):
    """Interrupts whoever calls, in the main thread, and answers after all."""

    def __init__(self):
        self.go_on = threading.Event()

    def slow(self):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        self.go_on.wait(WAIT_S)
        return "slow"


def test_the_answer_to_an_interrupted_call_is_not_that_to_the_next():
    def interrupt(*_):
        raise KeyboardInterrupt

    target = Slow()
    server = Server(target)
    remote = Remote(server.address)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            remote.slow()
    finally:
        signal.signal(signal.SIGUSR1, before)
    target.go_on.set()
    assert [remote.twice(4), remote.twice(5)] == [8, 10]
    server.close()


def test_who_hung_up_while_it_waited_takes_no_row():
    buffer = RingBuffer(SPEC, 1, 4, allow_multiprocess=True)
    others = threads("alf serves")
    key = multiprocessing.current_process().authkey
    with Client(buffer._remote.address, authkey=key) as connection:
        connection.send(("where", ()))
        connection.recv()
        (thread,) = threads("alf serves") - others
        connection.send(("dequeue", (None, 1, True)))
    counted(buffer, 1, 1)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert int(buffer.total_size) == 1
    buffer.close()


def test_who_says_nothing_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(sharing, "KEY_S", 1)
    server = Server(Target())
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(server.address)
        stranger.settimeout(WAIT_S)
        thread, found = in_thread(lambda: Remote(server.address).twice(4))
        thread.join(10)
        assert found == [8]
        while stranger.recv(4096):  # the challenge; and then the end
            pass
    server.close()


def test_who_is_of_another_user_is_not_served(monkeypatch):
    server = Server(Target())
    monkeypatch.setattr(sharing.os, "geteuid", lambda: -1)
    with pytest.raises(FailedError, match="twice: the process that owns the buffer does"):
        Remote(server.address).twice(4)
    monkeypatch.undo()
    server.close()


def test_closing_takes_the_socket_along():
    others = threads("alf accepts")
    buffer = RingBuffer(SPEC, 1, 4, allow_multiprocess=True)
    (thread,) = threads("alf accepts") - others
    buffer.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with pytest.raises(FailedError, match="process that owns the buffer does not answer"):
        buffer._remote.where()


def closes(pipe, buffer):
    buffer.close()
    try:
        pipe.send(int(buffer.total_size))
    finally:
        buffer.close()


@pytest.mark.parametrize(
    ("start", "shared"),
    [
        ("fork", True),
        # It is not sent to a child that is spawned.
        ("fork", False),
        pytest.param("spawn", True, marks=pytest.mark.slow),
    ],
)
def test_a_child_closes_nothing_but_its_connection(start, shared):
    buffer = RingBuffer(SPEC, 1, 4, allow_multiprocess=shared)
    counted(buffer, 2, 1)
    folder = Path(repr(buffer).split(": ")[-1].rstrip(">"))
    assert in_child(start, closes, buffer) == 2
    assert folder.exists()
    counted(buffer, 1, 1)
    assert int(buffer.total_size) == 3
    buffer.close()


LEFT_OPEN = """
import atexit, threading
import torch
from mmreplay.adapters.alf import ReplayBuffer, RingBuffer

def left_open():
    kept = [RingBuffer(torch.zeros(2), 1, 4, allow_multiprocess=True, name="ring")]
    kept.append(ReplayBuffer(torch.zeros(2), 1, 4, allow_multiprocess=True))
    for buffer in kept:
        assert buffer.enqueue(torch.ones(1, 2))
    return kept

def end():
    # As every Python from 3.12 on does at exit.
    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = start

kept = left_open()
"""


@pytest.mark.parametrize(
    "end",
    [
        "atexit.register(end)",
        # A child calls while the program ends.
        "import socket\n"
        "def late():\n"
        "    end()\n"
        "    ends = [socket.socket(socket.AF_UNIX) for _ in kept]\n"
        "    [e.connect(b._remote.address) for e, b in zip(ends, kept)]\n"
        "    [e.settimeout(60) or e.recv(1) for e in ends]\n"
        "atexit.register(late)",
    ],
    ids=["left", "called"],
)
@pytest.mark.slow
def test_two_shared_buffers_left_open_at_exit_print_nothing(end):
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN + end],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("warned", [True, False])
def test_too_many_open_files_leave_the_processor_alone(monkeypatch, warned):
    tries = threading.Semaphore(0)
    counts = []

    def accept(_):
        counts.append(1)
        tries.release()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(sharing, "PAUSE_S", WAIT_S)
    monkeypatch.setattr(sharing.Listener, "accept", accept)
    others = threads("alf accepts")
    with warnings.catch_warnings(record=warned) as found:
        warnings.simplefilter("always" if warned else "error")
        server = Server(Target())
        (thread,) = threads("alf accepts") - others
        assert tries.acquire(timeout=WAIT_S)
        # Whoever closes is not kept waiting.
        server.close()
        thread.join(WAIT_S / 2)
    assert not thread.is_alive()
    assert len(counts) == 1
    told = r"cannot serve one more \(.*Too many open files\).*ulimit"
    assert not warned or re.search(told, "".join(str(each.message) for each in found))
    assert not warned or len(found) == 1


def test_a_client_without_a_thread_gets_an_error_and_the_next_is_served(monkeypatch):
    start, refusals = threading.Thread.start, [1]

    def scarce(thread):
        if thread.name == "alf serves" and refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        server = Server(Target())
        with pytest.raises(FailedError, match="twice: the process that owns the buffer does"):
            Remote(server.address).twice(4)
        assert Remote(server.address).twice(5) == 10
        server.close()
