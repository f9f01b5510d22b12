"""Shards that do not unpack are told of where no checksum covers their rows either."""

import shutil
from contextlib import contextmanager

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import CorruptError
from mmreplay.verify import verify_buffer
from tests.verify.support import DATA, put, schema, steps

FIRST, COMMITTED, PUBLISHED = 12, 125, 140
"""The first whole block without a checksum is [120, 128); rows from 128 on are in the
tail, for their shard is not full."""


@pytest.fixture(params=["env_major", "time_major"])
def buffer(tmp_path, rng, request):
    """An open buffer, of which each row of pixels is a chunk of its own."""
    with mr.ReplayBuffer.create(
        tmp_path / "b",
        schema(),
        128,
        2,
        layout=request.param,
        engine="zarr",
        commit_every=None,
        autoreset="disabled",
    ) as buffer:
        buffer.extend(steps(rng, COMMITTED, 2))
        buffer.commit()
        buffer.extend(steps(rng, PUBLISHED - COMMITTED, 2))
        buffer._files.store.sealing.seal_now([])
        yield buffer


@contextmanager
def damaged(buffer, path, env_id, position):
    """Overwrite the packed pixels of one row for a while; gives its shard."""
    ring, sharding = buffer.metadata.ring, buffer.metadata.sharding
    step, chunk = divmod(position % ring.slots, sharding.shard_rows)
    env, chunks = env_id, sharding.shard_rows
    if ring.layout == "time_major":
        env, chunk = 0, env_id * chunks + chunk
        chunks *= ring.num_envs
    shard = path / DATA / "zarr" / "pixels" / f"c.{env}.{step}.0.0"
    before = shard.read_bytes()
    table = np.frombuffer(before[-16 * chunks - 4 : -4], "<u8").reshape(-1, 2)
    offset, nbytes = table[chunk].tolist()
    put(shard, offset, b"\xff" * nbytes)
    try:
        yield shard
    finally:
        put(shard, offset, before[offset : offset + nbytes])


@pytest.mark.parametrize("position", [COMMITTED - 1, COMMITTED])
def test_an_unreadable_row_without_a_checksum_is_reported(buffer, position):
    before = verify_buffer(buffer.path)
    assert before.findings == ()
    assert before.rows == 2 * (COMMITTED - FIRST)
    with damaged(buffer, buffer.path, 1, position) as shard:
        with (
            mr.ReplayBuffer.open(buffer.path) as reader,
            pytest.raises(CorruptError, match=r"shard .* is damaged"),
        ):
            reader.get_field("pixels", np.array([1]), np.array([position]))
        (finding,) = verify_buffer(buffer.path).findings
        assert (finding.kind, finding.file) == ("file", DATA)
        assert str(shard) in finding.message
        assert "the chunk at byte" in finding.message
        assert verify_buffer(buffer.path, deep=False).ok


@pytest.mark.sliced(1)
def test_repair_drops_the_rows_that_verify_reports(buffer, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(buffer.path, copy)
    with damaged(buffer, copy, 0, COMMITTED - 1):
        assert [f.kind for f in verify_buffer(copy).findings] == ["file"]
        made = mr.repair(copy)
    assert made.cuts == (mr.DroppedRows(0, 120, COMMITTED, "missing"),)
    assert verify_buffer(made.target).findings == ()


@pytest.mark.sliced(1)
def test_a_damaged_row_that_is_not_served_is_nobodys(buffer, tmp_path):
    """What is above the last commit in a copy, or below the oldest row alive."""
    copy = tmp_path / "copy"
    shutil.copytree(buffer.path, copy)
    for path, position, found in (
        *((copy, COMMITTED, []), (copy, FIRST, ["file"])),
        *((buffer.path, COMMITTED, ["file"]), (buffer.path, 7, [])),
    ):
        with damaged(buffer, path, 1, position):
            assert [f.kind for f in verify_buffer(path).findings] == found


@pytest.mark.parametrize("damage", ["cut", "gone", "link"])
def test_that_nothing_says_which_rows_are_in_shards_is_a_finding(buffer, tmp_path, damage):
    buffer.close()
    place = tmp_path / "b" / DATA / "places.bin"
    if damage == "cut":
        place.write_bytes(b"\0")
    else:
        place.rename(tmp_path / "aside")
    if damage == "link":
        place.symlink_to(tmp_path / "aside")
    (finding,) = verify_buffer(tmp_path / "b").findings
    assert (finding.kind, finding.damage) == ("file", True)
    assert "places.bin" in finding.message
