"""Bad values, bad heaps and damage: each a named error, after which no row is lost."""

import os
import re
import shutil
from collections import namedtuple

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import CorruptError, SchemaError
from tests.heap.test_stored_values import DATA, FORGED, HEAP_BYTES, filled, forge

SCHEMA = mr.Schema(
    {
        "tokens": mr.Field((None,), "int32", max_length=100, exact=True),
        "points": mr.Field((None, 3), "float32", max_length=10),
        "text": mr.Field.text(max_bytes=50),
        "data": mr.Field.bytes(max_bytes=50),
    }
)


def step(number):
    return {
        "tokens": np.arange(number % 9, dtype=np.int32),
        "points": np.full((number % 3, 3), number, np.float32),
        "text": f"row {number}",
        "data": bytes(number % 7),
    }


def assert_step(buffer, number):
    row = buffer.take(0, [number])
    for path in ("tokens", "points"):
        assert row[path][0].tolist() == step(number)[path].tolist()
    assert row["text"].text() == [f"row {number}"]
    assert row["data"][0].tobytes() == bytes(number % 7)


BAD_VALUES = {
    "too many tokens": ("tokens", np.zeros(101, np.int32), "at most 100 items, got 101"),
    "too long a text": ("text", "x" * 51, "at most 50 bytes, got 51"),
    "too long in bytes alone": ("text", "é" * 26, "at most 50 bytes, got 52"),
    "too much data": ("data", bytes(51), "at most 50 bytes, got 51"),
    "fractions in integers": ("tokens", np.array([0.5]), "int32"),
    "beyond int32": ("tokens", np.array([1 << 40]), "int32"),
    "objects": ("tokens", np.array([object()]), "must be"),
    "text in an array": ("tokens", "a b", "must be"),
    "a number": ("tokens", 3, r"got 3\. Pass its items in a list, such as \[3\]"),
    "another inner shape": ("points", np.zeros((2, 2), np.float32), "Only the first axis"),
    "no UTF-8": ("text", b"ab\xff", r"got b'ab\\xff': invalid start byte at byte 2"),
    "half a surrogate pair": (
        "text",
        "ab\udcff",
        r"must be UTF-8, got 'ab\\udcff': surrogates not allowed at character 2",
    ),
    "text as bytes": ("data", "abc", "must be bytes of at most 50 bytes, got 'abc'"),
    "text in an array of numpy": ("text", np.array("hi"), r"got array.* Pass a str\."),
    "a number as text": ("text", 3, r"at most 50 bytes, got 3\. Pass a str"),
    "a number as bytes": ("data", 3, r"got 3\. Pass bytes\."),
    "none": ("text", None, "must be text of at most 50 bytes, got None"),
}


@pytest.mark.parametrize("bad", BAD_VALUES)
@pytest.mark.parametrize("engine", ["memmap", "zarr", "memory"])
def test_a_bad_value_is_refused_by_name_and_nothing_is_stored(tmp_path, engine, bad):
    path, value, message = BAD_VALUES[bad]
    folder = None if engine == "memory" else tmp_path / "ring"
    with mr.ReplayBuffer.create(
        folder, SCHEMA, 20, engine=engine, heap_bytes=HEAP_BYTES, commit_every=None
    ) as buffer:
        buffer.add(step(0))
        used = buffer.view.heap_used.tolist()
        with pytest.raises(SchemaError, match=f"field '{path}'.*{message}"):
            buffer.add(step(1) | {path: value})
        columns = {name: [step(1)[name], step(2)[name]] for name in SCHEMA.fields}
        columns[path][1] = value
        with pytest.raises(SchemaError, match=f"field '{path}'"):
            buffer.extend(columns)
        assert buffer.heads.tolist() == [1]
        assert buffer.view.heap_used.tolist() == used
        buffer.add(step(1))
        assert_step(buffer, 0)
        assert_step(buffer, 1)


def test_a_heap_full_of_one_environments_rows_takes_none_of_another(tmp_path):
    schema = mr.Schema({"text": mr.Field.text(max_bytes=1000)})
    with mr.ReplayBuffer.create(
        tmp_path / "ring",
        schema,
        100,
        2,
        autoreset="disabled",
        heap_bytes="16 KiB",
        commit_every=None,
    ) as buffer:
        for number in range(150):
            buffer.add({"text": [f"{number:<1000}", str(number)]})
        # Each has a heap of its own: one is full, the other holds its capacity.
        long, short = buffer.span.lengths.tolist()
        assert (16_384 - 2 * 1024) // 1000 <= long <= 16
        assert short == 100
        rows = buffer.gather_all()
        for at, env_id in enumerate(rows.env_ids.tolist()):
            expected = str(rows.positions[at])
            found = rows["text"].text()[at]
            assert found == (expected if env_id else f"{expected:<1000}")
    assert mr.verify_buffer(tmp_path / "ring").ok


def test_a_heap_beyond_memory_is_refused_by_name():
    with pytest.raises(
        MemoryError, match=r"heap_bytes: a heap of 1,125,899,906,842,624 bytes .* less"
    ):
        mr.ReplayBuffer.create(None, SCHEMA, 9, engine="memory", heap_bytes="1 PiB")


@pytest.fixture
def small_disk(monkeypatch):
    """A disk of 1 MiB, of which 300 KiB are free."""
    usage = namedtuple("usage", "total used free")(1 << 20, 724 << 10, 300 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.mark.filterwarnings("ignore::mmreplay.errors.AutoresetWarning")
@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (mr.GroupSampler("promt"), "'promt' is not in the schema.*'prompt'"),
        (mr.GroupSampler("text"), "'text' must be one integer and not mutable"),
        (mr.StalenessSampler("text", 1), "'text' must be one integer and not mutable"),
        (mr.UseCounter(1, mr.GroupSampler("promt")), "'promt' is not in the schema"),
    ],
)
def test_a_sampler_over_a_field_that_is_not_there_is_refused_at_once(tmp_path, sampler, message):
    schema = mr.Schema({"prompt": mr.Field((), "int64"), "text": mr.Field.text(max_bytes=9)})
    options = {"heap_bytes": 4096, "sampler": sampler}
    with pytest.raises(SchemaError, match=message):
        mr.ReplayBuffer.create(tmp_path / "ring", schema, 9, **options)
    assert not (tmp_path / "ring").exists()
    mr.ReplayBuffer.create(tmp_path / "ring", schema, 9, heap_bytes=4096).close()
    for mode in ("r", "r+", "r+"):
        # Nothing is left open, such as the writer's lock.
        with pytest.raises(SchemaError, match=message):
            mr.ReplayBuffer.open(tmp_path / "ring", mode, sampler=sampler)


def refusal(size, maximum, whose=""):
    return (
        re.escape(f"heap_bytes must be at most {maximum}{whose}, as the disk of ")
        + rf"/.* has 1\.00 MiB in all, got {size}\. Pass less: 300\.00 KiB is free\."
    )


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_heaps_larger_than_the_disk_are_refused(tmp_path, small_disk, engine):
    with pytest.raises(SchemaError, match=refusal("1,052,672", "1,048,576")):
        mr.ReplayBuffer.create(
            tmp_path / "new", SCHEMA, 9, engine=engine, heap_bytes=(1 << 20) + 4096
        )
    match = refusal("524,288", "348,160", " for each of 3 environments")
    with pytest.raises(SchemaError, match=match):
        mr.ReplayBuffer.create(
            tmp_path / "new",
            SCHEMA,
            9,
            3,
            engine=engine,
            heap_bytes="512 KiB",
            autoreset="disabled",
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("error")
def test_heaps_larger_than_the_free_space_are_made_with_a_warning(tmp_path, small_disk):
    # The file is sparse, and what else the disk holds may go.
    with pytest.warns(mr.FullWarning, match="choose a smaller capacity or heap_bytes"):
        mr.ReplayBuffer.create(tmp_path / "ring", SCHEMA, 9, heap_bytes="1 MiB").close()


def test_no_other_call_makes_a_heap_larger_than_the_disk(tmp_path, small_disk):
    plain = mr.Schema({"number": mr.Field((), "int64")})
    match = refusal("2,097,152", "1,048,576")
    with mr.ReplayBuffer.create(tmp_path / "ring", plain, 9) as buffer:
        buffer.add(number=1)
        with pytest.raises(SchemaError, match=match):
            buffer.add_field("text", mr.Field.text(max_bytes=9), "", heap_bytes="2 MiB")
        buffer.add_field("text", mr.Field.text(max_bytes=9), "", heap_bytes="4 KiB")
        buffer.add(number=2, text="two")
        with pytest.raises(SchemaError, match=match):
            buffer.resize(9, heap_bytes="2 MiB")
        buffer.resize(20)
        assert buffer.gather_all()["text"].text() == ["", "two"]
        mr.export(buffer, tmp_path / "a.npz")
    with pytest.raises(SchemaError, match=match):
        mr.load(tmp_path / "a.npz", tmp_path / "new", heap_bytes="2 MiB")
    assert not (tmp_path / "new").exists()


def test_a_disk_that_does_not_say_how_large_it_is_takes_any_heap(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(0, 0, 1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    mr.ReplayBuffer.create(tmp_path / "ring", SCHEMA, 9, heap_bytes="2 MiB").close()


def test_no_row_is_larger_than_the_heap_allows(tmp_path):
    """A heap holds four longest rows at least, also after a resize."""
    with mr.ReplayBuffer.create(
        tmp_path / "ring", mr.Schema({"text": mr.Field.text(max_bytes=5000)}), 10, heap_bytes=20_480
    ) as buffer:
        for number in range(30):
            buffer.add(text=f"{number:<5000}")
        match = "heap_bytes must be at least 20480 for this schema, 4 times the longest"
        with pytest.raises(SchemaError, match=match):
            buffer.resize(10, heap_bytes="16 KiB")
        assert buffer.get_field("text", 0, [29]).text() == [f"{29:<5000}"]


def wrapped(path):
    """The path of a closed ring whose heap began anew, and its live heap positions."""
    buffer = filled(path, steps=150)
    commit = buffer._files.commit
    bounds = int(commit.heap_tails[0]), int(commit.heap_heads[0])
    buffer.close()
    return bounds


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_reference_across_the_rings_end_is_damage(tmp_path, mode):
    tail, head = wrapped(tmp_path / "ring")
    across = head // HEAP_BYTES * HEAP_BYTES - 8
    assert tail <= across < across + 40 <= head
    row = 140 % mr.ReplayBuffer.open(tmp_path / "ring").slots
    forge(tmp_path / "ring", row, (across, 10, 0))
    match = r"field 'tokens' is damaged in position 140 of environment 0: its reference"
    with mr.ReplayBuffer.open(tmp_path / "ring", mode) as buffer:
        with pytest.raises(CorruptError, match=match):
            buffer.take(0, [140])
        assert len(buffer.take(0, [139])) == 1
    [finding] = [
        each for each in mr.verify_buffer(tmp_path / "ring").findings if each.kind == "value"
    ]
    assert "position 140: its reference does not lead to a value" in finding.message


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_reference_into_another_environment_is_damage(tmp_path, mode):
    buffer = mr.ReplayBuffer.create(
        tmp_path / "ring",
        mr.Schema({"text": mr.Field.text(max_bytes=900)}),
        50,
        2,
        autoreset="disabled",
        heap_bytes=HEAP_BYTES,
        commit_every=None,
    )
    for number in range(3):
        buffer.add({"text": [f"{number} of one", f"{number} of two"]})
    buffer.close()
    # The values of the second one begin where the first heap ends.
    forge(tmp_path / "ring", 1, (HEAP_BYTES, 8, 0))
    with mr.ReplayBuffer.open(tmp_path / "ring", mode) as buffer:
        env_id, position = (0, 1) if buffer.layout == "env_major" else (1, 0)
        match = f"field 'text' is damaged in position {position} of environment {env_id}"
        with pytest.raises(CorruptError, match=match):
            buffer.gather_all()
        assert buffer.get_field("text", 1 - env_id, [2]).text() == [
            f"2 of {'two' if env_id == 0 else 'one'}"
        ]


def test_a_heap_that_was_replaced_is_damage_wherever_values_are_checked(tmp_path):
    filled(tmp_path / "ring").close()
    heap = tmp_path / "ring" / DATA / "heap.bin"
    heap.write_bytes(os.urandom(HEAP_BYTES))
    match = "its value differs from its checksum. Restore the buffer"
    for mode in ("r", "r+"):
        with (
            mr.ReplayBuffer.open(tmp_path / "ring", mode, check_values=True) as buffer,
            pytest.raises(CorruptError, match=match),
        ):
            buffer.sample(8)
    found = mr.verify_buffer(tmp_path / "ring").findings
    assert {finding.kind for finding in found} == {"value"}
    assert len(found) == 30


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_reference_costs_its_row_alone_in_a_repair(tmp_path, forged):
    filled(tmp_path / "ring").close()
    forge(tmp_path / "ring", 12, FORGED[forged])
    sums = tmp_path / "ring" / DATA / "sums.bin"
    sums.write_bytes(bytes(sums.stat().st_size))
    made = mr.repair(tmp_path / "ring", keep_unproven=True)
    assert made.cuts == (mr.DroppedRows(0, 12, 13, "value"),)
    assert mr.verify_buffer(made.target).findings == ()
