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
    assert Schema(fields, {"observation": "obs/b"}).role_paths("observation") == ("obs/b",)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"state": "obs"}, "role must be one of.*truncated, got 'state'"),
        ({"observation": "ob"}, "role 'observation' must.*or subtree, got 'ob'"),
        ({"observation": 3}, "role 'observation' must.*a field or subtree, got 3"),
        (
            {"observation": "obs", "action": "obs/a"},
            "role 'action' must have.*'observation' as 'obs'",
        ),
        ({"observation": "reward"}, "role 'observation' must.*'reward' as 'reward'"),
        ({"terminated": "obs"}, "must be one field, got the subtree 'obs'. Name a leaf"),
        (
            {"truncated": "obs/a"},
            r"'obs/a' plays 'truncated' and must be .*, got Field\(shape=\(\), ",
        ),
        ({"next_observation": "obs"}, "role 'next_observation'.*got 'obs' alone"),
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
    with pytest.raises(SchemaError, match=rf"plays '{role}' and must be Field\(\(\), 'bool'\)"):
        Schema({"observation": SCALAR, role: field})


@pytest.mark.parametrize(
    ("following", "message"),
    [
        (Field((3,), "float32"), r"field 'next_observation'.*got float32\[3\]"),
        (
            {"a": Field((), "int8"), "b": Field((3,), "int8")},
            r"field.*got int8\[3\]\. Declare both alike",
        ),
        (
            {"a": Field((), "int8"), "b": Field((3,), "float32"), "c": SCALAR},
            r"field.*got float32\[\]",
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
    with pytest.raises(SchemaError, match=r"field 'g' is not in the.*'f18', 'f19' and 3 more"):
        schema["g"]
    with pytest.raises(SchemaError, match=r"role must be one of observation, .*, got 'g'"):
        schema.role("g")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "schema must have 1 to 4096 fields, got 0"),
        ({f"f{n}": FLAG for n in range(4097)}, "schema must have 1 to 4096 fields, got 4097"),
        ({"a": {"b": np.zeros(3)}}, r"field 'a/b' must be a Field, got ndarray\. Write Field"),
        ({"a": "float32"}, "field 'a' must be a Field, got str"),
        ({"a" * 257: FLAG}, r"field path.*got 257 characters"),
        ({"\ud800": FLAG}, r"field path '\\ud800' must have at most.*got 1 characters"),
        ({"x": {"a/b": FLAG}}, r"field name under 'x' must not contain '/'.*got 'a/b'"),
        ({"a//b": FLAG}, r"field path must be non-empty names joined by.*got 'a//b'"),
        ({"a/b": FLAG, "a": {"b": FLAG}}, "field 'a/b' is declared twice, nested and by its path"),
        ({"a/b": FLAG, "a": FLAG}, "field path 'a' must not be both a leaf and a"),
        ({"a": FLAG, "a/b": FLAG}, "field path 'a' must not be both a leaf and a"),
        (
            {"a": {"\x1b]0;b\x07": FLAG}},
            r"field path 'a/\\x1b\]0;b\\x07' must not contain the control character "
            r"'\\x1b', because terminals obey it\. Rename the field",
        ),
        ({"a\nb": FLAG}, r"field path 'a\\nb' must not contain the control character"),
        ({"a\x7f": FLAG}, r"field path 'a\\x7f' must not contain the control"),
        ({"a\x9b": FLAG}, r"field path 'a\\x9b' must not contain the control"),
        ([FLAG], r"schema fields must be a mapping by name, got list\. Pass a dict"),
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
    assert made.paths == ("robot/arm/pose", "robot/arm/grip/0", "robot/arm/grip/1", "robot/base")


def test_a_field_is_added_at_the_end_and_the_order_survives():
    schema = Schema(transition()).with_field("observation/mask", FLAG)
    assert schema.paths[-1] == "observation/mask"
    assert schema.role_paths("observation") == (*schema.paths[:3], "observation/mask")
    assert Schema.from_json(schema.to_json(), dict(schema.roles)) == schema
    with pytest.raises(SchemaError, match="the schema already has a field 'reward'"):
        schema.with_field("reward", SCALAR)
    with pytest.raises(SchemaError, match="field path 'reward' must not be both a"):
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
    with pytest.raises(
        AttributeError, match=r"schema\.fields cannot be assigned: a schema never changes"
    ):
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
        {"name": "a/b", "dtype": "bfloat16", "shape": [2, 3], "exact": True, "mutable": False}
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
        ({"name": 1}, "schema field name must be a string, got 1"),
        ({"name": "a//b"}, r"field path must be non-empty names joined by.*got 'a//b'"),
        ({"dtype": "<i1"}, "schema field dtype of 'a'.*bfloat16, got '<i1'"),
        ({"dtype": None}, "schema field dtype of 'a'.*bfloat16, got None"),
        ({"shape": 2}, "schema field shape of 'a'.*most 32 integers, got 2"),
        ({"shape": [True]}, r"schema field shape of 'a'.*32 integers, got \[True\]"),
        ({"shape": [2.0]}, r"schema field shape of 'a'.*32 integers, got \[2\.0\]"),
        ({"shape": [1] * 33}, r"schema field shape of 'a'.*did not write the file\."),
        ({"shape": [-1]}, r"field shape must have axes of at least 0, got \[-1\]"),
        ({"shape": [0], "mutable": True}, "field option mutable must.*has no values to rewrite"),
        ({"shape": [2**60]}, "field shape must take.*takes 1152921504606846976"),
        ({"exact": 1}, "schema field exact of 'a' must be true or false, got 1"),
        ({"mutable": None}, "schema field mutable of.*true or false, got None"),
        ({"more": 1}, r"schema field keys must be.*'name', 'shape'\]"),
    ],
)
def test_json_is_read_strictly(change, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_json([GOOD | change], {})


def test_json_misses_and_repeats_nothing():
    missing = {key: value for key, value in GOOD.items() if key != "exact"}
    with pytest.raises(SchemaError, match=r"schema field keys must be.*'name', 'shape'\]"):
        Schema.from_json([missing], {})
    with pytest.raises(SchemaError, match="must name each path once, got 'a' twice"):
        Schema.from_json([GOOD, GOOD], {})


@pytest.mark.parametrize(
    ("fields", "roles", "message"),
    [
        ({}, {}, "schema fields must be a list of at most 4096, got dict"),
        ([GOOD] * 4097, {}, "of at most 4096, got a list of 4097"),
        (["a"], {}, "schema field entry must be an object, got 'a'"),
        ([], {}, "schema must have 1 to 4096 fields, got 0"),
        ([GOOD], [], "schema roles must be a mapping by name, got list"),
        ([GOOD], {"reward": "b"}, "role 'reward' must be.*field or subtree, got 'b'"),
    ],
)
def test_json_of_another_shape_is_refused(fields, roles, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_json(fields, roles)
