"""One writer: in this process, in another, in a forked child, over a network."""

import contextlib
import json
import os
import signal

import pytest

import mmreplay as mr
from mmreplay.disk import lock
from mmreplay.errors import FailedError, ForkedError, LockedError
from mmreplay.nesting import unflatten
from mmreplay.testing.disks import Disk, using
from tests.format.support import fill, schema_of, step_of


@pytest.fixture
def folder(tmp_path):
    mr.ReplayBuffer.create(tmp_path / "b", schema_of(), 12, 2, autoreset="disabled").close()
    return tmp_path / "b"


def in_child(work):
    """Run work in a forked child and return its exit status, 0 where it was true."""
    child = os.fork()
    if child == 0:
        status = 9
        with contextlib.suppress(BaseException):
            status = 0 if work() else 1
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refused(error, words, call):
    try:
        call()
    except error as raised:
        return all(word in str(raised) for word in words)
    return False


def test_a_second_writer_of_the_same_process_is_refused(folder):
    with mr.ReplayBuffer.open(folder, "r+"):
        with pytest.raises(LockedError, match=r"already open for writing in this proc"):
            mr.ReplayBuffer.open(folder, "r+")
        assert lock.Owner(folder).alive
    assert not lock.Owner(folder).alive
    mr.ReplayBuffer.open(folder, "r+").close()


@pytest.mark.parametrize("make_again", [False, True])
def test_a_lock_is_refused_whose_file_another_process_removes(folder, monkeypatch, make_again):
    """Otherwise another process would make a new file, and lock that one as well."""
    path, aside = folder / lock.FILE_NAME, folder / "elsewhere"
    take = Disk.lock

    def removed_first(disk, fd):
        path.rename(aside)
        if make_again:
            path.touch()
        return take(disk, fd)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "lock", removed_first)
        with pytest.raises(LockedError, match="removed by another process just now"):
            mr.ReplayBuffer.open(folder, "r+")
    mr.ReplayBuffer.open(folder, "r+").close()
    # The refused one let go of it.
    aside.replace(path)
    mr.ReplayBuffer.open(folder, "r+").close()


def test_the_error_of_a_second_process_names_the_lock_holder(folder):
    words = ["is being written by", f"pid {os.getpid()} on", "mode='r'"]
    with mr.ReplayBuffer.open(folder, "r+"):
        open_it = lambda: mr.ReplayBuffer.open(folder, "r+")  # noqa: E731
        assert in_child(lambda: refused(LockedError, words, open_it)) == 0


def test_a_forked_child_writes_nothing_and_harms_nothing(folder):
    with mr.ReplayBuffer.open(folder, "r+", commit_every=None) as buffer:
        fill(buffer, 0, 3)
        words = [f"opened for writing by pid {os.getpid()}", "is a forked child of it"]
        block = {path: column[None] for path, column in step_of(3).items()}
        for call in (
            lambda: fill(buffer, 3, 4),
            lambda: buffer.extend(unflatten(block)),
            buffer.commit,
            buffer.close,
            buffer.clear,
            lambda: buffer.resize(5),
        ):
            assert in_child(lambda call=call: refused(ForkedError, words, call)) == 0
        assert in_child(lambda: len(buffer) == 6) == 0
        assert lock.Owner(folder).alive
        fill(buffer, 3, 5)
    with mr.ReplayBuffer.open(folder) as reader:
        assert reader.heads.tolist() == [5, 5]
        assert reader.recovery.how == "clean"


def test_a_lock_dies_with_its_owner_though_a_forked_worker_lives_on(folder):
    read, write = os.pipe()
    owner = os.fork()
    if owner == 0:
        held = mr.ReplayBuffer.open(folder, "r+")
        worker = os.fork()
        if worker == 0:
            # Told by the worker itself, which gave its copy of the lock back first.
            os.write(write, os.getpid().to_bytes(4, "little"))
            signal.pause()
            os._exit(0)
        signal.pause()
        held.close()
        os._exit(0)
    worker = int.from_bytes(os.read(read, 4), "little")
    try:
        with pytest.raises(LockedError, match=rf"pid {owner} on"):
            mr.ReplayBuffer.open(folder, "r+")
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        os.kill(worker, 0)
        mr.ReplayBuffer.open(folder, "r+").close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_a_lock_on_another_disk_with_the_same_inode_is_another(folder, monkeypatch):
    status = (folder / "LOCK").stat()
    number = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev) ^ 1:02x}"
    line = f"1: FLOCK  ADVISORY  WRITE 7 {number}:{status.st_ino} 0 EOF\n"
    monkeypatch.setattr(lock, "file_system", lambda path: "ext4")
    monkeypatch.setattr(lock.Path, "read_text", lambda *_: line)
    assert not lock.Owner(folder).alive
    # Where the numbers of files are not those of their disks, only inodes tell.
    monkeypatch.setattr(lock, "file_system", lambda path: "?")
    assert lock.Owner(folder).alive


def test_a_network_file_system_is_written_only_where_allowed(folder, monkeypatch):
    monkeypatch.setattr(lock, "file_system", lambda path: "nfs4")
    with pytest.raises(FailedError, match=r"network file system \(nfs4\).*allow_network"):
        mr.ReplayBuffer.open(folder, "r+")
    mr.ReplayBuffer.open(folder).close()
    mr.ReplayBuffer.open(folder, "r+", allow_network=True).close()


def test_the_locks_text_only_informs(folder):
    (folder / "LOCK").unlink()
    assert not lock.Owner(folder).text
    assert not lock.Owner(folder).alive
    with mr.ReplayBuffer.open(folder, "r+"):
        text = lock.Owner(folder).text
        assert text["pid"] == os.getpid()
        assert set(text) == {"pid", "host", "start"}


WELL = {"pid": 12, "host": "actor-3.lan", "start": 1.5}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (WELL, "pid 12 on actor-3.lan"),
        (WELL | {"pid": "12"}, "another process"),
        (WELL | {"pid": "\x1b]0;pwned\x07"}, "another process"),
        (WELL | {"pid": True}, "another process"),
        (WELL | {"pid": -1}, "another process"),
        (WELL | {"pid": 1 << 31}, "another process"),
        (WELL | {"host": "\x1b[2Jhere"}, "another process"),
        (WELL | {"host": "a\nb"}, "another process"),
        (WELL | {"host": "h" * 254}, "another process"),
        (WELL | {"host": ""}, "another process"),
        (WELL | {"host": ["a"]}, "another process"),
        ({"host": "a"}, "another process"),
        (WELL | {"start": "\x1b[2J"}, "pid 12 on actor-3.lan"),
        (WELL | {"more": "\x1b[2J"}, "pid 12 on actor-3.lan"),
    ],
)
def test_a_text_that_names_no_process_and_host_says_nothing(folder, text, shown):
    (folder / "LOCK").write_text(json.dumps(text))
    owner = lock.Owner(folder)
    assert str(owner) == shown
    found = owner.text
    assert (not found) == (shown == "another process")
    assert set(found) <= set(WELL)
    assert "\x1b" not in str(found)


class RacingDisk(Disk):
    """A disk on which somebody else makes the lock's file a moment before we do."""

    def open(self, path, flags):
        if path.name == "LOCK" and flags & os.O_CREAT:
            path.write_bytes(b"")
        return super().open(path, flags)


def test_two_first_writers_at_once_are_one_writer_and_one_refused(folder):
    (folder / "LOCK").unlink()
    with using(RacingDisk()):
        buffer = mr.ReplayBuffer.open(folder, "r+")
    with pytest.raises(LockedError, match="already open"):
        mr.ReplayBuffer.open(folder, "r+")
    buffer.close()
