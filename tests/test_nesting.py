"""Paths of nested data, against a plain walk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmreplay.errors import SchemaError
from mmreplay.nesting import check_name, flatten, split, under, unflatten

NAMES = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=5
)
NESTED = st.dictionaries(
    NAMES,
    st.recursive(
        st.integers(),
        lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def walk(nested, top=()):
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from walk(value, (*top, name))
        else:
            yield "/".join((*top, name)), value


@given(NESTED)
def test_flatten_lists_every_leaf_in_order(nested):
    assert list(flatten(nested).items()) == list(walk(nested))


@given(NESTED)
def test_unflatten_undoes_flatten(nested):
    again = unflatten(flatten(nested))
    assert again == nested
    assert list(walk(again)) == list(walk(nested))


def test_tuples_are_branches_and_lists_and_arrays_are_leaves():
    array, rows = np.zeros(2), [1, 2]
    flat = flatten({"a": (array, {"b": rows}), "c": ()})
    assert list(flat) == ["a/0", "a/1/b"]
    assert flat["a/0"] is array
    assert flat["a/1/b"] is rows
    assert unflatten(flat) == {"a": {"0": array, "1": {"b": rows}}}


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ({1: 0}, r"field name must be a string, got 1 \(int\)"),
        ({"a": {2: 0}}, r"field name under 'a' must be a string, got 2 \(int\)"),
        ({"": 0}, "field name must not be empty"),
        ({"a": ({"": 0},)}, "field name under 'a/0' must not be empty"),
        ({"a/b": 0}, "field name must not contain '/' or NUL, got 'a/b'"),
        ({"a": {"b\0": 0}}, r"field name under 'a' must not contain '/'.*got 'b\\x00'"),
    ],
)
def test_invalid_names_in_a_path_are_refused(nested, message):
    with pytest.raises(SchemaError, match=message):
        flatten(nested)


def test_a_mapping_within_itself_ends_in_a_refusal():
    nested: dict = {}
    nested["again"] = nested
    with pytest.raises(SchemaError, match=r"field path.*got 257"):
        flatten(nested)


@pytest.mark.parametrize(
    "flat", [{"a": 1, "a/b": 2}, {"a/b": 1, "a": 2}, {"a/b/c": 1, "a/b": 2}], ids=str
)
def test_a_path_is_a_leaf_or_a_branch(flat):
    with pytest.raises(
        SchemaError, match=r"field path 'a(/b)?' must not be both a leaf and a branch. R"
    ):
        unflatten(flat)


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "a\0"])
def test_paths_with_empty_names_or_nul_are_refused(path):
    with pytest.raises(SchemaError, match="field path must be non-empty names joined"):
        unflatten({path: 1})


def test_a_path_is_a_string():
    with pytest.raises(SchemaError, match=r"field path must be a.*got 3 \(int\)"):
        unflatten({3: 1})


def test_unflatten_never_writes_into_a_leaf():
    leaf: dict = {}
    with pytest.raises(SchemaError, match="field path 'a' must be a leaf, got a dict"):
        unflatten({"a": leaf, "a/b": 1})
    assert leaf == {}


def test_under_takes_the_leaf_and_what_lies_below_but_no_longer_name():
    paths = ["a/b", "ab", "a/c/d", "b"]
    assert under(paths, "a") == ("a/b", "a/c/d")
    assert under(paths, "b") == ("b",)
    assert under(paths, "c") == ()


def test_split_gives_the_names_and_check_name_takes_each():
    assert split("a/b/c") == ["a", "b", "c"]
    for name in split("a/b/c"):
        check_name(name)
