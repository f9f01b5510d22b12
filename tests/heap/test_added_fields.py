"""Fields that vary, added to a ring that has rows: those rows hold empty values."""

import json

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.testing.disks import FaultyDisk, using
from mmreplay.verify import verify_buffer

DATA = "data-000001"
PLAIN = mr.Schema({"a": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})
TEXT = mr.Field.text(max_bytes=30)
POINTS = mr.Field((None, 3), "float32", max_length=5)
STEPS = 50


def fill_plain(buffer, numbers):
    for number in numbers:
        buffer.add({"a": number, "terminated": False})


def fill_text(buffer, numbers):
    for number in numbers:
        buffer.add({"a": number, "terminated": False, "text": f"row {number}"})


@pytest.fixture(params=["memmap", "memory"])
def ring(tmp_path, request):
    """A buffer of 50 rows without a field that varies."""
    path = None if request.param == "memory" else tmp_path / "ring"
    with mr.ReplayBuffer.create(path, PLAIN, 40, engine=request.param, commit_every=None) as buffer:
        fill_plain(buffer, range(STEPS))
        yield buffer


def test_old_rows_of_a_new_text_are_empty(ring):
    ring.add_field("text", TEXT, "", heap_bytes=5000)
    assert ring.metadata.heap_nbytes == 8192
    assert ring.schema.varying == ("text",)
    rows = ring.gather_all()
    assert rows["a"].tolist() == list(range(10, STEPS))
    assert rows["text"].text() == [""] * 40
    fill_text(ring, range(STEPS, STEPS + 10))
    rows = ring.gather_all()
    assert rows["a"].tolist() == list(range(20, STEPS + 10))
    assert rows["text"].text() == [""] * 30 + [
        f"row {number}" for number in range(STEPS, STEPS + 10)
    ]


def test_the_ring_is_of_format_1_1_from_then_on(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "ring", PLAIN, 40) as buffer:
        fill_plain(buffer, range(STEPS))
        before = json.loads((tmp_path / "ring" / "metadata.json").read_text())
        assert before["version"] == [1, 0]
        reader = mr.ReplayBuffer.open(tmp_path / "ring")
        buffer.add_field("text", TEXT, "", heap_bytes="1 MiB")
        after = json.loads((tmp_path / "ring" / "metadata.json").read_text())
        assert after["version"] == [1, 1]
        assert after["features"]["incompat"] == ["heap"]
        assert after["heap_bytes"] == 1 << 20
        fill_text(buffer, [STEPS])
        # A reader that was open goes on with the new generation.
        assert reader.take(0, [STEPS])["text"].text() == [f"row {STEPS}"]
        reader.close()
    assert verify_buffer(tmp_path / "ring").ok
    with mr.ReplayBuffer.open(tmp_path / "ring", "r+") as buffer:
        fill_text(buffer, range(STEPS + 1, STEPS + 100))
        assert buffer.gather_all()["text"].text()[0] == f"row {STEPS + 60}"
    assert verify_buffer(tmp_path / "ring").ok


def test_a_second_field_needs_no_heap_bytes_but_those_of_its_rows(tmp_path):
    with mr.ReplayBuffer.create(
        tmp_path / "ring", PLAIN.with_field("text", TEXT), 40, heap_bytes=4096
    ) as buffer:
        fill_text(buffer, range(30))
        buffer.add_field("points", POINTS, [])
        assert buffer.metadata.heap_nbytes == 4096
        rows = buffer.gather_all()
        assert rows["text"].text() == [f"row {number}" for number in range(30)]
        assert rows["points"].lengths.tolist() == [0] * 30
        assert rows["points"].values.shape == (0, 3)
        longer = mr.Field((None,), "int64", max_length=1000)
        with pytest.raises(SchemaError, match="heap_bytes must be at least 32768 for"):
            buffer.add_field("longer", longer, [])
        assert buffer.schema.varying == ("text", "points")
        buffer.add_field("longer", longer, [], heap_bytes="64 KiB")
        assert buffer.metadata.heap_nbytes == 65536
        buffer.add(
            {
                "a": 30,
                "terminated": True,
                "text": "last",
                "points": np.ones((2, 3)),
                "longer": np.arange(1000),
            }
        )
        row = buffer.take(0, [30])
        assert row["longer"][0].tolist() == list(range(1000))
    assert verify_buffer(tmp_path / "ring").ok


@pytest.mark.parametrize(
    ("field", "fill", "match"),
    [
        (TEXT, "x", r"fill of field 'more', which varies, must be empty, got 'x'. Pas"),
        (mr.Field.bytes(9), b"x", r"must be empty, got b'x'\. Pass b''\."),
        (POINTS, np.ones((1, 3)), r"must be empty, got .* Pass \[\]\."),
        (POINTS, 3.0, r"field 'more' must"),
        (TEXT, None, r"field 'more' must be text"),
    ],
)
def test_old_rows_take_no_value_of_a_field_that_varies(ring, field, fill, match):
    with pytest.raises(SchemaError, match=match):
        ring.add_field("more", field, fill, heap_bytes=8192)
    assert ring.schema == PLAIN
    assert len(ring) == 40


@pytest.mark.parametrize(
    ("heap_bytes", "match"),
    [
        (None, "heap_bytes must be given, as field 'text' varies"),
        ("some", "heap_bytes must be a size such as '1 GiB', got 'some'"),
        (-1, "heap_bytes must be an integer of at least 1, got -1"),
    ],
)
def test_the_first_field_that_varies_needs_heap_bytes(ring, heap_bytes, match):
    with pytest.raises(SchemaError, match=match):
        ring.add_field("text", TEXT, "", heap_bytes=heap_bytes)
    assert ring.schema == PLAIN


def test_heap_bytes_without_a_field_that_varies_are_refused(ring):
    with pytest.raises(SchemaError, match="heap_bytes must be None without a field"):
        ring.add_field("b", mr.Field((), "int8"), 0, heap_bytes="1 MiB")
    assert ring.schema == PLAIN


def test_a_failure_leaves_the_ring_without_the_field(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "ring", PLAIN, 40, commit_every=None) as buffer:
        fill_plain(buffer, range(STEPS))
        full = OSError(28, "No space left on device")
        with using(FaultyDisk(full, names=("truncate",))), pytest.raises(mr.errors.FullError):
            buffer.add_field("text", TEXT, "", heap_bytes=8192)
        assert buffer.schema == PLAIN
        fill_plain(buffer, [STEPS])
        assert len(buffer) == 40
    assert verify_buffer(tmp_path / "ring").ok
