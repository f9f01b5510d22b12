"""Both twins of the row kernels give the flags and slots that the format says."""

import struct

import google_crc32c
import numpy as np
import pytest

from mmreplay import episodes
from mmreplay.format import commit
from mmreplay.kernels import rows as twin


def test_the_flags_are_those_of_episodes():
    for name in ("START", "TERMINATED", "TRUNCATED", "FINAL", "END"):
        assert getattr(twin, name) == getattr(episodes, name)


def marked(before, terminated, truncated, final_follows):
    """Flags of a block, one row after the other."""
    flags = np.zeros(terminated.shape, np.uint8)
    for env in range(terminated.shape[1]):
        last = int(before[env])
        for step in range(len(terminated)):
            now = 2 * int(terminated[step, env]) + 4 * int(truncated[step, env])
            ended = last & episodes.END
            if final_follows and ended:
                now = episodes.FINAL
            elif last & episodes.FINAL or (ended and not final_follows):
                now |= episodes.START
            flags[step, env] = last = now
    return flags


@pytest.mark.parametrize("final_follows", [False, True])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.6])
def test_flags_follow_from_the_row_before(rows, final_follows, chance, rng):
    for _ in range(60):
        shape = tuple(rng.integers(1, 9, 2))
        ends = rng.random((2, *shape)) < chance
        # Ends may come with any strides, or as those of one environment.
        terminated, truncated = ends[0], np.asfortranarray(ends[1])[:, ::-1]
        if rng.random() < 0.5:
            truncated = ends[1]
        before = rng.choice(np.array([0, 1, 2, 4, 6, 8, 3, 17], np.uint8), shape[1])
        out = np.full(shape, 0xEE, np.uint8)
        rows.mark(out, before, terminated, truncated, final_follows)
        expected = marked(before, terminated, truncated, final_follows)
        assert np.array_equal(out, expected)
        if 1 in shape:
            only = terminated.reshape(-1), truncated.reshape(-1)
            rows.mark(out, before, *only, final_follows)
            assert np.array_equal(out, expected)


@pytest.mark.parametrize("final_follows", [False, True])
def test_a_schema_without_ends_never_ends(rows, final_follows):
    out = np.full((3, 2), 0xEE, np.uint8)
    rows.mark(out, np.array([8, 0], np.uint8), None, None, final_follows)
    assert out.tolist() == [[1, 0], [0, 0], [0, 0]]


def test_ends_of_another_shape_are_refused(rows):
    out, before = np.zeros((3, 2), np.uint8), np.zeros(2, np.uint8)
    with pytest.raises(ValueError, match=r"mark: ends must be bools \[3, 2\]"):
        rows.mark(out, before, np.zeros((2, 3), bool), None, False)
    with pytest.raises(ValueError, match=r"mark: ends must be bools \[3, 2\]"):
        rows.mark(out, before, None, np.zeros((3, 1), bool), False)
    with pytest.raises(ValueError, match=r"mark: out must hold whole steps of 2 .* got 5"):
        rows.mark(np.zeros(5, np.uint8), before, None, None, False)


def record(num_envs, rng, **changes):
    counts = np.sort(rng.integers(0, 1 << 61, (3, num_envs)), axis=0)
    columns = {"tails": counts[0], "heads": counts[1], "limits": counts[2]}
    given = {
        "sequence": int(rng.integers(1 << 62)),
        "epoch": 3,
        "flags": 4,
        "boot_id": rng.bytes(16),
        "uuid": rng.bytes(16),
        "generation": 1,
        "device": 7,
        "inode": 9,
        "time_ns": 0,
        "cuts": rng.integers(0, 9, num_envs),
        "cut_epoch": 2,
        "cut_rows": 13,
    }
    return commit.Record(**(given | columns | changes))


# 123 fill the first page to the last byte but four.
@pytest.mark.parametrize("num_envs", [1, 2, 31, 122, 123, 124, 1000, 4096])
def test_a_publication_has_the_bytes_of_its_record(rows, num_envs, rng):
    first = record(num_envs, rng)
    slot = rows.Slot(first.encode(), 16, 128, num_envs)
    assert bytes(slot.data) == first.encode()
    for _ in range(5):
        then = record(num_envs, rng, boot_id=first.boot_id, uuid=first.uuid, cuts=first.cuts)
        data = slot.publish(then.sequence, then.heads, then.limits, then.tails)
        assert bytes(data) == then.encode()
        assert data is slot.data
        told = commit.decode(bytes(data), first.uuid, num_envs)
        assert told.sequence == then.sequence
        assert told.heads.tolist() == then.heads.tolist()


@pytest.mark.parametrize("num_envs", [1, 2, 82, 83, 1000])
def test_a_publication_has_the_columns_of_a_heap(rows, num_envs, rng):
    def heap():
        heap_tails = rng.integers(0, 1 << 40, num_envs)
        return {"heap_tails": heap_tails, "heap_heads": heap_tails + 8}

    first = record(num_envs, rng, **heap())
    slot = rows.Slot(first.encode(), 16, 128, num_envs, 6)
    then = record(num_envs, rng, boot_id=first.boot_id, uuid=first.uuid, cuts=first.cuts, **heap())
    data = slot.publish(
        then.sequence, then.heads, then.limits, then.tails, then.heap_heads, then.heap_tails
    )
    assert bytes(data) == then.encode()
    # Without them they stay as they were.
    again = slot.publish(then.sequence, then.heads, then.limits, then.tails)
    assert bytes(again) == then.encode()


def test_columns_of_a_heap_need_a_record_that_has_them(rows, rng):
    first = record(2, rng)
    slot = rows.Slot(first.encode(), 16, 128, 2)
    columns = first.heads, first.limits, first.tails, first.heads, first.tails
    with pytest.raises(ValueError, match="Slot: the record has no columns for a heap"):
        slot.publish(1, *columns)
    with pytest.raises(ValueError, match="Slot: the record must have 2 environments"):
        rows.Slot(first.encode(), 16, 128, 2, 5)


def test_flags_set_in_the_data_are_published(rows, rng):
    first = record(2, rng)
    slot = rows.Slot(first.encode(), 16, 128, 2)
    struct.pack_into("<I", slot.data, 8, 6)
    data = bytes(slot.publish(1, first.heads, first.limits, first.tails))
    assert commit.decode(data, first.uuid, 2).flags == 6
    assert google_crc32c.value(data[:-4]) == struct.unpack("<I", data[-4:])[0]


@pytest.mark.parametrize("num_envs", [0, 1, 200, 1 << 56])
def test_a_template_that_is_no_record_is_refused(rows, num_envs, rng):
    data = bytearray(record(1, rng).encode())
    data[170] = 1
    with pytest.raises(ValueError, match=f"Slot: the record must have {num_envs} env"):
        rows.Slot(bytes(data), 16, 128, num_envs)


def test_heads_of_other_environments_are_refused(rows, rng):
    first = record(2, rng)
    slot = rows.Slot(first.encode(), 16, 128, 2)
    with pytest.raises(ValueError, match=r"Slot: values must be int64 \[2\], got 24"):
        slot.publish(1, first.heads, np.zeros(3, np.int64), first.tails)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_bytes_of_any_length_are_summed_as_by_the_library(rows, at, rng):
    # C folds three spans of 4 KiB side by side; the twin copies 64 KiB at a time.
    data = rng.bytes(140_000)
    about = [3 * 4096 * k + d for k in (1, 2, 10) for d in (-1, 0, 1, 4095, 4097)]
    for length in [0, 1, 7, 8, 9, 4095, 4096, 65_536, 65_537, *about]:
        part, before = data[at : at + length], int(rng.integers(1 << 32))
        assert rows.crc32c(part, before) == google_crc32c.extend(before, part)
        assert rows.crc32c(memoryview(part)) == google_crc32c.value(part)
    whole = np.frombuffer(data, np.float32)
    assert rows.crc32c(whole.data, 5) == google_crc32c.extend(5, data)


def test_bytes_that_do_not_follow_each_other_are_not_summed(rows):
    with pytest.raises((TypeError, BufferError)):
        rows.crc32c(memoryview(bytes(8))[::2])
