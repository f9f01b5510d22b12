"""No memory is left to map a file (ENOMEM): a shortage, and no failing disk."""

import errno
import mmap
import os
import re

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.errors import DurabilityWarning, FailedError
from mmreplay.testing.disks import QuickDisk, using
from tests.samplers.priority_files import make

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((3,), "float32"),
        "large": mr.Field((1200,), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)
MESSAGE = r"cannot map .*Cannot allocate memory .*Free memory, close buffers"


@pytest.fixture(autouse=True)
def quick():
    """A disk that syncs nothing: no power is cut here."""
    with using(QuickDisk()):
        yield


@pytest.fixture(params=["memmap", pytest.param("zarr", marks=pytest.mark.slow)])
def path(request, tmp_path):
    options = {"codec": "zstd"} if request.param == "zarr" else {}
    with mr.ReplayBuffer.create(
        tmp_path / "b", SCHEMA, 64, engine=request.param, commit_every=None, **options
    ) as buffer:
        add(buffer, 100)
    return tmp_path / "b"


def add(buffer, count):
    for _ in range(count):
        number = int(buffer.heads[0])
        buffer.add(
            observation=np.full(3, number, "f"),
            large=np.full(1200, number, "f"),
            reward=number,
            terminated=number % 10 == 9,
            truncated=False,
        )


def read(path):
    with mr.ReplayBuffer.open(path) as reader:
        reader.sample(8)
        reader.gather_all()


def mapped(path):
    with mr.ReplayBuffer.open(path) as reader:
        reader.mapped("large")


def write(path):
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        add(buffer, 30)
        buffer.commit()
        buffer.resize(80)
        add(buffer, 1)


def prioritize(path):
    with mr.ReplayBuffer.open(path, sampler=make()) as reader:
        reader.update_priorities(reader.sample(8), np.ones(8))


def copy(path):
    with mr.ReplayBuffer.open(path) as reader:
        reader.snapshot(path.with_name("copy"))


def mend(path):
    mr.repair(path, path.with_name("copy"))


def pack(path):
    mr.compact(path, path.with_name("copy"))


class Maps:
    """The module `mmap`, of which one call finds no memory."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __getattr__(self, name):
        return getattr(mmap, name)

    def mmap(self, *arguments, **options):
        self.count += 1
        if self.count == self.at + 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mmap.mmap(*arguments, **options)


@pytest.mark.parametrize("do", [read, mapped, write, prioritize, copy, mend, pack])
def test_each_map_that_finds_no_memory_says_so(path, tmp_path, monkeypatch, do):
    """Or the file is read and written without a mapping, where that can be."""
    told = 0
    for at in range(400):
        maps = Maps(at)
        with monkeypatch.context() as patch:
            patch.setattr(files, "mmap", maps)
            try:
                do(path)
            except (FailedError, DurabilityWarning) as error:
                found = error
            else:
                found = None
        if found is not None:
            assert re.search(MESSAGE, str(found))
            # The warning is of priorities, which are then in RAM.
            assert getattr(found, "errno", errno.ENOMEM) == errno.ENOMEM
            told += 1
        if maps.count <= at:
            break
        remove_copy(path)
        read(path)
    assert at > 0
    assert told > 0 or (do, path_engine(path)) == (mapped, "zarr")


def path_engine(path):
    with mr.ReplayBuffer.open(path) as reader:
        return reader.metadata.engine


def remove_copy(path):
    files.remove_tree(path.with_name("copy"))
