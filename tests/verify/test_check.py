"""Files and folders: what is cut, missing, strange or no buffer is told."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FormatError, VersionError
from mmreplay.verify import verify_buffer
from tests.verify.support import DATA, flip, kinds, make, messages, put


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("count", [16, 64, 160, 1600])
def test_a_buffer_as_written_has_nothing_to_report(tmp_path, rng, layout, autoreset, count):
    make(tmp_path / "b", rng, count, layout=layout, autoreset=autoreset)
    report = verify_buffer(tmp_path / "b")
    assert report.findings == ()
    assert report.ok
    assert report.blocks > 0
    assert report.rows == 2 * min(count, 64)


@pytest.mark.parametrize("name", ["env_major", "large", "time_major"])
def test_the_golden_buffers_have_nothing_to_report(name):
    report = verify_buffer(Path(__file__).parent.parent / "golden" / "v1" / name)
    assert report.findings == ()
    assert report.blocks > 0


def test_any_flipped_bit_of_metadata_is_found_or_refused(path, rng):
    file = path / "metadata.json"
    for bit in rng.integers(0, 8 * file.stat().st_size, 200).tolist():
        flip(file, bit)
        # The digit that says the version is read first, and then refused.
        with suppress(VersionError):
            assert kinds(path) == ["metadata"]
        flip(file, bit)
    assert verify_buffer(path).ok


def test_truncated_metadata_is_found(path):
    os.truncate(path / "metadata.json", 100)
    assert "metadata.json" in messages(path, "metadata")


def test_a_newer_version_is_refused(path):
    text = (path / "metadata.json").read_text()
    (path / "metadata.json").write_text(text.replace('"version": [\n  1', '"version": [\n  9'))
    with pytest.raises(VersionError, match=r"format version 9.*Install a newer"):
        verify_buffer(path)


@pytest.mark.parametrize("name", ["flags.bin", "records.bin", "f001.bin", "COMMIT"])
def test_a_truncated_file_is_found(path, name):
    os.truncate(path / DATA / name, 100)
    (finding,) = verify_buffer(path).findings
    assert (finding.kind, finding.file) == ("file", f"{DATA}/{name}")
    assert "has 100 bytes, but metadata" in finding.message


def test_a_missing_file_is_found(path):
    (path / DATA / "sums.bin").unlink()
    assert "sums.bin is missing" in messages(path, "file")


def test_a_link_instead_of_a_file_is_found(path):
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


def test_what_is_no_buffer_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"does not exist"):
        verify_buffer(tmp_path / "none")
    with pytest.raises(FormatError, match=r"is not a replay buffer"):
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


def test_progress_ends_at_all_bytes(path):
    seen = []
    report = verify_buffer(path, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1


def test_the_report_is_plain_facts(path):
    report = verify_buffer(path)
    assert json.dumps([report.blocks, report.rows, report.nbytes, report.unsummed_rows])


def test_rows_published_since_the_commit_are_counted_apart(tmp_path, rng):
    schema = mr.Schema({"a": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 64, commit_every=None) as buffer:
        buffer.extend(a=np.arange(20))
        buffer.commit()
        buffer.extend(a=np.arange(5))
        report = verify_buffer(tmp_path / "b")
        assert (report.rows, report.uncommitted_rows) == (20, 5)
    report = verify_buffer(tmp_path / "b")
    assert (report.rows, report.uncommitted_rows) == (25, 0)


def test_rows_are_not_counted_where_no_file_says_which_there_are(path):
    (path / "data-000001" / "COMMIT").unlink()
    assert verify_buffer(path).rows is None
