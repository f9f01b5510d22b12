"""Where a buffer is made: folders that tell nothing, links to nothing, no folder."""

import ctypes
import os
import subprocess
import sys

import pytest

import mmreplay as mr
from tests.buffer.support import schema
from tools.torture.disks import WatchedDisk, using

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


@pytest.fixture
def hidden(tmp_path):
    """A folder that may be passed through and written in, and not listed."""
    folder = tmp_path / "hidden"
    (folder / "mine").mkdir(parents=True)
    folder.chmod(0o311)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize("place", ["mine", "mine/sub", "new", "new/sub"])
def test_a_buffer_is_made_below_a_folder_that_may_not_be_listed(hidden, place):
    done = subprocess.run(
        [sys.executable, "-c", CREATE, str(hidden / place)],
        capture_output=True, text=True, check=False, preexec_fn=be_like_others,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    with mr.ReplayBuffer.open(hidden / place) as buffer:
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
