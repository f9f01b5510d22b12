"""A folder that is deleted or replaced while it is open: writers and readers say so."""

import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError, RemovedError
from mmreplay.storage import recovery
from tests.samplers.test_priority_file import settle
from tests.torture.test_call_sites import num_descriptors
from tools.torture.powerloss import abandon

SCHEMA = mr.Schema({"number": mr.Field((), "int64")})
DELETED = "was deleted while it was open"
REPLACED = "leads to another folder now"


def add(buffer, count=1):
    for _ in range(count):
        buffer.add(number=int(buffer.heads[0]))


def created(path, **options):
    options = {"commit_every": None} | options
    return mr.ReplayBuffer.create(path, SCHEMA, 100, **options)


def numbers(path):
    with mr.ReplayBuffer.open(path) as reader:
        return reader.gather_all()["number"].tolist()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def delete(path):
    shutil.rmtree(path)


def delete_and_create(path):
    shutil.rmtree(path)
    with created(path) as other:
        add(other, 3)


def delete_generation(path):
    shutil.rmtree(path / "data-000001")


REMOVALS = [delete, delete_and_create, delete_generation]


@pytest.mark.parametrize("remove", REMOVALS)
def test_the_next_commit_and_close_of_a_deleted_folder_raise(path, remove):
    before = num_descriptors()
    buffer = created(path)
    add(buffer, 5)
    buffer.commit()
    remove(path)
    for _ in range(2):
        with pytest.raises(RemovedError, match=DELETED) as told:
            buffer.commit()
        assert str(path) in str(told.value)
        assert isinstance(told.value, FailedError)
    with pytest.raises(RemovedError, match=DELETED):
        buffer.close()
    assert buffer.closed
    buffer.close()
    del buffer, told
    assert num_descriptors() == before
    shutil.rmtree(path, ignore_errors=True)
    created(path).close()


def test_what_its_writer_still_reads_can_be_saved(path, tmp_path):
    buffer = created(path)
    add(buffer, 5)
    delete(path)
    with pytest.raises(RemovedError, match=r"mmreplay\.export"):
        buffer.commit()
    mr.export(buffer, tmp_path / "saved.npz")
    with np.load(tmp_path / "saved.npz") as found:
        assert found["number"].tolist() == list(range(5))
    with pytest.raises(RemovedError):
        buffer.close()


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_other_calls_that_commit_raise_as_well(path, engine):
    buffer = created(path, engine=engine)
    add(buffer, 200)
    settle(buffer)
    delete(path)
    for call in (buffer.clear, lambda: buffer.resize(300)):
        with pytest.raises(RemovedError, match=DELETED):
            call()
    with pytest.raises(RemovedError, match=DELETED):
        buffer.close()


def other_buffer(path):
    created(path).close()


def other_folder(path):
    path.mkdir()


def other_file(path):
    path.write_bytes(b"")


def copy_of_it(path):
    shutil.copytree(path.with_name("moved"), path)


@pytest.mark.parametrize("put", [other_buffer, other_folder, other_file, copy_of_it])
def test_a_path_that_leads_to_another_folder_raises_and_loses_nothing(path, put):
    buffer = created(path)
    add(buffer, 5)
    moved = path.rename(path.with_name("moved"))
    put(path)
    add(buffer, 3)
    with pytest.raises(RemovedError, match=REPLACED):
        buffer.commit()
    assert buffer.committed.tolist() == [8]
    with pytest.raises(RemovedError, match=REPLACED):
        add(buffer, 1)
    with pytest.raises(RemovedError, match=REPLACED):
        buffer.close()
    with mr.ReplayBuffer.open(moved) as again:
        assert again.recovery.how == "clean"
    assert numbers(moved) == list(range(8))


def test_a_folder_that_was_renamed_goes_on(path):
    buffer = created(path)
    add(buffer, 5)
    reader = mr.ReplayBuffer.open(path)
    moved = path.rename(path.with_name("moved"))
    add(buffer, 2)
    buffer.commit()
    assert len(reader) == 7
    add(buffer, 2)
    buffer.close()
    assert len(reader) == 9
    reader.close()
    assert numbers(moved) == list(range(9))


def test_a_folder_that_was_renamed_and_came_back_goes_on(path):
    with created(path) as buffer:
        add(buffer, 5)
        moved = path.rename(path.with_name("moved"))
        path.mkdir()
        with pytest.raises(RemovedError, match=REPLACED):
            buffer.commit()
        path.rmdir()
        moved.rename(path)
        add(buffer, 2)
        buffer.commit()
    assert numbers(path) == list(range(7))


def test_a_link_that_leads_elsewhere_later_is_no_other_folder(path, tmp_path):
    """As `runs/latest` does; the folder that was opened is where it was."""
    created(path).close()
    link = tmp_path / "latest"
    link.symlink_to(path)
    with mr.ReplayBuffer.open(link, "r+") as buffer, mr.ReplayBuffer.open(link) as reader:
        link.unlink()
        link.symlink_to(tmp_path)
        add(buffer, 3)
        buffer.commit()
        assert len(reader) == 3
        delete(path)
        with pytest.raises(RemovedError, match=DELETED):
            buffer.commit()
        with pytest.raises(RemovedError, match=DELETED):
            len(reader)
        with pytest.raises(RemovedError):
            buffer.close()


def test_a_link_that_leads_to_another_buffer_keeps_a_resize_out_of_it(path, tmp_path):
    with created(path) as buffer, created(tmp_path / "other") as other:
        add(buffer, 3)
        add(other, 5)
    link = tmp_path / "latest"
    link.symlink_to(path)
    with mr.ReplayBuffer.open(link, "r+") as buffer:
        link.unlink()
        link.symlink_to(tmp_path / "other")
        with pytest.raises(RemovedError, match=rf"{REPLACED}, but {path} is still open"):
            buffer.resize(200)
        with pytest.raises(RemovedError, match=REPLACED):
            buffer.snapshot(tmp_path / "snapshot")
        add(buffer)
    assert numbers(path) == list(range(4))
    assert numbers(tmp_path / "other") == list(range(5))
    assert not (tmp_path / "snapshot").exists()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_snapshot_copies_no_buffer_that_replaced_its_own(path, tmp_path, mode):
    with created(path) as buffer:
        add(buffer, 3)
    with ExitStack() as stack:
        buffer = mr.ReplayBuffer.open(path, mode)
        path.rename(tmp_path / "moved")
        created(path).close()
        with pytest.raises(RemovedError, match=REPLACED):
            buffer.snapshot(tmp_path / "snapshot")
        stack.enter_context(pytest.raises(RemovedError) if mode == "r+" else stack)
        buffer.close()
    assert not (tmp_path / "snapshot").exists()


def test_shards_are_written_to_no_buffer_that_replaced_their_own(path, tmp_path):
    def extend(buffer, number):
        buffer.extend(number=np.full(9_000, number))

    sizes = {"capacity": 20_000, "engine": "zarr", "commit_every": None}
    buffer = mr.ReplayBuffer.create(path, SCHEMA, **sizes)
    path.rename(tmp_path / "moved")
    with mr.ReplayBuffer.create(path, SCHEMA, **sizes) as other:
        before = {each for each in path.rglob("*") if "zarr" in each.parts}
        extend(buffer, 1)
        with pytest.raises(RemovedError, match=REPLACED):
            buffer.close()
        assert {each for each in path.rglob("*") if "zarr" in each.parts} == before
        extend(other, 2)
    assert set(numbers(path)) == {2}
    assert set(numbers(tmp_path / "moved")) == {1}


def test_shards_are_read_and_made_by_the_folder_that_a_link_led_to(path, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(path)
    path.mkdir()
    sizes = {"capacity": 20_000, "engine": "zarr", "commit_every": None}
    with mr.ReplayBuffer.create(link, SCHEMA, **sizes) as buffer:
        buffer.extend(number=np.arange(9_000))
    with mr.ReplayBuffer.open(link, "r+") as buffer, mr.ReplayBuffer.open(link) as reader:
        link.unlink()
        link.symlink_to(tmp_path)
        buffer.extend(number=np.arange(9_000, 18_000))
        buffer.commit()
        assert reader.gather_all()["number"].tolist() == list(range(18_000))
    assert numbers(path) == list(range(18_000))


def test_a_reader_follows_no_resize_into_another_buffer(path, tmp_path):
    with created(path) as buffer:
        add(buffer, 3)
    with mr.ReplayBuffer.open(path) as reader:
        path.rename(tmp_path / "moved")
        with mr.ReplayBuffer.open(tmp_path / "moved", "r+") as buffer:
            buffer.resize(200)
        with created(path) as other:
            add(other, 5)
        reader._files.commit.moved = True  # as the record with MOVED has it read
        with pytest.raises(RemovedError, match="leads to another buffer now"):
            len(reader)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOMEM])
def test_a_path_that_cannot_be_looked_up_is_no_folder_that_is_gone(path, monkeypatch, number):
    with created(path) as buffer:
        add(buffer)

        looked_up = os.stat

        def stat(target, *rest, **options):
            if str(target).endswith("COMMIT"):
                raise OSError(number, os.strerror(number))
            return looked_up(target, *rest, **options)

        with monkeypatch.context() as patch:
            patch.setattr(recovery.os, "stat", stat)
            buffer.commit()


def test_a_reader_short_of_files_does_not_report_a_removed_folder(path, monkeypatch):
    def load(root):
        raise FailedError("too many files", errno_=errno.EMFILE)

    with created(path) as buffer:
        add(buffer, 3)
        with mr.ReplayBuffer.open(path) as reader:
            place = recovery.FolderWatch(path, reader.metadata, reader._files.commit.file)
            buffer.resize(200)
            shutil.rmtree(path / "data-000001")  # as the next opening does
            with monkeypatch.context() as patch:
                patch.setattr(recovery, "load", load)
                with pytest.raises(FailedError, match="too many files") as told:
                    place.refuse_removed()
            assert not isinstance(told.value, RemovedError)
            assert place.refuse_removed()


# The thread that commits


def wait_for_thread(buffer):
    """Return once the thread has looked for the folder, and end it."""
    committer = buffer._files.committer
    met = threading.Event()
    genuine = committer.refuse_removed

    def refuse_removed():
        try:
            genuine()
        finally:
            met.set()

    committer.refuse_removed = refuse_removed
    assert met.wait(60)
    committer.stop()
    committer.refuse_removed = genuine


@pytest.mark.parametrize("remove", REMOVALS)
def test_what_the_thread_meets_is_raised_by_the_next_call(path, remove):
    buffer = created(path, commit_every=0.02)
    remove(path)
    add(buffer, 1)
    wait_for_thread(buffer)
    for _ in range(2):
        with pytest.raises(RemovedError, match=DELETED):
            add(buffer)
    assert buffer.heads.tolist() == [1]
    with pytest.raises(RemovedError, match=DELETED):
        buffer.close()


def test_once_the_folder_is_back_adds_go_on(path):
    with created(path, commit_every=0.02) as buffer:
        moved = path.rename(path.with_name("moved"))
        path.mkdir()
        add(buffer, 1)
        wait_for_thread(buffer)
        path.rmdir()
        moved.rename(path)
        add(buffer, 4)
    assert numbers(path) == list(range(5))


# Readers


@pytest.mark.parametrize("remove", REMOVALS)
@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_readers_raise_at_their_next_look(path, remove, engine):
    buffer = created(path, engine=engine)
    add(buffer, 5)
    settle(buffer)
    reader = mr.ReplayBuffer.open(path)
    assert len(reader) == 5
    remove(path)
    for call in (len, lambda r: r.sample(2), lambda r: r.span, lambda r: r.schema):
        with pytest.raises(RemovedError, match=DELETED):
            call(reader)
    reader.close()
    abandon(buffer)


@pytest.mark.parametrize("put", [other_buffer, other_folder, other_file, copy_of_it])
def test_readers_of_a_replaced_folder_raise(path, put, monkeypatch):
    monkeypatch.setattr(recovery, "LOOK_EVERY_S", 0)
    with created(path) as buffer:
        add(buffer, 5)
    reader = mr.ReplayBuffer.open(path)
    path.rename(path.with_name("moved"))
    assert len(reader) == 5
    put(path)
    for _ in range(2):
        with pytest.raises(RemovedError, match=REPLACED):
            reader.sample(2)
    reader.close()


def test_readers_follow_a_resize_whose_old_folder_is_gone(path):
    buffer = created(path)
    add(buffer, 5)
    reader = mr.ReplayBuffer.open(path)
    assert len(reader) == 5
    buffer.resize(50)
    buffer.close()
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as buffer:
        assert not (path / "data-000001").exists()
        add(buffer, 2)
        assert len(reader) == 7
        assert reader.capacity == 50
    reader.close()


def test_readers_follow_a_later_generation_without_a_notice(path, tmp_path):
    buffer = created(path)
    add(buffer, 5)
    buffer.commit()
    reader = mr.ReplayBuffer.open(path)
    shutil.copytree(path, tmp_path / "copy")
    abandon(buffer)
    with mr.ReplayBuffer.open(tmp_path / "copy", "r+") as other:
        other.resize(40)
        add(other, 1)
    shutil.rmtree(path)
    (tmp_path / "copy").rename(path)
    assert reader.capacity == 40
    assert len(reader) == 6
    reader.close()


# Who left it open


SCRIPT = """
import shutil, sys
import mmreplay as mr
schema = mr.Schema({"number": mr.Field((), "int64")})
buffer = mr.ReplayBuffer.create(sys.argv[1], schema, 100)
buffer.add(number=1)
reader = mr.ReplayBuffer.open(sys.argv[1])
shutil.rmtree(sys.argv[1])
"""


def test_a_buffer_left_open_in_a_folder_that_is_gone_says_nothing_at_exit(path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_dropped_buffer_in_a_folder_that_is_gone_gives_everything_back(path):
    before = num_descriptors()
    buffer = created(path)
    add(buffer, 1)
    delete(path)
    del buffer
    gc.collect()
    assert num_descriptors() == before


def test_a_buffer_that_another_thread_closed_meanwhile_is_not_judged(path):
    """Its descriptor is nobody's then, or another file's."""
    buffer, reader = created(path), mr.ReplayBuffer.open(path)
    looks = [buffer._files.committer.refuse_removed, reader._files.refuse_removed]
    buffer.close()
    reader.close()
    delete(path)
    assert [look() for look in looks] == [False, False]
