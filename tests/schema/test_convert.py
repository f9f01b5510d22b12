"""What a field takes at the door, pair by pair of dtypes."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmreplay.errors import SchemaError
from mmreplay.schema import DTYPES, Field
from mmreplay.schema.dtypes import bfloat16_bits

NUMPY = [name for name in DTYPES if name != "bfloat16"]
SIGNED = ["int8", "int16", "int32", "int64"]
UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]


@pytest.mark.parametrize("got", NUMPY)
@pytest.mark.parametrize("name", NUMPY)
def test_float_arrays_fit_float_fields_only_and_other_arrays_fit_all(got, name):
    value = np.ones((2, 3), got)
    field = Field((3,), name)
    if got not in FLOATS or name in FLOATS:
        cast = field.convert(value, "x", (2,))
        assert cast.dtype == field.numpy
        assert (cast == 1).all()
    else:
        with pytest.raises(
            SchemaError, match=rf"field 'x' must be {name}\[2, 3\], got {got}\[2, 3\]\. .*astype"
        ):
            field.convert(value, "x", (2,))


@pytest.mark.parametrize("name", DTYPES)
def test_what_fits_already_is_returned_itself(name):
    field = Field((3,), name)
    value = np.zeros((2, 3), field.numpy)
    assert field.convert(value, "x", (2,)) is value


@pytest.mark.parametrize("name", NUMPY)
def test_other_byte_orders_are_stored_by_value(name):
    value = np.array([0, 1, 1], name).astype(np.dtype(name).newbyteorder(">"))
    cast = Field((3,), name).convert(value, "x", ())
    assert cast.dtype.str == Field((3,), name).numpy.str
    assert cast.tolist() == [0, 1, 1]


@given(
    st.sampled_from(SIGNED + UNSIGNED),
    st.integers(-(2**63), 2**64 - 1)
    | st.builds(
        lambda n, sign, off: sign * 2**n + off,
        st.sampled_from([7, 8, 15, 16, 31, 32, 63]),
        st.sampled_from([1, -1]),
        st.integers(-1, 1),
    ),
    st.booleans(),
)
def test_a_python_integer_is_accepted_if_it_fits(name, value, listed):
    info = np.iinfo(name)
    field = Field((1,), name) if listed else Field((), name)
    given_ = [value] if listed else value
    if info.min <= value <= info.max:
        cast = field.convert(given_, "x", ())
        assert cast.dtype == field.numpy
        assert cast.item() == value
    else:
        with pytest.raises(SchemaError, match=f"field 'x'(:| must be) {name}.*got "):
            field.convert(given_, "x", ())


INTEGERS = (
    st.integers(-(2**63), 2**64 - 1)
    | st.integers(-300, 300)
    | st.builds(
        lambda n, sign, off: sign * 2**n + off,
        st.sampled_from([7, 8, 11, 12, 15, 16, 24, 25, 31, 32, 53, 54, 62, 63]),
        st.sampled_from([1, -1]),
        st.integers(-3, 3),
    )
    | st.builds(lambda odd, shift: odd << shift, st.integers(-500, 500), st.integers(0, 54))
)


def holds(name, value):
    """Whether a dtype holds an integer exactly, by Python's own numbers."""
    if name == "bool":
        return value in (0, 1)
    if name in [*FLOATS, "bfloat16"]:
        if value == 0:
            return True
        bits, largest = {
            "bfloat16": (8, 127),
            "float16": (11, 15),
            "float32": (24, 127),
            "float64": (53, 1023),
        }[name]
        significant = bin(abs(value)).strip("0b")
        return len(significant) <= bits and abs(value).bit_length() - 1 <= largest
    info = np.iinfo(name)
    return info.min <= value <= info.max


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(SIGNED + UNSIGNED),
    st.lists(INTEGERS, min_size=1, max_size=4),
    st.booleans(),
)
def test_integers_of_an_array_are_accepted_where_each_fits_exactly(name, got, values, scalar):
    info = np.iinfo(got)
    values = [value for value in values if info.min <= value <= info.max] or [1]
    array = np.array(values[0] if scalar else values, got)
    field = Field(array.shape, name)
    if name == "bfloat16" and got == "uint16":
        return  # those are its bits
    if all(holds(name, value) for value in array.ravel().tolist()):
        cast = field.convert(array, "x", ())
        if name == "bfloat16":
            cast = (cast.astype("u4") << 16).view("f4")
        assert [int(each) for each in cast.ravel()] == array.ravel().tolist()
    else:
        told = rf"field 'x'(:| must be) {name}.*, got .*-?\d+\. "
        with pytest.raises(SchemaError, match=told):
            field.convert(array, "x", ())


def test_a_number_that_does_not_fit_is_named_with_the_range():
    told = r"field 'a/b': uint8 must be 0 to 255, got 300\. Declare a wider dtype"
    for value in (300, np.int64(300), np.array(300), np.array(300, "u2")):
        with pytest.raises(SchemaError, match=told):
            Field((), "uint8").convert(value, "a/b", ())
    told = (
        r"'x' must be float32\[2\], got int64\[2\] with the value 16777217\. Pass "
        r"\.astype\('float32'\) to round it, or declare int64"
    )
    with pytest.raises(SchemaError, match=told):
        Field((2,), "float32").convert(np.array([1, 2**24 + 1]), "x", ())


@pytest.mark.parametrize("value", [1, 1.5, np.int64(3), np.float64(0.1), True])
@pytest.mark.parametrize("name", FLOATS)
def test_scalars_go_into_floats(value, name):
    cast = Field((), name).convert(value, "x", ())
    assert cast.dtype == name
    assert cast == np.dtype(name).type(value)


@pytest.mark.parametrize("value", [1, 0, np.int8(1), np.uint8(0), [1, 0], [[1], [0]]])
def test_zero_and_one_are_bools(value):
    cast = Field(np.shape(value), "bool").convert(value, "x", ())
    assert cast.dtype == bool
    assert cast.tolist() == np.array(value, bool).tolist()


@pytest.mark.parametrize("value", [2, -1, 0.0, 1.0, np.int8(3), [1, 2], [0.0, 1.0]])
def test_other_numbers_are_no_bools(value):
    field = Field(np.shape(value), "bool")
    with pytest.raises(SchemaError, match=r"must be bool\[.*\], got .*\. Pass \.astype\('bool'\)"):
        field.convert(value, "x", ())
    for fine in (True, np.False_, np.array(True)):
        assert Field((), "bool").convert(fine, "x", ()) == fine


@pytest.mark.parametrize("value", [1.0, np.float32(1), np.ones(()), np.ones((), "f2")])
def test_integers_never_come_from_floats(value):
    with pytest.raises(SchemaError, match=r"Round it and pass \.astype\('uint8'\), or"):
        Field((), "uint8").convert(value, "x", ())


@pytest.mark.parametrize(
    ("value", "name"), [(1e39, "float32"), (np.array(-1e300), "float32"), (70_000, "float16")]
)
def test_a_number_never_becomes_infinite(value, name):
    with pytest.raises(SchemaError, match=f"'x': {name} cannot hold some .* too large. Clip"):
        Field((), name).convert(value, "x", ())
    assert Field((), name).convert(math.inf, "x", ()) == math.inf
    assert np.isnan(Field((), name).convert(math.nan, "x", ()))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (0.5, "float32"),
        (np.ones((), "float32"), "float16"),
        (3, "float32"),
        (np.int64(3), "float64"),
        (0.5, "bfloat16"),
        (np.ones((), "float16"), "bfloat16"),
    ],
)
def test_an_exact_field_refuses_what_could_lose(value, name):
    with pytest.raises(SchemaError, match=r"Pass .*, or leave out exact=True"):
        Field((), name, exact=True).convert(value, "x", ())


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (0.5, "float64"),
        (np.float16(0.5), "float32"),
        (np.uint16(3), "float32"),
        (3, "int8"),
        (True, "bool"),
        (np.uint16(3), "bfloat16"),
    ],
)
def test_an_exact_field_takes_what_loses_nothing(value, name):
    cast = Field((), name, exact=True).convert(value, "x", ())
    assert cast.item() == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones((2, 3), complex), r"got complex128\[2, 3\].*trailing axis of 2"),
        (1j, r"got complex128\[\].*trailing axis of 2"),
        (None, r"got NoneType None\. Store numbers"),
        ("pong", "got str 'pong'. Store text in a field .* Field.text"),
        (b"pong", "got bytes b'pong'. Store bytes in a field .* Field.bytes"),
        ({"a": 1}, "got dict {'a': 1}. Store numbers"),
        (np.array(["a", None]), r"got object\[2\]\. Store numbers"),
        (np.zeros((2, 3), "M8[s]"), r"got datetime64\[s\].*by \.astype\('int64'\)"),
        (np.zeros(2, "f4,f4"), r"got void64\[2\].*each member as a field of its own"),
        ([[1, 2], [3]], "got list that makes none. Pad ragged values, or let the fi"),
    ],
)
def test_what_is_no_number_is_refused_with_the_way_out(value, message):
    with pytest.raises(SchemaError, match=f"field 'x' must be .*, {message}"):
        Field((3,), "float32").convert(value, "x", (2,))


@pytest.mark.parametrize(
    ("shape", "lead", "message"),
    [
        (
            (1, 8, 64, 64),
            (1, 8),
            r".*, got uint8\[1, 8, 64, 64\]\. Pass an array of shape \[1, 8, 64",
        ),
        (
            (64, 64, 3),
            (8,),
            r"of shape \[8, 64, 64, 3\]: its first axes, \[8\], count the rows of the",
        ),
        ((1, 64, 64, 3), (), r"got uint8\[1, 64, 64, 3\]\. Pass the value of one st"),
        ((8, 64, 64, 3), (), "; or, for the steps of 8 environments, .*num_envs=8, after removing"),
        ((64, 8, 64, 3), (8,), r"must be .*, got uint8\[64, 8, 64, 3\]"),
    ],
)
def test_a_wrong_shape_is_reported_with_the_right_one(shape, lead, message):
    field = Field((64, 64, 3), "uint8")
    with pytest.raises(SchemaError, match=message):
        field.convert(np.zeros(shape, "u1"), "observation/pixels", lead)


def test_no_step_is_a_value_too():
    for name in DTYPES:
        assert Field((), name).convert([], "x", (0,)).shape == (0,)
    assert Field((), "int8").convert(np.zeros(0, "i1"), "x", (0,)).shape == (0,)


def value_of(bits: int) -> Fraction:
    return Fraction(float(np.array([bits << 16], "u4").view("f4")[0]))


def nearest(value: float) -> int:
    """Bits of the nearest bfloat16 of a float, ties to even, by exact fractions."""
    magnitude, sign = Fraction(abs(value)), (math.copysign(1, value) < 0) << 15
    low, high = 0, 0x7F7F
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if value_of(middle) <= magnitude else (low, middle - 1)
    below = magnitude - value_of(low)
    # The neighbour of the largest is where the next would be, and stands for infinity.
    above = (Fraction(2**128) if low == 0x7F7F else value_of(low + 1)) - magnitude
    up = above < below or (above == below and low % 2 == 1)
    return sign | (low + up)


# Every distance from a tie that float64 can tell, where rounding twice goes wrong.
NEAR_TIES = st.builds(
    lambda bits, step: float(
        np.array([(bits << 16) | 0x8000], "u4").view("f4").astype("f8")[0] * (1 + step * 2.0**-52)
    ),
    st.integers(0, 0x7F7E),
    st.integers(-3, 3),
)


@given(st.floats(allow_nan=False, allow_infinity=False) | NEAR_TIES)
def test_float64_goes_to_the_nearest_bfloat16(value):
    assert bfloat16_bits(np.array(value)) == nearest(value)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float32_goes_to_the_nearest_bfloat16(value):
    assert bfloat16_bits(np.array(value, np.float32)) == nearest(value)


@pytest.mark.parametrize("name", FLOATS)
def test_nan_stays_nan_and_infinity_infinity(name):
    patterns = {"float16": 0xFFFF, "float32": 2**32 - 1, "float64": 2**64 - 1}
    every_bit = np.array(patterns[name], f"u{np.dtype(name).itemsize}").view(name)
    values = np.array([np.nan, -np.nan, every_bit, np.inf, -np.inf], name)
    bits = Field((5,), "bfloat16").convert(values, "x", ())
    back = (bits.astype("u4") << 16).view("f4")
    assert np.isnan(back[:3]).all()
    assert back[3:].tolist() == [np.inf, -np.inf]


def test_a_bfloat16_field_takes_bits_bytes_and_numbers():
    field = Field((2,), "bfloat16")
    assert field.convert(np.array([0x3F80, 0], ">u2"), "x", ()).tolist() == [0x3F80, 0]
    for one in ([1, 0], [1.0, 0.0], np.array([1, 0], "i1"), np.array([1, 0], "f2")):
        assert field.convert(one, "x", ()).tolist() == [0x3F80, 0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.full(2, 257), r"must be .*, got int64\[2\] with the value 257\. .*astype\('float32'\)"),
        (np.array([3.4e38, 1]), "bfloat16 cannot hold some of the float64 values, .* Clip them"),
        (np.ones(2, complex), "trailing axis of 2"),
        (np.ones(3, "u2"), r"must be bfloat16\[2\], got uint16\[3\]\. Pass the value"),
    ],
)
def test_a_bfloat16_field_refuses_the_rest(value, message):
    with pytest.raises(SchemaError, match=f"field 'x'.*{message}"):
        Field((2,), "bfloat16").convert(value, "x", ())


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def test_tensors_are_accepted_like_arrays(torch):
    field = Field((2,), "float32")
    tensor = torch.tensor([0.5, 1.0], requires_grad=True)
    assert field.convert(tensor, "x", ()).tolist() == [0.5, 1.0]
    assert field.convert(tensor.double(), "x", ()).dtype == np.float32
    assert field.convert(torch.tensor([1, 2]), "x", ()).tolist() == [1, 2]
    assert Field((2,), "bool").convert(torch.tensor([1, 0]), "x", ()).tolist() == [1, 0]
    with pytest.raises(SchemaError, match=r"field 'x' must be.*with the value 16777217"):
        field.convert(torch.tensor([1, 2**24 + 1]), "x", ())


def test_torch_bfloat16_is_stored_bit_by_bit(torch):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    tensor = every.view(torch.bfloat16)
    bits = Field((2**16,), "bfloat16").convert(tensor, "x", ())
    assert bits.dtype == np.uint16
    assert (bits == every.numpy().view(np.uint16)).all()
    wide = Field((2**16,), "float32").convert(tensor, "x", ())
    np.testing.assert_array_equal(wide, tensor.float().numpy())
    exact = Field((2**16,), "float32", exact=True).convert(tensor, "x", ())
    np.testing.assert_array_equal(exact, wide)


def test_torch_bfloat16_is_no_integer(torch):
    with pytest.raises(SchemaError, match=r"must be uint16\[1\], got bfloat16\[1\]"):
        Field((1,), "uint16").convert(torch.ones(1).bfloat16(), "x", ())


FLOATS_OF_8_BITS = [
    name
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(pytest.importorskip("torch"), name)
]


@pytest.mark.parametrize("name", FLOATS_OF_8_BITS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_floats_of_8_bits_go_into_float_fields_exactly(name, dtype):
    torch = pytest.importorskip("torch")
    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    values = bits.view(getattr(torch, name))
    values = values[values.float().isfinite()]
    field = Field((len(values),), dtype)
    stored = field.convert(values, "x", ())
    found = torch.from_numpy(stored.copy())
    if dtype == "bfloat16":
        found = found.view(torch.bfloat16)
    assert torch.equal(found.double(), values.double())
    with pytest.raises(SchemaError, match=r"must be int8.*got float32"):
        Field((len(values),), "int8").convert(values, "x", ())


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize(
    "make",
    [lambda torch: torch.zeros(2, dtype=torch.complex32), lambda torch: torch.zeros(2).to_sparse()],
)
def test_tensors_that_are_no_array_are_not_called_ragged(make):
    torch = pytest.importorskip("torch")
    tensor = make(torch)
    told = rf"got Tensor of {tensor.dtype} that makes none\. Pass a dense tensor"
    with pytest.raises(SchemaError, match=told):
        Field((2,), "float32").convert(tensor, "x", ())
