"""What was loaded past the page cache is read into memory where there is plenty."""

import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import bulk_writer
from mmreplay.disk.files import File


@pytest.fixture
def asked(monkeypatch):
    """Names of files that are asked for whole."""
    found = []

    def note(self, offset, nbytes):
        assert (offset, nbytes) == (0, self.nbytes)
        found.append(self.path.name)

    monkeypatch.setattr(File, "will_need", note)
    return found


def files(folder, nbytes=1000):
    paths = [folder / "a", folder / "b"]
    for path in paths:
        path.write_bytes(bytes(nbytes))
    return paths


def test_all_files_are_asked_for_where_there_is_plenty(tmp_path, monkeypatch, asked):
    paths = files(tmp_path)
    monkeypatch.setattr(bulk_writer, "available_nbytes", lambda: 8000)
    bulk_writer.warm(paths).join()
    assert asked == ["a", "b"]
    monkeypatch.setattr(bulk_writer, "available_nbytes", lambda: 7999)
    assert bulk_writer.warm(paths) is None


def test_for_no_files_no_thread_begins():
    """Who forks after a small load has no thread beside."""
    assert bulk_writer.warm([]) is None


def test_a_file_that_is_gone_is_nobodys_trouble(tmp_path, asked):
    paths = files(tmp_path)
    real = File.open
    paths[0].unlink()
    assert bulk_writer.warm(paths) is None
    paths[0].write_bytes(bytes(1000))

    def late(path, nbytes):
        path.unlink(missing_ok=True)
        return real(path, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(File, "open", late)
        bulk_writer.warm(paths).join()
    assert asked == []


def test_where_no_thread_is_left_nothing_is_asked_for(tmp_path, monkeypatch, asked):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert bulk_writer.warm(files(tmp_path)) is None
    assert asked == []


def test_a_load_past_the_cache_has_its_large_files_asked_for(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(bulk_writer, "warm", given.append)
    np.savez(
        tmp_path / "a.npz",
        observation=np.zeros((200, 5000), np.uint8),
        reward=np.zeros(200, np.float32),
        terminated=np.zeros(200, bool),
    )
    mr.load(tmp_path / "a.npz", tmp_path / "cached")
    assert given.pop() == []
    monkeypatch.setattr(bulk_writer, "DIRECT_NBYTES", 1 << 16)
    mr.load(tmp_path / "a.npz", tmp_path / "past")
    paths = given.pop()
    if not paths:
        pytest.skip("this file system has no way past the page cache")
    assert [path.name for path in paths] == ["f000.bin"]
    assert all(path.is_relative_to(tmp_path / "past") for path in paths)
    assert all(path.stat().st_size for path in paths)
