"""Slices of ``python -m tools.torture forged``, and that it would notice."""

from unittest import mock

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert import array_file, zip_file
from mmreplay.errors import FailedError
from tests.slices import count
from tools.torture import forged


@pytest.mark.parametrize("format", forged.FORMATS)
def test_no_forged_file_passes_for_a_genuine_one(format):
    states = count(200, 24)
    report = forged.attack(format, states, 21)
    assert report.findings == {}, report.examples
    assert report.states == states
    assert report.seen["CorruptError"] > states // 4


@pytest.mark.slow
@pytest.mark.parametrize("format", forged.FORMATS)
def test_nothing_is_found_in_many_files(format):
    report = forged.attack(format, 2000, 22)
    assert report.findings == {}, report.examples


@pytest.mark.parametrize("format", forged.FORMATS)
def test_what_is_not_tampered_with_is_loaded(format, tmp_path):
    for number, base in enumerate(forged.bases(format)):
        place = tmp_path / str(number)
        place.mkdir()
        mr.load(forged.put(place, base.files), place / "target")
        if base.rows is not None:
            assert forged._differences(place / "target", base.rows) == []


def test_a_try_is_made_again_by_its_number():
    base = forged.bases("npz")[0]
    tries = [forged.tampered(base, np.random.default_rng([1, 0, 7])) for _ in range(2)]
    assert tries[0] == tries[1]


def unchecked(self):
    """A stream that does not compare its checksum."""


@pytest.mark.slow  # of the attack itself, not of the library
@pytest.mark.parametrize(
    ("patch", "kind"),
    [
        ((array_file.Stored, "finish", unchecked), "other rows"),
        ((mr.errors.CorruptError, "__str__", lambda self: "no"), "unnamed"),
        ((zip_file, "parse", lambda file: [][0]), "escaped IndexError"),
        ((zip_file, "parse", lambda file: bytearray(1 << 42)), "escaped MemoryError"),
        ((zip_file, "parse", mock.Mock(side_effect=FailedError("x"))), "unexpected Fail"),
    ],
)
def test_a_reader_that_does_wrong_is_noticed(patch, kind):
    with mock.patch.object(*patch):
        report = forged.attack("npz", 300, 3)
    assert any(found.startswith(kind) for found in report.findings)


@pytest.mark.slow
def test_a_reader_that_hangs_or_leaves_something_is_noticed(monkeypatch):
    def hang(file):
        while True:
            (file.path.parent / "litter").touch()

    monkeypatch.setattr(forged, "TRY_S", 1)
    monkeypatch.setattr(zip_file, "parse", hang)
    found = forged.attack("npz", 1, 3).findings
    assert {"escaped Late", "slow", "left over"} == set(found)
