"""Priorities whose owner was killed at any line, or whose writer is another one."""

import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import process as boot
from mmreplay.samplers.priority_file import open_column
from mmreplay.testing.disks import QuickDisk, using
from tests.buffer.support import Twin
from tests.samplers.priority_files import make, mark, more, own
from tools.torture.power import PowerCut, SimulatedDisk

FORK = multiprocessing.get_context("fork")
WAIT_S = 60


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


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.sliced(1)
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
        again.priorities.column._finalizer.detach()
        again.priorities.column.files.release()
        first = 90 - ring.capacity
        # Old rows are what they were; new ones entered at the highest alive, 70, or
        # hold what the learner gave them. An earlier lap's would be another number.
        assert {p: found[p] for p in range(first, 70)} == {p: 1.0 + p for p in range(first, 70)}
        assert all(found[p] in (70.0, 1.0 + p) for p in range(70, 85))
        assert all(found[p] in (70.0, 85.0) for p in range(85, 90))
        at += 13
    assert at > 200


@pytest.mark.parametrize("resized", [False, True])
def test_a_power_cut_after_a_kill_loses_no_number_that_a_close_made_durable(tmp_path, resized):
    """A killed process may leave files and a rename of which no folder was synced."""
    for at in range(20):
        folder = tmp_path / str(at)
        folder.mkdir()
        with using(QuickDisk()):
            twin = Twin(folder / "ring", 30, 1)
            twin.extend([[""]] * 25)
            if resized:
                filled(twin.buffer)
                twin.buffer.resize(45)
            twin.buffer.close()
        disk = SimulatedDisk(folder)
        reader = mr.ReplayBuffer.open(twin.path)
        with using(disk), suppress(PowerCut), reader:
            disk.calls_left = at
            column = open_column(reader.view.home, "learned")
            column._finalizer.detach()
            column.files.release()
        disk.revive()
        with using(disk), mr.ReplayBuffer.open(twin.path) as reader:
            filled(reader)
        disk.crash(folder, np.random.default_rng(at))
        rebooted = mock.patch.object(boot, "boot_id", return_value=bytes(range(16)))
        with rebooted, mr.ReplayBuffer.open(twin.path) as reader:
            numbers = twin.path / "samplers" / "learned" / "priorities.bin"
            home = reader.view.home
            assert numbers.exists(), at
            assert numbers.stat().st_size == 4 * home.ring.num_rows, at
            column = open_column(home, "learned")
            assert column.seen.tolist() == [25], at
            column.close()


def filled(buffer):
    """Say that every row has a number, and close the column."""
    home = buffer.view.home
    column = open_column(home, "learned")
    column.see(buffer.heads, home.generation)
    column.close()


# Another process writes, this one draws and learns.


def writing(path, pipe):
    """Run the ring over and over until told to stop."""
    with mr.ReplayBuffer.open(path, "r+", on_resume="continue") as buffer:
        pipe.send("writing")
        while not pipe.poll():
            more(buffer, 7)
        pipe.send(buffer.heads.tolist())


@pytest.mark.parametrize("make_one", [mr.PrioritizedSampler, mr.RankPrioritizedSampler])
@pytest.mark.sliced(1)
def test_a_reader_learns_while_another_process_writes(tmp_path, make_one):
    twin = Twin(tmp_path / "ring", 600, 2, stored=True)
    twin.extend([["", ""]] * 300)
    twin.buffer.close()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=writing, args=(twin.path, theirs))
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
                span = sampler.priorities.span
                assert (draw.positions < span.stop[draw.env_ids]).all()
                assert (draw.positions >= span.first[draw.env_ids]).all()
                batch = reader.sample(64)
                values = 1.0 + batch.positions % 97
                dropped += reader.update_priorities(batch, values)
                laps = int(span.stop.min()) // 600
                rows = sampler.priorities
                assert rows.distribution.num_open == rows.num_legal
            found = own(reader, sampler)
            assert all(v <= 97.0 for v in found.values())
    finally:
        ours.send("stop")
        process.join(WAIT_S)
    assert ours.poll(WAIT_S)
    ours.recv()
    check_priorities(twin.path, sampler, make_one(seed=1))


def check_priorities(path, sampler, again):
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
