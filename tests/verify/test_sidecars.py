"""Columns and counts beside the data are checked, and never make a buffer damaged."""

import json

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
            "none of its two records is a valid one",
        ),
        (lambda p: (column(p) / "STATE").unlink(), "STATE is missing"),
        (
            lambda p: (column(p) / "priorities.bin").unlink(),
            "priorities.bin is missing",
        ),
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
