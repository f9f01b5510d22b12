"""Where a buffer is made: folders that tell nothing, links to nothing, no folder."""

import ctypes
import os
import re
import subprocess
import sys

import pytest

import mmreplay as mr
from mmreplay.errors import FormatError
from mmreplay.testing.disks import WatchedDisk, using
from tests.buffer.support import schema

CREATE = """
import sys
import mmreplay as mr
from tests.buffer.support import schema, step
with mr.ReplayBuffer.create(sys.argv[1], schema(), 5) as buffer:
    buffer.add(step(1))
"""
PR_CAPBSET_DROP = 24
READS_ALL = (1, 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which root may read any folder."""


def be_like_others():
    libc = ctypes.CDLL(None)
    for capability in READS_ALL:
        libc.prctl(PR_CAPBSET_DROP, capability)


def created(path, code):
    return subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=be_like_others,
    )


@pytest.fixture
def hidden(tmp_path):
    """A folder that may be passed through and written in, and not listed."""
    folder = tmp_path / "hidden"
    (folder / "mine").mkdir(parents=True)
    folder.chmod(0o311)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize("name", ["mine", "mine/sub", "new", "new/sub"])
@pytest.mark.sliced(1)
def test_a_buffer_is_made_below_a_folder_that_may_not_be_listed(hidden, name):
    done = created(hidden / name, CREATE)
    assert (done.returncode, done.stderr) == (0, "")
    with mr.ReplayBuffer.open(hidden / name) as buffer:
        assert len(buffer) == 1


@pytest.mark.parametrize("exists", [False, True])
def test_the_entry_is_synced_wherever_the_parent_can_be_read(tmp_path, exists):
    class Watching(WatchedDisk):
        synced = ()

        def sync_folder(self, fd):
            self.synced += (os.readlink(f"/proc/self/fd/{fd}"),)

    if exists:
        (tmp_path / "b").mkdir()
    with using(Watching()) as disk:
        mr.ReplayBuffer.create(tmp_path / "b", schema(), 5).close()
    assert str(tmp_path) in disk.synced


CALLS = {
    "create": lambda path: mr.ReplayBuffer.create(path, schema(), 5),
    "read": mr.ReplayBuffer.open,
    "write": lambda path: mr.ReplayBuffer.open(path, "r+"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_path_from_a_working_folder_that_was_removed(tmp_path, monkeypatch, name):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    told = "^x starts from the working folder, which was removed. Change to another"
    with pytest.raises(FormatError, match=told):
        CALLS[name]("x")


@pytest.mark.parametrize("inner", ["", "a/b"])
def test_no_buffer_is_created_at_a_dangling_link(tmp_path, inner):
    link = tmp_path / "link"
    link.symlink_to("moved-away")
    told = r".* is a link to 'moved-away', which does not exist"
    with pytest.raises(FormatError, match=told):
        mr.ReplayBuffer.create(link / inner, schema(), 5)
    (tmp_path / "moved-away").mkdir()
    mr.ReplayBuffer.create(link / inner, schema(), 5).close()
    assert (tmp_path / "moved-away" / inner / "metadata.json").exists()


def test_no_buffer_is_created_at_a_link_to_itself(tmp_path):
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(FormatError, match=r".* is a link to 'round', which does not exist"):
        mr.ReplayBuffer.create(tmp_path / "round", schema(), 5)


def test_a_folder_without_search_permission_is_reported(hidden):
    hidden.chmod(0o600)
    done = created(hidden / "mine" / "new", CREATE)
    told = r"FailedError: cannot make folder .*Permission denied .* choose a path that can"
    assert re.search(told, done.stderr), done.stderr
    hidden.chmod(0o755)
    assert list((hidden / "mine").iterdir()) == []
