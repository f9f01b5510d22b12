"""Random buffers are what plain-Python twins say, to whatever looks at them.

Any number of cases runs by ``python -m tools.combinations``; here is a slice of them.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

from tests.combinations import cases, expected, run, twin
from tests.combinations.cases import DIMENSIONS, IMPOSSIBLE, draw_cases, pairs_of
from tests.slices import count

SEED, CASES, MODULES = 46, 120, 12
DRAWN = list(draw_cases(CASES, SEED))


@pytest.mark.parametrize("first", range(MODULES))
def test_buffers_are_what_their_twins_say(first):
    for case in DRAWN[first : count(CASES, 24) : MODULES]:
        failure = run.run_case(case)
        assert failure is None, f"{failure.text}\n{failure.script()}"


@pytest.mark.parametrize("module", [twin, expected, cases])
def test_the_twin_imports_nothing_of_the_package(module):
    tree = ast.parse(Path(module.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
    allowed = {"dataclasses", "itertools", "numpy"}
    assert imported <= allowed


def test_impossible_cases_have_a_reason_and_values_that_are_there():
    for rule, reason in IMPOSSIBLE:
        assert reason
        for name, values in rule.items():
            assert set(values) <= set(DIMENSIONS[name]), (name, values)


@pytest.mark.slow
def test_all_possible_pairs_come_three_times_in_2000_cases():
    drawn = list(draw_cases(2000, 1))
    assert run.uncovered(drawn) == []
    assert all(cases.impossible(case) is None for case in drawn)


def test_a_longer_run_begins_with_a_shorter_one():
    assert list(draw_cases(30, 7)) == list(draw_cases(60, 7))[:30]


def test_every_consumer_looks_at_some_case():
    looks = Counter(name for case in DRAWN for name in run.consumers_of(case))
    assert set(run.CONSUMERS) - set(run.RARE) <= set(looks)


def test_what_is_simpler_differs_in_one_value_and_is_possible():
    case = DRAWN[5]
    found = list(cases.simpler(case))
    assert found
    for other in found:
        assert cases.impossible(other) is None
        same = set(pairs_of(case)) & set(pairs_of(other))
        assert other.steps < case.steps or len(same) < len(pairs_of(case))
