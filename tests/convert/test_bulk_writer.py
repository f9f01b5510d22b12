"""Rows of a new buffer lie as a store would have put them, whichever way they went."""

import errno
from functools import partial

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import bulk_writer
from mmreplay.convert import buffer_reader
from mmreplay.convert.base import Block
from mmreplay.convert.description import Description
from mmreplay.disk import files
from mmreplay.disk.files import Disk
from mmreplay.errors import FailedError, FullError
from mmreplay.testing.disks import using
from tests.convert.support import same_rows
from tests.convert.test_kills import Deadly, in_a_child
from tests.convert.test_page_cache import PAGE, PastCache, goes_past

SCHEMA = mr.Schema(
    {
        "observation": mr.Field((5000,), "uint8"),
        "next": mr.Field((1030,), "float32"),
        "value": mr.Field((), "float32", mutable=True),
        "action": mr.Field((3,), "float32"),
        "discrete": mr.Field((), "int8"),
        "terminated": mr.Field((), "bool"),
    }
)
SMALL = mr.Schema({"observation": mr.Field((3,), "int16")})


def described(rng, schema, num_envs, layout, capacity):
    """A description of environments that began anywhere, some of them empty."""
    first = rng.integers(0, 3 * capacity, num_envs)
    stop = first + rng.integers(0, capacity + 300, num_envs)
    stop[0] = first[0] + capacity
    return Description(schema, first, stop, capacity=capacity, layout=layout)


def blocks(rng, description, mixed):
    """Rows of a description, environments one after another or mixed."""
    ids = np.repeat(np.arange(description.num_envs), description.stop - description.first)
    if mixed:
        rng.shuffle(ids)
    at = description.first.copy()
    positions = np.empty(len(ids), np.int64)
    for item, env_id in enumerate(ids.tolist()):
        positions[item] = at[env_id]
        at[env_id] += 1
    # An environment's first row, and the one after an end, begin episodes.
    flags = np.zeros(len(ids), np.uint8)
    flags[positions == description.first[ids]] = 1
    columns = {}
    for path, field in description.schema.fields.items():
        shape = (len(ids), *field.shape)
        raw = rng.bytes(int(np.prod(shape)) * field.numpy.itemsize)
        columns[path] = np.frombuffer(raw, field.numpy).reshape(shape)
    if "terminated" in columns:
        columns["terminated"] = np.zeros(len(ids), bool)
    whole, first = Block(columns, ids, positions, flags), 0
    while first < len(ids):
        size = int(rng.choice([1, 7, 100, 1000]))
        yield whole.rows(first, first + size)
        first += size


def made(path, description, seed, mixed, disk=None):
    """Make a buffer of drawn rows, the same for one seed."""
    with using(disk or Disk()), buffer_reader.open_writer(path, description) as writer:
        for block in blocks(np.random.default_rng(seed), description, mixed):
            writer.write(block)
        writer.finish()
    return {
        each.name: each.read_bytes()
        for each in (path / "data-000001").iterdir()
        if each.name != "COMMIT"
    }


@pytest.mark.parametrize("schema", [SCHEMA, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("num_envs", "layout"),
    [(1, "env_major"), (1, "time_major"), (4, "env_major"), (3, "time_major")],
)
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.sliced(2)
def test_files_are_to_the_byte_those_of_the_store(
    tmp_path, request, monkeypatch, schema, mixed, num_envs, layout, past
):
    if past:
        request.getfixturevalue("small")
    straight = num_envs == 1 or layout == "env_major"
    goes = past and straight and goes_past(tmp_path)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        given = described(rng, schema, num_envs, layout, 150 + 700 * (seed % 2))
        disk = PastCache()
        found = made(tmp_path / f"a{seed}", given, seed, mixed, disk)
        with monkeypatch.context() as patch:
            patch.setattr(bulk_writer, "open_direct_writer", bulk_writer.StoreWriter)
            expected = made(tmp_path / f"b{seed}", given, seed, mixed)
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []
        assert any(found["sums.bin"])
        assert not mr.verify_buffer(tmp_path / f"a{seed}").findings
        assert disk.nbytes > 0 if goes and schema is SCHEMA else goes or not disk.nbytes


def exported(folder, rng, count=200):
    """A buffer and a file of it."""
    with mr.ReplayBuffer.create(folder / "source", SCHEMA, count) as buffer:
        buffer.extend(
            {
                path: rng.integers(0, 2, (count, *field.shape)).astype(field.numpy)
                for path, field in SCHEMA.fields.items()
            }
        )
    mr.export(folder / "source", folder / "a.npz")
    return folder / "a.npz"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
@pytest.mark.parametrize("at_open", [True, False])
def test_where_it_cannot_be_it_goes_through_the_cache(tmp_path, small, rng, number, at_open):
    source = exported(tmp_path, rng)
    disk = PastCache(OSError(number, "no"), at_open=at_open)
    with using(disk):
        mr.load(source, tmp_path / "back")
    assert disk.nbytes == 0
    with (
        mr.ReplayBuffer.open(tmp_path / "source") as one,
        mr.ReplayBuffer.open(tmp_path / "back") as other,
    ):
        same_rows(one, other)
    assert not mr.verify_buffer(tmp_path / "back").findings


def test_a_full_disk_past_the_cache_leaves_nothing(tmp_path, small, rng):
    if not goes_past(tmp_path):
        pytest.skip("the file system has no way past the cache")
    source = exported(tmp_path, rng)
    before = sorted(each.name for each in tmp_path.iterdir())
    disk = PastCache(OSError(errno.ENOSPC, "full"))
    with using(disk), pytest.raises(FullError, match="full"):
        mr.load(source, tmp_path / "back")
    assert sorted(each.name for each in tmp_path.iterdir()) == before
    mr.load(source, tmp_path / "back")


def test_a_device_that_fails_at_the_sync_leaves_nothing(tmp_path, small, rng):
    class Failing(Disk):
        def datasync(self, fd):
            raise OSError(errno.EIO, "gone")

    source = exported(tmp_path, rng)
    before = sorted(each.name for each in tmp_path.iterdir())
    with using(Failing()), pytest.raises(FailedError, match="gone"):
        mr.load(source, tmp_path / "back")
    assert sorted(each.name for each in tmp_path.iterdir()) == before


@pytest.mark.slow
def test_a_load_that_is_killed_past_the_cache_can_be_begun_again(tmp_path, small, rng, monkeypatch):
    monkeypatch.setattr(Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(Disk, "sync_folder", lambda self, fd: None)
    source, target = exported(tmp_path, rng, 60), tmp_path / "back"
    number, ended = 3, False
    while not ended:
        with using(Deadly(number)):
            ended = not in_a_child(lambda: None, partial(mr.load, source, target))
        if not ended and target.exists():
            assert not mr.verify_buffer(target).findings
        mr.load(source, target, overwrite=target.exists())
        with (
            mr.ReplayBuffer.open(tmp_path / "source") as one,
            mr.ReplayBuffer.open(target) as other,
        ):
            same_rows(one, other)
        files.remove_tree(target)
        number += 7


def test_many_large_fields_share_the_memory(tmp_path, small, monkeypatch):
    taken = []

    class Counted(bulk_writer.DirectOutput):
        def __init__(self, *args):
            super().__init__(*args)
            taken.append(self._slab_nbytes * self._unmade)

    monkeypatch.setattr(bulk_writer, "DirectOutput", Counted)
    monkeypatch.setattr(bulk_writer, "SLAB_NBYTES", 1 << 30)
    monkeypatch.setattr(bulk_writer, "MIN_SLAB_NBYTES", PAGE)
    schema = mr.Schema({f"f{k}": mr.Field((5000,), "uint8") for k in range(9)})
    given = Description(schema, np.zeros(1, int), np.full(1, 60), capacity=60)
    found = made(tmp_path / "a", given, 0, False)
    assert len(taken) == 10
    assert bulk_writer.SLABS_NBYTES // 2 < sum(taken) <= bulk_writer.SLABS_NBYTES
    monkeypatch.setattr(bulk_writer, "MAX_STREAMS", 9)
    assert made(tmp_path / "b", given, 0, False) == found
    assert len(taken) == 10
