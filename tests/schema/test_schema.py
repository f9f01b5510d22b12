"""Fields of a step by path, their roles, and their JSON."""

import copy
import json
import pickle

import numpy as np
import pytest

from mmreplay.errors import SchemaError
from mmreplay.schema import DTYPES, Field, Schema

PIXELS = Field((84, 84), "uint8")
SCALAR = Field((), "float32")
FLAG = Field((), "bool")


def transition(**more) -> dict:
    return {
        "observation": {"pixels": PIXELS, "body": (SCALAR, Field((3,), "bfloat16"))},
        "action": Field((), "int64"),
        "reward": SCALAR,
        "terminated": FLAG,
        "truncated": FLAG,
        **more,
    }


def test_nested_fields_are_found_by_path_in_order():
    schema = Schema(transition())
    assert schema.paths == (
        "observation/pixels",
        "observation/body/0",
        "observation/body/1",
        "action",
        "reward",
        "terminated",
        "truncated",
    )
    assert schema["observation/pixels"] == PIXELS
    assert list(schema.fields) == list(schema) == list(schema.paths)
    assert len(schema) == 7
    assert "action" in schema
    assert "observation" not in schema


def test_roles_are_played_by_the_standard_names_where_they_exist():
    schema = Schema(transition(info=SCALAR))
    names = ("observation", "action", "reward", "terminated", "truncated")
    assert dict(schema.roles) == {name: name for name in names}
    assert schema.role("observation") == "observation"
    assert schema.role_paths("observation") == schema.paths[:3]
    assert schema.role_paths("action") == ("action",)
    assert schema.role("next_observation") is None
    assert schema.role_paths("next_observation") == ()


def test_roles_may_name_other_leaves_and_subtrees():
    fields = {"obs": {"a": SCALAR, "b": SCALAR}, "done": FLAG, "reward": SCALAR}
    schema = Schema(fields, {"observation": "obs", "terminated": "done"})
    assert schema.role_paths("observation") == ("obs/a", "obs/b")
    assert schema.role("terminated") == "done"
    assert schema.role("reward") == "reward"
    assert Schema(fields, {"observation": "obs/b"}).role_paths("observation") == (
        "obs/b",
    )


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"state": "obs"}, "role 'state': got an unknown role, expected one of observ"),
        (
            {"observation": "ob"},
            "role 'observation': got the path 'ob', expected a field or subtree of "
            "'obs/a', 'obs/b', 'done', 'reward'$",
        ),
        ({"observation": 3}, "got the path 3, expected a field or subtree of 'obs/a'"),
        (
            {"observation": "obs", "action": "obs/a"},
            "got the path 'obs/a', which plays 'observation' as 'obs', .* name another",
        ),
        (
            {"observation": "reward"},
            "got the path 'reward', which plays 'reward' as 'reward'",
        ),
        ({"terminated": "obs"}, "got the subtree 'obs', expected one field; name a"),
        (
            {"truncated": "obs/a"},
            r"field 'obs/a': got Field\(shape=\(\), dtype='float32'.*\), expected "
            r"Field\(\(\), 'bool'\), or Field\(\(num_agents,\), 'bool'\), that is not "
            r"mutable, as it plays 'truncated'",
        ),
        (
            {"next_observation": "obs"},
            "'next_observation': got 'obs' without an observation, expected both",
        ),
    ],
)
def test_roles_that_nothing_can_play_are_refused(roles, message):
    fields = {"obs": {"a": SCALAR, "b": SCALAR}, "done": FLAG, "reward": SCALAR}
    with pytest.raises(SchemaError, match=message):
        Schema(fields, roles)


@pytest.mark.parametrize("role", ["terminated", "truncated"])
@pytest.mark.parametrize(
    "field",
    [
        Field((1, 1), "bool"),
        Field((0,), "bool"),
        Field((), "uint8"),
        Field((2,), "uint8"),
        Field((), "bool", mutable=True),
        Field((2,), "bool", mutable=True),
    ],
)
def test_the_ends_are_plain_bools_of_a_step_or_of_its_agents(role, field):
    with pytest.raises(SchemaError, match=rf"{role}.*expected Field\(\(\), 'bool'\)"):
        Schema({"observation": SCALAR, role: field})


@pytest.mark.parametrize(
    ("following", "message"),
    [
        (
            Field((3,), "float32"),
            r"'next_observation': got float32\[3\], expected nothing",
        ),
        (
            {"a": Field((), "int8"), "b": Field((3,), "int8")},
            r"'next_observation/b': got int8\[3\], expected float32\[3\] as "
            "'observation/b'; declare both alike, or leave next_observation",
        ),
        (
            {"a": Field((), "int8"), "b": Field((3,), "float32"), "c": SCALAR},
            r"'next_observation/c': got float32\[\], expected nothing",
        ),
    ],
)
def test_the_next_observation_is_declared_like_the_observation(following, message):
    now = {"a": Field((), "int8"), "b": Field((3,), "float32")}
    Schema({"observation": now, "next_observation": dict(reversed(now.items()))})
    with pytest.raises(SchemaError, match=message):
        Schema({"observation": now, "next_observation": following})


def test_a_missing_field_error_lists_the_fields():
    schema = Schema({f"f{n}": SCALAR for n in range(23)})
    with pytest.raises(
        SchemaError,
        match="field 'g': got a path that is not in the schema, expected one of "
        r"'f0', 'f1', .*'f19' and 3 more;",
    ):
        schema["g"]
    with pytest.raises(SchemaError, match="role 'g': got an unknown role, expected"):
        schema.role("g")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "schema: got 0 fields, expected 1 to 4096"),
        ({f"f{n}": FLAG for n in range(4097)}, "got 4097 fields, .*join small fields"),
        (
            {"a": {"b": np.zeros(3)}},
            "'a/b': got ndarray, expected a Field; write Field",
        ),
        ({"a": "float32"}, "'a': got str, expected a Field"),
        ({"a" * 257: FLAG}, "got 257 characters, expected at most 256 .*; rename"),
        ({"\ud800": FLAG}, "expected at most 256 that UTF-8 can hold; rename"),
        ({"x": {"a/b": FLAG}}, "got 'a/b', expected a name without '/' or NUL; nest"),
        ({"a//b": FLAG}, "field path: got 'a//b', expected non-empty names joined"),
        ({"a/b": FLAG, "a": {"b": FLAG}}, "'a/b': got it twice, nested and by its"),
        ({"a/b": FLAG, "a": FLAG}, "'a': got both a leaf and a branch"),
        ({"a": FLAG, "a/b": FLAG}, "'a': got both a leaf and a branch"),
        (
            {"a": {"\x1b]0;b\x07": FLAG}},
            r"field path 'a/\\x1b\]0;b\\x07': got the control character '\\x1b', "
            r"expected none, as terminals obey them; rename the field",
        ),
        ({"a\nb": FLAG}, r"got the control character '\\n'"),
        ({"a\x7f": FLAG}, r"got the control character '\\x7f'"),
        ({"a\x9b": FLAG}, r"got the control character '\\x9b'"),
        ([FLAG], "schema fields: got list, expected a mapping by name; pass a dict"),
    ],
)
def test_what_is_no_schema_is_refused(fields, message):
    with pytest.raises(SchemaError, match=message):
        Schema(fields)


def test_the_largest_schema_is_accepted():
    assert len(Schema({f"{n:0256}": FLAG for n in range(4096)})) == 4096


def test_the_fields_of_a_schema_make_it_again_nested_or_with_others():
    schema = Schema(transition(), {"reward": "reward"})
    assert any("/" in path for path in schema.paths)
    assert Schema(schema.fields, schema.roles) == schema
    more = Schema({**schema.fields, "logp": SCALAR, "info/lives": FLAG})
    assert more == schema.with_field("logp", SCALAR).with_field("info/lives", FLAG)
    # A path may lead to a branch, and stand beside what is nested.
    arm = {"pose": SCALAR, "grip": (FLAG, FLAG)}
    made = Schema({"robot/arm": arm, "robot": {"base": SCALAR}})
    assert made.paths == (
        "robot/arm/pose", "robot/arm/grip/0", "robot/arm/grip/1", "robot/base",
    )  # fmt: skip


def test_a_field_is_added_at_the_end_and_the_order_survives():
    schema = Schema(transition()).with_field("observation/mask", FLAG)
    assert schema.paths[-1] == "observation/mask"
    assert schema.role_paths("observation") == (
        *schema.paths[:3],
        "observation/mask",
    )
    assert Schema.from_json(schema.to_json(), dict(schema.roles)) == schema
    with pytest.raises(SchemaError, match="'reward': got a path that the schema has"):
        schema.with_field("reward", SCALAR)
    with pytest.raises(SchemaError, match="'reward': got both a leaf and a branch"):
        schema.with_field("reward/a", SCALAR)


def test_equality_sees_order_options_and_roles():
    schema = Schema({"a": SCALAR, "b": FLAG})
    same = Schema({"a": SCALAR, "b": FLAG})
    assert schema == same
    assert hash(schema) == hash(same)
    assert schema != Schema({"b": FLAG, "a": SCALAR})
    assert schema != Schema({"a": Field((), "float32", mutable=True), "b": FLAG})
    assert schema != Schema({"a": SCALAR, "b": FLAG}, {"reward": "a"})
    assert schema != {"a": SCALAR, "b": FLAG}


def test_a_schema_never_changes():
    fields = transition()
    schema = Schema(fields)
    fields["more"] = FLAG
    assert "more" not in schema
    with pytest.raises(TypeError):
        schema.fields["more"] = FLAG
    with pytest.raises(AttributeError, match=r"schema\.fields: got an assignment"):
        schema.fields = {}
    for again in (pickle.loads(pickle.dumps(schema)), copy.deepcopy(schema)):
        assert again == schema


def test_repr_tells_one_line_a_field():
    schema = Schema(
        {
            "obs": {"pixels": PIXELS},
            "reward": Field((), "float64", exact=True),
            "returns": Field((), "float32", mutable=True),
        },
        {"observation": "obs"},
    )
    assert repr(schema).splitlines() == [
        "Schema(",
        "  obs/pixels  uint8[84, 84] as observation",
        "  reward      float64[] exact",
        "  returns     float32[] mutable",
        ")",
    ]


def test_json_is_these_values():
    schema = Schema({"a": {"b": Field((2, 3), "bfloat16", exact=True)}})
    assert schema.to_json() == [
        {
            "name": "a/b",
            "dtype": "bfloat16",
            "shape": [2, 3],
            "exact": True,
            "mutable": False,
        }
    ]


def test_every_schema_comes_back_from_json():
    fields = {
        name: {str(mutable): Field((2,) * mutable, name, exact=True, mutable=mutable)}
        for name in DTYPES
        for mutable in (True, False)
    }
    schema = Schema(fields | {"done": FLAG}, {"terminated": "done"})
    text = json.dumps([schema.to_json(), dict(schema.roles)])
    assert Schema.from_json(*json.loads(text)) == schema


GOOD = {"name": "a", "dtype": "int8", "shape": [2], "exact": False, "mutable": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "name: got 1, expected a string"),
        ({"name": "a//b"}, "field path: got 'a//b', expected non-empty names"),
        ({"dtype": "<i1"}, "dtype of 'a': got '<i1', expected one of bool"),
        ({"dtype": None}, "dtype of 'a': got None, expected one of bool"),
        ({"shape": 2}, "shape of 'a': got 2, expected a list of at most 32"),
        ({"shape": [True]}, r"shape of 'a': got \[True\], expected a list"),
        ({"shape": [2.0]}, r"shape of 'a': got \[2.0\], expected a list"),
        ({"shape": [1] * 33}, "shape of 'a': got .*…, expected a list of at most 32"),
        ({"shape": [-1]}, r"field shape: got \[-1\], expected axes of at least 0"),
        ({"shape": [0], "mutable": True}, r"mutable: got True with the shape \[0\]"),
        ({"shape": [2**60]}, "expected fewer than 281474976710656"),
        ({"exact": 1}, "exact of 'a': got 1, expected true or false"),
        ({"mutable": None}, "mutable of 'a': got None, expected true or false"),
        ({"more": 1}, r"keys: got \['dtype', .*'more'.*\], expected exactly \['dtype'"),
    ],
)
def test_json_is_read_strictly(change, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_json([GOOD | change], {})


def test_json_misses_and_repeats_nothing():
    missing = {key: value for key, value in GOOD.items() if key != "exact"}
    with pytest.raises(
        SchemaError, match=r"schema field keys: got .*, expected exactly"
    ):
        Schema.from_json([missing], {})
    with pytest.raises(SchemaError, match="got 'a' twice, expected each path once"):
        Schema.from_json([GOOD, GOOD], {})


@pytest.mark.parametrize(
    ("fields", "roles", "message"),
    [
        ({}, {}, "schema fields: got dict, expected a list of at most 4096 fields"),
        ([GOOD] * 4097, {}, "got a list of 4097, expected a list of at most 4096"),
        (["a"], {}, "schema field entry: got 'a', expected an object; the file"),
        ([], {}, "schema: got 0 fields"),
        ([GOOD], [], "schema roles: got list, expected a mapping by name"),
        ([GOOD], {"reward": "b"}, "role 'reward': got the path 'b', expected a field"),
    ],
)
def test_json_of_another_shape_is_refused(fields, roles, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_json(fields, roles)
