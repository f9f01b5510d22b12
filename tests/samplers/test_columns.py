"""Priorities on disk: reopened, locked, carried over, killed at any line."""

import errno
import multiprocessing
import os
import shutil
import signal
import struct
import sys

import google_crc32c
import numpy as np
import pytest

import mmreplay as mr
from mmreplay import files
from mmreplay.errors import ForkedError, FormatError
from mmreplay.samplers import columns, seen
from tests.buffer.support import Twin
from tools.torture.disks import FaultyDisk, using

FORK = multiprocessing.get_context("fork")
WAIT_S = 60


@pytest.fixture
def ring(tmp_path):
    """A ring of 48 rows of two environments, written round more than once."""
    twin = Twin(tmp_path / "ring", 48, 2, stored=True)
    twin.extend([["", ""]] * 70)
    yield twin.buffer
    twin.buffer.close()


def more(buffer, count):
    """Add so many steps of both environments."""
    zeros = np.zeros((count, 2))
    buffer.extend(
        observation=np.zeros((count, 2, 2), int), action=zeros.astype(np.int32),
        next_observation=np.zeros((count, 2, 2), int), reward=zeros,
        terminated=zeros > 0, truncated=zeros > 0,
    )  # fmt: skip


def make(**options):
    return mr.PrioritizedSampler(**({"seed": 0} | options))


def own(buffer, sampler, env_id=0):
    """Priorities of one environment by position."""
    rows = sampler._work._priorities
    rows.follow(buffer.view)
    first, stop = rows.span.first[env_id], rows.span.stop[env_id]
    return {
        p: float(rows.column.values[rows.column.ring.row(env_id, p)])
        for p in range(int(first), int(stop))
    }


def mark(buffer, sampler, positions, env_id=0):
    """Give rows a priority that tells their position."""
    positions = np.array(positions)
    ids = np.full(len(positions), env_id)
    return sampler.update_priorities(buffer.view, ids, positions, 1.0 + positions)


def folder(buffer, name="prioritized"):
    return buffer.path / "samplers" / name


class TestReopening:
    """What is there when a sampler comes back."""

    def test_priorities_come_back(self, ring):
        first = make()
        mark(ring, first, range(22, 70))
        assert first.where == "disk"
        first.close()
        again = make()
        assert own(ring, again) == {p: 1.0 + p for p in range(22, 70)}
        again.close()

    def test_rows_that_were_lost_and_written_anew_are_new(self, tmp_path):
        """A copy is cut to its last commit; its column knew rows above it."""
        twin = Twin(tmp_path / "ring", 96, 2, stored=True, commit_every=None)
        more(twin.buffer, 20)
        twin.buffer.commit()
        more(twin.buffer, 20)
        sampler = make()
        mark(twin.buffer, sampler, range(40))
        sampler.close()
        shutil.copytree(tmp_path / "ring", tmp_path / "copy")
        twin.buffer.close()
        with mr.ReplayBuffer.open(tmp_path / "copy", mode="r+") as copy:
            again = make()
            assert own(copy, again) == {p: 1.0 + p for p in range(20)}
            again.close()
        with mr.ReplayBuffer.open(tmp_path / "copy", mode="r+") as copy:
            more(copy, 30)
            again = make()
            kept = {p: 1.0 + p for p in range(20)}
            assert own(copy, again) == kept | dict.fromkeys(range(20, 50), 20.0)
            again.close()

    def test_priorities_come_back_to_a_reader_of_another_time(self, ring):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        sampler.close()
        more(ring, 20)
        with mr.ReplayBuffer.open(ring.path) as reader:
            again = make()
            found = own(reader, again)
            # 70 to 89 came while nobody drew: they enter at the highest alive.
            expected = {p: 1.0 + p for p in range(42, 70)}
            assert found == expected | dict.fromkeys(range(70, 90), 70.0)
            assert again.where == "disk"
            again.close()

    @pytest.mark.parametrize("laps", [1, 2, 5])
    def test_a_ring_that_moved_on_by_laps_has_entries_only(self, ring, laps):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        sampler.close()
        more(ring, 60 * laps)
        again = make()
        assert set(own(ring, again).values()) == {1.0}
        again.close()

    def test_what_was_cleared_meanwhile_is_forgotten(self, ring):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        mark(ring, sampler, range(22, 70), 1)
        sampler.close()
        ring.clear([0])
        more(ring, 3)
        again = make()
        assert own(ring, again) == dict.fromkeys(range(70, 73), 70.0)
        assert own(ring, again, 1)[69] == 70.0
        again.close()

    @pytest.mark.parametrize("capacity", [10, 48, 200])
    def test_priorities_follow_a_resize(self, ring, capacity):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        ring.resize(capacity)
        kept = range(max(22, 70 - capacity), 70)
        assert own(ring, sampler) == {p: 1.0 + p for p in kept}
        sampler.close()
        more(ring, 4)
        again = make()
        found = own(ring, again)
        assert all(found[p] == 1.0 + p for p in found if p < 70)
        size = (folder(ring) / "priorities.bin").stat().st_size
        assert size == 4 * ring.metadata.ring.num_rows
        again.close()

    def test_priorities_follow_a_resize_while_nobody_draws(self, ring):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        sampler.close()
        ring.resize(30)
        ring.resize(90)
        more(ring, 2)
        again = make()
        expected = {p: 1.0 + p for p in range(40, 70)} | {70: 70.0, 71: 70.0}
        assert own(ring, again) == expected
        again.close()

    def test_priorities_in_ram_follow_a_resize(self, ring):
        sampler = make(name=None)
        mark(ring, sampler, range(22, 70))
        ring.resize(12)
        assert own(ring, sampler) == {p: 1.0 + p for p in range(58, 70)}
        assert sampler.where == "RAM, as name=None asks"
        assert not (ring.path / "samplers").exists()

    def test_a_sampler_that_goes_to_another_buffer_takes_nothing_along(
        self, ring, tmp_path
    ):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        other = Twin(tmp_path / "other", 48, 2, stored=True)
        other.extend([["", ""]] * 30)
        assert set(own(other.buffer, sampler).values()) == {1.0}
        assert own(ring, sampler)[69] == 70.0
        sampler.close()
        other.buffer.close()

    def test_names_are_columns_of_their_own(self, ring):
        one, other = make(name="one"), make(name="other")
        mark(ring, one, [30, 40])
        mark(ring, other, [30])
        for sampler in (one, other):
            assert sampler.where == "disk"
            sampler.close()
        assert own(ring, make(name="one"))[40] == 41.0
        assert own(ring, make(name="other"))[40] == 1.0

    def test_a_buffer_closes_the_column_of_its_sampler(self, ring):
        reader = mr.ReplayBuffer.open(ring.path, sampler=make())
        mark(reader, reader.sampler, [30])
        inside = mr.SequenceSampler(2, make(name="inside"))
        other = mr.ReplayBuffer.open(ring.path, sampler=inside)
        other.update_priorities(other.sample(4), np.ones(4))
        reader.close()
        again = make()
        assert own(ring, again)[30] == 31.0
        assert again.where == "disk"
        # Another opening's column is its own, until that is closed.
        taken = make(name="inside")
        mark(ring, taken, [31])
        assert taken.where != "disk"
        other.close()
        free = make(name="inside")
        mark(ring, free, [31])
        assert free.where == "disk"
        for sampler in (again, free):
            sampler.close()

    def test_a_sampler_whose_buffer_was_closed_goes_on_with_the_next_one(self, ring):
        sampler = make()
        with mr.ReplayBuffer.open(ring.path, sampler=sampler) as reader:
            mark(reader, sampler, range(22, 70))
        state = sampler.state_dict(priorities=True)
        assert state["priorities"][:48].tolist() == [1.0 + p for p in range(22, 70)]
        with mr.ReplayBuffer.open(ring.path, sampler=sampler) as reader:
            assert own(reader, sampler) == {p: 1.0 + p for p in range(22, 70)}
            assert sampler.where == "disk"

    def test_a_closed_sampler_opens_at_the_next_draw(self, ring):
        sampler = make()
        mark(ring, sampler, [30])
        sampler.close()
        sampler.close()
        assert sampler.where is None
        assert own(ring, sampler)[30] == 31.0
        sampler.close()

    def test_a_dropped_sampler_gives_its_lock_back(self, ring):
        sampler = make()
        mark(ring, sampler, [30])
        del sampler
        again = make()
        assert own(ring, again)[30] == 31.0
        assert again.where == "disk"
        again.close()


class TestPlaces:
    """Where priorities are when they cannot be on disk."""

    def test_a_second_sampler_of_a_name_stays_in_ram_and_says_so(self, ring):
        first, second = make(), make()
        mark(ring, first, [30])
        mark(ring, second, [31])
        assert first.where == "disk"
        assert second.where.startswith("RAM: another sampler holds ")
        assert "RAM: another sampler holds" in repr(second)
        assert (own(ring, first)[31], own(ring, second)[30]) == (1.0, 1.0)
        first.close()

    @pytest.mark.parametrize("name", ["mkdir", "open", "truncate", "allocate", "lock"])
    @pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
    def test_a_disk_that_refuses_leaves_them_in_ram_and_is_named(
        self, ring, name, number
    ):
        sampler = make()
        with using(FaultyDisk(OSError(number, os.strerror(number)), names=(name,))):
            mark(ring, sampler, [30])
        assert sampler.where.startswith("RAM: cannot ")
        assert os.strerror(number) in sampler.where
        assert own(ring, sampler)[30] == 31.0
        # Nothing is left that would be in the way of the next one.
        again = make()
        mark(ring, again, [30])
        assert again.where == "disk"
        again.close()

    def test_a_network_file_system_leaves_them_in_ram(self, ring, monkeypatch):
        monkeypatch.setattr(columns, "file_system", lambda path: "nfs4")
        sampler = make()
        mark(ring, sampler, [30])
        assert sampler.where.endswith("is on a network file system (nfs4)")

    def test_where_no_space_can_be_reserved_they_are_written(self, ring, monkeypatch):
        monkeypatch.setattr(columns, "file_system", lambda path: "btrfs")
        sampler = make()
        mark(ring, sampler, [30, 44, 45, 30])
        mark(ring, sampler, [31], 1)
        expected = own(ring, sampler), own(ring, sampler, 1)
        assert sampler.where == "disk"
        sampler.close()
        monkeypatch.undo()
        again = make()
        assert (own(ring, again), own(ring, again, 1)) == expected
        again.close()

    def test_a_forked_child_may_not_draw(self, ring):
        sampler = make()
        mark(ring, sampler, [30])

        def child(pipe):
            try:
                sampler.draw(ring.view, 4)
            except ForkedError as error:
                pipe.send(str(error))
            pipe.recv()

        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=child, args=(theirs,))
        process.start()
        try:
            assert ours.poll(WAIT_S)
            assert "expected the owner alone to draw" in ours.recv()
            # The child lives on, and the lock does not live on in it.
            sampler.close()
            again = make()
            assert own(ring, again)[30] == 31.0
            assert again.where == "disk"
            again.close()
        finally:
            ours.send("done")
            process.join(WAIT_S)


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
    def test_what_is_no_priority_is_taken_for_a_new_row(self, ring, value):
        path = self.left(ring) / "priorities.bin"
        data = np.fromfile(path, "<f4")
        data[ring.metadata.ring.row(0, 50)] = value
        path.write_bytes(data.tobytes())
        found = self.opened(ring)
        assert found[50] == 1.0
        assert found[51] == 52.0

    def test_a_torn_record_leaves_the_one_before(self, ring):
        path = self.left(ring) / "STATE"
        data = path.read_bytes()
        size = len(data) // 2
        records = [seen.decode(data[i * size :][:size], ring.metadata.uuid, 2)
                   for i in (0, 1)]  # fmt: skip
        newest = max((0, 1), key=lambda slot: records[slot].sequence)
        torn = bytearray(data)
        torn[newest * size + 130] ^= 1
        path.write_bytes(torn)
        assert self.opened(ring) == {p: 1.0 + p for p in range(22, 70)}

    def test_both_records_torn_begin_anew(self, ring):
        path = self.left(ring) / "STATE"
        path.write_bytes(bytes(len(path.read_bytes())))
        assert set(self.opened(ring).values()) == {1.0}

    @pytest.mark.parametrize("name", ["STATE", "priorities.bin", "LOCK"])
    def test_a_link_in_the_place_of_a_file_is_refused(self, ring, name, tmp_path):
        path = self.left(ring) / name
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(FormatError, match=f"{name} is not a regular file"):
            own(ring, make())

    @pytest.mark.parametrize("closed", [True, False])
    def test_after_a_power_cut_only_what_was_synced_counts(
        self, ring, closed, monkeypatch
    ):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        if closed:
            sampler.close()
        else:
            sampler._work._priorities.column._finalizer.detach()
            sampler._work._priorities.column._held.give_back()
        monkeypatch.setattr(files, "boot_id", lambda: b"another boot id!")
        found = self.opened(ring)
        expected = {p: 1.0 + p for p in range(22, 70)}
        assert found == (expected if closed else dict.fromkeys(expected, 1.0))

    def test_a_head_below_what_was_seen_gives_up_what_is_above(self, ring, tmp_path):
        sampler = make()
        mark(ring, sampler, range(22, 70))
        rows = sampler._work._priorities
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
    mark(ring, sampler, [30])
    sampler.close()
    data = (folder(ring) / "STATE").read_bytes()
    assert len(data) == 2 * 4096
    status = os.stat(folder(ring) / "STATE")
    slots = [data[:4096], data[4096:]]
    newest = max(slots, key=lambda slot: struct.unpack_from("<Q", slot, 16))
    assert newest[:8] == b"MMRSMP01"
    assert struct.unpack_from("<II", newest, 8) == (1, 2)
    sequence, generation = struct.unpack_from("<QQ", newest, 16)
    assert (sequence, generation) == (3, 1)
    assert newest[32:48] == files.boot_id()
    assert newest[48:64] == ring.metadata.uuid
    assert struct.unpack_from("<QQ", newest, 64) == (status.st_dev, status.st_ino)
    assert newest[80:128] == bytes(48)
    assert struct.unpack_from("<2q", newest, 128) == (70, 70)
    assert newest[144:4092] == bytes(4096 - 4 - 144)
    (crc,) = struct.unpack_from("<I", newest, 4092)
    assert crc == google_crc32c.value(newest[:4092])
    column = np.fromfile(folder(ring) / "priorities.bin", "<f4")
    assert column[ring.metadata.ring.row(0, 30)] == 31.0


def test_more_environments_take_more_pages():
    sizes = [seen.slot_nbytes(num_envs) for num_envs in (1, 495, 496, 5000)]
    assert sizes == [4096, 4096, 8192, 40960 + 0]


# Killed at any line: the page cache outlives the process, and nothing else does.


def dying(path, at, resized):
    """Do what a learner does, and die at the so-manyth line of the samplers."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        if event == "line":
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return local

    def trace(frame, event, arg):
        name = frame.f_code.co_filename
        return local if "/mmreplay/samplers/" in name else None

    reader = mr.ReplayBuffer.open(path)
    sampler = make()
    view = reader.view
    sys.settrace(trace)
    sampler.draw(view, 8)
    mark(reader, sampler, range(62, 85))
    sampler.draw(view, 8)
    sys.settrace(None)
    os._exit(0)


@pytest.mark.crash
@pytest.mark.parametrize("resized", [False, True])
def test_a_kill_at_any_line_loses_no_priority_and_makes_none_up(ring, resized):
    sampler = make()
    mark(ring, sampler, range(22, 70))
    sampler.close()
    if resized:
        ring.resize(45)
    more(ring, 20)
    at, done = 1, False
    while not done:
        process = FORK.Process(target=dying, args=(ring.path, at, resized))
        process.start()
        process.join(WAIT_S)
        done = process.exitcode == 0
        assert done or process.exitcode == -signal.SIGKILL
        again = make()
        found = own(ring, again)
        again._work._priorities.column._finalizer.detach()
        again._work._priorities.column._held.give_back()
        first = 90 - ring.capacity
        # Old rows are what they were; new ones entered at the highest alive, 70, or
        # hold what the learner gave them. An earlier lap's would be another number.
        assert {p: found[p] for p in range(first, 70)} == {
            p: 1.0 + p for p in range(first, 70)
        }
        assert all(found[p] in (70.0, 1.0 + p) for p in range(70, 85))
        assert all(found[p] in (70.0, 85.0) for p in range(85, 90))
        at += 13
    assert at > 200


# Another process writes, this one draws and learns.


def writing(path, pipe):
    """Run the ring over and over until told to stop."""
    with mr.ReplayBuffer.open(path, "r+", on_resume="continue") as buffer:
        pipe.send("writing")
        while not pipe.poll():
            more(buffer, 7)
        pipe.send(buffer.heads.tolist())


@pytest.mark.parametrize("make_one", [mr.PrioritizedSampler, mr.RankPrioritizedSampler])
def test_a_reader_learns_while_another_process_writes(tmp_path, make_one):
    twin = Twin(tmp_path / "ring", 600, 2, stored=True)
    twin.extend([["", ""]] * 300)
    twin.buffer.close()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=writing, args=(twin.path, theirs)
    )
    process.start()
    sampler = make_one(seed=0)
    try:
        assert ours.poll(WAIT_S)
        ours.recv()
        with mr.ReplayBuffer.open(twin.path, sampler=sampler) as reader:
            laps = dropped = 0
            while laps < 5:
                draw = sampler.draw(reader.view, 64)
                # Everything that was drawn is of the span that was looked at.
                span = sampler._work._priorities.span
                assert (draw.positions < span.stop[draw.env_ids]).all()
                assert (draw.positions >= span.first[draw.env_ids]).all()
                batch = reader.sample(64)
                values = 1.0 + batch.positions % 97
                dropped += reader.update_priorities(batch, values)
                laps = int(span.stop.min()) // 600
                rows = sampler._work._priorities
                assert rows.law.num_open == rows.num_legal
            found = own(reader, sampler)
            assert all(v <= 97.0 for v in found.values())
    finally:
        ours.send("stop")
        process.join(WAIT_S)
    assert ours.poll(WAIT_S)
    ours.recv()
    check_kept(twin.path, sampler, make_one(seed=1))


def check_kept(path, sampler, again):
    """What was learned is there, and what came since enters at the highest of it."""
    kept = sampler.state_dict(priorities=True)
    first, stop = int(kept["first"][0]), int(kept["seen"][0])
    known = dict(zip(range(first, stop), kept["priorities"].tolist(), strict=False))
    with mr.ReplayBuffer.open(path) as reader:
        found = own(reader, again)
        assert again.where == "disk"
        top = max([*found.values(), *own(reader, again, 1).values()])
        assert all(v == known.get(p, top) for p, v in found.items())
        again.close()
