"""The cases of a test that `make test` runs; tools/check runs every one.

Of a test with several `parametrize` the fixed choice of cases is kept in which each row
of each of them comes at least once, so that no value loses its last case; the other
combinations are marked slow. A mark changes that for a test, a class or a module:

``sliced("seed")``: any value of ``seed`` does as well as another one.
``sliced(at_least=9)``: at least nine cases are kept.
``sliced(apart=True)``: what one `parametrize` gives together counts value by value.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases that slices leave out."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        sliced = cases[0].get_closest_marker("sliced")
        alike, options = (sliced.args, dict(sliced.kwargs)) if sliced else ((), {})
        apart = options.pop("apart", False)
        kept = choose(name, [_rows(case, alike, apart) for case in cases], **options)
        for number in set(range(len(cases))) - kept:
            cases[number].add_marker(pytest.mark.slow)


def choose(name: str, cases: Sequence[set[Hashable]], *, at_least: int = 1) -> set[int]:
    """The numbers of the cases that are kept: each row is in one of them.

    Args:
        name: Decides between cases that add as many rows.
        cases: The rows that each of them has.
        at_least: How many are kept, where there are as many.
    """
    order = list(range(len(cases)))
    random.Random(name).shuffle(order)
    missing = set[Hashable]().union(*cases)
    kept = set[int]()
    while order and (missing or len(kept) < at_least):
        best = max(order, key=lambda number: len(cases[number] & missing))
        order.remove(best)
        kept.add(best)
        missing -= cases[best]
    return kept


def _rows(item: Any, alike: Iterable[str], apart: bool) -> set[Hashable]:
    """The row of each `parametrize` that a case has, by the identity of its values."""
    groups = [(name,) for name in item.callspec.params]
    if not apart:
        for parametrize in item.iter_markers("parametrize"):
            names = parametrize.args[0] if parametrize.args else ()
            if isinstance(names, str):
                names = names.replace(",", " ").split()
            groups = [group for group in groups if group[0] not in names]
            groups.append(tuple(names))
    return {
        (group, *(id(item.callspec.params[name]) for name in group))
        for group in groups
        if group and not set(group) <= set(alike)
    }
