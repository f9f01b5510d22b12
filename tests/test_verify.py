"""Files damaged by hand, claim by claim, and what the check says of each."""

import json
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import FormatError, VersionError
from mmreplay.files import File
from mmreplay.format import commit
from mmreplay.format import metadata as metadata_file
from mmreplay.storage.memmap import MemmapStore
from mmreplay.verify import verify_buffer
from mmreplay.verify.boundaries import alone_problem, names, pair_problem

DATA = "data-000001"


def schema():
    return mr.Schema(
        {
            "observation": mr.Field((3,), "float32"),
            "pixels": mr.Field((64, 64), "uint8"),
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "advantage": mr.Field((), "float32", mutable=True),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )


def steps(rng, count, num_envs):
    return {
        "observation": rng.random((count, num_envs, 3), np.float32),
        "pixels": rng.integers(0, 256, (count, num_envs, 64, 64), np.uint8),
        "action": rng.integers(0, 9, (count, num_envs)),
        "reward": rng.random((count, num_envs), np.float32),
        "advantage": np.zeros((count, num_envs), np.float32),
        "terminated": rng.random((count, num_envs)) < 0.1,
        "truncated": rng.random((count, num_envs)) < 0.1,
    }


def make(path, rng, count=64, *, capacity=64, num_envs=2, **options):
    """A closed buffer of whole blocks."""
    options = {"commit_every": None, **options}
    with mr.ReplayBuffer.create(path, schema(), capacity, num_envs, **options) as buf:
        for _ in range(count // 16):
            buf.extend(steps(rng, 16, num_envs))
            buf.commit()
    return path


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ (1 << bit % 8)
        file.seek(bit // 8)
        file.write(bytes([byte]))


def put(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def kinds(path):
    return [finding.kind for finding in verify_buffer(path).findings]


def messages(path, kind):
    found = [f.message for f in verify_buffer(path).findings if f.kind == kind]
    assert found
    return "\n".join(found)


@pytest.fixture
def path(tmp_path, rng):
    return make(tmp_path / "b", rng)


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("count", [16, 64, 160, 1600])
def test_a_buffer_as_written_has_nothing_to_report(
    tmp_path, rng, layout, autoreset, count
):
    make(tmp_path / "b", rng, count, layout=layout, autoreset=autoreset)
    report = verify_buffer(tmp_path / "b")
    assert report.findings == ()
    assert report.ok
    assert report.blocks > 0
    assert report.rows == 2 * min(count, 64)


@pytest.mark.parametrize("name", ["env_major", "large", "time_major"])
def test_the_golden_buffers_have_nothing_to_report(name):
    report = verify_buffer(Path(__file__).parent / "golden" / "v1" / name)
    assert report.findings == ()
    assert report.blocks > 0


def test_every_sum_covers_what_the_writer_summed(tmp_path, rng):
    path = make(tmp_path / "b", rng, 1600, num_envs=1)
    report = verify_buffer(path)
    with mr.ReplayBuffer.open(path) as buffer:
        ring, heads = buffer.metadata.ring, buffer.heads
    size = ring.block_rows
    first = (int(heads[0]) - ring.capacity) // size
    assert report.blocks == int(heads[0]) // size - first
    store = MemmapStore.open(path / DATA, ring, schema(), writable=False)
    crc, lap = store.read_sum(0, first)
    assert (crc, lap) == (store.checksum(0, first), first // ring.num_blocks)
    store.close()


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
def test_any_flipped_bit_of_summed_rows_is_found(tmp_path, rng, layout):
    path = make(tmp_path / "b", rng, layout=layout)
    with mr.ReplayBuffer.open(path) as buffer:
        ring = buffer.metadata.ring
    assert verify_buffer(path).unsummed_rows == 0
    names = ["flags.bin", "records.bin", "f000.bin"]
    for index in range(200):
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
    assert "environment 0, positions [4, 8): the data has checksum" in finding.message
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
    assert "got a checksum of lap 7, expected one of lap 0" in finding.message


def test_any_flipped_bit_of_metadata_is_found_or_refused(path, rng):
    file = path / "metadata.json"
    for bit in rng.integers(0, 8 * file.stat().st_size, 200).tolist():
        flip(file, bit)
        # The digit that says the version is read first, and then refused.
        with suppress(VersionError):
            assert kinds(path) == ["metadata"]
        flip(file, bit)
    assert verify_buffer(path).ok


def test_metadata_cut_short_is_found(path):
    os.truncate(path / "metadata.json", 100)
    assert "metadata.json" in messages(path, "metadata")


def test_a_newer_version_is_refused(path):
    text = (path / "metadata.json").read_text()
    (path / "metadata.json").write_text(
        text.replace('"version": [\n  1', '"version": [\n  9')
    )
    with pytest.raises(VersionError, match=r"format version 9.*install a newer"):
        verify_buffer(path)


@pytest.mark.parametrize("name", ["flags.bin", "records.bin", "f001.bin", "COMMIT"])
def test_a_file_that_was_cut_is_found(path, name):
    os.truncate(path / DATA / name, 100)
    (finding,) = verify_buffer(path).findings
    assert (finding.kind, finding.file) == ("file", f"{DATA}/{name}")
    assert "has 100 bytes, expected" in finding.message


def test_a_missing_file_is_found(path):
    (path / DATA / "sums.bin").unlink()
    assert "sums.bin is missing" in messages(path, "file")


def test_a_link_in_the_place_of_a_file_is_found(path):
    file = path / DATA / "flags.bin"
    file.rename(path / "elsewhere")
    file.symlink_to(path / "elsewhere")
    assert "not a regular file" in messages(path, "file")


def test_a_missing_data_folder_is_found(path):
    shutil.rmtree(path / DATA)
    assert set(kinds(path)) == {"file"}


def test_unknown_names_are_reported_and_left_alone(path):
    (path / "notes.txt").write_text("mine")
    (path / DATA / "f999.bin").write_bytes(b"")
    report = verify_buffer(path)
    assert [(f.kind, f.file) for f in report.findings] == [
        ("unknown", "notes.txt"),
        ("unknown", f"{DATA}/f999.bin"),
    ]
    assert report.ok
    assert (path / "notes.txt").read_text() == "mine"


def test_left_over_folders_and_files_are_reported_and_left_alone(path):
    (path / "data-000007").mkdir()
    (path / "tmp-metadata.json").write_bytes(b"")
    report = verify_buffer(path)
    assert [(f.kind, f.file) for f in report.findings] == [
        ("left_over", "data-000007"),
        ("left_over", "tmp-metadata.json"),
    ]
    assert report.ok
    assert (path / "data-000007").is_dir()


def test_damaged_statistics_are_found(path):
    (path / "statistics.json").write_text('{"a": 1, "a": 2}')
    assert "twice" in messages(path, "statistics")


@pytest.mark.parametrize("slot", range(4))
def test_a_flipped_bit_of_a_slot_is_told(path, rng, slot):
    size = commit.slot_nbytes(2)
    for bit in rng.integers(0, 8 * size, 20).tolist():
        flip(path / DATA / "COMMIT", 8 * size * slot + bit)
        findings = verify_buffer(path).findings
        assert any(f.offset == size * slot for f in findings)
        flip(path / DATA / "COMMIT", 8 * size * slot + bit)
    assert verify_buffer(path).ok


def test_no_whole_durable_slot_is_found(path):
    for slot in (0, 1):
        flip(path / DATA / "COMMIT", 8 * 4096 * slot + 500)
    assert "got no whole durable slot" in messages(path, "commit")


def test_a_zeroed_durable_slot_is_found(path):
    put(path / DATA / "COMMIT", 0, bytes(4096))
    assert "D0: got zeros" in messages(path, "slot")


def records_of(path):
    known = metadata_file.load(path)
    data = (path / DATA / "COMMIT").read_bytes()
    return commit.split(data, known.uuid, known.generation, known.ring.num_envs)


def rewrite(path, slot, **changes):
    record = replace(records_of(path)[slot], **changes)
    put(path / DATA / "COMMIT", commit.slot_nbytes(2) * slot, record.encode())


def test_a_torn_slot_after_a_crash_is_a_note(path):
    flip(path / DATA / "COMMIT", 8 * 4096 * 3 + 500)
    report = verify_buffer(path)
    assert [(f.kind, f.offset) for f in report.findings] == [("torn", 3 * 4096)]
    assert report.ok


@pytest.mark.parametrize(
    ("slot", "changes", "told"),
    [
        (0, {"flags": 64}, "got flags 64"),
        (0, {"sequence": 0}, "got sequence 0 and epoch"),
        (0, {"uuid": bytes(16)}, "not of this buffer and generation"),
        (0, {"generation": 5}, "expected one of generation 1"),
        (0, {"tails": np.array([99, 99])}, "out of order"),
        (3, {"limits": np.array([9999, 64])}, "rows alive would be overwritten"),
        (0, {"limits": np.array([1 << 62, 1 << 62])}, "out of order"),
    ],
)  # fmt: skip
def test_a_slot_that_contradicts_itself_is_found(path, slot, changes, told):
    rewrite(path, slot, **changes)
    assert told in messages(path, "slot")


def test_heads_that_fall_are_found(path):
    records = records_of(path)
    newest = max((2, 3), key=lambda slot: records[slot].sequence)
    heads = records[newest].heads - [0, 40]
    rewrite(path, newest, heads=heads)
    assert "got heads 24 after" in messages(path, "slot")


def test_two_records_of_one_number_are_found(path):
    records = records_of(path)
    rewrite(path, 2, sequence=records[3].sequence, time_ns=1)
    assert "expected a number of its own" in messages(path, "slot")


def test_a_committed_head_above_the_published_one_is_found(path):
    for slot in (2, 3):
        rewrite(path, slot, heads=np.array([8, 8]), tails=np.array([0, 0]))
    assert "expected at least the committed one, 64" in messages(path, "slot")


def set_flags(path, env_id, position, flags):
    ring = metadata_file.load(path).ring
    put(path / DATA / "flags.bin", ring.row(env_id, position), bytes([flags]))
    return ring.row(env_id, position)


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (64, "got flags unknown 0x40, expected bits within 0x3f"),
        (FINAL | START, "expected FINAL alone"),
        (BREAK, "expected START beside BREAK"),
        (START | CUT, "expected BREAK beside CUT"),
        (FINAL, "got flags FINAL after none, expected FINAL only after an end"),
        (START, "got flags START after none, expected START only after an end"),
    ],
)
def test_impossible_flags_are_found(tmp_path, layout, flags, told):
    path = plain(tmp_path / "b", layout=layout)
    row = set_flags(path, 1, 9, flags)
    finding = next(f for f in verify_buffer(path).findings if f.kind == "flags")
    assert finding.message.startswith("environment 1, position 9: ")
    assert told in finding.message
    assert finding.offset == row


def plain(path, autoreset="disabled", layout=None):
    """A buffer of one endless episode in each of two environments."""
    fields = mr.Schema(
        {"observation": mr.Field((), "int64"), "terminated": mr.Field((), "bool")}
    )
    with mr.ReplayBuffer.create(
        path, fields, 32, 2, autoreset=autoreset, layout=layout, commit_every=None
    ) as buffer:
        zeros = np.zeros((20, 2))
        buffer.extend(observation=zeros.astype(np.int64), terminated=zeros != 0)
    return path


@pytest.mark.parametrize(
    ("autoreset", "flags", "told"),
    [
        (
            "disabled",
            [TERMINATED, 0],
            "got flags none after TERMINATED, expected FINAL",
        ),
        ("next_step", [TERMINATED, START], "expected FINAL, or START|BREAK"),
        ("disabled", [TERMINATED, FINAL, 0], "expected START after a final row"),
    ],
)
def test_rows_that_cannot_follow_each_other_are_found(tmp_path, autoreset, flags, told):
    path = plain(tmp_path / "b", autoreset)
    for index, value in enumerate(flags):
        set_flags(path, 0, 4 + index, value)
    assert told in messages(path, "flags")


def test_a_first_row_that_starts_nothing_is_found(tmp_path):
    path = plain(tmp_path / "b")
    set_flags(path, 0, 0, 0)
    assert "START at the first row ever written" in messages(path, "flags")


@pytest.mark.parametrize("final_follows", [False, True])
def test_what_the_writer_can_write_is_legal(final_follows):
    after = FINAL if final_follows else START
    for end in (TERMINATED, TRUNCATED, TERMINATED | TRUNCATED, END_AND_START):
        assert not alone_problem(end)
        assert not pair_problem(end, after, final_follows)
        assert not pair_problem(end, START | BREAK, final_follows)
        assert not pair_problem(0, START | BREAK | CUT, final_follows)
        assert not pair_problem(FINAL, START | end, final_follows)
        assert not pair_problem(start_of(0), end & ~START, final_follows)


END_AND_START = TERMINATED | START


def start_of(flags):
    return flags | START


def test_names_of_flags():
    assert names(0) == "none"
    assert names(START | TRUNCATED) == "START|TRUNCATED"
    assert names(ALL_FLAGS + 1) == "unknown 0x40"


def test_what_is_no_buffer_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"does not exist"):
        verify_buffer(tmp_path / "none")
    with pytest.raises(FormatError, match=r"is no replay buffer"):
        verify_buffer(tmp_path)


def test_findings_are_bounded_and_the_rest_counted(tmp_path):
    fields = mr.Schema({"observation": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "b", fields, 4096) as buffer:
        buffer.extend(observation=np.arange(4096))
    put(tmp_path / "b" / DATA / "flags.bin", 0, b"\xff" * 4096)
    report = verify_buffer(tmp_path / "b")
    assert len(report.findings) == 1000
    assert report.omitted > 3000
    assert not report.ok


def test_a_read_only_folder_is_verified(path):
    for entry in [path, path / DATA]:
        entry.chmod(0o500)
    try:
        assert verify_buffer(path).ok
    finally:
        for entry in [path, path / DATA]:
            entry.chmod(0o700)


def test_a_buffer_killed_before_its_first_commit_is_whole(tmp_path, rng):
    path = tmp_path / "b"
    pid = os.fork()
    if pid == 0:
        buffer = mr.ReplayBuffer.create(path, schema(), 64, 2, commit_every=None)
        buffer.extend(steps(rng, 30, 2))
        os._exit(9)
    os.waitpid(pid, 0)
    report = verify_buffer(path)
    assert report.ok
    assert report.rows == 0


@pytest.mark.crash
@pytest.mark.parametrize("layout", ["env_major", "time_major"])
def test_a_busy_writer_and_what_its_death_leaves_are_whole(tmp_path, rng, layout):
    path = tmp_path / "b"
    make(path, rng, 16, layout=layout)
    pid = os.fork()
    if pid == 0:
        buffer = mr.ReplayBuffer.open(path, "r+", commit_every=0.01)
        while True:
            buffer.extend(steps(rng, 5, 2))
    try:
        reports = [verify_buffer(path) for _ in range(100)]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    reports.append(verify_buffer(path))
    assert [r.findings for r in reports if not r.ok] == []
    assert any(report.blocks for report in reports)


def test_a_live_writer_is_verified_up_to_its_last_commit(tmp_path, rng):
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema(), 64, 2, commit_every=None
    ) as buffer:
        buffer.extend(steps(rng, 32, 2))
        buffer.commit()
        buffer.extend(steps(rng, 7, 2))
        report = verify_buffer(tmp_path / "b")
        assert report.ok
        assert report.rows == 64


def test_blocks_given_up_while_they_are_read_are_skipped(tmp_path, rng, monkeypatch):
    """A writer laps the check between two of its reads."""
    path = tmp_path / "b"
    buffer = mr.ReplayBuffer.create(path, schema(), 64, 2, commit_every=None)
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


def test_a_buffer_that_lost_power_is_whole(tmp_path, rng):
    """A copy of a live folder: no live slot of it is trusted."""
    buffer = mr.ReplayBuffer.create(tmp_path / "b", schema(), 64, 2, commit_every=None)
    for _ in range(10):
        buffer.extend(steps(rng, 16, 2))
    buffer.commit()
    buffer.extend(steps(rng, 9, 2))
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    buffer.close()
    report = verify_buffer(tmp_path / "c")
    assert report.ok, report.findings
    assert report.blocks > 0


def test_what_clear_dequeue_resize_and_more_steps_than_capacity_leave_is_whole(
    tmp_path, rng
):
    path = make(tmp_path / "b", rng, 96)
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        buffer.extend(steps(rng, 5, 2))
        buffer.commit()
        assert verify_buffer(path).ok
        buffer.dequeue(11)
        buffer.extend(steps(rng, 200, 2))
        buffer.commit()
        assert verify_buffer(path).findings == ()
        buffer.clear([1])
        buffer.extend(steps(rng, 9, 2))
        buffer.commit()
        assert verify_buffer(path).findings == ()
        buffer.resize(100)
        assert [f.kind for f in verify_buffer(path).findings] == ["left_over"]
        buffer.extend(steps(rng, 150, 2))
    with mr.ReplayBuffer.open(path, "r+", on_resume="truncate") as buffer:
        buffer.extend(steps(rng, 10, 2))
    assert verify_buffer(path).findings == ()


def test_progress_ends_at_all_bytes(path):
    seen = []
    report = verify_buffer(path, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1


def test_the_report_is_plain_facts(path):
    report = verify_buffer(path)
    assert json.dumps([report.blocks, report.rows, report.nbytes, report.unsummed_rows])
