"""Priorities on disk: reopened, locked, carried over to other rings."""

import errno
import multiprocessing
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import ForkedError
from mmreplay.samplers import priority_file
from mmreplay.testing.disks import FaultyDisk, using
from tests.buffer.support import Twin
from tests.samplers.priority_files import folder, make, mark, more, own

FORK = multiprocessing.get_context("fork")
WAIT_S = 60


def settle(buffer):
    """Have all sealed that is due: no shard comes and goes, and no fault meets one."""
    if buffer.metadata.engine == "zarr":
        buffer._files.store.sealing._sealer.drain()


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
        settle(twin.buffer)
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

    @pytest.mark.parametrize("laps", [0, 3])
    def test_rows_written_anew_before_anybody_drew_are_new(self, tmp_path, laps):
        """Of a copy, the head has long passed what the column knew."""
        twin = Twin(tmp_path / "ring", 96, 2, stored=True, commit_every=None)
        more(twin.buffer, 20 + 96 * laps)
        twin.buffer.commit()
        more(twin.buffer, 20)
        first, head = 96 * laps, 96 * laps + 20
        sampler = make()
        mark(twin.buffer, sampler, range(first, head + 20))
        sampler.close()
        settle(twin.buffer)
        shutil.copytree(tmp_path / "ring", tmp_path / "copy")
        twin.buffer.close()
        with mr.ReplayBuffer.open(tmp_path / "copy", mode="r+") as copy:
            assert copy.heads.tolist() == [head, head]
            more(copy, 30)
            again = make()
            found = own(copy, again)
            assert [found[p] for p in range(first, head)] == [1.0 + p for p in range(first, head)]
            # The highest of the rows that were seen is what new ones enter at.
            assert {found[p] for p in range(head, head + 30)} == {float(head)}
            again.close()

    def test_within_the_boot_what_was_not_committed_comes_back(self, tmp_path):
        twin = Twin(tmp_path / "ring", 96, 2, stored=True, commit_every=None)
        more(twin.buffer, 20)
        twin.buffer.commit()
        more(twin.buffer, 20)
        sampler = make()
        mark(twin.buffer, sampler, range(40))
        sampler.close()
        again = make()
        assert own(twin.buffer, again) == {p: 1.0 + p for p in range(40)}
        again.close()
        twin.buffer.close()

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

    def test_a_sampler_that_goes_to_another_buffer_takes_nothing_along(self, ring, tmp_path):
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
        with pytest.warns(mr.DurabilityWarning, match="'inside' .* locked by another"):
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


class TestInMemory:
    """Where priorities are when they cannot be on disk."""

    def test_a_second_sampler_of_a_name_stays_in_ram_and_says_so(self, ring):
        first, second = make(), make()
        mark(ring, first, [30])
        path = re.escape(str(ring.path))
        told = (
            rf"the priorities 'prioritized' of {path} start anew in RAM and end "
            rf"with this process: .*LOCK is locked by another sampler of pid "
            rf"{os.getpid()}\. Close that sampler, or give this one another name\. To "
            r"have them in RAM on purpose, pass name=None\."
        )
        with pytest.warns(mr.DurabilityWarning, match=told):
            mark(ring, second, [31])
        assert first.where == "disk"
        assert second.where.startswith("RAM: ")
        assert "is locked by another sampler" in second.where
        assert (own(ring, first)[31], own(ring, second)[30]) == (1.0, 1.0)
        first.close()

    def test_the_warning_names_another_process(self, ring):
        code = (
            "import sys, numpy as np, mmreplay as mr\n"
            "sampler = mr.PrioritizedSampler()\n"
            "buffer = mr.ReplayBuffer.open(sys.argv[1], sampler=sampler)\n"
            "buffer.sample(4)\n"
            "print(sampler.where, flush=True)\n"
            "sys.stdin.read()\n"
        )
        ring.commit()
        command = [sys.executable, "-c", code, str(ring.path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as other:
            assert other.stdout.readline() == "disk\n"
            sampler = make()
            with pytest.warns(mr.DurabilityWarning, match=f"of pid {other.pid}\\."):
                mark(ring, sampler, [30])
            with pytest.raises(mr.LockedError) as caught:
                priority_file._lock(ring.path / "samplers" / "prioritized")
            assert caught.value.pid == other.pid
            assert caught.value.host == socket.gethostname()
            again = pickle.loads(pickle.dumps(caught.value))
            assert (again.pid, again.host) == (caught.value.pid, caught.value.host)
            other.stdin.close()

    def test_a_warning_that_is_an_error_leaves_the_sampler_as_it_was(self, ring):
        first, second = make(), make()
        mark(ring, first, [30])
        with pytest.raises(mr.DurabilityWarning):
            mark(ring, second, [31])
        first.close()
        mark(ring, second, [31])
        assert second.where == "disk"
        second.close()

    @pytest.mark.parametrize("name", ["mkdir", "open", "truncate", "allocate", "lock"])
    @pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
    def test_a_disk_that_refuses_leaves_them_in_ram_and_is_named(self, ring, name, number):
        sampler = make()
        settle(ring)
        fault = FaultyDisk(OSError(number, os.strerror(number)), names=(name,))
        with using(fault), pytest.warns(mr.DurabilityWarning, match="anew in RAM"):
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
        monkeypatch.setattr(priority_file, "file_system", lambda path: "nfs4")
        sampler = make()
        with pytest.warns(mr.DurabilityWarning, match=r"on a network file system \(nfs"):
            mark(ring, sampler, [30])
        assert sampler.where.endswith("is on a network file system (nfs4)")

    def test_where_no_space_can_be_reserved_they_are_written(self, ring, monkeypatch):
        monkeypatch.setattr(priority_file, "file_system", lambda path: "btrfs")
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
            assert "Draw in the main process and let workers gather" in ours.recv()
            # The child lives on, and the lock does not live on in it.
            sampler.close()
            again = make()
            assert own(ring, again)[30] == 31.0
            assert again.where == "disk"
            again.close()
        finally:
            ours.send("done")
            process.join(WAIT_S)
