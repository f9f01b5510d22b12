"""What an open buffer tells of itself, and what a closed one lets go."""

import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.episodes import BREAK, FINAL, START, TERMINATED
from mmreplay.errors import FailedError, SchemaError, StaleError
from tests.buffer.support import Twin, schema
from tools.torture.powerloss import abandon

MUTABLE = mr.Schema({"number": mr.Field((), "int64"), "note": mr.Field((), "int64", mutable=True)})


def test_slots_and_layout_are_those_of_the_ring(tmp_path):
    twin = Twin(tmp_path / "ring", 40, 2, layout="time_major")
    buffer = twin.buffer
    assert (buffer.slots, buffer.layout) == (buffer.metadata.ring.slots, "time_major")
    assert buffer.slots > buffer.capacity
    buffer.close()


def test_tails_count_the_rows_that_were_dequeued(tmp_path):
    twin = Twin(tmp_path / "ring", 5, 2)
    for _ in range(7):
        twin.add(["", ""])
    assert twin.buffer.tails.tolist() == [0, 0]
    assert twin.buffer.span.first.tolist() == [2, 2]
    twin.buffer.dequeue(1, [1])
    assert twin.buffer.tails.tolist() == [0, 3]
    twin.buffer.clear([0])
    assert twin.buffer.tails.tolist() == [7, 3]
    twin.buffer.tails[:] = 99  # a copy: nobody changes the buffer with it
    assert twin.buffer.tails.tolist() == [7, 3]
    twin.buffer.close()


def test_flags_say_what_rows_are_to_their_episodes(tmp_path):
    twin = Twin(tmp_path / "ring", 9, 2, autoreset="next_step")
    for kinds in (["", ""], ["t", ""], ["", ""], ["", ""]):
        twin.add(kinds)
    buffer = twin.buffer
    assert buffer.flags(0, np.arange(4)).tolist() == [START, TERMINATED, FINAL, START]
    assert buffer.flags([[0], [1]], [0, 1]).tolist() == [[START, TERMINATED], [START, 0]]
    with pytest.raises(StaleError, match="position 4 of environment 1"):
        buffer.flags(1, 4)
    with pytest.raises(SchemaError, match=r"env_ids must be.*got values in \[2, 2\]"):
        buffer.flags(2, 0)
    buffer.close()
    with mr.ReplayBuffer.open(twin.path, "r+") as again:
        again.add({path: rows[-2:] for path, rows in last(again).items()})
        assert again.flags(0, 4) == START | BREAK


def last(buffer):
    rows = buffer.gather_all()
    return {path: np.array(rows[path]) for path in buffer.schema.paths}


def test_a_reader_tells_of_a_resize_before_it_reads_anything(tmp_path):
    path = tmp_path / "ring"
    with mr.ReplayBuffer.create(path, schema(), 5) as buffer:
        readers = [mr.ReplayBuffer.open(path) for _ in range(4)]
        buffer.resize(9)
        buffer.add_field("more", mr.Field((), "int8"), 0)
        assert readers[0].capacity == 9
        assert "more" in readers[1].schema
        assert readers[2].metadata == buffer.metadata
        assert "1 x 9, 6 fields" in repr(readers[3])
        for reader in readers:
            reader.close()
            assert reader.capacity == 9


def test_what_was_set_is_committed_by_the_thread_though_no_row_came(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "b", MUTABLE, 9, commit_every=None) as buffer:
        buffer.add(number=1, note=2)
        buffer.commit()
        committer = buffer._files.committer
        before = committer._commit_state.committed.sequence
        committer._turn(0.0)
        assert committer._commit_state.committed.sequence == before
        buffer.write_field("note", 0, 0, 7)
        committer._turn(0.0)
        assert committer._commit_state.committed.sequence > before
        assert not committer._dirty()


def test_what_a_killed_writer_set_is_committed_by_the_next_ones_thread(tmp_path):
    fields = {"x": mr.Field((), "float32", mutable=True)}
    with mr.ReplayBuffer.create(tmp_path / "ring", mr.Schema(fields), 9) as buffer:
        buffer.add(x=1.0)
    buffer = mr.ReplayBuffer.open(tmp_path / "ring", "r+", commit_every=None)
    buffer.add(x=2.0)
    buffer.commit()
    buffer.write_field("x", [0], [0], np.array([3.0], np.float32))
    abandon(buffer)
    with mr.ReplayBuffer.open(tmp_path / "ring", "r+", commit_every=None) as again:
        assert again.recovery.how == "killed"
        assert again.committed.tolist() == again.heads.tolist()
        committer = again._files.committer
        assert committer._dirty()
        again.commit()
        assert not committer._dirty()


def test_a_closed_buffer_maps_nothing_and_its_batches_stay(tmp_path):
    twin = Twin(tmp_path / "ring", 9)
    for _ in range(4):
        twin.add([""])
    reader = mr.ReplayBuffer.open(twin.path)
    for buffer in (twin.buffer, reader):
        rows = buffer.gather_all()
        flags = buffer.flags(0, np.arange(4))
        store = buffer._files.store
        mappings = [store._mapping, *(rows.mapping for rows in store._mapped)]
        buffer.close()
        assert all(mapping.closed for mapping in mappings)
        with pytest.raises(FailedError, match="is closed"):
            buffer.gather_all()
        assert rows["action"].tolist() == [1, 2, 3, 4]
        assert flags.tolist() == [START, 0, 0, 0]


def test_rows_that_a_thread_is_copying_outlive_the_closing(tmp_path):
    twin = Twin(tmp_path / "ring", 9)
    twin.add([""])
    twin.add([""])
    store = twin.buffer._files.store
    copying = store._records.array  # as a gather holds it
    mapping = store._records.mapping
    twin.buffer.close()
    assert not mapping.closed
    assert copying.take([1]).nbytes == copying.dtype.itemsize
    with pytest.raises(FailedError, match="it was closed meanwhile"):
        store.gather(np.array([0]), ["observation"])
    with pytest.raises(FailedError, match="it was closed meanwhile"):
        store.flags_between(0, 0, 1)


def test_draws_during_a_close_return_batches_or_report_the_close(tmp_path):
    twin = Twin(tmp_path / "ring", 50)
    for _ in range(40):
        twin.add([""])
    reader = mr.ReplayBuffer.open(twin.path)
    raised = []

    def draw():
        try:
            while True:
                batch = reader.sample(64)
                assert (batch["observation"][:, 0] == batch["action"]).all()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=draw) for _ in range(3)]
    for thread in threads:
        thread.start()
    reader.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in raised] == [FailedError] * 3, raised
    twin.buffer.close()
