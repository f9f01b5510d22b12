"""A disk put in the place of the real one sees as many calls as it did."""

import pytest

from tests.frozen.disk_cases import OPERATIONS, counted
from tests.frozen.frozen_files import load

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RECORDED = load("disk_calls.json")


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    return counted(tmp_path_factory.mktemp("disk"))


def test_every_operation_is_recorded(calls):
    assert set(RECORDED) == set(calls)
    assert set(OPERATIONS) < set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_a_replaced_disk_sees_at_least_the_recorded_calls(calls, name):
    fewer = {
        primitive: (calls[name].get(primitive, 0), count)
        for primitive, count in RECORDED[name].items()
        if calls[name].get(primitive, 0) < count
    }
    assert fewer == {}


def test_what_writes_rows_stores_them_through_the_disk():
    for name in ("add", "extend", "add over the wrap"):
        assert RECORDED[name].get("store", 0) + RECORDED[name].get("pwrite", 0) > 0
    assert RECORDED["commit"]["datasync"] > 0
