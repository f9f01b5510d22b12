"""A buffer that was put into shards, or out of them, holds the same rows."""

import fcntl
import json
import mmap
import os
import struct

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import statistics
from mmreplay.buffer.copy_rows import compact
from mmreplay.cli.run import run
from mmreplay.disk.files import File, file_system
from mmreplay.errors import FailedError, FormatError, SchemaError
from tests.buffer.test_zarr import SCHEMA, nested, same, steps

FIEMAP = 0xC020660B
"""The call that lists a file's extents; see linux/fiemap.h."""


@pytest.fixture(params=["env_major", "time_major"])
def source(request, tmp_path, rng):
    """A buffer of several laps, whose environments are not equally far."""
    path = tmp_path / "a"
    with mr.ReplayBuffer.create(
        path, SCHEMA, 40, 3, layout=request.param, user_metadata={"by": "us"}, autoreset="disabled"
    ) as buffer:
        buffer.extend(nested(steps(rng, 90, 3)))
        buffer.extend(nested(steps(rng, 15, 2)), env_ids=[0, 2])
        buffer.clear([1])
        buffer.set_statistics({"mean": 2})
    return path


def equal(left, right):
    """Whether two buffers hold the same rows at the same positions, to the flags."""
    with mr.ReplayBuffer.open(left) as a, mr.ReplayBuffer.open(right) as b:
        assert (a.span.first == b.span.first).all()
        assert (a.span.stop == b.span.stop).all()
        same(a.gather_all(), b.gather_all())
        for env_id, (first, stop) in enumerate(zip(a.span.first, a.span.stop, strict=True)):
            positions = np.arange(first, stop)
            assert (a.flags(env_id, positions) == b.flags(env_id, positions)).all()
        assert a.statistics == b.statistics
        assert a.metadata.user == b.metadata.user
        assert a.metadata.uuid != b.metadata.uuid


@pytest.mark.sliced(1)
def test_there_and_back_is_the_same_buffer(source, tmp_path):
    calls = []
    made = compact(source, tmp_path / "b", progress=lambda *call: calls.append(call))
    assert made.rows == 80
    assert calls[-1][0] == calls[-1][1]
    back = compact(tmp_path / "b", tmp_path / "c", codec=None)
    assert back.rows == 80
    for name, engine in (("b", "zarr"), ("c", "memmap")):
        assert mr.verify_buffer(tmp_path / name).ok
        equal(source, tmp_path / name)
        with mr.ReplayBuffer.open(tmp_path / name, "r+") as buffer:
            assert buffer.metadata.engine == engine
            buffer.extend(nested(steps(np.random.default_rng(1), 30, 3)))


def test_every_row_alive_is_in_a_shard(source, tmp_path):
    compact(source, tmp_path / "b", codec="zstd")
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        store, ring = buffer._files.store, buffer.metadata.ring
        for env_id in (0, 2):
            positions = np.arange(buffer.span.first[env_id], buffer.span.stop[env_id])
            rows = ring.rows(np.full(len(positions), env_id), positions)
            assert (store._states.take(rows // store._range_rows) & 1).all()


def test_what_cannot_be_is_refused(source, tmp_path):
    with pytest.raises(SchemaError, match=r"codec must be one of .* got 'gzip'"):
        compact(source, tmp_path / "b", codec="gzip")
    with pytest.raises(FormatError, match="is inside the buffer"):
        compact(source, source / "b")
    for options in ({"level": 9}, {"chunk_crc32c": True}):
        with pytest.raises(SchemaError, match="level and chunk_crc32c need a codec, got"):
            compact(source, tmp_path / "b", codec=None, **options)
    assert not (tmp_path / "b").exists()
    compact(source, tmp_path / "b")
    with pytest.raises(FormatError, match="already holds a buffer"):
        compact(tmp_path / "b", source)


def test_a_field_that_no_array_can_be_named_after_is_refused(tmp_path):
    schema = mr.Schema.from_flat({"é" * 60: mr.Field((), "float32")})
    mr.ReplayBuffer.create(tmp_path / "a", schema, 10).close()
    with pytest.raises(SchemaError, match="have at most 255 bytes a segment"):
        compact(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.sliced(1)
def test_the_command_says_what_it_made(source, tmp_path, capsys):
    assert run(["compact", str(source), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 80
    assert run(["compact", str(tmp_path / "b"), str(tmp_path / "c"), "--codec", "raw"]) == 0
    assert "80 rows" in capsys.readouterr().out
    assert run(["info", str(tmp_path / "b")]) == 0
    assert "compressed" in capsys.readouterr().out
    assert run(["compact", str(source), str(tmp_path / "d"), "--codec", "gzip"]) == 2


def allocated(path):
    """Bytes of a file's extents, those that are only reserved for it included.

    Blocks count more where the file was written back in between: ext4 keeps a block for
    a list of many extents, also once one is left.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        found = bytearray(struct.pack("=QQLLLL", 0, 1 << 63, 0, 0, 64, 0) + bytes(3584))
        try:
            fcntl.ioctl(file.fileno(), FIEMAP, found)
        except OSError:  # tmpfs has no such list.
            return path.stat().st_blocks * 512
    count = struct.unpack_from("=L", found, 20)[0]
    return sum(struct.unpack_from("=Q", found, 48 + 56 * n)[0] for n in range(count))


@pytest.mark.parametrize("num_envs", [1, 6])
@pytest.mark.parametrize("made_by", ["compact", "close"])
def test_rows_in_shards_take_no_other_disk_space(tmp_path, num_envs, made_by):
    """Though it is reserved by the MiB, and places are smaller."""
    if file_system(tmp_path) not in ("ext4", "xfs", "tmpfs"):
        pytest.skip("holes may take space here")
    fields = {"large": mr.Field((5000,), "uint8"), "small": mr.Field((9,), "int64")}
    schema, path = mr.Schema(fields), tmp_path / "b"
    engine = {"engine": "zarr"} if made_by == "close" else {}
    with mr.ReplayBuffer.create(
        path, schema, 500, num_envs, autoreset="disabled", **engine
    ) as buffer:
        for _ in range(9):
            buffer.extend(
                large=np.zeros((100, num_envs, 5000), np.uint8),
                small=np.zeros((100, num_envs, 9), np.int64),
            )
    if made_by == "compact":
        made = mr.compact(path, tmp_path / "c", codec="zstd")
        assert made.nbytes < made.nbytes_before / 20
        path = made.path
    (folder,) = path.glob("data-*")
    for name in ("records.bin", "f000.bin"):
        # A page at the end may be cut.
        assert allocated(folder / name) <= mmap.PAGESIZE
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        # Written to again, it has space again.
        buffer.extend(
            large=np.ones((100, num_envs, 5000), np.uint8),
            small=np.ones((100, num_envs, 9), np.int64),
        )
        found = buffer.gather_all()
        assert found["large"].sum() == 100 * num_envs * 5000
        assert found["small"].sum() == 100 * num_envs * 9
    assert mr.verify_buffer(path).ok


def test_shards_are_published_before_the_space_of_their_rows_is_freed(tmp_path, monkeypatch):
    """A writer may have been killed between the two, and closing seals nothing then."""
    schema, path, calls = (mr.Schema({"x": mr.Field((5000,), "uint8")}), tmp_path / "b", [])
    with mr.ReplayBuffer.create(path, schema, 500, engine="zarr") as buffer:
        buffer.extend(x=np.zeros((300, 5000), np.uint8))

    def noted(name, method):
        def call(self, *args):
            calls.append((name, self.path.name))
            return method(self, *args)

        return call

    monkeypatch.setattr(File, "sync", noted("sync", File.sync))
    monkeypatch.setattr(File, "punch", noted("punch", File.punch))
    with mr.ReplayBuffer.open(path, "r+"):
        calls.clear()
    first = min(i for i, call in enumerate(calls) if call[0] == "punch")
    assert ("sync", "places.bin") in calls[:first]


def test_priorities_that_are_not_copied_are_reported(tmp_path, capsys):
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.create(tmp_path / "a", SCHEMA, 40, sampler=sampler) as buffer:
        buffer.extend(nested(steps(np.random.default_rng(0), 20, 1)))
        buffer.sample(4)
    told = "the priorities 'prioritized' were not copied. Use export(..., "
    (note,) = compact(tmp_path / "a", tmp_path / "b").notes
    assert note.startswith(told)
    assert run(["compact", f"{tmp_path}/a", f"{tmp_path}/c"]) == 0
    assert f"note {told}" in capsys.readouterr().out
    assert compact(tmp_path / "b", tmp_path / "d").notes == ()


def test_priorities_that_cannot_be_looked_for_keep_no_copy_from_being_whole(
    source, tmp_path, monkeypatch
):
    def fail(folder):
        raise FailedError("cannot list samplers: Input/output error")

    monkeypatch.setattr(statistics, "stored_priorities", fail)
    told = "stored priorities were not copied: cannot list samplers: Input/output error"
    assert compact(source, tmp_path / "b").notes == (told,)
    equal(source, tmp_path / "b")
    assert told in mr.repair(source, tmp_path / "c").restored
