"""The faulty disk fails where it is told to, and nowhere else."""

import errno
import os
import signal
from contextlib import suppress

import pytest

from mmreplay.disk import files
from mmreplay.errors import FailedError
from mmreplay.testing.disks import PRIMITIVES, FaultyDisk, WatchedDisk, using


def everything(folder):
    """Make each primitive call at least once, and leave the folder empty."""
    files.make_folder(folder / "inner")
    file = files.File.create(folder / "inner" / "a", 4096)
    file.map_writable()
    file.store(b"live", 0)
    file.pwrite(b"data", 8)
    file.sync()
    files.disk.lock(file.fd)
    with suppress(OSError):
        files.disk.clone(file.fd, file.fd)
    file.close()
    files.disk.link(folder / "inner" / "a", folder / "inner" / "c")
    files.exchange(folder / "inner" / "a", folder / "inner" / "c")
    files.rename(folder / "inner" / "a", folder / "inner" / "b")
    files.remove_tree(folder / "inner")


def test_every_primitive_is_watched(tmp_path):
    with using(WatchedDisk()) as disk:
        everything(tmp_path)
    assert set(disk.calls) == set(PRIMITIVES)
    assert disk.calls["pwrite"] == 1


def test_the_real_disk_comes_back(tmp_path):
    real = files.disk
    with pytest.raises(OSError, match="broken"), using(FaultyDisk(OSError("broken"))):
        files.disk.mkdir(tmp_path / "a")
    assert files.disk is real


@pytest.mark.parametrize("at", range(30))
def test_exactly_the_chosen_call_fails(tmp_path, at):
    with using(WatchedDisk()) as watched:
        everything(tmp_path)
    total = watched.calls.total()
    with using(FaultyDisk(KeyboardInterrupt(), at)) as disk:
        if at >= total:
            everything(tmp_path)
        else:
            with pytest.raises(KeyboardInterrupt):
                everything(tmp_path)
    assert disk.calls.total() == min(total, at + 1)
    assert disk.struck == (at < total)


def test_an_error_at_a_write_comes_after_half_of_it(tmp_path):
    file = files.File.create(tmp_path / "a", 4)
    faulty = FaultyDisk(OSError(errno.EIO, "broken"), names=("pwrite",))
    with using(faulty), pytest.raises(FailedError):
        file.pwrite(b"abcd", 0)
    assert (tmp_path / "a").read_bytes() == b"ab\0\0"


@pytest.mark.crash
def test_a_kill_leaves_the_call_unmade(tmp_path):
    pid = os.fork()
    if pid == 0:
        with using(FaultyDisk("kill", names=("mkdir",))):
            files.disk.mkdir(tmp_path / "a")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "a").exists()
