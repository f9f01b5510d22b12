"""JSON of files that somebody else may have written: what is refused, and how."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmreplay import strict_json
from mmreplay.errors import FormatError

KEYS = st.text(max_size=8)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | KEYS
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner)
)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_what_is_dumped_parses_equal(value):
    assert strict_json.parse(strict_json.dump(value, "x"), "x") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff{}", "is not JSON .*damaged or not a file of mmreplay"),
        (b'{"a": 1', "is not JSON"),
        (b"{} {}", "is not JSON"),
        (b"{'a': 1}", "is not JSON"),
        (b"[1]", "must be a JSON object, got a list"),
        (b'"a"', "must be a JSON object, got a str"),
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b'{"b": {"a": 1, "a": 1}}', "has the key 'a' twice"),
        (b'{"a": NaN}', "holds NaN, which is not a finite number"),
        (b'{"a": [Infinity]}', "holds Infinity, which is not a"),
        (b'{"a": -Infinity}', "holds -Infinity, which is not a"),
        (b'{"a": 1e999}', "holds 1e999, which is not a"),
        (b'{"a": -1e999}', "holds -1e999, which is not a"),
        (b'{"a": %s}' % (b"1" * 21), "holds a number of 21 digits, more than 20"),
        (b'{"a": %s}' % (b"1" * 500_000), "holds a number of 500000 digits"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "nests deeper than 32"),
        (b'{"a": ' + b"[" * 500_000, "nests deeper than 32"),
    ],
)
def test_what_is_no_plain_object_is_refused_by_name(text, message):
    with pytest.raises(FormatError, match=f"^the file {message}"):
        strict_json.parse(text, "the file")


def test_brackets_and_escapes_within_strings_do_not_nest():
    text = b'{"a": "%s", "b": "\\\\", "c": "\\"["}' % (b"[{" * 100)
    assert strict_json.parse(text, "x")["a"] == "[{" * 100


def test_thirty_two_levels_and_twenty_digits_are_accepted():
    text = b'{"a":' * 32 + b"-" + b"9" * 19 + b"}" * 32
    value = strict_json.parse(text, "x")
    for _ in range(32):
        value = value["a"]
    assert value == -(10**19 - 1)


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": float("nan")}, "x cannot be stored: .*Pass JSON values"),
        ({"a": float("inf")}, "x cannot be stored"),
        ({"a": {1, 2}}, r"x cannot be stored: .*convert arrays with \.tolist"),
        ({"a": 10**30}, "x holds a number of 31 digits"),
        (deep(40), "x nests deeper than 32"),
        (deep(100_000), "x cannot be stored"),
    ],
)
def test_what_would_not_be_read_back_is_not_written(value, message):
    with pytest.raises(FormatError, match=message):
        strict_json.dump(value, "x")
