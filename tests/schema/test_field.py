"""What may be declared as a field."""

import pickle

import numpy as np
import pytest

from mmreplay.errors import SchemaError
from mmreplay.schema import DTYPES, Field, storage_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_is_named_and_stored_little_endian(name):
    field = Field((2, 3), name)
    numpy_name = "uint16" if name == "bfloat16" else name
    assert field.dtype == name
    assert field.numpy.name == numpy_name
    assert field.numpy.str[0] in "<|"
    assert field.numpy == storage_dtype(name)
    assert field.nbytes == 6 * np.dtype(numpy_name).itemsize


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (">f4", "float32"),
        (np.dtype(">i2"), "int16"),
        (np.uint8, "uint8"),
        (float, "float64"),
        (int, "int64"),
        (bool, "bool"),
        ("half", "float16"),
    ],
)
def test_numpy_dtypes_classes_and_strings_become_the_name(dtype, name):
    assert Field((), dtype) == Field((), name)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("complex64", "got complex64. .* trailing axis of 2"),
        (object, "got object. Store numbers, or text and bytes by Field.text"),
        ("U5", "got 'U5'. Store text in a field declared by Field.text"),
        ("str", "got 'str'. Store text in a field declared by Field.text"),
        (np.bytes_, r"got \|S0\. Store bytes in a field declared by Field.bytes"),
        ("datetime64[s]", r"got datetime64.*\. Store it as int64 by \.astype\('int64'\)"),
        ("f4,i4", "got .*'<f4'.*. Store each member as a field of its own"),
        (np.longdouble, "got float128. Use one of them"),
        ("float31", "got 'float31'. Use one of them"),
        (None, "got None"),
        ([], "got "),
    ],
)
def test_other_dtypes_are_refused_with_the_way_out(dtype, message):
    with pytest.raises(SchemaError, match=f"field dtype must be one of bool.*{message}"):
        Field((), dtype)


@pytest.mark.parametrize("name", ["complex64", ">f4", None, ["float32"]])
def test_storage_dtype_takes_canonical_names_only(name):
    with pytest.raises(SchemaError, match=r"field dtype must be one of bool"):
        storage_dtype(name)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (3, r"be a tuple of integers, got 3\. Write \(3,\)"),
        ((2.0,), r"be a tuple of integers, got \(2.0,\)"),
        ((True,), r"be a tuple of integers, got \(True,\)"),
        ("84", "be a tuple of integers, got '84'"),
        (None, "be a tuple of integers, got None"),
        ((2, -1), r"have axes of at least 0, got \[2, -1\]\. Check the shape"),
        ((-1,), r"have axes of at least 0, got \[-1\]"),
        ((1,) * 33, "have at most 32 axes, got 33. Merge"),
        ((2**46,), "take fewer than 281474976710656 bytes per step, .* Check the shape"),
        # numpy's own product of this one is 0.
        ((2**32, 2**32), "take fewer .* which takes 73786976294838206464"),
    ],
)
def test_shapes_that_cannot_be_stored_are_refused(shape, message):
    with pytest.raises(SchemaError, match=f"field shape must {message}"):
        Field(shape, "float32")


def test_the_largest_shapes_are_accepted():
    assert Field((1,) * 32, "bool").nbytes == 1
    assert Field((2**48 - 1,), "bool").nbytes == 2**48 - 1


def test_a_shape_becomes_a_tuple_of_python_integers():
    field = Field([np.int64(2), 3], "int8")
    assert field.shape == (2, 3)
    assert [type(axis) for axis in field.shape] == [int, int]


@pytest.mark.parametrize("option", ["exact", "mutable"])
def test_options_are_bools_that_equality_sees(option):
    assert Field((), "int8", **{option: True}) != Field((), "int8")
    with pytest.raises(SchemaError, match=f"option {option} must be True or False, got 'yes'"):
        Field((), "int8", **{option: "yes"})


def test_a_field_never_changes_and_survives_pickle():
    field = Field((2,), "bfloat16", exact=True)
    with pytest.raises(AttributeError):
        field.dtype = "int8"
    again = pickle.loads(pickle.dumps(field))
    assert again == field
    assert hash(again) == hash(field)
    assert (again.numpy, again.nbytes) == (field.numpy, field.nbytes)
