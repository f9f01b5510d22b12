"""Commands, options, keys of JSON and exit codes are what was recorded."""

import sys

import pytest

from tests.frozen import command_line
from tests.frozen.records import recorded

OLD = recorded("command_line")
# What these print depends on the machine: a value may be null where it was not.
OF_THE_MACHINE = {"info, installation"}


@pytest.fixture(scope="module")
def now():
    return command_line.commands()


@pytest.fixture(autouse=True)
def _needs(request):
    name = getattr(request.node, "callspec", None) and request.node.callspec.id
    if name in command_line.NEEDS:
        pytest.importorskip(command_line.NEEDS[name])


@pytest.mark.parametrize("name", OLD["commands"])
def test_a_command_takes_what_it_took(now, name):
    before, after = OLD["commands"][name], now[name]
    for spelling, what in before["options"].items():
        assert after["options"].get(spelling) == what, spelling
    for spelling, what in after["options"].items():
        assert spelling in before["options"] or not what["required"]
    assert len(after["arguments"]) >= len(before["arguments"])
    for argument, what in zip(after["arguments"], before["arguments"], strict=False):
        # One that took a word may take several.
        assert argument in (what, {**what, "words": -1})
    assert not any(each["required"] for each in after["arguments"][len(before["arguments"]) :])


def lost(before, after, where, nulls):
    """Keys that are gone, and values of another type."""
    if before == "null" or (nulls and after == "null"):
        return []
    if type(before) is not type(after):
        return [f"{where} was {before}, is {after}"]
    if isinstance(before, dict):
        return [
            each
            for key, value in before.items()
            for each in (
                lost(value, after[key], f"{where}/{key}", nulls)
                if key in after
                else [f"{where}/{key} is gone"]
            )
        ]
    if isinstance(before, list):
        return lost(before[0], after[0], where, nulls) if before and after else []
    return [] if before == after else [f"{where} was {before}, is {after}"]


@pytest.mark.parametrize("name", OLD["prints"], ids=str)
def test_json_has_the_keys_and_types_that_it_had(tmp_path, name):
    before, after = OLD["prints"][name], command_line.prints(name, tmp_path)
    assert after["exit"] == before["exit"]
    told = lost(before["json"], after["json"], "", name in OF_THE_MACHINE)
    assert told == []


def test_a_key_that_is_gone_is_noticed():
    before = {"a": {"b": "text"}, "c": ["number"], "d": "null"}
    assert lost(before, {**before, "d": "text", "e": "text"}, "", False) == []
    assert lost(before, {**before, "a": {}}, "", False) == ["/a/b is gone"]
    assert lost(before, {**before, "c": ["text"]}, "", False)
    assert lost(before, {**before, "a": "text"}, "", False)


@pytest.mark.parametrize("name", OLD["ends"], ids=str)
def test_a_failure_ends_with_the_code_that_it_had(tmp_path, name):
    assert command_line.end(name, tmp_path) == OLD["ends"][name]


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /dev/full")
def test_what_cannot_be_printed_fails(tmp_path):
    assert command_line.printed_to_a_full_disk(tmp_path) == 1


def test_all_codes_that_the_pages_name_are_recorded():
    assert set(OLD["ends"].values()) == {0, 1, 2, 3, 130}
