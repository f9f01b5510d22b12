"""Files of priorities: missing, torn, not theirs, and what the format says."""

import os
import shutil
import struct

import google_crc32c
import numpy as np
import pytest

import mmreplay as mr
from mmreplay import process
from mmreplay.disk.files import Disk, File
from mmreplay.errors import FormatError
from mmreplay.samplers import priority_file
from mmreplay.samplers import priority_file as durable
from mmreplay.samplers import priority_file as seen
from tests.inodes import numbered
from tests.samplers.priority_files import folder, make, mark, more, own


class TestDamage:
    """Files that are not what they were."""

    def left(self, ring):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        sampler.close()
        return folder(ring)

    def opened(self, ring):
        sampler = make()
        found = own(ring, sampler)
        assert sampler.where == "disk"
        sampler.close()
        return found

    @pytest.mark.parametrize("name", ["STATE", "priorities.bin"])
    def test_a_missing_file_begins_anew(self, ring, name):
        (self.left(ring) / name).unlink()
        assert set(self.opened(ring).values()) <= {0.0, 1.0}

    @pytest.mark.parametrize("size", [0, 1, 100, 4096, 1 << 20])
    @pytest.mark.parametrize("name", ["STATE", "priorities.bin"])
    def test_a_file_of_another_size_does_no_harm(self, ring, name, size):
        os.truncate(self.left(ring) / name, size)
        found = self.opened(ring)
        assert all(v in (0.0, 1.0, 1.0 + p) for p, v in found.items())

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
    def test_an_invalid_priority_counts_as_a_new_row(self, ring, value):
        path = self.left(ring) / "priorities.bin"
        data = np.fromfile(path, "<f4")
        data[ring.metadata.ring.row(0, 50)] = value
        path.write_bytes(data.tobytes())
        found = self.opened(ring)
        assert found[50] == 1.0
        assert found[51] == 52.0

    def test_a_damaged_record_leaves_the_previous_one(self, ring):
        path = self.left(ring) / "STATE"
        data = path.read_bytes()
        size = len(data) // 2
        records = [seen.decode(data[i * size :][:size], ring.metadata.uuid, 2) for i in (0, 1)]
        newest = max((0, 1), key=lambda slot: records[slot].sequence)
        torn = bytearray(data)
        torn[newest * size + 130] ^= 1
        path.write_bytes(torn)
        assert self.opened(ring) == {p: 1.0 + p for p in range(22, 70)}

    def test_two_damaged_records_reset_the_file(self, ring):
        path = self.left(ring) / "STATE"
        path.write_bytes(bytes(len(path.read_bytes())))
        assert set(self.opened(ring).values()) == {1.0}

    @pytest.mark.parametrize("name", ["STATE", "priorities.bin", "LOCK"])
    def test_a_link_instead_of_a_priority_file_is_refused(self, ring, name, tmp_path):
        path = self.left(ring) / name
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(FormatError, match=f"{name} is not a regular file"):
            own(ring, make())

    @pytest.mark.parametrize("closed", [True, False])
    def test_after_a_power_cut_only_what_was_synced_counts(self, ring, closed, monkeypatch):
        sampler = make()
        ring.commit()
        mark(ring, sampler, range(22, 70))
        if closed:
            sampler.close()
        else:
            sampler.priorities.column._finalizer.detach()
            sampler.priorities.column.files.release()
        monkeypatch.setattr(process, "boot_id", lambda: b"another boot id!")
        found = self.opened(ring)
        expected = {p: 1.0 + p for p in range(22, 70)}
        assert found == (expected if closed else dict.fromkeys(expected, 1.0))

    def test_a_record_closed_without_a_look_at_the_commit_is_read(self, ring):
        """As they were written before: CLEAN, and the one before it says the same."""
        path = self.left(ring) / "STATE"
        uuid, size = ring.metadata.uuid, seen.slot_nbytes(2)
        here = os.stat(path)
        records = [
            seen.StateRecord(
                8 + flags,
                1,
                flags,
                b"another boot id!",
                uuid,
                here.st_dev,
                here.st_ino,
                np.array([70, 60]),
            )
            for flags in (0, seen.CLEAN)
        ]
        path.write_bytes(b"".join(record.encode() for record in records))
        assert len(path.read_bytes()) == 2 * size
        sampler = make()
        assert own(ring, sampler) == {p: 1.0 + p for p in range(22, 70)}
        sampler.close()

    def test_a_commit_that_cannot_be_read_leaves_nothing_beyond_the_boot(self, ring, monkeypatch):
        ring.commit()
        monkeypatch.setattr(durable.commit, "newest_durable", lambda slots: None)
        self.left(ring)
        monkeypatch.undo()
        assert self.opened(ring) == {p: 1.0 + p for p in range(22, 70)}
        monkeypatch.setattr(durable.commit, "newest_durable", lambda slots: None)
        self.left(ring)
        monkeypatch.undo()
        monkeypatch.setattr(process, "boot_id", lambda: b"another boot id!")
        assert set(self.opened(ring).values()) == {1.0}

    def test_a_head_below_what_was_seen_gives_up_what_is_above(self, ring, tmp_path):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        rows = sampler.priorities
        rows.column.see(np.array([99, 99]), 1)
        sampler.close()
        more(ring, 3)
        again = make()
        assert own(ring, again)[69] == 70.0
        more(ring, 3)
        assert own(ring, again)[75] == 70.0
        again.close()


def test_the_state_is_as_the_format_says(ring):
    sampler = make()
    ring.commit()
    more(ring, 5)
    mark(ring, sampler, [30])
    sampler.close()
    data = (folder(ring) / "STATE").read_bytes()
    assert len(data) == 2 * 4096
    status = os.stat(folder(ring) / "STATE")
    slots = [data[:4096], data[4096:]]
    before, newest = sorted(slots, key=lambda slot: struct.unpack_from("<Q", slot, 16))
    assert newest[:8] == b"MMRSMP01"
    assert struct.unpack_from("<II", newest, 8) == (1, 2)
    sequence, generation = struct.unpack_from("<QQ", newest, 16)
    assert (sequence, generation) == (3, 1)
    assert newest[32:48] == process.boot_id()
    assert newest[48:64] == ring.metadata.uuid
    assert struct.unpack_from("<QQ", newest, 64) == (status.st_dev, status.st_ino)
    assert newest[80:88] == bytes(8)
    state = File.open(folder(ring) / "STATE", None)
    assert newest[88:104] == state.identity()[2]
    state.close()
    assert newest[104:128] == bytes(24)
    # CLEAN, and of durable rows alone; the record before it knows all.
    assert struct.unpack_from("<2q", newest, 128) == (70, 70)
    assert struct.unpack_from("<I", before, 8) == (0,)
    assert struct.unpack_from("<2q", before, 128) == (75, 75)
    assert newest[144:4092] == bytes(4096 - 4 - 144)
    (crc,) = struct.unpack_from("<I", newest, 4092)
    assert crc == google_crc32c.value(newest[:4092])
    column = np.fromfile(folder(ring) / "priorities.bin", "<f4")
    assert column[ring.metadata.ring.row(0, 30)] == 31.0


def test_more_environments_take_more_pages():
    sizes = [seen.slot_nbytes(num_envs) for num_envs in (1, 495, 496, 5000)]
    assert sizes == [4096, 4096, 8192, 40960 + 0]


class TestPutBack:
    """A copied column in the place of its removed original, with its inode number."""

    def copied(self, ring):
        """Copy a column while somebody draws: the numbers first, then the record."""
        sampler = make()
        mark(ring, sampler, range(22, 30))
        place = folder(ring)
        backup = place.with_name("backup")
        backup.mkdir()
        shutil.copyfile(place / priority_file.COLUMN, backup / priority_file.COLUMN)
        mark(ring, sampler, range(22, 70))
        shutil.copyfile(place / priority_file.STATE, backup / priority_file.STATE)
        number = (place / priority_file.STATE).stat().st_ino
        kill(sampler)
        shutil.rmtree(place)
        backup.rename(place)
        return numbered(place / priority_file.STATE, number)

    def test_its_numbers_are_not_trusted(self, ring):
        with self.copied(ring):
            again = make()
            assert set(own(ring, again).values()) == {1.0}
            again.close()

    def test_damaged_files_are_not_copied_into_snapshots_or_exports(self, ring, tmp_path):
        with self.copied(ring):
            ring.snapshot(tmp_path / "snapshot")
            assert not (tmp_path / "snapshot/samplers").exists()
            mr.export(ring, tmp_path / "a.npz", priorities="prioritized")
            with np.load(tmp_path / "a.npz") as found:
                (name,) = (n for n in found.files if "priorit" in n)
                assert (found[name] == -1).all()

    def test_without_births_numbers_count_while_somebody_draws(self, ring, tmp_path, monkeypatch):
        monkeypatch.setattr(Disk, "birth", lambda self, fd: None)
        ring.commit()
        sampler = make()
        mark(ring, sampler, range(22, 70))
        ring.snapshot(tmp_path / "live")
        kill(sampler)
        ring.snapshot(tmp_path / "dead")
        assert (tmp_path / "live/samplers/prioritized").is_dir()
        assert not (tmp_path / "dead/samplers").exists()
        again = make()
        assert set(own(ring, again).values()) == {1.0}
        mark(ring, again, range(22, 70))
        again.close()
        last = make()
        assert own(ring, last) == {p: 1.0 + p for p in range(22, 70)}
        last.close()

    def test_numbers_of_an_older_version_are_read(self, ring):
        """It wrote zeros for the birth, and told files by their numbers alone."""
        sampler = make()
        mark(ring, sampler, range(22, 70))
        kill(sampler)
        path = folder(ring) / priority_file.STATE
        data = bytearray(path.read_bytes())
        size = len(data) // seen.NUM_SLOTS
        for first in range(0, len(data), size):
            part = data[first : first + size]
            part[88:104] = bytes(16)
            crc = google_crc32c.value(bytes(part[:-4]))
            part[-4:] = crc.to_bytes(4, "little")
            data[first : first + size] = part
        with open(path, "r+b") as file:
            file.write(data)
        again = make()
        assert own(ring, again) == {p: 1.0 + p for p in range(22, 70)}
        again.close()


def kill(sampler):
    """Let go of a column as a dead process does."""
    column = sampler.priorities.column
    column._finalizer.detach()
    column.files.release()
