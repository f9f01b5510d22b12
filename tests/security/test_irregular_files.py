"""Links, pipes, sockets and folders in the place of a buffer's files, each in turn."""

import os
import shutil
import socket
from contextlib import suppress

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import CorruptError, FormatError, ReplayError
from mmreplay.testing.disks import QuickDisk, using
from tests.samplers.priority_files import make, mark

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((3,), "float32"),
        "large": mr.Field((1200,), "float32"),
        "note": mr.Field((), "float32", mutable=True),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def linked(path, spare):
    path.rename(spare)
    path.symlink_to(spare)


def dangling(path, spare):
    path.rename(spare)
    path.symlink_to(path.with_name("nowhere"))


def looping(path, spare):
    path.rename(spare)
    path.symlink_to(path)


def pipe(path, spare):
    path.rename(spare)
    os.mkfifo(path)


def listening(path, spare):
    path.rename(spare)
    # Its whole name may be too long for a socket.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as each:
            each.bind(path.name)
    finally:
        os.chdir(here)


def folder(path, spare):
    path.rename(spare)
    path.mkdir()


KINDS = [linked, dangling, looping, pipe, listening, folder]


@pytest.fixture(autouse=True)
def quick():
    """A disk that syncs nothing: no power is cut here."""
    with using(QuickDisk()):
        yield


@pytest.fixture(params=["memmap", "zarr"])
def path(request, tmp_path):
    """A closed buffer with every file that there may be."""
    options = {"codec": "zstd"} if request.param == "zarr" else {}
    buffer = mr.ReplayBuffer.create(
        tmp_path / "b",
        SCHEMA,
        64,
        engine=request.param,
        commit_every=None,
        limiter=mr.RateLimiter(1.0, 1, float("inf")),
        **options,
    )
    with buffer:
        for number in range(100):
            buffer.add(
                observation=np.full(3, number, "f"),
                large=np.full(1200, number, "f"),
                note=0,
                reward=number,
                terminated=number % 10 == 9,
                truncated=False,
            )
        sampler = make()
        mark(buffer, sampler, range(40, 60))
        sampler.close()
        buffer.sample(1)
        buffer.set_statistics({"mean": 1})
    return tmp_path / "b"


with_shards = pytest.mark.parametrize("path", ["zarr"], indirect=True)
"""Only compressed buffers have shards."""


def files_of(path):
    return sorted(each for each in path.rglob("*") if each.is_file())


def shards_of(path):
    """Of the field "reward" first."""
    found = [shard for shard in files_of(path) if shard.name.startswith("c.")]
    return sorted(found, key=lambda shard: shard.parent.name != "reward")


@pytest.mark.parametrize("kind", KINDS)
def test_verify_names_each_and_goes_on(path, tmp_path, kind):
    shards = shards_of(path)
    some = [each for each in files_of(path) if each not in shards] + shards[:2]
    for each in some:
        name = str(each.relative_to(path))
        kind(each, tmp_path / "spare")
        if name == "metadata.json" and kind is not dangling:
            # Of that alone nothing can be told but that it is no file.
            with suppress(FormatError):
                assert not mr.verify_buffer(path).ok
        elif name == "metadata.json":
            with pytest.raises(FormatError):
                mr.verify_buffer(path)
        else:
            report = mr.verify_buffer(path)
            told = [f for f in report.findings if each.name in f"{f.file} {f.message}"]
            # A lock that is no file, or statistics that are none, do not damage rows.
            assert told or each.name in ("LOCK", "writer", "statistics.json"), name
        put_back(each, tmp_path / "spare")
    assert mr.verify_buffer(path).findings == ()


def put_back(path, spare):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    spare.rename(path)


@with_shards
@pytest.mark.parametrize("kind", KINDS)
def test_verify_goes_on_to_other_damage_behind_a_shard_that_is_no_file(path, tmp_path, kind):
    shards = shards_of(path)
    assert shards
    for number, each in enumerate(shards):
        kind(each, tmp_path / f"spare-{number}")
    strange = path / "data-000001" / "strange"
    strange.touch()
    report = mr.verify_buffer(path)
    named = {f.file for f in report.findings if f.damage}
    assert named >= {str(each.relative_to(path)) for each in shards}
    assert "data-000001/strange" in {f.file for f in report.findings}


@pytest.mark.parametrize(
    "kind",
    [
        looping,
        pipe,
        *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k not in (looping, pipe)),
    ],
)
@pytest.mark.sliced(1)
def test_snapshots_repairs_and_openings_raise_our_own_errors(path, tmp_path, kind):
    shards = shards_of(path)
    some = [each for each in files_of(path) if each not in shards] + shards[:2]
    for number, each in enumerate(some):
        kind(each, tmp_path / "spare")
        copy, repaired = tmp_path / f"copy-{number}", tmp_path / f"repaired-{number}"
        with suppress(ReplayError):
            mr.ReplayBuffer.open(path).close()
        try:
            with mr.ReplayBuffer.open(path) as reader:
                reader.snapshot(copy)
        except ReplayError:
            # Nothing of it is left in a copy that failed.
            assert not copy.exists()
        else:
            assert_whole(copy)
        with suppress(ReplayError):
            mr.repair(path, repaired)
            assert_whole(repaired)
        with suppress(ReplayError):
            mr.compact(path, tmp_path / f"compact-{number}")
        put_back(each, tmp_path / "spare")
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        assert len(buffer) == 64


def assert_whole(path):
    assert all(each.is_file() or each.is_dir() for each in path.rglob("*"))
    assert not any(each.is_symlink() for each in path.rglob("*"))
    with mr.ReplayBuffer.open(path) as reader:
        reader.gather_all()


@with_shards
@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_of_a_shard_that_is_no_file_says_so(path, tmp_path, kind):
    kind(shards_of(path)[0], tmp_path / "spare")
    told = pytest.raises(FormatError, match="not a regular file, but")
    with mr.ReplayBuffer.open(path) as reader, told:
        reader.snapshot(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@with_shards
@pytest.mark.parametrize("kind", KINDS)
def test_repair_drops_the_rows_of_a_shard_that_is_no_file(path, tmp_path, kind):
    kind(shards_of(path)[0], tmp_path / "spare")
    told = pytest.raises(CorruptError, match="not a regular file, but")
    with mr.ReplayBuffer.open(path) as reader, told:
        reader.gather_all()
    repaired = mr.repair(path, tmp_path / "repaired")
    assert 0 < repaired.cut_rows < 64
    assert repaired.rows == 64 - repaired.cut_rows
    assert_whole(tmp_path / "repaired")
