"""COMMIT's slots: every byte where docs/format.md says, and what makes one void."""

import struct

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmreplay.disk import files
from mmreplay.format import commit
from mmreplay.format.commit import seal
from tests.format.support import BIRTH, UUID, identity_of, record_of

LITERAL = bytes.fromhex(
    "4d4d5243 4d543031 05000000 02000000"  # MMRCMT01, CLEAN | MOVED, two environments
    "0807060504030201 0900000000000000"  # sequence, epoch
    "101112131415161718191a1b1c1d1e1f"  # boot id
    "000102030405060708090a0b0c0d0e0f"  # uuid
    "0300000000000000 0108000000000000"  # generation, st_dev
    "4d00000000000000 00ca9a3b00000000"  # st_ino, time
    "0400000000000000 0b00000000000000"  # cut epoch, rows cut
    "00f1536500000000 05000000 01000000"  # birth: seconds, nanoseconds, 1
    "0500000000000000 0600000000000000"  # heads
    "0700000000000000 0800000000000000"  # limits
    "0100000000000000 0200000000000000"  # tails
    "0000000000000000 0300000000000000"  # cuts
)


def complete():
    return record_of(
        [5, 6],
        [7, 8],
        [1, 2],
        flags=5,
        sequence=0x0102030405060708,
        epoch=9,
        generation=3,
        time_ns=1_000_000_000,
        cuts=np.array([0, 3]),
        cut_epoch=4,
        cut_rows=11,
    )


def decode(data, uuid=UUID, num_envs=2):
    return commit.decode(bytes(data), uuid, num_envs)


def same(record, other):
    assert record is not None
    for name in record.__slots__:
        assert np.array_equal(getattr(record, name), getattr(other, name)), name
    return True


def test_each_value_stands_at_its_documented_offset():
    data = complete().encode()
    assert data[: len(LITERAL)] == LITERAL
    assert len(data) == 4096
    assert not any(data[len(LITERAL) : 4092])
    assert data[4092:] == struct.pack("<I", google_crc32c.value(data[:4092]))
    assert same(decode(data), complete())


@pytest.mark.parametrize(
    ("num_envs", "nbytes"),
    [(1, 4096), (123, 4096), (124, 8192), (251, 8192), (252, 12288), (4096, 135168)],
)
def test_a_slot_is_the_fewest_pages_that_hold_it(num_envs, nbytes):
    heads = np.arange(num_envs)
    data = record_of(heads).encode()
    assert len(data) == commit.slot_nbytes(num_envs) == nbytes
    assert same(decode(data, num_envs=num_envs), record_of(heads))


def test_a_change_of_any_byte_makes_a_slot_void():
    data = complete().encode()
    for at in range(len(data)):
        torn = bytearray(data)
        torn[at] ^= 0x40
        assert decode(torn) is None, at


def test_a_slot_with_bytes_of_two_records_is_void_wherever_they_meet():
    old, new = record_of([5, 6]).encode(), record_of([6, 7], sequence=2).encode()
    for at in range(4096):
        torn = new[:at] + old[at:]
        assert torn in (old, new) or decode(torn) is None, at


def resealed(change):
    data = bytearray(complete().encode())
    change(data)
    seal(data)
    return data


def put(offset, fmt, value):
    return lambda data: struct.pack_into(fmt, data, offset, value)


def test_sealing_again_what_did_not_change_changes_nothing():
    assert same(decode(resealed(lambda data: None)), complete())


@pytest.mark.parametrize(
    "change",
    [
        put(0, "8s", b"MMRCMT02"),
        put(12, "<I", 3),
        put(48, "16s", bytes(16)),
        put(16, "<Q", 1 << 62),
        put(24, "<Q", 1 << 63),
        put(128, "<q", 8),  # head over limit
        put(160, "<q", 6),  # tail over head
        put(160, "<q", -1),
        put(144, "<q", 1 << 62),
    ],
)
def test_a_slot_that_says_the_impossible_is_void_whatever_its_checksum(change):
    assert decode(resealed(change)) is None


def test_a_slot_of_another_size_is_void():
    data = complete().encode()
    assert decode(data[:-1]) is None
    assert decode(data + bytes(4096)) is None
    assert decode(b"") is None
    assert decode(bytes(4096)) is None


counts = st.integers(0, 2**62 - 1)


@given(st.lists(st.tuples(counts, counts, counts), min_size=1, max_size=9), counts)
def test_records_of_any_counts_come_back_equal(counts, sequence):
    tails, heads, limits = np.sort(np.array(counts, np.int64), axis=1).T
    record = record_of(heads, limits, tails, sequence=sequence, epoch=sequence // 2)
    assert same(decode(record.encode(), num_envs=len(heads)), record)


def file_of(*records):
    return b"".join(bytes(4096) if r is None else r.encode() for r in records)


def test_records_of_another_generation_are_void():
    data = file_of(record_of([1]), record_of([2], generation=2), None, record_of([3]))
    assert [r is not None for r in commit.split(data, UUID, 1, 1)] == [1, 0, 0, 1]
    assert [r is not None for r in commit.split(data, UUID, 2, 1)] == [0, 1, 0, 0]


def test_a_live_record_is_trusted_in_its_own_boot_and_file_only():
    assert identity_of().trusts(record_of([1]))
    for changes in ({"boot_id": UUID}, {"device": 1}, {"inode": 1}):
        assert not identity_of(**changes).trusts(record_of([1]))
    nowhere = record_of([1], boot_id=bytes(16))
    assert not identity_of(boot_id=bytes(16)).trusts(nowhere)


BIRTHS = [BIRTH, files.BIRTH.pack(1_700_000_000, 6, 1), commit.NO_BIRTH, commit.UNTOLD]


@pytest.mark.parametrize("lock_held", [False, True])
@pytest.mark.parametrize("actual", BIRTHS[:3])
@pytest.mark.parametrize("recorded", BIRTHS)
def test_a_live_record_is_trusted_by_the_birth_of_its_file(recorded, actual, lock_held):
    trusted = identity_of(birth=actual, lock_held=lambda: lock_held).trusts(
        record_of([1], birth=recorded)
    )
    if recorded == commit.UNTOLD:
        assert trusted  # version 0.1 told files by their numbers alone
    elif commit.NO_BIRTH in (recorded, actual):
        assert trusted == lock_held
    else:
        assert trusted == (recorded == actual)


def test_no_time_is_confused_with_none_or_an_older_version():
    """Neither the epoch nor the last second that a disk can hold."""
    for seconds, nanoseconds in ((0, 0), (-1, 10**9 - 1), (-1, 2**32 - 1)):
        birth = files.BIRTH.pack(seconds, nanoseconds, 1)
        assert birth not in (commit.NO_BIRTH, commit.UNTOLD)


def test_the_birth_is_at_byte_112_of_a_slot():
    data = record_of([1]).encode()
    assert data[112:128] == BIRTH
    assert struct.unpack("<qII", data[112:128]) == (1_700_000_000, 5, 1)


def test_the_newest_is_chosen_by_epoch_and_then_by_sequence():
    old = record_of([1], epoch=1, sequence=9)
    new = record_of([2], epoch=2, sequence=3)
    newer = record_of([3], epoch=2, sequence=4)
    assert same(commit.newest_durable((old, new, None, None)), new)
    assert same(commit.newest_durable((newer, new, None, None)), newer)
    assert commit.newest_durable((None, None, new, new)) is None
    assert same(commit.newest_live((None, old, new, newer), identity_of()), newer)


def test_a_live_record_outranks_durable_ones_of_its_epoch_and_no_later_one():
    live = record_of([9], epoch=2, sequence=5)
    raised = record_of([4], [20], epoch=2, sequence=6)
    reopened = record_of([4], epoch=3, sequence=1)
    assert same(commit.newest_live((raised, None, live, None), identity_of()), live)
    found = commit.newest_live((raised, reopened, live, None), identity_of())
    assert found is None


def test_the_highest_limit_counts_whoever_wrote_it():
    slots = (record_of([1, 1], [2, 9]), None, record_of([1, 1], [5, 3], boot_id=UUID), None)
    assert commit.highest_limit(slots).tolist() == [5, 9]
