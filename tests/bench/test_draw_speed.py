"""What is measured of a buffer adds up, and the advice follows from the figures."""

import mmap
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import File, file_system
from mmreplay.errors import EmptyError, FailedError, SchemaError
from mmreplay.storage.memory_usage import MemoryUsage, cached_nbytes, measure
from tools.bench import draw_speed as bench
from tools.bench.draw_speed import Rate, SpeedReport, advice, measure_speed

GIB = 1 << 30
IN_MEMORY = ("tmpfs", "ramfs", "overlay")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("speed") / "b"
    schema = mr.Schema(
        {
            "observation": mr.Field((64, 65), "uint8"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    with mr.ReplayBuffer.create(path, schema, 4000, engine="memmap") as buffer:
        buffer.extend(
            observation=np.zeros((4000, 64, 65), np.uint8),
            reward=np.zeros(4000, np.float32),
            terminated=np.zeros(4000, bool),
        )
    return path


def test_a_buffer_is_measured(path):
    found = measure_speed(path, batch_size=32, seconds=0.02)
    step = 2 * 64 * 65 + 4 + 1
    rates = [found.warm, found.larger, found.cold, found.unasked]
    for rate in (rate for rate in rates if rate is not None):
        assert rate.mb_per_s == pytest.approx(rate.rows_per_s * step / 1e6)
    assert (found.cold is None) == bool(found.not_cold)
    assert found.larger_size == 16 * 32
    assert found.nbytes > 4000 * 64 * 65
    assert found.memory.mapped >= 4000 * 64 * 65


def test_there_has_to_be_something_to_draw(tmp_path, path):
    mr.ReplayBuffer.create(tmp_path / "b", mr.Schema({"a": mr.Field((), "int8")}), 9)
    with pytest.raises(EmptyError, match="cannot draw"):
        measure_speed(tmp_path / "b", seconds=0.01)
    for options in ({"batch_size": 0}, {"seconds": 0}):
        with pytest.raises(SchemaError, match="batch_size must be at least 1 and"):
            measure_speed(path, **options)


def report(**changes):
    """Figures of which nothing follows, but for some."""
    same = Rate(1000.0, 10.0)
    memory = MemoryUsage(10 * GIB, GIB, GIB, 10 * GIB)
    plain = SpeedReport(
        256, same, same, same, same, "", 500.0, memory, 10 * GIB, 8 * GIB, "ext4", ()
    )
    return replace(plain, **changes)


def test_of_even_figures_no_advice_follows():
    assert list(advice(report())) == []


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"unasked": Rate(10.0, 0.1)}, r"is 100\.0 times as .*leave advise='auto'"),
        ({"unasked": Rate(4000.0, 40.0)}, r"is 4.0 times .*try advise='never'"),
        ({"larger": Rate(3000.0, 30.0)}, r"batches of 4,096 steps read 3.0 times"),
        ({"cold": None, "not_cold": "for once"}, r"^for once$"),
        ({"disk_mb_per_s": None}, r"the disk was not measured"),
        ({"file_system": "nfs4"}, r"the files are on nfs4: a copy on a local disk"),
        (
            {
                "warm": Rate(5000.0, 50.0),
                "larger": Rate(5000.0, 50.0),
                "memory": MemoryUsage(10 * GIB, GIB, GIB, 2 * GIB),
            },
            "are read 5.0 times as fast, and 20% of the files were in memory: more",
        ),
        (
            {
                "warm": Rate(5000.0, 50.0),
                "larger": Rate(5000.0, 50.0),
                "memory": MemoryUsage(10 * GIB, GIB, GIB, 2 * GIB),
                "machine_nbytes": 16 * GIB,
            },
            "20% of the files were in memory: all of them fit this machine's 16.00",
        ),
    ],
)
def test_advice_follows_from_the_figures(changes, pattern):
    (sentence,) = advice(report(**changes))
    assert re.search(pattern, sentence), sentence


@pytest.mark.parametrize("cached", [None, 10 * GIB])
def test_of_memory_nothing_is_said_where_all_is_there_or_who_knows(cached):
    fast = Rate(5000.0, 50.0)
    memory = MemoryUsage(10 * GIB, GIB, GIB, cached)
    assert list(advice(report(warm=fast, larger=fast, memory=memory))) == []


def test_pages_that_hang_together_are_dropped_together(tmp_path):
    schema = mr.Schema({"pixels": mr.Field((84, 84), "uint8")})
    rng = np.random.default_rng(0)
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 2000, engine="memmap") as b:
        # In one go: on many file systems the page cache then holds pieces of MiB.
        b.extend(pixels=rng.integers(0, 255, (2000, 84, 84), np.uint8))
    found = measure_speed(tmp_path / "b", batch_size=32, seconds=0.02)
    if found.file_system in IN_MEMORY:
        pytest.skip(f"{found.file_system} lives in memory, or may")
    assert found.cold is not None


def largest(folder):
    """The largest file below a folder, on a disk whose pages can be dropped."""
    if file_system(folder) in IN_MEMORY:
        pytest.skip(f"{file_system(folder)} lives in memory, or may")
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_blocks)


@contextmanager
def resident(path):
    """A file all of whose pages are mapped and looked at, so that they stay."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert sum(mapping[:: mmap.PAGESIZE]) >= 0
        yield
        mapping.close()


def test_the_disk_is_read_where_nothing_is_in_memory_or_mapped(path, monkeypatch):
    file, found = largest(path), []
    real = File.pread_into

    def look(self, target, offset):
        if self.path == file and len(target) == bench.BLOCK_NBYTES:
            mapped = str(file) in Path("/proc/self/maps").read_text()
            ahead = cached_nbytes(self, offset, offset + len(target))
            found.append((mapped, ahead if offset == 0 else None))
        real(self, target, offset)

    monkeypatch.setattr(File, "pread_into", look)
    assert measure_speed(path, 32, 0.02).disk_mb_per_s > 0
    assert found[0] == (False, 0)
    assert not any(mapped for mapped, _ in found)


def test_resident_pages_do_not_count_as_disk_reads(path, monkeypatch):
    file = largest(path)
    assert bench.sequential([file], 0.02) > 0
    monkeypatch.setattr(bench, "WAIT_S", 0.0)
    with resident(file):
        assert bench.sequential([file], 0.02) is None
        found = measure_speed(path, 32, 0.02)
    assert found.disk_mb_per_s is found.cold is found.unasked is None
    assert "another process maps them" in found.advice[0]


def test_few_resident_pages_are_ignored(path, monkeypatch):
    file = largest(path)
    small = next(path.rglob("flags.bin"))
    with resident(small):
        assert bench.sequential([small, file], 5.0) > 0
        monkeypatch.setattr(bench, "WAIT_S", 0.0)
        assert bench.sequential([small], 0.02) is None


def test_holes_are_neither_read_nor_counted(tmp_path):
    file = File.create(tmp_path / "a", 64 << 20)
    file.pwrite(bytes(1 << 20), 32 << 20)
    file.allocate(48 << 20, 1 << 20)
    file.sync()
    file.close()
    if file_system(tmp_path) not in ("ext4", "xfs"):
        pytest.skip("it may not tell holes")
    paths = [tmp_path / "a", tmp_path / "gone"]
    assert bench.written_nbytes(paths) == 1 << 20
    assert bench.sequential(paths, 1.0) > 0
    assert measure(paths).page_cache == 1 << 20


def test_memory_is_as_it_was_before_anything_was_dropped(path):
    with resident(largest(path)):
        pass
    found = measure_speed(path, 32, 0.02)
    assert found.memory.page_cache >= 0.95 * found.nbytes
    assert not any("of the files were there" in told for told in found.advice)


def test_a_small_buffer_says_nothing_of_the_disk(tmp_path):
    schema = mr.Schema({"reward": mr.Field((), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 3000) as buffer:
        buffer.extend(reward=np.zeros(3000, np.float32))
    found = measure_speed(tmp_path / "b", 32, 0.01)
    assert found.disk_mb_per_s is found.cold is found.unasked is None
    assert re.search(r"is too small to measure the disk: \d+.\d\d KiB", found.not_cold)
    assert found.advice[0] == found.not_cold


def test_a_compressed_buffer_reads_the_disk_and_reports_the_reason(tmp_path, rng):
    schema = mr.Schema({"pixels": mr.Field((84, 84), "uint8")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 2000, engine="zarr") as buffer:
        buffer.extend(pixels=rng.integers(0, 255, (2000, 84, 84), np.uint8))
    with resident(largest(tmp_path)):
        pass
    found = measure_speed(tmp_path / "b", 32, 0.02)
    assert found.cold is None
    assert "through mappings of its shards" in found.not_cold
    assert found.disk_mb_per_s > 0
    # Shards count, holes of the files before them do not.
    assert found.memory.page_cache >= 0.95 * found.nbytes > 10e6


def test_a_zarr_group_is_refused(path, tmp_path):
    mr.compact(path, tmp_path / "c", codec="zstd")
    with mr.ReplayBuffer.open(tmp_path / "c") as buffer:
        group = buffer.zarr_path
    assert measure_speed(tmp_path / "c", 32, 0.01).warm.rows_per_s > 0
    with pytest.raises(FailedError, match="is a Zarr group, and the bench needs a buffer's files"):
        measure_speed(group, 32, 0.01)
