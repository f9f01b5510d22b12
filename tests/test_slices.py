"""The slice of a test's cases that `make test` runs has each row in it."""

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import slices

ROOT = Path(__file__).parents[1]
CASES = [
    {("engine", engine), ("layout", layout), ("size", size)}
    for engine, layout, size in itertools.product(
        ["memmap", "zarr"], ["time_major", "env_major"], range(7)
    )
]


def test_as_few_cases_are_chosen_as_there_are_rows():
    chosen = slices.choose("a test", CASES)
    assert set().union(*(CASES[number] for number in chosen)) == set().union(*CASES)
    assert len(chosen) == 7


def test_it_is_the_same_choice_each_time_and_another_one_for_another_test():
    choices = [slices.choose(f"test {number}", CASES) for number in range(20)]
    assert choices == [slices.choose(f"test {number}", CASES) for number in range(20)]
    assert len(set(map(frozenset, choices))) > 10


class Case:
    """What `slices.mark` reads of a test that pytest has collected."""

    def __init__(self, params, marks):
        self.nodeid = f"test_some.py::test_some[{params}]"
        self.callspec = type("Spec", (), {"params": params})
        self.marks = list(marks)

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def add_marker(self, mark):
        self.marks.append(mark.mark)


def test_every_row_of_every_parametrize_is_left():
    pairs = [("a", [0]), ("a", [1]), ("b", [1])]
    marks = [
        pytest.mark.parametrize(("kind", "shape"), pairs).mark,
        pytest.mark.parametrize("seed", range(9)).mark,
        pytest.mark.parametrize("engine", ["memmap", "zarr"]).mark,
    ]
    cases = [
        Case({"kind": kind, "shape": shape, "seed": seed, "engine": engine}, marks)
        for (kind, shape), seed, engine in itertools.product(pairs, range(9), ["memmap", "zarr"])
    ]
    slices.mark(cases)
    chosen = [case.callspec.params for case in cases if case.get_closest_marker("left_out") is None]
    assert len(chosen) == 9
    assert {case["seed"] for case in chosen} == set(range(9))
    assert {case["engine"] for case in chosen} == {"memmap", "zarr"}
    rows = {(case["kind"], *case["shape"]) for case in chosen}
    assert rows == {("a", 0), ("a", 1), ("b", 1)}


def test_a_case_that_is_slow_already_keeps_no_row_from_the_others():
    slow = Case({"seed": 1}, [pytest.mark.slow.mark])
    other = Case({"seed": 1}, [])
    slices.mark([slow, other])
    assert other.get_closest_marker("left_out") is None


def test_of_cases_that_take_long_as_many_are_left_as_the_test_says():
    marks = [pytest.mark.parametrize("seed", range(9)).mark, pytest.mark.sliced(2).mark]
    cases = [Case({"seed": seed}, marks) for seed in range(9)]
    slices.mark(cases)
    assert sum(case.get_closest_marker("left_out") is None for case in cases) == 2


def test_a_test_tries_more_where_all_is_to_be_done(monkeypatch):
    assert slices.count(9, 2) == (9 if slices.ALL else 2)
    monkeypatch.setattr(slices, "ALL", True)
    assert slices.count(9, 2) == 9


def marks_of(target):
    """The mark expression with which a target of the Makefile runs pytest."""
    ours = ("TESTS", "RAY_TESTS", "RAY_MARKS", "PYTEST_ARGS")
    environment = {
        name: value
        for name, value in os.environ.items()
        # Of the make that runs these tests.
        if name not in ours and not name.startswith(("MAKE", "MFLAGS"))
    }
    printed = subprocess.run(
        ["make", "-n", target],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    (marks,) = re.findall(r'-m pytest .*?-m "(.*?)"', printed)
    return marks


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
def test_each_case_that_a_slice_leaves_out_runs_in_make_check_or_make_ray():
    assert "not left_out" in marks_of("test")
    # In tests/on_ray, which need Ray; tools/check runs in an environment without.
    assert "left_out" not in marks_of("ray")
    (marks,) = re.findall(r'-m pytest -m "(.*?)"', (ROOT / "tools/check").read_text())
    assert "left_out" not in marks
