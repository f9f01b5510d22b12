"""Columns and counts beside the data are checked, and never make a buffer damaged."""

import json
import os

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.verify import verify_buffer
from tests.verify.support import DATA, put, schema, steps


@pytest.fixture
def path(tmp_path, rng):
    """A closed buffer that was drawn from with priorities, under a limiter."""
    limiter = mr.RateLimiter(4.0, 1, 1000.0)
    sampler = mr.PrioritizedSampler(seed=0)
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(
        path,
        schema(),
        64,
        2,
        sampler=sampler,
        limiter=limiter,
        commit_every=None,
        autoreset="disabled",
    ) as buffer:
        for _ in range(5):
            buffer.extend(steps(rng, 16, 2))
            batch = buffer.sample(8)
            buffer.update_priorities(batch, rng.random(8))
    return path


def column(path):
    [place] = (path / "samplers").iterdir()
    return place


def test_a_buffer_that_was_drawn_from_is_whole(path):
    assert verify_buffer(path).findings == ()
    assert verify_buffer(path, deep=False).findings == ()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: put(column(p) / "STATE", 200, b"x" * 5000),
            "of its 2 records none is a valid one",
        ),
        (lambda p: (column(p) / "STATE").unlink(), "STATE is missing"),
        (lambda p: (column(p) / "priorities.bin").unlink(), "priorities.bin is missing"),
        (lambda p: (column(p) / "priorities.bin").write_bytes(b"123"), "got 3 bytes"),
        (lambda p: (p / "limiter" / "law.json").write_text("{"), "law.json"),
        (lambda p: put(p / "limiter" / "learner-000", 0, b"x"), "complement"),
    ],
)
@pytest.mark.parametrize("deep", [True, False])
def test_what_begins_anew_is_noted(path, damage, message, deep):
    damage(path)
    report = verify_buffer(path, deep=deep)
    assert [f.kind for f in report.findings] == ["beside"]
    assert message in report.findings[0].message
    assert report.ok


def test_a_number_that_is_none_is_noted_by_a_deep_check(path):
    put(column(path) / "priorities.bin", 40, b"\0\0\xc0\x7f")
    [finding] = verify_buffer(path).findings
    assert (finding.kind, finding.offset) == ("beside", 40)
    assert "such as nan" in finding.message
    assert verify_buffer(path, deep=False).findings == ()


def test_strange_names_are_noted(path):
    (column(path) / "more").touch()
    (path / "samplers" / "notes").touch()
    (path / "limiter" / "other").touch()
    assert [f.kind for f in verify_buffer(path).findings] == ["unknown"] * 3


def test_a_fast_check_reads_no_data_and_finds_what_is_not_in_it(path, capsys):
    put(path / DATA / "f000.bin", 5000, b"xyz")
    assert run(["verify", str(path), "--fast"]) == 0
    message = capsys.readouterr().out
    assert "not looked at" in message
    assert "committed rows alive\n" in message
    assert run(["verify", str(path), "--deep"]) == 1
    assert run(["verify", str(path)]) == 1
    capsys.readouterr()
    put(path / DATA / "flags.bin", 30, b"\xff")
    assert run(["verify", str(path), "--fast", "--json"]) == 1
    message = json.loads(capsys.readouterr().out)
    assert not message["deep"]
    assert not message["ok"]
    assert message["blocks"] == 0
    assert message["unsummed_rows"] is None
    assert message["nbytes"] == message["rows"]
    assert {f["kind"] for f in message["findings"]} == {"flags"}


@pytest.fixture
def counted(tmp_path):
    path = tmp_path / "counted"
    fields = mr.Schema({"x": mr.Field((), "int64")})
    sampler = mr.UseCounter(1, lease_s=60, seed=0)
    with mr.ReplayBuffer.create(
        path, fields, 64, 2, sampler=sampler, autoreset="disabled", commit_every=None
    ) as buffer:
        with pytest.raises(mr.EmptyError):
            buffer.sample(2)
        assert verify_buffer(path).findings == ()
        buffer.extend(x=np.arange(20).reshape(10, 2))
        batch = buffer.sample(3)
        assert verify_buffer(path).findings == ()
        buffer.acknowledge(batch, sync=True)
        assert (column(path) / "SYNCED").exists()
        assert verify_buffer(path).findings == ()
    return path


@pytest.mark.parametrize("deep", [True, False])
def test_a_buffer_whose_uses_were_counted_is_whole(counted, deep):
    assert verify_buffer(counted, deep=deep).findings == ()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: put(p / "STATE", 200, b"x" * 5000), "of its 2 records none is"),
        (lambda p: (p / "STATE").unlink(), "STATE is missing"),
        (lambda p: (p / "STATE").write_bytes(b"123"), "8192 bytes, got 3; counts"),
        (
            lambda p: put(p / "STATE", 0, bytes(8192)),
            "STATE is empty beside counts of uses; counts of uses that it held are",
        ),
        (lambda p: os.truncate(p / "uses.bin", 64), " bytes, got 64; counts of uses"),
        (lambda p: (p / "uses.bin").unlink(), "uses.bin is missing"),
        (lambda p: (p / "uses.bin").write_bytes(b"123"), "of 4, a number for each row"),
        (lambda p: put(p / "SYNCED", 8, b"xyz"), "not a valid one of this buffer; counts of"),
        (lambda p: (p / "SYNCED").write_bytes(b""), "4096 or 8192 bytes, got 0"),
    ],
)
def test_counts_of_uses_that_would_be_lost_are_noted(counted, damage, message):
    damage(column(counted))
    report = verify_buffer(counted)
    assert [each.kind for each in report.findings] == ["beside"]
    assert message in report.findings[0].message
    assert report.ok


def test_strange_names_in_the_folder_of_counts_are_noted(counted):
    (column(counted) / "more").touch()
    (column(counted) / "tmp-uses.bin").touch()
    assert [each.file for each in verify_buffer(counted).findings] == [
        f"samplers/{column(counted).name}/more"
    ]
