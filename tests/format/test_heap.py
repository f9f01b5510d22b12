"""The bytes of the heap: COMMIT's columns, metadata, where values lie, references."""

import json
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import FormatError, SchemaError
from mmreplay.format import commit, heap
from mmreplay.format import metadata as metadata_file
from mmreplay.format.commit import seal
from mmreplay.ring import Ring
from mmreplay.schema.field import REFERENCE
from tests.format.support import UUID, metadata_of, record_of, schema_of

HEAP_NBYTES = 8192
VARYING = {
    "tokens": mr.Field((None,), "int32", max_length=200),
    "prompt": mr.Field.text(max_bytes=300),
}


def heap_record(heap_heads=(96, 8200), heap_tails=(16, 8), **changes):
    given = {
        "heap_heads": np.array(heap_heads, np.int64),
        "heap_tails": np.array(heap_tails, np.int64),
    }
    return record_of([5, 6], [7, 8], [1, 2], **(given | changes))


def decode(data):
    return commit.decode(bytes(data), UUID, 2, HEAP_NBYTES)


def test_heap_heads_and_tails_stand_behind_the_other_columns():
    data = heap_record().encode()
    columns = np.frombuffer(data, "<i8", 12, 128).reshape(6, 2)
    assert columns[:4].tolist() == [[5, 6], [7, 8], [1, 2], [0, 0]]
    assert columns[4:].tolist() == [[96, 8200], [16, 8]]
    assert not any(data[128 + 48 * 2 : -4])
    record = decode(data)
    assert record.heap_heads.tolist() == [96, 8200]
    assert record.heap_tails.tolist() == [16, 8]
    # The same bytes without a heap end behind the cuts.
    assert record_of([5, 6], [7, 8], [1, 2]).encode()[128:192] == data[128:192]


@pytest.mark.parametrize(("num_envs", "nbytes"), [(1, 4096), (82, 4096), (83, 8192), (168, 12288)])
def test_a_slot_is_the_fewest_pages_that_hold_the_heaps_columns(num_envs, nbytes):
    zeros = np.zeros(num_envs, np.int64)
    record = record_of(zeros, heap_heads=zeros, heap_tails=zeros)
    assert len(record.encode()) == nbytes
    assert commit.record_nbytes(num_envs, HEAP_NBYTES) == nbytes


@pytest.mark.parametrize(
    ("heap_heads", "heap_tails"),
    [
        ((8, 0), (16, 0)),  # tail over head
        ((8, 0), (-8, 0)),
        ((16 + HEAP_NBYTES, 0), (8, 0)),  # more than the heap holds
        ((0, 1 << 62), (0, (1 << 62) - 8)),
        ((0, (1 << 63) - 1), (0, -1)),  # their difference wraps around
        ((0, -(1 << 63)), (0, (1 << 63) - 1)),
        ((12, 0), (8, 0)),  # where no value begins
        ((16, 8), (8, 4)),
    ],
)
def test_a_slot_with_an_impossible_heap_is_void(heap_heads, heap_tails):
    data = bytearray(heap_record(heap_heads, heap_tails).encode())
    seal(data)
    assert decode(data) is None


def test_a_heap_that_is_full_to_the_last_byte_is_valid():
    top = (1 << 62) - 8
    full = heap_record((HEAP_NBYTES, top), (0, top - HEAP_NBYTES))
    assert decode(full.encode()).heap_heads.tolist() == [HEAP_NBYTES, top]


def test_heads_move_to_the_tails_that_passed_them():
    record = replace(heap_record(heap_tails=(104, 8)), tails=np.array([6, 2]))
    emptied = record.with_heads_at_tails()
    assert emptied.heads.tolist() == [6, 6]
    assert emptied.heap_heads.tolist() == [104, 8200]
    assert emptied.limits.tolist() == [7, 8]
    assert decode(emptied.encode()) is not None


# metadata.json


def varying_metadata(**changes):
    given = {"schema": schema_of(**VARYING), "heap_nbytes": HEAP_NBYTES}
    return metadata_of(**(given | changes))


def json_of(metadata):
    value = json.loads(metadata_file.encode(metadata))
    del value["crc32c"]
    return value


def parsed(value):
    body = json.dumps(value, indent=1).encode()[: -len("\n}")] + b",\n "
    data = body + b'"crc32c": "%08x"\n}\n' % google_crc32c.value(body)
    return metadata_file.decode(data, metadata_file.Path("metadata.json"))


def test_metadata_names_the_heap_exactly_where_a_field_varies():
    value = json_of(varying_metadata())
    assert value["version"] == [1, 1]
    assert value["features"]["incompat"] == ["heap"]
    assert value["heap_bytes"] == HEAP_NBYTES
    assert parsed(value) == varying_metadata()
    plain = json_of(metadata_of())
    assert plain["version"] == [1, 0]
    assert plain["features"]["incompat"] == []
    assert "heap_bytes" not in plain


def without(value, key):
    return {name: each for name, each in value.items() if name != key}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda v: without(v, "heap_bytes"), "the feature 'heap'"),
        (lambda v: v | {"features": {"incompat": []}}, "the feature 'heap'"),
        (lambda v: v | {"heap_bytes": HEAP_NBYTES + 8}, "a multiple of 4096, got 8200"),
        (lambda v: v | {"heap_bytes": 4096}, "heap_bytes must be at least 8192"),
        (lambda v: v | {"heap_bytes": "1 GiB"}, "heap_bytes must be an integer in"),
        (lambda v: v | {"heap_bytes": 1 << 61}, "2 heaps of"),
        (lambda v: v | {"heap_bytes": 1 << 63}, "heap_bytes must be an integer in"),
        (lambda v: v | {"schema": v["schema"][:-2]}, "the feature 'heap' exactly where"),
    ],
)
def test_metadata_with_an_impossible_heap_is_refused(change, match):
    value = json_of(varying_metadata())
    with pytest.raises(FormatError, match=match):
        parsed(change(value))


@pytest.mark.parametrize(
    ("heap_nbytes", "match"),
    [
        (0, "heap_bytes must be at least 8192 for this schema, 4 times"),
        (8200, "heap_bytes must be a multiple of 4096, got 8200"),
        (1 << 61, "2 heaps of 2305843009213693952 bytes must take fewer than"),
    ],
)
def test_a_heap_that_cannot_be_is_not_written(heap_nbytes, match):
    with pytest.raises(SchemaError, match=match):
        metadata_file.encode(varying_metadata(heap_nbytes=heap_nbytes))


def test_a_heap_without_a_field_that_varies_is_refused():
    with pytest.raises(SchemaError, match="heap_bytes must be None without a field"):
        metadata_file.encode(metadata_of(heap_nbytes=8192))


def test_the_smallest_heap_holds_four_longest_rows():
    # 200 tokens of 4 bytes and 300 bytes of text, each at a multiple of 8.
    assert schema_of(**VARYING).max_heap_nbytes == 800 + 304
    assert metadata_file.smallest_heap_nbytes(schema_of(**VARYING)) == 8192
    assert metadata_file.smallest_heap_nbytes(schema_of()) == 0


def test_files_have_the_sizes_of_the_format():
    from mmreplay.storage.layout import record_layout

    schema = schema_of(**VARYING)
    layout, ring = record_layout(schema), Ring.sized(48, 2)
    sizes = layout.file_sizes(ring, schema, HEAP_NBYTES)
    assert sizes["heap.bin"] == 2 * HEAP_NBYTES
    assert "heap.bin" not in layout.file_sizes(ring, schema_of())
    # References come first in the record, in the order of the schema.
    offsets = {name: layout.record.fields[name][1] for name in layout.record.names}
    assert offsets["tokens"] == 0
    assert offsets["prompt"] == 16
    assert min(offsets.values()) == 0
    assert layout.record.fields["tokens"][0] == REFERENCE


# Where values lie


def one_by_one(heap_head, sizes, heap_nbytes):
    """The rule of the format, value by value."""
    starts, stops = [], []
    for nbytes in sizes:
        start = -(-heap_head // 8) * 8
        if nbytes and start % heap_nbytes + nbytes > heap_nbytes:
            start = (start // heap_nbytes + 1) * heap_nbytes
        if nbytes:
            heap_head = -(-(start + nbytes) // 8) * 8
        starts.append(start)
        stops.append(heap_head)
    return starts, stops


@given(
    st.integers(0, 1 << 20).map(lambda n: 8 * n),
    st.lists(st.integers(0, 40) | st.just(0), max_size=60),
    st.sampled_from([160, 168, 200, 4096]),
)
def test_values_lie_where_the_rule_says(heap_head, sizes, heap_nbytes):
    starts, stops = heap.lay_out(heap_head, np.array(sizes, np.int64), heap_nbytes)
    expected_starts, expected_stops = one_by_one(heap_head, sizes, heap_nbytes)
    assert stops.tolist() == expected_stops
    for size, start, expected in zip(sizes, starts, expected_starts, strict=True):
        assert not size or start == expected


# Which references are legal


def reference(position, length, crc=0):
    return np.array([(position, length, crc)], REFERENCE)


def is_legal(position, length, crc=0, *, heap_tail=64, heap_head=8192 + 64):
    field = mr.Field((None, 2), "int16", max_length=1000)
    return bool(
        heap.legal(
            reference(position, length, crc),
            field,
            HEAP_NBYTES,
            np.array([heap_tail]),
            np.array([heap_head]),
        )[0]
    )


def test_references_inside_the_heap_are_legal():
    assert is_legal(0, 0)
    assert is_legal(64, 1)
    assert is_legal(64, 1000)
    assert is_legal(8192, 16)  # from the ring's beginning up to the head
    assert is_legal(8184, 2)  # up to the ring's end


@pytest.mark.parametrize(
    ("position", "length", "crc"),
    [
        (0, 0, 1),
        (64, 0, 0),
        (0, 1, 0),
        (56, 1, 0),  # below the tail
        (68, 1, 0),  # no multiple of 8
        (-8, 1, 0),
        (8192, 17, 0),  # beyond the head
        (8184, 3, 0),  # across the ring's end
        (64, 1001, 0),
        (64, 2**32 - 1, 0),
        (2**63 - 8, 1000, 0),
        (-(2**63), 1, 0),
    ],
)
def test_other_references_are_illegal(position, length, crc):
    assert not is_legal(position, length, crc)


def test_a_reference_of_the_longest_value_does_not_wrap():
    field = mr.Field((None, 65_535), "uint8", max_length=2**32 - 1)
    top = (1 << 62) - 8
    references = np.concatenate([reference(top - 8, 2**32 - 1), reference(top, 1)])
    bounds = np.zeros(2, np.int64), np.full(2, top)
    assert not heap.legal(references, field, 1 << 50, *bounds).any()
