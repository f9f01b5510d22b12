"""Steps by the short route leave what the long one leaves, stored or written."""

import errno
import itertools
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.errors import FullError, SchemaError
from mmreplay.storage import write_path
from mmreplay.testing.disks import FaultyDisk, WatchedDisk, using

FIELDS = {
    "observation": mr.Field((5,), "float32"),
    "reward": mr.Field((), "float32"),
    "odd": mr.Field((3,), "int8"),
    "note": mr.Field((2,), "int16", mutable=True),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
MANY = 600
"""Environments whose rows are too long together to be stored as a step."""
RINGS = [(1, "env_major"), (3, "time_major"), (3, "env_major"), (MANY, "time_major")]


class SeenDisk(WatchedDisk):
    """A disk that counts what is stored and written, by the file's name."""

    def __init__(self):
        super().__init__()
        self.stored, self.written = {}, {}

    def store(self, fd, mapping, offset, data):
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        self.stored[name] = self.stored.get(name, 0) + 1
        super().store(fd, mapping, offset, data)

    def pwrite(self, fd, data, offset):
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        self.written[name] = self.written.get(name, 0) + 1
        return super().pwrite(fd, data, offset)


@pytest.fixture
def stores(tmp_path):
    """Whether steps are stored where the test's files are."""
    kind = files.file_system(tmp_path)
    if kind not in files.KEEPS_SPACE:
        pytest.skip(f"{kind} is written, never stored into")


def fields_of(num_envs):
    """With a long one, but of many environments."""
    if num_envs == MANY:
        return FIELDS
    return FIELDS | {"large": mr.Field((1030,), "float32")}


def step_of(num_envs, rng):
    lead = (num_envs,) if num_envs > 1 else ()
    found = {
        path: rng.integers(-99, 99, (*lead, *field.shape)).astype(field.numpy)
        for path, field in fields_of(num_envs).items()
    }
    ends = rng.random((2, *lead)) < (0.02 if num_envs < MANY else 0.001)
    # Runs of steps without an end, too, and steps at which all end.
    ends &= rng.random() < 0.3
    ends |= rng.random() < 0.02
    return found | {"terminated": ends[0], "truncated": ends[1]}


def made(path, num_envs, layout, autoreset, engine="memmap"):
    return mr.ReplayBuffer.create(
        path,
        mr.Schema(fields_of(num_envs)),
        64,
        num_envs=num_envs,
        layout=layout,
        autoreset=autoreset,
        commit_every=None,
        engine=engine,
    )


def as_lists(step):
    """What is to be converted, and so goes the long way."""
    return {path: value.tolist() for path, value in step.items()}


def rows_of(folder):
    files = [f for f in sorted(folder.glob("data-*/*")) if f.name != "COMMIT"]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize(("num_envs", "layout"), RINGS)
@pytest.mark.sliced(1)
def test_the_routes_leave_the_same_files(tmp_path, monkeypatch, num_envs, layout, autoreset):
    """Over several laps, with ends, in a buffer that is opened again."""
    found = []
    for way in ("stored", "written", "converted"):
        rng = np.random.default_rng(7)
        if way == "written":
            monkeypatch.setattr(write_path, "KEEPS_SPACE", frozenset())
        buffer = made(tmp_path / way, num_envs, layout, autoreset)
        for number in range(3 * buffer.slots):
            step = step_of(num_envs, rng)
            buffer.add(as_lists(step) if way == "converted" else step)
            if number == buffer.slots * 5 // 4:
                buffer.close()
                buffer = mr.ReplayBuffer.open(tmp_path / way, "r+", commit_every=None)
        rows = buffer.gather_all()
        buffer.close()
        assert mr.verify_buffer(tmp_path / way).ok
        found.append((rows_of(tmp_path / way), rows))
    (files, rows), *others = found
    for other_files, other_rows in others:
        assert files == other_files
        for path, values in rows.fields.items():
            assert np.array_equal(values, other_rows.fields[path])


@pytest.mark.parametrize(("num_envs", "layout"), RINGS[:3])
@pytest.mark.sliced(1)
def test_the_routes_leave_the_same_shards(tmp_path, num_envs, layout):
    found = []
    for way in ("short", "long"):
        rng = np.random.default_rng(7)
        with using(SeenDisk()) as disk:
            buffer = made(tmp_path / way, num_envs, layout, "same_step", "zarr")
            for _ in range(3 * buffer.slots):
                step = step_of(num_envs, rng)
                buffer.add(step if way == "short" else as_lists(step))
            found.append(buffer.gather_all().fields)
            buffer.close()
        # The space of sealed rows is given back: they are written, never stored.
        assert not disk.stored.keys() & {"records.bin", "f001.bin"}
        assert mr.verify_buffer(tmp_path / way).ok
    for path, values in found[0].items():
        assert np.array_equal(values, found[1][path])


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_first_lap_is_written_and_later_ones_are_stored(tmp_path, stores, num_envs):
    rng = np.random.default_rng(7)
    layout = "time_major" if num_envs > 1 else "env_major"
    buffer = made(tmp_path / "a", num_envs, layout, "same_step")
    short = {"records.bin", "flags.bin", "f000.bin"}
    written = buffer.slots
    for _ in range(2):
        with using(SeenDisk()) as disk:
            for _ in range(written):
                buffer.add(step_of(num_envs, rng))
            assert not disk.stored.keys() & short
        with using(SeenDisk()) as disk:
            for _ in range(50):
                buffer.add(step_of(num_envs, rng))
            assert {name: disk.stored[name] for name in short} == dict.fromkeys(short, 50)
            # Long rows take as long either way.
            assert disk.written["f001.bin"] >= 50
            assert not disk.written.keys() & short
        buffer.close()
        buffer = mr.ReplayBuffer.open(tmp_path / "a", "r+", commit_every=None)
        # Another opening knows of no rows that were there, up to the ring's end.
        written = buffer.slots - 50
    buffer.close()


def full_ring(path, num_envs=1, layout="env_major"):
    """A buffer in its second lap, whose steps are stored where they may be."""
    buffer = made(path, num_envs, layout, "same_step")
    rng = np.random.default_rng(3)
    for _ in range(buffer.slots + 5):
        buffer.add(step_of(num_envs, rng))
    return buffer, rng


def test_what_was_asked_for_a_second_ago_is_asked_for_again(tmp_path, stores, monkeypatch):
    asked = []

    class Asked(SeenDisk):
        def populate(self, address, nbytes):
            asked.append(nbytes)
            super().populate(address, nbytes)

    # As if a second were ten minutes, as this machine may be slow.
    monkeypatch.setattr(write_path, "NEAR_S", 600.0)
    now = itertools.count(monotonic() + 900.0, 1200.0)
    buffer, rng = full_ring(tmp_path / "a")
    with using(Asked()):
        buffer.add(step_of(1, rng))
        assert not asked
        monkeypatch.setattr(write_path, "monotonic", now.__next__)
        for _ in range(4):
            before = len(asked)
            buffer.add(step_of(1, rng))
            assert len(asked) == before + 3  # records, flags and the mutable field
    buffer.close()


def test_pages_that_cannot_be_had_are_written_and_left_for_a_while(tmp_path, stores, monkeypatch):
    class Refusing(SeenDisk):
        refused = 0

        def populate(self, address, nbytes):
            self.refused += 1
            raise OSError(errno.EFAULT, "a store would be a SIGBUS")

    monkeypatch.setattr(write_path, "RESTS", 3)
    monkeypatch.setattr(write_path, "NEAR_S", -1.0)
    buffer, rng = full_ring(tmp_path / "a")
    with using(Refusing()) as disk:
        steps = [step_of(1, rng) for _ in range(9)]
        for step in steps:
            buffer.add(step)
        # Each file is asked for once in four steps.
        assert (disk.stored.keys(), disk.refused) == ({"COMMIT"}, 3 * 3)
    head = int(buffer.heads[0])
    found = buffer.get_field("note", 0, np.arange(head - 9, head))
    assert np.array_equal(found, [step["note"] for step in steps])
    buffer.close()


@pytest.mark.parametrize("kind", ["xfs", "btrfs", "nfs", "?"])
def test_where_space_may_be_shared_steps_are_written(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(write_path, "file_system", lambda path: kind)
    buffer, rng = full_ring(tmp_path / "a")
    with using(SeenDisk()) as disk:
        buffer.add(step_of(1, rng))
    assert disk.stored.keys() <= {"COMMIT"}
    buffer.close()


def test_a_full_disk_is_the_error_of_a_write_and_loses_nothing(tmp_path, stores, monkeypatch):
    class Full(FaultyDisk):
        def populate(self, address, nbytes):
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(write_path, "NEAR_S", -1.0)
    buffer, rng = full_ring(tmp_path / "a")
    heads, before = buffer.heads, buffer.gather_all().fields
    full = Full(OSError(errno.ENOSPC, "full"), names=("pwrite",), count=99)
    with using(full), pytest.raises(FullError, match="cannot write"):
        buffer.add(step_of(1, rng))
    assert buffer.heads.tolist() == heads.tolist()
    after = buffer.gather_all().fields
    for path, values in before.items():
        assert np.array_equal(values, after[path])
    buffer.add(step_of(1, rng))
    assert buffer.heads.tolist() == (heads + 1).tolist()
    buffer.close()


BAD = {
    "a shape": (
        lambda step: {**step, "observation": step["observation"][..., :4].copy()},
        r"'observation' must be float32\[.*5\], got float32\[.*4\]",
    ),
    "a dtype": (
        lambda step: {**step, "odd": step["odd"].astype("f8")},
        r"'odd' must be int8\[.*\], got float64\[",
    ),
    "a value": (
        lambda step: {**step, "odd": (step["odd"].astype("i8") + 300).tolist()},
        "'odd': int8 must be -128 to 127, got ",
    ),
    "a name": (lambda step: {**step, "more": 1}, r"unknown fields \['more'\]"),
    "no name": (
        lambda step: {path: step[path] for path in step if path != "odd"},
        r"missing fields \['odd'\]",
    ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("num_envs", "layout"), RINGS[:3])
def test_a_bad_step_between_good_ones_is_refused_in_the_same_words(tmp_path, num_envs, layout, bad):
    spoil, words = BAD[bad]
    told = {"short": [], "long": []}
    for way, texts in told.items():
        rng = np.random.default_rng(9)
        buffer = made(tmp_path / way, num_envs, layout, "same_step")
        notes = []
        for number in range(buffer.slots + 40):
            step = step_of(num_envs, rng)
            notes.append(step["note"].reshape(num_envs, -1))
            buffer.add(step if way == "short" else as_lists(step))
            if number % 7 == 0:
                with pytest.raises(SchemaError, match=words) as raised:
                    buffer.add(spoil(step))
                texts.append(str(raised.value))
                assert (buffer.heads == number + 1).all()
        first, stop = int(buffer.span.first[0]), int(buffer.heads[0])
        for env_id in range(num_envs):
            found = buffer.get_field("note", env_id, np.arange(first, stop))
            assert np.array_equal(found, [each[env_id] for each in notes[first:]])
        buffer.close()
    assert told["short"] == told["long"]
