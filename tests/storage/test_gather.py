"""Rows come out alike through a mapping and by reading, and a policy says which."""

import os
import resource
from types import SimpleNamespace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError, SchemaError
from mmreplay.ring import Ring
from mmreplay.storage import gather
from mmreplay.storage import store as module
from mmreplay.storage.gather import READ_NBYTES, TRIES, MappedRows, ReadRows
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.read_ahead import COLD_CALLS, LONG_NBYTES
from mmreplay.storage.store import ReadPolicy
from mmreplay.testing.stores import SCHEMA, STORED
from tests.contracts.store import StoreContract

PREAD = ReadPolicy("pread")


class TestReadStore(StoreContract):
    def make(self, ring, schema, tmp_path):
        MemmapStore.create_rows(tmp_path, ring, schema).close()
        return self.open(ring, schema, tmp_path)

    def open(self, ring, schema, tmp_path):
        return MemmapStore.open_rows(tmp_path, ring, schema, writable=True, policy=PREAD)

    def test_nothing_is_mapped(self, store):
        assert not store.maps
        assert store._mapping is None
        assert store._mapped == []

    def test_checksums_are_those_of_a_mapping(self, store, ring, tmp_path, rng):
        rows = np.arange(ring.num_rows)
        store.write([(0, 0, len(rows))], self.columns(len(rows), rng), rows.astype("u1"))
        mapped = MemmapStore.open_rows(tmp_path, ring, SCHEMA, writable=False)
        for env_id in range(ring.num_envs):
            for block in range(ring.num_blocks):
                assert store.checksum(env_id, block) == mapped.checksum(env_id, block)
        mapped.close()

    def test_flags_of_ranges_are_cached_for_repeated_reads(self, store, ring):
        flags = (np.arange(ring.num_rows) % 60 + 1).astype(np.uint8)
        rng = np.random.default_rng(0)
        store.write([(0, 0, len(flags))], self.columns(len(flags), rng), flags)
        assert not store.all_flags.any()
        store.flags_between(1, 3, 9)
        known = ring.rows(np.full(6, 1), np.arange(3, 9))
        expected = np.zeros_like(flags)
        expected[known] = flags[known]
        assert (store.all_flags == expected).all()
        with pytest.raises(ValueError, match="read-only"):
            store.all_flags[0] = 1

    def test_a_closed_store_says_so(self, store):
        store.close()
        for call in (
            lambda: store.gather(np.array([1]), STORED),
            lambda: store.flags(np.array([1])),
        ):
            with pytest.raises(FailedError, match="it was closed meanwhile"):
                call()


@pytest.mark.parametrize(("kind", "maps"), [("ext4", True), ("nfs4", False)])
def test_auto_reads_where_several_hosts_may_write(tmp_path, monkeypatch, kind, maps):
    monkeypatch.setattr(module, "file_system", lambda path: kind)
    assert ReadPolicy().maps(tmp_path) is maps
    assert ReadPolicy("mmap").maps(tmp_path)
    assert not ReadPolicy("pread").maps(tmp_path)
    store = MemmapStore.create_rows(tmp_path, Ring.sized(10, 1), SCHEMA)
    assert store.maps is maps
    store.close()


@pytest.mark.parametrize("name", ["read_mode", "advise"])
@pytest.mark.parametrize("value", ["banana", None, 3])
def test_a_policy_is_one_of_those_that_there_are(tmp_path, name, value):
    with pytest.raises(SchemaError, match=rf"{name} must be one of .*, got {value!r}"):
        mr.ReplayBuffer.open(tmp_path, **{name: value})


@pytest.mark.parametrize("make", [MappedRows, ReadRows])
@pytest.mark.parametrize("shape", [(4,), (3, 1000), (900, 700)])
@pytest.mark.parametrize("step", [1, 3])
def test_rows_come_in_chunks_of_a_bounded_size(tmp_path, rng, make, shape, step):
    values = rng.integers(1 << 15, size=(8, *shape)).astype("<i2")
    place = tmp_path / "rows"
    values.tofile(place)
    file = File.open(place, values.nbytes)
    rows = make(file, values.dtype, shape, "auto")
    iter_bytes = [bytes(piece) for piece in rows.iter_bytes(1, step, 2)]
    assert b"".join(iter_bytes) == values[1 : 1 + 2 * step : step].tobytes()
    assert max(map(len, iter_bytes)) <= READ_NBYTES
    file.close()


def test_rows_gone_from_memory_are_not_fetched_page_by_page(tmp_path):
    place = tmp_path / "rows"
    place.write_bytes(bytes(300 * 28224))
    file = File.open(place, 300 * 28224)
    file.sync()
    rows = MappedRows(file, np.dtype("u1"), (28224,), "auto")
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if rows.pages.holds(0):
        pytest.skip("this file system keeps pages whatever it is told")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    assert not any(any(piece) for piece in rows.iter_bytes(0, 1, 300))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before < 50
    file.close()


LONG = (3, 2800)
MANY = -(-LONG_NBYTES // 8400)


@pytest.fixture
def long_rows(tmp_path, rng):
    """A mapping of rows of more than a page, and the rows."""
    values = rng.integers(256, size=(2 * MANY, *LONG), dtype=np.uint8)
    values.tofile(tmp_path / "rows")
    file = File.open(tmp_path / "rows", values.nbytes)
    yield MappedRows(file, values.dtype, LONG, "auto"), values
    file.close()


def ways(monkeypatch, asked=None):
    """Names of what copies rows from now on."""
    found, asked = [], [] if asked is None else asked

    class Spy:
        def __getattr__(self, name):
            def call(*args):
                found.append(name)
                asked.append(args[-1])
                return getattr(kernel, name)(*args)

            return call

    kernel = gather._copies
    monkeypatch.setattr(gather, "_copies", Spy())
    return found


def lacking(pages, monkeypatch, missing):
    monkeypatch.setattr(pages, "_resident", lambda rows, count: not missing)


@pytest.mark.parametrize("missing", [False, True])
def test_many_long_rows_are_copied_or_read_where_pages_were_missing(
    long_rows, rng, monkeypatch, missing
):
    rows, values = long_rows
    found = ways(monkeypatch)
    lacking(rows.pages, monkeypatch, missing)
    pairs = rng.integers(2 * MANY, size=(MANY, 2))
    for wanted in (np.arange(MANY) + 7, pairs[:, 0]):
        rows.pages.prefetch(wanted)
        out = np.empty((MANY, *LONG), np.uint8)
        assert rows.take(wanted, out) is out
        assert (out == values[wanted]).all()
    # Of what is there one is copied in either way, to see which is sooner.
    assert found == (2 * ["read_rows"] if missing else ["copy_rows"])


def test_rows_are_copied_again_when_all_are_there(long_rows, monkeypatch):
    rows, _ = long_rows
    found, wanted = ways(monkeypatch), np.arange(MANY)
    out = np.empty((MANY, *LONG), np.uint8)
    lacking(rows.pages, monkeypatch, missing=True)
    rows.pages.prefetch(wanted)
    lacking(rows.pages, monkeypatch, missing=False)
    for _ in range(COLD_CALLS + 1):
        rows.take(wanted, out)
        rows.pages.prefetch(wanted)
    rows.take(wanted, out)
    assert found == (COLD_CALLS + 1) * ["read_rows"] + ["copy_rows"]


def test_the_faster_of_two_copies_is_used(long_rows, rng, monkeypatch):
    rows, values = long_rows
    found, clock = ways(monkeypatch), [0.0]
    monkeypatch.setattr(gather, "perf_counter", lambda: clock[0])
    took = {True: 2.0, False: 3.0}
    copy, take = gather._copies, rows._copy

    def slowed(past, method):
        def call(*args):
            clock[0] += took[past]
            return method(*args)

        return call

    spied = SimpleNamespace(copy_rows=slowed(True, copy.copy_rows))
    monkeypatch.setattr(gather, "_copies", spied)
    monkeypatch.setattr(rows, "_copy", slowed(False, take))
    monkeypatch.setattr(gather, "EVERY", 20)
    out = np.empty((MANY, *LONG), np.uint8)
    for sooner in (True, False, True):
        found.clear()
        for _ in range(20):
            wanted = rng.integers(2 * MANY, size=MANY)
            assert rows.take(wanted, out) is out
            assert (out == values[wanted]).all()
        assert found == (TRIES + (20 - 2 * TRIES) * sooner) * ["copy_rows"]
        took = {True: took[False], False: took[True]}


@pytest.mark.parametrize("past_is_faster", [True, False])
@pytest.mark.parametrize("takes", [1, 2, 3])
def test_either_way_is_tried_on_steps_and_on_those_after(takes, past_is_faster):
    """Those after are copied in less time: their pages were just looked at."""
    sooner, went = gather.CopyTuner(), []
    for number in range(gather.EVERY):
        past = sooner.past()
        went.append(past)
        seconds = 1.0 if number % takes == 0 else 0.65
        sooner.note(past, seconds * (0.8 if past == past_is_faster else 1.0))
    assert went[: 2 * TRIES].count(True) == TRIES
    assert set(went[2 * TRIES :]) == {past_is_faster}


def test_few_rows_and_small_ones_are_copied_directly(long_rows, monkeypatch):
    rows, values = long_rows
    found, few = ways(monkeypatch), np.arange(MANY - 2)
    lacking(rows.pages, monkeypatch, missing=True)
    rows.pages.prefetch(few)
    out = np.empty((len(few), *LONG), np.uint8)
    assert (rows.take(few, out) == values[few]).all()
    small = MappedRows(rows._file, np.dtype(np.uint8), (2800,), "auto")
    every = np.arange(3 * MANY)
    lacking(small.pages, monkeypatch, missing=True)
    small.pages.prefetch(every)
    out = np.empty((len(every), 2800), np.uint8)
    assert (small.take(every, out) == values.reshape(-1, 2800)[every]).all()
    assert found == []


@pytest.mark.parametrize("make", [MappedRows, ReadRows])
def test_an_obstacle_to_a_read_is_reported(long_rows, monkeypatch, make):
    file, values = long_rows[0]._file, long_rows[1]
    rows = make(file, values.dtype, LONG, "auto")
    lacking(rows.pages, monkeypatch, missing=True)
    wanted, out = np.arange(MANY, 2 * MANY), np.empty((MANY, *LONG), np.uint8)
    rows.pages.prefetch(wanted)
    os.truncate(file.path, values.nbytes - 100)
    with pytest.raises(CorruptError, match=r"rows ends at byte .* truncated while"):
        rows.take(wanted, out)


def test_a_closed_file_is_reported_where_it_is_read(long_rows, monkeypatch):
    file, values = long_rows[0]._file, long_rows[1]
    rows = ReadRows(file, values.dtype, LONG, "auto")
    lacking(rows.pages, monkeypatch, missing=True)
    wanted, out = np.arange(MANY), np.empty((MANY, *LONG), np.uint8)
    rows.pages.prefetch(wanted)
    file.close()
    with pytest.raises(FailedError, match="it was closed meanwhile"):
        rows.take(wanted, out)
    assert rows.take(wanted[:0], out[:0]) is not None


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_mapping_outlives_the_file_that_was_closed(long_rows, monkeypatch, tmp_path, when):
    """Or whose number was given to another one while it was read."""
    rows, values = long_rows
    lacking(rows.pages, monkeypatch, missing=True)
    wanted, out = np.arange(MANY), np.empty((MANY, *LONG), np.uint8)
    rows.pages.prefetch(wanted, now=True)
    fd, kernel = rows._file.fd, gather._copies

    class Closing:
        def read_rows(self, *args):
            rows._file.close()
            (tmp_path / "other").write_bytes(bytes(values.nbytes))
            other = os.open(tmp_path / "other", os.O_RDONLY)
            assert other == fd
            told = kernel.read_rows(*args)
            os.close(other)
            return told

        def copy_rows(self, *args):
            return kernel.copy_rows(*args)

    if when == "before":
        rows._file.close()
    else:
        monkeypatch.setattr(gather, "_copies", Closing())
    assert (rows.take(wanted, out) == values[wanted]).all()


@pytest.mark.parametrize("make", [MappedRows, ReadRows])
def test_the_disk_is_asked_once_by_who_reads_next(long_rows, monkeypatch, make):
    file, values = long_rows[0]._file, long_rows[1]
    rows, asked, ranges = make(file, values.dtype, LONG, "auto"), [], []
    monkeypatch.setattr(File, "will_need", lambda self, *range_: ranges.append(range_))
    ways(monkeypatch, asked)
    lacking(rows.pages, monkeypatch, missing=True)
    wanted, out = np.arange(MANY), np.empty((MANY, *LONG), np.uint8)
    # Who draws ahead has the disk asked now; who takes them next does so then.
    assert rows.pages.prefetch(wanted) > 0
    assert ranges
    ranges.clear()
    assert rows.pages.prefetch(wanted, now=True) == 0
    rows.take(wanted, out)
    assert (ranges, asked) == ([], [True])
    few = wanted[:5]
    assert rows.pages.prefetch(few, now=True) > 0
    assert (rows.take(few, out[:5]) == values[:5]).all()
    assert ranges


@pytest.mark.parametrize("advise", ["always", "never", "kernel"])
def test_who_is_not_to_look_maps(long_rows, monkeypatch, advise):
    file, values = long_rows[0]._file, long_rows[1]
    rows, found = MappedRows(file, values.dtype, LONG, advise), ways(monkeypatch)
    ranges = []
    monkeypatch.setattr(File, "will_need", lambda self, *range_: ranges.append(range_))
    wanted, out = np.arange(MANY), np.empty((MANY, *LONG), np.uint8)
    asked = rows.pages.prefetch(wanted, now=True)
    assert (rows.take(wanted, out) == values[:MANY]).all()
    assert found == ["copy_rows"]
    assert (asked > 0) == bool(ranges) == (advise == "always")


def test_records_of_a_page_and_more_are_read_where_pages_were_missing(tmp_path, monkeypatch, rng):
    """Of a scan, which else copies each field apart out of the mapping."""
    fields = {f"f{k}": mr.Field((900,), "float32") for k in range(2)}
    schema, count = mr.Schema(fields), 1100
    columns = {path: rng.random((count, 900), np.float32) for path in fields}
    with mr.ReplayBuffer.create(tmp_path / "b", schema, count) as buffer:
        buffer.extend(columns)
        store = buffer._files.store
        assert store.placement.stride >= 4096
        asked = []
        found = ways(monkeypatch, asked)
        rows = np.arange(count)
        for missing in (True, False):
            found.clear()
            pages = store._records.pages
            lacking(pages, monkeypatch, missing)
            pages._cold_calls = 0
            store.prefetch(rows, list(fields), now=True)
            got = store.gather(rows, list(fields))
            assert all((got[path] == columns[path]).all() for path in fields)
            assert found == (["read_rows"] if missing else [])
        assert asked == [True]
