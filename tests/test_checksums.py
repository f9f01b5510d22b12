"""Checksums are those of zlib and of the library, however the bytes come."""

import zlib

import google_crc32c
import numpy as np
import pytest

from mmreplay import checksums


def crc32c(data, before):
    return google_crc32c.extend(before, bytes(data))


@pytest.mark.parametrize(("name", "expected"), [("crc32", zlib.crc32), ("crc32c", crc32c)])
def test_every_length_and_offset_has_the_same_checksum(rng, name, expected):
    data = memoryview(rng.bytes(140_000))
    for length in [*range(300), 1000, 65_536, 131_073]:
        first, before = int(rng.integers(64)), int(rng.integers(1 << 32))
        part = data[first : first + length]
        assert getattr(checksums, name)(part, before) == expected(part, before)
        assert getattr(checksums, name)(part) == expected(part, 0)


def test_a_checksum_continues_over_blocks(rng):
    data = rng.bytes(5000)
    for found in (checksums.crc32, checksums.crc32c):
        halves = found(memoryview(data)[1234:], found(data[:1234]))
        assert halves == found(memoryview(np.frombuffer(data, np.float32)))
