"""A copy put back in the place of its removed original is told from the original.

Linux file systems such as ext4 hand the inode number of a removed file out again at
once, so the copy's COMMIT may have the number that its own live slots name.
"""

import os
import shutil
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import Disk, File
from mmreplay.format import commit
from mmreplay.format.commit import seal
from mmreplay.storage.commit_state import open_commit
from tests.buffer.test_copies import SCHEMA, add, copied, right
from tests.inodes import number_of, numbered
from tools.torture.powerloss import abandon

COMMITTED, COPIED = 30, 90
DATA = "data-000001"


@pytest.fixture(params=["here", "ext4", "overlay"])
def disk(request, tmp_path):
    """A folder on a file system that may hand inode numbers out again."""
    if request.param == "here":
        yield tmp_path
        return
    if os.geteuid() != 0:
        pytest.skip("file systems are mounted by root only")
    path = tmp_path / "disk"
    path.mkdir()
    if request.param == "ext4":
        image = tmp_path / "image"
        image.write_bytes(b"")
        os.truncate(image, 192 << 20)
        commands = [
            ["mkfs.ext4", "-q", "-F", "-I", "256", str(image)],
            ["mount", "-o", "loop", str(image), str(path)],
        ]
    else:
        for name in ("lower", "upper", "work"):
            (tmp_path / name).mkdir()
        layers = ",".join(
            f"{key}={tmp_path / name}"
            for key, name in (("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work"))
        )
        commands = [["mount", "-t", "overlay", "overlay", "-o", layers, str(path)]]
    for command in commands:
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not here")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount {request.param}: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def killed(folder, backup):
    """A buffer whose writer died, and a copy made file by file while it added.

    COMMIT is copied last: its live slots know rows that the copied data does not.
    """
    buffer = mr.ReplayBuffer.create(folder, SCHEMA, 200, commit_every=None)
    add(buffer, COMMITTED)
    buffer.commit()
    order = sorted(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda path: path.name == "COMMIT",
    )
    copied(folder, backup, order, lambda: add(buffer, 10))
    abandon(buffer)


def put_back(backup, folder, name):
    """Replace a folder by its copy, one file of which gets the number it had before.

    Files are created, and kept, until one gets the number.
    """
    number = number_of(folder / name)
    shutil.rmtree(folder)
    # In the folders of the same places, whose files are near each other.
    place = (folder / name).parent
    place.mkdir(parents=True)
    spares = []
    while len(spares) < 3000 and (not spares or number_of(spares[-1]) != number):
        spares.append(place / f"spare-{len(spares)}")
        spares[-1].touch()
    if number_of(spares[-1]) == number:
        spares.pop().rename(folder / name)
    for spare in spares:
        spare.unlink()
    there = (folder / name).exists()
    shutil.copytree(backup, folder, dirs_exist_ok=True)
    if not there:
        pytest.skip("the file system did not hand the inode number out again")
    assert number_of(folder / name) == number


def assert_only_committed(folder):
    """Only what was committed is served, and every row of it is right."""
    assert mr.verify_buffer(folder).ok
    for mode in ("r", "r+"):
        with mr.ReplayBuffer.open(folder, mode, commit_every=None) as buffer:
            # The reader closed nothing, so the writer finds the same.
            assert buffer.recovery.how == "power_cut"
            rows = buffer.gather_all()
            assert rows.positions.tolist() == list(range(COMMITTED))
            assert right(rows).all()
    with mr.ReplayBuffer.open(folder, "r+", commit_every=None) as buffer:
        add(buffer, 5)
        assert right(buffer.gather_all()).all()


def test_a_restored_copy_with_its_inode_number_ends_at_its_last_commit(disk):
    folder, backup = disk / "run", disk / "bak"
    killed(folder, backup)
    put_back(backup, folder, f"{DATA}/COMMIT")
    assert_only_committed(folder)


def test_a_copy_with_the_inode_number_of_the_original_ends_at_its_last_commit(tmp_path):
    folder, backup = tmp_path / "run", tmp_path / "bak"
    killed(folder, backup)
    number = number_of(folder / DATA / "COMMIT")
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    with numbered(folder / DATA / "COMMIT", number):
        assert_only_committed(folder)


WRITER = """
import sys
import mmreplay as mr
schema = mr.Schema({"number": mr.Field((), "int64"), "note": mr.Field((32,), "int8")})
buffer = mr.ReplayBuffer.create(sys.argv[1], schema, 1_000_000, commit_every=None)
def add(count):
    for _ in range(count):
        number = int(buffer.heads[0])
        buffer.add(number=number, note=[number % 100] * 32)
add(500)
buffer.commit()
print("begun", flush=True)
add(900_000)
"""


@pytest.mark.sliced(2)
def test_cp_of_a_live_folder_put_back_after_kill_and_rm_serves_no_wrong_row(disk):
    folder, backup = disk / "run", disk / "bak"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout.readline() == b"begun\n"
        subprocess.run(["cp", "-r", folder, backup], check=True)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
    subprocess.run(["rm", "-rf", folder], check=True)
    subprocess.run(["cp", "-r", backup, folder], check=True)
    with mr.ReplayBuffer.open(folder) as reader:
        assert reader.recovery.how == "power_cut"
        rows = reader.gather_all()
        assert rows["number"].tolist() == list(range(500))
        assert (rows["note"] == np.arange(500)[:, None] % 100).all()


# What is the original all the same


def test_a_renamed_folder_keeps_what_its_killed_writer_published(tmp_path):
    killed(tmp_path / "run", tmp_path / "bak")
    (tmp_path / "run").rename(tmp_path / "moved")
    with mr.ReplayBuffer.open(tmp_path / "moved") as reader:
        assert reader.recovery.how == "killed"
        assert len(reader) > COPIED
        assert right(reader.gather_all()).all()


def as_before(folder):
    """Rewrite COMMIT as version 0.1 did, in place: with zeros for the birth."""
    path = folder / DATA / "COMMIT"
    data = bytearray(path.read_bytes())
    size = len(data) // commit.NUM_SLOTS
    for slot in range(commit.NUM_SLOTS):
        part = data[slot * size : (slot + 1) * size]
        assert any(part[112:128])
        part[112:128] = bytes(16)
        seal(part)
        data[slot * size : (slot + 1) * size] = part
    with open(path, "r+b") as file:
        file.write(data)


def test_a_ring_that_an_older_version_left_killed_loses_nothing(tmp_path):
    folder = tmp_path / "run"
    killed(folder, tmp_path / "bak")
    as_before(folder)
    for mode in ("r", "r+"):
        with mr.ReplayBuffer.open(folder, mode, commit_every=None) as buffer:
            assert buffer.recovery.how == "killed"
            assert len(buffer) > COPIED
            assert right(buffer.gather_all()).all()
    births = [record.birth for record in records(folder)]
    assert len(set(births)) == 1
    assert births[0] not in (commit.UNTOLD, commit.NO_BIRTH)


def records(folder):
    with mr.ReplayBuffer.open(folder) as reader:
        metadata = reader.metadata
    file, data = open_commit(folder / metadata.folder, 1, 0, writable=False)
    file.close()
    return commit.split(data, metadata.uuid, metadata.generation, 1)


# Where no time of creation is to be had


@pytest.fixture
def nameless(monkeypatch):
    """A file system that does not say when a file was created."""
    monkeypatch.setattr(Disk, "birth", lambda self, fd: None)


def made(folder, **options):
    with pytest.warns(mr.DurabilityWarning, match="when a file was created") as found:
        buffer = mr.ReplayBuffer.create(folder, SCHEMA, 200, commit_every=None, **options)
    assert len(found) == 1
    assert str(folder) in str(found[0].message)
    assert found[0].filename == __file__
    return buffer


@pytest.mark.usefixtures("nameless")
class TestWithoutBirths:
    def test_creating_warns_once_and_nothing_else_does(self, tmp_path):
        buffer = made(tmp_path / "run")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            add(buffer, COMMITTED)
            buffer.resize(300)
            buffer.commit()
            buffer.close()
            mr.ReplayBuffer.open(tmp_path / "run", "r+").close()
        assert {record.birth for record in records(tmp_path / "run")} == {commit.NO_BIRTH}

    def test_a_warning_that_is_an_error_leaves_no_folder(self, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(mr.DurabilityWarning):
                mr.ReplayBuffer.create(tmp_path / "run", SCHEMA, 200)
        assert os.listdir(tmp_path) == []
        made(tmp_path / "run").close()

    def test_rows_that_were_published_are_served_while_their_writer_lives(self, tmp_path):
        writer = made(tmp_path / "run")
        add(writer, COMMITTED)
        writer.commit()
        add(writer, 7)
        with mr.ReplayBuffer.open(tmp_path / "run") as reader:
            assert reader.recovery.how == "live"
            assert len(reader) == COMMITTED + 7
            add(writer, 3)
            assert len(reader) == COMMITTED + 10
            assert right(reader.gather_all()).all()
        writer.close()
        with mr.ReplayBuffer.open(tmp_path / "run") as reader:
            assert reader.recovery.how == "clean"
            assert len(reader) == COMMITTED + 10

    def test_after_its_death_copies_end_at_the_last_commit(self, tmp_path):
        writer = made(tmp_path / "run")
        add(writer, COMMITTED)
        writer.commit()
        add(writer, 7)
        abandon(writer)
        assert_only_committed(tmp_path / "run")

    def test_a_restored_copy_ends_at_its_last_commit(self, tmp_path):
        folder, backup = tmp_path / "run", tmp_path / "bak"
        with pytest.warns(mr.DurabilityWarning):
            killed(folder, backup)
        number = number_of(folder / DATA / "COMMIT")
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        with numbered(folder / DATA / "COMMIT", number):
            assert_only_committed(folder)

    def test_a_reader_of_a_dead_writer_follows_the_next_one(self, tmp_path):
        writer = made(tmp_path / "run")
        add(writer, COMMITTED)
        writer.commit()
        add(writer, 7)
        abandon(writer)
        reader = mr.ReplayBuffer.open(tmp_path / "run")
        assert len(reader) == COMMITTED
        assert len(reader) == COMMITTED  # also when it looks again
        with mr.ReplayBuffer.open(tmp_path / "run", "r+", commit_every=None) as writer:
            add(writer, 4)
            assert len(reader) == COMMITTED + 4
            writer.resize(50)
            add(writer, 1)
            assert len(reader) == COMMITTED + 5
            assert right(reader.gather_all()).all()
        reader.close()

    def test_readers_learn_of_a_resize_whose_writer_died_before_it_could_tell(
        self, tmp_path, monkeypatch
    ):
        writer = made(tmp_path / "run")
        add(writer, COMMITTED)
        reader = mr.ReplayBuffer.open(tmp_path / "run")
        assert len(reader) == COMMITTED
        monkeypatch.setattr(type(writer._files.commit), "mark_moved", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            writer.resize(40)
        abandon(writer)
        with mr.ReplayBuffer.open(tmp_path / "run", "r+", commit_every=None) as writer:
            assert len(reader) == COMMITTED
            assert reader.capacity == 40
            add(writer, 2)
            assert len(reader) == COMMITTED + 2
        reader.close()


def test_a_reader_to_which_births_are_barred_sees_what_a_live_writer_adds(tmp_path, monkeypatch):
    """As in a sandbox without `statx`; its writer is elsewhere."""
    with mr.ReplayBuffer.create(tmp_path / "run", SCHEMA, 200, commit_every=None) as writer:
        add(writer, 5)
        with monkeypatch.context() as patch:
            patch.setattr(Disk, "birth", lambda self, fd: None)
            reader = mr.ReplayBuffer.open(tmp_path / "run")
        assert len(reader) == 5
        add(writer, 2)
        assert len(reader) == 7
        reader.close()


def test_a_file_that_is_renamed_keeps_its_identity_and_one_made_anew_does_not(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"x")
    before = identity(path)
    path.rename(other)
    os.utime(other, ns=(1, 1))
    assert identity(other) == before
    other.unlink()
    path.write_bytes(b"x")
    assert identity(path)[2] != before[2]


def identity(path):
    file = File.open(path, None)
    try:
        return file.identity()
    finally:
        file.close()


def test_the_birth_of_a_file_is_the_time_at_which_it_was_made(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x")
    told = subprocess.run(["stat", "-c", "%W", path], capture_output=True, text=True, check=True)
    if int(told.stdout) == 0:
        pytest.skip("the file system does not say when a file was created")
    fd = os.open(path, os.O_RDONLY)
    seconds, nanoseconds = Disk().birth(fd)
    os.close(fd)
    assert seconds == int(told.stdout)
    assert 0 <= nanoseconds < 10**9
    assert np.frombuffer(identity(path)[2], "<i8")[0] == seconds
