"""Facts of a buffer, views that stand still, and the folder of a renamed buffer."""

import threading

import numpy as np
import pytest

import mmreplay as mr

FIELDS = {
    "observation": mr.Field((2,), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}


def fill(buffer, count, length):
    """Steps whose episodes are so long, in each environment."""
    for step in range(count):
        ends = np.full(buffer.num_envs, step % length == length - 1)
        buffer.add(
            observation=np.full((buffer.num_envs, 2), step, np.float32),
            terminated=ends,
            truncated=np.zeros(buffer.num_envs, bool),
        )


@pytest.fixture
def writer(tmp_path):
    with mr.ReplayBuffer.create(
        tmp_path / "b", mr.Schema(FIELDS), 100, 2, autoreset="same_step"
    ) as buffer:
        fill(buffer, 25, 10)
        yield buffer


def test_facts_count_what_is_alive_and_what_is_committed(writer):
    writer.commit()
    committed = writer.heads
    fill(writer, 5, 10)
    with mr.ReplayBuffer.open(writer.path) as reader:
        for buffer in (writer, reader):
            facts = buffer.facts()
            rows, commit = facts.rows(), facts.commit()
            assert (rows.rows, rows.steps) == (rows.heads.sum() - rows.tails.sum(), len(buffer))
            assert rows.rows > committed.sum()
            assert rows.legal_starts == len(buffer.gather_all()) - 2  # the newest steps wait
            assert (rows.unfinished, rows.missing_start, rows.never_drawn_steps) == (2, 0, 0)
            assert rows.episodes == len(mr.episode_table(buffer).begin)
            assert facts.heap() is None
            np.testing.assert_array_equal(commit.heads, committed)
            assert (commit.clean, commit.exact) == (False, True)
            assert commit.time_ns > 1e18
            apparent, allocated = facts.disk()
            assert apparent > 0 < allocated
            assert facts.writer()["pid"]
    writer.close()
    with mr.ReplayBuffer.open(writer.path) as reader:
        assert reader.facts().commit().clean
        assert reader.facts().writer() is None


def test_facts_of_the_disk_need_a_folder():
    with mr.ReplayBuffer.create(
        None, mr.Schema(FIELDS), 100, 2, engine="memory", autoreset="same_step"
    ) as buffer:
        fill(buffer, 5, 10)
        facts = buffer.facts()
        assert facts.rows().rows == 10
        for ask in (facts.disk, facts.commit, facts.writer):
            with pytest.raises(mr.FailedError, match=r"in RAM has no folder.* rows alone\.$"):
                ask()


def test_a_still_view_shows_the_same_rows_until_it_is_refreshed(writer):
    with mr.ReplayBuffer.open(writer.path) as reader:
        still = reader.still_view()
        before = reader.heads
        fill(writer, 7, 10)
        np.testing.assert_array_equal(reader.heads, writer.heads)
        np.testing.assert_array_equal(still.span.stop, before)
        assert still.index.num_steps < len(reader)
        still.refresh()
        np.testing.assert_array_equal(still.span.stop, writer.heads)
        assert still.index.num_steps == len(reader)


def test_a_draw_from_a_still_view_holds_up_no_other(writer):
    with mr.ReplayBuffer.open(writer.path) as reader:
        still, drawn = reader.still_view(), []
        other = threading.Thread(target=lambda: drawn.append(reader.sample(16)))
        with still.lock:
            other.start()
            other.join(60)
        assert len(drawn) == 1


def test_a_still_view_of_a_buffer_that_is_open_for_writing_is_refused(writer):
    with pytest.raises(mr.FailedError, match=r"open for writing\. Open its path once more"):
        writer.still_view()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_the_folder_of_a_renamed_buffer_is_found(writer, mode):
    writer.close()
    with mr.ReplayBuffer.open(writer.path, mode) as buffer:
        assert buffer.folder_now() == writer.path
        moved = writer.path.rename(writer.path.with_name("moved"))
        assert buffer.folder_now() == moved
        assert buffer.facts().commit().heads.tolist() == buffer.heads.tolist()
        # Where anything stands at its path, that is taken for it.
        writer.path.mkdir()
        assert buffer.folder_now() == writer.path
        writer.path.rmdir()


def test_a_buffer_in_ram_has_no_folder():
    with mr.ReplayBuffer.create(
        None, mr.Schema(FIELDS), 100, 2, engine="memory", autoreset="same_step"
    ) as buffer:
        assert buffer.folder_now() is None
