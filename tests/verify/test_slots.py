"""COMMIT: torn, wrong and contradicting slots are told apart."""

from dataclasses import replace

import numpy as np
import pytest

from mmreplay.format import commit
from mmreplay.format import metadata as metadata_file
from mmreplay.verify import verify_buffer
from tests.verify.support import DATA, flip, messages, put


@pytest.mark.parametrize("slot", range(4))
def test_a_flipped_bit_of_a_slot_is_reported(path, rng, slot):
    size = commit.slot_nbytes(2)
    for bit in rng.integers(0, 8 * size, 20).tolist():
        flip(path / DATA / "COMMIT", 8 * size * slot + bit)
        findings = verify_buffer(path).findings
        assert any(f.offset == size * slot for f in findings)
        flip(path / DATA / "COMMIT", 8 * size * slot + bit)
    assert verify_buffer(path).ok


def test_no_whole_durable_slot_is_found(path):
    for slot in (0, 1):
        flip(path / DATA / "COMMIT", 8 * 4096 * slot + 500)
    told = messages(path, "commit")
    assert "none of the two durable slots is valid" in told
    assert "from a copy, or run mmreplay repair SOURCE TARGET" in told


def test_a_zeroed_durable_slot_is_found(path):
    put(path / DATA / "COMMIT", 0, bytes(4096))
    assert "D0: a durable record is all zeros" in messages(path, "slot")


def records_of(path):
    known = metadata_file.load(path)
    data = (path / DATA / "COMMIT").read_bytes()
    return commit.split(data, known.uuid, known.generation, known.ring.num_envs)


def rewrite(path, slot, **changes):
    record = replace(records_of(path)[slot], **changes)
    put(path / DATA / "COMMIT", commit.slot_nbytes(2) * slot, record.encode())


def test_an_incomplete_slot_after_a_crash_is_a_note(path):
    flip(path / DATA / "COMMIT", 8 * 4096 * 3 + 500)
    report = verify_buffer(path)
    assert [(f.kind, f.offset) for f in report.findings] == [("torn", 3 * 4096)]
    assert report.ok


@pytest.mark.parametrize(
    ("slot", "changes", "message"),
    [
        (0, {"flags": 64}, "flags must be at most"),
        (1, {"cuts": np.array([0, 9999])}, "the cut must be at most the head"),
        (0, {"sequence": 0}, "at least 1, got 0 and"),
        (0, {"uuid": bytes(16)}, "not of this buffer and of generation"),
        (0, {"generation": 5}, "of generation 1"),
        (0, {"tails": np.array([99, 99])}, "out of order"),
        (3, {"limits": np.array([9999, 64])}, "which would overwrite rows alive"),
        (0, {"limits": np.array([1 << 62, 1 << 62])}, "out of order"),
    ],
)
def test_a_slot_that_contradicts_itself_is_found(path, slot, changes, message):
    rewrite(path, slot, **changes)
    assert message in messages(path, "slot")


def test_heads_that_fall_are_found(path):
    records = records_of(path)
    newest = max((2, 3), key=lambda slot: records[slot].sequence)
    heads = records[newest].heads - [0, 40]
    rewrite(path, newest, heads=heads)
    assert "heads must not decrease, got 24 after" in messages(path, "slot")


def test_two_records_of_one_number_are_found(path):
    records = records_of(path)
    rewrite(path, 2, sequence=records[3].sequence, time_ns=1)
    assert "is the same as in another record of its epoch" in messages(path, "slot")


def test_a_committed_head_above_the_published_one_is_found(path):
    for slot in (2, 3):
        rewrite(path, slot, heads=np.array([8, 8]), tails=np.array([0, 0]))
    assert "must be at least the committed one, 64, got 8" in messages(path, "slot")
