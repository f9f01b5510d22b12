"""Values are summed, measured and joined alike by C and by its twin."""

import google_crc32c
import numpy as np
import pytest

ARRAYS = {"list": [[1, 2, 3], [], [4]], "one": [[7]], "none": []}


def cells_of(values, inner=(), dtype=np.int32):
    return [np.asarray(value, dtype).reshape(-1, *inner) for value in values]


def measured(rows, cells, inner=(), maximum=9, dtype=np.int32, kind="array"):
    lengths, addresses = np.full((2, len(cells)), -1)
    done = rows.measure_values(
        tuple(cells), np.ndarray, np.dtype(dtype), inner, maximum, ord(kind[0]), lengths, addresses
    )
    return done, lengths.tolist()


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("make", [list, tuple])
def test_plain_values_are_measured_and_joined(rows, kind, make):
    cells = make(cells_of(ARRAYS[kind]))
    done, lengths = measured(rows, cells)
    assert done is True
    assert lengths == [len(value) for value in ARRAYS[kind]]
    out = np.full(4 * sum(lengths), 9, np.uint8)
    rows.join_values(cells, out)
    assert out.view(np.int32).tolist() == [n for value in ARRAYS[kind] for n in value]


@pytest.mark.parametrize(
    "odd",
    [
        [1, 2],
        (1, 2),
        3,
        None,
        "text",
        np.float32(1),
        np.zeros(2, np.int64),
        np.zeros(2, ">i4"),
        np.zeros((2, 1), np.int32),
        np.zeros((), np.int32),
        np.zeros(8, np.int32)[::2],
        np.zeros(10, np.int32),
        np.ma.zeros(2, np.int32),
    ],
    ids=str,
)
def test_values_that_need_a_look_are_left(rows, odd):
    for at in (0, 1):
        cells = cells_of([[1], [2, 3]])
        cells[at] = odd
        assert measured(rows, cells)[0] is False


@pytest.mark.parametrize(
    ("kind", "cells", "lengths"),
    [
        ("text", ["", "ab", "für"], [0, 2, 4]),
        ("bytes", [b"", b"abc", np.arange(2, dtype=np.uint8)], [0, 3, 2]),
        ("text", ["ab", b"ab"], None),
        ("text", ["ab", "\ud800"], None),
        ("text", ["ab", "0123456789"], None),
        ("text", ["ab", np.zeros(2, np.uint8)], None),
        ("bytes", [b"ab", "ab"], None),
        ("bytes", [b"0123456789"], None),
        ("bytes", [bytearray(2)], None),
        ("\0", [np.zeros(2, np.uint8)], None),
    ],
)
def test_text_and_bytes_are_measured_and_joined(rows, kind, cells, lengths):
    done, found = measured(rows, cells, dtype=np.uint8, kind=kind)
    assert done is (lengths is not None)
    if done:
        assert found == lengths
        out = np.zeros(sum(lengths), np.uint8)
        rows.join_values(cells, out)
        texts = [cell.encode() if kind == "text" else bytes(cell) for cell in cells]
        assert out.tobytes() == b"".join(texts)


def test_items_have_the_shape_of_the_field(rows):
    cells = cells_of([[1, 2, 3, 4], []], (2,), np.float32)
    assert measured(rows, cells, (2,), dtype=np.float32) == (True, [2, 0])
    for inner in ((), (3,), (2, 1), (1,)):
        assert measured(rows, cells, inner, dtype=np.float32)[0] is False


def test_arguments_that_do_not_fit_are_refused(rows):
    cells = cells_of([[1], [2, 3]])
    for other in (np.zeros(1, np.int64), np.zeros(3, np.int64)):
        for arrays in ((other, np.zeros(2, np.int64)), (np.zeros(2, np.int64), other)):
            with pytest.raises(
                ValueError, match=r"measure_values: lengths and addresses must be int"
            ):
                rows.measure_values(
                    tuple(cells), np.ndarray, np.dtype(np.int32), (), 9, ord("a"), *arrays
                )
    for nbytes in (0, 4, 11, 13, 16):
        with pytest.raises(ValueError, match="join_values: out must have the bytes of"):
            rows.join_values(cells, np.zeros(nbytes, np.uint8))
    with pytest.raises(TypeError, match="values must be in a list or tuple"):
        rows.join_values({1: 2}, np.zeros(4, np.uint8))


def test_spans_are_summed_as_by_the_library(rows, rng):
    source = rng.integers(256, size=9000).astype(np.uint8)
    for _ in range(40):
        count = int(rng.integers(9))
        begins = rng.integers(6000, size=count)
        # Around the lengths at which C folds spans side by side.
        sizes = [0, 1, 7, 8, 255, 767, 768, 769, 1536, 2640]
        nbytes = rng.choice(sizes, count) + rng.integers(2, size=count)
        out = np.full(count, 7, np.uint32)
        rows.sum_spans(source, begins, nbytes, out)
        assert out.tolist() == [
            google_crc32c.value(source[begin : begin + size].tobytes()) if size else 0
            for begin, size in zip(begins, nbytes, strict=True)
        ]


@pytest.mark.parametrize(
    ("begin", "size", "sums"),
    [(-1, 2, 2), (0, -1, 2), (15, 2, 2), (17, 0, 2), (1 << 62, 1, 2), (0, 1, 3)],
)
def test_spans_outside_of_the_data_are_not_summed(rows, begin, size, sums):
    out = np.zeros(sums, np.uint32)
    with pytest.raises(ValueError, match="sum_spans: spans must lie inside of data"):
        rows.sum_spans(np.zeros(16, np.uint8), np.array([0, begin]), np.array([3, size]), out)


HEAP, LIMIT = 4096, 1 << 40


def stored(rows, value, head=40, kind="array", inner=(), **changes):
    """The heap head after a value, the mapping and the reference."""
    mapping, reference = bytearray(b"\xee" * 5000), bytearray(16)
    dtype = np.dtype(np.uint8 if kind != "array" else np.int32)
    given = {
        "maximum": 9,
        "code": ord(kind[0]),
        "head": head,
        "size": HEAP,
        "free": LIMIT,
        "mapping": mapping,
        "near": 0,
        "far": HEAP,
        "reference": reference,
    } | changes
    after = rows.store_value(value, np.ndarray, dtype, inner, *given.values())
    return after, mapping, reference


@pytest.mark.parametrize(
    ("value", "kind", "items"),
    [
        (np.arange(3, dtype=np.int32), "array", 3),
        ("für", "text", 4),
        (b"abc", "bytes", 3),
        (np.arange(3, dtype=np.uint8), "bytes", 3),
    ],
)
# The last two would cross the ring's end, and begin behind it.
@pytest.mark.parametrize(
    ("head", "begin"),
    [(0, 0), (40, 40), (8 * HEAP + 8, 8 * HEAP + 8), (HEAP - 2, HEAP), (9 * HEAP - 1, 9 * HEAP)],
)
def test_a_plain_value_is_stored_with_its_reference(rows, value, kind, items, head, begin):
    data = value.encode() if isinstance(value, str) else bytes(memoryview(value))
    after, mapping, reference = stored(rows, value, head, kind)
    assert after == begin + len(data) + -len(data) % 8
    at = begin % HEAP
    assert mapping[at : at + len(data)] == data
    assert set(mapping[:at] + mapping[at + len(data) :]) == {0xEE}
    position, length, crc = np.frombuffer(reference, "<i8,<u4,<u4")[0].tolist()
    assert (position, length, crc) == (begin, items, google_crc32c.value(data))


@pytest.mark.parametrize(
    ("value", "kind"), [(np.zeros(0, np.int32), "array"), ("", "text"), (b"", "bytes")]
)
def test_an_empty_value_takes_no_bytes(rows, value, kind):
    after, mapping, reference = stored(rows, value, kind=kind, reference=bytearray(16))
    assert after == 40
    assert set(mapping) == {0xEE}
    assert bytes(reference) == bytes(16)


@pytest.mark.parametrize(
    ("value", "kind", "changes"),
    [
        (np.zeros(10, np.int32), "array", {}),
        (np.zeros(3, np.int64), "array", {}),
        (np.zeros((3, 1), np.int32), "array", {}),
        (np.zeros(6, np.int32)[::2], "array", {}),
        ([1, 2], "array", {}),
        ("abc", "array", {}),
        ("abc", "bytes", {}),
        (b"abc", "text", {}),
        ("öäüßö", "text", {}),
        ("\ud800", "text", {}),
        (b"0123456789", "bytes", {}),
        (np.zeros(3, np.uint8), "text", {}),
        (np.zeros(3, np.int32), "array", {"code": 0}),
        (np.zeros(3, np.int32), "array", {"free": 48}),
        (np.zeros(3, np.int32), "array", {"near": 48}),
        (np.zeros(3, np.int32), "array", {"far": 48}),
        (np.zeros(3, np.int32), "array", {"size": 8, "far": 8}),
    ],
)
def test_a_value_that_needs_a_look_is_not_stored(rows, value, kind, changes):
    after, mapping, reference = stored(rows, value, kind=kind, **changes)
    assert after == -1
    assert set(mapping) == {0xEE}
    assert bytes(reference) == bytes(16)


@pytest.mark.parametrize(
    "changes",
    [
        {"head": -1},
        {"size": 0},
        {"far": 5001, "size": 1 << 20},
        {"far": HEAP + 1},
        {"reference": bytearray(15)},
        {"inner": [3]},
    ],
)
def test_positions_that_are_in_no_heap_are_refused(rows, changes):
    with pytest.raises(ValueError, match="store_value: the place must be in a heap"):
        stored(rows, np.zeros(3, np.int32), **changes)
