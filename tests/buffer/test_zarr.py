"""A buffer in compressed shards is the same buffer, and zarr reads it unaided."""

import numpy as np
import pytest
import zarr

import mmreplay as mr
from mmreplay.errors import CorruptError, SchemaError
from mmreplay.format.sharding import CODECS
from mmreplay.testing.disks import QuickDisk, using


@pytest.fixture(autouse=True)
def quick():
    """Each place is a dozen files that are synced; no power is cut here."""
    with using(QuickDisk()):
        yield


SCHEMA = mr.Schema(
    {
        "observation": {"pixels": mr.Field((64, 80), "uint8"), "v.1": mr.Field((3,), "float32")},
        "action": mr.Field((), "int16"),
        "weight": mr.Field((), "bfloat16"),
        "reward": mr.Field((), "float64"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
        "value": mr.Field((), "float32", mutable=True),
    }
)
NAMES = {
    "observation/pixels": "observation/pixels",
    "observation/v.1": "observation/v%2E1",
    "action": "action",
    "weight": "weight",
    "reward": "reward",
    "terminated": "terminated",
}


def steps(rng, count, num_envs):
    lead = (count, num_envs)
    return {
        "observation/pixels": rng.integers(0, 4, (*lead, 64, 80), np.uint8),
        "observation/v.1": rng.random((*lead, 3), np.float32),
        "action": rng.integers(-9, 9, lead, np.int16),
        "weight": rng.integers(0, 1 << 16, lead, np.uint16),
        "reward": rng.random(lead),
        "terminated": rng.random(lead) < 0.1,
        "truncated": np.zeros(lead, bool),
        "value": rng.random(lead, np.float32),
    }


def nested(columns):
    found = {path: c for path, c in columns.items() if "/" not in path}
    inner = {p.partition("/")[2]: c for p, c in columns.items() if "/" in p}
    return found | {"observation": inner}


def same(left, right):
    for path in SCHEMA.paths:
        assert (left[path] == right[path]).all(), path


@pytest.fixture(params=["env_major", "time_major"])
def twins(request, tmp_path):
    """A buffer in shards and one in RAM, of the same steps; and a reader."""
    rng = np.random.default_rng(3)
    sharded = mr.ReplayBuffer.create(
        tmp_path / "b", SCHEMA, 70, 2, engine="zarr", layout=request.param, autoreset="disabled"
    )
    twin = mr.ReplayBuffer.create(
        None, SCHEMA, 70, 2, engine="memory", layout=request.param, autoreset="disabled"
    )

    def extend(count):
        columns = nested(steps(rng, count, 2))
        sharded.extend(columns)
        twin.extend(columns)

    with sharded, mr.ReplayBuffer.open(tmp_path / "b") as reader:
        yield sharded, twin, reader, extend


@pytest.mark.sliced(1)
def test_what_is_read_is_what_was_added_over_several_laps(twins):
    sharded, twin, reader, extend = twins
    for count in (3, 40, 1, 70, 33, 60):
        extend(count)
        same(sharded.gather_all(), twin.gather_all())
        same(reader.gather_all(), twin.gather_all())
    assert (reader.sizes == 70).all()
    sharded.write_field("value", [0, 1], reader.span.first, [7.0, 8.0])
    assert reader.get_field("value", [0, 1], reader.span.first).tolist() == [7, 8]
    sharded.close()
    assert mr.verify_buffer(sharded.path).ok
    got = reader.gather_all()
    for path in NAMES:
        assert (got[path] == twin.gather_all()[path]).all(), path


@pytest.mark.sliced(1)
def test_zarr_reads_every_row_of_a_closed_buffer(twins):
    sharded, twin, _, extend = twins
    for count in (70, 45):
        extend(count)
    sharded.close()
    group = zarr.open_group(sharded.zarr_path, mode="r")
    about = group.attrs["mmreplay"]
    rows = twin.gather_all()
    for path, name in NAMES.items():
        array = group[name][:]
        assert array.shape == (2, about["slots"], *SCHEMA[path].shape)
        assert array.dtype == SCHEMA[path].numpy
        found = [
            array[env_id, np.arange(first, stop) % about["slots"]]
            for env_id, (first, stop) in enumerate(zip(about["first"], about["stop"], strict=True))
        ]
        assert (np.concatenate(found) == rows[path]).all(), path


@pytest.mark.sliced(1)
def test_a_closed_buffer_goes_on_and_is_resized(twins, tmp_path):
    sharded, twin, _, extend = twins
    extend(90)
    sharded.close()
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", on_resume="continue") as again:
        columns = nested(steps(np.random.default_rng(4), 50, 2))
        again.extend(columns)
        twin.extend(columns)
        same(again.gather_all(), twin.gather_all())
        for capacity in (30, 200):
            again.resize(capacity)
            twin.resize(capacity)
            same(again.gather_all(), twin.gather_all())


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_keeps_every_bit(tmp_path, codec, rng):
    columns = nested(steps(rng, 60, 1))
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, SCHEMA, 60, engine="zarr", codec=codec) as buffer:
        buffer.extend(columns)
        before = buffer.gather_all()
    with mr.ReplayBuffer.open(path, read_mode="pread") as buffer:
        same(buffer.gather_all(), before)
        assert buffer._files.store._states.sealed().size


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_with_checksums_are_read_by_zarr_and_tell_of_damage(tmp_path, codec, rng):
    columns = nested(steps(rng, 60, 1))
    with mr.ReplayBuffer.create(
        tmp_path / "b", SCHEMA, 60, engine="zarr", codec=codec, chunk_crc32c=True
    ) as buffer:
        buffer.extend(columns)
        buffer.resize(61)
        before = buffer.gather_all()
    with mr.ReplayBuffer.open(tmp_path / "b") as again:
        assert again.metadata.sharding.chunk_crc32c
        same(again.gather_all(), before)
        pixels = zarr.open_group(again.zarr_path, mode="r")["observation/pixels"]
        found = pixels[0, again.span.first[0] : again.span.stop[0]]
        assert (found == before["observation/pixels"]).all()
    shard = sorted((again.zarr_path / "observation/pixels").glob("c.*"))[0]
    data = bytearray(shard.read_bytes())
    data[20] ^= 1
    shard.write_bytes(data)
    reader = mr.ReplayBuffer.open(tmp_path / "b")
    with reader, pytest.raises(CorruptError, match="does not match its checksum"):
        reader.gather_all()


def test_a_higher_level_makes_smaller_shards_and_stays_with_the_buffer(tmp_path, rng):
    columns = nested(steps(rng, 60, 1))
    sizes = []
    for level in (1, 19):
        path = tmp_path / str(level)
        with mr.ReplayBuffer.create(
            path, SCHEMA, 60, engine="zarr", codec="zstd", level=level
        ) as buffer:
            buffer.extend(columns)
            buffer.resize(70)
            assert buffer.metadata.sharding.level == level
        with mr.ReplayBuffer.open(path) as again:
            sizes.append(again.compression["observation/pixels"][0])
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
def test_shards_that_are_overwritten_go_whole_and_unopened(tmp_path, layout, monkeypatch):
    schema = mr.Schema({"x": mr.Field((600,), "float64")})
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(
        path, schema, 100, 2, engine="zarr", layout=layout, autoreset="disabled"
    ) as buffer:
        sealing = buffer._files.store.sealing
        assert sealing.limit_step > 1

        def step():
            number = float(buffer.heads[0])
            buffer.add(x=np.full((2, 600), number))
            sealing.seal_now([])

        for _ in range(200):
            step()
        unpacked = []
        monkeypatch.setattr(sealing, "_unpack", lambda *a: unpacked.append(a))
        for _ in range(300):
            step()
            assert (buffer.span.lengths == 100).all()
        assert not unpacked
        found = buffer.gather_all()
        assert (found["x"][:, 7] == found.positions).all()
    assert mr.verify_buffer(path).ok


def test_a_close_that_does_not_seal_leaves_the_newest_rows_to_the_tail(tmp_path, rng):
    path = tmp_path / "b"
    columns = nested(steps(rng, 60, 1))
    buffer = mr.ReplayBuffer.create(path, SCHEMA, 60, engine="zarr")
    buffer.extend(columns)
    before = buffer.gather_all()
    buffer.close(seal=False)
    rows = buffer.metadata.sharding.shard_rows
    about = zarr.open_group(buffer.zarr_path, mode="r").attrs["mmreplay"]
    assert 60 % rows
    assert about["stop"] == [60]
    assert about["sealed"] == [60 // rows * rows]
    with mr.ReplayBuffer.open(path) as again:
        same(again.gather_all(), before)
    with mr.ReplayBuffer.open(path, "r+", on_resume="continue"):
        pass
    about = zarr.open_group(buffer.zarr_path, mode="r").attrs["mmreplay"]
    assert about["sealed"] == [60]


def test_a_damaged_shard_is_named(tmp_path, rng):
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, SCHEMA, 60, engine="zarr") as buffer:
        buffer.extend(nested(steps(rng, 60, 1)))
    shard = sorted((buffer.zarr_path / "reward").glob("c.*"))[0]
    data = bytearray(shard.read_bytes())
    data[5] ^= 255
    shard.write_bytes(data)
    reader = mr.ReplayBuffer.open(path)
    with reader, pytest.raises(CorruptError, match=r"shard .*reward/c.* is damaged: .*repair"):
        reader.gather_all()
    assert not mr.verify_buffer(path).ok
    data[-1] ^= 255
    shard.write_bytes(data)
    reader = mr.ReplayBuffer.open(path)
    with reader, pytest.raises(CorruptError, match="index does not match"):
        reader.gather_all()


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(SchemaError, match=r"codec must be one of .*, got 'gzip'"):
        mr.ReplayBuffer.create(tmp_path / "a", SCHEMA, 9, engine="zarr", codec="gzip")
    with pytest.raises(SchemaError, match="codec='zstd' needs engine='zarr', got engine='memmap'"):
        mr.ReplayBuffer.create(tmp_path / "a", SCHEMA, 9, codec="zstd")
    with pytest.raises(SchemaError, match=r"level=3 needs.*got engine='memmap'"):
        mr.ReplayBuffer.create(tmp_path / "a", SCHEMA, 9, level=3)
    with pytest.raises(SchemaError, match=r"level must be an .*\[0, 9\], got 10"):
        mr.ReplayBuffer.create(tmp_path / "a", SCHEMA, 9, engine="zarr", level=10)
    with pytest.raises(SchemaError, match="chunk_crc32c must be True or False, got 1"):
        mr.ReplayBuffer.create(tmp_path / "a", SCHEMA, 9, engine="zarr", chunk_crc32c=1)


def test_a_shard_that_is_removed_meanwhile_counts_for_nothing(tmp_path, rng):
    with mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, 64, engine="zarr") as buffer:
        buffer.extend({p: c[:, 0] for p, c in steps(rng, 64, 1).items()})
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        before = buffer.nbytes
        assert before[1] > 0
        # Listed, and not there when it is looked at.
        (buffer.zarr_path / "reward/c.0.99").symlink_to("gone")
        assert buffer.nbytes == before
