"""Recorded public names are there, and calls that were right are still right."""

import inspect

import pytest

from tests.frozen import surface
from tests.frozen.records import recorded

NAMES = recorded("names")
PAIRS = [(module, name) for module in NAMES for name in NAMES[module]]


def imported(module):
    try:
        return surface.module(module)
    except ModuleNotFoundError as error:
        if module not in surface.PEERS or error.name != surface.PEERS[module]:
            raise
        return pytest.skip(str(error))


def test_something_was_recorded_of_every_documented_module():
    assert set(NAMES) == set(surface.MODULES)
    assert all(NAMES.values())
    assert len(PAIRS) > 150


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_a_public_name_stays_and_takes_what_it_took(module, name, request):
    old = NAMES[module][name]
    thing = surface.get(imported(module), name)
    if old["kind"] == "value":
        assert thing is not None
        return
    assert callable(thing)
    assert inspect.isclass(thing) == (old["kind"] == "class")
    if old["call"] is not None:
        assert surface.objections(old["call"], surface.parameters(thing)) == []
    if old["kind"] == "function":
        return
    assert {each.__name__ for each in thing.__mro__} >= set(old["errors"])
    now = surface.described(thing)
    assert set(old["protocols"]) <= set(now["protocols"])
    # `--engine zarr` runs all tests over another default; see tests/conftest.py.
    other_engine = request.config.getoption("--engine") != "memmap"
    told = []
    for member, before in old["members"].items():
        if member not in now["members"]:
            told.append(f"{member} is gone")
            continue
        after = now["members"][member]
        if before == "value" or after == "value":
            if before != after:
                told.append(f"{member} was {before}, is {after}")
            continue
        told += [
            f"{member} {objection}"
            for objection in surface.objections(before, after)
            if not (other_engine and "'engine'" in objection)
        ]
    assert told == []


def test_every_error_is_caught_by_what_caught_it():
    old = NAMES["mmreplay.errors"]
    assert "ValueError" in old["SchemaError"]["errors"]
    assert len(old) > 15


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (lambda a, b=2, *, c=3: 0, []),
        (lambda a, b=2, c=3, d=4: 0, []),
        (lambda a, b=2, *, c=3, d=4: 0, []),
        (lambda a=1, b=2, *, c=3, **more: 0, []),
        (lambda a, b=5, *, c=3: 0, ["the default of 'b' was 2, is 5"]),
        (lambda a, b=2: 0, ["has no parameter 'c' any more"]),
        (lambda a, b=2, **more: 0, ["has no parameter 'c' any more"]),
        (lambda b, a=2, *, c=3: 0, ["parameter 'a' was number 0 and is not"]),
        (lambda a, *, b=2, c=3: 0, ["parameter 'b' was of kind 'either'"]),
        (lambda a, b=2, *, c=3, d: 0, ["needs a new argument 'd'"]),
    ],
)
def test_a_signature_that_changed_is_noticed(now, words):
    old = surface.parameters(lambda a, b=2, *, c=3: 0)
    objections = surface.objections(old, surface.parameters(now))
    assert bool(objections) == bool(words)
    for each in words:
        assert any(each in objection for objection in objections)
