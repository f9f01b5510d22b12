"""The thread that commits lives on, or says why it does not, whatever it meets."""

import _thread
import errno
import struct
import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import Disk
from mmreplay.errors import FailedError, FullError
from mmreplay.storage.commit_state import CommitWriter
from mmreplay.storage.memmap import MemmapStore
from mmreplay.testing.disks import using
from tests.buffer.support import Twin, step
from tools.torture.powerloss import abandon

WAIT_S = 60
EVERY_S = 0.01
ERRORS = {
    "memory": (MemoryError("too little"), MemoryError, "too little"),
    "full": (FullError("no room", errno_=errno.ENOSPC), FullError, "no room"),
    "unknown": (
        struct.error("argument out of range"),
        FailedError,
        r"cannot commit \(error: argument out of range\).* Call again, or",
    ),
}


class Met:
    """Puts an error in the place of a method, and counts who meets it."""

    def __init__(self, monkeypatch, owner, name, error):
        self._patch, self._owner, self._name = monkeypatch, owner, name
        self._genuine = getattr(owner, name)
        self.turns = threading.Semaphore(0)

        def fail(*_):
            self.turns.release()
            raise error

        monkeypatch.setattr(owner, name, fail)

    def end(self):
        """Let the method be itself again; `turns` counts its calls that worked."""
        self.turns, genuine = threading.Semaphore(0), self._genuine

        def work(*args):
            found = genuine(*args)
            self.turns.release()
            return found

        self._patch.setattr(self._owner, self._name, work)

    def await_turns(self, count):
        for _ in range(count):
            assert self.turns.acquire(timeout=WAIT_S)


def twin(tmp_path, **options):
    made = Twin(tmp_path / "b", 300, commit_every=EVERY_S, **options)
    made.extend([["t" if i % 7 == 6 else ""] for i in range(260)])
    return made


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(("owner", "name"), [(MemmapStore, "checksum"), (CommitWriter, "commit")])
def test_a_turn_that_failed_is_made_up_by_the_next_one(tmp_path, monkeypatch, owner, name, kind):
    met = Met(monkeypatch, owner, name, ERRORS[kind][0])
    made = twin(tmp_path)
    met.await_turns(2)
    met.end()
    met.await_turns(1)
    assert made.buffer._files.committer._worker.running
    made.buffer.close()
    assert mr.verify_buffer(made.path).ok
    with mr.ReplayBuffer.open(made.path) as buffer:
        assert buffer.committed.tolist() == buffer.heads.tolist() == [260]


@pytest.mark.parametrize("kind", ERRORS)
def test_while_no_commit_can_be_made_the_users_calls_raise_and_change_nothing(
    tmp_path, monkeypatch, kind
):
    error, raised, told = ERRORS[kind]
    with monkeypatch.context() as patch:
        met = Met(patch, CommitWriter, "commit", error)
        made = twin(tmp_path)
        # By the second turn the first one has been noted.
        met.await_turns(2)
        made.buffer._files.committer.stop()
        data = {name: np.stack([value]) for name, value in step(9).items()}
        for call in (
            lambda: made.buffer.add(step(9)),
            lambda: made.buffer.extend(data),
            made.buffer.clear,
            lambda: made.buffer.dequeue(1),
        ):
            with pytest.raises(raised, match=told):
                call()
            made.check()
        assert made.buffer.committed[0] == 0
    made.add([""])
    made.check()
    assert made.buffer.committed.tolist() == [260]
    made.buffer.close()


def test_a_sync_that_ended_in_another_error_is_not_tried_again(tmp_path):
    class Short(Disk):
        def datasync(self, fd):
            raise MemoryError

    made = Twin(tmp_path / "b", 300)
    made.add([""])
    made.buffer.commit()
    made.add([""])
    with using(Short()), pytest.raises(FailedError, match=r"cannot sync .*MemoryErr"):
        made.buffer.commit()
    with pytest.raises(FailedError, match="an earlier sync failed"):
        made.buffer.commit()
    abandon(made.buffer)
    with mr.ReplayBuffer.open(made.path, "r+") as again:
        assert again.heads.tolist() == [1]


@pytest.mark.parametrize("starter", ["_thread", "threading"])
def test_an_opening_that_gets_no_thread_says_so_and_opens_nothing(tmp_path, monkeypatch, starter):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    schema = mr.Schema({"n": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 8) as buffer:
        buffer.add(n=1)
    with monkeypatch.context() as scarce:
        if starter == "_thread":
            scarce.setattr(_thread, "start_new_thread", refuse)
        else:
            scarce.setattr(threading.Thread, "start", refuse)
        told = "cannot start a thread that commits: can't start .*, or pass commit_every"
        with pytest.raises(FailedError, match=told) as caught:
            mr.ReplayBuffer.open(tmp_path / "b", "r+")
        assert caught.value.errno == errno.EAGAIN
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as buffer:
        assert buffer.gather_all()["n"].tolist() == [1]
