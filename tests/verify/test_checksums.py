"""Checksums: every flipped bit under one is found, and its block named."""

import pytest

import mmreplay as mr
from mmreplay.disk.files import File
from mmreplay.storage.memmap import MemmapStore
from mmreplay.verify import rows, verify_buffer
from tests.slices import count
from tests.verify.support import DATA, flip, kinds, make, put, schema, steps


def test_every_sum_covers_what_the_writer_summed(tmp_path, rng):
    path = make(tmp_path / "b", rng, 1600, num_envs=1)
    report = verify_buffer(path)
    with mr.ReplayBuffer.open(path) as buffer:
        ring, heads = buffer.metadata.ring, buffer.heads
    size = ring.block_rows
    first = (int(heads[0]) - ring.capacity) // size
    assert report.blocks == int(heads[0]) // size - first
    store = MemmapStore.open_rows(path / DATA, ring, schema(), writable=False)
    crc, lap = store.read_sum(0, first)
    assert (crc, lap) == (store.checksum(0, first), first // ring.num_blocks)
    store.close()


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("chunk_nbytes", [100, 5000, 70_000])
def test_rows_larger_than_what_is_read_at_a_time(tmp_path, rng, monkeypatch, layout, chunk_nbytes):
    """Memory is bounded by the pieces, whatever the metadata says of the rows."""
    path = make(tmp_path / "b", rng, layout=layout)
    expected = verify_buffer(path)
    real, reads = File.pread, []

    def pread(self, nbytes, offset):
        if self.path.name in ("f000.bin", "records.bin"):
            reads.append(nbytes)
        return real(self, nbytes, offset)

    monkeypatch.setattr(rows, "CHUNK_NBYTES", chunk_nbytes)
    monkeypatch.setattr(File, "pread", pread)
    report = verify_buffer(path)
    assert report.ok
    assert (report.blocks, report.nbytes) == (expected.blocks, expected.nbytes)
    assert max(reads) <= chunk_nbytes
    flip(path / DATA / "f000.bin", 8 * 4096 * 5)
    assert kinds(path) == ["sum"]


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.sliced(1)
def test_any_flipped_bit_of_summed_rows_is_found(tmp_path, rng, layout):
    path = make(tmp_path / "b", rng, layout=layout)
    with mr.ReplayBuffer.open(path) as buffer:
        ring = buffer.metadata.ring
    assert verify_buffer(path).unsummed_rows == 0
    names = ["flags.bin", "records.bin", "f000.bin"]
    for index in range(count(200, 60)):
        file = path / DATA / names[index % 3]
        row_nbytes = file.stat().st_size // ring.num_rows
        row = ring.row(int(rng.integers(2)), int(rng.integers(64)))
        bit = 8 * row * row_nbytes + int(rng.integers(8 * row_nbytes))
        flip(file, bit)
        found = verify_buffer(path)
        assert not found.ok, f"bit {bit} of {file.name}"
        assert "sum" in {finding.kind for finding in found.findings}
        flip(file, bit)
    assert verify_buffer(path).ok


def test_a_sum_that_differs_names_the_block_and_its_bytes(path):
    flip(path / DATA / "f000.bin", 8 * 4096 * 5)
    (finding,) = verify_buffer(path).findings
    assert finding.file == f"{DATA}/sums.bin"
    assert finding.offset == 8 * 1
    message = "environment 0, positions [4, 8): the checksum of the data must be"
    assert message in finding.message
    assert "f000.bin [16384, 32768)" in finding.message


def test_mutable_fields_are_outside_the_checksums(path):
    flip(path / DATA / "f001.bin", 0)
    assert verify_buffer(path).ok


def test_a_flipped_checksum_is_found(path):
    flip(path / DATA / "sums.bin", 3)
    assert kinds(path) == ["sum"]


def test_a_checksum_of_another_lap_is_found(path):
    put(path / DATA / "sums.bin", 4, b"\x07")
    (finding,) = verify_buffer(path).findings
    assert finding.kind == "lap"
    assert finding.offset == 0
    assert "must be of lap 0, got a checksum of lap 7" in finding.message


def test_blocks_overwritten_while_they_are_read_are_skipped(tmp_path, rng, monkeypatch):
    """A writer laps the check between two of its reads."""
    path = tmp_path / "b"
    buffer = mr.ReplayBuffer.create(path, schema(), 64, 2, commit_every=None, autoreset="disabled")
    buffer.extend(steps(rng, 64, 2))
    buffer.commit()
    real, reads = File.pread, []

    def pread(self, nbytes, offset):
        if self.path.name == "f000.bin":
            reads.append(offset)
            if len(reads) == 3:
                buffer.extend(steps(rng, 64, 2))
        return real(self, nbytes, offset)

    monkeypatch.setattr(File, "pread", pread)
    report = verify_buffer(path)
    assert report.findings == ()
    assert report.skipped_blocks > 0
    buffer.close()
