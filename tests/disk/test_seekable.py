"""A position over bytes behaves as a file of Python's."""

import io

import pytest

from mmreplay.disk.files import File
from mmreplay.disk.seekable import SeekableFile


@pytest.fixture
def path(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(100)))
    return tmp_path / "x"


@pytest.fixture
def file(path):
    found = File.open(path, None)
    yield found
    found.close()


@pytest.mark.parametrize("seek", [(5, 0), (3, 1), (-7, 2), (99, 0), (400, 0)])
@pytest.mark.parametrize("size", [0, 4, 1000, -1, None])
def test_it_reads_as_files_do(path, file, seek, size):
    with SeekableFile(file) as ours, path.open("rb") as theirs:
        for _ in range(2):
            assert ours.seek(*seek) == theirs.seek(*seek)
            assert ours.read(size) == theirs.read(size)
            assert ours.tell() == theirs.tell()


@pytest.mark.parametrize("at", [0, 90, 100, 400])
def test_it_fills_buffers_as_files_do(path, file, at):
    ours, theirs = bytearray(20), bytearray(20)
    with path.open("rb") as other:
        other.seek(at)
        assert SeekableFile(file, at).readinto(ours) == other.readinto(theirs)
    assert ours == theirs


def test_it_can_be_buffered_and_leaves_the_file_open(file):
    with io.BufferedReader(SeekableFile(file), 7) as buffered:
        assert buffered.read() == bytes(range(100))
    assert file.pread(1, 5) == b"\x05"


def test_no_byte_is_before_the_first(file):
    ours = SeekableFile(file, 3)
    for seek in ((-1, 0), (-4, 1), (-101, 2)):
        with pytest.raises(ValueError, match="must not go before byte 0, got -1"):
            ours.seek(*seek)
    assert ours.tell() == 3
