"""Stretches stored through a mapping are what a write would have left, or nothing."""

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk import files
from mmreplay.disk.calls import Disk
from mmreplay.disk.files import NEW_PAGES_NBYTES, File
from mmreplay.errors import FailedError, FullError
from mmreplay.ring import Ring
from mmreplay.storage import write_path
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.write_path import LEAST_NBYTES, SHORT_NBYTES, WARM_CALLS, MappedWriter
from mmreplay.testing.disks import FaultyDisk, WatchedDisk, using

SCHEMA = mr.Schema(
    {
        "wide": mr.Field((17,), "float32"),
        "odd": mr.Field((3,), "int8"),
        "one": mr.Field((), "float64"),
    }
)


class StoringDisk(WatchedDisk):
    """A disk on which a mapping is filled as it is on the real one, and counted."""

    def fill(self, fd, mapping, offset, nbytes, pack, data):
        self.watch("fill")
        Disk.fill(self, fd, mapping, offset, nbytes, pack, data)


def block(count, rng):
    return {
        path: rng.integers(-9, 9, (count, *field.shape)).astype(field.numpy)
        for path, field in SCHEMA.fields.items()
    }


@pytest.fixture
def stores(tmp_path):
    """Whether stretches are stored where the test's files are."""
    kind = files.file_system(tmp_path)
    if kind not in files.KEEPS_PAGES:
        pytest.skip(f"{kind} is written, never stored into")


def written(path):
    """A store whose rows were all written once, as later laps find it."""
    store = MemmapStore.create_rows(path, Ring.sized(3000, 1), SCHEMA)
    count = store.ring.slots
    store.allocate(np.zeros(1, np.int64), np.full(1, count))
    rows = {p: np.zeros((count, *f.shape), f.numpy) for p, f in SCHEMA.fields.items()}
    store.write([(0, 0, count)], rows, np.zeros(count, np.uint8))
    return store


@pytest.mark.parametrize("first", [0, 1, 7, 37])
def test_what_is_stored_is_what_is_written(tmp_path, rng, stores, monkeypatch, first):
    values = block(1000, rng)
    files = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(write_path, "LEAST_NBYTES", least)
        (tmp_path / str(least)).mkdir()
        store = written(tmp_path / str(least))
        with using(StoringDisk()) as disk:
            for row, a, b in ((first, 0, 700), (first + 700, 700, 1000), (5, 90, 92)):
                store.write([(row, a, b)], values, np.zeros(b - a, np.uint8))
            # Over old rows as well: padding stays zeros.
            store.write([(first, 300, 900)], values, np.zeros(600, np.uint8))
        assert (disk.calls["fill"] > 0) == (least == 1)
        files.append((store.files[1].path).read_bytes())
        store.close()
    assert files[0] == files[1]


def test_a_short_range_is_written(tmp_path, rng, stores):
    store = written(tmp_path)
    values = block(1000, rng)
    rows = -(-LEAST_NBYTES // 80)
    for first, count, calls in ((0, rows - 1, 0), (rows - 1, rows, 1)):
        with using(StoringDisk()) as disk:
            store.write([(first, 0, count)], values, np.zeros(count, np.uint8))
        # Flags are short enough to be stored as a step's are.
        assert (disk.calls["fill"], disk.calls["pwrite"]) == (calls, 1 - calls)
        assert disk.calls["store"] == 1
    store.close()


def test_a_few_rows_are_put_as_one_step_is(tmp_path, rng, stores):
    store = written(tmp_path)
    values = block(200, rng)
    rows = SHORT_NBYTES // 80
    for first, count, writes in ((0, 2, 0), (2, rows, 0), (2 + rows, rows + 1, 1)):
        with using(StoringDisk()) as disk:
            store.write([(first, 0, count)], values, np.zeros(count, np.uint8))
        assert (disk.calls["fill"], disk.calls["pwrite"]) == (0, writes)
        # Those of the flags, and of the records.
        assert disk.calls["store"] == 2 - writes
        found = store.gather(np.arange(first, first + count), list(values))
        assert all(np.array_equal(found[p], values[p][:count]) for p in values)
    store.close()


def test_the_doubles_of_the_disk_see_what_is_stored(tmp_path, rng, stores):
    store = written(tmp_path)
    values = block(1000, rng)
    with using(WatchedDisk()) as disk:
        store.write([(0, 0, 1000)], values, np.zeros(1000, np.uint8))
    assert disk.calls["store"] == 2
    found = store.gather(np.arange(1000), list(values))
    assert all(np.array_equal(found[path], values[path]) for path in values)
    store.close()


@pytest.mark.parametrize("number", [errno.EFAULT, errno.EINVAL, errno.ENOMEM])
def test_pages_that_cannot_be_had_are_written(tmp_path, rng, stores, number):
    class Refusing(StoringDisk):
        def populate(self, address, nbytes):
            raise OSError(number, "no page")

    store = written(tmp_path)
    values = block(1000, rng)
    with using(Refusing()) as disk:
        store.write([(0, 0, 1000)], values, np.zeros(1000, np.uint8))
    assert disk.calls["store"] == 0
    assert np.array_equal(store.gather(np.arange(1000), ["wide"])["wide"], values["wide"])
    store.close()


def test_a_full_disk_is_the_error_of_a_write(tmp_path, rng, stores):
    class Full(FaultyDisk):
        def populate(self, address, nbytes):
            raise OSError(errno.EFAULT, "a store would be a SIGBUS")

    store = written(tmp_path)
    values = block(1000, rng)
    full = Full(OSError(errno.ENOSPC, "full"), names=("pwrite",))
    with using(full), pytest.raises(FullError, match=r"records\.bin"):
        store.write([(0, 0, 1000)], values, np.zeros(1000, np.uint8))
    store.close()


def test_a_populated_hole_is_an_error_where_a_store_would_kill(tmp_path):
    # Past the end of the file, a store is a SIGBUS on every system.
    file = File.create(tmp_path / "a", 4 * mmap.PAGESIZE)
    mapping = file.map_to_fill()
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    Disk().populate(address, 4 * mmap.PAGESIZE)
    file.resize(mmap.PAGESIZE)
    with pytest.raises(OSError, match="cannot populate"):
        Disk().populate(address, 4 * mmap.PAGESIZE)
    file.close()


def reached(file):
    """A way into a file that is at its end, and may be stored into below."""
    way = MappedWriter(file)
    way.write(memoryview(b"z"), file.nbytes - 1)
    return way


def filled(way, offset, count=LEAST_NBYTES):
    def pack(out):
        out[:] = b"x" * count

    return way.fill(offset, count, pack, ())


def test_pages_of_which_the_disk_knows_more_are_not_read_to_be_overwritten(
    tmp_path, stores, monkeypatch
):
    file = File.create(tmp_path / "a", 64 * LEAST_NBYTES)
    there = []
    way = reached(file)
    monkeypatch.setattr(way, "_in_memory", lambda first, nbytes: there.pop())
    there[:] = [False]
    assert not filled(way, 0)
    there[:] = [True]
    assert filled(way, 0)
    # While pages are found there, not every stretch is looked at.
    assert all(filled(way, LEAST_NBYTES // 2) for _ in range(WARM_CALLS))
    there[:] = [False]
    assert not filled(way, LEAST_NBYTES // 2)
    file.close()


def test_pages_are_looked_for_in_memory(tmp_path, stores):
    file = File.create(tmp_path / "a", 64 * LEAST_NBYTES)
    file.allocate(0, file.nbytes)
    way = reached(file)
    assert not filled(way, LEAST_NBYTES)
    file.pwrite(b"y" * 2 * LEAST_NBYTES, 0)
    assert filled(way, LEAST_NBYTES)
    assert file.pread(LEAST_NBYTES, LEAST_NBYTES) == b"x" * LEAST_NBYTES
    file.close()


def test_a_first_lap_is_stored_into_a_sixteenth_of_free_memory(tmp_path, stores, monkeypatch):
    blocks = 20
    file = File.create(tmp_path / "a", 4 * blocks * LEAST_NBYTES)
    file.allocate(0, file.nbytes)
    looks = []

    def available_nbytes():
        looks.append(None)
        return 16 * blocks * LEAST_NBYTES

    monkeypatch.setattr(write_path, "available_nbytes", available_nbytes)
    way = MappedWriter(file)

    def filled(number):
        def pack(out):
            out[:] = b"x" * LEAST_NBYTES

        # Two environments take turns, whose rows are apart.
        at = (number // 2 + number % 2 * 2 * blocks) * LEAST_NBYTES
        return way.fill(at, LEAST_NBYTES, pack, (), fresh=True)

    assert [filled(n) for n in range(2 * blocks)] == [True] * blocks + [False] * blocks
    # What was stored makes no difference to what is left of memory later.
    assert len(looks) == 1
    file.close()


def test_a_file_that_cannot_be_mapped_is_written(tmp_path, stores, monkeypatch):
    file = File.create(tmp_path / "a", 4 * LEAST_NBYTES)

    def refuse(self):
        raise FailedError("no address space")

    monkeypatch.setattr(File, "map_to_fill", refuse)
    way = reached(file)
    assert not filled(way, 0)
    assert not filled(way, 0)
    file.close()


@pytest.mark.parametrize("kind", ["btrfs", "nfs", "?"])
def test_file_systems_that_promise_no_page_are_written(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(write_path, "file_system", lambda path: kind)
    file = File.create(tmp_path / "a", 4 * LEAST_NBYTES)
    assert not filled(reached(file), 0)
    file.close()


def test_new_pages_are_written(tmp_path, stores):
    file = File.create(tmp_path / "a", 8 * LEAST_NBYTES)
    file.pwrite(bytes(file.nbytes), 0)  # by somebody before, and in memory
    way = MappedWriter(file)
    assert not filled(way, 0)
    way.write(memoryview(b"x" * LEAST_NBYTES), 0)
    assert filled(way, LEAST_NBYTES // 2)
    # What is stored beyond the end is reached as well.
    assert filled(way, LEAST_NBYTES)
    assert not filled(way, 3 * LEAST_NBYTES)
    file.close()


def test_new_pages_are_written_in_chunks_of_the_file(tmp_path, rng):
    data = rng.bytes(5 * NEW_PAGES_NBYTES)
    file = File.create(tmp_path / "a", 8 * NEW_PAGES_NBYTES)
    ways = {first: MappedWriter(file) for first in (0, 100)}
    for first, offset, calls in ((0, 0, 5), (100, 100, 6), (100, 90, 1)):
        with using(WatchedDisk()) as disk:
            ways[first].write(memoryview(data), offset)
        assert disk.calls["pwrite"] == calls
        assert file.pread(len(data), offset) == data
    file.close()


def test_a_partly_written_chunk_is_completed(tmp_path, rng):
    data = rng.bytes(3 * NEW_PAGES_NBYTES)
    file = File.create(tmp_path / "a", 4 * NEW_PAGES_NBYTES)
    with using(FaultyDisk("short", count=2, names=("pwrite",))):
        file.pwrite_new_pages(memoryview(data), 100)
    assert file.pread(len(data), 100) == data
    full = FaultyDisk(OSError(errno.ENOSPC, "full"), at=1, names=("pwrite",))
    with using(full), pytest.raises(FullError, match="write"):
        file.pwrite_new_pages(memoryview(data), 0)
    file.close()


def test_a_file_that_was_closed_is_stored_into_no_more(tmp_path):
    file = File.create(tmp_path / "a", 8192)
    way = MappedWriter(file)
    for offset in (0, 4096, 0, 100):  # two of a first lap, and later ones
        way.put(b"a" * 10, offset, 10)
    before = file.pread(8192, 0)
    file.close()
    with using(WatchedDisk()) as disk, pytest.raises(FailedError, match="write"):
        way.put(b"b" * 10, 110, 10)
    assert not disk.calls["store"]
    assert (tmp_path / "a").read_bytes() == before


def test_a_step_outside_the_prepared_range_is_prepared_itself(tmp_path, stores, rng):
    """At any place and order, the file holds what was put there last."""
    expected = bytearray(40 * write_path.NEAR_NBYTES)
    file = File.create(tmp_path / "a", len(expected))
    way = MappedWriter(file)
    # What steps are stored into was written once, all of it.
    first = rng.bytes(len(expected) // 2)
    way.write(memoryview(first), 0)
    expected[: len(first)] = first
    with using(WatchedDisk()) as disk:
        for number in range(3000):
            nbytes = int(rng.integers(1, 5000))
            offset = int(rng.integers(0, len(expected) - nbytes))
            if number % 3:
                offset = min(offset // 40, len(expected) - nbytes)
            data = rng.bytes(nbytes)
            way.put(data, offset, nbytes)
            expected[offset : offset + nbytes] = data
    assert disk.calls["store"] > 100
    assert disk.calls["pwrite"] > 100
    assert file.pread(len(expected), 0) == expected
    file.close()


@pytest.mark.parametrize(
    ("step_nbytes", "expected"),
    [(8, 64 << 10), (168, 64 << 10), (1024, 192 << 10), (4096, 256 << 10)],
)
def test_long_steps_are_asked_for_further_ahead(tmp_path, stores, step_nbytes, expected):
    asked = []

    class Asked(WatchedDisk):
        def populate(self, address, nbytes):
            asked.append(nbytes)
            super().populate(address, nbytes)

    file = File.create(tmp_path / "a", 1 << 20)
    way = MappedWriter(file)
    way.write(memoryview(bytes(file.nbytes)), 0)
    with using(Asked()):
        way.put(bytes(step_nbytes), 0, step_nbytes)
        # Near the end of what was written there is less.
        way.put(bytes(step_nbytes), file.nbytes - step_nbytes, step_nbytes)
    assert asked == [expected, mmap.PAGESIZE]
    assert way.far == file.nbytes
    file.close()


def test_steps_far_from_each_other_are_written(tmp_path, stores, monkeypatch):
    """Such as those of environments in turns whose heads are apart."""
    asked = []

    class Asked(WatchedDisk):
        def populate(self, address, nbytes):
            asked.append(address)
            super().populate(address, nbytes)

    monkeypatch.setattr(write_path, "NEAR_S", 1e9)
    file = File.create(tmp_path / "a", 40 * write_path.NEAR_NBYTES)
    way = MappedWriter(file)
    way.write(memoryview(bytes(file.nbytes)), 0)
    places = [number * 10 * write_path.NEAR_NBYTES for number in range(3)]
    count = 20 * (write_path.RESTS + write_path.JUMPS)
    with using(Asked()):
        for number in range(count):
            way.put(b"abcd", places[number % 3] + number * 4, 4)
    assert 0 < len(asked) <= count // 10
    asked.clear()
    # One place, which moves on, is asked for ahead again.
    steps = 5 * write_path.NEAR_NBYTES // 512
    with using(Asked()) as disk:
        for number in range(steps):
            way.put(bytes(512), 35 * write_path.NEAR_NBYTES + number * 512, 512)
    assert 4 <= len(asked) <= 5
    assert disk.calls["store"] >= steps - write_path.RESTS
    file.close()


def advised_pages(path):
    """Whether large pages were advised for each mapping of a file that is writable."""
    found, named = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            named = line.endswith(str(path)) and " rw-s " in line
        elif named and line.startswith("VmFlags:"):
            found.append("hg" in line.split())
    return found


@pytest.mark.parametrize(
    ("num_envs", "layout"), [(1, "env_major"), (3, "time_major"), (3, "env_major")]
)
def test_large_pages_are_for_rows_that_follow_each_other(tmp_path, stores, num_envs, layout):
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no large pages")
    buffer = mr.ReplayBuffer.create(
        tmp_path / "a", SCHEMA, 90_000, num_envs=num_envs, layout=layout, autoreset="disabled"
    )
    steps = {
        path: np.ones((9000, num_envs, *field.shape), field.numpy)
        for path, field in SCHEMA.fields.items()
    }
    buffer.extend(steps)
    (records,) = tmp_path.rglob("records.bin")
    (flags,) = tmp_path.rglob("flags.bin")
    assert any(advised_pages(records)) == (num_envs == 1 or layout == "time_major")
    assert not any(advised_pages(flags))
    buffer.close()
