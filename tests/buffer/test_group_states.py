"""What a group of ours says of its rows holds, whatever its writer does meanwhile."""

import _thread
import errno
import multiprocessing
import os
import signal

import numpy as np
import pytest
import zarr

import mmreplay as mr
from mmreplay.errors import FailedError, FormatError, FullError, SchemaError
from mmreplay.testing.disks import QuickDisk, using
from mmreplay.verify import verify_buffer

SCHEMA = mr.Schema({"observation": mr.Field((3,), "float32")})
CAPACITY = 64


def fill(buffer, first, count):
    numbers = np.arange(first, first + count, dtype=np.float32)
    buffer.extend(observation=np.repeat(numbers[:, None], 3, axis=1))


def make(path, count=CAPACITY, **options):
    options.setdefault("engine", "zarr")
    with mr.ReplayBuffer.create(path, SCHEMA, CAPACITY, **options) as buffer:
        fill(buffer, 0, count)
    return mr.ReplayBuffer.open(path).zarr_path


def about(path):
    return zarr.open_group(path, mode="r").attrs["mmreplay"]


def numbers(path):
    with mr.ReplayBuffer.open(path) as group:
        rows = group.gather_all()
    assert (rows["observation"][:, 0] == rows.positions).all()
    return rows.positions.tolist()


def test_rows_replaced_by_a_writer_that_was_killed_are_not_served_as_the_old(tmp_path):
    path = make(tmp_path / "b")
    assert numbers(path) == list(range(CAPACITY))

    def lap():
        buffer = mr.ReplayBuffer.open(tmp_path / "b", "r+")
        fill(buffer, CAPACITY, 200)
        buffer._files.store.sealing._sealer.drain()
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=lap)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not {"first", "stop", "sealed"} & about(path).keys()
    with pytest.raises(FormatError, match="Close its buffer before you copy"):
        mr.ReplayBuffer.open(path)
    mr.ReplayBuffer.open(tmp_path / "b", "r+").close()
    assert numbers(path) == list(range(200, 264))


def test_a_writer_that_replaces_no_sealed_row_leaves_what_is_said(tmp_path):
    path = make(tmp_path / "b", count=20)
    said = about(path)
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as buffer:
        fill(buffer, 20, 30)
        buffer._files.store.sealing._sealer.drain()
        stop = about(path).get("stop", said["stop"])
        assert stop == said["stop"]
    assert numbers(path) == list(range(50))


def test_a_snapshot_says_which_rows_its_group_holds(tmp_path):
    make(tmp_path / "b", count=CAPACITY)
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as buffer:
        fill(buffer, CAPACITY, 5)
        buffer.snapshot(tmp_path / "s")
    with mr.ReplayBuffer.open(tmp_path / "s") as snapshot:
        path, rows = snapshot.zarr_path, snapshot.gather_all()
    assert rows.positions.tolist() == list(range(5, CAPACITY + 5))
    told = about(path)
    assert (told["first"], told["stop"]) == ([5], [CAPACITY + 5])
    found = numbers(path)
    assert found == list(range(5, told["sealed"][0]))
    assert len(found) >= CAPACITY // 2


@pytest.mark.parametrize("space", ["json", "none"])
def test_a_full_disk_at_close_is_reported_and_loses_nothing(tmp_path, space):
    class Full(QuickDisk):
        full = False

        def open(self, path, flags):
            made = flags & os.O_CREAT and path.name.startswith("tmp-")
            if self.full and made and space not in path.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().open(path, flags)

    path = make(tmp_path / "b")
    disk = Full()
    with using(disk):
        buffer = mr.ReplayBuffer.open(tmp_path / "b", "r+")
        fill(buffer, CAPACITY, 200)
        disk.full = True
        fill(buffer, CAPACITY + 200, 5)
        told = r"cannot seal the newest rows \(no space left\).*'r\+', and close it"
        with pytest.raises(FullError, match=told):
            buffer.close()
        buffer.close()
        disk.full = False
        told = about(path)
        assert ("sealed" in told) == (space == "json")
        assert "sealed" not in told or told["sealed"] < told["stop"]
        with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
            assert buffer.recovery.how == "clean"
            assert buffer.committed.tolist() == [269]
        assert numbers(tmp_path / "b") == list(range(205, 269))
        mr.ReplayBuffer.open(tmp_path / "b", "r+").close()
    assert numbers(path) == list(range(205, 269))


@pytest.mark.parametrize("short", ["files", "memory", "kernel memory"])
@pytest.mark.parametrize("space", ["json", "none"])
def test_a_shortage_of_files_or_memory_is_reported_at_close_and_loses_nothing(
    tmp_path, space, short
):
    class Short(QuickDisk):
        wanting = False

        def open(self, path, flags):
            made = flags & os.O_CREAT and path.name.startswith("tmp-")
            if self.wanting and made and space not in path.name:
                if short == "memory":
                    raise MemoryError
                number = errno.EMFILE if short == "files" else errno.ENOMEM
                raise OSError(number, os.strerror(number))
            return super().open(path, flags)

    path = make(tmp_path / "b")
    disk = Short()
    with using(disk):
        buffer = mr.ReplayBuffer.open(tmp_path / "b", "r+")
        fill(buffer, CAPACITY, 200)
        buffer._files.store.sealing._sealer.drain()
        # What is short ends neither the sealing nor the writing.
        disk.wanting = True
        fill(buffer, CAPACITY + 200, 60)
        buffer._files.store.sealing._sealer.drain()
        buffer.commit()
        fill(buffer, CAPACITY + 260, 5)
        got = "too many open files.* Close" if short == "files" else "not enough"
        with pytest.raises(FailedError, match=rf"\({got}.*'r\+', and close it"):
            buffer.close()
        disk.wanting = False
        with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
            assert buffer.recovery.how == "clean"
            assert buffer.committed.tolist() == [329]
        assert numbers(tmp_path / "b") == list(range(265, 329))
        mr.ReplayBuffer.open(tmp_path / "b", "r+").close()
    assert numbers(path) == list(range(265, 329))


def no_thread(*_):
    raise RuntimeError("can't start new thread")


def test_a_shortage_of_threads_is_reported_at_close_without_a_wait(tmp_path, monkeypatch):
    with using(QuickDisk()):
        path = make(tmp_path / "b")
        buffer = mr.ReplayBuffer.open(tmp_path / "b", "r+")
        with monkeypatch.context() as scarce:
            scarce.setattr(_thread, "start_new_thread", no_thread)
            for first in range(CAPACITY, CAPACITY + 600, 30):
                fill(buffer, first, 30)
            got = r"\(no thread left\); no row .*End other threads or processes, open"
            with pytest.raises(FailedError, match=got):
                buffer.close()
        with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
            assert buffer.recovery.how == "clean"
            assert buffer.committed.tolist() == [664]
        mr.ReplayBuffer.open(tmp_path / "b", "r+").close()
    assert numbers(path) == list(range(600, 664))


def test_a_thread_that_comes_later_seals_what_waits(tmp_path, monkeypatch):
    with using(QuickDisk()):
        buffer = mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, CAPACITY, engine="zarr")
        with monkeypatch.context() as scarce:
            scarce.setattr(_thread, "start_new_thread", no_thread)
            fill(buffer, 0, 150)
        fill(buffer, 150, 150)
        buffer.close()
        path = mr.ReplayBuffer.open(tmp_path / "b").zarr_path
    assert numbers(path) == list(range(236, 300))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
@pytest.mark.parametrize("copy", ["compact", "load"])
def test_a_copy_whose_shards_do_not_fit_on_the_disk_is_removed(tmp_path, copy, number):
    class Full(QuickDisk):
        def open(self, path, flags):
            if path.name == "tmp-0":
                raise OSError(number, os.strerror(number))
            return super().open(path, flags)

    make(tmp_path / "m", engine="memmap")
    mr.export(tmp_path / "m", tmp_path / "m.npz")
    made = {
        "compact": lambda path: mr.compact(tmp_path / "m", path),
        "load": lambda path: mr.load(tmp_path / "m.npz", path, engine="zarr"),
    }
    kind = FullError if number == errno.ENOSPC else FailedError
    told = r"newest rows .*; the new buffer was not made\. .*, and call again"
    with using(Full()), pytest.raises(kind, match=told):
        made[copy](tmp_path / "c")
    assert not (tmp_path / "c" / "metadata.json").exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("failing", ["tmp-0", "tmp-zarr.json"])
def test_a_device_that_fails_a_shard_keeps_no_row_from_a_commit(tmp_path, failing, number):
    class Failing(QuickDisk):
        fails = False

        def open(self, path, flags):
            if self.fails and flags & os.O_CREAT and path.name == failing:
                raise OSError(number, os.strerror(number))
            return super().open(path, flags)

    disk = Failing()
    with using(disk):
        path = make(tmp_path / "b")
        buffer = mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None)
        fill(buffer, CAPACITY, 64)
        buffer.commit()
        disk.fails = True
        fill(buffer, 128, 64)
        buffer._files.store.sealing._sealer.drain()
        told = (
            rf"cannot seal .*zarr: cannot create .*{failing}: {os.strerror(number)}.*"
            r"\. Every row added so far is committed: close the buffer and open it"
        )
        if failing == "tmp-0":
            for stop in (192, 193):
                with pytest.raises(FailedError, match=told) as caught:
                    buffer.commit()
                assert caught.value.errno == number
                assert buffer.committed.tolist() == [stop]
                fill(buffer, stop, 1)
        with pytest.raises(FailedError, match=told):
            buffer.close()
        disk.fails = False
        stop = 194 if failing == "tmp-0" else 192
        with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
            assert buffer.recovery.how == "clean"
            assert buffer.committed.tolist() == [stop]
        assert verify_buffer(tmp_path / "b").findings == ()
        mr.ReplayBuffer.open(tmp_path / "b", "r+").close()
    assert numbers(path) == list(range(stop - 64, stop))


@pytest.mark.parametrize("copy", ["compact", "load"])
def test_a_device_that_fails_a_shard_of_a_copy_makes_none(tmp_path, copy):
    class Failing(QuickDisk):
        def open(self, path, flags):
            if path.name == "tmp-0":
                raise OSError(errno.EIO, "Input/output error")
            return super().open(path, flags)

    make(tmp_path / "m", engine="memmap")
    mr.export(tmp_path / "m", tmp_path / "m.npz")
    made = {
        "compact": lambda path: mr.compact(tmp_path / "m", path),
        "load": lambda path: mr.load(tmp_path / "m.npz", path, engine="zarr"),
    }
    told = "cannot seal .*: cannot create .*tmp-0: Input/output error .*the buffer ag.*$"
    with using(Failing()), pytest.raises(FailedError, match=told):
        made[copy](tmp_path / "c")
    assert not (tmp_path / "c" / "metadata.json").exists()


@pytest.mark.parametrize("name", ["tmp-obs", "tmp-0", "x/tmp-1", "tmp-a/tmp-b", "tmp-zarr.json"])
def test_fields_may_be_called_as_what_is_swept_is(tmp_path, name):
    schema = mr.Schema.from_flat({name: mr.Field((), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "m", schema, CAPACITY) as buffer:
        buffer.extend({name: np.arange(50)})
    mr.compact(tmp_path / "m", tmp_path / "b")
    mr.ReplayBuffer.open(tmp_path / "b", "r+").close()
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert buffer.gather_all()[name].tolist() == list(range(50))
        group = zarr.open_group(buffer.zarr_path, mode="r")
    # Below the first segment nothing is swept, and buffers of old have the name.
    folder = name if name[0] == "x" else f"tmp%2D{name[4:].replace('.', '%2E')}"
    found = group[folder][0, :50]
    assert found.tolist() == list(range(50))


@pytest.mark.parametrize("name", ["%flags", 90 * "é", f"a/{128 * '_'}"])
def test_names_that_no_array_can_have_are_refused(tmp_path, name):
    schema = mr.Schema.from_flat({name: mr.Field((), "int64")})
    with pytest.raises(SchemaError, match="cannot be the name of a Zarr array"):
        mr.ReplayBuffer.create(tmp_path / "b", schema, CAPACITY, engine="zarr")
    assert not (tmp_path / "b").exists()
    with mr.ReplayBuffer.create(tmp_path / "m", schema, CAPACITY) as buffer:
        buffer.extend({name: np.arange(5)})
    with pytest.raises(SchemaError, match="cannot be the name of a Zarr array"):
        mr.compact(tmp_path / "m", tmp_path / "c")
    make(tmp_path / "z")
    with mr.ReplayBuffer.open(tmp_path / "z", "r+") as buffer:
        with pytest.raises(SchemaError, match="cannot be the name of a Zarr array"):
            buffer.add_field(name, mr.Field((), "int64"), 0)
        fill(buffer, CAPACITY, 1)


def test_a_mutable_fields_name_may_be_longer_than_any_arrays(tmp_path):
    name = 90 * "é"
    schema = mr.Schema.from_flat(
        {"x": mr.Field((), "int64"), name: mr.Field((), "int64", mutable=True)}
    )
    with mr.ReplayBuffer.create(tmp_path / "b", schema, CAPACITY, engine="zarr") as buffer:
        buffer.extend({"x": np.arange(9), name: np.arange(9)})
        buffer.resize(2 * CAPACITY)
        assert buffer.gather_all()[name].tolist() == list(range(9))


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
def test_compression_counts_rows_that_were_written(tmp_path, rng, layout):
    schema = mr.Schema({"noise": mr.Field((64,), "uint8")})
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema, 10_000, 2, engine="zarr", layout=layout, autoreset="disabled"
    ) as buffer:
        buffer.extend(noise=rng.integers(0, 256, (100, 2, 64), np.uint8))
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        packed, raw = buffer.compression["noise"]
    assert raw == 100 * 2 * 64
    assert packed >= raw


def test_sealing_keeps_no_memory(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, CAPACITY, engine="zarr") as buffer:
        fill(buffer, 0, 200)
        buffer._files.store.sealing._sealer.drain()
        assert len(buffer._files.store.sealing.states.sealed()) > 1
        assert buffer._files.store._staging._buffers.nbytes == 0
