"""What was pickled before comes back and does what it did.

The pickles hold names of modules as they were; those stay importable.
"""

import math
import pickletools

import pytest

from tests.frozen import pickled
from tests.frozen.records import recorded

OLD = recorded("pickles")


def alike(now, before, where=""):
    """Where two values differ; floats up to what another libm makes of them."""
    if isinstance(before, float) and isinstance(now, float):
        close = math.isclose(now, before, rel_tol=1e-6, abs_tol=1e-9)
        both_nan = math.isnan(now) and math.isnan(before)
        return [] if close or both_nan else [f"{where}: {before} is {now}"]
    if isinstance(before, dict) and isinstance(now, dict):
        # A state or a value may have more than it had.
        return [
            each
            for key, value in before.items()
            for each in alike(now.get(key, "gone"), value, f"{where}/{key}")
        ]
    if isinstance(before, list) and isinstance(now, list) and len(now) == len(before):
        return [
            each
            for number, pair in enumerate(zip(now, before, strict=True))
            for each in alike(*pair, f"{where}/{number}")
        ]
    return [] if now == before else [f"{where}: {before!r} is {now!r}"]


def test_every_case_was_recorded():
    assert set(OLD) == set(pickled.CASES)
    assert all(pickled.file_of(name).exists() for name in OLD)


@pytest.mark.parametrize("name", OLD)
def test_a_name_in_a_pickle_can_be_imported(name):
    if not pickled.CASES[name].installed:
        pytest.skip(f"{pickled.CASES[name].needs} is not installed")
    data = pickled.file_of(name).read_bytes()
    for code, value, _ in pickletools.genops(data):
        if code.name == "GLOBAL" and value.startswith("mmreplay"):
            module, _, attribute = value.partition(" ")
            held = __import__(module, fromlist=[attribute])
            assert hasattr(held, attribute), value


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OLD)
def test_what_was_pickled_does_what_it_did(tmp_path, name):
    if not pickled.CASES[name].installed:
        pytest.skip(f"{pickled.CASES[name].needs} is not installed")
    assert alike(pickled.behaviour(name, tmp_path), OLD[name]) == []


def test_another_value_is_noticed():
    assert alike({"a": [1, 2.0]}, {"a": [1, 2.0 + 1e-9]}) == []
    assert alike({"a": 1, "b": 2}, {"a": 1}) == []
    assert alike({}, {"a": 1}) == ["/a: 1 is 'gone'"]
    assert alike({"a": [1]}, {"a": [1, 2]})
    assert alike({"a": 1.5}, {"a": 1.6})
