"""What a group tells other readers is read by hand, and held to what was written."""

import numpy as np
import pytest
import zarr

import mmreplay as mr
from mmreplay.ring import Span
from mmreplay.testing.disks import QuickDisk, using
from tests.buffer.test_sealed_groups import SCHEMA, record
from tools.torture.groups import folder_of, group_of, read_group
from tools.torture.rows import SHARDED, content, group_faults
from tools.torture.scribe import broken_closing

GEOMETRY = SHARDED[1]


@pytest.fixture(autouse=True)
def quick():
    with using(QuickDisk()):
        yield


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("codec", ["blosc-lz4", "zstd", "none"])
@pytest.mark.sliced(2)
def test_a_group_read_by_hand_is_what_zarr_reads(tmp_path, rng, layout, codec):
    options = {"layout": layout, "codec": codec, "chunk_crc32c": True}
    wanted, path = record(tmp_path / "b", rng, **options)
    assert group_of(tmp_path / "b") == path
    told, group = read_group(path), zarr.open_group(path, mode="r")
    assert np.array_equal(told.env_ids, wanted.env_ids)
    assert np.array_equal(told.positions, wanted.positions)
    fields = SCHEMA.fields
    assert list(told.columns) == [p for p, each in fields.items() if not each.mutable]
    slots = told.positions % group.attrs["mmreplay"]["slots"]
    for name, found in (*told.columns.items(), ("%flags", told.flags)):
        folder = name if name == "%flags" else folder_of(name)
        read = np.asarray(group[folder])[told.env_ids, slots]
        assert found.dtype == read.dtype
        assert np.array_equal(found, read), name


@pytest.mark.parametrize("at", [3, -1, -9])
@pytest.mark.sliced(1)
def test_a_shard_with_a_flipped_bit_is_not_read(tmp_path, rng, at):
    _, path = record(tmp_path / "b", rng, chunk_crc32c=True)
    for shard in path.glob("reward/c.*"):
        data = bytearray(shard.read_bytes())
        data[at] ^= 1
        shard.write_bytes(data)
    with pytest.raises(AssertionError):
        read_group(path)


@pytest.mark.parametrize("left", [0, 30])
@pytest.mark.sliced(1)
def test_a_truncated_shard_is_not_read(tmp_path, rng, left):
    _, path = record(tmp_path / "b", rng)
    for shard in path.glob("reward/c.*"):
        shard.write_bytes(shard.read_bytes()[:left])
    with pytest.raises(AssertionError):
        read_group(path)


@pytest.fixture
def written(tmp_path):
    """A compressed buffer closed after two sessions, their starts, and its span."""
    path, starts = tmp_path / "b", []
    with mr.ReplayBuffer.create(
        path,
        GEOMETRY.schema,
        GEOMETRY.capacity,
        GEOMETRY.num_envs,
        engine="zarr",
        autoreset="disabled",
    ):
        pass
    for lineage in (1, 2):
        with mr.ReplayBuffer.open(path, "r+") as buffer:
            starts.append((lineage, buffer.heads))
            for _ in range(6):
                every = np.arange(GEOMETRY.num_envs)
                heads = buffer.heads
                steps = content(GEOMETRY, every, heads, np.full_like(heads, lineage))
                buffer.add(steps)
            span = buffer.span
    return path, starts, span


def test_reported_rows_are_compared_with_the_session_that_wrote_them(written):
    path, starts, span = written
    told = read_group(group_of(path))
    assert len(told.positions) == 12 * GEOMETRY.num_envs
    assert group_faults(told, GEOMETRY, starts, span.stop) == []
    # What a power cut took from the buffer may be any able session's, and no other's.
    cut = span.stop - 6
    later = [*starts, (3, cut)]
    assert group_faults(told, GEOMETRY, later, cut) == []
    (line, *_) = group_faults(told, GEOMETRY, later, span.stop)
    assert line.startswith("group's wrong row: observation of env 0 position 6 linea")
    (line, *_) = group_faults(told, GEOMETRY, [(1, starts[0][1]), (3, cut)], cut)
    assert line.startswith("group's wrong row: observation of env 0 position 6 linea")


def test_a_close_in_order_is_held_to_what_was_alive(written):
    path, _, span = written
    told = read_group(group_of(path))
    assert broken_closing(told, span, True) == []
    more = Span(span.first, span.stop + 1)
    for other, wanted in ((None, "group silent"), (told, "group closed otherwise")):
        (line,) = broken_closing(other, more, True)
        assert line.startswith(wanted)
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        every, heads = np.arange(GEOMETRY.num_envs), buffer.heads
        buffer.add(content(GEOMETRY, every, heads, np.full_like(heads, 3)))
        span = buffer.span
        buffer.close(seal=False)
    told = read_group(group_of(path))
    assert broken_closing(told, span, False) == []
    assert len(broken_closing(told, span, True)) == 1
