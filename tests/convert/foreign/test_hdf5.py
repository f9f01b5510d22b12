"""HDF5 files that are damaged, or made to deceive."""

import subprocess
import sys
from contextlib import contextmanager

import h5py
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.base import Notes
from mmreplay.datasets.hdf5 import Hdf5
from mmreplay.disk import files
from mmreplay.errors import (
    CorruptError,
    FailedError,
    FormatError,
    FullError,
    LockedError,
    SourceError,
)
from tests.convert.contract import error_of, text_of
from tests.convert.foreign.test_d4rl import episodes, write


@pytest.fixture
def path(tmp_path, rng):
    return write(tmp_path / "a.hdf5", episodes(rng), leave=["actions"])


def refuse(path, tmp_path, match):
    with pytest.raises(FormatError, match=match):
        mr.load(path, tmp_path / "buffer", format="d4rl")
    assert not (tmp_path / "buffer").exists()


def test_data_in_other_files_is_refused(tmp_path, path):
    (tmp_path / "secret").write_bytes(bytes(range(128)))
    with h5py.File(path, "a") as file:
        file.create_dataset("actions", (16, 2), "f4", external=[(str(tmp_path / "secret"), 0, 128)])
    refuse(path, tmp_path, r"'/actions' is stored in other files\. Copy it")


@pytest.mark.parametrize("options", [{}, {"chunks": (4,)}])
def test_rows_behind_the_last_are_never_read(tmp_path, options):
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        file.create_dataset("few", data=np.arange(4), **options)
        file["secret"] = np.full(99, 7)
    hdf5 = Hdf5(path, Notes())
    rows = hdf5.rows("/few", "few")
    assert rows.read(0, 4).tolist() == [0, 1, 2, 3]
    with pytest.raises(CorruptError, match="'/few' must have at least 5 rows, got 4"):
        rows.read(3, 5)
    hdf5.close()


def test_virtual_datasets_are_refused(tmp_path, path):
    layout = h5py.VirtualLayout((16, 2), "f4")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (16, 2))
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset("actions", layout)
    refuse(path, tmp_path, r"'/actions' is stored in other files\. Copy it")


def test_a_dataset_that_claims_more_than_it_holds_needs_leave(tmp_path, path):
    with h5py.File(path, "a") as file:
        file.create_dataset("actions", (16, 1 << 24), "f8", chunks=(1, 1024))
    refuse(path, tmp_path, r"2147483648, more than 1000 times as many\.")


def test_chunks_that_do_not_fit_in_memory_are_refused(tmp_path, path):
    with h5py.File(path, "a") as file:
        file.create_dataset(
            "actions", (16, 1 << 24), "f8", chunks=(16, 1 << 22), compression="gzip"
        )
    with pytest.raises(FormatError, match=r"chunks of at most .* got 536870912"):
        mr.load(path, tmp_path / "buffer", format="d4rl", allow_expansion=True)


def test_groups_that_hold_each_other_end(tmp_path, path):
    with h5py.File(path, "a") as file:
        file["actions"] = np.zeros((16, 2), "f4")
        group = file.create_group("infos")
        group["again"] = group
    refuse(path, tmp_path, "nests deeper than 16")


def test_flipped_bits_are_errors_that_name_the_file_or_change_values(tmp_path, rng):
    path = write(tmp_path / "a.hdf5", episodes(rng))
    whole = path.read_bytes()
    for place in rng.integers(0, len(whole), 60).tolist():
        data = bytearray(whole)
        data[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        error = error_of(lambda: mr.load(path, tmp_path / "buffer", format="d4rl"))
        if error is not None:
            assert str(path) in text_of(error), (place, error)
            assert not (tmp_path / "buffer").exists()
        else:
            files.remove_tree(tmp_path / "buffer")


@pytest.mark.parametrize("name", ["b.hdf5", "b.pkl"])
def test_a_link_is_reported_as_a_link(tmp_path, path, name):
    (tmp_path / name).symlink_to(path)
    with pytest.raises(FormatError, match=rf"{name} is not a regular file, but"):
        mr.load(tmp_path / name, tmp_path / "buffer")


def test_a_file_that_is_no_hdf5_is_named(tmp_path):
    path = tmp_path / "a.hdf5"
    path.write_bytes(b"no such thing" * 100)
    with pytest.raises(CorruptError, match="the HDF5 library cannot read the file of 1300"):
        Hdf5(path, Notes())
    with pytest.raises(
        FormatError, match=r"a file of no known format\. Its name fits d4rl, robomimic:"
    ):
        mr.load(path, tmp_path / "buffer")


WRITER = """
import sys, time
import h5py, numpy as np
path, mode, libver, then = sys.argv[1:]
file = h5py.File(path, mode, libver=libver, locking=True)
if then == "swmr":
    file.swmr_mode = True
elif then == "flush":
    file.flush()
elif then == "add":
    file["more"] = np.zeros(9)
print("open", flush=True)
if then != "die":
    time.sleep(600)
import os
os._exit(9)
"""
OPEN = r"an HDF5 file that process \d+ has open for writing\. Close it there, then try"
UNCLOSED = r"open for writing, or was not closed by a program that ended\. Close it"


@contextmanager
def writer(*arguments):
    """Another process that has a file open, or has died with it open."""
    command = [sys.executable, "-c", WRITER, *map(str, arguments)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"open\n"
        if arguments[-1] == "die":
            child.wait()
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize(
    ("then", "match"), [("flush", OPEN), ("add", OPEN), ("swmr", UNCLOSED), ("die", UNCLOSED)]
)
@pytest.mark.parametrize("options", [{}, {"format": "d4rl"}])
def test_a_file_that_is_open_for_writing_is_named(tmp_path, rng, then, match, options):
    path = write(tmp_path / "a.hdf5", episodes(rng))
    with h5py.File(path, "r") as old, h5py.File(tmp_path / "b.h5", "w", libver="latest") as new:
        for name in old:
            old.copy(name, new)
    with writer(tmp_path / "b.h5", "a", "latest", then) as child:
        with pytest.raises(LockedError, match=match) as caught:
            mr.load(tmp_path / "b.h5", tmp_path / "buffer", **options)
        assert caught.value.pid == (child.pid if match == OPEN else None)
    advice = "or run h5clear --status on it."
    assert (advice in str(caught.value)) == (match == UNCLOSED)


def test_a_complete_file_that_another_process_has_open_is_a_doubt(tmp_path, rng):
    path = write(tmp_path / "a.hdf5", episodes(rng))
    with writer(path, "a", "earliest", "flush") as child:
        report = mr.load(path, tmp_path / "buffer")
        assert report.doubts == (
            f"process {child.pid} has the file open for writing: rows may be missing, "
            "or change while they are read",
        )
        with pytest.raises(SourceError, match="has the file open for writing"):
            mr.load(path, tmp_path / "strict", strict=True)
    with writer(path, "r", "earliest", "flush"):
        mr.load(path, tmp_path / "strict", strict=True)
    with (
        h5py.File(path, "a", locking=True),
        pytest.raises(LockedError, match="that this process has open for writing"),
    ):
        mr.load(path, tmp_path / "strict", overwrite=True)


def test_a_damaged_file_is_not_called_one_of_no_known_format(tmp_path, path):
    data = path.read_bytes()
    (tmp_path / "b.hdf5").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptError, match="the HDF5 library cannot read the file of"):
        mr.load(tmp_path / "b.hdf5", tmp_path / "buffer")


def test_without_h5py_the_message_says_what_to_install(tmp_path, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(FailedError, match=r'pip install "mmreplay\[hdf5\]"'):
        mr.load(path, tmp_path / "buffer")


def test_a_full_disk_leaves_no_target(tmp_path, rng, monkeypatch):
    path = write(tmp_path / "b.hdf5", episodes(rng))
    mr.load(path, tmp_path / "buffer")

    def full(self, *_, **__):
        raise OSError(0, "Can't write (errno = 28, error message = 'No space left')")

    monkeypatch.setattr(h5py.Group, "create_dataset", full)
    with pytest.raises(FullError, match=r"cannot write .*tmp-mmreplay-new-c\.hdf5"):
        mr.export(tmp_path / "buffer", tmp_path / "c.hdf5")
    assert not [each for each in tmp_path.iterdir() if "c.hdf5" in each.name]


def test_without_h5py_the_way_out_is_to_install_it(tmp_path, monkeypatch):
    fields = dict.fromkeys(["observation", "action", "reward"], mr.Field((), "float32"))
    with mr.ReplayBuffer.create(tmp_path / "b", mr.Schema(fields), 10) as buffer:
        buffer.extend({name: np.zeros((3, 1), np.float32) for name in fields})
    mr.export(tmp_path / "b", tmp_path / "c.hdf5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    message = r"^h5py, .* is not installed\. Run: pip install"
    with pytest.raises(FailedError, match=message):
        mr.load(tmp_path / "c.hdf5", tmp_path / "d", format="d4rl")
    with pytest.raises(FailedError, match=message):
        mr.export(tmp_path / "b", tmp_path / "d.hdf5")
