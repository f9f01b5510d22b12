"""Fields whose first axis varies: what may be declared, and their JSON."""

import json
import pickle

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.description import plain
from mmreplay.errors import SchemaError
from mmreplay.schema import DTYPES, Field, Schema
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.layout import record_layout

CLOUD = Field((None, 3), "float32", max_length=4096)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_axis_varies_up_to_max_length(dtype):
    field = Field([None, 2, np.int64(3)], dtype, max_length=np.int32(7))
    itemsize = field.numpy.itemsize
    assert field.shape == (None, 2, 3)
    assert field.inner == (2, 3)
    assert type(field.max_length) is int
    assert (field.varies, field.max_length, field.kind) == (True, 7, "array")
    assert field.inner_nbytes == 6 * itemsize
    assert field.max_heap_nbytes == -(-42 * itemsize // 8) * 8
    assert field.nbytes == REFERENCE.itemsize == 16


@pytest.mark.parametrize("kind", ["text", "bytes"])
def test_text_and_bytes_are_bytes_of_a_kind(kind):
    field = getattr(Field, kind)(max_bytes=200)
    assert (field.shape, field.dtype) == ((None,), "uint8")
    assert (field.max_length, field.kind) == (200, kind)
    assert field == Field((None,), "uint8", max_length=200, kind=kind)
    assert field != Field((None,), "uint8", max_length=200)
    assert repr(field) == f"Field.{kind}(max_bytes=200)"
    assert field.max_heap_nbytes == 200


def test_a_field_of_one_shape_says_what_it_said():
    field = Field((2, 3), "int16")
    assert (field.varies, field.max_length, field.kind) == (False, None, "array")
    assert (field.inner, field.inner_nbytes) == ((2, 3), 12)
    assert field.max_heap_nbytes == 0
    assert repr(field) == ("Field(shape=(2, 3), dtype='int16', exact=False, mutable=False)")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (CLOUD, "Field(shape=(None, 3), dtype='float32', max_length=4096)"),
        (
            Field((None,), "int8", max_length=1, exact=True),
            "Field(shape=(None,), dtype='int8', max_length=1, exact=True)",
        ),
    ],
)
def test_the_repr_of_a_field_that_varies_makes_it_again(field, text):
    assert repr(field) == text
    assert eval(text, {"Field": Field}) == field


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Field((None,), "int8"),
            r"option max_length must be an integer in \[1, 4294967295\], got None\. "
            "Give the longest first axis",
        ),
        (lambda: Field((None,), "int8", max_length=0), "option max_length .* got 0"),
        (lambda: Field((None,), "int8", max_length=2**32), "max_length .* 4294967296"),
        (lambda: Field((None,), "int8", max_length=True), "max_length .* got True"),
        (lambda: Field((None,), "int8", max_length=2.0), r"max_length .* got 2\.0"),
        (
            lambda: Field.text(0),
            r"option max_bytes must be an integer in \[1,.* got 0. Give the most bytes",
        ),
        (
            lambda: Field((3, None), "int8", max_length=9),
            r"a tuple of integers, got \(3, None\). Only the first axis may be None",
        ),
        (lambda: Field((None, None), "int8", max_length=9), "Only the first axis may"),
        (lambda: Field.bytes("9"), "option max_bytes .* got '9'"),
        (
            lambda: Field((3,), "int8", max_length=4),
            r"option max_length needs a shape that begins with None, got \[3\]",
        ),
        (
            lambda: Field((), "uint8", kind="text"),
            r"option kind needs a shape that begins with None, got \[\]",
        ),
        (
            lambda: Field((3, None), "int8", max_length=4),
            r"shape must be a tuple of integers, got \(3, None\)",
        ),
        (
            lambda: Field((None, None), "int8", max_length=4),
            r"shape must be a tuple of integers, got \(None, None\)",
        ),
        (
            lambda: Field((None, 0), "int8", max_length=4),
            r"axes of at least 1 behind one that varies, got \[None, 0\]",
        ),
        (lambda: Field((None, -1), "int8", max_length=4), r"axes of at least 0, got \[-1\]"),
        (lambda: Field((None, *(1,) * 32), "int8", max_length=4), "at most 32 axes, got 33"),
        (
            lambda: Field((None, 2**17), "int8", max_length=2**32 - 1),
            "fewer than 281474976710656 bytes per step",
        ),
        (
            lambda: Field((None,), "int8", max_length=4, mutable=True),
            r"option mutable must be False for the shape \[None\], whose values vary",
        ),
        (
            lambda: Field((None,), "uint8", max_length=4, kind="html"),
            "kind must be one of 'array', 'text', 'bytes', 'image', got 'html'. Use Field.text",
        ),
        (
            lambda: Field((None,), "int8", max_length=4, kind="text"),
            r"kind 'text' must have shape \[None\], dtype uint8 and exact=False, got "
            r"\[None\], int8 and exact=False",
        ),
        (
            lambda: Field((None, 2), "uint8", max_length=4, kind="bytes"),
            r"kind 'bytes' must have shape .* got \[None, 2\], uint8",
        ),
        (
            lambda: Field((None,), "uint8", max_length=4, kind="text", exact=True),
            "kind 'text' must have .* exact=True",
        ),
    ],
)
def test_what_no_field_that_varies_can_be_is_refused(make, message):
    with pytest.raises(SchemaError, match=f"field .*{message}"):
        make()


def test_the_longest_values_are_accepted():
    field = Field((None, 2**15), "uint8", max_length=2**32 - 1)
    assert field.max_heap_nbytes == 2**15 * (2**32 - 1)


@pytest.mark.parametrize("field", [CLOUD, Field.text(9), Field((2,), "int8")])
def test_fields_survive_pickles_of_this_version(field):
    again = pickle.loads(pickle.dumps(field))
    assert again == field
    assert hash(again) == hash(field)
    assert (again.numpy, again.nbytes) == (field.numpy, field.nbytes)
    assert (again.max_length, again.kind) == (field.max_length, field.kind)


def test_a_pickle_without_options_of_varying_fields_loads():
    field = Field((2,), "int8")
    assert len(field.__getstate__()) == 6  # as earlier versions wrote it
    again = Field.__new__(Field)
    again.__setstate__(field.__getstate__())
    assert again == field


SCHEMA = Schema(
    {
        "observation": {"mission": Field.text(100), "cloud": CLOUD},
        "action": Field((None,), "int32", max_length=5, exact=True),
        "frame": Field.bytes(1 << 20),
        "reward": Field((), "float32"),
    }
)


def test_the_json_of_fields_that_vary_is_these_values():
    mission, _, action, frame, reward = SCHEMA.to_json()
    assert mission == {
        "name": "observation/mission",
        "dtype": "uint8",
        "shape": [None],
        "exact": False,
        "mutable": False,
        "max_length": 100,
        "kind": "text",
    }
    assert (action["shape"], action["max_length"]) == ([None], 5)
    assert (action["kind"], action["exact"]) == ("array", True)
    assert frame["kind"] == "bytes"
    assert set(reward) == {"name", "dtype", "shape", "exact", "mutable"}
    text = json.dumps([SCHEMA.to_json(), dict(SCHEMA.roles)])
    assert Schema.from_json(*json.loads(text)) == SCHEMA


GOOD = {
    "name": "a",
    "dtype": "uint8",
    "shape": [None],
    "exact": False,
    "mutable": False,
    "max_length": 9,
    "kind": "text",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [9]}, "schema field keys must be exactly .*'shape'\\], got"),
        ({"shape": [None, None]}, "shape of 'a' must be a list of at most 32 integers"),
        ({"shape": [3, None]}, "schema field keys must be exactly"),
        ({"shape": [None, 0], "kind": "array"}, r"at least 1 behind .* \[None, 0\]"),
        ({"max_length": 0}, r"max_length of 'a' must be .*\[1, 4294967295\], got 0"),
        ({"max_length": 2**32}, "max_length of 'a' .* got 4294967296"),
        ({"max_length": True}, "max_length of 'a' must be an integer .*, got True"),
        ({"max_length": None}, "max_length of 'a' must be an integer .*, got None"),
        ({"kind": "html"}, "kind of 'a' must be one of array, text, bytes, image, got 'html'"),
        ({"kind": ["text"]}, r"kind of 'a' must be one of .*, got \['text'\]"),
        ({"dtype": "int8"}, "kind 'text' must have shape .* int8"),
        ({"exact": True}, "kind 'text' must have shape .* exact=True"),
        ({"mutable": True}, "option mutable must be False"),
        ({"mutable": 0}, "mutable of 'a' must be true or false, got 0"),
        ({"more": 1}, "keys must be exactly .*'kind', 'max_length'"),
    ],
)
def test_the_json_of_fields_that_vary_is_read_strictly(change, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_json([GOOD | change], {})


@pytest.mark.parametrize("key", ["max_length", "kind"])
def test_max_length_and_kind_come_together_with_null(key):
    less = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(SchemaError, match=r"keys must be exactly .*'max_length'"):
        Schema.from_json([less], {})
    with pytest.raises(SchemaError, match=r"keys must be exactly .*'shape'\], got"):
        Schema.from_json([less | {"shape": [9], key: GOOD[key]}], {})


def test_a_schema_names_its_fields_that_vary():
    assert SCHEMA.varying == ("observation/mission", "observation/cloud", "action", "frame")
    assert SCHEMA.max_heap_nbytes == 104 + 12 * 4096 + 24 + (1 << 20)
    assert SCHEMA.row_nbytes == 1 + 4 * 16 + 4
    assert Schema({"a": Field((), "int8")}).varying == ()
    assert repr(SCHEMA).splitlines()[1:-1] == [
        "  observation/mission  text of at most 100 bytes",
        "  observation/cloud    float32[up to 4096, 3]",
        "  action               int32[up to 5] exact",
        "  frame                bytes of at most 1048576 bytes",
        "  reward               float32[]",
    ]
    shapes = [row[2] for row in SCHEMA.table()[1]]
    assert shapes[1:3] == ["[up to 4096, 3]", "[up to 5]"]


@pytest.mark.parametrize("role", ["reward", "terminated", "truncated"])
def test_rewards_and_ends_have_one_shape(role):
    with pytest.raises(
        SchemaError,
        match=f"field 'a' plays '{role}' and must have one shape in every step, got "
        r"Field\(shape=\(None,\)",
    ):
        Schema({"a": Field((None,), "bool", max_length=3)}, {role: "a"})


def test_the_next_observation_varies_as_the_observation():
    fields = {"observation": Field.text(9), "next_observation": Field.text(9)}
    assert Schema(fields).role("next_observation") == "next_observation"
    with pytest.raises(
        SchemaError, match="must be text of at most 9 bytes as 'observation', got bytes of at most"
    ):
        Schema({**fields, "next_observation": Field.bytes(9)})


def test_the_record_holds_references_before_all_other_members():
    schema = Schema(
        {
            "wide": Field((2,), "float64"),
            "mission": Field.text(1 << 20),
            "done": Field((), "bool"),
            "cloud": CLOUD,
        }
    )
    placement = record_layout(schema)
    record = placement.record
    assert record.names == ("mission", "cloud", "wide", "done")
    assert [record.fields[name][1] for name in record.names] == [0, 16, 32, 48]
    assert record["mission"] == record["cloud"] == REFERENCE
    assert placement.stride == 56
    assert not placement.large
    reference = np.zeros(1, REFERENCE)
    reference["position"], reference["length"], reference["crc"] = 1, 2, 3
    assert reference.tobytes() == bytes.fromhex("0100000000000000 02000000 03000000")


def test_a_zarr_buffer_of_fields_that_vary_needs_heap_bytes(tmp_path):
    with pytest.raises(
        SchemaError, match="heap_bytes must be given, as field 'observation/mission' varies"
    ):
        mr.ReplayBuffer.create(tmp_path / "ring", SCHEMA, capacity=100, engine="zarr")
    assert not list(tmp_path.iterdir())


def test_a_file_of_rows_is_described_with_fields_that_vary():
    assert plain(SCHEMA, 3).schema == SCHEMA


def test_values_that_vary_make_no_array_of_one_shape():
    with pytest.raises(SchemaError, match="field 'a' varies from step to step, so its"):
        Field.text(9).convert("x", "a", ())
