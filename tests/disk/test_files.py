"""The door to the disk: what it refuses, and what a fault or a crash leaves."""

import errno
import os
import resource
import signal
import socket
import uuid

import numpy as np
import pytest

from mmreplay import process
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError, FormatError, FullError
from mmreplay.testing.disks import FaultyDisk, WatchedDisk, using
from tools.torture.power import PowerCut, SimulatedDisk

OLD, NEW = b"old" * 400, b"new" * 500


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "folder" / "metadata.json"
    path.parent.mkdir()
    path.write_bytes(OLD)
    return path


def calls_of_a_replace(path):
    with using(WatchedDisk()) as disk:
        files.replace_bytes(path, NEW)
    path.write_bytes(OLD)
    return disk.calls.total()


# replace_bytes: old or new, whole, whatever happens


def test_a_replaced_file_holds_the_new_bytes_and_nothing_is_left(path):
    files.replace_bytes(path, NEW)
    assert path.read_bytes() == NEW
    assert os.listdir(path.parent) == ["metadata.json"]


def test_a_file_is_made_where_none_was(tmp_path):
    files.replace_bytes(tmp_path / "a", NEW)
    assert (tmp_path / "a").read_bytes() == NEW


@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), OSError(5, "eio")]
)
def test_a_fault_at_any_call_of_a_replace_leaves_old_or_new(path, fault):
    for at in range(calls_of_a_replace(path)):
        disk = FaultyDisk(fault, at)
        errors = (KeyboardInterrupt, FullError, FailedError)
        with using(disk), pytest.raises(errors):
            files.replace_bytes(path, NEW)
        assert disk.struck == 1
        assert path.read_bytes() in (OLD, NEW)
        # What a failed try left behind is no obstacle to the next one.
        files.replace_bytes(path, NEW)
        assert path.read_bytes() == NEW
        assert os.listdir(path.parent) == ["metadata.json"]
        path.write_bytes(OLD)


@pytest.mark.crash
def test_a_kill_at_any_call_of_a_replace_leaves_old_or_new(path):
    total = calls_of_a_replace(path)
    for at in range(total + 1):
        pid = os.fork()
        if pid == 0:
            with using(FaultyDisk("kill", at)):
                files.replace_bytes(path, NEW)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == (-signal.SIGKILL if at < total else 0)
        assert path.read_bytes() in (OLD, NEW)
    assert path.read_bytes() == NEW


def test_a_power_cut_at_any_call_of_a_replace_leaves_old_or_new(path, tmp_path):
    seen = set()
    for at in range(calls_of_a_replace(path) + 1):
        for seed in range(40):
            for name in os.listdir(path.parent):
                os.unlink(path.parent / name)
            path.write_bytes(OLD)
            with using(SimulatedDisk(path.parent, calls_left=at)) as disk:
                try:
                    files.replace_bytes(path, NEW)
                    returned = True
                except PowerCut:
                    returned = False
                disk.crash(tmp_path / "image", np.random.default_rng(seed))
            content = (tmp_path / "image" / path.name).read_bytes()
            assert content in ((NEW,) if returned else (OLD, NEW))
            seen.add((at, content == NEW))
    # The cut is noticed on both sides of the rename.
    assert {was_new for _, was_new in seen} == {False, True}


@pytest.mark.parametrize("left_out", ["datasync", "sync_folder"])
def test_a_replace_without_one_of_its_syncs_would_be_noticed(path, tmp_path, left_out):
    seen = set()
    for seed in range(60):
        path.write_bytes(OLD)
        disk = SimulatedDisk(path.parent)
        setattr(disk, left_out, lambda fd: None)
        with using(disk):
            files.replace_bytes(path, NEW)
            disk.crash(tmp_path / "image", np.random.default_rng(seed))
        seen.add((tmp_path / "image" / path.name).read_bytes())
    assert seen - {NEW}


# File.open: regular files of the right size, and nothing else


def test_a_file_is_opened_with_its_size(path):
    file = File.open(path, len(OLD))
    assert (file.nbytes, file.writable) == (len(OLD), False)
    assert file.pread(6, 3) == b"oldold"
    with pytest.raises(FailedError, match=r"cannot write .*metadata\.json"):
        file.pwrite(b"x", 0)
    file.close()
    file.close()


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.symlink_to(path.parent / "target"),
        lambda path: path.symlink_to("/dev/zero"),
        os.mkfifo,
        os.mkdir,
        lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    ],
    ids=["link", "link to a device", "pipe", "folder", "socket"],
)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_what_is_no_regular_file_is_refused(tmp_path, make, writable, monkeypatch):
    # A relative name, because a socket's may have 107 bytes only.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").write_bytes(bytes(8))
    make(tmp_path.relative_to(tmp_path) / "odd")
    with pytest.raises(FormatError, match=r"odd is not a regular file, but"):
        File.open(tmp_path / "odd", None, writable=writable)


def test_a_device_is_refused():
    with pytest.raises(FormatError, match="/dev/zero is not a regular file"):
        File.open(files.Path("/dev/zero"), None)


def test_a_missing_file_is_damage(tmp_path):
    told = r"flags\.bin is missing\. Restore .* or run mmreplay repair SOURCE"
    with pytest.raises(CorruptError, match=told):
        File.open(tmp_path / "flags.bin", 8)
    with pytest.raises(CorruptError, match=r"is missing\. Restore it from a copy\.$"):
        File.open(tmp_path / "a.npz", None)


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_a_file_of_another_size_is_damage(tmp_path, nbytes):
    (tmp_path / "a").write_bytes(bytes(nbytes))
    with pytest.raises(CorruptError, match=f"has {nbytes} bytes, but metadata"):
        File.open(tmp_path / "a", 8)


def test_a_refusal_leaves_no_descriptor_open(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").write_bytes(bytes(3))
    before = len(os.listdir("/proc/self/fd"))
    for name in ("pipe", "a"):
        with pytest.raises(FormatError):
            File.open(tmp_path / name, 8)
    faulty = FaultyDisk(OSError(28, "full"), names=("truncate",))
    with using(faulty), pytest.raises(FullError):
        File.create(tmp_path / "b", 8)
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_are_not_inherited(path):
    assert not os.get_inheritable(File.open(path, None).fd)


def test_a_file_that_exists_is_not_created_again(path):
    with pytest.raises(FailedError, match=r"cannot create .*metadata\.json: File exi"):
        File.create(path, 8)
    assert path.read_bytes() == OLD


# Writing and reading


def test_creating_takes_no_blocks_however_large(tmp_path):
    file = File.create(tmp_path / "a", 1 << 40)
    status = os.fstat(file.fd)
    assert (status.st_size, status.st_blocks) == (1 << 40, 0)
    assert file.pread(8, (1 << 40) - 8) == bytes(8)


def test_a_write_that_stores_less_is_carried_on(tmp_path):
    file = File.create(tmp_path / "a", 1000)
    data = np.random.default_rng(0).bytes(777)
    with using(FaultyDisk("short", count=6, names=("pwrite",))) as disk:
        file.pwrite(data, 99)
    assert disk.calls["pwrite"] == 7
    assert file.pread(777, 99) == data
    assert file.pread(99, 0) == bytes(99)


def test_a_write_that_stores_nothing_is_not_tried_for_ever(tmp_path, monkeypatch):
    file = File.create(tmp_path / "a", 8)
    monkeypatch.setattr(files.disk, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(FailedError, match=r"cannot write .*the device took 0 of 3 bytes"):
        file.pwrite(b"abc", 0)


def test_arrays_are_written_as_their_bytes(tmp_path):
    file = File.create(tmp_path / "a", 64)
    data = np.arange(12, dtype="<i4").reshape(3, 4)
    with using(FaultyDisk("short", names=("pwrite",))):
        file.pwrite(memoryview(data), 8)
    assert file.pread(48, 8) == data.tobytes()
    out = np.zeros((3, 4), "<i4")
    file.pread_into(memoryview(out), 8)
    assert (out == data).all()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("name", ["pwrite", "allocate", "truncate"])
def test_a_full_disk_says_so_and_what_to_do(tmp_path, name, number):
    def use():
        file = File.create(tmp_path / "a", 64)
        file.allocate(0, 64)
        file.pwrite(b"abc", 0)

    fault = OSError(number, os.strerror(number))
    way_out = "Free space, or resize to less capacity, and call again"
    if number == errno.EFBIG:
        way_out = r"Choose a smaller capacity or heap_bytes \(see mmreplay plan\), as "
    expected = (
        rf"cannot .* {tmp_path}/a: {os.strerror(number)}, so what was being written is "
        rf"not published\. {way_out}"
    )
    faulty = FaultyDisk(fault, names=(name,))
    with using(faulty), pytest.raises(FullError, match=expected) as caught:
        use()
    assert caught.value.errno == number


@pytest.mark.parametrize("name", ["pwrite", "datasync", "allocate", "open"])
def test_a_failing_device_is_distinguished_from_a_full_one(tmp_path, name):
    def use():
        file = File.create(tmp_path / "a", 64)
        file.allocate(0, 64)
        file.pwrite(b"abc", 0)
        file.sync()

    with using(FaultyDisk(OSError(errno.EIO, "Input/output error"), names=(name,))):
        expected = rf"cannot .* {tmp_path}/a: Input/output error \(errno 5\)"
        with pytest.raises(FailedError, match=expected) as caught:
            use()
    assert caught.value.errno == errno.EIO


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    file = File.create(tmp_path / "a", 64)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (32, limits[1]))
        with pytest.raises(FullError, match="File too large"):
            file.pwrite(b"abc", 40)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.pread(3, 40) == bytes(3)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_is_fine(tmp_path, number):
    file = File.create(tmp_path / "a", 64)
    with using(FaultyDisk(OSError(number, "no"), names=("allocate",))) as disk:
        file.allocate(0, 64)
    assert disk.struck == 1


def test_a_read_past_the_end_names_file_and_byte(path):
    file = File.open(path, None)
    with pytest.raises(CorruptError, match="ends at byte 1200, but bytes up to 1300"):
        file.pread(200, 1100)


def test_a_store_is_in_the_file_at_once_and_its_space_was_reserved(tmp_path):
    file = File.create(tmp_path / "a", 8192)
    file.map_writable()
    assert os.fstat(file.fd).st_blocks * 512 >= 8192
    file.store(b"live", 4096)
    assert file.pread(4, 4096) == b"live"


def test_a_reading_mapping_sees_writes_and_takes_none(tmp_path):
    file = File.create(tmp_path / "a", 4096)
    mapping = file.map_readonly()
    file.pwrite(b"abc", 7)
    assert mapping[7:10] == b"abc"
    with pytest.raises(TypeError):
        mapping[0] = 1


def test_a_copy_has_another_identity(path, tmp_path):
    (tmp_path / "copy").write_bytes(OLD)
    here, there = File.open(path, None), File.open(tmp_path / "copy", None)
    assert here.identity() != there.identity()
    assert here.identity() == File.open(path, None).identity()


@pytest.mark.parametrize("max_nbytes", [0, 1199])
def test_a_small_file_that_is_large_is_refused(path, max_nbytes):
    with pytest.raises(FormatError, match=f"at most {max_nbytes} bytes, got 1200"):
        files.read_bytes(path, max_nbytes)
    assert files.read_bytes(path, 1200) == OLD


# Folders


def test_a_folder_is_made_once(tmp_path):
    files.make_folder(tmp_path / "a")
    files.make_folder(tmp_path / "a", exist_ok=True)
    with pytest.raises(FailedError, match=r"cannot make folder .*/a: File exists"):
        files.make_folder(tmp_path / "a")


def test_a_folder_reached_through_a_link_is_written_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "real")
    files.make_folder(tmp_path / "runs" / "a")
    files.replace_bytes(tmp_path / "runs" / "b", NEW)
    assert sorted(os.listdir(tmp_path / "real")) == ["a", "b"]


def test_removing_a_tree_follows_no_link_out_of_it(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_bytes(OLD)
    (tmp_path / "gone" / "inner").mkdir(parents=True)
    (tmp_path / "gone" / "inner" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone" / "a").write_bytes(OLD)
    files.remove_tree(tmp_path / "gone")
    files.remove_tree(tmp_path / "gone")
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(tmp_path / "kept") == ["a"]


def test_a_boot_has_one_name_and_none_is_zeros(monkeypatch):
    named = files.Path("/proc/sys/kernel/random/boot_id").read_text()
    assert process.boot_id() == uuid.UUID(named.strip()).bytes
    assert any(process.boot_id())
    monkeypatch.setattr(files.Path, "read_text", lambda *_: files.os.stat("/nowhere"))
    assert process.boot_id() == bytes(16)
