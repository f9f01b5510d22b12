"""What caught an error of a wrong call still catches it."""

import gc

import pytest

from tests.frozen import bad_calls
from tests.frozen.records import recorded

# The calls use the recorded names; an alias of one of them warns and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OLD = recorded("bad_calls")


def test_every_call_was_recorded():
    assert set(OLD) == set(bad_calls.CALLS)


@pytest.mark.parametrize("name", OLD)
def test_a_wrong_call_raises_what_it_raised(tmp_path, name):
    if name in ("loader of no batch", "dataset of nothing"):
        pytest.importorskip("torch")
    now = bad_calls.error_of(name, tmp_path)
    gc.collect()
    # A new class may come between; what was caught by a name still is.
    assert set(OLD[name]) <= set(now)
