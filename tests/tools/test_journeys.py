"""The files that one call passes through are counted, each time alike."""

import json
import subprocess
import sys
import threading

import pytest

from mmreplay import nesting
from tools import journeys


def printed(*options):
    """What the tool prints in a process of its own."""
    command = [sys.executable, "-m", "tools.journeys", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_files_that_a_thread_of_the_call_passes_are_counted():
    def call():
        thread = threading.Thread(target=nesting.flatten, args=({"a": {"b": 1}},))
        thread.start()
        thread.join()

    files, _ = journeys.files_of(call)
    assert files == ("nesting.py",)
    assert journeys.files_of(call, threading.get_ident())[0] == ()


def test_a_module_that_is_imported_is_not_counted():
    def call():
        exec(compile("1 + 1", str(journeys.PACKAGE / "ring.py"), "exec"))

    assert journeys.files_of(call) == ((), None)


def test_the_most_frequent_route_is_chosen_whatever_the_order_of_its_files():
    routes = [("a", "b", "c"), ("a", "b"), ("b", "a"), ("d",)]
    assert journeys.most_frequent(routes) == ("a", "b")


def test_nested_and_flat_add_are_timed(tmp_path):
    times = journeys.timing(tmp_path, turns=2, calls=5)
    assert set(times) == {"full_ring", "first_lap"}
    assert all(values["nested_over_flat"] > 0 for values in times.values())


def test_the_markdown_table_has_every_journey():
    rows = [journeys.Journey("open r", ("ring.py",), 28, 53)]
    assert journeys.table(rows, markdown=True) == [
        "| journey | files |",
        "|---|---:|",
        "| open r | 1 |",
    ]


@pytest.mark.slow
def test_journeys_are_the_same_in_each_run():
    first, second = (json.loads(printed("--json"))["journeys"] for _ in range(2))
    assert len(first) == 17
    for one, other in zip(first, second, strict=True):
        assert len(one["files"]) > 0
        assert one["name"] == other["name"]
        assert set(one["files"]) == set(other["files"])
        for name in one["files"]:
            assert (journeys.PACKAGE / name).is_file()
