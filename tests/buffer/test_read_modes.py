"""Buffers read alike whichever way, also while they are written; memory is told."""

import errno
import mmap
import os
import pickle

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError
from mmreplay.storage import memory_usage
from tests.contracts.sampler import steps_of
from tests.loader.support import fill, legal, same_as_take, steps

MODES = ["auto", "mmap", "pread"]
MIB = 1 << 20


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
def test_batches_are_the_same_whichever_way_they_are_read(tmp_path, mode, layout, autoreset):
    path = tmp_path / "b"
    written = fill(path, close=False, layout=layout, autoreset=autoreset)
    transforms = [mr.FrameStack(2, paths="observation/pixels")]
    for each in ([], transforms):
        options = {"sampler": mr.UniformSampler(seed=0), "transforms": each}
        with mr.ReplayBuffer.open(path, read_mode=mode, **options) as buffer:
            assert buffer.read_policy.read_mode == mode
            if not each:
                assert legal(buffer) == legal(written)
            batch = buffer.sample(300)
            numbers = 2 * batch.positions + batch.env_ids
            assert (batch["observation/number"] == numbers).all()
            pixels = batch["observation/pixels"].reshape(300, -1)[:, -1]
            assert (pixels == numbers % 251).all()
            everything = buffer.gather_all()
            assert (everything["action"] == written.gather_all()["action"]).all()
    written.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_reader_follows_its_writer(tmp_path, mode):
    writer = fill(tmp_path / "b", close=False)
    with mr.ReplayBuffer.open(
        tmp_path / "b", read_mode=mode, sampler=mr.UniformSampler(0)
    ) as reader:
        for first in range(200, 700, 37):
            writer.extend(steps(first, 37))
            assert legal(reader) == legal(writer)
            same_as_take(writer, reader.sample(40).torch())
        writer.resize(60)
        same_as_take(writer, reader.sample(40).torch())
        assert reader.read_policy.read_mode == mode
    writer.close()


ENDS = {
    "observation": mr.Field((), "int64"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}


def ending(first, count, num_envs):
    """Steps ``[count, num_envs]`` whose ends follow from their numbers."""
    number = np.arange(first, first + count)[:, None] * num_envs + np.arange(num_envs)
    return {"observation": number, "terminated": number % 7 == 3, "truncated": number % 11 == 5}


def ends_well(batch, num_envs):
    number = batch["observation"]
    assert (number == batch.positions * num_envs + batch.env_ids).all()
    terminated = number % 7 == 3
    assert (batch["terminated"] == terminated).all()
    assert (batch["truncated"] == (number % 11 == 5)).all()
    assert (batch["next_observation"] == number + num_envs * ~terminated).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_ends_are_those_of_the_steps_however_they_come(
    tmp_path, rng, mode, layout, num_envs, engine
):
    """One by one, in blocks, of some environments, over several laps."""
    schema, path, sampler = mr.Schema(ENDS), tmp_path / "b", mr.UniformSampler(0)
    made = {"layout": layout, "engine": engine, "commit_every": None}
    with (
        mr.ReplayBuffer.create(path, schema, 40, num_envs, autoreset="disabled", **made) as writer,
        mr.ReplayBuffer.open(path, read_mode=mode, sampler=sampler) as reader,
    ):
        writer.extend(ending(0, 3, num_envs))
        first = 3
        while first < 300:
            for _ in range(rng.integers(1, 4)):
                # As most do: one step of each environment, and a draw.
                count = int(rng.choice([1, 1, 1, 5]))
                writer.extend(ending(first, count, num_envs))
                first += count
            ends_well(reader.sample(30), num_envs)
            assert legal(reader) == legal(writer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("change", ["resize", "add_field"])
def test_ends_are_those_of_steps_drawn_before_their_ring_was_replaced(
    tmp_path, mode, num_envs, change
):
    """As a loader's threads have them, which gather what was drawn ahead."""
    path, sampler = tmp_path / "b", mr.UniformSampler(0)
    with (
        mr.ReplayBuffer.create(path, mr.Schema(ENDS), 40, num_envs, autoreset="disabled") as writer,
        mr.ReplayBuffer.open(path, read_mode=mode, sampler=sampler) as reader,
    ):
        # The last steps terminate, and nothing follows.
        writer.extend(ending(0, 45, num_envs))
        former = reader.view
        drawn = [former.draw(sampler, 50) for _ in range(2)]
        if change == "resize":
            writer.resize(60)
        else:
            writer.add_field("more", mr.Field((), "int8"), 0)
        assert reader.capacity == writer.capacity
        assert reader.view is not former
        for each in drawn:
            batch = reader.view.gather(each)
            assert (batch.positions == each.draw.positions).all()
            ends_well(batch, num_envs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sliced(1)
def test_what_came_after_a_draw_is_no_final_row_of_the_lap_before(tmp_path, rng, mode):
    """Terminated steps go on in a final row where there is one, else in themselves."""
    path, sampler = tmp_path / "b", mr.RecentSampler(4, 0.9, seed=0)
    finals, ends = {}, {}
    with (
        mr.ReplayBuffer.create(
            path, mr.Schema(ENDS), 20, autoreset="same_step", commit_every=None
        ) as writer,
        mr.ReplayBuffer.open(path, read_mode=mode, sampler=sampler) as reader,
    ):

        def add():
            at = int(writer.heads[0])
            ends[at] = bool(rng.random() < 0.4)
            finals[at] = ends[at] and bool(rng.random() < 0.5)
            final = {"final_observation": np.int64(-at - 1)} if finals[at] else {}
            writer.add(observation=np.int64(at), terminated=ends[at], truncated=False, **final)

        def after(at):
            if not ends[at]:
                return at + 1
            return -at - 1 if finals[at] else at

        for _ in range(10):
            add()
        for _ in range(300):
            drawn = reader.view.draw(sampler, 8)
            for _ in range(rng.integers(1, 3)):
                add()
            # As another thread does that draws, or checks what it read.
            reader.view.refresh()
            batch = reader.view.gather(drawn)
            positions = batch.positions.tolist()
            assert batch["terminated"].tolist() == [ends[at] for at in positions]
            assert batch["next_observation"].tolist() == [after(p) for p in positions]


def test_a_shard_that_a_file_server_lost_is_read_where_its_rows_are_now(tmp_path, monkeypatch):
    class Stale:
        def pread_into(self, target, offset):
            raise FailedError("stale file handle", errno_=errno.ESTALE)

    schema = mr.Schema({"x": mr.Field((1024,), "int64")})
    numbers = np.arange(128)[:, None].repeat(1024, axis=1)
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, schema, 64, engine="zarr") as writer:
        writer.extend(x=numbers[:64])
    with mr.ReplayBuffer.open(path, read_mode="pread") as reader:
        store = reader._files.store
        rows = np.arange(8)
        assert (store.gather(rows, ["x"])["x"] == numbers[:8]).all()
        for _, shard in store._reader._open.values():
            shard._file = Stale()
        look, before = store._states.take, [store._states.take(rows * 0)]
        with mr.ReplayBuffer.open(path, "r+") as writer:
            writer.extend(x=numbers[64:])
            first = writer.slots
        # The look before is of before the writer came, the next one is not.
        monkeypatch.setattr(store._states, "take", lambda at: before.pop() if before else look(at))
        found = store.gather(rows, ["x"])["x"]
        assert (found == numbers[first : first + 8]).all()
        for _, shard in store._reader._open.values():
            shard._file = Stale()
        with pytest.raises(FailedError, match="stale file handle"):
            store.gather(rows, ["x"])


def test_a_writer_may_read_without_mappings(tmp_path):
    fill(tmp_path / "b")
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", read_mode="pread") as buffer:
        for first in range(200, 500, 50):
            buffer.extend(steps(first, 50))
            buffer.commit()
        batch = buffer.sample(50)
        assert (batch["observation/number"] == 2 * batch.positions + batch.env_ids).all()
        buffer.resize(80)
        assert buffer.read_policy.read_mode == "pread"
        assert not buffer._files.store.maps
    assert mr.verify_buffer(tmp_path / "b").ok


def test_workers_read_as_the_buffer_does(tmp_path):
    fill(tmp_path / "b")
    buffer = mr.ReplayBuffer.open(tmp_path / "b", read_mode="pread", advise="always")
    dataset = pickle.loads(pickle.dumps(mr.ReplayDataset(buffer)))
    assert dataset.buffer.read_policy == buffer.read_policy
    with mr.ReplayLoader(buffer, 16) as loader:
        assert len(steps_of(next(loader))) == 16
    buffer.close()


def test_memory_of_a_buffer_is_counted(tmp_path):
    buffer = mr.ReplayBuffer.create(
        tmp_path / "b", mr.Schema({"pixels": mr.Field((64, 64, 4), "uint8")}), 1000
    )
    before = buffer.memory()
    assert before.mapped >= 16 * MIB
    rows = np.random.default_rng(0).integers(0, 255, (1000, 64, 64, 4), np.uint8)
    buffer.extend(pixels=rows)
    written = buffer.memory()
    # Written past the mapping: in the page cache, and not in this process.
    assert written.page_cache >= 0.95 * rows.nbytes
    assert written.page_cache <= before.mapped + MIB
    buffer.sample(2000)
    after = buffer.memory()
    assert after.shared - written.shared > 0.8 * rows.nbytes * (1 - np.exp(-2))
    assert after.shared <= after.mapped
    assert after.private > 0
    assert "MiB private to the process" in str(after)
    buffer.close()


def test_memory_of_a_compressed_buffer_counts_its_shards(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (1000, 64, 64, 4), np.uint8)
    schema = mr.Schema({"pixels": mr.Field((64, 64, 4), "uint8")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 1000, engine="zarr") as buffer:
        buffer.extend(pixels=noise)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        before = buffer.memory()
        assert before.page_cache >= 0.95 * noise.nbytes
        buffer.sample(2000)
        after = buffer.memory()
        # Shards are mapped when they are first read.
        assert after.mapped - before.mapped >= noise.nbytes
        assert after.shared - before.shared > 0.8 * noise.nbytes * (1 - np.exp(-2))
        for path in buffer.zarr_path.rglob("c.*"):
            path.unlink()
        # A writer removes shards, and whoever mapped them keeps them.
        assert buffer.memory().page_cache <= before.page_cache - noise.nbytes


def test_a_buffer_in_ram_maps_nothing():
    found = fill(None, engine="memory", close=False).memory()
    assert (found.mapped, found.shared, found.page_cache) == (0, 0, 0)
    assert found.private > MIB


def test_pages_are_counted_one_by_one_where_the_system_has_no_sum(tmp_path, monkeypatch):
    buffer = fill(tmp_path / "b", close=False)
    expected = buffer.memory().page_cache
    monkeypatch.setattr(memory_usage, "CACHESTAT", -1)
    monkeypatch.setattr(memory_usage, "MINCORE_NBYTES", 8 * mmap.PAGESIZE)
    found = buffer.memory().page_cache
    assert abs(found - expected) <= 8 * mmap.PAGESIZE
    # Or counts those of another file than the one below.
    monkeypatch.setattr(memory_usage, "file_system", lambda path: "overlay")
    monkeypatch.setattr(memory_usage._libc, "syscall", lambda *_: 0)
    assert buffer.memory().page_cache == found
    monkeypatch.setattr(memory_usage._libc, "syscall", lambda *_: -1)
    # Of files that this user may not write, the system says that all is there.
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert buffer.memory().page_cache is None
    assert "page cache unknown" in str(buffer.memory())
    buffer.close()
