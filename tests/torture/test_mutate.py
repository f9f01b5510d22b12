"""A slice of ``python -m tools.torture mutate``, and that it would notice."""

import os
import shutil
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import reader
from mmreplay.repairing.values import SealedValueScan, ValueScan
from mmreplay.verify import slots
from mmreplay.verify.rows import SumCheck
from tests.slices import count
from tools.torture import mutate
from tools.torture.damages import Damage, damaged
from tools.torture.powerloss import Report
from tools.torture.rows import HEAPED, SHARDED_HEAPS
from tools.torture.specimens import alive, one_boot, specimens


def test_no_damaged_buffer_passes_for_a_whole_one():
    states = count(60, 7)
    report = mutate.attack(states, 31)
    assert report.findings == {}, report.examples
    assert report.states == states
    for happened in ("verify: damaged", "read: right", "write: written", "draw: drawn"):
        assert report.seen[happened] > states // 6, happened
    assert report.seen["read: CorruptError"] + report.seen["read: FormatError"] > states // 6


@pytest.mark.slow
def test_nothing_is_found_in_many_damaged_buffers():
    report = mutate.attack(2000, 32)
    assert report.findings == {}, report.examples


@pytest.mark.parametrize(
    ("geometries", "states", "seed", "refused"),
    [
        (HEAPED, count(40, 15), 33, count(5, 1)),
        (SHARDED_HEAPS, count(12, 6), count(41, 44), count(2, 0)),
    ],
    ids=["heaps", "shards"],
)
@pytest.mark.slow
def test_no_forged_value_passes_for_a_whole_one(geometries, states, seed, refused):
    report = mutate.attack(states, seed, geometries=geometries)
    assert report.findings == {}, report.examples
    assert report.states == states
    for happened in ("verify: damaged", "read: right", "repair: cut", "draw: drawn"):
        assert report.seen[happened] > count(2, 0), happened
    assert report.seen["read: CorruptError"] > refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("geometries", "seed"), [(HEAPED, 34), (SHARDED_HEAPS, 42)], ids=["heaps", "shards"]
)
def test_nothing_is_found_in_many_forged_values(geometries, seed):
    report = mutate.attack(2000, seed, geometries=geometries)
    assert report.findings == {}, report.examples


@pytest.mark.slow  # of the attack itself, not of the library
def test_each_lie_about_a_chunk_of_values_is_made():
    specimen = specimens(SHARDED_HEAPS)[0]
    missing = {"shard_values", "shard_references", "shard_index"}
    missing |= {"count", "length", "value", "truncate", "grow"}
    for number in range(300):
        damage = damaged(specimen, np.random.default_rng([1, number]))
        missing -= {word for each in damage.descriptions for word in each.split()[:1]}
        if not missing:
            break
    assert missing == set()


def every(references, *_):
    """All of them are legal."""
    return np.ones(len(references), bool)


def none(*_):
    """No row is damaged."""
    return []


@pytest.mark.slow  # of the attack itself, not of the library
@pytest.mark.parametrize(
    ("patch", "geometries", "count", "seed"),
    [
        ((reader, "legal", every), HEAPED, 60, 33),
        ((ValueScan, "damaged", none), HEAPED, 60, 33),
        ((SealedValueScan, "damaged", none), SHARDED_HEAPS, 20, 34),
    ],
)
def test_values_that_are_not_checked_are_noticed(patch, geometries, count, seed):
    with mock.patch.object(*patch):
        report = mutate.attack(count, seed, geometries=geometries)
    assert report.findings


@pytest.mark.slow  # of the attack itself, not of the library
def test_what_is_not_damaged_is_well_and_shows_all_that_was_committed(tmp_path):
    path = tmp_path / "buffer"
    for specimen in specimens() + specimens(HEAPED) + specimens(SHARDED_HEAPS):
        mutate.put(path, specimen.files)
        with one_boot():
            assert mr.verify_buffer(path).ok
            with mr.ReplayBuffer.open(path) as buffer:
                found = alive(buffer)
                assert (buffer.heads >= specimen.committed).all()
        assert found.items() <= specimen.rows.items()
        assert len(found) > 8
        shutil.rmtree(path)


@pytest.mark.slow
def test_a_try_is_made_again_by_its_number():
    specimen = specimens()[0]
    tries = [damaged(specimen, np.random.default_rng([1, 7])) for _ in range(2)]
    assert tries[0] == tries[1]


def nothing(*_):
    """Check nothing."""


def named(do):
    do.__name__ = "_draw"
    return do


@pytest.mark.slow  # of the attack itself, not of the library
@pytest.mark.parametrize(
    ("patch", "kind"),
    [
        ((SumCheck, "run", nothing), "wrong row unreported"),
        ((mr.errors.CorruptError, "__str__", lambda self: "no"), "unnamed"),
        ((mutate.Try, "_draw", named(lambda *_: [][0])), "draw escaped IndexError"),
        ((mutate.Try, "_draw", named(lambda *_: bytearray(1 << 33))), "draw escaped M"),
        ((mutate.Try, "_draw", named(lambda *_: os.kill(os.getpid(), 9))), "crash"),
    ],
)
def test_a_reader_that_does_wrong_is_noticed(patch, kind):
    with mock.patch.object(*patch):
        report = mutate.attack(24, 4)
    assert any(found.startswith(kind) for found in report.findings)


def without_the_newest(specimen):
    """Damage to the newest committed record and to all that was published since."""
    name = max(name for name in specimen.files if name.endswith("COMMIT"))
    data = bytearray(specimen.files[name])
    size = len(data) // 4
    slot = max((0, 1), key=lambda slot: data[size * slot :][16:24][::-1])
    for torn in (slot, 2, 3):
        data[size * torn + 100] ^= 1
    return Damage(specimen.files | {name: bytes(data)}, {}, [])


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.sliced(1)
def test_commits_that_are_lost_without_a_word_are_noticed(tmp_path, reported):
    path, faults = tmp_path / "buffer", []
    with ExitStack() as stack:
        if not reported:
            check = mock.patch.object(slots.CommitFile, "_check_void", nothing)
            stack.enter_context(check)
        for specimen in specimens()[:6]:
            damage = without_the_newest(specimen)
            mutate.put(path, damage.files)
            with one_boot():
                faults += mutate.Try(path, specimen, damage, Report()).run()
            shutil.rmtree(path)
    assert {fault.partition(":")[0] for fault in faults} == (set() if reported else {"lost unsaid"})
