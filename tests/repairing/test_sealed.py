"""Repair of compressed buffers, and in the place of the damaged one."""

import errno
import os
from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import Disk
from mmreplay.errors import FailedError, FormatError, LockedError
from mmreplay.storage.zarr.shards import ChunkPages, ShardReader
from mmreplay.testing.disks import using
from mmreplay.verify import verify_buffer
from tests.buffer.test_snapshots import SCHEMA, extend
from tests.repairing.test_repair import assert_repaired, contents, put
from tools.torture.power import SimulatedDisk

DATA = "data-000001"
ROWS = range(59, 123)


@pytest.fixture(params=["env_major", "time_major"])
def damaged(tmp_path, request):
    """A closed buffer, to be damaged: positions [59, 123), raw bytes in its shards."""
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(
        path,
        SCHEMA,
        64,
        2,
        layout=request.param,
        engine="zarr",
        codec="none",
        commit_every=None,
        autoreset="disabled",
    ) as buffer:
        for _ in range(3):
            extend(buffer, 41)
    return path


def shard_of(path, env_id, position, field="large"):
    """The shard of a row, and the row's offset in it where a chunk is a row."""
    with mr.ReplayBuffer.open(path) as buffer:
        ring, sharding = buffer.metadata.ring, buffer.metadata.sharding
    step, within = divmod(position % ring.slots, sharding.shard_rows)
    env, at = env_id, within
    if ring.layout == "time_major":
        env, at = 0, env_id * sharding.shard_rows + within
    tail = ".0" if field == "large" else ""
    return path / DATA / "zarr" / field / f"c.{env}.{step}{tail}", at


def without(*dropped):
    return [[n for n in ROWS if n not in each] for each in dropped]


def block_of(path, position):
    with mr.ReplayBuffer.open(path) as buffer:
        size = buffer.metadata.ring.block_rows
    first = position // size * size
    return range(first, first + size)


@pytest.mark.sliced(1)
def test_a_whole_buffer_is_copied_as_it_is(damaged):
    made = mr.repair(damaged)
    assert (made.cuts, made.restored) == ((), ())
    assert_repaired(damaged, made, without([], []))
    with mr.ReplayBuffer.open(made.target) as buffer:
        assert buffer.metadata.engine == "zarr"
        assert list(buffer.zarr_path.rglob("c.*"))


@pytest.mark.parametrize("read", [mr.repair, verify_buffer])
def test_chunks_are_asked_for_each_time_before_they_are_read(damaged, monkeypatch, read):
    ahead, asked = Counter(), []

    def noted(method, step):
        def call(self, array, shards, entries, within, *rest):
            # A copy seals its rows while they are looked at: what was asked for in
            # its staging files may be read from a shard.
            original = self._folder.is_relative_to(damaged)
            # Ends and flags, a byte a row, are read as they come.
            if original and array.path == "large":
                ahead.update(dict.fromkeys(zip(shards, within, strict=True), step))
                assert min(ahead.values()) >= 0
            found = method(self, array, shards, entries, within, *rest)
            if original and step == 1:
                asked.append(found)
            return found

        return call

    monkeypatch.setattr(ChunkPages, "cached", lambda *_: False)
    monkeypatch.setattr(ShardReader, "prefetch", noted(ShardReader.prefetch, 1))
    monkeypatch.setattr(ShardReader, "take", noted(ShardReader.take, -1))
    read(damaged)
    assert len(ahead) >= len(ROWS)
    assert sum(asked) > 0


@pytest.mark.sliced(1)
def test_only_the_block_with_a_flipped_byte_is_dropped(damaged):
    before = {p: p.read_bytes() for p in damaged.rglob("*") if p.is_file()}
    shard, at = shard_of(damaged, 1, 90)
    put(shard, at * 4800 + 9, b"\xff")
    before[shard] = shard.read_bytes()
    made = mr.repair(damaged)
    block = block_of(damaged, 90)
    assert made.cuts == (mr.DroppedRows(1, block.start, block.stop, "checksum"),)
    assert_repaired(damaged, made, without([], block))
    assert before == {p: p.read_bytes() for p in damaged.rglob("*") if p.is_file()}


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.sliced(1)
def test_a_chunk_that_cannot_be_unpacked_costs_its_block_and_no_other(tmp_path, layout):
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(
        path,
        SCHEMA,
        64,
        2,
        layout=layout,
        engine="zarr",
        codec="zstd",
        commit_every=None,
        autoreset="disabled",
    ) as buffer:
        for _ in range(3):
            extend(buffer, 41)
    shard, at = shard_of(path, 1, 90)
    data = shard.read_bytes()
    table = np.frombuffer(data[:-4], np.uint8)
    count = 2 if layout == "time_major" else 1
    with mr.ReplayBuffer.open(path) as buffer:
        count *= buffer.metadata.sharding.shard_rows
    first, _ = table[-16 * count :].view("<u8").reshape(count, 2)[at].tolist()
    put(shard, first, bytes(4))
    made = mr.repair(path)
    block = block_of(path, 90)
    assert made.cuts == (mr.DroppedRows(1, block.start, block.stop, "missing"),)
    assert_repaired(path, made, without([], block))


def test_a_shard_that_is_gone_costs_its_rows_and_no_other(damaged):
    shard, _ = shard_of(damaged, 0, 100)
    shard.unlink()
    made = mr.repair(damaged)
    with mr.ReplayBuffer.open(damaged) as buffer:
        ring, size = buffer.metadata.ring, buffer.metadata.sharding.shard_rows
    first = 100 // size * size
    gone = [n for n in ROWS if first <= n < first + size]
    # Where the place held another lap's rows too, those are gone with it.
    gone += [n for n in ROWS if first - ring.slots <= n < first - ring.slots + size]
    both = ring.layout == "time_major"
    assert {cut.why for cut in made.cuts} == {"missing"}
    assert_repaired(damaged, made, without(gone, gone if both else []))


def test_newest_rows_without_a_checksum_are_dropped_where_they_cannot_be_read(damaged):
    shard, _ = shard_of(damaged, 1, 122)
    os.truncate(shard, 100)
    made = mr.repair(damaged)
    assert any(cut.stop == 123 and cut.why == "missing" for cut in made.cuts)
    assert verify_buffer(made.target).findings == ()
    numbers, _ = contents(made.target)
    assert set(numbers[1]) < set(ROWS)
    assert 122 not in numbers[1]


def test_heads_are_found_without_a_record(damaged):
    whole = block_of(damaged, 0).stop
    commit = damaged / DATA / "COMMIT"
    commit.write_bytes(bytes(len(commit.read_bytes())))
    made = mr.repair(damaged)
    assert any("from the checksums of complete blocks. Newer rows" in f for f in made.restored)
    numbers, _ = contents(made.target)
    assert all(max(each) == 123 // whole * whole - 1 for each in numbers)


@pytest.mark.sliced(1)
def test_in_place_both_change_places(damaged, tmp_path):
    before = {p.relative_to(damaged): p.read_bytes() for p in damaged.rglob("c.*")}
    made = mr.repair(damaged, in_place=True)
    assert (made.target, made.path) == (damaged, tmp_path / "b-damaged")
    assert_repaired(damaged, made, without([], []))
    for name, data in before.items():
        assert (tmp_path / "b-damaged" / name).read_bytes() == data
    assert contents(tmp_path / "b-damaged")[0] == without([], [])


def test_in_place_the_place_of_the_damaged_one_may_be_named(damaged, tmp_path):
    made = mr.repair(damaged, tmp_path / "old", in_place=True)
    assert made.path == tmp_path / "old"
    assert contents(damaged)[0] == contents(tmp_path / "old")[0]


def test_in_place_a_name_that_exists_is_refused(damaged):
    mr.repair(damaged, in_place=True)
    with pytest.raises(FormatError, match="already holds a buffer"):
        mr.repair(damaged, in_place=True)


def test_in_place_nobody_comes_to_write_what_will_be_moved_away(damaged):
    told = []

    def come(done, total):
        with pytest.raises(LockedError, match="already open for writing"):
            mr.ReplayBuffer.open(damaged, "r+")
        told.append(done)

    mr.repair(damaged, in_place=True, progress=come)
    assert told
    mr.ReplayBuffer.open(damaged, "r+").close()


def test_a_file_system_that_cannot_exchange_leaves_both_and_says_so(damaged):
    class PlainDisk(Disk):
        def exchange(self, one, other):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with using(PlainDisk()), pytest.raises(FailedError, match="cannot exchange"):
        mr.repair(damaged, in_place=True)
    assert contents(damaged)[0] == without([], [])
    assert contents(damaged.with_name("b-damaged"))[0] == without([], [])


def test_a_power_cut_at_the_exchange_leaves_one_or_the_other(tmp_path):
    """By the entries alone: both names hold a whole buffer, whichever it is."""
    seen = set()
    for seed in range(12):
        root = tmp_path / f"r{seed}"
        root.mkdir()
        with mr.ReplayBuffer.create(
            root / "b", SCHEMA, 16, 2, commit_every=None, autoreset="disabled"
        ) as buffer:
            extend(buffer, 9)
            uuid = buffer.metadata.uuid
        mr.repair(root / "b", root / "new")
        disk = SimulatedDisk(root)
        with using(disk):
            disk.exchange(root / "b", root / "new")
        disk.crash(root, np.random.default_rng(seed))
        uuids = []
        for name in ("b", "new"):
            with mr.ReplayBuffer.open(root / name) as buffer:
                uuids.append(buffer.metadata.uuid)
                assert buffer.heads.tolist() == [9, 9]
        assert len(set(uuids)) == 2
        seen.add(uuids[0] == uuid)
    assert seen == {True, False}
