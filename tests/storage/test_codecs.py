"""Chunks unpacked together are those unpacked one by one."""

import numpy as np
import pytest

from mmreplay.format.sharding import CODECS, Sharding
from mmreplay.storage.zarr import codecs

ROWS = 9


@pytest.fixture(params=[(c, s) for c in CODECS for s in (False, True)])
def codec(request):
    name, summed = request.param
    return codecs.codec_of(Sharding(name, 3 if name == "zstd" else 0, 4, summed), 1)


def chunks(rng, codec, nbytes=300):
    rows = rng.integers(0, 4, (ROWS, nbytes)).astype(np.uint8)
    rows[3] = 0
    return rows, [memoryview(bytes(codec.pack(row))) for row in rows]


def test_many_are_each(rng, codec):
    rows, parts = chunks(rng, codec)
    out = np.empty_like(rows)
    codec.unpack_many(parts, out)
    assert np.array_equal(out, rows)
    codec.unpack_many(parts[:1], out[:1])
    codec.unpack_many([], out[:0])


def test_one_that_is_damaged_fails_all(rng, codec):
    rows, parts = chunks(rng, codec)
    _, others = chunks(rng, codec, 301)
    out = np.empty_like(rows)
    for damaged in (others[5], memoryview(bytes(parts[5])[:-1]), memoryview(b"")):
        some = [*parts[:5], damaged, *parts[6:]]
        with pytest.raises((ValueError, RuntimeError, codecs.struct.error)):
            codec.unpack_many(some, out)


def test_frames_that_lie_of_their_size_do_not_shift_others(rng):
    codec = codecs.Zstd(3)
    rows, parts = chunks(rng, codec)
    # One holds two frames, and the next one none: as many bytes in all.
    two = memoryview(bytes(parts[4]) + bytes(parts[5]))
    empty = memoryview(codecs.EMPTY_FRAME)
    out = np.empty_like(rows)
    with pytest.raises(ValueError, match="says another number of bytes"):
        codec.unpack_many([*parts[:4], two, empty, *parts[6:]], out)
    with pytest.raises(RuntimeError):
        codec.unpack_many([*parts[:4], two, *parts[5:]], out)
