"""A writer may say that its next rows do not follow the last ones."""

import numpy as np
import pytest

from mmreplay import Field, NStep, ReplayBuffer, Schema, verify_buffer
from mmreplay.episodes import BREAK, CUT, START, TERMINATED
from mmreplay.errors import DurabilityWarning, FailedError, SchemaError

SCHEMA = Schema(
    {
        "observation": Field((), "int64"),
        "reward": Field((), "float32"),
        "terminated": Field((), "bool"),
        "truncated": Field((), "bool"),
    }
)


def add(buffer: ReplayBuffer, number: int, terminated: list[bool]) -> None:
    count = len(terminated)
    buffer.add(
        observation=np.full(count, number),
        reward=np.ones(count, np.float32),
        terminated=np.array(terminated),
        truncated=np.zeros(count, bool),
    )


def test_rows_after_end_episodes_start_an_episode_and_the_last_step_is_truncated(tmp_path):
    with ReplayBuffer.create(tmp_path / "ring", SCHEMA, 10, 2, autoreset="disabled") as buffer:
        add(buffer, 0, [False, False])
        buffer.end_episodes([1])
        add(buffer, 1, [False, True])
        buffer.end_episodes()
        buffer.end_episodes()  # once more changes nothing
        add(buffer, 2, [False, False])
        new = START | BREAK
        flags = [[START, 0, new | CUT], [START, new | CUT | TERMINATED, new]]
        assert buffer.flags([[0], [1]], [[0, 1, 2]]).tolist() == flags
        truncated = buffer.get_field("truncated", [[0], [1]], [[0, 1, 2]])
        assert truncated.tolist() == [[False, True, False], [True, False, False]]
    assert verify_buffer(tmp_path / "ring").ok


def test_a_block_without_steps_leaves_an_end_waiting():
    buffer = ReplayBuffer.create(None, SCHEMA, 10, engine="memory")
    add(buffer, 0, [False])
    buffer.end_episodes()
    buffer.extend(
        observation=np.empty((0, 1), int),
        reward=np.empty((0, 1), np.float32),
        terminated=np.empty((0, 1), bool),
        truncated=np.empty((0, 1), bool),
    )
    add(buffer, 1, [False])
    assert buffer.flags(0, [0, 1]).tolist() == [START, START | BREAK | CUT]


def test_no_step_is_drawn_across_an_ended_episode():
    buffer = ReplayBuffer.create(None, SCHEMA, 10, engine="memory", transforms=[NStep(2, 0.5)])
    for number in range(6):
        add(buffer, number, [False])
        if number == 2:
            buffer.end_episodes()
    # 0 is folded with 1 and followed by 2, 3 with 4; others reach over an edge.
    drawn = np.unique(buffer.sample(100)["observation"])
    assert drawn.tolist() == [0, 3]


def test_end_episodes_of_an_empty_buffer_changes_nothing():
    buffer = ReplayBuffer.create(None, SCHEMA, 10, engine="memory")
    buffer.end_episodes()
    add(buffer, 0, [False])
    assert buffer.flags(0, [0]).tolist() == [START]


@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("cleared", [False, True])
def test_rows_after_end_episodes_start_an_episode_where_all_earlier_rows_are_gone(
    autoreset, ended, cleared
):
    buffer = ReplayBuffer.create(None, SCHEMA, 10, engine="memory", autoreset=autoreset)
    add(buffer, 0, [False])
    add(buffer, 1, [ended])
    if cleared:
        buffer.clear()
    else:
        buffer.dequeue(2)
    buffer.end_episodes()
    add(buffer, 2, [False])
    add(buffer, 3, [False])
    assert buffer.flags(0, [2, 3]).tolist() == [START | BREAK, 0]


def test_ended_episodes_stay_ended_where_rows_are_moved(tmp_path):
    with ReplayBuffer.create(tmp_path / "ring", SCHEMA, 10) as buffer:
        add(buffer, 0, [False])
        buffer.end_episodes()
        buffer.resize(20)
        add(buffer, 1, [False])
        assert buffer.flags(0, [1]).tolist() == [START | BREAK | CUT]


def test_only_a_writer_ends_episodes(tmp_path):
    ReplayBuffer.create(tmp_path / "ring", SCHEMA, 10).close()
    with (
        ReplayBuffer.open(tmp_path / "ring") as reader,
        pytest.raises(FailedError, match=r".* is open with mode='r'"),
    ):
        reader.end_episodes()


def test_an_end_that_no_row_stores_is_warned_of_by_close(tmp_path):
    path = tmp_path / "ring"
    buffer = ReplayBuffer.create(path, SCHEMA, 10, 3, autoreset="disabled")
    add(buffer, 0, [False, False, True])
    buffer.end_episodes()
    told = (
        rf"{path}: the end_episodes of environments \[0, 1\] is not stored, as no row "
        r"followed it\. Open the buffer with on_resume='truncate' instead\."
    )
    with pytest.warns(DurabilityWarning, match=told):
        buffer.close()
    assert buffer.closed
    buffer.close()  # says nothing more
    # What the warning is of: the episodes of 0 and 1 go on.
    with ReplayBuffer.open(path, "r+", on_resume="continue") as buffer:
        add(buffer, 1, [False, False, False])
        flags = buffer.flags(np.arange(2), np.zeros(2, np.int64))
        assert not (flags & CUT).any()
    # An opening that truncates needs no warning, nor do rows in memory.
    with ReplayBuffer.open(path, "r+", on_resume="truncate"):
        pass
    memory = ReplayBuffer.create(None, SCHEMA, 10, 1, engine="memory")
    add(memory, 0, [False])
    memory.end_episodes()
    memory.close()


@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
def test_discarded_episodes_are_broken_off_and_not_truncated(tmp_path, autoreset):
    with ReplayBuffer.create(tmp_path / "ring", SCHEMA, 10, 3, autoreset=autoreset) as buffer:
        add(buffer, 0, [False, False, True])
        buffer.end_episodes([1], discard=True)
        buffer.end_episodes([0, 2], discard=True)
        add(buffer, 1, [False, False, False])
        new = START | BREAK
        assert buffer.flags([0, 1, 2], [1, 1, 1]).tolist() == [new, new, new]
        assert not buffer.get_field("truncated", [0, 1, 2], [0, 0, 0]).any()
    assert verify_buffer(tmp_path / "ring").ok


@pytest.mark.parametrize("calls", [[False, True], [True, False]])
def test_of_several_calls_before_a_row_the_last_counts(calls):
    buffer = ReplayBuffer.create(None, SCHEMA, 10, engine="memory")
    add(buffer, 0, [False])
    for discard in calls:
        buffer.end_episodes(discard=discard)
    add(buffer, 1, [False])
    cut = 0 if calls[-1] else CUT
    assert buffer.flags(0, [0, 1]).tolist() == [START, START | BREAK | cut]


def test_discard_after_an_opening_that_truncates_discards(tmp_path):
    with ReplayBuffer.create(tmp_path / "ring", SCHEMA, 10) as buffer:
        add(buffer, 0, [False])
    with ReplayBuffer.open(tmp_path / "ring", "r+", on_resume="truncate") as buffer:
        buffer.end_episodes(discard=True)
        add(buffer, 1, [False])
        assert buffer.flags(0, [1]).tolist() == [START | BREAK]


def test_a_discard_that_no_row_stores_is_warned_of_by_close(tmp_path):
    path = tmp_path / "ring"
    buffer = ReplayBuffer.create(path, SCHEMA, 10, 3, autoreset="disabled")
    add(buffer, 0, [False, False, True])
    buffer.end_episodes([0])
    buffer.end_episodes([1, 2], discard=True)
    with pytest.warns(DurabilityWarning) as said:
        buffer.close()
    assert [str(each.message) for each in said] == [
        f"{path}: the end_episodes of environments [0] is not stored, as no row followed it. "
        "Open the buffer with on_resume='truncate' instead.",
        f"{path}: the end_episodes(discard=True) of environments [1] is not stored, as no row "
        "followed it. Open the buffer with on_resume='break' instead.",
    ]


def test_discard_must_be_a_bool():
    buffer = ReplayBuffer.create(None, SCHEMA, 10, engine="memory")
    with pytest.raises(SchemaError, match=r"^discard must be True or False, got 1\. Pass True"):
        buffer.end_episodes(discard=1)


def test_a_row_after_end_episodes_stores_it_and_close_is_silent(tmp_path):
    ring = tmp_path / "ring"
    with ReplayBuffer.create(ring, SCHEMA, 10, 2, autoreset="disabled") as buffer:
        add(buffer, 0, [False, False])
        buffer.end_episodes()
        add(buffer, 1, [False, False])
        buffer.end_episodes([0])
        buffer.resize(20)
        buffer.clear()
    buffer = ReplayBuffer.open(ring, "r+", on_resume="continue")
    add(buffer, 2, [False, False])
    buffer.end_episodes()
    buffer.resize(30)
    buffer.clear([0])
    with pytest.warns(DurabilityWarning, match=r"environments \[1\] is not stored"):
        buffer.close()
