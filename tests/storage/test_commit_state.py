"""COMMIT in use: a writer's slots in turn, and a reader that never goes back."""

import errno

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import process
from mmreplay.errors import FullError, StarvedError
from mmreplay.format import commit
from mmreplay.storage import commit_state, recovery
from mmreplay.storage import commit_state as ledger
from mmreplay.testing.disks import Disk, FaultyDisk, WatchedDisk, using
from tests.format.support import BOOT_ID, UUID, fill, metadata_of, record_of, schema_of

METADATA = metadata_of()
LIVE, DURABLE = commit.LIVE_SLOTS, commit.DURABLE_SLOTS


@pytest.fixture(autouse=True)
def this_boot(monkeypatch):
    monkeypatch.setattr(process, "boot_id", lambda: BOOT_ID)


@pytest.fixture
def folder(tmp_path):
    recovery.create(tmp_path, METADATA)
    return tmp_path


@pytest.fixture
def writer(folder):
    writer, _ = recovery.open_writer(folder, METADATA)
    yield writer
    writer.close()


@pytest.fixture
def reader(folder, writer):
    reader, _ = recovery.open_reader(folder, METADATA)
    yield reader
    reader.close()


def heads_of(number):
    return np.array([number, number + 100])


def publish(writer, number):
    writer.publish(heads_of(number), heads_of(number + 8), heads_of(number) // 2)


def slots(folder):
    return commit.split((folder / "COMMIT").read_bytes(), UUID, 1, 2)


def damage(folder, slot, at, data):
    with open(folder / "COMMIT", "r+b") as file:
        file.seek(4096 * slot + at)
        file.write(data)


def test_live_slots_are_used_strictly_in_turn(folder, writer):
    used = []
    for number in range(1, 30):
        before = slots(folder)
        publish(writer, number)
        if number % 3 == 0:
            writer.commit(heads_of(number), heads_of(0))
        after = slots(folder)
        changed = [s for s in LIVE if after[s].sequence != before[s].sequence]
        used += changed
        assert after[changed[0]].heads.tolist() == [number, number + 100]
        assert len(changed) == 1
    assert used in ([2, 3] * 14 + [2], [3, 2] * 14 + [3])


def test_durable_slots_are_used_strictly_in_turn(folder, writer):
    used = []
    publish(writer, 12)
    for number in range(1, 12):
        before = slots(folder)
        if number % 2:
            writer.commit(heads_of(number), heads_of(0))
        else:
            writer.give_up(heads_of(20 + number))
        after = slots(folder)
        used += [s for s in DURABLE if after[s].sequence != before[s].sequence]
    assert used in (([0, 1] * 6)[:11], ([1, 0] * 6)[:11])


def test_sequences_grow_over_both_kinds_and_reopening(folder, writer):
    seen = max(record.sequence for record in slots(folder))
    for number in range(1, 9):
        if number % 2:
            publish(writer, number)
        else:
            writer.commit(heads_of(number - 1), heads_of(0))
        newest = max(record.sequence for record in slots(folder))
        assert newest == seen + 1
        seen = newest
    again, _ = recovery.open_writer(folder, METADATA)
    assert min(record.sequence for record in slots(folder)) > seen
    again.close()


def test_a_durable_record_that_gives_up_more_repeats_the_committed_heads(folder, writer):
    writer.commit(heads_of(3), heads_of(1))
    publish(writer, 20)
    writer.give_up(heads_of(40))
    newest = commit.newest_durable(slots(folder))
    assert newest.heads.tolist() == [3, 103]
    assert newest.limits.tolist() == [40, 140]
    writer.commit(heads_of(20), heads_of(10))
    newest = commit.newest_durable(slots(folder))
    assert newest.heads.tolist() == [20, 120]
    assert newest.limits.tolist() == [40, 140]


def test_a_reader_sees_each_publication(writer, reader):
    assert not reader.refresh()
    for number in range(1, 20):
        publish(writer, number)
        assert reader.refresh()
        assert not reader.refresh()
        assert reader.heads.tolist() == [number, number + 100]
        assert reader.limits.tolist() == [number + 8, number + 108]
        assert reader.tails.tolist() == [number // 2, (number + 100) // 2]


def test_a_commit_alone_tells_a_reader_nothing(writer, reader):
    publish(writer, 5)
    reader.refresh()
    writer.commit(heads_of(5), heads_of(0))
    assert not reader.refresh()


class TearingDisk(Disk):
    """A disk on which every store stops after so many bytes, as a kill would."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def store(self, fd, mapping, offset, data):
        mapping[offset : offset + self.nbytes] = data[: self.nbytes]
        raise KeyboardInterrupt


@pytest.mark.parametrize("nbytes", [0, 8, 17, 24, 100, 129, 150, 4000, 4093, 4095])
def test_a_kill_in_the_middle_of_a_store_leaves_the_other_slot(folder, writer, reader, nbytes):
    for number in (6, 7):
        publish(writer, number)
    reader.refresh()
    with using(TearingDisk(nbytes)), pytest.raises(KeyboardInterrupt):
        publish(writer, 8)
    assert not reader.refresh()
    assert reader.heads.tolist() == [7, 107]
    late, report = recovery.open_reader(folder, METADATA)
    assert not late.refresh()
    assert (late.heads.tolist(), report.how) == ([7, 107], "killed")
    late.close()
    again, _ = recovery.open_writer(folder, METADATA)
    assert again.heads.tolist() == [7, 107]
    publish(again, 9)
    assert reader.refresh()
    assert reader.heads.tolist() == [9, 109]
    again.close()


def test_a_reader_never_goes_back(folder, writer, reader):
    for number in (6, 7):
        publish(writer, number)
    reader.refresh()
    status = (folder / "COMMIT").stat()
    old = record_of([2, 102], sequence=2, epoch=9, device=status.st_dev, inode=status.st_ino)
    for slot in LIVE:
        damage(folder, slot, 0, old.encode())
    assert not reader.refresh()
    assert reader.heads.tolist() == [7, 107]


def test_a_higher_sequence_of_another_boot_is_not_accepted(folder, writer, reader):
    publish(writer, 7)
    reader.refresh()
    foreign = record_of([9, 109], sequence=99, boot_id=UUID)
    damage(folder, LIVE[0], 0, foreign.encode())
    assert not reader.refresh()
    assert reader.heads.tolist() == [7, 107]


def test_live_slots_that_are_incomplete_at_each_look_starve_a_reader(
    folder, writer, reader, monkeypatch
):
    monkeypatch.setattr(commit_state, "PATIENCE_S", 0.01)
    for number in (6, 7, 8, 9):
        publish(writer, number)
    looked = commit_state.CommitReader._bytes

    def tearing(self, slot):
        damage(folder, slot, 200, np.random.default_rng().bytes(8))
        return looked(self, slot)

    monkeypatch.setattr(commit_state.CommitReader, "_bytes", tearing)
    with pytest.raises(StarvedError, match=r"COMMIT is damaged: no .* in 0\.01 s"):
        reader.refresh()
    monkeypatch.setattr(commit_state.CommitReader, "_bytes", looked)
    publish(writer, 10)
    assert reader.refresh()
    assert reader.heads.tolist() == [10, 110]


def test_a_reader_learns_that_the_buffer_moved(writer, reader):
    publish(writer, 5)
    reader.refresh()
    assert not reader.moved
    writer.mark_moved()
    assert reader.refresh()
    assert reader.moved
    assert reader.heads.tolist() == [5, 105]


def test_a_reader_that_is_marked_opens_the_buffer_again(writer, reader):
    reader.mark_moved()
    assert reader.moved
    assert not writer.moved
    publish(writer, 5)
    assert reader.heads.tolist() == [0, 0]


def test_readers_alone_follow_another_process(writer, reader):
    assert reader.follows
    assert not writer.follows
    assert not ledger.MemoryCommitState(2).follows


def test_what_a_power_cut_leaves_is_what_was_committed(writer):
    publish(writer, 5)
    writer.commit(writer.heads, writer.tails)
    publish(writer, 9)
    assert writer.committed.heads.tolist() == [5, 105]
    book = ledger.MemoryCommitState(2)
    publish(book, 9)
    # Nothing is left of a ring in RAM, and nothing of it waits for a commit.
    assert book.committed.heads is book.heads
    assert book.committed.tails is book.tails


def test_arrays_handed_out_are_replaced_and_never_changed(writer, reader):
    publish(writer, 5)
    reader.refresh()
    for book in (writer, reader):
        held = book.heads
        before = held.copy()
        publish(writer, int(writer.heads[0]) + 1)
        reader.refresh()
        assert np.array_equal(held, before)
        assert not np.array_equal(book.heads, before)


def test_a_ring_in_ram_keeps_what_was_published():
    book = ledger.MemoryCommitState(2)
    assert book.heads.tolist() == [0, 0]
    publish(book, 5)
    assert (book.heads.tolist(), book.tails.tolist()) == ([5, 105], [2, 52])
    assert not book.refresh()
    assert not book.moved
    book.close()


@pytest.mark.parametrize("kind", ["btrfs", "zfs", "bcachefs"])
def test_where_no_space_can_be_reserved_live_slots_are_written(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(recovery, "file_system", lambda path: kind)
    with using(WatchedDisk()) as disk:
        buffer = mr.ReplayBuffer.create(
            tmp_path / "b", schema_of(), 12, 2, commit_every=None, autoreset="disabled"
        )
        fill(buffer, 0, 5)
    assert disk.calls["store"] == 0
    full = OSError(errno.ENOSPC, "No space left on device")
    calls = 0
    with using(WatchedDisk()) as disk:
        fill(buffer, 5, 6)
        calls = disk.calls["pwrite"]
    for at in range(calls):
        fault = FaultyDisk(full, at, names=("pwrite",))
        with using(fault), pytest.raises(FullError, match="No space left"):
            fill(buffer, 6, 7)
        assert buffer.heads.tolist() == [6, 6]
    fill(buffer, 6, 30)
    with mr.ReplayBuffer.open(tmp_path / "b") as reader:
        assert reader.heads.tolist() == [30, 30]
        found = reader.gather_all()
        assert np.array_equal(found["action"], 1000 * found.env_ids + found.positions)
    buffer.close()


def test_a_full_disk_at_the_first_live_slot_is_an_error_of_the_open(tmp_path):
    # A copy that shares its blocks with the original takes new ones when written.
    mr.ReplayBuffer.create(tmp_path / "b", schema_of(), 12, 2, autoreset="disabled").close()
    full = OSError(errno.ENOSPC, "No space left on device")
    with using(WatchedDisk()) as disk:
        mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None).close()
    # The lock's text, four slots, and at closing one more.
    for at in range(disk.calls["pwrite"] - 1):
        fault = FaultyDisk(full, at, names=("pwrite",))
        with using(fault), pytest.raises(FullError, match="No space left"):
            mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None)
    mr.ReplayBuffer.open(tmp_path / "b", "r+").close()
