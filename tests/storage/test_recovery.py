"""What opening decides: one hand-damaged COMMIT for each rule."""

import numpy as np
import pytest

from mmreplay import process
from mmreplay.disk import files
from mmreplay.errors import CorruptError, StarvedError
from mmreplay.format import commit
from mmreplay.storage import commit_state, recovery
from mmreplay.testing.disks import FaultyDisk, WatchedDisk, using
from tests.format.support import BOOT_ID, UUID, metadata_of, record_of

METADATA = metadata_of()
SLOTS = METADATA.ring.slots
OTHER = bytes(reversed(BOOT_ID))


@pytest.fixture(autouse=True)
def this_boot(monkeypatch):
    monkeypatch.setattr(process, "boot_id", lambda: BOOT_ID)


class DataFolder:
    """A data folder whose COMMIT is written by hand."""

    def __init__(self, folder):
        self.folder = folder
        recovery.create(folder, METADATA)
        self.path = folder / "COMMIT"
        file = files.File.open(self.path, None)
        self.device, self.inode, self.birth = file.identity()
        file.close()

    def record(self, heads, *args, **changes):
        given = {"device": self.device, "inode": self.inode, "birth": self.birth}
        return record_of(heads, *args, **(given | changes))

    def write(self, *slots):
        """Put records, raw bytes or None for blank into D0, D1, L0, L1."""
        parts = [s.encode() if isinstance(s, commit.Record) else s or bytes(4096) for s in slots]
        # In place: a new file would be another inode.
        with open(self.path, "r+b") as file:
            file.write(b"".join(parts))
        return self

    def slots(self):
        return commit.split(self.path.read_bytes(), UUID, 1, 2)

    def reader(self):
        reader, report = recovery.open_reader(self.folder, METADATA)
        found = said(reader)
        reader.close()
        return found, report

    def writer(self):
        writer, report = recovery.open_writer(self.folder, METADATA)
        found = (*said(writer), writer.committed.heads.tolist())
        writer.close()
        return found, report


def said(state):
    return tuple(a.tolist() for a in (state.heads, state.limits, state.tails))


@pytest.fixture
def data_folder(tmp_path):
    return DataFolder(tmp_path)


def damaged(record):
    data = bytearray(record.encode())
    data[140] ^= 1
    return bytes(data)


# Which record is the truth


def test_a_new_file_holds_one_record_twice(data_folder):
    first, second, *live = data_folder.slots()
    assert first is not None
    assert first.encode() == second.encode()
    assert live == [None, None]
    assert data_folder.reader()[0] == ([0, 0], [0, 0], [0, 0])


def test_the_newest_epoch_wins_over_a_higher_sequence(data_folder):
    old = data_folder.record([9, 9], epoch=1, sequence=50)
    new = data_folder.record([4, 4], epoch=2, sequence=3)
    data_folder.write(old, new, None, None)
    assert data_folder.reader()[0][0] == [4, 4]
    data_folder.write(new, old, old, old)
    assert data_folder.reader()[0][0] == [4, 4]


def test_within_an_epoch_the_higher_sequence_wins(data_folder):
    low, high = (data_folder.record([4, 4], sequence=5), data_folder.record([3, 3], sequence=6))
    for slots in ([low, high, None, None], [high, low, None, None]):
        assert data_folder.write(*slots).reader()[0][0] == [3, 3]
    for slots in ([None, low, low, high], [low, None, high, low]):
        assert data_folder.write(*slots).reader()[0][0] == [3, 3]


def test_live_outranks_a_durable_record_that_only_gave_up_more(data_folder):
    live = data_folder.record([40, 41], [44, 44], sequence=20)
    raised = data_folder.record([10, 10], [60, 60], sequence=21)
    found, report = data_folder.write(raised, None, live, None).reader()
    assert found == ([40, 41], [60, 60], [60 - SLOTS, 60 - SLOTS])
    assert report.how == "killed"
    assert report.committed.tolist() == [10, 10]


@pytest.mark.parametrize(
    "foreign",
    [
        {"boot_id": OTHER},
        {"inode": 1},
        {"device": 1},
        {"birth": files.BIRTH.pack(1, 0, 1)},
        {"birth": commit.NO_BIRTH},
    ],
)
def test_live_records_of_another_boot_or_file_are_no_truth(data_folder, foreign):
    durable = data_folder.record([30, 31], sequence=5)
    live = data_folder.record([40, 41], sequence=9, **foreign)
    found, report = data_folder.write(durable, None, live, None).reader()
    assert found == ([30, 31], [40, 41], [0, 0])
    assert report.how == "power_cut"
    assert report.cut_rows == 20


def test_a_system_without_a_boot_id_trusts_no_live_record(data_folder, monkeypatch):
    live = data_folder.record([40, 40], boot_id=bytes(16))
    data_folder.write(data_folder.record([30, 30]), None, live, None)
    monkeypatch.setattr(process, "boot_id", lambda: bytes(16))
    assert data_folder.reader()[0][0] == [30, 30]


@pytest.mark.parametrize("other", [{"uuid": BOOT_ID}, {"generation": 2}])
def test_records_of_another_buffer_or_generation_are_void(data_folder, other):
    own = data_folder.record([4, 4], sequence=2)
    stranger = data_folder.record([9, 9], [90, 90], sequence=8, **other)
    found, _ = data_folder.write(own, stranger, stranger, stranger).reader()
    assert found == ([4, 4], [4, 4], [0, 0])


@pytest.mark.parametrize("good", [0, 1])
def test_one_whole_durable_slot_is_enough(data_folder, good):
    record = data_folder.record([4, 5])
    slots = [damaged(data_folder.record([9, 9], sequence=2))] * 4
    slots[good] = record
    data_folder.write(slots[0], slots[1], None, None)
    assert data_folder.reader()[0][0] == [4, 5]
    assert data_folder.writer()[0][0] == [4, 5]


@pytest.mark.parametrize("live", [True, False])
def test_two_void_durable_slots_are_damage_whatever_is_live(data_folder, live):
    record = data_folder.record([4, 5])
    data_folder.write(damaged(record), None, record if live else None, None)
    for opening in (recovery.open_reader, recovery.open_writer):
        with pytest.raises(CorruptError, match="COMMIT is damaged: neither of its"):
            opening(data_folder.folder, METADATA)


@pytest.mark.parametrize("size", [0, 1, 4096, 16383])
def test_a_commit_file_of_another_size_is_damage(data_folder, size):
    data_folder.path.write_bytes(bytes(size))
    message = rf"COMMIT has {size} bytes, but metadata\.json says 16384"
    with pytest.raises(CorruptError, match=message):
        recovery.open_reader(data_folder.folder, METADATA)


# What may have been overwritten


def test_the_highest_limit_counts_and_lifts_the_tail(data_folder):
    durable = data_folder.record([50, 52], [52, 52], [1, 20], sequence=5)
    foreign = data_folder.record([60, 60], [60, 61], sequence=9, boot_id=OTHER)
    found, report = data_folder.write(durable, None, None, foreign).reader()
    # 54 slots: positions below 60 - 54 = 6 and 61 - 54 = 7 may hold later rows.
    assert found == ([50, 52], [60, 61], [6, 20])
    # 48 stay readable: 2 to 49 of the first, of which 2 to 5 are given up.
    assert report.given_up_rows == 4


def test_a_tail_lifted_over_the_head_lifts_the_head(data_folder):
    durable = data_folder.record([10, 11], [12, 12], sequence=5)
    far = data_folder.record([10, 11], [10 + SLOTS + 1, 12], sequence=6)
    found, _ = data_folder.write(durable, far, None, None).writer()
    assert found == ([11, 11], [10 + SLOTS + 1, 12], [11, 0], [11, 11])


def test_opening_reports_how_the_last_writer_ended(data_folder):
    closed = data_folder.record([9, 9], sequence=5, flags=commit.CLEAN)
    committed = data_folder.record([9, 9], sequence=5)
    live = data_folder.record([9, 9], sequence=4)
    later = data_folder.record([12, 9], sequence=6)
    for slots, how in (
        ((closed, None, live, None), "clean"),
        ((closed, None, None, None), "clean"),
        ((committed, None, live, None), "killed"),
        ((committed, None, live, later), "killed"),
        ((committed, None, None, None), "power_cut"),
    ):
        assert data_folder.write(*slots).reader()[1].how == how


# Opening for writing


def crafted(data_folder):
    """A ring past its first lap, killed after rows were added and given up."""
    return data_folder.write(
        data_folder.record([70, 60], [72, 66], [3, 9], sequence=5, epoch=3),
        data_folder.record([70, 60], [74, 66], [3, 9], sequence=8, epoch=3),
        data_folder.record([73, 65], [74, 66], [3, 10], sequence=9, epoch=3),
        data_folder.record([72, 65], [74, 66], [3, 10], sequence=7, epoch=3),
    )


EXPECTED = ([73, 65], [74, 66], [74 - SLOTS, 12], [70, 60])


def test_a_writable_open_writes_all_four_slots_of_the_next_epoch(data_folder):
    assert crafted(data_folder).writer()[0] == EXPECTED
    records = data_folder.slots()
    assert [record.epoch for record in records] == [4] * 4
    assert len({record.sequence for record in records}) == 4
    assert min(record.sequence for record in records) > 9
    for record in records[:2]:
        assert (record.heads.tolist(), record.flags) == ([70, 60], 0)
    for record in records[2:]:
        assert record.heads.tolist() == [73, 65]


def test_opening_twice_decides_the_same(data_folder):
    crafted(data_folder)
    assert [data_folder.writer()[0] for _ in range(3)] == [EXPECTED] * 3
    assert data_folder.reader()[0] == EXPECTED[:3]


def test_opening_after_a_power_cut_twice_decides_the_same(data_folder, monkeypatch):
    crafted(data_folder)
    monkeypatch.setattr(process, "boot_id", lambda: OTHER)
    cut = ([70, 60], [74, 66], [74 - SLOTS, 12], [70, 60])
    assert [data_folder.writer()[0] for _ in range(2)] == [cut] * 2


def calls_of_an_open(data_folder):
    with using(WatchedDisk()) as disk:
        crafted(data_folder).writer()
    return disk.calls.total()


def test_a_crash_at_any_call_of_a_writable_open_changes_no_decision(data_folder):
    calls = calls_of_an_open(data_folder)
    assert calls > 6
    for at in range(calls):
        disk = FaultyDisk(KeyboardInterrupt(), at)
        crafted(data_folder)
        with using(disk), pytest.raises(KeyboardInterrupt):
            data_folder.writer()
        assert data_folder.reader()[0] == EXPECTED[:3], at
        assert data_folder.writer()[0] == EXPECTED, at


def test_a_power_cut_at_any_call_of_a_writable_open_loses_no_commit(data_folder, monkeypatch):
    for at in range(calls_of_an_open(data_folder)):
        crafted(data_folder)
        with using(FaultyDisk(KeyboardInterrupt(), at)), pytest.raises(BaseException):  # noqa: B017, PT011
            data_folder.writer()
        monkeypatch.setattr(process, "boot_id", lambda: OTHER)
        heads, limits, tails = data_folder.reader()[0]
        assert (heads, limits, tails) == ([70, 60], [74, 66], [74 - SLOTS, 12]), at
        monkeypatch.setattr(process, "boot_id", lambda: BOOT_ID)


@pytest.mark.parametrize("newest", [0, 1])
def test_the_first_durable_write_spares_the_newest_slot(data_folder, newest):
    slots = [data_folder.record([5, 5], sequence=2 + (slot == newest)) for slot in (0, 1)]
    data_folder.write(*slots, None, None)
    newest_before = data_folder.path.read_bytes()[4096 * newest :][:4096]
    disk = FaultyDisk(KeyboardInterrupt(), 4, names=("pwrite",))
    with using(disk), pytest.raises(KeyboardInterrupt):
        data_folder.writer()
    data = data_folder.path.read_bytes()
    assert commit.split(data, UUID, 1, 2)[1 - newest].epoch == 2
    # The fifth write was the newest slot's: half of it was stored. The third was its
    # own bytes.
    assert data[4096 * newest :][2048:4096] == newest_before[2048:]


# Readers beside a writer


class DamagedReads:
    """Both live slots torn anew at each look, as under a writer's hands."""

    def __init__(self, data_folder, looks):
        self.data_folder, self.looks = data_folder, looks
        self.undamaged = [data_folder.record([n, n], sequence=n) for n in (20, 21)]
        self.durable = data_folder.record([7, 7], sequence=3)
        self.pread = files.File.pread

    def __call__(self, file, nbytes, offset):
        self.looks -= 1
        part = self.looks.to_bytes(4, "little", signed=True)
        live = [record.encode()[:200] + part for record in self.undamaged]
        live = [data.ljust(4096, b"x") for data in live]
        self.data_folder.write(self.durable, None, *(live if self.looks else self.undamaged))
        return self.pread(file, nbytes, offset)


def test_a_reader_reads_again_while_both_live_slots_are_being_stored(data_folder, monkeypatch):
    reads = DamagedReads(data_folder, looks=4)
    monkeypatch.setattr(files.File, "pread", lambda *args: reads(*args))
    found, report = data_folder.reader()
    assert reads.looks == 0
    assert found[0] == [21, 21]
    assert report.how == "killed"


def test_live_slots_that_are_never_whole_starve_a_reader(data_folder, monkeypatch):
    monkeypatch.setattr(commit_state, "PATIENCE_S", 0.01)
    reads = DamagedReads(data_folder, looks=-1)
    monkeypatch.setattr(files.File, "pread", lambda *args: reads(*args))
    with pytest.raises(StarvedError, match=r"no valid record in 0\.01 s.*mode='r\+'"):
        data_folder.reader()
    assert data_folder.writer()[0][0] == [7, 7]


@pytest.mark.parametrize("boot_id", [BOOT_ID, OTHER])
def test_live_slots_that_stay_incomplete_starve_no_reader(data_folder, boot_id):
    live = damaged(data_folder.record([9, 9], sequence=9, boot_id=boot_id))
    data_folder.write(data_folder.record([7, 7], sequence=3), None, live, live)
    reader, report = recovery.open_reader(data_folder.folder, METADATA)
    assert report.how == "power_cut"
    assert reader.refresh() is False
    assert reader.heads.tolist() == [7, 7]
    reader.close()


def test_a_writer_killed_at_its_very_first_store_starves_nobody(data_folder):
    first = damaged(data_folder.record([0, 0], sequence=9, epoch=2))
    data_folder.write(data_folder.record([0, 0]), None, first, None)
    reader, _ = recovery.open_reader(data_folder.folder, METADATA)
    assert reader.refresh() is False
    reader.close()
    assert data_folder.writer()[0][0] == [0, 0]


def test_heads_that_no_integer_could_go_on_from_are_void(data_folder):
    data_folder.write(
        data_folder.record([4, 4]), data_folder.record([2**62, 4], sequence=2), None, None
    )
    assert data_folder.reader()[0] == ([4, 4], [4, 4], [0, 0])
    assert np.array_equal(data_folder.writer()[1].heads, [4, 4])
