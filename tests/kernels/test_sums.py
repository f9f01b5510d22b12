"""Both twins of the checksums are the libraries', however the bytes come."""

import zlib

import google_crc32c
import numpy as np
import pytest

from mmreplay.kernels import choose
from mmreplay.kernels import sums as twin

C = choose("sums", "").module


@pytest.fixture(params=[twin, C], ids=["numpy", "c"])
def sums(request):
    return request.param


def crc32c(data, before):
    return google_crc32c.extend(before, bytes(data))


@pytest.mark.parametrize(
    ("name", "expected"), [("crc32", zlib.crc32), ("crc32c", crc32c)]
)
def test_every_length_and_place_is_summed_as_libraries_do(sums, rng, name, expected):
    data = memoryview(rng.bytes(70_000))
    lengths = [*range(300), 1000, 4096, 65_536, 69_000]
    for length in lengths:
        first, before = int(rng.integers(64)), int(rng.integers(1 << 32))
        part = data[first : first + length]
        assert getattr(sums, name)(part, before) == expected(part, before)
        assert getattr(sums, name)(part) == expected(part, 0)


def test_a_sum_goes_on_over_parts(sums, rng):
    data = rng.bytes(5000)
    for name in ("crc32", "crc32c"):
        found = getattr(sums, name)
        halves = found(memoryview(data)[1234:], found(data[:1234]))
        assert halves == found(memoryview(np.frombuffer(data, np.float32)))


def test_scattered_bytes_and_other_things_are_refused(sums):
    for name in ("crc32", "crc32c"):
        with pytest.raises((BufferError, TypeError)):
            getattr(sums, name)(memoryview(b"abcdef")[::2])
        with pytest.raises(TypeError):
            getattr(sums, name)("text")
