"""Rebuilds beside draws, and rebuilds that the transforms refuse."""

import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import opening
from mmreplay.errors import FailedError, SchemaError
from mmreplay.storage.commit_state import CommitWriter
from mmreplay.testing.disks import QuickDisk, using
from tests.buffer.test_faults import FAILING, Faulty, abandon, fault_of, struck
from tests.buffer.test_threads import SCHEMA, step, together


def made(path, **options):
    buffer = mr.ReplayBuffer.create(path, SCHEMA, 30, commit_every=None, **options)
    for number in range(8):
        buffer.add(step(number))
    return buffer


def drawn(buffer):
    return set(buffer.sample(200).positions.tolist())


def test_a_field_that_the_transforms_refuse_is_not_added(tmp_path):
    with made(tmp_path / "b", transforms=[mr.Delta()]) as buffer:
        with pytest.raises(SchemaError, match="delta"):
            buffer.add_field("delta", mr.Field((), "float32"), 0)
        assert "delta" not in buffer.schema
        buffer.add(step(8))
        assert (len(buffer), max(drawn(buffer))) == (9, 7)
        buffer.resize(20)
        buffer.add(step(9))
        assert (len(buffer), max(drawn(buffer))) == (10, 8)
    with mr.ReplayBuffer.open(tmp_path / "b") as again:
        assert (len(again), again.schema) == (10, SCHEMA)


def test_a_reader_whose_transforms_do_not_fit_any_more_says_so_every_time(tmp_path):
    with made(tmp_path / "b") as buffer:
        reader = mr.ReplayBuffer.open(tmp_path / "b", transforms=[mr.Delta()])
        assert len(drawn(reader)) == 7
        buffer.add_field("delta", mr.Field((), "float32"), 0)
        for _ in range(3):
            with pytest.raises(SchemaError, match="delta"):
                reader.sample(4)
            with pytest.raises(SchemaError, match="delta"):
                len(reader)
        reader.close()


@pytest.mark.parametrize("change", ["resize", "add_field"])
def test_a_thread_draws_while_another_one_switches(tmp_path, monkeypatch, change):
    sampler = mr.PrioritizedSampler(seed=0)
    buffer = made(tmp_path / "b", sampler=sampler, transforms=[mr.Delta()])
    batch = buffer.sample(4)
    seen = []

    def mark_moved(commit, genuine=CommitWriter.mark_moved):
        # metadata.json names the new generation, which this buffer does not read yet.
        together(
            lambda: seen.append(drawn(buffer)),
            lambda: seen.append(buffer.update_priorities(batch, np.ones(4))),
            lambda: seen.append(len(buffer)),
        )
        genuine(commit)

    monkeypatch.setattr(CommitWriter, "mark_moved", mark_moved)
    if change == "resize":
        buffer.resize(6)
    else:
        buffer.add_field("more", mr.Field((), "int8"), 0)
    assert sorted(map(str, seen)) == sorted(map(str, (set(range(7)), 0, 8)))
    assert drawn(buffer) <= set(range(8))
    buffer.close()


@pytest.mark.slow
def test_draws_and_commits_during_rebuilds_never_fail(tmp_path):
    sampler = mr.PrioritizedSampler(seed=0)
    with made(tmp_path / "b", sampler=sampler) as buffer:
        done = threading.Event()

        def draw():
            while not done.is_set():
                batch = buffer.sample(8)
                buffer.update_priorities(batch, np.ones(8))
                seen = batch["observation"]
                assert (seen[:, 0] == batch.positions).all()

        def commit():
            while not done.is_set():
                buffer.commit()

        def rebuild():
            try:
                for turn in range(6):
                    more = {f"x{number}": 0 for number in range(turn)}
                    buffer.add({**step(8 + turn), **more})
                    buffer.resize((20, 40)[turn % 2])
                    buffer.add_field(f"x{turn}", mr.Field((), "int8"), 0)
            finally:
                done.set()

        together(draw, draw, commit, rebuild)
        assert len(buffer) == 14


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("fault", ["full", "broken"])
@pytest.mark.parametrize("count", [1, 10**9])
@pytest.mark.sliced(1)
@pytest.mark.slow
def test_a_rebuild_that_failed_leaves_nothing_behind(tmp_path, engine, fault, count):
    going_on = 0
    for at in range(300):
        path = tmp_path / f"{at}"
        with using(QuickDisk()):
            buffer = made(path, engine=engine)
        with using(Faulty(fault_of(fault), at, count, FAILING)) as disk:
            raised = struck(lambda b: b.resize(1000), buffer)
        with using(QuickDisk()):
            if not disk.struck:
                assert raised is None
                buffer.close()
                break
            # What could not be removed either is for the next opening.
            if raised is not None and takes_more(buffer) and count == 1:
                assert not (path / "data-000002").exists(), raised
                going_on += 1
            abandon(buffer)
            with mr.ReplayBuffer.open(path, "r+") as again:
                kept = {30: "data-000001", 1000: "data-000002"}[again.capacity]
            assert [each.name for each in path.glob("data-*")] == [kept]
    else:
        pytest.fail("the disk failed 300 times, and more calls were made")
    assert going_on > 10 or count > 1


def takes_more(buffer):
    try:
        buffer.add(step(8))
    except FailedError:
        return False
    return True


def test_a_generation_that_cannot_be_opened_does_not_become_current(tmp_path, monkeypatch):
    buffer = made(tmp_path / "b")

    def fail(*_):
        raise FailedError("no more files", errno_=24)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "_open_locked", fail)
        with pytest.raises(FailedError, match="no more files"):
            buffer.resize(20)
    buffer.add(step(8))
    assert (buffer.capacity, len(buffer)) == (30, 9)
    buffer.resize(20)
    buffer.close()
    with mr.ReplayBuffer.open(tmp_path / "b", "r+") as again:
        assert (again.capacity, len(again)) == (20, 9)
