"""The cases of a test that `make test` runs; `tools/check` and `make ray` run all.

Of a test with several `parametrize` a fixed choice of cases stays, in which each row of
each of them comes at least once, so that no value loses its last case. Of one whose
cases take long, ``@pytest.mark.sliced(n)`` says how many stay. The others get the mark
``left_out``. A test that tries many things at random asks `count` how many.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

ALL = os.environ.get("MMREPLAY_TESTS") == "whole"
"""Set by `tools/check`: tests do all that they can."""


def count(full: int, quick: int) -> int:
    """How many things a test tries: the first number in `tools/check`."""
    return full if ALL else quick


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that slices leave out."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        chosen = choose(name, [_rows(case) for case in cases])
        sliced = cases[0].get_closest_marker("sliced")
        if sliced is not None:
            chosen = chosen[: sliced.args[0]]
        for number in {*range(len(cases))} - {*chosen}:
            cases[number].add_marker(pytest.mark.left_out)


def choose(name: str, cases: Sequence[set[Hashable]]) -> list[int]:
    """The numbers of some cases, which have all rows between them.

    Args:
        name: Decides between cases that add as many rows.
        cases: The rows that each of them has.

    Returns:
        Those that add most rows first.
    """
    order = list(range(len(cases)))
    random.Random(name).shuffle(order)
    missing = set[Hashable]().union(*cases)
    chosen: list[int] = []
    while missing:
        best = max(order, key=lambda number: len(cases[number] & missing))
        order.remove(best)
        chosen.append(best)
        missing -= cases[best]
    return chosen


def _rows(item: Any) -> set[Hashable]:
    """The row of each `parametrize` that a case has, by the identity of its values."""
    groups = [(name,) for name in item.callspec.params]
    for parametrize in item.iter_markers("parametrize"):
        names = parametrize.args[0] if parametrize.args else ()
        if isinstance(names, str):
            names = names.replace(",", " ").split()
        groups = [group for group in groups if group[0] not in names]
        groups.append(tuple(names))
    return {
        (group, *(id(item.callspec.params[name]) for name in group)) for group in groups if group
    }
