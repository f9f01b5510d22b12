"""Members of zips, read piece by piece."""

import zlib
from contextlib import closing

import pytest

from mmreplay.convert.zip_file import Deflated, Entry
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError


def test_what_follows_the_end_of_a_deflated_stream_is_not_waited_for(tmp_path):
    packer = zlib.compressobj(wbits=-15)
    packed = packer.compress(b"abc") + packer.flush() + b"junk" * 10
    (tmp_path / "x").write_bytes(packed)
    entry = Entry("x", 8, 0, len(packed), 100, 0)
    with closing(File.open(tmp_path / "x", None)) as file:
        stream = Deflated(file, entry)
        stream.read_into(memoryview(bytearray(2)))
        with pytest.raises(CorruptError, match="with 2 instead of 100 bytes"):
            stream.read_into(memoryview(bytearray(98)))
