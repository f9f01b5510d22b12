"""Values that fields that vary accept, against lists of arrays."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.schema import Field
from mmreplay.schema.varying import convert_varying, leading_axes

TOKENS = Field((None,), "int32", max_length=5)
CLOUD = Field((None, 3), "float32", max_length=4)
TEXT = Field.text(max_bytes=8)
BLOB = Field.bytes(max_bytes=8)
BRAIN = Field((None, 2), "bfloat16", max_length=4)


def listed(ragged):
    """The values as lists, one after another."""
    flat = ragged.reshape(math.prod(ragged.shape))
    return [value.tolist() for value in flat]


def nest(values, lead):
    """The values in nested lists of leading axes."""
    for axis in reversed(lead[1:]):
        values = [values[at : at + axis] for at in range(0, len(values), axis)]
    return values


LEADS = st.sampled_from([(1,), (3,), (2, 3), (1, 1), (4, 1)])


@st.composite
def blocks(draw, field):
    lead = draw(LEADS)
    lengths = st.integers(0, field.max_length)
    count = math.prod(lead)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    lengths = draw(st.lists(lengths, min_size=count, max_size=count))
    return [rng.integers(-9, 99, (n, *field.inner)) for n in lengths], lead


FORMS = st.sampled_from(["arrays", "lists", "tensors", "objects", "ragged", "ragged tensors"])


@pytest.mark.parametrize("field", [TOKENS, CLOUD], ids=["tokens", "cloud"])
@given(data=st.data(), form=FORMS)
def test_values_in_every_form_are_put_together(field, data, form):
    values, lead = data.draw(blocks(field))
    typed = [value.astype(field.numpy) for value in values]
    given_ = {
        "arrays": lambda: nest(typed, lead),
        "lists": lambda: nest([value.tolist() for value in values], lead),
        "tensors": lambda: nest([torch.from_numpy(value) for value in typed], lead),
        "objects": lambda: objects(typed, lead),
        "ragged": lambda: ragged(typed, lead, field),
        "ragged tensors": lambda: ragged(typed, lead, field).tensors(),
    }[form]()
    found = convert_varying(field, given_, "x", lead)
    assert found.shape == lead
    assert found.values.dtype == field.numpy
    assert found.values.flags.c_contiguous
    assert found.offsets.dtype == np.int64
    assert listed(found) == [value.tolist() for value in typed]
    # Lists alone do not say how long their empty values are.
    if form != "lists" or any(map(len, values)):
        assert leading_axes(field, given_) == len(lead)


def objects(values, lead):
    cells = np.empty(len(values), object)
    cells[:] = values
    for number, value in enumerate(values):
        cells[number] = value
    return cells.reshape(lead)


def ragged(values, lead, field):
    offsets = np.cumsum([0, *map(len, values)])
    empty = np.empty((0, *field.inner), field.numpy)
    return mr.Ragged(np.concatenate([empty, *values]), offsets, lead)


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=2), min_size=6, max_size=6
    ),
    lead=st.sampled_from([(6,), (2, 3), (6, 1)]),
    form=st.sampled_from(["str", "numpy", "object", "bytes", "arrays", "tuple"]),
)
def test_text_in_every_form_is_put_together(texts, lead, form):
    if form == "numpy":
        texts = [text.rstrip("\0") for text in texts]  # numpy keeps no final NUL
    encoded = [text.encode() for text in texts]
    given_ = {
        "str": lambda: nest(texts, lead),
        "numpy": lambda: np.array(texts).reshape(lead),
        "object": lambda: np.array(texts, object).reshape(lead),
        "bytes": lambda: nest(encoded, lead),
        "arrays": lambda: nest([np.frombuffer(t, np.uint8) for t in encoded], lead),
        "tuple": lambda: tuple(nest(texts, lead)),
    }[form]()
    found = convert_varying(TEXT, given_, "x", lead)
    assert found.reshape(6).text() == texts
    assert found.shape == lead
    assert leading_axes(TEXT, given_) == len(lead)


@pytest.mark.parametrize(
    "value",
    [
        b"\x00\xff",
        bytearray(b"\x00\xff"),
        memoryview(b"\x00\xff"),
        memoryview(b"\x00a\xff")[::2],
        np.array([0, 255], np.uint8),
        torch.tensor([0, 255], dtype=torch.uint8),
        [0, 255],
    ],
    ids=lambda value: type(value).__name__,
)
def test_bytes_come_as_anything_that_holds_bytes(value):
    assert convert_varying(BLOB, value, "x", ()).values.tolist() == [0, 255]
    found = convert_varying(BLOB, [value, value], "x", (2,))
    assert listed(found) == [[0, 255]] * 2
    assert leading_axes(BLOB, value) == 0
    assert leading_axes(BLOB, [value]) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (TEXT, ""),
        (BLOB, b""),
        (BLOB, memoryview(b"")),
        (TOKENS, []),
        (TOKENS, ()),
        (CLOUD, []),
        (CLOUD, np.empty((0, 3))),
        (CLOUD, torch.empty(0, 3)),
    ],
)
def test_a_value_may_have_no_item(field, value):
    found = convert_varying(field, value, "x", ())
    assert found.shape == ()
    assert found.values.shape == (0, *field.inner)
    assert found.values.dtype == field.numpy
    two = convert_varying(field, [value, value], "x", (2,))
    assert two.offsets.tolist() == [0, 0, 0]


def test_an_array_holds_values_of_one_length():
    block = np.arange(24).reshape(2, 4, 3)
    found = convert_varying(CLOUD, block, "x", (2,))
    assert listed(found) == block.tolist()
    assert convert_varying(CLOUD, block[:, :0], "x", (2,)).offsets.tolist() == [0, 0, 0]
    one = convert_varying(CLOUD, block[0], "x", ())
    assert one.values.tolist() == block[0].tolist()
    text = convert_varying(TEXT, np.full((2, 3), 65, np.uint8), "x", (2,))
    assert text.text() == ["AAA", "AAA"]


def test_a_stored_array_is_not_copied():
    value = np.ones((4, 3), np.float32)
    assert convert_varying(CLOUD, value, "x", ()).values is value
    swapped = convert_varying(CLOUD, value[:, ::-1], "x", ()).values
    assert swapped.flags.c_contiguous


# torch calls strided ones a prototype.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors_are_accepted():
    values = [torch.tensor([1, 2]), torch.tensor([], dtype=torch.long)]
    for layout in (torch.jagged, torch.strided):
        given_ = torch.nested.nested_tensor(values, layout=layout)
        found = convert_varying(TOKENS, given_, "x", (2,))
        assert listed(found) == [[1, 2], []]
        assert leading_axes(TOKENS, given_) == 1
    # One whose values do not follow one another.
    apart = torch.nested.nested_tensor_from_jagged(
        torch.arange(6), torch.tensor([0, 3, 6]), torch.tensor([1, 2])
    )
    assert listed(convert_varying(TOKENS, apart, "x", (2,))) == [[0], [3, 4]]


def test_bfloat16_is_accepted_as_numbers_and_as_bits():
    bits = [[0x3F80, 0x4000]]
    numbers = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    for value in (numbers, np.array(bits, np.uint16), np.array([[1.0, 2.0]])):
        assert convert_varying(BRAIN, value, "x", ()).values.tolist() == bits
        two = convert_varying(BRAIN, [value, value[:0]], "x", (2,))
        assert listed(two) == [bits, []]
    wide = Field((None, 2), "float32", max_length=4)
    assert convert_varying(wide, numbers, "x", ()).values.tolist() == [[1.0, 2.0]]
    joined = mr.Ragged(numbers, torch.tensor([0, 1, 1]))
    assert listed(convert_varying(wide, joined, "x", (2,))) == [[[1.0, 2.0]], []]
    assert listed(convert_varying(BRAIN, joined, "x", (2,))) == [bits, []]


@pytest.mark.parametrize(
    ("field", "value", "lead", "message"),
    [
        (
            TOKENS,
            [1] * 6,
            (),
            r"field 'x' must have at most 5 items, got 6\. Shorten the value, or "
            "declare a larger max_length",
        ),
        (TOKENS, [[1], [1] * 7], (2,), "field 'x', value 1 must have at most 5 items, got 7"),
        (
            TOKENS,
            [[[1], [2]], [[1], [1] * 7]],
            (2, 2),
            "field 'x', step 1, value 1 must have at most 5 items, got 7",
        ),
        (TOKENS, np.zeros((2, 6), np.int32), (2,), "field 'x' must have at most 5 items, got 6"),
        (TEXT, "ääääX", (), r"must have at most 8 bytes, got 9\. .* declare a larger max_bytes"),
        (TEXT, ["a", "b" * 9], (2,), "field 'x', value 1 must have at most 8 bytes"),
        (BLOB, b"b" * 9, (), "field 'x' must have at most 8 bytes, got 9"),
        (TEXT, b"ab\xff", (), "field 'x' must be UTF-8, got .*: invalid start .* 2"),
        (TEXT, "a\ud800", (), "field 'x' must be UTF-8, .*: surrogates not .* 1"),
        (
            TEXT,
            ["a", "\ud800"],
            (2,),
            r"field 'x', value 1 must be UTF-8, .* character 0\. Fix it, or .*\.bytes",
        ),
        (TEXT, ["a", b"\xff"], (2,), "field 'x', value 1 must be UTF-8"),
        (
            TEXT,
            np.array([[65, 66], [67, 200]], np.uint8),
            (2,),
            "field 'x', value 1 must be UTF-8, .*: unexpected end of data at byte 1",
        ),
        (
            TEXT,
            mr.Ragged(np.array([65, 200], np.uint8), np.array([0, 1, 2])),
            (2,),
            "field 'x', value 1 must be UTF-8",
        ),
        (
            BLOB,
            "text",
            (),
            "field 'x' must be bytes of at most 8 bytes, got 'text'. Pass bytes, such",
        ),
        (TEXT, None, (), "must be text of at most 8 bytes, got None. Pass a str.$"),
        (BLOB, None, (), "must be bytes of at most . bytes, got None. Pass bytes.$"),
        (BLOB, "ab", (), r"got 'ab'. Pass bytes, such as text.encode\(\).$"),
        (TOKENS, {1, 2}, (), r"must be int32\[up to 5\], got \{1, 2\}. Pass an array"),
        (TEXT, 7, (), r"must be text of at most 8 bytes, got 7\. Pass a str"),
        (TOKENS, 7, (), r"up to 5\], got 7\. Pass its items in a list, such as \[7\]"),
        (BLOB, [1, 256], (), r"'x': uint8 must be 0 to 255, got 256\. Pass bytes\."),
        (
            CLOUD,
            np.zeros((4, 2), np.float32),
            (),
            r"field 'x' must be float32\[up to 4, 3\], got float32\[4, 2\]\. Only the "
            "first axis varies",
        ),
        (CLOUD, 1.0, (), r"\[up to 4, 3\], got 1\.0\. Only the first axis varies"),
        (CLOUD, [np.zeros((1, 3)), np.zeros(3)], (2,), r"x', value 1 .* float64\[3\]"),
        (CLOUD, [[[1, 2]], []], (2,), r"value 0 must be float32\[up to 4, 3\], got"),
        (TOKENS, [[1, [2]]], (1,), "'x' must be an array of numbers, got list"),
        (TOKENS, [1.5], (), r"field 'x' must be int32\[1\], got float64\[1\]\. Roun"),
        (TOKENS, [[1], [1.5]], (2,), r"field 'x', value 1 must be int32\[1\], got float64\[1\]"),
        (TOKENS, [2**31], (), "field 'x': int32 must be -2147.* to .* got 2147483648"),
        (TOKENS, "12", (), "field 'x' must be .*, got '12'"),
        (
            TOKENS,
            [[1], [2], [3]],
            (2,),
            r"^field 'x' must have 2 values, got 3\. Give one for each environment, in",
        ),
        (TOKENS, ["a", "b"], (1,), "^field 'x' must have 1 value, got 2. Give one for"),
        (
            TOKENS,
            [[[1], [2]], [[2]]],
            (2, 2),
            "^field 'x', step 1 must have 2 values, got 1. Give one for each env",
        ),
        (
            TEXT,
            ["a", "b"],
            (2, 2),
            "^field 'x', step 0 must have 2 values, got 'a'. Give one for each env",
        ),
        (
            TOKENS,
            [[[1], [2]]],
            (2, 2),
            "field 'x' must have 2 steps, got 1. Give one for each step, in a list",
        ),
        (TEXT, "ab", (2,), "field 'x' must have 2 values, got 'ab'"),
        (
            TOKENS,
            np.zeros((3, 2), np.int32),
            (2,),
            r"^field 'x' must be \[2\] values of int32\[up to 5\], got int32\[3, 2\].",
        ),
        (
            CLOUD,
            np.zeros((2, 4, 2), np.float32),
            (2,),
            r"must be float32\[up to 4, 3\], got float32\[8, 2\]",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(field, value, lead, message):
    with pytest.raises(SchemaError, match=message):
        convert_varying(field, value, "x", lead)


@pytest.mark.parametrize(
    ("ragged", "message"),
    [
        (mr.Ragged(np.arange(3), np.array([0, 3])), r"of shape \[2\], got \[1\]"),
        (mr.Ragged(np.arange(3), np.array([0, 2, 4])), "rise from 0 to 3"),
        (mr.Ragged(np.arange(3), np.array([0, 4, 3])), "rise from 0 to 3"),
        (mr.Ragged(np.arange(3), np.array([1, 2, 3])), "rise from 0 to 3"),
        (mr.Ragged(np.arange(3), np.array([0.0, 2, 3])), "offsets must be int64"),
        (mr.Ragged(np.zeros((3, 1)), np.array([0, 2, 3])), r"got float64\[3, 1\]"),
        (mr.Ragged(np.zeros(3), np.array([0, 2, 3])), r"got float64\[3\]\. Round it"),
        (mr.Ragged(np.arange(7), np.array([0, 1, 7])), "value 1 must have at most 5"),
    ],
)
def test_ragged_values_are_checked(ragged, message):
    with pytest.raises(SchemaError, match=f"field 'x'.*{message}"):
        convert_varying(TOKENS, ragged, "x", (2,))


@pytest.mark.parametrize(
    ("field", "value", "axes"),
    [
        (TEXT, "abc", 0),
        (TEXT, ["abc"], 1),
        (TEXT, (["a"], ["b"]), 2),
        (TEXT, np.array(["a", "b"]), 1),
        (TEXT, np.array("a"), 0),
        (TOKENS, [], 0),
        (TOKENS, [[]], 1),
        (TOKENS, [[], [1]], 1),
        (TOKENS, [[[]], [[1]]], 2),
        (CLOUD, [], 0),
        (CLOUD, [[1, 2, 3]], 0),
        (CLOUD, [[], [[1, 2, 3]]], 1),
        (CLOUD, [np.zeros((1, 3)), np.zeros((0, 3))], 1),
        (CLOUD, torch.zeros(2, 4, 3), 1),
        (TOKENS, 7, 0),
    ],
)
def test_leading_axes_are_counted_in_front_of_the_values(field, value, axes):
    assert leading_axes(field, value) == axes
