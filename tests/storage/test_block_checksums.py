"""Sums of blocks whose rows pass by are those of what the files then hold."""

import struct

import google_crc32c
import numpy as np
import pytest

from mmreplay.buffer.bulk_writer import BlockChecksums, append_zeros, zeros_table
from mmreplay.ring import Ring, Span


@pytest.mark.parametrize("nbytes", [1, 2, 3, 8, 100, 4096, 70_001])
def test_sums_are_put_together_as_if_bytes_had_followed_each_other(nbytes, rng):
    for length in (0, 1, 50):
        first, second = rng.bytes(length), rng.bytes(nbytes)
        before = np.array([google_crc32c.value(first)], np.uint32)
        found = append_zeros(before, zeros_table(nbytes)) ^ google_crc32c.value(second)
        assert found.tolist() == [google_crc32c.value(first + second)]


@pytest.mark.parametrize("seed", range(8))
def test_runs_of_any_size_and_order_make_the_checksums(seed):
    rng = np.random.default_rng(seed)
    num_envs, size = 1 + seed % 3, 8
    ring = Ring(64, num_envs, "env_major", 4, size, 80)
    row_nbytes = [1, 24, 5000]
    first = rng.integers(0, 300, num_envs)
    span = Span(first, first + rng.integers(0, 65, num_envs))
    content = [np.zeros(ring.num_rows * each, np.uint8) for each in row_nbytes]
    passing, found = BlockChecksums(ring, span, row_nbytes), {}
    at = span.first.copy()
    while (at < span.stop).any():
        env_id = int(rng.choice(np.flatnonzero(at < span.stop)))
        count = min(int(rng.integers(1, 20)), int(span.stop[env_id] - at[env_id]))
        stop = int(at[env_id]) + count
        for row, _, rows in ring.split_at_wrap(env_id, int(at[env_id]), stop):
            for part, nbytes in enumerate(row_nbytes):
                begin, end = row * nbytes, (row + rows) * nbytes
                data = rng.integers(0, 256, end - begin, np.uint8)
                content[part][begin:end] = data
                step = int(rng.integers(1, 30_000))
                for offset in range(0, len(data), step):
                    piece = data[offset : offset + step]
                    passing.add(part, begin + offset, piece.data)
        at[env_id] = stop
        for env, block, sums in passing.pop_complete():
            found |= {(env, block + k): crc for k, crc in enumerate(sums.tolist())}
    expected = {}
    for env in range(num_envs):
        whole = range(int(span.first[env]) // size, int(span.stop[env]) // size)
        # Nothing came of an environment that is empty.
        for block in whole if span.lengths[env] else ():
            row = ring.row(env, block * size)
            told = struct.pack("<Q", block * size)
            for part, nbytes in enumerate(row_nbytes):
                told += content[part][row * nbytes : (row + size) * nbytes].tobytes()
            expected[env, block] = google_crc32c.value(told)
    assert found == expected
    assert passing.pop_complete() == []
