"""Rows in files keep the contract, come back after opening, and are checked."""

import errno
import gc
import os

import google_crc32c
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import NEW_PAGES_NBYTES
from mmreplay.errors import CorruptError, FailedError, FormatError, FullError
from mmreplay.ring import Ring, runs
from mmreplay.storage import write_path
from mmreplay.storage.memmap import MemmapStore
from mmreplay.testing.disks import FaultyDisk, WatchedDisk, using
from mmreplay.testing.stores import SCHEMA, STORED, bits
from tests.contracts.store import StoreContract


class TestMemmapStore(StoreContract):
    def make(self, ring, schema, tmp_path):
        return MemmapStore.create_rows(tmp_path, ring, schema)

    def open(self, ring, schema, tmp_path):
        return MemmapStore.open_rows(tmp_path, ring, schema, writable=True)

    def test_a_block_is_summed_as_the_format_says(self, ring, tmp_path, rng):
        schema = mr.Schema(
            {
                "small": mr.Field((3,), "int16"),
                "wide": mr.Field((512,), "float64"),
                "notes": mr.Field((), "float32", mutable=True),
            }
        )
        ring = Ring.sized(40, 3, ring.layout)
        store = MemmapStore.create_rows(tmp_path, ring, schema)
        first = ring.block_rows * (ring.num_blocks + 3)
        positions = np.arange(first, first + ring.block_rows)
        rows = ring.rows(np.full(len(positions), 2), positions)
        columns = self.columns(len(rows), rng, schema)
        flags = rng.integers(0, 64, len(rows)).astype(np.uint8)
        store.write(runs(rows), columns, flags)
        block = first // ring.block_rows
        records = np.zeros((len(rows), 8), np.uint8)
        records[:, :6] = bits(columns["small"])
        message = first.to_bytes(8, "little") + flags.tobytes() + records.tobytes()
        expected = google_crc32c.value(message + columns["wide"].tobytes())
        assert store.checksum(2, block) == expected
        store.set("notes", rows, np.ones(len(rows), np.float32))
        assert store.checksum(2, block) == expected
        store.write_sums(2, block, np.array([expected], np.uint32))
        assert store.read_sum(2, block) == (expected, 1)
        store.close()

    def test_a_new_store_takes_no_space(self, tmp_path):
        ring = Ring.sized(1_000_000_000, 2)
        store = MemmapStore.create_rows(tmp_path, ring, SCHEMA)
        apparent, allocated = store.disk_nbytes()
        assert apparent > 1 << 42
        assert allocated == 0
        store.close()

    @pytest.mark.parametrize("env_id", [0, 1, 2])
    def test_any_environment_of_a_time_major_ring_has_its_space_reserved(self, tmp_path, env_id):
        ring = Ring.sized(4000, 3, "time_major")
        store = MemmapStore.create_rows(tmp_path, ring, SCHEMA)
        none = np.zeros(3, np.int64)
        store.allocate(none, np.where(np.arange(3) == env_id, 200, none))
        apparent, allocated = store.disk_nbytes()
        assert allocated >= apparent * 200 / ring.slots * 0.9
        store.close()

    def test_reading_on_in_a_store_that_another_thread_closed(self, store):
        # Pages of a mapping outlive its file: told missing, they are asked for.
        for pages in store._pages.values():
            pages._resident = lambda rows, count: False
        rows = np.arange(4)
        before = store.gather(rows, STORED)
        store.close()
        # A draw that had begun reads to its end: nobody is asked, and nothing is wrong.
        store.prefetch(rows, STORED)
        after = store.gather(rows, STORED)
        assert all((after[path] == before[path]).all() for path in before)

    def test_a_reader_cannot_write(self, store, ring, tmp_path):
        reader = MemmapStore.open_rows(tmp_path, ring, SCHEMA, writable=False)
        columns = self.columns(1, np.random.default_rng(0))
        with pytest.raises(
            FailedError, match=r"cannot write .*/flags\.bin: it was opened for reading\. "
        ):
            reader.write([(0, 0, 1)], columns, np.ones(1, "u1"))
        with pytest.raises(FailedError, match=r"sums\.bin: it was opened for reading"):
            reader.write_sums(0, 0, np.ones(1, np.uint32))
        with pytest.raises(ValueError, match="read-only"):
            reader.all_flags[0] = 1
        reader.close()

    @pytest.mark.parametrize(
        ("number", "error", "message"),
        [
            (errno.ENOSPC, FullError, "No space left on device.*Free space"),
            (errno.EIO, FailedError, "Input/output error"),
            (errno.EROFS, FailedError, "Read-only file system"),
        ],
    )
    def test_a_write_that_fails_names_the_file(
        self, store, number, error, message, rng, monkeypatch
    ):
        # A step that is stored again has no error to raise.
        monkeypatch.setattr(write_path, "SHORT_NBYTES", 0)
        columns, flags = self.columns(2, rng), np.ones(2, np.uint8)
        with using(WatchedDisk()) as disk:
            store.write([(5, 0, 2)], columns, flags)
        assert disk.calls["pwrite"] > 3
        fault = OSError(number, os.strerror(number))
        for at in range(disk.calls["pwrite"]):
            with (
                using(FaultyDisk(fault, at=at, names=("pwrite",))),
                pytest.raises(error, match=rf"cannot write {store_folder(store)}.*{message}"),
            ):
                store.write([(5, 0, 2)], columns, flags)

    def test_short_writes_are_finished(self, store, rng):
        columns = self.columns(6, rng)
        rows = np.arange(4, 10)
        with using(FaultyDisk("short", count=4, names=("pwrite",))):
            store.write(runs(rows), columns, np.arange(6, dtype=np.uint8))
        for path, array in store.gather(rows, STORED).items():
            assert (bits(array) == bits(columns[path])).all(), path

    def test_no_descriptor_is_left(self, ring, tmp_path):
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        store = MemmapStore.create_rows(tmp_path, ring, SCHEMA)
        assert len(os.listdir("/proc/self/fd")) - before < 2 * 8
        store.close()
        fault = OSError(errno.EMFILE, "too many")
        with (
            using(FaultyDisk(fault, at=3, names=("open",))),
            pytest.raises(FailedError, match="too many"),
        ):
            MemmapStore.open_rows(tmp_path, ring, SCHEMA, writable=True)
        del store
        gc.collect()
        # Mappings keep a descriptor of their own, until the last array goes.
        assert len(os.listdir("/proc/self/fd")) == before


def store_folder(store):
    return store._flags_file.path.parent


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("missing", CorruptError, "flags.bin is missing. Restore"),
        ("short", CorruptError, r"flags.bin has \d+ bytes, but metadata.json says"),
        ("long", CorruptError, r"flags.bin has \d+ bytes, but metadata.json says"),
        ("link", FormatError, "flags.bin is not a regular file, but a link"),
        ("folder", FormatError, "flags.bin is not a regular file, but a link"),
        ("pipe", FormatError, "flags.bin is not a regular file, but a link"),
    ],
)
@pytest.mark.parametrize("writable", [False, True])
def test_files_that_are_not_what_they_should_be(tmp_path, damage, error, message, writable):
    ring = Ring.sized(9, 2)
    MemmapStore.create_rows(tmp_path, ring, SCHEMA).close()
    path = tmp_path / "flags.bin"
    data = path.read_bytes()
    path.unlink()
    if damage == "short":
        path.write_bytes(data[:-1])
    elif damage == "long":
        path.write_bytes(data + b"x")
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message):
        MemmapStore.open_rows(tmp_path, ring, SCHEMA, writable=writable)
    assert len(os.listdir("/proc/self/fd")) == before


def test_records_over_old_ones_are_written_in_one_call(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(write_path, "LEAST_NBYTES", 1 << 40)
    schema = mr.Schema({"small": mr.Field((500,), "uint8")})
    store = MemmapStore.create_rows(tmp_path, Ring.sized(300, 1), schema)
    values = rng.integers(0, 256, (200, 500), np.uint8)
    calls = []
    for first in (0, 100, 50, 90):
        with using(WatchedDisk()) as disk:
            store.write([(first, 0, 200)], {"small": values}, np.zeros(200, np.uint8))
        calls.append(disk.calls["pwrite"] + disk.calls["store"] - 1)
        rows = np.arange(first, first + 200)
        assert np.array_equal(store.gather(rows, ["small"])["small"], values)
    # New pages are written in pieces.
    assert calls == [-(-200 * 504 // NEW_PAGES_NBYTES), 1, 1, 1]
    store.close()


def test_many_rows_in_order_come_as_columns_of_their_own(tmp_path, rng):
    schema = mr.Schema(
        {
            "observation": mr.Field((17,), "float32"),
            "action": mr.Field((), "int64"),
            "seen": mr.Field((3,), "bool"),
            "terminated": mr.Field((), "bool"),
        }
    )
    store = MemmapStore.create_rows(tmp_path, Ring.sized(6000, 1), schema)
    columns = {
        "observation": rng.standard_normal((5000, 17), np.float32),
        "action": rng.integers(-9, 9, 5000),
        "seen": rng.random((5000, 3)) < 0.5,
    }
    store.write([(40, 0, 5000)], columns, np.zeros(5000, np.uint8))
    paths = tuple(columns)
    for first, count in ((0, 5000), (11, 1024), (3, 1023)):
        rows = np.arange(40 + first, 40 + first + count)
        found = store.gather(rows, paths)
        assert all(a.flags.c_contiguous for a in found.values()) == (count >= 1024)
        mixed = store.gather(rows[::-1], paths)
        for path, array in found.items():
            expected = columns[path][first : first + count]
            assert array.dtype == expected.dtype
            assert np.array_equal(array, expected)
            assert np.array_equal(mixed[path], expected[::-1])
    assert set(store.gather(np.arange(40, 2040), ("action",))) == {"action"}
    store.close()
