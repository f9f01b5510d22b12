"""Buffers on a disk of which a sync fails, and the writers that come after it."""

import errno

import numpy as np
import pytest

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FailedError
from tools.torture.power import SimulatedDisk
from tools.torture.rows import GEOMETRIES, content

GEOMETRY = GEOMETRIES[2]
ROWS = 5


class FailingDisk(SimulatedDisk):
    """Syncs of one file fail once: its pages are clean, and not on the device."""

    failing = ""

    def datasync(self, fd):
        if self.failing and self._paths.get(fd) == self.failing:
            self.failing = ""
            self._file(fd).ops.clear()
            raise OSError(errno.EIO, "Input/output error")
        super().datasync(fd)

    def open(self, path, flags):
        fd = super().open(path, flags)
        self._paths[fd] = path.name
        return fd

    @property
    def _paths(self):
        return self.__dict__.setdefault("_names", {})


def make(folder, geometry=GEOMETRY):
    ReplayBuffer.create(
        folder / "a",
        geometry.schema,
        geometry.capacity,
        geometry.num_envs,
        engine=geometry.engine,
        layout=geometry.layout,
        autoreset="same_step",
        commit_every=None,
    ).close()


def reopen(folder):
    return ReplayBuffer.open(folder, "r+", commit_every=None)


def add(buffer, count, lineage=1, geometry=GEOMETRY):
    env_ids = np.arange(geometry.num_envs)
    for _ in range(count):
        heads = buffer.heads
        lineages = np.full_like(heads, lineage)
        buffer.add(content(geometry, env_ids, heads, lineages))


def failing(tmp_path, geometry=GEOMETRY):
    """A buffer, closed, on a disk whose syncs can fail."""
    folder = tmp_path / "disk"
    folder.mkdir()
    make(folder, geometry)
    return folder, FailingDisk(folder)


def begun(folder, count=ROWS, geometry=GEOMETRY):
    """That buffer, open, with steps that are committed."""
    buffer = reopen(folder / "a")
    add(buffer, count, geometry=geometry)
    buffer.commit()
    return buffer


def fail(disk, buffer, name="records.bin"):
    """Let a sync fail, and the writer end there."""
    disk.failing = name
    with pytest.raises(FailedError, match="cannot sync"):
        buffer.commit()
    with pytest.raises(FailedError, match="an earlier sync failed"):
        buffer.close()
