"""Arguments are checked by name, and refused with what to do instead."""

import math

import numpy as np
import pytest

from mmreplay.arguments import flag, format_size, integer, number, one_of
from mmreplay.errors import FormatError, SchemaError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_an_integer_comes_back_as_a_python_int(value):
    assert integer("n", value, 1) == 3
    assert type(integer("n", value, 1)) is int


@pytest.mark.parametrize("value", [0, True, 2.0, "3", None, np.float32(3)])
def test_what_is_no_integer_of_the_range_is_refused(value):
    with pytest.raises(SchemaError, match=r"^n must be an integer of at least 1, got "):
        integer("n", value, 1)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, "an integer, got 'x'"),
        ({"minimum": 2, "maximum": 5}, r"an integer in \[2, 5\], got 'x'"),
        ({"maximum": 5}, "an integer of at most 5, got 'x'"),
    ],
)
def test_the_message_says_the_range_of_an_integer_and_what_to_do(bounds, expected):
    with pytest.raises(SchemaError, match=rf"^n must be {expected}\. Leave it out"):
        integer("n", "x", **bounds)
    with pytest.raises(FormatError, match=rf"^n must be {expected}\. Count rows\.$"):
        integer("n", "x", way_out="Count rows.", error=FormatError, **bounds)


def test_an_integer_above_the_maximum_is_refused():
    assert integer("n", 5, maximum=5) == 5
    with pytest.raises(SchemaError, match="at most 5, got 6"):
        integer("n", 6, maximum=5)


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5), np.int8(1)])
def test_a_number_comes_back_as_a_python_float(value):
    assert number("x", value, 0, maximum=1) == float(value)
    assert type(number("x", value, 0, maximum=1)) is float


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, True, "0.5", None])
def test_what_is_no_number_of_the_range_is_refused(value):
    with pytest.raises(SchemaError, match=r"^x must be a number in \[0, 1\], got "):
        number("x", value, 0, maximum=1)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, "a finite number, got 'a'"),
        ({"finite": False}, "a number, got 'a'"),
        ({"minimum": 0}, "a finite number of at least 0, got 'a'"),
        ({"above": 0}, "a finite number above 0, got 'a'"),
        ({"above": 0, "maximum": 1}, r"a number in \(0, 1\], got 'a'"),
    ],
)
def test_the_message_says_the_range_of_a_number(bounds, expected):
    with pytest.raises(SchemaError, match=rf"^x must be {expected}\. Leave it out"):
        number("x", "a", **bounds)


def test_bounds_that_exclude_and_values_that_are_not_finite():
    with pytest.raises(SchemaError, match="above 0, got 0"):
        number("x", 0, above=0)
    assert number("x", math.inf, finite=False) == math.inf
    assert math.isnan(number("x", math.nan, nan=True))
    with pytest.raises(SchemaError, match="got -inf"):
        number("x", -math.inf, 0, finite=False)


@pytest.mark.parametrize("value", ["c", 1, None, ["a"], {}, np.zeros(2)])
def test_a_value_that_is_no_choice_is_refused(value):
    one_of("kind", "a", ("a", "b"))
    with pytest.raises(SchemaError, match=r"^kind must be one of 'a', 'b', got .* Do"):
        one_of("kind", value, ("a", "b"), "Do it.")


@pytest.mark.parametrize("value", [0, 1, "no", None])
def test_a_flag_is_true_or_false(value):
    assert flag("f", np.bool_(True)) is True
    assert flag("f", False) is False
    with pytest.raises(SchemaError, match=r"^f must be True or False, got .*\. Leave"):
        flag("f", value)


def test_sizes_have_units():
    assert format_size(0) == "0 B"
    assert format_size(1023) == "1,023 B"
    assert format_size(1536) == "1.50 KiB"
    assert format_size(5 * 1024**6) == "5.00 EiB"
