"""Flags: rows that are impossible, alone or after one another, are found."""

import shutil

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.episodes.boundaries import alone_problem, names, pair_problem
from mmreplay.format import metadata as metadata_file
from mmreplay.verify import verify_buffer
from tests.verify.support import DATA, messages, put


def set_flags(path, env_id, position, flags):
    ring = metadata_file.load(path).ring
    put(path / DATA / "flags.bin", ring.row(env_id, position), bytes([flags]))
    return ring.row(env_id, position)


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (64, "flags must be within 0x3f, got unknown 0x40"),
        (FINAL | START, "a final row must have no flag but FINAL, got START|FINAL"),
        (BREAK, "a row with BREAK must also have START, got BREAK"),
        (START | CUT, "a row with CUT must also have BREAK, got START|CUT"),
        (FINAL, "a final row must follow an episode's end, got FINAL after none"),
        (START, "must follow an episode's end or also have BREAK, got START after n"),
    ],
)
def test_impossible_flags_are_found(tmp_path, layout, flags, message):
    path = plain(tmp_path / "b", layout=layout)
    row = set_flags(path, 1, 9, flags)
    finding = next(f for f in verify_buffer(path).findings if f.kind == "flags")
    assert finding.message.startswith("environment 1, position 9: ")
    assert message in finding.message
    assert finding.offset == row


def plain(path, autoreset="disabled", layout=None):
    """A buffer of one endless episode in each of two environments."""
    fields = mr.Schema({"observation": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(
        path, fields, 32, 2, autoreset=autoreset, layout=layout, commit_every=None
    ) as buffer:
        zeros = np.zeros((20, 2))
        buffer.extend(observation=zeros.astype(np.int64), terminated=zeros != 0)
    return path


@pytest.mark.parametrize(
    ("autoreset", "flags", "message"),
    [
        (
            "disabled",
            [TERMINATED, 0],
            "after an end must have FINAL or START, got none after TERMINATED",
        ),
        (
            "next_step",
            [TERMINATED, START],
            "the row after an end must have FINAL or START|BREAK, got START",
        ),
        (
            "disabled",
            [TERMINATED, FINAL, 0],
            "the row after a final row must have START, got none after FINAL",
        ),
    ],
)
def test_rows_that_cannot_follow_each_other_are_found(tmp_path, autoreset, flags, message):
    path = plain(tmp_path / "b", autoreset)
    for index, value in enumerate(flags):
        set_flags(path, 0, 4 + index, value)
    assert message in messages(path, "flags")


def test_a_first_row_that_starts_nothing_is_found(tmp_path):
    path = plain(tmp_path / "b")
    set_flags(path, 0, 0, 0)
    message = "the first row of an environment must have START, got none"
    assert message in messages(path, "flags")


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("position", [19, 20, 22])
def test_flags_that_are_published_and_not_yet_committed_are_found(tmp_path, layout, position):
    """They are served; of a copy they are cut."""
    path = plain(tmp_path / "b", layout=layout)
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        more = np.zeros((3, 2))
        buffer.extend(observation=more.astype(np.int64), terminated=more != 0)
        assert buffer.committed.tolist() == [20, 20]
        assert buffer.heads.tolist() == [23, 23]
        assert verify_buffer(path).findings == ()
        set_flags(path, 1, position, 64)
        shutil.copytree(path, tmp_path / "copy")
        (message,) = [f for f in verify_buffer(path).findings if f.kind == "flags"]
        where = f"environment 1, position {position}: flags must be within 0x3f"
        assert message.message.startswith(where)
        assert verify_buffer(path).rows == 40
        assert verify_buffer(tmp_path / "copy").ok == (position >= 20)


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
