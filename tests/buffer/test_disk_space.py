"""Rings that their disk cannot hold: told before there is a row."""

import re
import resource
import shutil
import warnings
from collections import namedtuple

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import opening
from mmreplay.cli.run import run
from mmreplay.errors import FullWarning
from mmreplay.plan import plan_buffer

SCHEMA = mr.Schema({"pixels": mr.Field((8192,), "uint8"), "action": mr.Field((), "int64")})
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def disk(monkeypatch):
    """A disk of 1 GiB with as much room as is put into it."""
    room, total = {"free": 0}, 1 << 30
    usage = lambda path: Usage(total, total - room["free"], room["free"])  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    return room


def create(path, capacity=1000, **options):
    options.setdefault("autoreset", "disabled")
    return mr.ReplayBuffer.create(path, SCHEMA, capacity, **options)


def files_nbytes(path):
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


@pytest.fixture
def warned_by():
    """What a call warns of, in whose line."""

    def call(method, *args, **options):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            made = method(*args, **options)
        assert {w.category for w in found} <= {FullWarning}
        assert {w.filename for w in found} <= {__file__}
        return made, [str(w.message) for w in found]

    return call


def test_a_ring_larger_than_its_disk_warns(tmp_path, disk, warned_by):
    path = tmp_path / "not" / "there"
    disk["free"] = 3 << 20
    with pytest.warns(
        FullWarning,
        match=rf"{re.escape(str(path))}: the full ring takes 8\.\d\d MiB and needs "
        r"8\.\d\d MiB more, but its disk has 3.00 MiB free, so adds will raise "
        r"FullError. Free some space, or choose a smaller capacity \(mmreplay plan "
        r"computes the size\)",
    ) as warned:
        create(path).close()
    assert warned[0].filename == __file__


def test_one_that_fits_to_the_byte_is_not(tmp_path, disk, warned_by):
    planned = plan_buffer(SCHEMA, 1000)
    disk["free"] = planned.nbytes - planned.commit_nbytes
    buffer, warned = warned_by(create, tmp_path / "a")
    buffer.close()
    assert warned == []
    disk["free"] -= 1
    buffer, warned = warned_by(create, tmp_path / "b")
    buffer.close()
    assert len(warned) == 1
    assert files_nbytes(tmp_path / "a") >= disk["free"]


@pytest.mark.parametrize("num_envs", [1, 3])
def test_rows_that_are_there_need_no_disk_space(tmp_path, disk, num_envs):
    """Each of a lap and a half takes what is asked for by one row less."""
    disk["free"] = 1 << 40
    with create(tmp_path / "a", 10, num_envs=num_envs) as buffer:
        ring = buffer.metadata.ring
        rows = {"pixels": np.zeros((num_envs, 8192), np.uint8), "action": 0}
    planned = plan_buffer(SCHEMA, 10, num_envs)
    row_nbytes = (planned.nbytes - planned.commit_nbytes) // ring.num_rows
    for steps in (ring.slots // 2, ring.slots // 2, ring.slots // 4):
        disk["free"] = 1 << 40
        with mr.ReplayBuffer.open(tmp_path / "a", "r+") as buffer:
            for _ in range(steps):
                buffer.add(**{**rows, "action": np.zeros(num_envs, np.int64)})
            written = int(np.minimum(buffer.span.stop, ring.slots).sum())
        left = ring.num_rows - written
        disk["free"] = (left + 1) * row_nbytes
        with mr.ReplayBuffer.open(tmp_path / "a", "r+"):
            pass
        disk["free"] = (left - 1) * row_nbytes
        if left > 0:
            with pytest.warns(FullWarning):
                mr.ReplayBuffer.open(tmp_path / "a", "r+").close()
    # Full: it takes nothing more, whatever else fills the disk.
    assert left == 0
    disk["free"] = 0
    with mr.ReplayBuffer.open(tmp_path / "a", "r+") as buffer:
        buffer.add(**{**rows, "action": np.zeros(num_envs, np.int64)})


def test_readers_do_not_warn(tmp_path, disk, warned_by):
    disk["free"] = 1 << 40
    create(tmp_path / "a").close()
    disk["free"] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mr.ReplayBuffer.open(tmp_path / "a").close()


def test_a_larger_ring_and_a_wider_row_warn(tmp_path, disk, warned_by):
    disk["free"] = 50 << 20
    buffer, warned = warned_by(create, tmp_path / "a")
    assert warned == []
    assert len(warned_by(buffer.resize, 100_000)[1]) == 1
    assert warned_by(buffer.resize, 500)[1] == []
    wide = mr.Field((1 << 20,), "uint8")
    assert len(warned_by(buffer.add_field, "wide", wide, 0)[1]) == 1
    buffer.close()


@pytest.mark.parametrize("options", [{"engine": "zarr"}, {"engine": "memory"}])
def test_rings_of_unknown_size_do_not_warn(tmp_path, disk, warned_by, options):
    path = None if options["engine"] == "memory" else tmp_path / "a"
    buffer, warned = warned_by(create, path, **options)
    assert warned == []
    assert warned_by(buffer.resize, 2000)[1] == []
    buffer.close()


def test_where_warnings_are_errors_nothing_is_made(tmp_path, disk):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FullWarning):
            create(tmp_path / "a")
        assert not (tmp_path / "a").exists()
        disk["free"] = 1 << 40
        create(tmp_path / "a").close()
        disk["free"] = 0
        with pytest.raises(FullWarning) as held:
            mr.ReplayBuffer.open(tmp_path / "a", "r+")
        disk["free"] = 1 << 40
        # The lock is free again, whoever holds the error.
        assert held.value
        with mr.ReplayBuffer.open(tmp_path / "a", "r+") as buffer:
            disk["free"] = 1 << 20
            with pytest.raises(FullWarning):
                buffer.resize(100_000)
            assert buffer.capacity == 1000
            buffer.add(pixels=np.zeros(8192, np.uint8), action=0)


def test_a_real_disk_is_asked(tmp_path):
    capacity = 2 * shutil.disk_usage(tmp_path).free // 8192
    with pytest.warns(FullWarning):
        create(tmp_path / "a", capacity).close()


def test_a_command_says_it_in_a_line(tmp_path, disk, capsys):
    disk["free"] = 1 << 40
    create(tmp_path / "a").close()
    disk["free"] = plan_buffer(SCHEMA, 1000).nbytes
    args = ["resize", str(tmp_path / "a"), "100_000", "--yes"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert run(args) == 0
    warned_by = capsys.readouterr().err
    assert warned_by.count("\n") == 1
    assert warned_by.startswith(f"mmreplay: {tmp_path / 'a'}: the full ring takes ")


def test_other_warnings_are_pythons(monkeypatch, capsys):
    def app(**_):
        warnings.warn("of something else", stacklevel=1)

    monkeypatch.setattr("mmreplay.cli.app.build", lambda: app)
    shown = warnings.showwarning
    with pytest.warns(UserWarning, match="of something else"):
        assert run([]) == 0
    assert warnings.showwarning is shown
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.filterwarnings("ignore::mmreplay.FullWarning")
def test_a_ring_that_no_file_holds_is_refused_and_leaves_nothing(tmp_path, there):
    path = tmp_path / "b"
    if there:
        path.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    warned_by = r"records.bin: File too large, so .*\. Choose a smaller capacity"
    schema = mr.Schema({"x": mr.Field((), "float64")})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(mr.FullError, match=warned_by):
            mr.ReplayBuffer.create(path, schema, 1 << 18)
        assert path.exists() == there
        with mr.ReplayBuffer.create(path, schema, 9) as buffer:
            with pytest.raises(mr.FullError, match=warned_by):
                buffer.resize(1 << 18)
            assert buffer.capacity == 9
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_creation_that_fails_leaves_what_others_put_there(tmp_path, monkeypatch):
    path = tmp_path / "b"

    def build(folder, metadata):
        (folder / "events.log").write_text("theirs")
        (folder / metadata.folder).mkdir()
        raise mr.FullError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(opening, "NewGeneration", build)
        with pytest.raises(mr.FullError, match="no space"):
            mr.ReplayBuffer.create(path, SCHEMA, 9)
    assert [each.name for each in path.iterdir()] == ["events.log"]


def test_a_buffer_made_while_the_lock_was_awaited_is_left_alone(tmp_path, monkeypatch):
    """Of two that create one path, the second finds it taken."""
    path, lock = tmp_path / "b", opening.WriterLock

    def late(folder):
        with monkeypatch.context() as patch:
            patch.setattr(opening, "WriterLock", lock)
            with mr.ReplayBuffer.create(path, SCHEMA, 9) as buffer:
                buffer.add(pixels=np.zeros(8192, np.uint8), action=1)
        return lock(folder)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "WriterLock", late)
        with pytest.raises(mr.FormatError, match=r".* already holds a buffer"):
            mr.ReplayBuffer.create(path, SCHEMA, 9)
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        assert len(buffer) == 1


def test_a_heap_larger_than_what_its_disk_has_free_warns(tmp_path, disk, warned_by):
    schema = mr.Schema({"text": mr.Field.text(max_bytes=100)})
    disk["free"] = 8 << 20
    with pytest.warns(
        FullWarning,
        match=r"the full ring takes 16\.0\d MiB and needs 16\.0\d MiB more, .* choose "
        r"a smaller capacity or heap_bytes \(mmreplay plan",
    ):
        mr.ReplayBuffer.create(tmp_path / "ring", schema, 1000, heap_bytes="16 MiB").close()
    disk["free"] = 17 << 20
    _, warned = warned_by(mr.ReplayBuffer.open, tmp_path / "ring", "r+")
    assert warned == []
